"""The text of a question or an answer inside chat messages and the objects that frameworks wrap it in."""

from collections.abc import Iterator, Sequence
from typing import Any

from jobs.formats.json_text import embedded
from jobs.formats.labels import plain_text
from jobs.formats.paths import Row, paths

USERS = frozenset({"user", "human", "customer"})
ASSISTANTS = frozenset({"assistant", "ai", "agent", "bot", "model", "chatbot", "gpt"})

_ROLES = USERS | ASSISTANTS | {"system", "developer", "tool", "function"}
_ROLE = paths("role", "speaker", "author", "from", "type")
_MESSAGE = paths("content", "text", "message", "value", "parts")
_PART = ("message_content", "text")
_DEEPEST = 6
"""Objects inside objects, parts inside parts: nobody means more than a few."""

# Under which keys the objects that go into and come out of a step keep the one text that matters.
_QUESTION = paths(
    *("question", "query", "user_input", "input", "inputs", "prompt", "user_query", "query_str"),
    *("str_or_query_bundle", "query_bundle", "request", "text", "content", "message", "messages"),
    *("contents", "args.0", "kwargs", "prompts.0"),
)
_ANSWER = paths(
    *("answer", "response", "output", "outputs", "result", "text", "content", "completion", "generation"),
    *("generated_answer", "final_answer", "output_text", "message", "messages", "choices.0.message"),
    *("choices.0.text", "generations.0.0.text", "generations.0.0.message", "candidates.0.content"),
    "return_values.output",
)


def role_of(row: Row) -> str | None:
    """Who speaks in a message, in lower case; None where that is not said or the role is unknown."""
    values = (found.value for found in map(row.find, _ROLE) if found is not None)
    roles = (value.lower() for value in values if isinstance(value, str))
    return next((role for role in roles if role in _ROLES), None)


def last_message(messages: Sequence[Any], roles: frozenset[str]) -> str | None:
    """The text of the last message with one of these roles; an answer must come after the last question.

    A single item without a role is taken as it is.
    """
    for message in reversed(messages):
        if not isinstance(message, dict):
            return plain_text(message) if len(messages) == 1 else None
        row = Row(message)
        role = role_of(row)
        if role in roles or (role is None and len(messages) == 1):
            return _message_text(row, _DEEPEST)
        if role in USERS:
            return None
    return None


def text_in(value: Any, roles: frozenset[str], depth: int = _DEEPEST) -> str | None:
    """The question (`roles` = USERS) or answer (ASSISTANTS) in what a span logged as its input or output.

    Takes plain text, JSON in strings in JSON, chat messages of OpenAI, LangChain, OpenInference and OTel, and
    objects that hold one of these. An object of scalars alone that has none of the known keys is a structured
    answer and stays the text that it is. None where there is no text.
    """
    written = None
    for _ in range(_DEEPEST):
        if not isinstance(value, str):
            break
        parsed = embedded(value)
        if parsed is None:
            return plain_text(value)
        written, value = value, parsed
    if isinstance(value, dict):
        text = _in_object(value, roles, depth)
    elif isinstance(value, list):
        text = _in_list(value, roles, depth)
    else:
        return plain_text(value)
    if text is None and written is not None and _is_flat(value):
        return plain_text(written)
    return text


def _in_object(value: dict[str, Any], roles: frozenset[str], depth: int) -> str | None:
    if not depth:
        return None
    row = Row(value)
    if role_of(row) is not None or "lc" in value:
        return last_message(list(_messages([value])), roles)
    for path in row.within(_QUESTION if roles is USERS else _ANSWER):
        found = row.find(path)
        text = None if found is None else text_in(found.value, roles, depth - 1)
        if text is not None:
            return text
    if roles is USERS and len(value) == 1:  # the only argument of a function, whatever its name
        return text_in(next(iter(value.values())), roles, depth - 1)
    return None


def _in_list(value: list[Any], roles: frozenset[str], depth: int) -> str | None:
    messages = list(_messages(value))
    if any(isinstance(each, dict) and role_of(Row(each)) is not None for each in messages[:1]):
        return last_message(messages, roles)
    if messages and all(isinstance(each, dict) and "text" in each for each in messages):
        return plain_text("".join(each["text"] for each in messages if isinstance(each["text"], str)))
    return text_in(value[0], roles, depth - 1) if len(value) == 1 and depth else None


def _messages(value: list[Any]) -> Iterator[Any]:
    """The messages of a conversation in one shape: role and content on top."""
    for item in value:
        for each in item if isinstance(item, list) else [item]:  # LangChain logs one list per prompt
            yield _unwrapped(each) if isinstance(each, dict) else each


def _unwrapped(message: dict[str, Any]) -> dict[str, Any]:
    inner = message.get("kwargs")
    if "lc" in message and isinstance(inner, dict):  # LangChain's constructors: the class says the role
        names = message.get("id")
        name = names[-1] if isinstance(names, list) and names and isinstance(names[-1], str) else ""
        role = name.removesuffix("Chunk").removesuffix("Message").lower()
        return {"role": role, "content": inner.get("content")}
    inner = message.get("data")
    if isinstance(inner, dict) and "content" in inner:  # LangChain's messages_to_dict
        return {"role": message.get("type"), "content": inner["content"]}
    row = Row(message)
    role, content = row.find(("message", "role")), row.find(("message", "content"))
    if role is None:
        return message
    parts = row.find(("message", "contents")) if content is None else content
    return {"role": role.value, "content": None if parts is None else parts.value}


def _message_text(row: Row, depth: int) -> str | None:
    for found in filter(None, map(row.find, _MESSAGE)):
        if isinstance(found.value, list):  # parts of one message; images and tool calls have no text
            parts = (_part_text(part, depth - 1) for part in found.value) if depth else ()
            text = plain_text("".join(filter(None, parts)))
        else:
            text = plain_text(found.value)
        if text is not None:
            return text
    return None


def _part_text(part: Any, depth: int) -> str | None:
    if not isinstance(part, dict):
        return plain_text(part)
    row = Row(part)
    inner = row.find(_PART)
    return _message_text(row, depth) if inner is None else plain_text(inner.value)


def _is_flat(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, (dict, list)) for item in items)
