"""LangSmith runs: bulk export (Parquet in Hive folders) and JSON lines; inputs and outputs may be JSON text.

Names: langsmith/schemas.py `Run`. A retriever's documents are `outputs.documents` (LangChain) or
`outputs.output` (a traced function that returns a list). Exports without inputs and outputs hold no answers:
their traces are other spans, and retriever runs without text `missing_answer`.
"""

import re
from collections.abc import Iterator
from typing import Any

from jobs.formats.attributes import as_object, first
from jobs.formats.labels import identifier, parse_time
from jobs.formats.paths import Row, paths
from jobs.formats.spans import Kind, Span, System

_KINDS: dict[str, Kind] = {
    "retriever": "retriever",
    "llm": "llm",
    "chat": "llm",
    "embedding": "step",
    "tool": "step",
    "prompt": "step",
    "parser": "step",
}  # chain and what is still to come may be roots
_MODEL = paths(
    *("extra.metadata.ls_model_name", "extra.invocation_params.model", "extra.invocation_params.model_name"),
    *("extra.invocation_params.deployment_name",),
)
_APP = paths("extra.metadata.app", "session_name", "project_name")
_DOCUMENTS = paths("outputs.documents", "outputs.output", "outputs")


def _recognises(keys: frozenset[str]) -> bool:
    return "run_type" in keys and bool({"trace_id", "dotted_order", "parent_run_id", "session_id"} & keys)


def _expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The run and its `child_runs`, level by level."""
    level = [row]
    while level:
        yield from ({name: value for name, value in run.items() if name != "child_runs"} for run in level)
        children = [run.get("child_runs") for run in level]
        level = [run for each in children if isinstance(each, list) for run in each if isinstance(run, dict)]


def _read(values: dict[str, Any]) -> Span:
    row = Row(values)
    run_id = identifier(first(row, paths("id")))
    parent_id = identifier(first(row, paths("parent_run_id")))
    above = first(row, paths("parent_run_ids"))
    if parent_id is None and isinstance(above, list) and above:
        parent_id = identifier(above[-1])
    name = first(row, paths("name"))
    kind = _KINDS.get(str(first(row, paths("run_type"))).lower(), "chain")
    documents = first(row, _DOCUMENTS)
    reranks = isinstance(name, str) and re.search("rerank", name, re.IGNORECASE) and kind != "llm"
    if reranks and (kind == "retriever" or first(row, paths("outputs.documents")) is not None):
        kind = "reranker"
    return Span(
        kind=kind,
        trace_id=identifier(first(row, paths("trace_id"))) or _first_run(row) or (parent_id or run_id),
        span_id=run_id,
        parent_id=parent_id,
        start=parse_time(first(row, paths("start_time"))),
        updated=parse_time(first(row, paths("end_time"))),
        name=name if isinstance(name, str) else None,
        input=first(row, paths("inputs")),
        output=first(row, paths("outputs")),
        documents=documents if kind in ("retriever", "reranker") else None,
        labels={
            "app": first(row, _APP),
            "app_id": first(row, paths("session_id")),
            "model": first(row, _MODEL) if kind == "llm" else None,
            "prompt_version": first(row, paths("extra.metadata.lc_hub_commit_hash")),
            "retriever": first(row, paths("extra.metadata.ls_retriever_name"))
            if kind == "retriever"
            else None,
        },
        metadata=as_object(first(row, paths("extra.metadata"))),
    )


def _first_run(row: Row) -> str | None:
    """The trace's id in `dotted_order`, which begins with the root's time and UUID."""
    order = first(row, paths("dotted_order"))
    match = re.match(r"\d{8}T\d+Z([0-9a-fA-F-]{36})(\.|$)", order) if isinstance(order, str) else None
    return None if match is None else match[1]


SYSTEM = System(
    recognises=_recognises,
    expand=_expand,
    read=_read,
    columns=frozenset(
        "id trace_id parent_run_id parent_run_ids dotted_order name run_type start_time end_time inputs "
        "outputs extra session_name session_id project_name child_runs".split()
    ),
)
