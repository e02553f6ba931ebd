"""One trace to one row: which of its spans hold passages, question and answer.

The passages are those of the rerankers, or else the union of the outermost retrievers in time order. The
answer is the output of the root, or else of the last LLM span that began after the first retrieval.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from detector.errors import RecordRejected, RejectReason
from detector.record import Passage
from jobs.formats.labels import LABELS, identifier, plain_text
from jobs.formats.messages import ASSISTANTS, USERS, text_in
from jobs.formats.outcome import Incomplete
from jobs.formats.passages import PARTS, Retrieved, holds_passages, read_passages, telling_texts
from jobs.formats.paths import Path, Row

Kind = Literal["trace", "retriever", "reranker", "llm", "chain", "step", "ignored"]
"""`trace`: what the system keeps about the trace as a whole. `chain`: anything that may be a root and answer.
`step`: tools, embeddings, parsers, which never answer. `ignored`: evaluators and guardrails, and all below.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """One span in common terms; the texts are as logged (JSON in strings, messages, objects)."""

    kind: Kind
    trace_id: str | None = None
    span_id: str | None = None
    parent_id: str | None = None
    start: datetime | None = None
    updated: datetime | None = None
    """When the row was written, where the system says: of two rows of one span the later counts."""
    name: str | None = None
    input: Any = None
    output: Any = None
    documents: Any = None
    """What a retriever found or a reranker left; None: not a retrieval, or one that logged nothing."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """`app`, `model` and the like, by our names; `app_id` for want of an app's name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    """What to fold by where it is not the trace id."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What the user's `fields:` found in this span's row."""


def fold_trace(
    spans: Sequence[Span], fields: Mapping[str, Path], *, allow_missing_question: bool = False
) -> dict[str, Any] | Incomplete | None:
    """One trace as a flat row in our names; None where it holds neither retrieval nor answer.

    `spans` without repeats, in file order. Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    spans = _in_time(spans)
    by_id = {span.span_id: span for span in spans if span.span_id is not None}
    ignored = _at_or_below(spans, by_id, lambda span: span.kind == "ignored")
    spans = [span for span, out in zip(spans, ignored, strict=True) if not out]
    retrievals, source = _retrievals(spans, by_id)
    top = _top(spans, by_id)
    answer, answering = _answer(spans, by_id, top)
    if not retrievals and answer is None:
        return None
    labels = _labels(spans, top, answering)

    def incomplete(reason: RejectReason, detail: str) -> Incomplete:
        kinds = Counter(span.kind for span in spans)
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return Incomplete(reason, f"{detail} (spans of this trace in this file: {what})", labels)

    if top is None:
        return incomplete(
            RejectReason.MISSING_ANSWER,
            "the root of this trace, which says what was served, is not in this file; keep traces whole",
        )
    if answer is None:
        return incomplete(RejectReason.MISSING_ANSWER, "no span of this trace holds an answer")
    if not retrievals:
        if all(span.kind == "trace" for span in spans):
            return incomplete(
                RejectReason.NO_PASSAGES, "only the trace itself is in this file, not its spans"
            )
        return incomplete(RejectReason.NO_PASSAGES, "no retriever or reranker span")
    try:
        passages, n_blank = _passages(retrievals, source, spans, fields)
    except RecordRejected as rejected:
        return incomplete(rejected.reason, f"{source} spans: {rejected.detail}")
    question = _question(spans, top, retrievals, answering, passages)
    if question is None and not allow_missing_question:
        return incomplete(RejectReason.MISSING_QUESTION, "no span of this trace holds the question by itself")
    told = {"passages_from": source, "n_spans": len(spans)}
    told |= {"n_passages_without_text": n_blank} if n_blank else {}
    metadata = {**told, **labels["metadata"], **told}  # first, because only the first entries are kept
    return {**labels, "question": question, "passages": passages, "answer": answer, "metadata": metadata}


def _in_time(spans: Sequence[Span]) -> list[Span]:
    """By start; spans that do not say when keep their order behind those that do."""
    timed = sorted((span for span in spans if span.start is not None), key=lambda span: span.start)
    return [*timed, *(span for span in spans if span.start is None)]


def _at_or_below(
    spans: Sequence[Span], by_id: Mapping[Any, Span], chosen: Callable[[Span], bool]
) -> list[bool]:
    """For each span, whether it or one above it is chosen. No recursion; parents in a ring end it."""
    known: dict[str, bool] = {}
    verdicts = []
    for span in spans:
        trail: list[str] = []
        at, verdict = span, chosen(span)
        while not verdict:
            if at.span_id is not None:
                known.setdefault(at.span_id, False)  # met again: a ring, and nothing in it was chosen
                trail.append(at.span_id)
            above = by_id.get(at.parent_id)
            if above is None:
                break
            if above.span_id in known:
                verdict = known[above.span_id]
                break
            at, verdict = above, chosen(above)
        known.update(dict.fromkeys(trail, verdict))
        verdicts.append(verdict)
    return verdicts


def _retrievals(spans: Sequence[Span], by_id: Mapping[Any, Span]) -> tuple[list[Span], str]:
    """The spans whose documents the answer was given, and what they are."""
    own = [replace(span, documents=span.own["passages"]) for span in spans if "passages" in span.own]
    if own:
        return own, "fields.passages"
    rerankers = [span for span in spans if span.kind == "reranker" and span.documents is not None]
    if rerankers:
        return rerankers, "reranker"
    retrievers = [span for span in spans if span.kind == "retriever"]
    # A retriever that calls others (multi-query, ensemble) has merged what they found.
    full = {id(span) for span in retrievers if _holds_something(span.documents)}
    inner = _at_or_below(retrievers, by_id, lambda span: id(by_id.get(span.parent_id)) in full)
    outer = [span for span, below in zip(retrievers, inner, strict=True) if not below]
    return outer or retrievers, "retriever"


def _holds_something(documents: Any) -> bool:
    return documents is not None and documents not in ("", [], {}, "[]", "{}")


def _top(spans: Sequence[Span], by_id: Mapping[Any, Span]) -> Span | None:
    """The span that stands for the trace: what the system says about it, or its root.

    A span whose parent is elsewhere is the root as well where everything hangs from it and it holds the
    answer itself: the parent is then a web server or the like, which other exporters keep. None: the root is
    missing.
    """
    whole = [span for span in spans if span.kind == "trace"]
    if whole:
        return whole[-1]
    roots = [span for span in spans if _is_root(span)]
    if roots:
        return next((span for span in roots if span.kind == "chain"), roots[0])
    orphans = [span for span in spans if span.parent_id not in by_id]
    if len(orphans) != 1 or orphans[0].kind not in ("chain", "llm"):
        return None
    alone = all(_at_or_below(spans, by_id, lambda span: span is orphans[0]))
    return orphans[0] if alone and text_in(orphans[0].output, ASSISTANTS) is not None else None


def _is_root(span: Span) -> bool:
    return span.kind != "trace" and span.parent_id is None


def _answer(
    spans: Sequence[Span], by_id: Mapping[Any, Span], top: Span | None
) -> tuple[str | None, Span | None]:
    """The answer and the span that gave it."""
    for span in reversed(spans):
        text = text_in(span.own.get("answer"), ASSISTANTS)
        if text is not None:
            return text, span
    roots = [span for span in spans if _is_root(span) and span.kind in ("chain", "llm")]
    stated = [top] if top is not None and (top.kind == "trace" or not _is_root(top)) else []
    for span in (*stated, *(roots if len(roots) == 1 else ())):
        text = text_in(span.output, ASSISTANTS)
        if text is not None:
            return text, span
    # Calls below a retriever reword the question; a call before the first retrieval cannot know the passages.
    below = _at_or_below(spans, by_id, lambda span: span.kind in ("retriever", "reranker"))
    starts = (span.start for span in spans if span.kind == "retriever" and span.start is not None)
    first = min(starts, default=None)
    for span, inside in zip(reversed(spans), reversed(below), strict=True):
        early = span.start is not None and first is not None and span.start < first
        if span.kind == "llm" and not inside and not early:
            text = text_in(span.output, ASSISTANTS)
            if text is not None:
                return text, span
    for span in reversed(roots):
        text = text_in(span.output, ASSISTANTS)
        if text is not None and span.kind == "chain":
            return text, span
    return None, None


def _passages(
    retrievals: Sequence[Span], source: str, spans: Sequence[Span], fields: Mapping[str, Path]
) -> tuple[str | list[dict[str, Any]], int]:
    """The passages in order, each once, and how many had no text. One undivided text stays a string."""
    own = {part: fields[f"passages.{part}"] for part in PARTS if f"passages.{part}" in fields}
    texts = _texts_by_id(spans, own) if source == "reranker" else {}
    refused: RecordRejected | None = None
    lists: list[Retrieved] = []
    for span in retrievals:
        try:
            lists.append(read_passages(_with_texts(span.documents, texts), own))
        except RecordRejected as error:
            if refused is None or error.reason is RejectReason.PASSAGE_TEXT_MISSING:
                refused = error
    if not lists:
        raise refused or RecordRejected(RejectReason.NO_PASSAGES, "they returned nothing")
    n_blank = sum(len(each.blank) for each in lists)
    if len(lists) == 1 and lists[0].undivided:
        return lists[0].passages[0].text, n_blank
    kept = _each_once([each.passages for each in lists])
    return [
        {"text": each.text, "id": each.id, "score": each.score, "source": each.source} for each in kept
    ], n_blank


def _each_once(lists: Sequence[tuple[Passage, ...]]) -> list[Passage]:
    """The union in order. Ids count where they tell the passages of each list apart; else they name files."""
    telling = all(
        len({passage.id for passage in each if passage.id}) == sum(bool(passage.id) for passage in each)
        for each in lists
    )
    seen: set[tuple[str, str]] = set()
    kept = []
    for passage in (passage for each in lists for passage in each):
        names = {("text", passage.text.strip())}
        if telling and passage.id and passage.id != passage.source:
            names.add(("id", passage.id))
        if not names & seen:
            kept.append(passage)
        seen |= names
    return kept


def _texts_by_id(spans: Sequence[Span], own: Mapping[str, Path]) -> dict[str, Passage]:
    """What the retrievers found, by id: some rerankers log only which of them they kept."""
    texts: dict[str, Passage] = {}
    for span in spans:
        if span.kind != "retriever" or span.documents is None:
            continue
        try:
            found = read_passages(span.documents, own).passages
        except RecordRejected:
            continue
        for passage in found:
            if passage.id:
                texts.setdefault(passage.id, passage)
    return texts


def _with_texts(documents: Any, texts: Mapping[str, Passage]) -> Any:
    if not texts or not isinstance(documents, list):
        return documents
    return [_with_text(item, texts) for item in documents]


def _with_text(item: Any, texts: Mapping[str, Passage]) -> Any:
    if not isinstance(item, dict):
        return item
    row = Row(item)
    if any(found is not None and plain_text(found.value) for found in map(row.find, PARTS["text"])):
        return item
    ids = (identifier(found.value) for found in map(row.find, PARTS["id"]) if found is not None)
    passage = next((texts[each] for each in ids if each in texts), None)
    return item if passage is None else {**item, "text": passage.text}


def _question(
    spans: Sequence[Span],
    top: Span,
    retrievals: Sequence[Span],
    answering: Span | None,
    passages: str | list[dict[str, Any]],
) -> str | None:
    """The first input that is a question: of the user's field, the trace, the retrieval, the answering call.

    A prompt with the passages in it is none: the scorer would then read them even where it must not.
    """
    telling = telling_texts([passages] if isinstance(passages, str) else [each["text"] for each in passages])
    own = (span.own.get("question") for span in spans)
    roots = (span.input for span in spans if _is_root(span) and span.kind in ("chain", "llm"))
    outputs = [] if answering is None else [answering.input]
    for value in (*own, top.input, *roots, *(span.input for span in retrievals), *outputs):
        text = text_in(value, USERS)
        if text is not None and not holds_passages(text, telling):
            return text
    return None


def _labels(spans: Sequence[Span], top: Span | None, answering: Span | None) -> dict[str, Any]:
    """Ids, time, dimensions and metadata of the trace, in our names; what is unknown is left out."""
    order = [span for span in (top, answering) if span is not None] + list(spans)
    models = [answering] if answering is not None else []
    models += [span for span in reversed(spans) if span.kind == "llm"]
    found: dict[str, Any] = {
        "response_id": next(
            (span.group or span.trace_id for span in order if span.group or span.trace_id), None
        ),
        "trace_id": next((span.trace_id for span in order if span.trace_id), None),
        "span_id": next(
            (span.span_id for span in (answering, top) if span is not None and span.span_id), None
        ),
        "timestamp": next((span.start for span in order if span.start is not None), None),
    }
    for name in ("app", "model", "retriever", "prompt_version", "language"):
        searched = [*models, *order] if name in ("model", "prompt_version") else order
        found[name] = next((span.labels[name] for span in searched if span.labels.get(name)), None)
    found["app"] = found["app"] or next((s.labels["app_id"] for s in order if s.labels.get("app_id")), None)
    if found["retriever"] is None:
        found["retriever"] = next(
            (span.name for span in spans if span.kind == "retriever" and span.name), None
        )
    for name in ("response_id", *LABELS):
        values = (span.own[name] for span in spans if name in span.own)
        found[name] = next(values, found[name])
    found["metadata"] = {key: value for span in reversed(order) for key, value in span.metadata.items()}
    return {name: value for name, value in found.items() if value is not None}
