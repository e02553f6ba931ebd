"""Write spans, read them the way a worker does, look at the traces that came out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jobs.formats import Accepted, Incomplete, Reject, read_unit
from jobs.formats.attributes import envelope
from jobs.formats.spans import Span, read_traces, without_repeats
from jobs.formats.systems import SYSTEMS
from jobs.formats.trace import fold_trace
from tests.jobs.formats.reading import STORAGE, settings, to_bytes, units_of

MOSS = "Moss grows on the north side of many trees in damp woods."
FERN = "Ferns reproduce with spores that ripen under their leaves."


def read_spans(
    folder: Path, rows: list[Any], system: str, name: str = "spans.jsonl", fields: Any = None, **options: Any
) -> tuple[list[Accepted | Reject], Counter[str]]:
    """The outcomes of one file of rows, recognised as `system`, and what its spans were."""
    path = folder / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows[0] if len(rows) == 1 else rows))
    else:
        path.write_bytes(b"".join(to_bytes(row) + b"\n" for row in rows))
    return read_file(path, system, fields, **options)


def read_file(
    path: Path, system: str, fields: Any = None, **options: Any
) -> tuple[list[Accepted | Reject], Counter[str]]:
    config = settings(fields, **options)
    (unit,) = units_of(path, config)
    assert unit.system == system
    counts: Counter[str] = Counter()
    return list(read_unit(unit, STORAGE, config, counts)), counts


def only_record(outcomes: tuple[list[Accepted | Reject], Counter[str]]) -> Any:
    (row,), _ = outcomes
    assert isinstance(row, Accepted), row
    return row.record


def only_reject(outcomes: tuple[list[Accepted | Reject], Counter[str]]) -> Reject:
    (row,), _ = outcomes
    assert isinstance(row, Reject), row
    return row


def texts(record: Any) -> list[str]:
    return [passage.text for passage in record.passages]


def hostile(names: list[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Rows with the system's own keys and anything under them."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    telling = st.sampled_from(
        [
            *"abc",
            "RETRIEVER",
            "LLM",
            "retriever",
            "llm",
            "chat",
            '[{"page_content": "p"}]',
            '{"a": [1]}',
            "[]",
        ]
    )
    values = st.recursive(
        scalars | telling,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=3)
        ),
        max_leaves=12,
    )
    rows = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), values, max_size=len(names))
    return st.lists(rows, max_size=8)


def check_conservation(rows: list[dict[str, Any]], system: str) -> None:
    """Every trace is a row or among the others, with all of its spans; rows keep the file's order."""
    traces: dict[Any, list[Span]] = {}
    for position, values in enumerate(rows):
        for number, part in enumerate(envelope(values)):
            for raw in SYSTEMS[system].expand(part):
                span = SYSTEMS[system].read(raw)
                traces.setdefault(span.group or span.trace_id or (position, number), []).append(span)
    counts: Counter[str] = Counter()
    outcomes = list(read_traces(enumerate(rows), SYSTEMS[system], {}, settings().read, counts))
    assert counts["traces"] == len(outcomes) == len(traces) - counts["other_traces"]
    assert counts["spans"] == sum(map(len, traces.values()))
    kept = [without_repeats(spans) for spans in traces.values()]
    assert counts["repeated_spans"] == counts["spans"] - sum(map(len, kept))
    others = [spans for spans in kept if fold_trace(spans, {}) is None]
    assert counts["other_spans"] == sum(map(len, others))
    assert all(isinstance(outcome, (dict, Incomplete)) for _, outcome in outcomes)
    positions = [position for position, _ in outcomes]
    assert positions == sorted(positions)


def check_reading(rows: list[dict[str, Any]], system: str, folder: Path) -> None:
    """The same through a file: never an exception, and read = records + rejects."""
    path = folder / "hostile.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    config = settings(format=system)
    (unit,) = units_of(path, config)
    counts: Counter[str] = Counter()
    outcomes = list(read_unit(unit, STORAGE, config, counts))
    n_broken = sum(isinstance(row, Reject) and row.reason == "malformed_row" for row in outcomes)
    assert len(outcomes) - counts["traces"] in range(n_broken + 1)
    check_conservation(rows, system)
