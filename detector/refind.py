"""REFIND: the context sensitivity ratio of each answer token (Lee and Yu, SemEval-2025 Task 3, section 3.2).

    CSR = log p(t | passages, question, answer so far) / log p(t | question, answer so far)

A token that the passages make certain has a numerator near 0, so its ratio is near 0; one that they make no
easier has a ratio of 1 or more. The paper adds an epsilon to the denominator; added to a number that is
never positive it has the wrong sign, and where the token is certain without passages the ratio turns into a
huge negative number that no threshold reaches. Here the denominator is clamped instead, and `compat=True`
gives the published behaviour.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.logistic import sigmoid
from detector.trace import F32, I32, Trace

F64 = NDArray[np.float64]
Span = tuple[int, int]
"""Code points start:end of the answer, end exclusive."""

DELTAS = (0.1, 0.2, 0.3, 0.4)
"""The thresholds that the paper compares (figure 3). It picks none of them on held-out data."""

EPSILON = 1e-8
"""Nats. The denominator is at most minus this; `compat` adds it."""

CERTAIN = 1e-5
"""Nats. Two log-probabilities closer to 0 than this are rounding noise of float32 logits, and so is their
ratio."""

CAP = 1e4
"""The largest ratio (in `compat` also, negated, the smallest): what would be infinite is this."""

SEPARATOR = "\n"
"""What follows each passage in a `refind` prompt."""

ANSWER_HEADER = "### Answer\n"
"""The end of a `refind` prompt with passages; it counts as answer where attention is read."""


def csr(trace: Trace, *, compat: bool = False) -> F64:
    """(A,) ratios in [0, CAP], higher = less grounded; always finite.

    Certain either way (both within CERTAIN of 0): 0, because certain with the passages is what the ratio
    calls grounded. Impossible either way: 1, the ratio of equals. Impossible with the passages alone: CAP.
    Impossible without them alone: 0.

    `compat`: the published code, log p / (log p_none + 1e-8), in [-CAP, CAP]; a probability is zero where it
    underflows float32; both zero: 0, as the code skips the token and it is never flagged. Its infinities
    become CAP with their sign, and a denominator of exactly 0 counts as one just above.
    """
    full = np.minimum(trace.logprob.astype(np.float64), 0.0)
    none = np.minimum(trace.logprob_no_context.astype(np.float64), 0.0)
    if compat:
        return _published(full, none)
    certain = (full > -CERTAIN) & (none > -CERTAIN)
    impossible, impossible_without = np.isneginf(full), np.isneginf(none)
    with np.errstate(invalid="ignore"):  # -inf / -inf, decided in the next line
        ratio = full / np.minimum(none, -EPSILON)
    ratio = np.where(impossible & impossible_without, 1.0, ratio)
    return np.where(certain, 0.0, np.minimum(ratio, CAP))


def _published(full: F64, none: F64) -> F64:
    with np.errstate(under="ignore"):
        zero, zero_without = (np.exp(x.astype(np.float32)) == 0 for x in (full, none))
    denominator = none + EPSILON
    denominator[denominator == 0] = np.finfo(np.float64).tiny
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.clip(full / denominator, -CAP, CAP)
    ratio = np.where(zero, CAP, ratio)
    return np.where(zero_without, 0.0, ratio)


def score(trace: Trace) -> F32:
    """(A,) the ratio as it is, in [0, CAP]: thresholds of the paper apply. Higher = less grounded.

    One certain token can outweigh a sentence in a mean: average `soft` of it instead.
    """
    return csr(trace).astype(np.float32)


def soft(ratio: NDArray[Any]) -> F64:
    """sigmoid(CSR), the published soft label: in [0.5, 1] for ratios that are not negative."""
    return sigmoid(ratio)


def flagged_spans(ratio: NDArray[Any], offsets: I32, delta: float) -> list[Span]:
    """Spans of the answer whose tokens have a ratio of at least `delta`, in order, disjoint, never empty.

    Neighbouring flagged tokens make one span, with whatever stands between them. Byte-level tokens of one
    character share their offsets: the character is flagged where any of them is.
    """
    flagged = np.concatenate([[False], ratio >= delta, [False]])
    edges = np.flatnonzero(flagged[1:] != flagged[:-1]).reshape(-1, 2)  # first and one past the last token
    spans: list[Span] = []
    for first, stop in edges.tolist():
        start, end = int(offsets[first:stop, 0].min()), int(offsets[first:stop, 1].max())
        if spans and start <= spans[-1][1]:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        if start < end:
            spans.append((start, end))
    return spans


def iou(predicted: Iterable[Span], gold: Iterable[Span]) -> float:
    """Intersection over union of the characters of two lists of spans, in [0, 1] (REFIND, equation 2).

    1 where both are empty. Characters that several spans share count once.
    """
    ours, theirs = _characters(predicted), _characters(gold)
    union = ours | theirs
    return len(ours & theirs) / len(union) if union else 1.0


def _characters(spans: Iterable[Span]) -> set[int]:
    return {position for start, end in spans for position in range(start, end)}


@dataclass(frozen=True, slots=True)
class PromptText:
    """The texts of a `refind` prompt: `before` + each passage and SEPARATOR + `after`, or `none` alone."""

    before: str
    after: str
    """Ends with ANSWER_HEADER."""
    none: str


def prompt_text(question: str) -> PromptText:
    """What stands around the passages, and the prompt without any: the bare question, no template.

    The paper's figure with the instruction did not come down to us as text: the sections are the published
    code's, the sentence is ours. A blank question becomes a newline, since the first answer token needs a
    token to be predicted from.
    """
    return PromptText(
        before="You are an assistant that answers questions. Rely on the references.\n\n### References\n",
        after=f"\n### Question\n{question}\n\n{ANSWER_HEADER}",
        none=question if question.strip() else "\n",
    )
