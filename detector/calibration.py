"""Reference statistics, sentence scores and the flag budget: the opinions, kept apart from what was measured.

A score says how far a sentence lies from the average sentence of a reference, in standard deviations and in
the direction of "less grounded". Until labels have been seen it is no probability, and the threshold is a
budget (how many sentences to show), not an error rate. A trained method's score is a probability, and its
threshold may be an operating point: a false-alarm rate that was measured on labelled data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import ProfileError
from detector.methods import Method

F64 = NDArray[np.float64]

FEATURES = (
    *("gap", "jsd_none", "max_drop", "max_jsd", "surprisal", "entropy", "absent_pairs", "attention_share"),
    *("n_tokens", "log_tokens"),
)
"""What a reference can hold statistics of: the measured features, the length in tokens and its logarithm."""

UNSCALED = "gasp"
"""What decides without statistics: the one sum of which every feature has the same unit, nats."""

NOTE = (
    "Scores are sums of standardised features, not probabilities. The threshold marks the flag_budget share "
    "of the sentences of the run named in threshold_from; it is a budget and not an error rate."
)
NOTE_OPERATING_POINT = (
    "Scores of the deciding method are probabilities of a trained head. At the threshold it flagged the "
    "target_fpr share of the supported sentences of its own training data, scored by heads that had not seen "
    "them; on other traffic that share is not known."
)

TARGET_FPR = 0.05
"""The operating point where none is asked for: the share of supported sentences that it flags."""

_VERSION = 1
_UNIT_EXPONENT = 1126  # every finite float64 is a whole number of 2**-1126


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a feature's zero is and how long its unit is. `sd` is always positive."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of one feature, as exact integers.

    Floating-point sums depend on the order of adding, so the last bits of a threshold would depend on how the
    logs were cut into units. These add up to the same numbers in any order and under any split.
    """

    n: int = 0
    units: int = 0
    """The sum, in units of 2**-1126."""
    square_units: int = 0
    """The sum of squares, in units of 2**-2252."""

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Moments":
        """Moments of a one-dimensional array. Raises ValueError where a value is not finite (or over 1e150,
        whose square would not be).
        """
        exact = np.asarray(values, dtype=np.float64)
        if not (np.abs(exact) < 1e150).all():
            raise ValueError("moments of a value that is not finite")
        mantissas, exponents = np.frexp(exact)
        integers = np.ldexp(mantissas, 53).astype(
            np.int64
        )  # value = integer * 2**(exponent - 53), no rounding
        units = square_units = 0
        for exponent in np.unique(exponents).tolist():
            group = integers[exponents == exponent].tolist()  # Python integers: their sums cannot overflow
            shift = exponent - 53 + _UNIT_EXPONENT
            units += sum(group) << shift
            square_units += sum(number * number for number in group) << 2 * shift
        return cls(len(exact), units, square_units)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.n + other.n, self.units + other.units, self.square_units + other.square_units)

    def __sub__(self, other: "Moments") -> "Moments":
        """What is left when values that were added are taken out again: exact, as sums are."""
        return Moments(self.n - other.n, self.units - other.units, self.square_units - other.square_units)

    @property
    def total(self) -> float:
        """The sum, rounded once."""
        return float(self._exact[0])

    @property
    def total_squares(self) -> float:
        """The sum of squares, rounded once."""
        return float(self._exact[1])

    def scale(self) -> Scale:
        """Mean and sample standard deviation (n - 1). A deviation of 0, or of fewer than two values, counts
        as 1: such a feature cannot tell sentences apart and must not divide by zero.
        """
        if self.n == 0:
            return Scale(0.0, 1.0)
        total, squares = self._exact
        variance = (squares - total * total / self.n) / max(self.n - 1, 1)
        return Scale(float(total / self.n), math.sqrt(variance) or 1.0)

    @property
    def _exact(self) -> tuple[Fraction, Fraction]:
        unit = Fraction(1, 1 << _UNIT_EXPONENT)
        return self.units * unit, self.square_units * unit * unit


@dataclass(frozen=True, slots=True)
class Reference:
    """What scores are standardised with and compared to, and what it was made of.

    Valid only for measurements of the same scorer, prompt profile and leave-one-out mode. A feature that was
    never measured (`max_drop` with leave-one-out off, `attention_share` where attention cannot be read, or
    before Leadline measured it) has no entry.
    """

    statistics_from: str
    """The run whose sentences and responses the scales describe."""
    scorer: str
    scorer_fingerprint: str
    profile: str
    """The prompt profile."""
    loo: str
    n_sentences: int
    n_responses: int
    sentences: Mapping[str, Scale]
    responses: Mapping[str, Scale]
    deciding_method: str
    """The method that `threshold` belongs to."""
    threshold: float | None = None
    """A sentence is flagged at this score or above; None until sentences have been scored."""
    threshold_from: str | None = None
    """The run whose sentences were ranked to find it, or `bundle DIGEST` for an operating point of that."""
    flag_budget: float | None = None
    """The largest share of those sentences that may be flagged, in (0, 1)."""
    target_fpr: float | None = None
    """The false-alarm rate of the operating point, in (0, 1); None where the threshold is a budget."""
    bundle: str | None = None
    """Digest of the bundle whose probabilities the threshold is compared with."""

    @classmethod
    def identity(cls) -> "Reference":
        """Mean 0 and sd 1 for everything: for one record on its own, where there is no traffic to compare
        with. Its scores rank the sentences of one answer and have no threshold; UNSCALED decides.
        """
        plain = dict.fromkeys(FEATURES, Scale(0.0, 1.0))
        return cls("identity", "", "", "", "", 0, 0, plain, plain, UNSCALED)

    def to_json(self) -> str:
        """The profile file: readable, the same bytes for the same reference."""
        note = NOTE if self.target_fpr is None else NOTE_OPERATING_POINT
        tree = {"version": _VERSION, "note": note} | asdict(self)
        return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Reference":
        """Read what `to_json` wrote. Raises ProfileError for anything else: unknown or missing keys, wrong
        types, numbers that are not finite.
        """
        try:
            tree = json.loads(text)
        except ValueError:
            raise ProfileError("not JSON; make it again with `leadline judge` or `leadline audit`") from None
        if not isinstance(tree, dict) or tree.get("version") != _VERSION:
            raise ProfileError(f"not a reference profile of version {_VERSION} (see OUT/profile.json)")
        known = {field.name for field in fields(cls)}
        tree = {"target_fpr": None, "bundle": None} | tree  # a profile from before there were bundles
        if tree.keys() != known | {"version", "note"}:
            odd = min(tree.keys() ^ (known | {"version", "note"}))
            raise ProfileError(f"key {odd!r} is {'unknown' if odd in tree else 'missing'}")
        for share in ("flag_budget", "target_fpr"):
            value = _number_or_none(tree, share)
            if value is not None and not 0 < value < 1:
                raise ProfileError(f"{share} must lie between 0 and 1, got {value}")
        return cls(
            statistics_from=_text(tree, "statistics_from"),
            scorer=_text(tree, "scorer"),
            scorer_fingerprint=_text(tree, "scorer_fingerprint"),
            profile=_text(tree, "profile"),
            loo=_text(tree, "loo"),
            n_sentences=_count(tree, "n_sentences"),
            n_responses=_count(tree, "n_responses"),
            sentences=_scales(tree, "sentences"),
            responses=_scales(tree, "responses"),
            deciding_method=_text(tree, "deciding_method"),
            threshold=_number_or_none(tree, "threshold"),
            threshold_from=_text_or_none(tree, "threshold_from"),
            flag_budget=_number_or_none(tree, "flag_budget"),
            target_fpr=_number_or_none(tree, "target_fpr"),
            bundle=_text_or_none(tree, "bundle"),
        )


def score(features: Mapping[str, F64], method: Method, scales: Mapping[str, Scale]) -> F64:
    """(n,) scores of n spans: the sum of the method's standardised features, signed so that higher = less
    grounded; of a trained method its probability. `features`: name -> (n,) finite values. Raises ProfileError
    for a feature without a scale.
    """
    first = next(iter(method.features))
    if method.trained:
        return features[first]
    total = np.zeros(len(features[first]))
    for name, sign in method.features.items():
        if name not in scales:
            raise ProfileError(f"no reference statistics for {name}")
        total += sign * (features[name] - scales[name].mean) / scales[name].sd
    return total


def budget_threshold(scores: F64, budget: float) -> float:
    """The smallest threshold at which no more than a `budget` share of `scores` is flagged (>= threshold).

    It lies one float above the highest score that must stay unflagged, so ties are never split: where
    flagging all of them breaks the budget, none is flagged. A budget under one sentence (n * budget < 1), or
    scores that are all equal, flag nothing. `scores`: (n,) finite, n >= 1, in any order.
    """
    n = len(scores)
    if n == 0:
        raise ValueError("no scores to take a threshold from")
    # n * budget alone is off by one where the product rounds: 100 * 0.29 is 28.999999999999996.
    allowed = next(k for k in range(int(n * budget) + 1, -1, -1) if k / n <= budget)
    highest_unflagged = np.partition(scores, n - 1 - allowed)[n - 1 - allowed]
    return float(np.nextafter(highest_unflagged, np.inf))


def operating_threshold(points: Mapping[float, float], false_alarm_rate: float) -> float:
    """The threshold of one of a bundle's operating points. Raises ProfileError where it was not measured."""
    if false_alarm_rate not in points:
        known = ", ".join(f"{rate:g}" for rate in sorted(points)) or "none"
        raise ProfileError(
            f"a false-alarm rate of {false_alarm_rate:g} was not measured for this bundle; measured: {known}"
        )
    return points[false_alarm_rate]


def _text(tree: Mapping[str, Any], key: str) -> str:
    if not isinstance(tree[key], str):
        raise ProfileError(f"{key} must be text")
    return str(tree[key])


def _text_or_none(tree: Mapping[str, Any], key: str) -> str | None:
    return None if tree[key] is None else _text(tree, key)


def _count(tree: Mapping[str, Any], key: str) -> int:
    value = tree[key]
    if type(value) is not int or value < 0:
        raise ProfileError(f"{key} must be a whole number, 0 or more")
    return value


def _number(tree: Mapping[str, Any], key: str, where: str = "") -> float:
    value = tree[key]
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise ProfileError(f"{where}{key} must be a finite number")
    try:
        return float(value)
    except OverflowError:
        raise ProfileError(f"{where}{key} must be a finite number") from None


def _number_or_none(tree: Mapping[str, Any], key: str) -> float | None:
    return None if tree[key] is None else _number(tree, key)


def _scales(tree: Mapping[str, Any], key: str) -> dict[str, Scale]:
    if not isinstance(tree[key], dict):
        raise ProfileError(f"{key} must map feature names to mean and sd")
    scales = {}
    for name, entry in tree[key].items():
        if name not in FEATURES:
            raise ProfileError(f"{key} names {name!r}, which is no feature; known: {', '.join(FEATURES)}")
        if not isinstance(entry, dict) or entry.keys() != {"mean", "sd"}:
            raise ProfileError(f"{key}.{name} must hold mean and sd")
        scale = Scale(*(_number(entry, part, f"{key}.{name}.") for part in ("mean", "sd")))
        if scale.sd <= 0:
            raise ProfileError(f"{key}.{name}.sd must be positive")
        scales[name] = scale
    return scales
