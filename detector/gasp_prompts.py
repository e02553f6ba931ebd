"""The GASP author's own prompts, for comparison: `gasp-v1` (July 2026 repository) and `gasp-v2` (`gasp-rag`).

Plain completion text around one context string, the answer's ids appended behind "Answer: ". The passages of
a record are joined by newlines to make that string, and cut into at most K chunks of whole sentences.

    v1   context cut to 700 tokens, answer to 200; chunks re-joined with single spaces in leave-one-out;
         without passages the Context header disappears too
    v2   context cut to 1,800 tokens, answer to 256; a chunk is removed by slicing; header kept when empty
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from detector.record import Record
from detector.trace import Piece

Span = tuple[int, int]

MAX_ANSWER_TOKENS = {"gasp-v1": 200, "gasp-v2": 256}
MAX_CONTEXT_TOKENS = {"gasp-v1": 700, "gasp-v2": 1800}

CONTEXT, HEADER = "Context:\n", "Answer: "
"""What every full prompt starts and ends with."""

_SENTENCE_END = re.compile(r"[.!?]+(?:\s+|\Z)")
_V1_SPLIT = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Prompt texts of the K + 2 conditions, without the answer."""

    full: str
    none: str
    without: tuple[str, ...]
    pieces: tuple[Piece, ...]
    chunks: tuple[Span, ...]
    """Where each piece stands in `full`, code points."""
    n_context_tokens: int
    truncated: bool


def sentence_spans(text: str) -> list[Span]:
    """Spans that end after . ! ? and the white space behind them; blank ones are left out."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    cuts = [0, *ends]
    if cuts[-1] < len(text):
        cuts.append(len(text))
    return [(a, b) for a, b in pairwise(cuts) if text[a:b].strip()]


def conditions(record: Record, tokenizer: Any, version: str, k: int) -> Conditions:
    """The prompts of one record as `version` writes them."""
    context = "\n".join(passage.text for passage in record.passages)
    limit = MAX_CONTEXT_TOKENS[version]
    encoded = tokenizer(
        context,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    n_tokens, truncated = min(len(ids), limit), len(ids) > limit
    if version == "gasp-v1":
        kept = tokenizer.decode(ids[:limit])
        groups = _grouped(_v1_sentences(kept), k)
        chunks = [(group[0][0], group[-1][1]) for group in groups]
        texts = [" ".join(kept[start:end] for start, end in group) for group in groups]
        without = [" ".join(texts[:i] + texts[i + 1 :]) for i in range(len(texts))]
        none = f"Question: {record.question}\n\n{HEADER}"
    else:
        stop = offsets[limit - 1][1] if len(ids) >= limit else len(context)
        kept = context[:stop]
        chunks = [(start, end) for start, end in _v2_chunks(context, k) if start < stop]
        without = [kept[:start] + kept[min(end, stop) :] for start, end in chunks]
        none = prompt("", record.question)
    return Conditions(
        full=prompt(kept, record.question),
        none=none,
        without=tuple(prompt(text, record.question) for text in without),
        pieces=tuple(_piece(record, start, end) for start, end in chunks),
        chunks=tuple((len(CONTEXT) + start, len(CONTEXT) + min(end, len(kept))) for start, end in chunks),
        n_context_tokens=n_tokens,
        truncated=truncated,
    )


def prompt(context: str, question: str) -> str:
    """Version 2's text (version 1 drops the Context header in the empty condition)."""
    return f"{CONTEXT}{context}\n\nQuestion: {question}\n\n{HEADER}"


def _v2_chunks(context: str, k: int) -> list[Span]:
    spans = sentence_spans(context) or [(0, len(context))]
    return [(group[0][0], group[-1][1]) for group in _grouped(spans, k)]


def _v1_sentences(context: str) -> list[Span]:
    """Sentences by a look-behind split, so that the white space between them belongs to none."""
    cuts = [0, *(edge for match in _V1_SPLIT.finditer(context) for edge in match.span()), len(context)]
    spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if context[a:b].strip()]
    return spans or [(0, len(context))]


def _grouped(spans: list[Span], k: int) -> list[list[Span]]:
    """At most `k` runs of neighbouring sentences; often fewer, since each but the last is equally long."""
    size = 1 if len(spans) <= k else math.ceil(len(spans) / k)
    return [spans[i : i + size] for i in range(0, len(spans), size)]


def _piece(record: Record, start: int, end: int) -> Piece:
    """The part of a chunk that lies in the passage it starts in (a chunk may run over into the next)."""
    base = 0
    for index, passage in enumerate(record.passages):
        length = len(passage.text)
        if start < base + length + 1:
            return Piece(index, min(start - base, length), min(end - base, length))
        base += length + 1
    last = len(record.passages) - 1
    return Piece(last, 0, len(record.passages[last].text))
