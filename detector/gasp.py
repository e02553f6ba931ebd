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

from detector.errors import DetectorError
from detector.trace import F32, Trace

_NO_PASSES = "gasp reads leave-one-out passes that this trace does not hold: use loo=exact"


def gap(trace: Trace) -> F32:
    """(A,) nats, any sign: what all passages together add to each token's log-probability."""
    return trace.logprob - trace.logprob_no_context


def drops(trace: Trace) -> F32:
    """(K, A) nats, any sign: what each piece alone adds. Raises DetectorError without leave-one-out."""
    if trace.logprob_without is None:
        raise DetectorError(_NO_PASSES)
    return trace.logprob[None, :] - trace.logprob_without


def score(trace: Trace) -> F32:
    """(A,) negated sum of gap, jsd_none, largest drop and largest jsd_k of each token, unstandardised.

    Higher = less grounded. For a look at single tokens: sentence scores standardise each feature against
    reference statistics (`calibration.score`) and take the maximum after the mean.
    """
    if trace.jsd_without is None:
        raise DetectorError(_NO_PASSES)
    largest = drops(trace).max(axis=0) + trace.jsd_without.max(axis=0) if trace.pieces else 0.0
    return -(gap(trace) + trace.jsd_no_context + largest)


def score_gap(trace: Trace) -> F32:
    """(A,) the negated gap. Higher = less grounded."""
    return -gap(trace)


def score_jsd_none(trace: Trace) -> F32:
    """(A,) the negated divergence from the answer read without passages, in [-ln 2, 0]."""
    return -trace.jsd_no_context
