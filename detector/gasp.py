"""GASP: grounding sensitivity by perturbation of the context (the main method).

An answer token that rests on a passage loses likelihood, and its whole distribution moves, when the passage
goes; an invented one does not react. Four readings per token, in nats (GASP, sections 3.1-3.3):

    gap       log p(t | all passages) - log p(t | none)
    jsd_none  JSD of the two next-token distributions
    drop_k    log p(t | all) - log p(t | all but piece k)
    jsd_k     JSD of those two

Sentence and response features are means over tokens first, then maxima over k (`aggregate`). The score is
the negated sum of the four standardised features; `gap` and `jsd_none` alone are methods of their own,
because they beat the sum at several levels in the author's own data.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from detector.errors import DetectorError
from detector.trace import F32, Trace

Float = TypeVar("Float", bound=np.floating[Any])

_NO_PASSES = "gasp reads leave-one-out passes that this trace does not hold: use loo=exact"


def gap(trace: Trace) -> F32:
    """(A,) nats, any sign: what all passages together add to each token's log-probability."""
    return trace.logprob - trace.logprob_no_context


def drops(trace: Trace) -> F32:
    """(K, A) nats, any sign: what each piece alone adds. Raises DetectorError without leave-one-out."""
    if trace.logprob_without is None:
        raise DetectorError(_NO_PASSES)
    return trace.logprob[None, :] - trace.logprob_without


def jsds(trace: Trace) -> F32:
    """(K, A) in [0, ln 2]: how far each piece alone moves the distribution. Raises like `drops`."""
    if trace.jsd_without is None:
        raise DetectorError(_NO_PASSES)
    return trace.jsd_without


def largest(values: NDArray[Float]) -> NDArray[Float]:
    """(K, ...) -> (...) maximum over the pieces, the paper's choice: one passage is enough. 0 without any."""
    return _over(np.max, values)


def top2_mean(values: NDArray[Float]) -> NDArray[Float]:
    """(K, ...) -> (...) mean of the two largest: support may be split over two passages (section 13)."""
    return mean(np.sort(values, axis=0)[-2:])


def mean(values: NDArray[Float]) -> NDArray[Float]:
    """(K, ...) -> (...) mean over the pieces. 0 without any."""
    return _over(np.mean, values)


def lowest(values: NDArray[Float]) -> NDArray[Float]:
    """(K, ...) -> (...) minimum over the pieces. Of drops: below 0 where removing some piece RAISES the
    likelihood, which the paper suspects of contradiction (section 9.3) and leaves open. 0 without any.
    """
    return _over(np.min, values)


def score(trace: Trace) -> F32:
    """(A,) negated sum of gap, jsd_none, largest drop and largest jsd_k of each token, unstandardised.

    Higher = less grounded. For a look at single tokens: sentence scores standardise each feature against
    reference statistics (`calibration.score`) and take the maximum after the mean.
    """
    return _score_over(trace, largest)


def score_top2(trace: Trace) -> F32:
    """(A,) `score` with the mean of the two largest drops and divergences in place of the largest."""
    return _score_over(trace, top2_mean)


def score_mean(trace: Trace) -> F32:
    """(A,) `score` with the mean over all pieces in place of the largest."""
    return _score_over(trace, mean)


def score_signed(trace: Trace) -> F32:
    """(A,) nats: the most that removing one piece adds to a token's log-probability. Higher = less grounded.

    Below 0 where every removal costs something.
    """
    return -lowest(drops(trace))


def score_gap(trace: Trace) -> F32:
    """(A,) the negated gap. Higher = less grounded."""
    return -gap(trace)


def score_jsd_none(trace: Trace) -> F32:
    """(A,) the negated divergence from the answer read without passages, in [-ln 2, 0]."""
    return -trace.jsd_no_context


def _score_over(trace: Trace, reduce: Callable[[F32], F32]) -> F32:
    pieces = reduce(drops(trace)) + reduce(jsds(trace))
    return -(gap(trace) + trace.jsd_no_context + pieces)


def _over(reduce: Callable[..., Any], values: NDArray[Float]) -> NDArray[Float]:
    """A record in which nothing could be removed gives 0, not an error."""
    return np.asarray(
        reduce(values, axis=0) if len(values) else np.zeros_like(values, shape=values.shape[1:])
    )
