"""Standardised logistic regression: the one linear model that every trained method shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


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
        from sklearn.linear_model import LogisticRegression

        mean = features.mean(axis=0, dtype=np.float64)
        sd = features.std(axis=0, dtype=np.float64)
        sd[sd < 1e-12] = 1.0  # a constant tells nothing and must not divide by zero
        scaled = ((features - mean) / sd).astype(features.dtype, copy=False)
        model = LogisticRegression(C=c, max_iter=1000, class_weight="balanced" if balanced else None)
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


def sigmoid(logit: NDArray[Any]) -> F64:
    """1 / (1 + exp(-x)), without overflow at either end."""
    logit = np.asarray(logit, dtype=np.float64)
    small = np.exp(-np.abs(logit))
    return np.asarray(np.where(logit >= 0, 1.0, small) / (1.0 + small))
