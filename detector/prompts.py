"""Prompt profiles: a record under its K + 2 conditions, as token ids.

Text from the log is tokenised with special tokens off, so no log line can forge a chat turn. The answer's
ids are the same in every condition, so that differences are per token. `plain` and `chat` tokenise piece by
piece: every passage starts and ends on a token boundary, and removing it changes nothing else. `refind` does
so too, except that without any passage it asks the bare question, as the published code does.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from detector import gasp_prompts, refind
from detector.errors import ProfileError, RecordRejected, RejectReason
from detector.prefix_tree import Ids
from detector.record import Record
from detector.sentences import Span, encodable, group_sentences, split_sentences
from detector.trace import Piece
from detector.windows import Layout, Segment, cut_segments, group_pieces

UNDIVIDED_GROUPS = 5
"""K where the log kept no passage boundaries (GASP's default number of chunks)."""


@dataclass(frozen=True, slots=True)
class PromptProfile:
    """How a record becomes text, and the small print that must match whoever used that text before.

    `raw_offsets`: tokens go to sentences by the start of their raw offset, leading space included (the
    authors' code) instead of by their first non-space character. `jsd_epsilon`: see `vocabulary`.
    """

    name: str
    raw_offsets: bool = False
    jsd_epsilon: float = 0.0
    separator: str = "\n\n"
    """What follows each passage."""
    min_answer_tokens: int = 1
    min_sentence_tokens: int = 1


PROFILES = {
    "plain": PromptProfile("plain"),
    "chat": PromptProfile("chat"),
    "refind": PromptProfile("refind", separator=refind.SEPARATOR),
    "gasp-v1": PromptProfile("gasp-v1", True, 1e-8, "\n", min_answer_tokens=8, min_sentence_tokens=3),
    "gasp-v2": PromptProfile("gasp-v2", True, 1e-8, "\n", min_answer_tokens=3, min_sentence_tokens=3),
}


@dataclass(frozen=True, slots=True)
class Window:
    """The prompts of one window: pieces `piece_indices` (of Reading.pieces) are in it.

    `without[k]` leaves out `piece_indices[k]`, which stands at tokens `spans[k]` (start:stop) of `full`, all
    of them before `layout.passages[1]`.
    """

    full: Ids
    none: Ids
    without: tuple[Ids, ...]
    piece_indices: tuple[int, ...]
    layout: Layout
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything the forward pass needs to know about one record.

    `windows` is one entry unless the context does not fit the scorer; `segments` likewise for the answer.
    `offsets` (A pairs) and `sentences` are code points into the answer; `n_context_tokens` counts the
    passages once, however many windows they take.
    """

    profile: PromptProfile
    answer_ids: Ids
    offsets: tuple[Span, ...]
    sentences: tuple[Span, ...]
    pieces: tuple[Piece, ...]
    windows: tuple[Window, ...]
    segments: tuple[Segment, ...]
    n_context_tokens: int
    truncated: bool = False


def read_record(record: Record, tokenizer: Any, profile: PromptProfile, window_tokens: int) -> Reading:
    """Turn a record into prompts that fit `window_tokens` together with the answer.

    Raises RecordRejected (no_passages, missing_answer, answer_too_short, over_window).
    """
    if not any(passage.text.strip() for passage in record.passages):
        reason = RejectReason.PASSAGE_TEXT_MISSING if record.passages else RejectReason.NO_PASSAGES
        raise RecordRejected(reason, f"{len(record.passages)} passages, none with text")
    if not record.answer.strip():
        raise RecordRejected(RejectReason.MISSING_ANSWER, "the answer is empty or white space")
    ids, offsets = encode(tokenizer, record.answer)
    if len(ids) < profile.min_answer_tokens:
        detail = f"{len(ids)} tokens, {profile.min_answer_tokens} needed"
        raise RecordRejected(RejectReason.ANSWER_TOO_SHORT, detail)
    if profile.name.startswith("gasp-"):
        return _read_gasp(record, tokenizer, profile, window_tokens, ids, offsets)
    frame = _FRAMES[profile.name](record, tokenizer)
    head, tail = frame.before, frame.after
    segments, room = cut_segments(len(ids), window_tokens - len(head) - len(tail))
    pieces, pieces_ids = _pieces(record, tokenizer, room, profile.separator)
    windows = []
    for indices in group_pieces([len(p) for p in pieces_ids], room):
        parts = [pieces_ids[i] for i in indices]
        without = tuple(head + _concat(parts[:k] + parts[k + 1 :]) + tail for k in range(len(parts)))
        full = head + _concat(parts) + tail
        layout = Layout((len(head), len(full) - len(tail)), len(full) - frame.n_header)
        spans = tuple(pairwise(accumulate((len(part) for part in parts), initial=len(head))))
        windows.append(Window(full, frame.none, without, indices, layout, spans))
    sentences = tuple(split_sentences(record.answer, record.language))
    n_context = sum(len(part) for part in pieces_ids)
    return Reading(profile, ids, offsets, sentences, pieces, tuple(windows), segments, n_context)


def encode(tokenizer: Any, text: str, *, special: bool = False) -> tuple[Ids, tuple[Span, ...]]:
    """Ids and code-point offsets of `text`, control tokens in it read as plain text unless `special`."""
    encoded = tokenizer(
        encodable(text),
        add_special_tokens=False,
        split_special_tokens=not special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # the library's length warning would be wrong: windows take care of length
    )
    return tuple(encoded["input_ids"]), tuple((start, end) for start, end in encoded["offset_mapping"])


@dataclass(frozen=True, slots=True)
class _Frame:
    """Ids around the passages, ids of the empty condition, and how many ids at the end are answer header."""

    before: Ids
    after: Ids
    none: Ids
    n_header: int


def _plain(record: Record, tokenizer: Any) -> _Frame:
    """A Context header (kept when empty), the passages, then the question."""
    head = _start(tokenizer) + encode(tokenizer, "Context:\n")[0]
    text = f"Question: {record.question}\n\n"
    tail, n_header = _with_header(tokenizer, text, "Answer:\n")
    return _Frame(head, tail, head + tail, n_header)


_SENTINEL = "LEADLINE-CONTENT"


def _chat(record: Record, tokenizer: Any) -> _Frame:
    """The same text as one user turn of the scorer's chat template; only the template is trusted.

    What the template writes after the user's text counts as the answer's header.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ProfileError(
            "profile chat: this scorer has no chat template; use --set profile=plain or another scorer"
        )
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = turn.partition(_SENTINEL)
    if not found:
        raise ProfileError("profile chat: the scorer's chat template drops the user's text; use plain")
    head = encode(tokenizer, before, special=True)[0] + encode(tokenizer, "Context:\n")[0]
    turn_marker = encode(tokenizer, after, special=True)[0]
    tail = encode(tokenizer, f"Question: {record.question}")[0] + turn_marker
    return _Frame(head, tail, head + tail, len(turn_marker))


def _refind(record: Record, tokenizer: Any) -> _Frame:
    """REFIND's instruction around the references, and the bare question without them."""
    text, start = refind.prompt_text(record.question), _start(tokenizer)
    question = text.after.removesuffix(refind.ANSWER_HEADER)
    after, n_header = _with_header(tokenizer, question, refind.ANSWER_HEADER)
    before = start + encode(tokenizer, text.before)[0]
    return _Frame(before, after, start + encode(tokenizer, text.none)[0], n_header)


_FRAMES = {"plain": _plain, "chat": _chat, "refind": _refind}


def _start(tokenizer: Any) -> Ids:
    """A BOS where the tokenizer adds one."""
    return tuple(tokenizer("")["input_ids"])


def _with_header(tokenizer: Any, text: str, header: str) -> tuple[Ids, int]:
    """Ids of `text` and `header` in one, and how many of them are the header's."""
    ids, offsets = encode(tokenizer, text + header)
    return ids, sum(stop > len(text) for _, stop in offsets)


def _pieces(record: Record, tokenizer: Any, room: int, separator: str) -> tuple[tuple[Piece, ...], list[Ids]]:
    """What is removed one at a time, and its ids: passages, sentence groups, or chunks of a passage."""
    spans: list[Piece] = []
    for index, passage in enumerate(record.passages):
        if record.undivided:
            cuts = group_sentences(passage.text, UNDIVIDED_GROUPS, record.language)
        else:
            text = passage.text
            cuts = [(len(text) - len(text.lstrip()), len(text.rstrip()))] if text.strip() else []
        spans.extend(Piece(index, start, end) for start, end in cuts)
    pieces: list[Piece] = []
    ids: list[Ids] = []
    for piece in spans:
        text = record.passages[piece.passage_index].text[piece.start : piece.end]
        whole = encode(tokenizer, text + separator)
        if len(whole[0]) <= room:
            pieces.append(piece)
            ids.append(whole[0])
            continue
        for start, end in _chunks(whole[1], len(text), room):
            pieces.append(Piece(piece.passage_index, piece.start + start, piece.start + end))
            ids.append(encode(tokenizer, text[start:end] + separator)[0])
    return tuple(pieces), ids


def _chunks(offsets: tuple[Span, ...], length: int, room: int) -> list[Span]:
    """Cut an over-long text at token boundaries into even chunks that leave room for their blank line.

    A cut changes the tokens around it, so chunks aim at 7/8 of the room.
    """
    aim = max(1, room * 7 // 8)
    n_chunks = -(-len(offsets) // aim)
    cuts = [offsets[len(offsets) * i // n_chunks][0] for i in range(n_chunks)] + [length]
    return [(start, end) for start, end in pairwise(cuts) if start < end]


def _concat(parts: list[Ids]) -> Ids:
    return tuple(token for part in parts for token in part)


def _read_gasp(
    record: Record,
    tokenizer: Any,
    profile: PromptProfile,
    window_tokens: int,
    ids: Ids,
    offsets: tuple[Span, ...],
) -> Reading:
    limit = gasp_prompts.MAX_ANSWER_TOKENS[profile.name]
    plan = gasp_prompts.conditions(record, tokenizer, profile.name, UNDIVIDED_GROUPS)
    ids, offsets, cut = ids[:limit], offsets[:limit], len(ids) > limit
    prompts = [_whole(tokenizer, text) for text in (plan.full, plan.none, *plan.without)]
    longest = max(len(prompt) for prompt in prompts) + len(ids)
    if longest > window_tokens:
        detail = f"{longest} tokens, the scorer reads {window_tokens}; profile {profile.name} has no windows"
        raise RecordRejected(RejectReason.OVER_WINDOW, detail)
    layout, spans = _layout(tokenizer, plan, record.question)
    indices = tuple(range(len(plan.pieces)))
    window = Window(prompts[0], prompts[1], tuple(prompts[2:]), indices, layout, spans)
    sentences = tuple(gasp_prompts.sentence_spans(record.answer))
    segments = (Segment(0, 0, len(ids)),)
    return Reading(
        profile,
        ids,
        offsets,
        sentences,
        plan.pieces,
        (window,),
        segments,
        n_context_tokens=plan.n_context_tokens,
        truncated=cut or plan.truncated,
    )


def _whole(tokenizer: Any, text: str) -> Ids:
    """A whole prompt at once with the tokenizer's own special tokens around it, as the author's code does."""
    return tuple(tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"])


def _layout(tokenizer: Any, plan: gasp_prompts.Conditions, question: str) -> tuple[Layout, tuple[Span, ...]]:
    """Where passages and header, and where the chunks stand in a whole prompt of the GASP author's template.

    A token across the edge of two chunks goes to the later one.
    """
    text = plan.full
    encoded = tokenizer(text, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
    stops = [stop for _, stop in encoded["offset_mapping"]]

    def tokens_before(position: int) -> int:
        return sum(stop <= position for stop in stops)

    header = len(text) - len(gasp_prompts.HEADER)
    passages = len(gasp_prompts.prompt("", question)) - len(gasp_prompts.CONTEXT)
    first, stop = len(gasp_prompts.CONTEXT), len(text) - passages
    chunks = tuple((tokens_before(start), tokens_before(end)) for start, end in plan.chunks)
    return Layout((tokens_before(first), tokens_before(stop)), tokens_before(header)), chunks
