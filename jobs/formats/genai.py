"""OpenTelemetry GenAI spans, as SDKs, collectors (OTLP JSON) and trace tables write them.

Names: open-telemetry/semantic-conventions-genai (all "Development"). `gen_ai.retrieval.documents` need not
hold text: ids alone are `passage_text_missing`. Messages must be on the spans; where an SDK logs them as
events of their own (the logs signal), the spans hold no answer.
"""

from typing import Any

from jobs.formats.attributes import COLUMNS, attributes, first, items_at, service, span_fields
from jobs.formats.paths import Row, paths
from jobs.formats.spans import Kind, Span, System

_KINDS: dict[str, Kind] = {
    "retrieval": "retriever",
    "rerank": "reranker",
    "chat": "llm",
    "text_completion": "llm",
    "generate_content": "llm",
    "embeddings": "step",
    "execute_tool": "step",
}  # invoke_agent, create_agent and spans of other kinds (HTTP) may be roots
_MODEL = paths("gen_ai.response.model", "gen_ai.request.model")
_KEPT = (
    *("gen_ai.provider.name", "gen_ai.system", "gen_ai.conversation.id", "gen_ai.agent.name"),
    *("gen_ai.prompt.name", "gen_ai.response.id"),
)


def _recognises(keys: frozenset[str]) -> bool:
    operation = {
        "gen_ai.operation.name",
        "attributes.gen_ai.operation.name",
        "span_attributes.gen_ai.operation.name",
    }
    return bool(operation & keys) and bool({"trace_id", "context.trace_id"} & keys)


def _read(values: dict[str, Any]) -> Span:
    row = attributes(values)
    kind = _KINDS.get(str(first(row, paths("gen_ai.operation.name"))).lower(), "chain")
    return Span(
        kind=kind,
        **span_fields(values),
        input=first(row, paths("gen_ai.retrieval.query.text")) or _messages(row, "input", "prompt"),
        output=_messages(row, "output", "completion"),
        documents=items_at(row, "gen_ai.retrieval.documents") if kind in ("retriever", "reranker") else None,
        labels={
            "app": service(values, row),
            "model": first(row, _MODEL) if kind == "llm" else None,
            "retriever": first(row, paths("gen_ai.data_source.id")),
            "prompt_version": first(row, paths("gen_ai.prompt.version")),
        },
        metadata={key: first(row, paths(key)) for key in _KEPT},
    )


def _messages(row: Row, side: str, older: str) -> Any:
    """`gen_ai.input.messages`, or the names that were used before it."""
    return items_at(row, f"gen_ai.{side}.messages") or items_at(row, f"gen_ai.{older}")


SYSTEM = System(
    recognises=_recognises,
    read=_read,
    columns=COLUMNS | {"gen_ai"},
)
