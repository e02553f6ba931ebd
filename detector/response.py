"""From the sentences of an answer to the answer: a rule, chosen on training answers."""

from collections.abc import Callable, Sequence

import numpy as np

from detector.evaluation import auroc
from detector.heads import F64


def _top2(scores: F64) -> float:
    return float(np.sort(scores)[-2:].mean())


def _noisy_or(scores: F64) -> float:
    # As a sum of logarithms, so that thirty sentences do not all round to 1.
    return float(-np.log1p(-np.clip(scores, 0.0, 1.0 - 1e-9)).sum())


RULES: dict[str, Callable[[F64], float]] = {
    "max": lambda scores: float(scores.max()),
    "mean": lambda scores: float(scores.mean()),
    "top2": _top2,
    "noisy_or": _noisy_or,
}
"""Each turns (n,) sentence scores, n >= 1, into one number; higher = less grounded. `noisy_or` reads
probabilities: minus the log of the chance that every sentence is supported."""


def apply_rule(name: str, sentence_scores: Sequence[F64]) -> F64:
    """(N,) one number per answer; an answer without a sentence gets the lowest of the others."""
    values = [RULES[name](scores) if len(scores) else np.inf for scores in sentence_scores]
    found = np.array(values, dtype=np.float64)
    missing = np.isinf(found)
    if missing.any():
        found[missing] = found[~missing].min() if (~missing).any() else 0.0
    return found


def choose_rule(sentence_scores: Sequence[F64], labels: Sequence[bool], *, probabilities: bool) -> str:
    """The rule with the best AUROC over training answers (the first of equals); `noisy_or` only where scores
    are probabilities.
    """
    names = [name for name in RULES if probabilities or name != "noisy_or"]
    truth = np.asarray(labels, dtype=bool)
    return max(names, key=lambda name: auroc(truth, apply_rule(name, sentence_scores)))
