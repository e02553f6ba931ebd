"""Trained heads: what a method that learns from labels is given, and what it must answer.

A head is a plain object with two readings of a trace (tokens, sentences) and a form that can be stored
without pickle. Its module offers `fit`, which makes one from labelled answers; `bundle` stores and loads
them, `evaluation` fits them inside folds. Scores are probabilities that a span is unsupported, in [0, 1].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detector.trace import Trace

F64 = NDArray[np.float64]
Tokens = NDArray[np.int64]
"""Indices of the answer tokens of one sentence, at least one, ascending."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One window of one answer with the labels that people gave it."""

    trace: Trace
    sentences: tuple[Tokens, ...]
    """Token indices per sentence, in order; some tokens may belong to none."""
    token_labels: NDArray[np.bool_]
    """(A,) True where the token overlaps unsupported text."""
    sentence_labels: NDArray[np.bool_]
    """(n,) True where the sentence overlaps unsupported text."""
    label: bool
    """Whether the answer holds unsupported text."""
    source_id: str
    """Answers to one question and its passages share it: folds and bootstrap draw whole sources."""
    generator: str = ""
    task: str = ""
    language: str = ""


class Head(Protocol):
    """A fitted method. Higher = less grounded; both answers are probabilities in [0, 1]."""

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) one score per answer token. A head that only reads whole sentences spreads theirs."""
        ...

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) one score per sentence."""
        ...

    def to_parts(self) -> Mapping[str, Any]:
        """What is stored: name -> numpy array, str (a LightGBM model as text) or number. The
        module's `from_parts` reads it back to an equal head.
        """
        ...


def spread(scores: F64, sentences: Sequence[Tokens], n_tokens: int) -> F64:
    """(A,) each token's sentence score; tokens of no sentence get the lowest one (0 where there is none)."""
    tokens = np.full(n_tokens, scores.min() if len(scores) else 0.0)
    for value, members in zip(scores, sentences, strict=True):
        tokens[members] = value
    return tokens
