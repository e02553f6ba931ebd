"""Token numbers to sentence and response numbers.

Order matters and is the authors' (GASP, section 3): mean over the tokens of a span first, then the maximum
over the removed pieces. The whole per-piece vector is kept beside the maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from detector.trace import I32, Piece, Trace

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Features:
    """Means over the tokens of one span, in nats.

    `drops[k]` and `jsds[k]` belong to the record's piece k; None where the piece was not in the window that
    the span was read in, or with leave-one-out off. `max_drop` and `max_jsd` are their largest values.
    """

    gap: float
    jsd_none: float
    max_drop: float | None
    max_jsd: float | None
    surprisal: float
    entropy: float
    drops: tuple[float | None, ...]
    jsds: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SentenceMeasurement:
    """One sentence `start:end` of the answer (code points), read in its best of `n_windows` windows."""

    index: int
    start: int
    end: int
    n_tokens: int
    n_windows: int
    truncated: bool
    features: Features
    evidence: Piece | None
    """The piece whose removal costs the sentence most; None with leave-one-out off."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is stored about one answer: numbers without opinions."""

    sentences: tuple[SentenceMeasurement, ...]
    features: Features
    n_passages: int
    n_context_tokens: int
    n_answer_tokens: int
    n_computed_tokens: int
    n_windows: int
    truncated: bool
