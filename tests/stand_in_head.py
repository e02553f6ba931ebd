"""A trained head of one layer and no training, for tests of everything around bundles.

The module stands in for `detector.ensemble` where a test says so (`install`); Ray workers import it by name.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detector.bundle import Bundle, Card, Verdict
from detector.probe import Keep
from detector.trace import Trace
from jobs.config import Config

OPERATING_POINTS = {0.01: 0.9, 0.02: 0.8, 0.05: 0.6, 0.1: 0.5, 0.2: 0.3}


@dataclass(frozen=True)
class StandInHead:
    """Log-odds = weight . (mean change of the states) + share of attention on the passages - gap."""

    weight: np.ndarray
    rule: str = "max"

    @property
    def keep(self) -> Keep:
        return Keep(leave_one_out=False, attention=True, layers=(2,))

    def judge(self, trace: Trace, sentences: Sequence[Any]) -> tuple[list[Verdict], float]:
        found = []
        for tokens in sentences:
            states = float((trace.states[0, 0] - trace.states[0, 1])[tokens + 1].mean(axis=0) @ self.weight)
            attention = float(trace.attention_passages[:, :, tokens].mean())
            likelihood = -float((trace.logprob - trace.logprob_no_context)[tokens].mean())
            logit = states + attention + likelihood
            found.append(Verdict(float(1 / (1 + np.exp(-logit))), states, attention, likelihood))
        probabilities = np.array([verdict.probability for verdict in found])
        return found, float(getattr(probabilities, self.rule)())

    def to_parts(self) -> dict[str, Any]:
        return {"states": {"weight": self.weight}, "response_rule": self.rule}


def from_parts(parts: Mapping[str, Any]) -> StandInHead:
    return StandInHead(parts["states"]["weight"], parts["response_rule"])


def head(width: int = 32, seed: int = 0) -> StandInHead:
    """A head for a scorer of this width (the tiny one's)."""
    return StandInHead(np.random.default_rng(seed).normal(size=width))


def bundle(fingerprint: str, seed: int = 0, **changes: Any) -> Bundle:
    """A bundle of that head for the scorer with this fingerprint; `changes` go into its card."""
    made = head(seed=seed)
    card = {
        "method": "ensemble",
        "scorer": "tiny",
        "scorer_fingerprint": fingerprint,
        "profile": "plain",
        "keep": made.keep,
        "operating_points": OPERATING_POINTS,
        "data": "Made-Up QA, English",
        "data_fingerprint": "da7a",
        "versions": {"leadline": "0", "numpy": np.__version__},
        "figures": {"sentence": {"auroc": 0.5}},
        "limits": "It learned nothing.",
    }
    return Bundle(Card(**card | changes), made.to_parts())


def install(modules: dict[str, Any] = sys.modules) -> None:
    """Stand in for `detector.ensemble` in this process (with monkeypatch: for one test)."""
    modules["detector.ensemble"] = sys.modules[__name__]


def load(config: Config) -> Any:
    """What `jobs.worker.load_scorer` does, with this head for the bundle's."""
    from jobs.worker import load_scorer

    install()
    return load_scorer(config)
