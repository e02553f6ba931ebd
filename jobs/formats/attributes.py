"""Spans of OpenTelemetry as exporters write them: attributes nested, flattened, as JSON text or as pairs."""

from collections.abc import Iterator, Sequence
from typing import Any

from jobs.formats.json_text import embedded
from jobs.formats.labels import identifier, parse_time
from jobs.formats.paths import Path, Row, paths

TRACE_ID = paths("context.trace_id", "trace_id", "trace.trace_id")
SPAN_ID = paths("context.span_id", "span_id", "trace.span_id")
PARENT_ID = paths(
    *(
        "parent_id",
        "parent_span_id",
        "parent_span_context.span_id",
        "trace.parent_id",
        "record.parent_span_id",
    )
)
START = paths("start_time", "start_time_unix_nano", "start_timestamp", "start_time_ns", "timestamp")
END = paths("end_time", "end_time_unix_nano", "end_time_ns")
SERVICE = paths("service.name", "openinference.project.name", "project_name")

COLUMNS = frozenset(
    (
        "name kind span_kind context trace_id span_id parent_id parent_span_id parent_span_context "
        "start_time start_time_unix_nano start_time_ns start_timestamp end_time end_time_unix_nano "
        "end_time_ns timestamp attributes span_attributes resource resource_attributes trace record "
        "resource_spans project_name service service_name"
    ).split()
)
"""First names of the columns that hold the above."""

_DEEPEST = 12


def first(row: Row, candidates: Sequence[Path]) -> Any:
    """The first value that is there, or None."""
    return next((found.value for found in map(row.find, candidates) if found is not None), None)


def span_ids(row: Row) -> tuple[str | None, str | None, str | None]:
    """trace_id, span_id and parent_id as text; a parent of zeros is none."""
    trace, span, parent = (identifier(first(row, each)) for each in (TRACE_ID, SPAN_ID, PARENT_ID))
    is_none = parent is not None and not parent.removeprefix("0x").strip("0")
    return trace, span, None if is_none else parent


def span_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Ids, times and name of one span, as the fields of a Span."""
    ids = Row(values)
    trace_id, span_id, parent_id = span_ids(ids)
    name = values.get("name")
    return {
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": parent_id,
        "start": parse_time(first(ids, START)),
        "updated": parse_time(first(ids, END)),
        "name": name if isinstance(name, str) else None,
    }


def service(values: dict[str, Any], row: Row) -> Any:
    """What logged the span, as its resource says, or its attributes (`row`)."""
    return first(resource(values), SERVICE) or first(row, SERVICE)


def attributes(values: dict[str, Any]) -> Row:
    """The attributes of one span; names in the row itself count, with `attributes.` before them or not."""
    held: dict[str, Any] = {}
    for name in ("attributes", "span_attributes", "SpanAttributes"):
        held |= as_object(values.get(name))
    for name, value in values.items():
        if isinstance(name, str) and name.startswith("attributes.") and value is not None:
            held[name.removeprefix("attributes.")] = value
    return Row({**{name: value for name, value in values.items() if isinstance(name, str)}, **held})


def resource(values: dict[str, Any]) -> Row:
    """What the exporter says about the process: `service.name` and the like."""
    inner = as_object(values.get("resource"))
    held = {**inner, **as_object(inner.get("attributes"))}
    for name in ("resource_attributes", "ResourceAttributes", "resourceAttributes"):
        held |= as_object(values.get(name))
    for name, value in values.items():
        if isinstance(name, str) and name.startswith("resource.attributes.") and value is not None:
            held[name.removeprefix("resource.attributes.")] = value
    return Row(held)


def as_object(value: Any) -> dict[str, Any]:
    """An object, a string that holds one, or a list of {key, value}: as an object; anything else as {}."""
    if isinstance(value, str):
        value = embedded(value)
    if isinstance(value, list):
        pairs = [pair for pair in value if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
        return {pair["key"]: _any_value(pair.get("value"), _DEEPEST) for pair in pairs}
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """A list, or a string that holds one, as it is; anything else as []."""
    value = embedded(value) if isinstance(value, str) else value
    return value if isinstance(value, list) else []


def items_at(row: Row, path: str) -> Any:
    """The list at `path`, also where it is an object with numbered keys or flattened to `path.0.name`."""
    found = row.find(tuple(path.split(".")))
    if found is not None and not (isinstance(found.value, dict) and _numbered(found.value)):
        return found.value
    if found is not None:
        return _in_order({int(key): value for key, value in found.value.items()})
    items: dict[int, Any] = {}
    for name, value in row.values.items():
        if not name.startswith(f"{path}.") or value is None:
            continue
        index, _, rest = name[len(path) + 1 :].partition(".")
        if not _is_index(index):
            continue
        if rest:
            item = items.setdefault(int(index), {})
            if isinstance(item, dict):
                item[rest] = value
        else:
            items[int(index)] = value
    return _in_order(items) or None


def envelope(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of an OTLP export (`resourceSpans`), each with its resource, or of an object that holds
    nothing but spans; any other row as it is.
    """
    groups = values.get("resourceSpans", values.get("resource_spans"))
    if not isinstance(groups, list):
        spans = values.get("spans")
        yield from spans if len(values) == 1 and _are_objects(spans) else [values]
        return
    for group in filter(_is_object, groups):
        scopes = next((group[name] for name in _SCOPES if isinstance(group.get(name), list)), [])
        for scope in filter(_is_object, scopes):
            for span in filter(_is_object, as_list(scope.get("spans"))):
                yield {**span, "resource": group.get("resource")}


_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")


def _any_value(value: Any, depth: int) -> Any:
    """The value in OTLP's `{"stringValue": ...}`."""
    if not isinstance(value, dict) or not depth:
        return None if isinstance(value, dict) else value
    for name, inner in value.items():
        kind = str(name).replace("_", "").lower()
        if kind in ("stringvalue", "boolvalue", "doublevalue", "intvalue", "bytesvalue"):
            return inner
        held = inner.get("values") if isinstance(inner, dict) else None
        if isinstance(held, list) and kind == "arrayvalue":
            return [_any_value(each, depth - 1) for each in held]
        if isinstance(held, list) and kind == "kvlistvalue":
            pairs = [pair for pair in held if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
            return {pair["key"]: _any_value(pair.get("value"), depth - 1) for pair in pairs}
    return None


def _numbered(value: dict[str, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and _is_index(key) for key in value)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _in_order(items: dict[int, Any]) -> list[Any]:
    return [items[index] for index in sorted(items)]


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
