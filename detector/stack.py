"""The article's detector: token probabilities and lookback ratios, each scored, the two scores stacked.

"Detecting RAG Hallucinations with Output Probabilities and Attention": a logistic regression over the
held-out scores of two component classifiers (five-fold cross-fitting), the components then refitted on
everything. The article scores whole answers; this does so per sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detector import lookback, token_probability
from detector.evaluation import folds
from detector.heads import F64, Head, Labelled, Tokens, spread
from detector.logistic import Logistic
from detector.trace import Trace

_FOLDS = 5


@dataclass(frozen=True, slots=True)
class StackHead:
    """Two components and the regression over their sentence scores."""

    probability: Head
    attention: Head
    combined: Logistic

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) the score of the token's sentence."""
        return spread(self.sentences(trace, sentences), sentences, len(trace.token_ids))

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) probability that the sentence is unsupported. Higher = less grounded."""
        return self.combined.probability(_scores(self.probability, self.attention, trace, sentences))

    def to_parts(self) -> dict[str, Any]:
        """The parts of both components and of the regression, nested."""
        return {
            "probability": self.probability.to_parts(),
            "attention": self.attention.to_parts(),
            "combined": self.combined.to_parts(),
        }


def from_parts(parts: Mapping[str, Any]) -> StackHead:
    """What `to_parts` gave."""
    return StackHead(
        token_probability.from_parts(parts["probability"]),
        lookback.from_parts(parts["attention"]),
        Logistic.from_parts(parts["combined"]),
    )


def fit(examples: Sequence[Labelled], *, seed: int = 0) -> StackHead:
    """Fit on measured answers (Keep(extremes=True, attention=True)), folds grouped by source."""
    part = folds([e.source_id for e in examples], np.array([e.label for e in examples]), _FOLDS, seed)
    held_out = [np.zeros((0, 2))] * len(examples)
    for fold in range(_FOLDS):
        rest = [e for e, of in zip(examples, part, strict=True) if of != fold]
        components = token_probability.fit(rest, seed=seed), lookback.fit(rest, seed=seed)
        for index in np.flatnonzero(part == fold).tolist():
            held_out[index] = _scores(*components, examples[index].trace, examples[index].sentences)
    combined = Logistic.fit(np.concatenate(held_out), np.concatenate([e.sentence_labels for e in examples]))
    return StackHead(token_probability.fit(examples, seed=seed), lookback.fit(examples, seed=seed), combined)


def _scores(probability: Head, attention: Head, trace: Trace, sentences: Sequence[Tokens]) -> F64:
    return np.stack([probability.sentences(trace, sentences), attention.sentences(trace, sentences)], axis=1)
