"""Measured rows to findings: what a reader is shown about each sentence and each answer of one unit and date.

Tables come in sorted: responses by `record_index`, sentences by `record_index` and `sentence_index`.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from detector.errors import RejectReason
from jobs.errors import JobError
from jobs.storage import mask
from jobs.tables import FINDINGS_RESPONSES, REJECTS, VERDICT, findings_sentences

Place = tuple[str, int | None]
"""Path and position of a row in the logs."""

F64 = NDArray[np.float64]


def response_rows(responses: pa.Table, sentences: pa.Table) -> NDArray[np.int64]:
    """(n sentences,) row of `responses` that each sentence belongs to. Raises JobError where it has none."""
    owners = responses["record_index"].to_numpy()
    wanted = sentences["record_index"].to_numpy()
    rows = np.searchsorted(owners, wanted)
    if not np.isin(wanted, owners).all():
        raise JobError("measured sentences without their response: the parts of a unit do not fit together")
    return rows


def sentence_findings(
    responses: pa.Table,
    sentences: pa.Table,
    scores: Mapping[str, F64],
    deciding: str,
    threshold: float,
    floor_nats: float,
) -> pa.Table:
    """One finding per measured sentence.

    `scores`: method -> (n sentences,), higher = less grounded; `deciding` names the one that flags, at
    `threshold` or above. A passage counts as evidence when removing it costs the sentence at least
    `floor_nats` per token; else the evidence columns are null.
    """
    schema = findings_sentences(tuple(scores))
    rows = response_rows(responses, sentences)
    dimensions = [name for name in schema.names if name in responses.column_names]
    owners = responses.select(dimensions).take(pa.array(rows))
    columns: dict[str, Any] = {
        name: (sentences if name in sentences.column_names else owners)[name]
        for name in schema.names
        if name in sentences.column_names or name in dimensions
    }
    score = scores[deciding]
    flagged = score >= threshold
    columns |= {f"score_{method}": values for method, values in scores.items()}
    columns |= {"score": score, "threshold": np.full(len(score), threshold), "flagged": flagged}
    columns |= {"label": np.where(flagged, "flagged", "not_flagged").tolist()}
    columns |= _evidence(responses, sentences, rows, floor_nats)
    columns["text"] = [
        None if answer is None else answer[start:end]
        for answer, start, end in zip(
            _spread(responses["answer"], rows),
            sentences["start"].to_pylist(),
            sentences["end"].to_pylist(),
            strict=True,
        )
    ]
    columns["explanation"] = [
        f"{weigh(*verdict)} {explain(*numbers)}" if verdict else explain(*numbers)
        for verdict, *numbers in zip(
            _verdicts(sentences, flagged) if deciding == "ensemble" else [None] * len(score),
            sentences["gap"].to_pylist(),
            sentences["max_drop"].to_pylist(),
            columns["evidence_passage_index"].to_pylist(),
            _spread(responses["n_passages"], rows),
            strict=True,
        )
    ]
    columns["name"] = ["leadline.ungrounded"] * len(score)
    columns["annotator_kind"] = ["CODE"] * len(score)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def response_findings(responses: pa.Table, found: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """One finding per response from its sentence findings; `rows` as `response_rows` gives them.

    The worst sentence is the first of those with the highest score. A response without any sentence is not
    flagged and has no scores.
    """
    score, flagged = found["score"].to_numpy(), found["flagged"].to_numpy()
    index = found["sentence_index"].to_pylist()
    passage = found["evidence_passage_id"].to_pylist()
    judged: defaultdict[str, list[Any]] = defaultdict(list)
    starts = np.searchsorted(rows, np.arange(responses.num_rows + 1))
    for start, stop in pairwise(starts.tolist()):
        part, n_flagged = score[start:stop], int(flagged[start:stop].sum())
        worst = start + int(part.argmax()) if stop > start else None
        judged["n_sentences"].append(stop - start)
        judged["n_flagged"].append(n_flagged)
        judged["flagged"].append(n_flagged > 0)
        judged["score_max"].append(None if worst is None else float(score[worst]))
        judged["score_mean"].append(None if worst is None else float(part.mean()))
        judged["worst_sentence_index"].append(None if worst is None else index[worst])
        judged["worst_passage_id"].append(None if worst is None else passage[worst])
    if not responses.num_rows:
        return FINDINGS_RESPONSES.empty_table()
    columns = {n: judged[n] if n in judged else responses[n] for n in FINDINGS_RESPONSES.names}
    return pa.table(columns, schema=FINDINGS_RESPONSES)


def duplicate_rejects(duplicates: pa.Table, first: Mapping[int, Place]) -> pa.Table:
    """Reject rows for responses that were read before; `first`: record_index -> where that was."""
    details = []
    for record_index in duplicates["record_index"].to_pylist():
        path, position = first[record_index]
        where = "" if position is None else f", position {position}"
        details.append(f"the same response_id was read before: {mask(path)}{where}")
    columns = {name: duplicates[name] for name in REJECTS.names if name in duplicates.column_names}
    columns |= {"reason": [RejectReason.DUPLICATE.value] * len(details), "detail": details}
    return pa.table({name: columns[name] for name in REJECTS.names}, schema=REJECTS)


GROUPS = {
    "states": "what the scorer holds inside while it reads",
    "attention": "where it looks",
    "likelihood": "how likely it finds the words",
}
"""The groups of signals that a trained head adds up, in plain words."""


def heaviest(contributions: Mapping[str, float], flagged: bool) -> str:
    """The group that speaks most for the verdict: the largest sum for a flag, the smallest against one."""
    choose = max if flagged else min
    return choose(contributions, key=lambda group: contributions[group])


def weigh(probability: float, contributions: Mapping[str, float], flagged: bool) -> str:
    """One plain sentence about a verdict: how sure it is, and which group of signals says so most.

    `contributions`: group -> log-odds relative to an average sentence.
    """
    group = heaviest(contributions, flagged)
    says = f"{contributions[group]:+.2f} of log-odds against an average sentence"
    return f"Ungrounded with probability {probability:.2f}, mostly by {GROUPS[group]} ({group}: {says})."


def explain(gap: float, max_drop: float | None, evidence: int | None, n_passages: int) -> str:
    """One plain sentence about what removing passages does to a sentence, in nats per token.

    `evidence` is the index of the passage that counts as evidence, told to the reader as "passage 3 of 5".
    """
    effect = f"{abs(gap):.2f} nats per token {'less' if gap >= 0 else 'more'} likely"
    everything = f"Removing every passage makes this sentence {effect}"
    if max_drop is None:
        return f"{everything}; passages were not removed one at a time."
    if evidence is None:
        return f"{everything}; no single passage matters (largest drop {max_drop:.2f})."
    return f"{everything}; passage {evidence + 1} of {n_passages} matters most (drop {max_drop:.2f})."


def _evidence(
    responses: pa.Table, sentences: pa.Table, rows: NDArray[np.int64], floor_nats: float
) -> dict[str, pa.Array]:
    index = sentences["evidence_passage_index"].combine_chunks()
    drop = sentences["max_drop"].combine_chunks()
    found = pc.and_(pc.is_valid(index), pc.fill_null(pc.greater_equal(drop, floor_nats), False))
    passages = responses["passages"].to_pylist()
    texts = []
    for row, shown, passage, start, end in zip(
        rows.tolist(),
        found.to_pylist(),
        index.to_pylist(),
        sentences["evidence_start"].to_pylist(),
        sentences["evidence_end"].to_pylist(),
        strict=True,
    ):
        stored = shown and passages[row] is not None
        texts.append(passages[row][passage]["text"][start:end] if stored else None)
    return {
        "evidence_passage_id": pc.if_else(
            found, sentences["evidence_passage_id"].combine_chunks(), pa.scalar(None, pa.string())
        ),
        "evidence_passage_index": pc.if_else(found, index, pa.scalar(None, index.type)),
        "evidence_drop_nats": pc.if_else(found, drop, pa.scalar(None, drop.type)),
        "evidence_text": pa.array(texts, pa.string()),
    }


def _verdicts(sentences: pa.Table, flagged: NDArray[np.bool_]) -> list[tuple[float, dict[str, float], bool]]:
    groups = {name.removeprefix("ensemble_"): sentences[name].to_pylist() for name in VERDICT[1:]}
    return [
        (probability, {group: values[row] for group, values in groups.items()}, flag)
        for row, (probability, flag) in enumerate(
            zip(sentences["ensemble"].to_pylist(), flagged.tolist(), strict=True)
        )
    ]


def _spread(column: pa.ChunkedArray, rows: NDArray[np.int64]) -> list[Any]:
    values = column.to_pylist()
    return [values[row] for row in rows]
