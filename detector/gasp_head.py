"""GASP's trained forms: LightGBM or logistic regression on what removing passages does to a sentence.

The paper's classifier has four features and 300 boosted trees (sections 3.4 and 5.5); `+base` adds the mean
surprisal and the number of tokens; the economical form has the two features that need no leave-one-out. The
author's second repository pools drops three ways. `signed` answers what the paper leaves open: whether
removing a passage that the sentence contradicts makes the sentence more likely.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detector import gasp
from detector.errors import DetectorError
from detector.heads import Labelled, Tokens, spread
from detector.logistic import Logistic
from detector.trace import Trace

F64 = NDArray[np.float64]
Form = Literal["trees", "logistic"]

_CORE = ("gap", "jsd_none", "max_drop", "max_jsd")
FEATURE_SETS: dict[str, tuple[str, ...]] = {
    "gasp": _CORE,
    "base": (*_CORE, "surprisal", "n_tokens"),
    "two-pass": ("gap", "jsd_none"),
    "top2": ("gap", "jsd_none", "top2_drop", "top2_jsd"),
    "mean": ("gap", "jsd_none", "mean_drop", "mean_jsd"),
    "signed": (*_CORE, "min_drop", "raising"),
    "base-v2": (*_CORE, "mean_drop", "top2_drop", "surprisal", "n_tokens"),
}
"""Named sets of features; any other tuple of names will do. Drops and gaps in nats."""

TWO_PASS_FEATURES = frozenset({"gap", "jsd_none", "surprisal", "n_tokens"})
"""Features that exist with leave-one-out off."""

_TREES = {
    "objective": "binary",
    "learning_rate": 0.05,
    "num_leaves": 31,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}
_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Trees:
    """A LightGBM classifier, kept as the text that LightGBM itself writes."""

    text: str
    _booster: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from lightgbm import Booster

        object.__setattr__(self, "_booster", Booster(model_str=self.text))

    @classmethod
    def fit(
        cls,
        features: NDArray[Any],
        labels: NDArray[Any],
        *,
        seed: int = 0,
        rounds: int = _ROUNDS,
        leaves: int = 31,
    ) -> "Trees":
        """300 trees of 31 leaves at a learning rate of 0.05, LightGBM's defaults otherwise (section 5.5).

        One thread and fixed seeds: the same data give the same text on one machine and version.
        """
        from lightgbm import Dataset, train

        data: Any = Dataset(np.asarray(features, np.float64), label=np.asarray(labels, np.float64))
        booster: Any = train({**_TREES, "num_leaves": leaves, "seed": seed}, data, num_boost_round=rounds)
        return cls(booster.model_to_string())

    def probability(self, features: NDArray[Any]) -> F64:
        """(N,) in (0, 1) of (N, F) features."""
        if not len(features):
            return np.zeros(0)
        return np.asarray(self._booster.predict(features, num_threads=1), dtype=np.float64)

    def logit(self, features: NDArray[Any]) -> F64:
        """(N,) log-odds of (N, F) features."""
        if not len(features):
            return np.zeros(0)
        raw = self._booster.predict(features, num_threads=1, raw_score=True)
        return np.asarray(raw, dtype=np.float64)

    def to_parts(self) -> dict[str, Any]:
        """The model as LightGBM text."""
        return {"trees": self.text}


def fit_features(
    features: NDArray[Any], labels: NDArray[Any], *, form: Form = "trees", seed: int = 0
) -> Trees | Logistic:
    """Fit on plain (N, F) features, such as published ones, and (N,) labels: True = unsupported.

    What comes back has `.probability(features)`. Raises DetectorError for features that are not finite and
    for labels of one kind only. `seed` matters to trees alone.
    """
    features, labels = np.asarray(features), np.asarray(labels).astype(bool)
    if not np.isfinite(features).all():
        bad = int((~np.isfinite(features)).any(axis=1).sum())
        raise DetectorError(f"gasp head: {bad} of {len(features)} rows hold a non-finite feature; drop them")
    if labels.all() or not labels.any():
        raise DetectorError(
            f"gasp head: fitting needs supported and unsupported rows, all {len(labels)} are of one kind; "
            "add labelled answers"
        )
    return Trees.fit(features, labels, seed=seed) if form == "trees" else Logistic.fit(features, labels)


def table(columns: Mapping[str, Any], drops: NDArray[Any], jsds: NDArray[Any], names: Sequence[str]) -> F64:
    """(n, F) the named features, from means over the tokens of n spans.

    `columns`: gap, jsd_none, surprisal, n_tokens, (n,) each, those that `names` ask for. `drops`, `jsds`:
    (K, n) per removed piece, read only for features over pieces. `raising` is the share of pieces whose
    removal raises the likelihood, in [0, 1]: a count would mean something else for every K.
    """
    over_pieces: dict[str, tuple[Callable[..., Any], NDArray[Any]]] = {
        "max_drop": (gasp.largest, drops),
        "max_jsd": (gasp.largest, jsds),
        "top2_drop": (gasp.top2_mean, drops),
        "top2_jsd": (gasp.top2_mean, jsds),
        "mean_drop": (gasp.mean, drops),
        "mean_jsd": (gasp.mean, jsds),
        "min_drop": (gasp.lowest, drops),
        "raising": (gasp.mean, (drops < 0).astype(np.float64)),
    }
    picked = []
    for name in names:
        if name in over_pieces:
            reduce, values = over_pieces[name]
            picked.append(reduce(values))
        else:
            picked.append(columns[name])
    return np.stack(picked, axis=1).astype(np.float64)


def features(trace: Trace, sentences: Sequence[Tokens], names: Sequence[str]) -> F64:
    """(n, F) the named features of each sentence: mean over its tokens first, then over pieces.

    Raises DetectorError where a feature needs leave-one-out passes that the trace does not hold.
    """

    def means(values: NDArray[Any]) -> F64:
        found = np.empty((*values.shape[:-1], len(sentences)))
        for index, tokens in enumerate(sentences):
            found[..., index] = values[..., tokens].mean(axis=-1, dtype=np.float64)
        return found

    columns = {
        "gap": means(trace.logprob) - means(trace.logprob_no_context),
        "jsd_none": means(trace.jsd_no_context),
        "surprisal": -means(trace.logprob),
        "n_tokens": np.array([len(tokens) for tokens in sentences], dtype=np.float64),
    }
    if not needs_leave_one_out(names):
        nothing = np.zeros((0, len(sentences)))
        return table(columns, nothing, nothing, names)
    return table(columns, means(gasp.drops(trace)), means(gasp.jsds(trace)), names)


def needs_leave_one_out(names: Sequence[str]) -> bool:
    """Whether any of these features reads the passes with one piece removed."""
    return not TWO_PASS_FEATURES.issuperset(names)


@dataclass(frozen=True, slots=True)
class GaspHead:
    """One trained form: which features, and the model on them (detector.heads.Head)."""

    names: tuple[str, ...]
    model: Trees | Logistic

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) probability that the sentence is unsupported."""
        return self.model.probability(features(trace, sentences, self.names))

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) each token's sentence probability: the features are means over spans."""
        return spread(self.sentences(trace, sentences), sentences, len(trace.token_ids))

    def to_parts(self) -> dict[str, Any]:
        """Feature names joined by commas, and the parts of the model."""
        return {"features": ",".join(self.names), **self.model.to_parts()}


def from_parts(parts: Mapping[str, Any]) -> GaspHead:
    """The head that `to_parts` described."""
    model = Trees(parts["trees"]) if "trees" in parts else Logistic.from_parts(parts)
    return GaspHead(tuple(parts["features"].split(",")), model)


def fit(
    examples: Sequence[Labelled],
    *,
    seed: int = 0,
    names: Sequence[str] = FEATURE_SETS["gasp"],
    form: Form = "trees",
) -> GaspHead:
    """Fit on the sentences of labelled answers. Raises DetectorError as `features` and `fit_features` do."""
    rows = np.concatenate([features(example.trace, example.sentences, names) for example in examples])
    labels = np.concatenate([example.sentence_labels for example in examples])
    return GaspHead(tuple(names), fit_features(rows, labels, form=form, seed=seed))
