"""Retrieved passages in every shape that tools log them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from detector.errors import RecordRejected, RejectReason
from detector.record import Passage
from jobs.formats.json_text import embedded
from jobs.formats.labels import identifier, label, plain_text
from jobs.formats.paths import Path, Row, paths

# LlamaIndex nests under `node`, OpenInference and rerankers under `document`, vector stores under the rest.
PARTS: dict[str, tuple[Path, ...]] = {
    "text": paths(
        *("text", "content", "page_content", "document.content", "document.page_content", "document.text"),
        *("node.text", "passage", "chunk", "context", "body", "document", "snippet"),
        *("metadata.text", "payload.text", "_source.text"),
    ),
    "id": paths(
        *("id", "doc_id", "document_id", "document.id", "passage_id", "chunk_id", "node.id_", "node.node_id"),
        *("doc_uri", "source", "metadata.id", "metadata.source", "document.metadata.source"),
    ),
    "score": paths("score", "document.score", "similarity", "relevance_score", "metadata.score"),
    "source": paths(
        *("source", "url", "uri", "doc_uri", "metadata.source", "metadata.url", "document.metadata.source")
    ),
}

HOLDERS = ("documents", "docs", "passages", "chunks", "contexts", "nodes", "results", "output", "matches")
"""Keys under which an object keeps its list of passages."""


_TELLING_CHARS = 40
_TELLING_PASSAGES = 50
"""A prompt is known by its passages: by those that are too long to stand in a question by chance."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The passages of one row. `blank` are the list indices that held no text and were left out."""

    passages: tuple[Passage, ...]
    undivided: bool = False
    blank: tuple[int, ...] = ()


def read_passages(value: Any, own: Mapping[str, Path], ids: Any = None, as_text: bool = True) -> Retrieved:
    """Fold a logged value into passages, in order.

    `own` are the user's paths inside a passage object (text, id, score, source), `ids` a list of ids beside
    a list of texts. `as_text`: one plain string is the whole context without passage boundaries. Raises
    RecordRejected: no_passages where there is nothing, passage_text_missing where there are only references.
    """
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        parsed = embedded(value)
        # A context may be a table or a form written as one JSON object: that is text, as the model saw it.
        is_text = parsed is None or (isinstance(parsed, dict) and not any(_items(parsed, own)))
        value = value if is_text else parsed
    if isinstance(value, str):
        text = plain_text(value) if as_text else None
        if text is None or text.strip() == "{}":
            raise RecordRejected(RejectReason.NO_PASSAGES, "the context is blank")
        return Retrieved((Passage(text),), undivided=True)
    items = list(_items(value, own))
    ids = embedded(ids) if isinstance(ids, str) else ids
    if isinstance(ids, list) and len(ids) == len(items) and all(isinstance(item, str) for item in items):
        items = [{"text": item, "id": known} for item, known in zip(items, ids, strict=True)]
    passages = [_passage(item, own) for item in items]
    blank = tuple(index for index, passage in enumerate(passages) if passage is None)
    kept = tuple(passage for passage in passages if passage is not None)
    if kept:
        return Retrieved(kept, blank=blank)
    if any(isinstance(item, dict) and any(part is not None for part in item.values()) for item in items):
        raise RecordRejected(
            RejectReason.PASSAGE_TEXT_MISSING,
            f"{len(items)} passages without text; say where it is with fields: {{passages.text: your.path}}",
        )
    raise RecordRejected(
        RejectReason.NO_PASSAGES,
        f"{len(items)} passages, all blank" if items else "no passages in it",
    )


def _items(value: Any, own: Mapping[str, Path]) -> Iterator[Any]:
    """The passages of a value one by one: strings, and objects with or without text."""
    if isinstance(value, dict):
        held = next((value[key] for key in HOLDERS if isinstance(value.get(key), list)), None)
        if _text(Row(value), own) is not None:
            yield value
        elif held is not None:
            yield from _items(held, own)
        else:
            # Ids alone, such as OpenInference's `context: {trace_id, span_id}`, are no retrieval.
            yield from (item for item in _unwrap(value, own) if item is not value)
        return
    if not isinstance(value, list):
        return
    for item in value:
        if isinstance(item, list):  # one list per query, or (text, score) pairs
            yield from (inner for inner in item if isinstance(inner, (str, dict)))
        elif isinstance(item, dict):
            yield from _unwrap(item, own)
        else:
            yield item


def _unwrap(item: dict[str, Any], own: Mapping[str, Path]) -> Iterator[Any]:
    """`{"[doc1]": {...}, "[doc2]": {...}}` is two passages with these ids (promptflow writes that)."""
    inner = {key: value for key, value in item.items() if isinstance(value, dict)}
    if inner and len(inner) == len(item) and _text(Row(item), own) is None:
        if any(_text(Row(value), own) is not None for value in inner.values()):
            yield from ({"id": key, **value} for key, value in inner.items())
            return
    yield item


def telling_texts(texts: Iterable[str]) -> list[str]:
    """Of the texts of passages the first that are long enough to be known again inside a prompt."""
    stripped = (text.strip() for text in texts)
    return list(islice((text for text in stripped if len(text) >= _TELLING_CHARS), _TELLING_PASSAGES))


def holds_passages(text: str, telling: Sequence[str]) -> bool:
    """Whether a text is a prompt with one of the passages in it, and not the user's question by itself.

    A passage that is the question, word for word (a FAQ), makes no prompt of it.
    """
    return any(passage in text and passage != text.strip() for passage in telling)


def _passage(item: Any, own: Mapping[str, Path]) -> Passage | None:
    if not isinstance(item, dict):
        text = plain_text(item)
        return None if text is None else Passage(text)
    row = Row(item)
    text = _text(row, own)
    if text is None:
        return None
    return Passage(
        text=text,
        id=_first(row, "id", own, identifier),
        score=_first(row, "score", own, _score),
        source=_first(row, "source", own, label),
    )


def _text(row: Row, own: Mapping[str, Path]) -> str | None:
    return _first(row, "text", own, plain_text)


def _first(row: Row, part: str, own: Mapping[str, Path], convert: Any) -> Any:
    for path in row.within((own[part], *PARTS[part]) if part in own else PARTS[part]):
        found = row.find(path)
        value = None if found is None else convert(found.value)
        if value is not None:
            return value
    return None


def _score(value: Any) -> float | None:
    try:
        score = float(plain_text(value) or "")
    except ValueError:
        return None
    return score if math.isfinite(score) else None
