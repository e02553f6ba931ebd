"""Which tracing system wrote a file, told from the keys of its first rows, and the systems that are known."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from jobs.formats import genai, langfuse, langsmith, mlflow, openinference, trulens
from jobs.formats.aliases import ANSWER_NAMES, PASSAGE_NAMES
from jobs.formats.attributes import as_object, envelope
from jobs.formats.csv_table import DELIMITERS
from jobs.formats.json_document import rows_of
from jobs.formats.json_text import BOM, loads
from jobs.formats.paths import snake
from jobs.formats.spans import System

SYSTEMS: dict[str, System] = {
    "trulens": trulens.SYSTEM,
    "langsmith": langsmith.SYSTEM,
    "langfuse": langfuse.SYSTEM,
    "mlflow": mlflow.SYSTEM,
    "openinference": openinference.SYSTEM,
    "genai": genai.SYSTEM,
}
"""By the name that `--format` takes, in the order in which they are tried."""

_LOOKED_AT = 20  # rows
_MOST_KEYS = 2000
_DEEPEST = 6
_TEXT_ATTRIBUTES = ("attributes", "span_attributes", "record_attributes")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)
_CLOSING = {b"{": b"}", b"[": b"]"}


def recognise(rows: Iterable[dict[str, Any]]) -> str | None:
    """The system that most of these rows are of; None: rows of one answer each.

    Spans that tell nothing about a system (an HTTP call among LLM spans) have no say.
    """
    votes: Counter[str | None] = Counter()
    for row in rows:
        keys = keys_of(row)
        # A whole answer may carry the ids and attributes of its span; it is not the span.
        whole = not keys.isdisjoint(PASSAGE_NAMES) and not keys.isdisjoint(ANSWER_NAMES)
        names = () if whole else SYSTEMS
        name = next((name for name in names if SYSTEMS[name].recognises(keys)), None)
        if name is not None or not _is_span(keys):
            votes[name] += 1
    return votes.most_common(1)[0][0] if votes else None


def recognise_text(head: bytes, form: str) -> str | None:
    """The same from the decompressed beginning of a file: `jsonl`, `json` or `csv`."""
    head = head.removeprefix(BOM)
    match form:
        case "csv":
            rows = [dict.fromkeys(_header(head))]
        case "json":
            document = begun(head)
            rows = [] if document is None else [row for row in rows_of(document) if isinstance(row, dict)]
        case _:
            rows = list(_lines(head))
    return recognise([part for row in rows[:_LOOKED_AT] for part in _some(row)])


def recognise_schema(schema: pa.Schema) -> str | None:
    """The same from the columns of a Parquet file."""
    return recognise([{name: _fields(schema.field(i).type) for i, name in enumerate(schema.names)}])


def keys_of(row: dict[str, Any]) -> frozenset[str]:
    """The dotted paths to everything in a row, in snake case; of a list the first object counts."""
    keys: set[str] = set()
    left: list[tuple[str, Any, int]] = [("", row, 0)]
    while left and len(keys) < _MOST_KEYS:
        path, value, depth = left.pop()
        if isinstance(value, list):
            pairs = as_object(value) if path in _TEXT_ATTRIBUTES else {}
            value = pairs or next((item for item in value[:_LOOKED_AT] if isinstance(item, dict)), None)
        elif path in _TEXT_ATTRIBUTES:
            value = as_object(value)
        if not isinstance(value, dict) or depth > _DEEPEST:
            continue
        for name, inner in value.items():
            if isinstance(name, str) and len(name) <= 200:
                below = f"{path}.{snake(name)}" if path else snake(name)
                keys.add(below)
                left.append((below, inner, depth + 1))
    return frozenset(keys)


def begun(text: bytes) -> Any:
    """The JSON value that `text` begins with, up to the last item that is whole; None where there is none."""
    stack: list[bytes] = []
    end, closers = 0, b""
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark == b'"':  # a string that does not end
            break
        if mark in (b"{", b"["):
            stack.append(_CLOSING[mark])
            if len(stack) > 50:
                break
        elif mark in (b"}", b"]"):
            if not stack or stack.pop() != mark:
                break
            end, closers = token.end(), b"".join(reversed(stack))
        elif mark == b",":
            end, closers = token.start(), b"".join(reversed(stack))
        if end and not stack:
            break
    try:
        return loads(text[:end] + closers)
    except ValueError:
        return None


def _is_span(keys: frozenset[str]) -> bool:
    return bool({"trace_id", "context.trace_id"} & keys and {"span_id", "context.span_id"} & keys)


def _some(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for _, part in zip(range(_LOOKED_AT), envelope(row), strict=False):
        yield part


def _lines(head: bytes) -> Iterator[dict[str, Any]]:
    *lines, rest = head.split(b"\n")
    for line in lines[:_LOOKED_AT]:
        try:
            row = loads(line.strip()) if line.strip() else None
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
    row = begun(rest) if not lines else None
    if isinstance(row, dict):
        yield row


def _header(head: bytes) -> list[str]:
    line = head.lstrip().partition(b"\n")[0].decode(errors="replace")
    try:
        rows = [next(csv.reader(io.StringIO(line), delimiter=delimiter), []) for delimiter in DELIMITERS]
    except csv.Error:
        return []
    return max(rows, key=len)


def _fields(kind: pa.DataType) -> Any:
    """A nested type as the object that its values are, with None for what is no object."""
    tree: dict[str, Any] = {}
    left: list[tuple[dict[str, Any], str, pa.DataType, int]] = [(tree, "", kind, 0)]
    while left:
        holder, name, each, depth = left.pop()
        while pa.types.is_list(each) or pa.types.is_large_list(each):
            each = each.value_type
        inner: dict[str, Any] | None = {} if pa.types.is_struct(each) and depth < _DEEPEST else None
        holder[name] = inner
        if inner is not None:
            left += [
                (inner, each.field(i).name, each.field(i).type, depth + 1) for i in range(each.num_fields)
            ]
    return tree[""]
