"""Spans to records: all spans of one trace become one row, whatever system logged them.

A row of a span file is a *trace*: one record, or one reject that says what it lacks. `position` is that of
the first of its spans. Spans of traces with neither retrieval nor answer (health checks, embeddings,
evaluations) are no rows: they are counted as other spans and reported, and nothing of them is rejected. A
line that cannot be parsed is a row of its own, a reject, because nobody can say whose it was.

Covered is one file: its spans fold wherever they stand in it, and a span that is there twice counts once. A
file is read whole for that, up to `read.max_file_bytes`, and never cut into units; a larger one is one
reject.

Not covered is a trace that is spread over several files. Each file sees a part of it, and a part without
answer, without retrieval or without root is a reject that names the trace, so no answer is lost silently.
None is judged twice either: all parts have the trace's id as their response id, and of two with one id the
judge keeps the first and counts the other as `duplicate`. What remains: where one file holds root, answer and
*some* of the retrievals, that part looks whole and is audited against the passages it has; the other part is
a reject with the same trace id.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detector.errors import RejectReason
from jobs.config import ReadConfig
from jobs.formats.attributes import envelope
from jobs.formats.outcome import Incomplete, Malformed
from jobs.formats.paths import Path, Row
from jobs.formats.trace import Kind, Span, fold_trace

__all__ = ["Kind", "Span", "System", "read_traces", "too_large", "without_repeats"]


@dataclass(frozen=True, slots=True)
class System:
    """How one system's rows are told and read."""

    recognises: Callable[[frozenset[str]], bool]
    """Whether rows with these keys (snake case, dotted, down to a few levels) are this system's."""
    read: Callable[[dict[str, Any]], Span]
    columns: frozenset[str]
    """First names of the Parquet columns that it needs."""
    expand: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = lambda row: [row]
    """The spans that one row holds; most rows are one."""


def read_traces(
    rows: Iterable[tuple[int, dict[str, Any] | Malformed]],
    system: System,
    fields: Mapping[str, Path],
    read: ReadConfig,
    counts: Counter[str],
) -> Iterator[tuple[int, dict[str, Any] | Malformed | Incomplete]]:
    """The traces of one file as flat rows in our names, in the order of their first spans.

    Adds to `counts`: `spans`, `repeated_spans`, `traces`, `other_spans` and `other_traces` (neither
    retrieval nor answer). Holds the spans in memory, up to about `read.max_file_bytes` of text.
    """
    own: Counter[str] = Counter()  # a file that turns out too large counts for nothing
    traces: dict[tuple[Any, ...], list[Span]] = {}
    places: dict[tuple[Any, ...], int] = {}
    found: list[tuple[int, int, dict[str, Any] | Malformed | Incomplete]] = []
    size = 0
    for position, values in rows:
        if isinstance(values, Malformed):
            found.append((position, len(found), values))
            continue
        size += _weight(values)
        if size > read.max_file_bytes:
            yield 0, too_large(read)
            return
        for number, span in _spans(values, system, fields):
            own["spans"] += 1
            key: tuple[Any, ...] = (span.group or span.trace_id,)
            if key == (None,):
                key = (position, number)  # says of no trace that it is part of it, so its row is one
            traces.setdefault(key, []).append(span)
            places.setdefault(key, position)
    for key, position in places.items():
        spans = traces.pop(key)
        kept = without_repeats(spans)
        own["repeated_spans"] += len(spans) - len(kept)
        try:
            outcome = fold_trace(kept, fields, allow_missing_question=read.allow_missing_question)
        except UnicodeDecodeError:
            outcome = Incomplete(RejectReason.MALFORMED_ROW, "a text of this trace is not UTF-8", {})
        if outcome is None:
            own["other_spans"] += len(kept)
            own["other_traces"] += 1
        else:
            own["traces"] += 1
            found.append((position, len(found), outcome))
    counts.update(own)
    for position, _, outcome in sorted(found, key=lambda each: each[:2]):
        yield position, outcome


def too_large(read: ReadConfig) -> Malformed:
    """What to say about a span file over the limit."""
    return Malformed(
        f"over read.max_file_bytes = {read.max_file_bytes}: a file of spans is read whole, because the spans "
        "of a trace may stand anywhere in it; raise it, or write smaller files, each with whole traces"
    )


def without_repeats(spans: Sequence[Span]) -> list[Span]:
    """Each span once, in file order: the row that was written last, where two have one id."""
    kept: dict[Any, Span] = {}
    for number, span in enumerate(spans):
        key = (span.kind,) if span.kind == "trace" else span.span_id or number
        old = kept.get(key)
        if old is None or old.updated is None or span.updated is None or span.updated >= old.updated:
            kept[key] = span
    return list(kept.values())


def _spans(values: dict[str, Any], system: System, fields: Mapping[str, Path]) -> Iterator[tuple[int, Span]]:
    """The spans of one row, and which of the row's parts each came in."""
    own = {name: path for name, path in fields.items() if not name.startswith("passages.")}
    for number, row in enumerate(envelope(values)):
        for raw in system.expand(row):
            span = system.read(raw)
            if own:
                looked = Row(raw)
                there = {name: looked.find(path) for name, path in own.items()}
                span = replace(span, own={name: each.value for name, each in there.items() if each})
            yield number, span


def _weight(value: Any) -> int:
    """About how many bytes of JSON a parsed value was. No recursion: its depth is the log's choice."""
    total, left = 0, [value]
    while left:
        each = left.pop()
        total += 8
        if isinstance(each, (str, bytes)):
            total += len(each)
        elif isinstance(each, dict):
            left += each.values()
            total += sum(len(key) for key in each if isinstance(key, str))
        elif isinstance(each, list):
            left += each
    return total
