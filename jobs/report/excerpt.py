"""Which part of a long text is put on the page. What is left out is always counted, never just gone."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from markupsafe import escape

from jobs.report.page import Excerpt, Fragment
from jobs.report.visible import show_controls

Span = tuple[int, int]

HEAD_CHARACTERS = 280
"""How much of a passage is open at first when no shown sentence rests on it."""

EVIDENCE_CHARACTERS = 900
"""How much is open at first when one does."""

LABEL_BYTES = 200
"""Longest id, source, path or dimension value; ordinarily they are far below."""


def cost_bytes(text: str) -> int:
    """What a text weighs on the page: UTF-8, after escaping."""
    return len(str(escape(show_controls(text))).encode())


def share_room(costs: Sequence[int], room: int) -> list[int]:
    """Deal `room` out over texts: short ones get what they need, the rest share what is left evenly."""
    granted = [0] * len(costs)
    order = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    for served, index in enumerate(order):
        granted[index] = min(costs[index], max(room, 0) // (len(order) - served))
        room -= granted[index]
    return granted


def excerpt(text: str, pieces: Iterable[tuple[int, Span]], room_bytes: int, max_characters: int) -> Excerpt:
    """Cut `text` to what fits, around the evidence, and fold what need not be open at first.

    `pieces`: (sentence number, code points start:end of the text it rests on), the most important first.
    """
    pieces = tuple(pieces)
    cost = cost_bytes(text)
    fits = len(text) if cost <= room_bytes else len(text) * room_bytes // cost
    fits = min(fits, max_characters)
    anchor = pieces[0][1][0] if pieces else 0
    start, end = _window(text, anchor, fits, lead=fits // 8)
    open_size = EVIDENCE_CHARACTERS if pieces else HEAD_CHARACTERS
    open_start, open_end = _window(text[:end], max(anchor, start), open_size, lead=open_size // 8)
    open_start = max(open_start, start)
    # A fold that hides less than a line is more in the way than the line.
    if open_start - start < 80:
        open_start = start
    if end - open_end < 80:
        open_end = end
    return Excerpt(
        n_before=start,
        folded_before=_cut(text, pieces, start, open_start),
        visible=_cut(text, pieces, open_start, open_end),
        folded_after=_cut(text, pieces, open_end, end),
        n_after=len(text) - end,
    )


def clip(text: str, room_bytes: int) -> tuple[str, int]:
    """The beginning of `text` that fits, and how many code points were left out."""
    cost = cost_bytes(text)
    if cost <= room_bytes:
        return text, 0
    _, end = _window(text, 0, len(text) * room_bytes // cost, lead=0)
    return text[:end], len(text) - end


def label(text: str | None) -> str | None:
    """An id or a name short enough to stand in a line, saying how much longer it is."""
    if text is None:
        return None
    kept, n_hidden = clip(text, LABEL_BYTES)
    return f"{kept}… (+{n_hidden:,} characters)" if n_hidden else kept


def _window(text: str, anchor: int, size: int, lead: int) -> Span:
    """At most `size` code points around `anchor`, cut at white space where there is some near by."""
    if size >= len(text):
        return 0, len(text)
    start = max(0, min(anchor - lead, len(text) - size))
    end = start + size
    if 0 < start < anchor:
        blank = text.find(" ", start, min(anchor, start + 40))
        start = blank + 1 if blank >= 0 else start
    if end < len(text):
        blank = text.rfind(" ", max(start + 1, end - 40), end)
        end = blank if blank >= 0 else end
    return start, end


def _cut(text: str, pieces: tuple[tuple[int, Span], ...], low: int, high: int) -> tuple[Fragment, ...]:
    """Split low:high where a piece begins or ends; each run carries the sentences that rest on it."""
    edges = {low, high}
    for _, span in pieces:
        edges |= {edge for edge in span if low < edge < high}
    fragments = []
    for a, b in pairwise(sorted(edges)):
        numbers = sorted(number for number, (start, end) in pieces if start <= a and b <= end)
        fragments.append(Fragment(text[a:b], tuple(numbers)))
    return tuple(fragments)
