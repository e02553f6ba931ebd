"""Token probabilities: four statistics of one pass with passages, and a logistic regression on them.

Quevedo et al. (2024), as used in "Detecting RAG Hallucinations with Output Probabilities and Attention":

    min_p       lowest probability of a realised token
    mean_p      mean probability of the realised tokens
    max_gap     largest distance between the preferred token's probability and the realised one's
    min_spread  smallest distance between the most and the least likely token of the vocabulary

The published code reads the distribution at the token's own position, which is that of the next token. A
Trace's rows predict their own token, so nothing is off by one here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import DetectorError
from detector.heads import Labelled, Tokens, spread
from detector.logistic import Logistic
from detector.trace import F32, Trace

F64 = NDArray[np.float64]

FEATURES = ("min_p", "mean_p", "max_gap", "min_spread")
NEEDS = frozenset({"logprob", "top_logprob", "bottom_logprob"})
"""Trace fields that the features read."""


def score(trace: Trace) -> F32:
    """(A,) 1 - p(token | passages), in [0, 1]; needs no labels. Higher = less grounded."""
    return -np.expm1(np.minimum(trace.logprob, 0.0))


def features(trace: Trace, sentences: Sequence[Tokens]) -> F64:
    """(n, 4) FEATURES of each sentence, all in [0, 1]. Raises DetectorError without the extremes."""
    if trace.top_logprob is None or trace.bottom_logprob is None:
        raise DetectorError(
            "token_probability reads the most and least likely token, which this trace does not hold: "
            "measure with extremes"
        )
    own, top, bottom = (
        np.exp(x.astype(np.float64)) for x in (trace.logprob, trace.top_logprob[0], trace.bottom_logprob[0])
    )
    rows = np.empty((len(sentences), len(FEATURES)))
    for row, tokens in zip(rows, sentences, strict=True):
        p = own[tokens]
        row[:] = p.min(), p.mean(), (top[tokens] - p).max(), (top[tokens] - bottom[tokens]).min()
    return rows


@dataclass(frozen=True, slots=True)
class TokenProbabilityHead:
    """Standardised logistic regression on the four features of a sentence (detector.heads.Head)."""

    model: Logistic

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) probability that the sentence is unsupported."""
        return self.model.probability(features(trace, sentences))

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) each token's sentence probability: the features are defined on spans only."""
        return spread(self.sentences(trace, sentences), sentences, len(trace.token_ids))

    def to_parts(self) -> dict[str, Any]:
        """The regression's own parts."""
        return self.model.to_parts()


def from_parts(parts: Mapping[str, Any]) -> TokenProbabilityHead:
    """The head that `to_parts` described."""
    return TokenProbabilityHead(Logistic.from_parts(parts))


def fit(examples: Sequence[Labelled], *, seed: int = 0) -> TokenProbabilityHead:
    """Fit on the sentences of labelled answers. `seed` changes nothing: the solver draws no numbers.

    Raises DetectorError unless both supported and unsupported sentences are among them.
    """
    rows = [features(example.trace, example.sentences) for example in examples]
    labels = [example.sentence_labels for example in examples]
    if len({bool(label) for some in labels for label in some}) < 2:
        raise DetectorError(
            "token_probability: fitting needs supported and unsupported sentences, found one kind only; "
            "add labelled answers"
        )
    return TokenProbabilityHead(Logistic.fit(np.concatenate(rows), np.concatenate(labels)))
