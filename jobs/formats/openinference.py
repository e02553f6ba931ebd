"""OpenInference spans: Phoenix exports (JSON lines, data-frame Parquet), OTel SDK and collector (OTLP) files.

Attributes may be nested (`{"input": {"value": ...}}`), flattened (`input.value`,
`retrieval.documents.0.document.content`), prefixed with `attributes.`, or JSON text. Names: OpenInference
semantic conventions (spec/semantic_conventions.md); columns: phoenix/trace/trace_dataset.py.
"""

from typing import Any

from jobs.formats.attributes import COLUMNS, as_object, attributes, first, items_at, service, span_fields
from jobs.formats.paths import paths
from jobs.formats.spans import Kind, Span, System

_KINDS: dict[str, Kind] = {
    "retriever": "retriever",
    "reranker": "reranker",
    "llm": "llm",
    "embedding": "step",
    "tool": "step",
    "prompt": "step",
    "guardrail": "ignored",
    "evaluator": "ignored",
}  # CHAIN, AGENT, UNKNOWN and what is still to come may be roots
_KIND = paths("openinference.span.kind", "span_kind")
_INPUT = paths("input.value")
_OUTPUT = paths("output.value")
_MODEL = paths("llm.model_name", "embedding.model_name")
_PROMPT_VERSION = paths("llm.prompt_template.version")
_KEPT = ("session.id", "user.id", "tag.tags", "llm.provider", "llm.system")


def _recognises(keys: frozenset[str]) -> bool:
    kinds = {"span_kind", "openinference.span.kind", "attributes.openinference.span.kind"}
    return bool(kinds & keys) and bool({"trace_id", "context.trace_id"} & keys)


def _read(values: dict[str, Any]) -> Span:
    row = attributes(values)
    kind = _KINDS.get(str(first(row, _KIND)).lower(), "chain")
    inputs, outputs = first(row, _INPUT), first(row, _OUTPUT)
    documents = None
    if kind == "retriever":
        documents = items_at(row, "retrieval.documents") or outputs
    elif kind == "reranker":
        documents = items_at(row, "reranker.output_documents") or outputs
        inputs = first(row, paths("reranker.query")) or inputs
    elif kind == "llm":
        inputs = items_at(row, "llm.input_messages") or inputs
        outputs = items_at(row, "llm.output_messages") or outputs
    kept = {key: first(row, paths(key)) for key in _KEPT}
    return Span(
        kind=kind,
        **span_fields(values),
        input=inputs,
        output=outputs,
        documents=documents,
        labels={
            "app": service(values, row),
            "model": first(row, _MODEL) if kind == "llm" else None,
            "prompt_version": first(row, _PROMPT_VERSION),
        },
        metadata={**kept, **as_object(first(row, paths("metadata")))},
    )


SYSTEM = System(
    recognises=_recognises,
    read=_read,
    columns=COLUMNS
    | {"input", "output", "retrieval", "reranker", "llm", "embedding", "openinference", "metadata"}
    | {"session", "user", "tag"},
)
