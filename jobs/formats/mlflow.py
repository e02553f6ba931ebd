"""MLflow traces: one row a trace, with request, response and spans inside (`search_traces`, Trace.to_json).

Names: mlflow/entities/trace.py `to_pandas_dataframe_row`; spans of MLflow 3 (`attributes` with JSON-encoded
`mlflow.spanType`, `mlflow.spanInputs`, `mlflow.spanOutputs`) and 2 (`span_type`, `inputs`, `outputs`).
Previews of request and response are cut short and are not read.
"""

from collections.abc import Iterator
from typing import Any

from jobs.formats.attributes import COLUMNS, as_list, as_object, attributes, first, span_fields, span_ids
from jobs.formats.json_text import embedded
from jobs.formats.labels import identifier, parse_time
from jobs.formats.paths import Row, paths
from jobs.formats.spans import Kind, Span, System

_KINDS: dict[str, Kind] = {
    "retriever": "retriever",
    "reranker": "reranker",
    "llm": "llm",
    "chat_model": "llm",
    "embedding": "step",
    "tool": "step",
    "parser": "step",
    "memory": "step",
    "evaluator": "ignored",
    "guardrail": "ignored",
}  # CHAIN, AGENT, WORKFLOW, UNKNOWN may be roots
_OF = "__mlflow_trace__"  # the trace that a span came with
_TRACE_ID = paths("trace_id", "info.trace_id", "request_id", "info.request_id")
_APP = paths(
    *("tags.app", "info.tags.app", "tags.mlflow.traceName", "info.tags.mlflow.traceName"),
    *("experiment_id", "info.experiment_id", "info.trace_location.mlflow_experiment.experiment_id"),
)
_MODEL = paths("mlflow.llm.model", "mlflow.chat.model", "llm.model_name", "gen_ai.request.model")


def _recognises(keys: frozenset[str]) -> bool:
    if {"info", "data.spans"} <= keys:
        return True
    marked = {"spans.start", "spans.end"} <= keys  # spans of characters: a labelled answer
    whole = {"spans", "request", "response"} <= keys and bool({"trace_id", "request_id"} & keys)
    return whole and not marked


def _expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    data = as_object(row.get("data"))
    spans = as_list(row.get("spans", data.get("spans")))
    spans = [embedded(span) if isinstance(span, str) else span for span in spans]
    spans = [span for span in spans if isinstance(span, dict)]
    trace_id = first(Row(row), _TRACE_ID) or next((span_ids(Row(span))[0] for span in spans), None)
    held = {name: value for name, value in row.items() if name not in ("spans", "data", "trace", _OF)}
    data = {name: value for name, value in data.items() if name != "spans"}
    yield {**held, "trace_id": trace_id, "data": data}
    yield from ({**span, _OF: trace_id} for span in spans)


def _read(values: dict[str, Any]) -> Span:
    return _read_span(values) if _OF in values else _read_trace(values)


def _read_trace(values: dict[str, Any]) -> Span:
    row = Row(values)
    metadata = {**as_object(first(row, paths("trace_metadata", "info.trace_metadata", "request_metadata")))}
    metadata["state"] = first(row, paths("state", "info.state", "status"))
    return Span(
        kind="trace",
        trace_id=identifier(first(row, _TRACE_ID)),
        start=parse_time(
            first(row, paths("request_time", "info.request_time", "timestamp_ms", "info.timestamp_ms"))
        ),
        input=first(row, paths("request", "data.request")),
        output=first(row, paths("response", "data.response")),
        labels={"app": first(row, _APP), "prompt_version": first(row, paths("tags.prompt_version"))},
        metadata=metadata,
    )


def _read_span(values: dict[str, Any]) -> Span:
    row, fields = attributes(values), span_fields(values)
    # In MLflow 3 every attribute is JSON text, a name too: "\"RETRIEVER\"".
    stated = first(row, paths("mlflow.spanType", "span_type"))
    stated = embedded(stated) or stated if isinstance(stated, str) else stated
    kind = _KINDS.get(str(stated).lower(), "chain")
    outputs = first(row, paths("mlflow.spanOutputs", "outputs"))
    return Span(
        kind=kind,
        **fields | {"trace_id": identifier(values[_OF]) or fields["trace_id"]},
        input=first(row, paths("mlflow.spanInputs", "inputs")),
        output=outputs,
        documents=outputs if kind in ("retriever", "reranker") else None,
        labels={"model": _plain(first(row, _MODEL)) if kind == "llm" else None},
    )


def _plain(value: Any) -> Any:
    return embedded(value) or value if isinstance(value, str) else value


SYSTEM = System(
    recognises=_recognises,
    expand=_expand,
    read=_read,
    columns=COLUMNS
    | {
        "request_id",
        "request_time",
        "request",
        "response",
        "spans",
        "tags",
        "trace_metadata",
        "state",
        "status",
    }
    | {"info", "data", "experiment_id", "timestamp_ms", "request_metadata"},
)
