"""Fitting a long context and a long answer into the scorer's window, without cutting anything off.

Passages are grouped into overlapping windows; every token of the answer is scored in every window. An answer
that fills half the window itself is read in segments, each after the tail of the one before.
"""

from dataclasses import dataclass

from detector.errors import RecordRejected, RejectReason

MIN_CONTEXT_TOKENS = 32
"""Less room than this for passages, and a reading would say nothing."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Answer tokens `start:stop` are scored after tokens `tail:start`, which are read and not scored."""

    tail: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things stand in the full condition: passages `start:stop`, the answer's header from `header`.

    When attention is read, the header ("Answer:" or the template's turn marker) counts as answer, as in the
    Lookback Lens reference.
    """

    passages: tuple[int, int]
    header: int


def cut_segments(n_answer: int, room: int) -> tuple[tuple[Segment, ...], int]:
    """Share `room` tokens between answer and context; returns the segments and the room for passages.

    An answer of up to half the room is one segment. Raises RecordRejected(over_window) where the question
    alone leaves no useful room.
    """
    half = room // 2
    if half < MIN_CONTEXT_TOKENS:
        detail = f"the question leaves {max(room, 0)} tokens of the scorer's window for passages and answer"
        raise RecordRejected(RejectReason.OVER_WINDOW, detail)
    if n_answer <= half:
        return (Segment(0, 0, n_answer),), room - n_answer
    tail = half // 4
    step = half - tail
    starts = range(0, n_answer, step)
    segments = tuple(Segment(max(0, s - tail), s, min(s + step, n_answer)) for s in starts)
    return segments, room - half


def group_pieces(lengths: list[int], room: int) -> list[tuple[int, ...]]:
    """Consecutive pieces into windows of at most `room` tokens; neighbours share one piece where it fits.

    >>> group_pieces([30, 30, 30, 30], 70)
    [(0, 1), (1, 2), (2, 3)]
    """
    windows: list[tuple[int, ...]] = []
    first = 0
    while first < len(lengths):
        stop, used = first, 0
        while stop < len(lengths) and (stop == first or used + lengths[stop] <= room):
            used += lengths[stop]
            stop += 1
        windows.append(tuple(range(first, stop)))
        if stop == len(lengths):
            break
        shares = stop - 1 > first and lengths[stop - 1] + lengths[stop] <= room
        first = stop - 1 if shares else stop
    return windows
