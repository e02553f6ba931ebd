"""A finished OUT without a scorer: tables, profile.json and run.json as a real run would leave them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from detector.calibration import Reference, Scale
from jobs.commit import Run
from jobs.config import Config
from jobs.parts import put_table
from jobs.storage import Storage, join
from jobs.summary import Tally, write_summary
from jobs.tables import FEATURES, FINDINGS_RESPONSES, MEASURED_RESPONSES, REJECTS, findings_sentences

RUN_ID = "3f9a1c77b2e0"
DATE = "2026-11-29"
LOG = "/logs/2026-11-29/support.jsonl"
BUNDLE = {
    "digest": "b0b1b2b3b4b5",
    "method": "ensemble",
    "data": "Made-Up QA, English",
    "limits": "It learned <b>nothing</b>.",
    "operating_points": [[0.02, 0.8], [0.05, 0.6]],
}
METHODS = ("blend", "gasp", "jsd_none", "gap", "perplexity", "length")


@dataclass
class Said:
    """One sentence with its score, and the passage (and the piece of it) that it rests on."""

    text: str
    score: float
    evidence: int | None = None
    drop: float = 0.8
    piece: str | None = None  # None: the whole passage
    after: str = " "


@dataclass
class Answer:
    """One audited answer."""

    said: Sequence[Said]
    passages: Sequence[str | dict[str, Any]] = ("The warranty lasts two years.",)
    question: str = "How long is the warranty?"
    response_id: str | None = "r-1"
    trace_id: str | None = None
    date: str = DATE
    dimensions: dict[str, str | None] = field(default_factory=dict)
    n_windows: int = 1
    truncated: bool = False


@dataclass
class Reject:
    """One row that was not audited."""

    reason: str
    detail: str = "no such field"
    path: str = LOG
    position: int | None = 4711
    response_id: str | None = None
    dimensions: dict[str, str | None] = field(default_factory=dict)


def write_fake_run(
    out: str,
    answers: Sequence[Answer] = (),
    rejects: Sequence[Reject] = (),
    *,
    threshold: float | None = 2.0,
    threshold_from: str = RUN_ID,
    store_text: bool = True,
    settings: dict[str, Any] | None = None,
    files: Sequence[dict[str, Any]] | None = None,
    per_part: int = 7,
    bundle: bool = False,
) -> Config:
    """Write OUT and return its settings; answers go into parts of `per_part`, a `bundle` decided or not."""
    methods = ("ensemble", *METHODS) if bundle else METHODS
    storage = Storage()
    config = Config.model_validate(settings or {})
    tally = Tally()
    for unit, start in enumerate(range(0, len(answers), per_part)):
        for date in sorted({answer.date for answer in answers}):
            chunk = [answer for answer in answers[start : start + per_part] if answer.date == date]
            if chunk:
                _write_unit(
                    storage, out, date, f"{unit:06d}", chunk, threshold or 0.0, store_text, tally, methods
                )
    if rejects:
        rows = [
            _ids(reject, DATE)
            | {"path": reject.path, "position": reject.position}
            | {"reason": reject.reason, "detail": reject.detail}
            for reject in rejects
        ]
        table = pa.Table.from_pylist(rows, schema=REJECTS)
        put_table(storage, out, "measurements/rejects", DATE, "000000", table)
        nothing = FINDINGS_RESPONSES.empty_table(), findings_sentences(METHODS).empty_table()
        tally.add(*nothing, table)
    write_summary(out, storage, tally.table(RUN_ID))
    n = sum(len(answer.said) for answer in answers)
    scales = {name: Scale(0.8, 0.5) for name in FEATURES}
    scorer = ("smollm2-135m", "5a1f00c2d9e4", "plain", config.loo)
    reference = Reference(
        RUN_ID, *scorer, n, len(answers), scales, scales, "blend", threshold, threshold_from, 0.1
    )
    if bundle:
        reference = replace(
            reference,
            deciding_method="ensemble",
            threshold_from=f"bundle {BUNDLE['digest']}",
            flag_budget=None,
            target_fpr=0.05,
            bundle=BUNDLE["digest"],
        )
        config = config.resolved(BUNDLE["digest"], reads_attention=True)
    storage.write(join(out, "profile.json"), reference.to_json().encode())
    run = Run(
        run_id=RUN_ID,
        date=DATE,
        started_at=f"{DATE}T02:00:00+00:00",
        leadline_version="0.1.0",
        logs=["/logs/2026-11-29"],
        files=list(files if files is not None else [_file(LOG, 48_211), _file("/logs/empty.jsonl", 0)]),
        n_units=1,
        config=config.model_dump(mode="json"),
        measured_by={},
        scorer={
            "name": "smollm2-135m",
            "fingerprint": "5a1f00c2d9e4",
            "window_tokens": 8192,
            "dtype": "float32",
            "reads_attention": True,
        }
        | ({"bundle": BUNDLE} if bundle else {}),
        versions={"python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0", "ray": "2.60.0"},
    )
    storage.write(join(out, "run.json"), json.dumps(asdict(run)).encode())
    return config


def _write_unit(
    storage: Storage,
    out: str,
    date: str,
    unit: str,
    answers: Sequence[Answer],
    threshold: float,
    store_text: bool,
    tally: Tally,
    methods: tuple[str, ...],
) -> None:
    responses, sentences, measured = [], [], []
    for index, answer in enumerate(answers):
        passages = [{"text": p} if isinstance(p, str) else p for p in answer.passages]
        text, position = "".join(said.text + said.after for said in answer.said), 0
        scores = [said.score for said in answer.said]
        worst = scores.index(max(scores)) if scores else None
        for number, said in enumerate(answer.said):
            evidence = None if said.evidence is None else passages[said.evidence]
            row = _ids(answer, date) | {
                "sentence_index": number,
                "start": position,
                "end": position + len(said.text),
                "text": said.text if store_text else None,
                "n_tokens": max(len(said.text) // 4, 1),
                "truncated": False,
                "n_windows": answer.n_windows,
                "score": said.score,
                "threshold": threshold,
                "flagged": said.score >= threshold,
                "evidence_passage_index": said.evidence,
                "evidence_passage_id": evidence and evidence.get("id"),
                "evidence_drop_nats": None if evidence is None else said.drop,
                "evidence_text": (said.piece or evidence["text"]) if evidence and store_text else None,
                "name": "leadline.ungrounded",
                "label": "flagged" if said.score >= threshold else "not_flagged",
                "explanation": "",
                "annotator_kind": "CODE",
            }
            spread = {
                "blend": 1.0,
                "gasp": 0.7,
                "gap": 0.41,
                "jsd_none": 0.33,
                "perplexity": 0.2,
                "length": -0.1,
            }
            row |= {f"score_{name}": said.score * spread.get(name, 1.0) for name in methods}
            if "ensemble" in methods:
                row |= {"ensemble_states": 1.4, "ensemble_attention": said.score, "ensemble_likelihood": -0.3}
            sentences.append(row)
            position += len(said.text) + len(said.after)
        counted = {
            "n_sentences": len(scores),
            "n_passages": len(passages),
            "n_context_tokens": sum(len(p["text"]) // 4 for p in passages),
            "n_answer_tokens": len(text) // 4,
            "truncated": answer.truncated,
            "n_windows": answer.n_windows,
        }
        n_flagged = sum(score >= threshold for score in scores)
        responses.append(
            _ids(answer, date)
            | counted
            | {
                "n_flagged": n_flagged,
                "flagged": n_flagged > 0,
                "score_max": max(scores, default=None),
                "score_mean": sum(scores) / len(scores) if scores else None,
                "worst_sentence_index": worst,
            }
        )
        measured.append(
            _ids(answer, date)
            | counted
            | {
                "path": LOG,
                "position": index,
                "record_index": index,
                "question": answer.question if store_text else None,
                "answer": text if store_text else None,
                "passages": passages if store_text else None,
                "n_computed_tokens": 1,
            }
        )
    tables = {
        "findings/responses": pa.Table.from_pylist(responses, schema=FINDINGS_RESPONSES),
        "findings/sentences": pa.Table.from_pylist(sentences, schema=findings_sentences(methods)),
        "measurements/responses": pa.Table.from_pylist(measured, schema=MEASURED_RESPONSES),
    }
    for kind, table in tables.items():
        put_table(storage, out, kind, date, unit, table)
    tally.add(tables["findings/responses"], tables["findings/sentences"], REJECTS.empty_table())


def _ids(row: Answer | Reject, date: str) -> dict[str, Any]:
    return {
        "run_id": RUN_ID,
        "date": date,
        "response_id": row.response_id,
        "trace_id": getattr(row, "trace_id", None),
        **row.dimensions,
    }


def _file(url: str, size: int) -> dict[str, Any]:
    return {"url": url, "size": size, "etag": f"{size}-1764370000", "format": "jsonl", "compression": None}
