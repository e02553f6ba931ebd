"""Standardised logistic regression: the one linear model that every trained method shares."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_BLOCK = 4096  # rows: a float64 copy of a whole training set of tokens would not fit

_STEPS = 100
"""L-BFGS steps. In float32 the last digits never settle and a thousand steps change no figure."""


@dataclass(frozen=True, slots=True)
class Logistic:
    """p = sigmoid(weight . (x - mean) / sd + bias). All of shape (F,) except the bias."""

    mean: F64
    sd: F64
    weight: F64
    bias: float

    @classmethod
    def fit(
        cls, features: NDArray[Any], labels: NDArray[np.bool_], *, c: float = 1.0, balanced: bool = False
    ) -> "Logistic":
        """Fit on (N, F) finite features and (N,) labels, both classes present.

        `c` is the inverse of the L2 penalty as in scikit-learn (whose L-BFGS solver runs; no randomness).
        `balanced` weights classes inversely to their frequency, which moves the bias and not the order much.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        mean = features.mean(axis=0, dtype=np.float64)
        scaled = features - mean.astype(features.dtype)
        sd = np.sqrt(
            sum(_squares(scaled[i : i + _BLOCK]) for i in range(0, len(scaled), _BLOCK)) / len(scaled)
        )
        sd[sd < 1e-12] = 1.0  # a constant tells nothing and must not divide by zero
        scaled /= sd.astype(features.dtype)
        model = LogisticRegression(C=c, max_iter=_STEPS, class_weight="balanced" if balanced else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(scaled, labels)
        return cls(mean, sd, model.coef_[0].astype(np.float64), float(model.intercept_[0]))

    def logit(self, features: NDArray[Any]) -> F64:
        """(N,) log-odds of (N, F) features."""
        # One product: (x - mean) / sd for a whole night of tokens would be a copy of it.
        scaled = self.weight / self.sd
        return np.asarray(features @ scaled + (self.bias - float(self.mean @ scaled)), dtype=np.float64)

    def probability(self, features: NDArray[Any]) -> F64:
        """(N,) in (0, 1)."""
        return sigmoid(self.logit(features))

    def to_parts(self) -> dict[str, Any]:
        """mean, sd, weight as arrays, bias as a number."""
        return {"mean": self.mean, "sd": self.sd, "weight": self.weight, "bias": self.bias}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> "Logistic":
        """What `to_parts` gave."""
        return cls(parts["mean"], parts["sd"], parts["weight"], float(parts["bias"]))


def _squares(block: NDArray[Any]) -> F64:
    return np.asarray(np.square(block, dtype=np.float64).sum(axis=0))


def sigmoid(logit: NDArray[Any]) -> F64:
    """1 / (1 + exp(-x)), without overflow at either end."""
    logit = np.asarray(logit, dtype=np.float64)
    small = np.exp(-np.abs(logit))
    return np.asarray(np.where(logit >= 0, 1.0, small) / (1.0 + small))
