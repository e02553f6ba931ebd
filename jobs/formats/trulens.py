"""TruLens OTEL records: event rows with `record_attributes` (JSON, an object, or a Python repr in CSV cells).

Names: trulens docs/otel/semantic_conventions.md. Spans fold by `ai.observability.record_id`, which is one
call of the app, and else by the trace id. Evaluations share the record's id and are ignored.
"""

from typing import Any

from jobs.formats.attributes import COLUMNS, as_object, first, span_ids
from jobs.formats.labels import identifier, parse_time
from jobs.formats.paths import Row, paths
from jobs.formats.spans import Kind, Span, System

_AI = "ai.observability."
_KINDS: dict[str, Kind] = {
    "retrieval": "retriever",
    "reranking": "reranker",
    "generation": "llm",
    "embedding": "step",
    "tool": "step",
    "eval": "ignored",
    "eval_root": "ignored",
    "guardrail": "ignored",
}  # record_root, agent, workflow_step, unknown may be roots
_INPUT = paths(_AI + "record_root.input", _AI + "retrieval.query_text")
_QUERY = paths(*(f"{_AI}call.kwargs.{name}" for name in ("query", "question", "query_str", "input")))
_OUTPUT = paths(_AI + "record_root.output", _AI + "call.return")
_DOCUMENTS = paths(
    *(_AI + "retrieval.retrieved_contexts", _AI + "reranking.contexts", _AI + "reranking.output_documents"),
    *(_AI + "call.return",),
)
_APP = paths(_AI + "app_name", _AI + "app_id")
_KEPT = ("app_version", "run.name", "input_id", "record_root.ground_truth_output")


def _recognises(keys: frozenset[str]) -> bool:
    return "record_attributes" in keys and bool({"record_type", "trace", "event_id", "record"} & keys)


def _read(values: dict[str, Any]) -> Span:
    held = as_object(first(Row(values), paths("record_attributes")))
    row, ids = Row(held), Row(values)
    trace_id, span_id, parent_id = span_ids(ids)
    kind = _KINDS.get(str(first(row, paths(_AI + "span_type"))).lower(), "chain")
    name = first(row, paths("name")) or first(ids, paths("record.name"))
    process = Row(as_object(first(ids, paths("resource_attributes"))))
    model = first(row, paths(_AI + "cost.model"))
    return Span(
        kind=kind,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start=parse_time(first(ids, paths("start_timestamp"))),
        updated=parse_time(first(ids, paths("timestamp"))),
        name=name if isinstance(name, str) else None,
        input=first(row, (*_INPUT, *_QUERY)),
        output=first(row, _OUTPUT),
        documents=first(row, _DOCUMENTS) if kind in ("retriever", "reranker") else None,
        labels={
            "app": first(row, _APP) or first(process, _APP),
            "model": model if kind == "llm" else None,
        },
        metadata={key: first(row, paths(_AI + key)) for key in _KEPT} if kind == "chain" else {},
        group=identifier(first(row, paths(_AI + "record_id"))),
    )


SYSTEM = System(
    recognises=_recognises,
    read=_read,
    columns=COLUMNS | {"record_attributes", "record_type", "event_id"},
)
