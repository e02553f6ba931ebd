"""Langfuse exports: tables observations_v2, observations and traces, and trace JSON with observations inside.

Names in snake case (exports) or camel case (API). Inputs and outputs are strings that may hold JSON, "" is
null. Windows of an export overlap by their bounds, so a row may come twice: within a file it counts once.
Over two files the second answer of a trace is a `duplicate`, and a lone retrieval of it a `missing_answer`. A
row of the table `traces` folds with observations of the same file; alone it is an answer without passages
(`no_passages`): point the audit at the observations. Rows of `scores` are other spans.
"""

import re
from collections.abc import Iterator
from typing import Any

from jobs.formats.attributes import as_list, as_object, first
from jobs.formats.json_text import embedded
from jobs.formats.labels import identifier, parse_time
from jobs.formats.messages import role_of
from jobs.formats.paths import Row, paths
from jobs.formats.spans import Kind, Span, System

_KINDS: dict[str, Kind] = {
    "retriever": "retriever",
    "generation": "llm",
    "embedding": "step",
    "tool": "step",
    "event": "step",
    "evaluator": "ignored",
    "guardrail": "ignored",
}  # SPAN, AGENT, CHAIN may be roots
_MODEL = paths("provided_model_name", "model")
_KEPT = ("session_id", "user_id", "environment", "release", "version", "prompt_name", "tags")


def _recognises(keys: frozenset[str]) -> bool:
    inside = {"observations.trace_id", "observations.parent_observation_id", "trace.observations"}
    if inside & keys or {"trace_id", "parent_observation_id"} <= keys:
        return True
    trace = {"id", "input", "output", "session_id", "user_id", "bookmarked", "public"}
    score = {"id", "trace_id", "observation_id", "string_value", "data_type", "value"}
    return trace <= keys or score <= keys


def _expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The trace and the observations in it; they may stand beside it, in it, or in both."""
    trace = as_object(row.get("trace")) or row
    lists = [as_list(each.get("observations")) for each in ([row] if trace is row else [row, trace])]
    observations = [item for each in lists for item in each if isinstance(item, dict)]
    whole = {name: value for name, value in trace.items() if name != "observations"}
    if not observations:
        yield whole
        return
    trace_id = trace.get("id")
    if trace_id is not None or trace.get("input") or trace.get("output"):
        yield {**whole, "id": trace_id or first(Row(observations[0]), paths("trace_id"))}
    for observation in observations:
        inherited = {} if first(Row(observation), paths("trace_id")) else {"trace_id": trace_id}
        yield {**observation, **inherited}


def _read(values: dict[str, Any]) -> Span:
    row = Row(values)
    trace_id = identifier(first(row, paths("trace_id")))
    is_trace = trace_id is None and not row.has("parent_observation_id") and not row.has("type")
    name = first(row, paths("name"))
    metadata = as_object(first(row, paths("metadata")))
    inputs, outputs = (_filled(first(row, paths(path))) for path in ("input", "output"))
    kind: Kind = "trace" if is_trace else _kind(row, name, outputs)
    return Span(
        kind=kind,
        trace_id=identifier(first(row, paths("id"))) if is_trace else trace_id,
        span_id=None if is_trace else identifier(first(row, paths("id"))),
        parent_id=None if is_trace else identifier(first(row, paths("parent_observation_id"))),
        start=parse_time(first(row, paths("start_time", "timestamp"))),
        updated=parse_time(first(row, paths("updated_at"))),
        name=name if isinstance(name, str) else None,
        input=inputs,
        output=outputs,
        documents=outputs if kind in ("retriever", "reranker") else None,
        labels={
            "app": first(row, paths("trace_name")) or (name if is_trace else None),
            "model": first(row, _MODEL) if kind == "llm" else None,
            "prompt_version": first(row, paths("prompt_version")),
        },
        metadata={
            **{key: first(row, paths(key)) for key in _KEPT},
            **{key: value for key, value in metadata.items() if not isinstance(value, (dict, list))},
        },
    )


def _kind(row: Row, name: Any, outputs: Any) -> Kind:
    """By type; before RETRIEVER was one, retrievers were SPANs, told by name and by what they return."""
    if row.has("data_type") and row.has("observation_id"):
        return "step"  # a score
    stated = str(first(row, paths("type"))).lower()
    kind = _KINDS.get(stated, "chain")
    named = name if isinstance(name, str) else ""
    if kind == "llm" or not re.search("rerank|retriev", named, re.IGNORECASE):
        return kind
    if kind == "retriever" or holds_documents(outputs):
        return "reranker" if re.search("rerank", named, re.IGNORECASE) else "retriever"
    return kind


def _filled(value: Any) -> Any:
    """Langfuse writes empty strings for null."""
    return None if value in ("", "null", "{}", "[]") else value


def holds_documents(value: Any) -> bool:
    """Whether an output is a list of documents: objects with a text that nobody speaks."""
    value = embedded(value) if isinstance(value, str) else value
    value = value.get("documents", value.get("output")) if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return False
    rows = [Row(item) for item in value]
    if any(role_of(row) is not None for row in rows):
        return False
    texts = paths("page_content", "text", "content", "document", "node.text")
    return all(any(row.find(path) is not None for path in texts) for row in rows)


SYSTEM = System(
    recognises=_recognises,
    expand=_expand,
    read=_read,
    columns=frozenset(
        "id trace_id traceId parent_observation_id type name input output start_time timestamp updated_at "
        "metadata trace_name provided_model_name model prompt_version session_id user_id environment release "
        "version prompt_name tags observation_id data_type observations trace".split()
    ),
)
