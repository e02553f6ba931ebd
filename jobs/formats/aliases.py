"""Under which names tools log question, passages and answer, and the fold of one raw row into a Record."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from detector.errors import RecordRejected, RejectReason
from detector.record import Record
from jobs.errors import ConfigError
from jobs.formats.json_text import embedded
from jobs.formats.labels import (
    LABELS,
    METADATA,
    STRONG_IDS,
    WEAK_IDS,
    Labels,
    content_id,
    paths_of,
    plain_text,
    read_metadata,
)
from jobs.formats.messages import ASSISTANTS, USERS, last_message, role_of
from jobs.formats.passages import PARTS, Retrieved, holds_passages, read_passages, telling_texts
from jobs.formats.paths import Path, Row, paths, snake

# One tuple per field; the first path with a usable value wins. Leadline's own names, then Ragas, DeepEval,
# RAGChecker, UpTrain, MLflow, OpenInference, TruLens, LangSmith. All spellings are snake case: `Row` finds
# camelCase, capitals, literal dotted keys and nested objects under them.
QUESTION = paths(
    *("question", "user_input", "query", "input", "prompt", "user_query", "request"),
    *("inputs.question", "inputs.query", "inputs.input", "inputs.user_input", "inputs.prompt"),
    *("inputs.messages", "inputs"),
    *("input.question", "input.query", "input.input", "input.messages", "input.value"),
    *("attributes.input.value", "main_input", "ai.observability.record_root.input"),
    *("request.question", "request.query", "request.messages", "messages", "gen_ai.input.messages"),
)
ANSWER_NAMES = (
    "answer",
    "response",
    "output",
    "actual_output",
    "completion",
    "generation",
    "generated_answer",
)
PASSAGE_NAMES = (
    *("passages", "retrieved_contexts", "contexts", "retrieval_context", "retrieved_context"),
    *("documents", "source_documents", "retrieved_documents", "chunks", "retrieved_chunks"),
)
"""In a row itself, only one answer's row has one of each; spans keep theirs in attributes."""

_ANSWER_PARTS = ("answer", "response", "output", "text", "content", "result", "completion", "messages")
ANSWER = paths(
    *ANSWER_NAMES,
    *("outputs." + part for part in _ANSWER_PARTS),
    *("outputs.choices.0.message.content", "outputs.generations.0.0.text", "outputs"),
    *("output.value", "attributes.output.value"),
    *(f"{outer}.{part}" for outer in ("output", "response", "answer") for part in _ANSWER_PARTS),
    *("response.choices.0.message.content", "agent_answer", "main_output"),
    *("ai.observability.record_root.output", "prediction", "predictions", "messages"),
    *("gen_ai.output.messages",),
)
PASSAGES = paths(
    *PASSAGE_NAMES,
    *("retrieval.documents", "attributes.retrieval.documents"),
    *("outputs.documents", "outputs.source_documents", "outputs.contexts", "outputs.retrieved_contexts"),
    *("outputs.retrieved_context", "outputs.context", "inputs.contexts", "inputs.context"),
    *("inputs.documents", "ai.observability.retrieval.retrieved_contexts", "outputs.output"),
    *("context", "document"),
)
PASSAGE_IDS = paths("retrieved_context_ids", "context_ids", "passage_ids", "document_ids", "doc_ids")
"""Lists of ids beside a list of plain texts."""

_ONLY_LISTS = paths("outputs.output")
_DEEPEVAL_RETRIEVED = "retrieval_context"

FIELDS = ("response_id", *LABELS, "question", "passages", "answer")
"""Our names, as `fields:` in the settings may use them, beside `passages.text` and the like."""


def check_fields(fields: Mapping[str, str]) -> dict[str, Path]:
    """The `fields:` setting as paths. Raises ConfigError for a name that is not ours."""
    known = (*FIELDS, *(f"passages.{part}" for part in PARTS))
    for name, path in fields.items():
        if name not in known:
            raise ConfigError(f"setting fields: no field {name!r}; known: {', '.join(known)}")
        if not path.strip("."):
            raise ConfigError(f"setting fields.{name}: the path is empty; write where your rows keep it")
    return {name: tuple(path.split(".")) for name, path in fields.items()}


def fold(
    row: Row,
    labels: Labels,
    partitions: Mapping[str, str],
    fields: Mapping[str, Path],
    *,
    allow_missing_question: bool,
    own_id: str,
) -> Record:
    """One raw row as a Record. `own_id` is its id when it brings none.

    Raises RecordRejected with the reason that is counted.
    """
    try:
        return _fold(row, labels, partitions, fields, allow_missing_question, own_id)
    except UnicodeDecodeError:
        raise RecordRejected(RejectReason.MALFORMED_ROW, "a text is not UTF-8") from None


def _fold(
    row: Row,
    labels: Labels,
    partitions: Mapping[str, str],
    fields: Mapping[str, Path],
    allow_missing_question: bool,
    own_id: str,
) -> Record:
    answer, answer_path = _first_text(row, paths_of("answer", ANSWER, fields), ASSISTANTS)
    if answer is None:
        raise _missing(RejectReason.MISSING_ANSWER, "answer", answer_path)
    asked = paths_of("question", QUESTION, fields)
    question, question_path = _first_text(row, asked, USERS)
    if question is None and not allow_missing_question:
        raise _missing(RejectReason.MISSING_QUESTION, "question", question_path)
    retrieved, passages_path = _retrieved(row, fields)
    telling = telling_texts(passage.text for passage in retrieved.passages)
    if question is not None and holds_passages(question, telling):
        # The scorer would read them even where it must not.
        prompt_path = question_path
        question, question_path = _first_text(row, asked, USERS, telling)
        if question is None and not allow_missing_question:
            raise RecordRejected(
                RejectReason.MISSING_QUESTION,
                f"{prompt_path} holds the passages beside the question; say where it stands by itself with "
                "fields: {question: your.path}",
            )
    question = question or ""
    metadata = read_metadata(row, partitions, (answer_path, question_path, passages_path))
    if retrieved.blank:
        metadata["passages_without_text"] = ",".join(map(str, retrieved.blank))
    response_id = labels.response_id
    if response_id is None and labels.weak_id is not None:
        texts = [question, *(passage.text for passage in retrieved.passages), answer]
        response_id = content_id(labels.weak_id, texts)
    return Record(
        question=question,
        passages=retrieved.passages,
        answer=answer,
        response_id=response_id or own_id,
        **labels.passed_on(),
        undivided=retrieved.undivided,
        metadata=metadata,
    )


def holds_answer(row: dict[str, Any]) -> bool:
    """Whether a JSON object is itself a row, rather than the holder of a list of rows."""
    return _first_text(Row(row), ANSWER, ASSISTANTS)[0] is not None


def resolved_mapping(rows: Sequence[dict[str, Any]], fields: Mapping[str, str]) -> dict[str, str]:
    """Our field -> the path that most of these rows keep it under; fields found nowhere are left out."""
    own = check_fields(fields)
    counts: dict[str, Counter[str]] = {name: Counter() for name in FIELDS}
    for values in rows:
        for name, path in _resolve(Row(values), own):
            counts[name][path] += 1
    return {name: count.most_common(1)[0][0] for name, count in counts.items() if count}


def may_matter(column: str, fields: Mapping[str, Path]) -> bool:
    """Whether a Parquet column of this name can hold anything that is read."""
    root = snake(column.split(".")[0])
    return root in _ROOTS or any(snake(path[0]) == root for path in fields.values())


def _resolve(row: Row, own: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    for name, aliases in {"response_id": (*STRONG_IDS, *WEAK_IDS), **LABELS}.items():
        found = next(filter(None, map(row.find, row.within(paths_of(name, aliases, own)))), None)
        if found is not None:
            yield name, found.path
    for name, aliases, roles in (("question", QUESTION, USERS), ("answer", ANSWER, ASSISTANTS)):
        text, path = _first_text(row, paths_of(name, aliases, own), roles)
        if text is not None:
            yield name, path
    try:
        yield "passages", _retrieved(row, own)[1]
    except (RecordRejected, UnicodeDecodeError):
        return


def _retrieved(row: Row, fields: Mapping[str, Path]) -> tuple[Retrieved, str]:
    own = {part: fields[f"passages.{part}"] for part in PARTS if f"passages.{part}" in fields}
    aliases = PASSAGES
    if row.has(_DEEPEVAL_RETRIEVED):  # beside it, `context` is what should have been retrieved, not what was
        aliases = tuple(path for path in PASSAGES if path != ("context",))
    ids = next(filter(None, map(row.find, row.within(PASSAGE_IDS))), None)
    refused: RecordRejected | None = None
    for path in row.within(paths_of("passages", aliases, fields)):
        found = row.find(path)
        if found is None:
            continue
        try:
            as_text = path not in _ONLY_LISTS
            return read_passages(found.value, own, None if ids is None else ids.value, as_text), found.path
        except RecordRejected as error:
            if refused is None or error.reason is RejectReason.PASSAGE_TEXT_MISSING:
                refused = RecordRejected(error.reason, f"{found.path}: {error.detail}")
    raise refused or _missing(RejectReason.NO_PASSAGES, "passages", "")


def _first_text(
    row: Row, candidates: tuple[Path, ...], roles: frozenset[str], telling: Sequence[str] = ()
) -> tuple[str | None, str]:
    """The first usable text without one of `telling` in it, and its path; where there is none, None and the
    path of a value that was no such text.
    """
    refused = ""
    for path in row.within(candidates):
        found = row.find(path)
        if found is None:
            continue
        text = _text(found.value, roles)
        if text is not None and not holds_passages(text, telling):
            return text, found.path
        refused = refused or found.path
    return None, refused


def _text(value: Any, roles: frozenset[str]) -> str | None:
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        messages = embedded(value)
        if isinstance(messages, list) and isinstance(messages[0], dict) and role_of(Row(messages[0])):
            return last_message(messages, roles)
    return last_message(value, roles) if isinstance(value, list) else plain_text(value)


def _missing(reason: RejectReason, name: str, refused: str) -> RecordRejected:
    what = f"{refused} holds no {name} text" if refused else f"no {name} under any known name"
    return RecordRejected(reason, f"{what}; say where it is with fields: {{{name}: your.path}}")


_ROOTS = {
    path[0]
    for group in (QUESTION, ANSWER, PASSAGES, PASSAGE_IDS, STRONG_IDS, WEAK_IDS, METADATA, *LABELS.values())
    for path in group
} | {"spans", "source_id", "quality", "task"}  # what a labelled row says (jobs.labelled)
