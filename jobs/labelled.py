"""Labelled answers: rows that also say which characters rest on nothing, measured and ready to learn from.

A row is a log row of JSONL, JSON or Parquet with, beside it, `spans` ([{start, end}], code points into the
answer), and where it has them `source_id`, `quality`, `task`, `model`, `language`. Answers without a
`source_id` that share question and passages count as one source.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from detector.aggregate import sentence_tokens
from detector.heads import Labelled
from detector.lumina import pick_foil
from detector.probe import Keep
from detector.prompts import read_record
from detector.record import Record
from detector.words import word_features
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.formats import Accepted, read_rows, read_unit
from jobs.listing import cut, freeze
from jobs.storage import Storage, mask
from jobs.traces import TraceStore, trace_key

log = logging.getLogger("leadline")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """One answer and what people said about it."""

    record: Record
    spans: tuple[Span, ...]
    """Unsupported text, code points into the answer, end exclusive."""
    source_id: str
    generator: str
    task: str
    language: str
    quality: str
    """`good`, or why the answer should stay out of headline figures."""


def read_labelled(logs: Sequence[str], config: Config) -> list[LabelledRecord]:
    """Every labelled row of `logs` in listing order. Raises ConfigError where a row has no usable label."""
    storage = Storage(config.storage)
    found = []
    rejects: Counter[str] = Counter()
    for unit in cut(freeze(logs, storage, config.read), storage, config.read):
        raw = read_rows(unit, storage, config)
        for (position, values), row in zip(raw, read_unit(unit, storage, config), strict=True):
            if isinstance(row, Accepted):
                found.append(_labelled(row.record, values, f"{row.path}, position {position}"))
            else:
                rejects[row.reason] += 1
    if rejects:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejects.items()))
        log.warning(
            "%d of %d labelled rows cannot be read and are left out: %s; `leadline plan` says where and why",
            rejects.total(),
            rejects.total() + len(found),
            reasons,
        )
    if not found:
        raise ConfigError(f"{', '.join(map(mask, logs))}: no labelled answer there")
    return found


def pick(records: Iterable[LabelledRecord], per_source: int | None) -> list[list[LabelledRecord]]:
    """Answers by source, at most `per_source` of each, chosen and ordered by a hash of their ids.

    Only good ones, where a source has any; one that has none keeps its others, so that no source is lost
    without a word.
    """
    sources: dict[str, list[LabelledRecord]] = {}
    for record in records:
        sources.setdefault(record.source_id, []).append(record)
    chosen = []
    for source in sorted(sources, key=lambda s: _digest(f"source {s}")):
        answers = sorted(sources[source], key=lambda r: _digest(f"answer {r.record.response_id}"))
        good = [answer for answer in answers if answer.quality == "good"]
        chosen.append((good or answers)[:per_source])
    return chosen


def measure_labelled(
    groups: Iterable[Sequence[LabelledRecord]],
    scorer: Any,
    store: TraceStore,
    keep: Keep,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Labelled], list[LabelledRecord]]:
    """Measure what `store` does not hold yet, and label tokens and sentences.

    The answers of a group share what their prompts share (but for `keep.foil`, which takes the passages of
    another of these records, and each answer on its own). A record that cannot be read is left out (an audit
    would list it as a reject). A record in several windows is learned from in its first. The second list
    holds the record behind each example.
    """
    examples: list[Labelled] = []
    answers: list[LabelledRecord] = []
    groups = list(groups)
    pool = [answer.record for group in groups for answer in group]
    for n_done, group in enumerate(groups):
        if on_progress is not None:
            on_progress(n_done, len(groups))
        readable = [answer for answer in group if scorer.can_read(answer.record)]
        keys = [trace_key(answer.record, scorer, keep) for answer in readable]
        traces = {key: store.get(key, keep) for key in keys}
        missing = [i for i, key in enumerate(keys) if traces[key] is None]
        if missing:
            records = [readable[i].record for i in missing]
            read = (
                [scorer.trace(record, keep, foil=pick_foil(record, pool, 0)) for record in records]
                if keep.foil
                else scorer.trace_together(records, keep)
            )
            for i, (_, measured) in zip(missing, read, strict=True):
                store.put(keys[i], measured)
                # What is learned from is what the next call will find: earlier numbers stay what they were.
                traces[keys[i]] = store.get(keys[i], keep)
        for key, answer in zip(keys, readable, strict=True):
            examples.append(label(answer, traces[key][0], scorer))  # type: ignore[index]
            answers.append(answer)
    return examples, answers


def label(answer: LabelledRecord, trace: Any, scorer: Any) -> Labelled:
    """Sentences and labels of one measured answer. Either is unsupported where it overlaps a span."""
    record = answer.record
    reading = read_record(record, scorer.tokenizer, scorer.profile, scorer.window_tokens)
    members = sentence_tokens(reading, record.answer)
    marked = np.zeros(len(record.answer) + 1, dtype=bool)
    for start, end in answer.spans:
        marked[start:end] = True
    before = np.concatenate([[0], np.cumsum(marked)])
    starts, ends = trace.offsets[:, 0], trace.offsets[:, 1]
    texts = [passage.text for passage in record.passages]
    words = word_features(record.answer, trace.offsets, texts, record.question)
    return Labelled(
        trace=replace(trace, words=words),
        sentences=tuple(members.values()),
        token_labels=before[ends] > before[starts],
        sentence_labels=np.array([marked[slice(*reading.sentences[i])].any() for i in members], dtype=bool),
        label=bool(answer.spans),
        source_id=answer.source_id,
        generator=answer.generator,
        task=answer.task,
        language=answer.language,
    )


def _labelled(record: Record, values: Any, where: str) -> LabelledRecord:
    spans = values.get("spans")
    if not isinstance(spans, list):
        raise ConfigError(f"{where}: no list of `spans`; a labelled row needs one (empty = all supported)")
    length = len(record.answer)
    pairs = []
    for span in spans:
        start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= length:
            raise ConfigError(f"{where}: a span must be {{start, end}} with 0 <= start < end <= {length}")
        pairs.append((start, end))
    source = values.get("source_id")
    if source in (None, ""):
        source = _digest("\0".join([record.question, *(p.text for p in record.passages)]))
    return LabelledRecord(
        record=record,
        spans=tuple(pairs),
        source_id=str(source),
        generator=record.model or "",
        task=str(values.get("task") or ""),
        language=record.language or "",
        quality=str(values.get("quality") or "good"),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
