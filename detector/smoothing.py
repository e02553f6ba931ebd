"""Label persistence: what people mark comes in spans, so neighbouring tokens share evidence.

A step that any method's token scores can take. `Smoother` is the whole of it: evidence, persistence, and a
probability at the end, fitted on labelled answers; `persist` is the paper's formula alone.

Source: CORTEX (arXiv 2606.31033), section 3.4 and appendix A. The formula takes a score s as evidence s for
"unsupported" and 1 - s against it, from a uniform start and with equal chances to change in both directions:
a world where both labels are equally frequent. It must therefore be given probabilities as if they were
(`calibrate(balanced=True)`). Plain ones hold the base rate once per token, and over a span the product of
base rates outweighs all evidence. The paper's scores are balanced by the network's class weight, but
uncalibrated and over-confident. It gives no size for its clipping and two values for p_stay, both read off
the figures it reports; here p_stay is chosen on training answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import DetectorError
from detector.logistic import F64, Logistic, sigmoid

CLIP = 1e-4
"""Probabilities are smoothed as if they were at least this far from 0 and 1 (the paper: "a small amount")."""
P_STAY = (0.5, 0.7, 0.8, 0.9, 0.93, 0.96, 0.98, 0.99, 0.993, 0.995, 0.998)
"""Candidates for p_stay; .5 is no smoothing, .93 and .993 to .995 are the paper's."""

_NEVER_CERTAIN = 1e-12  # a score may reach 0 and 1, whose logits are infinite
_LEAST_SLOPE = 1e-2


def persist(probabilities: NDArray[Any], p_stay: float, *, clip: float = CLIP) -> F64:
    """(A,) probability that each token is unsupported, given the scores of all tokens of the answer.

    The posterior of a two-state chain: uniform start, a label stays from one token to the next with
    probability `p_stay` in (0, 1), emissions s and 1 - s with s in [clip, 1 - clip]. p_stay = .5 gives the
    clipped scores back. `probabilities`: (A,) in [0, 1]. Raises DetectorError. CORTEX, eqs. 8-12 and 13-33.
    """
    return persist_all([probabilities], p_stay, clip=clip)[0]


def persist_all(groups: Sequence[NDArray[Any]], p_stay: float, *, clip: float = CLIP) -> list[F64]:
    """`persist` for many answers at once, one array of token probabilities each."""
    if not 0.0 < p_stay < 1.0:
        raise DetectorError(f"p_stay must lie between 0 and 1, got {p_stay}")
    if not 0.0 < clip < 0.5:
        raise DetectorError(f"clip must lie between 0 and .5, got {clip}")
    evidence = np.zeros((2 * len(groups), max(map(len, groups), default=0)))
    ends = [len(group) for group in groups]
    for row, group in enumerate(groups):
        odds = _logit(group, clip)
        # The backward pass is the forward pass of the reversed answer: twice as many rows, one loop.
        evidence[2 * row, : len(odds)] = odds
        evidence[2 * row + 1, : len(odds)] = odds[::-1]
    messages = _forward(evidence, p_stay)
    smoothed = []
    for row, end in enumerate(ends):
        ahead, behind = messages[2 * row, :end], messages[2 * row + 1, :end][::-1]
        # Both messages hold the token's own evidence.
        smoothed.append(sigmoid(ahead + behind - evidence[2 * row, :end]))
    return smoothed


def window_maximum(scores: NDArray[Any], width: int) -> F64:
    """(A,) largest score among the `width` >= 1 tokens around each one, for comparison only.

    Where a window cannot be centred it reaches one token further to the right.
    """
    padded = np.pad(np.asarray(scores, np.float64), ((width - 1) // 2, width // 2), constant_values=-np.inf)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, width).max(axis=1))


def answer_score(smoothed: NDArray[Any]) -> float:
    """The answer's score: that of its worst token (CORTEX, section 4). `smoothed`: (A,), A >= 1."""
    return float(smoothed.max())


@dataclass(frozen=True, slots=True)
class Platt:
    """Scores in [0, 1] to calibrated probabilities: sigmoid(slope * logit(score) + bias)."""

    slope: float
    bias: float

    def apply(self, scores: NDArray[Any]) -> F64:
        """(A,) probabilities of (A,) scores. Raises DetectorError where a score is outside [0, 1]."""
        return sigmoid(self.slope * _logit(scores, _NEVER_CERTAIN) + self.bias)

    def to_parts(self) -> dict[str, Any]:
        """Slope and bias as numbers."""
        return {"slope": self.slope, "bias": self.bias}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> "Platt":
        """What `to_parts` gave."""
        return cls(float(parts["slope"]), float(parts["bias"]))


def calibrate(scores: NDArray[Any], labels: NDArray[np.bool_], *, balanced: bool = False) -> Platt:
    """Fit on (N,) scores in [0, 1] and (N,) labels, both classes present, that the scoring head never saw.

    `balanced`: probabilities as if half of the tokens were unsupported, which is what `persist` reads. The
    slope is lightly penalised (as in `Logistic`), so that a few tokens which happen to be separable do not
    become certainties, and never negative: a higher score stays a higher score even where the labels given
    here are too few to show it. Raises DetectorError. Platt, 1999.
    """
    if labels.all() or not labels.any():
        raise DetectorError("calibration needs tokens with and without unsupported text; label more answers")
    line = Logistic.fit(_logit(scores, _NEVER_CERTAIN)[:, None], labels, balanced=balanced)
    slope = max(float(line.weight[0] / line.sd[0]), _LEAST_SLOPE)
    return Platt(slope, line.bias - slope * float(line.mean[0]))


def choose_p_stay(
    probabilities: Sequence[NDArray[Any]],
    labels: Sequence[NDArray[np.bool_]],
    candidates: Sequence[float] = P_STAY,
    *,
    clip: float = CLIP,
) -> float:
    """The candidate under which the smoothed tokens have the highest average precision; ties: the first.

    One array of probabilities and one of labels per answer, some label True. Pass training answers only:
    a p_stay that was read off the answers it is judged on flatters (as in the paper).
    """
    from sklearn.metrics import average_precision_score

    truth = np.concatenate(labels)
    if not truth.any():
        raise DetectorError("p_stay cannot be chosen where no token is unsupported; label more answers")
    return max(
        candidates,
        key=lambda p: average_precision_score(
            truth, np.concatenate(persist_all(probabilities, p, clip=clip))
        ),
    )


@dataclass(frozen=True, slots=True)
class Smoother:
    """Token scores of one answer to calibrated, smoothed probabilities."""

    evidence: Platt
    """Scores to balanced probabilities, which `persist` reads."""
    p_stay: float | None
    """Label persistence; None where tokens stand alone."""
    output: Platt
    """Smoothed (or, without p_stay, balanced) probabilities to plain ones. Keeps the order."""

    @classmethod
    def fit(
        cls,
        scores: Sequence[NDArray[Any]],
        labels: Sequence[NDArray[np.bool_]],
        *,
        smooth: bool = True,
        candidates: Sequence[float] = P_STAY,
    ) -> "Smoother":
        """Fit on training answers that the scoring head never saw: one array of scores in [0, 1] and one of
        labels each, both classes present. Five numbers, so a few answers do. Raises DetectorError.
        """
        truth = np.concatenate(labels)
        evidence = calibrate(np.concatenate(scores), truth, balanced=True)
        balanced = [evidence.apply(group) for group in scores]
        p_stay = choose_p_stay(balanced, labels, candidates) if smooth else None
        smoothed = balanced if p_stay is None else persist_all(balanced, p_stay)
        return cls(evidence, p_stay, calibrate(np.concatenate(smoothed), truth))

    def apply(self, scores: NDArray[Any]) -> F64:
        """(A,) probabilities of the (A,) scores of all tokens of an answer, in order."""
        balanced = self.evidence.apply(scores)
        return self.output.apply(balanced if self.p_stay is None else persist(balanced, self.p_stay))

    def to_parts(self) -> dict[str, Any]:
        """Numbers; without smoothing there is no `p_stay`."""
        parts = {f"evidence_{name}": number for name, number in self.evidence.to_parts().items()}
        parts |= {f"output_{name}": number for name, number in self.output.to_parts().items()}
        return parts if self.p_stay is None else parts | {"p_stay": self.p_stay}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> "Smoother":
        """What `to_parts` gave; other names in `parts` are ignored."""
        evidence, output = (
            Platt.from_parts({name: parts[f"{step}_{name}"] for name in ("slope", "bias")})
            for step in ("evidence", "output")
        )
        return cls(evidence, float(parts["p_stay"]) if "p_stay" in parts else None, output)


def _forward(evidence: F64, p_stay: float) -> F64:
    """(N, A) log-odds of each label given the evidence up to and with its token, left to right.

    Log-odds are all that a two-state chain passes on, and nothing underflows in them. Columns of 0 behind an
    answer's end say nothing about it: their message is exactly 0.
    """
    stay, leave = np.log(p_stay), np.log1p(-p_stay)
    messages = evidence.copy()
    for i in range(1, evidence.shape[1]):
        before = messages[:, i - 1]
        messages[:, i] += np.logaddexp(stay + before, leave) - np.logaddexp(leave + before, stay)
    return messages


def _logit(scores: NDArray[Any], clip: float) -> F64:
    exact = np.asarray(scores, dtype=np.float64)
    if not ((exact >= 0.0) & (exact <= 1.0)).all():
        raise DetectorError("smoothing and calibration read probabilities, but a score lies outside [0, 1]")
    exact = np.clip(exact, clip, 1.0 - clip)
    return np.asarray(np.log(exact) - np.log1p(-exact))
