"""How well scores and marked characters agree with what people marked, on folds and intervals without leaks.

Labels are True where text is unsupported; scores are higher where it is less grounded. Four answers share
one question and its passages, so rows of one source are neither divided between folds nor drawn apart: the
bootstrap draws whole sources, as often as chance has it (multiplicity), and compares methods in the same
draws. Everything is computed in float64.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import DetectorError
from detector.heads import F64
from detector.sentences import Span

Statistic = Callable[[F64], float | None]
"""(N,) how often each row stands in a sample, >= 0 -> the figure of that sample. None where the sample does
not define it (one of the two classes is missing)."""

Metric = Callable[[NDArray[Any], NDArray[Any]], Statistic]
"""(N,) labels, scores of the same rows -> Statistic. What can be done once (sorting) is done here."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure on all rows, and where 95 % of the resampled ones lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """One method's figure, and what it is above the baseline in the same resamples (None without one)."""

    interval: Interval
    difference: Interval | None


def auroc(labels: NDArray[Any], scores: NDArray[Any], weights: NDArray[Any] | None = None) -> float:
    """Probability that an unsupported row scores above a supported one, ties counting half, in [0, 1].

    `weights` (N,) count rows, as in `sklearn.metrics.roc_auc_score`. Raises DetectorError for NaN and where
    one class is missing.
    """
    return _value(auroc_statistic(labels, scores), labels, weights)


def average_precision(
    labels: NDArray[Any], scores: NDArray[Any], weights: NDArray[Any] | None = None
) -> float:
    """Sum over thresholds of precision times the recall gained there, in [0, 1]; chance is the prevalence.

    Rows of equal score enter together, as in `sklearn.metrics.average_precision_score`. Raises
    DetectorError for NaN and where no row is unsupported.
    """
    return _value(average_precision_statistic(labels, scores), labels, weights)


def auroc_statistic(labels: NDArray[Any], scores: NDArray[Any]) -> Statistic:
    """`auroc` as a Metric: sorted once, a cumulative sum for every set of weights."""
    ranking = _Ranking.of(labels, scores)

    def statistic(weights: F64) -> float | None:
        below = ranking.negatives_below(weights)
        positive = weights[ranking.positives]
        pairs = positive.sum() * below[-1]
        if pairs == 0:
            return None
        return float(positive @ (below[ranking.first_tie] + below[ranking.past_ties]) / (2 * pairs))

    return statistic


def average_precision_statistic(labels: NDArray[Any], scores: NDArray[Any]) -> Statistic:
    """`average_precision` as a Metric: sorted once, a cumulative sum for every set of weights."""
    ranking = _Ranking.of(labels, scores)
    own_scores = np.asarray(scores)[ranking.positives]
    first_own_tie = np.searchsorted(own_scores, own_scores, side="left")

    def statistic(weights: F64) -> float | None:
        below = ranking.negatives_below(weights)
        positive = weights[ranking.positives]
        found = np.concatenate(([0.0], np.cumsum(positive)))
        if found[-1] == 0:
            return None
        true = found[-1] - found[first_own_tie]
        flagged = true + below[-1] - below[ranking.first_tie]
        counted = positive > 0  # a row that was not drawn may be the only one above its score: 0 / 0
        return float((positive[counted] * true[counted] / flagged[counted]).sum() / found[-1])

    return statistic


def f1_statistic(labels: NDArray[Any], flags: NDArray[Any]) -> Statistic:
    """F1 of (N,) flags as a Metric, in [0, 1]; 0 where nothing is flagged rightly, as in scikit-learn."""
    gold, flagged = np.asarray(labels, dtype=bool), np.asarray(flags, dtype=bool)
    return counts_f1_statistic(gold, np.column_stack([gold & flagged, flagged, gold]))


def counts_f1_statistic(labels: NDArray[Any], counts: NDArray[Any]) -> Statistic:
    """Micro F1 as a Metric: 2 x both / (flagged + gold) of the summed (N, 3) `character_counts`.

    `labels` are not read. 0 where nothing is flagged and nothing is marked.
    """
    each = np.asarray(counts, dtype=np.float64)

    def statistic(weights: F64) -> float | None:
        both, flagged, gold = weights @ each
        return float(2 * both / (flagged + gold)) if flagged + gold > 0 else 0.0

    return statistic


def mean_statistic(labels: NDArray[Any], values: NDArray[Any]) -> Statistic:
    """The mean of (N,) values (e.g. `character_iou` of each answer) as a Metric. `labels` are not read."""
    each = np.asarray(values, dtype=np.float64)
    return lambda weights: float(weights @ each / weights.sum()) if weights.any() else None


METRICS: dict[str, Metric] = {
    "auroc": auroc_statistic,
    "average_precision": average_precision_statistic,
    "f1": f1_statistic,
    "iou": mean_statistic,
    "span_f1": counts_f1_statistic,
}


def f1_at(labels: NDArray[Any], scores: NDArray[Any], threshold: float) -> float:
    """F1 of flagging every row whose score is `threshold` or more, in [0, 1]."""
    return _value(f1_statistic(labels, np.asarray(scores) >= threshold), labels, None)


def choose_threshold(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """The score from which on flagging gives the highest F1 (of equal ones the highest score).

    For training rows: a threshold that is chosen and judged on the same rows flatters. Raises DetectorError
    for NaN and where no row is unsupported.
    """
    gold, values = _checked(labels, scores)
    if not gold.any():
        raise DetectorError(
            "cannot choose a threshold: none of the training rows is unsupported; add labelled rows"
        )
    thresholds, inverse = np.unique(values, return_inverse=True)
    flagged = np.bincount(inverse)[::-1].cumsum()
    true = np.bincount(inverse, weights=gold)[::-1].cumsum()
    return float(thresholds[::-1][np.argmax(2 * true / (flagged + gold.sum()))])


def best_f1(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """F1 at the threshold that suits these very rows: an upper bound, not an estimate for other rows."""
    return f1_at(labels, scores, choose_threshold(labels, scores))


def token_spans(flags: NDArray[Any], offsets: NDArray[Any], answer: str = "") -> tuple[Span, ...]:
    """Spans of code points that (A,) flagged tokens with (A, 2) offsets cover; neighbouring tokens join.

    What lies between two neighbours (white space that no token holds) belongs to the span. With the
    `answer`, white space at its ends does not: byte-level tokens carry the space before a word, which nobody
    marks.
    """
    spans: list[list[int]] = []
    last = -2
    for index in np.flatnonzero(flags):
        start, end = (int(place) for place in offsets[index])
        if index == last + 1:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
        last = int(index)
    for span in spans:
        while span[0] < span[1] and answer[span[0] : span[0] + 1].isspace():
            span[0] += 1
        while span[0] < span[1] and answer[span[1] - 1 : span[1]].isspace():
            span[1] -= 1
    return tuple((start, end) for start, end in spans if start < end)


def covered(spans: Sequence[Span], n: int) -> NDArray[np.bool_]:
    """(n,) True for the characters of an answer of `n` that some span holds, however many hold them.

    Raises DetectorError for a span outside the answer: its offsets are of another text.
    """
    inside = np.zeros(n, dtype=bool)
    for start, end in spans:
        if not 0 <= start <= end <= n:
            raise DetectorError(
                f"span {start}:{end} lies outside an answer of {n} characters: offsets are code points of "
                "the answer as it was logged, end exclusive"
            )
        inside[start:end] = True
    return inside


def character_iou(predicted: Sequence[Span], gold: Sequence[Span], n: int) -> float:
    """Characters in both over characters in either, of one answer of `n` characters, in [0, 1].

    1 where both are empty, as the Mu-SHROOM scorer has it: nothing to find and nothing flagged is right.
    """
    flagged, marked = covered(predicted, n), covered(gold, n)
    either = int((flagged | marked).sum())
    return float((flagged & marked).sum() / either) if either else 1.0


def character_counts(predicted: Sequence[Span], gold: Sequence[Span]) -> tuple[int, int, int]:
    """Characters of one answer that are in both, flagged, and marked; overlapping spans count once."""
    n = max((end for _, end in itertools.chain(predicted, gold)), default=0)
    flagged, marked = covered(predicted, n), covered(gold, n)
    return int((flagged & marked).sum()), int(flagged.sum()), int(marked.sum())


def span_f1(predicted: Sequence[Sequence[Span]], gold: Sequence[Sequence[Span]]) -> float:
    """F1 over all characters of a corpus (one list of spans per answer), in [0, 1]: RAGTruth's span level."""
    counts = [character_counts(p, g) for p, g in zip(predicted, gold, strict=True)]
    rows = np.asarray(counts, dtype=np.float64).reshape(-1, 3)
    return _value(counts_f1_statistic(rows[:, 0], rows), rows[:, 0], None)


def folds(
    source_ids: Sequence[str], labels: NDArray[Any], n_folds: int = 5, seed: int = 0
) -> NDArray[np.int64]:
    """(N,) the fold of each answer, 0 to n_folds - 1: whole sources, both labels spread evenly.

    The order of the answers does not matter. Raises DetectorError with fewer sources than folds.
    """
    names, source = np.unique(np.asarray(source_ids, dtype=str), return_inverse=True)
    if not 2 <= n_folds <= len(names):
        raise DetectorError(f"cannot make {n_folds} folds of {len(names)} sources: ask for 2 to {len(names)}")
    gold = np.asarray(labels, dtype=bool)
    per_class = np.column_stack(
        [np.bincount(source, weights=side, minlength=len(names)) for side in (gold, ~gold)]
    )
    share = per_class / np.maximum(per_class.sum(axis=0), 1.0)
    shuffled = np.random.default_rng(seed).permutation(len(names))
    largest_first = shuffled[np.argsort(-share[shuffled].sum(axis=1), kind="stable")]
    load = np.zeros((n_folds, 2))
    chosen = np.empty(len(names), dtype=np.int64)
    for index in largest_first:
        # Least growth of the summed squares: a fold full of one class still takes the other.
        fold = int(np.argmin(load @ share[index]))
        load[fold] += share[index]
        chosen[index] = fold
    return np.asarray(chosen[source])


def leave_one_out_folds(names: Sequence[str]) -> NDArray[np.int64]:
    """(N,) one fold per name (a generator, a task, a language), in sorted order of the names."""
    return np.asarray(np.unique(np.asarray(names, dtype=str), return_inverse=True)[1], dtype=np.int64)


def splits(*partitions: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Row indices (train, test) for each combination of folds that has test rows.

    Train rows share no fold with the test rows in any partition. With generators and source folds, "another
    generator" thereby also means another question: leaving only the generator out trains on its questions.
    Raises DetectorError where no train row is left.
    """
    table = np.column_stack(partitions)
    for combination in np.unique(table, axis=0):
        test = np.flatnonzero((table == combination).all(axis=1))
        train = np.flatnonzero((table != combination).all(axis=1))
        if not len(train):
            raise DetectorError("no row is left to train on: a fold holds all of them; use more sources")
        yield train, test


def resample(
    statistics: Mapping[str, Statistic], clusters: Sequence[Any], *, n: int = 1000, seed: int = 0
) -> dict[str, F64]:
    """(n,) resampled figures per method; place r is the same draw of clusters for all of them.

    Each draw takes as many clusters as there are, with replacement; a cluster drawn twice counts twice.
    Draws without both classes define no figure and are left out, for all methods. Raises DetectorError
    where fewer than half of the draws are left.
    """
    names, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    chooser = np.random.default_rng(seed)
    figures: list[list[float]] = []
    for _ in range(n):
        drawn = np.bincount(chooser.integers(len(names), size=len(names)), minlength=len(names))
        weights = drawn.astype(np.float64)[cluster]
        row = [value for s in statistics.values() if (value := s(weights)) is not None]
        if len(row) == len(statistics):
            figures.append(row)
    if 2 * len(figures) < n:
        raise DetectorError(
            f"{n - len(figures)} of {n} resamples of {len(names)} clusters hold one class only: too few "
            "labelled rows for an interval"
        )
    return dict(zip(statistics, np.asarray(figures).T, strict=True))


def bootstrap(
    labels: NDArray[Any],
    scores: Mapping[str, NDArray[Any]],
    clusters: Sequence[Any],
    metric: Metric,
    *,
    against: str | None = None,
    n: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """The metric of each method's scores with 95 % percentile intervals, clusters drawn whole.

    `against` names the method that the others are compared with, in the same draws. Raises DetectorError
    where the metric is undefined or `against` is no method of `scores`.
    """
    if against is not None and against not in scores:
        raise DetectorError(f"no baseline {against!r} among the methods: {', '.join(scores)}")
    statistics = {name: metric(labels, values) for name, values in scores.items()}
    values = {name: _value(statistic, labels, None) for name, statistic in statistics.items()}
    drawn = resample(statistics, clusters, n=n, seed=seed)

    def estimate(name: str) -> Estimate:
        interval = percentiles(values[name], drawn[name])
        if against is None or name == against:
            return Estimate(interval, None)
        return Estimate(interval, percentiles(values[name] - values[against], drawn[name] - drawn[against]))

    return {name: estimate(name) for name in scores}


def percentiles(value: float, drawn: F64) -> Interval:
    """`value` with the 2.5 % and 97.5 % points of resampled figures."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Where each positive stands among the negatives. Both are row indices, ascending by score."""

    positives: NDArray[np.intp]
    negatives: NDArray[np.intp]
    edges: NDArray[np.intp]
    """Where some positive stands: numbers of negatives below, ascending, from 0 to all of them."""
    first_tie: NDArray[np.intp]
    """Per positive, the edge below which the negatives of a lower score are."""
    past_ties: NDArray[np.intp]
    """Per positive, the edge below which the negatives of no higher score are."""

    @classmethod
    def of(cls, labels: NDArray[Any], scores: NDArray[Any]) -> "_Ranking":
        gold, values = _checked(labels, scores)
        order = np.argsort(values, kind="stable")
        positives, negatives = order[gold[order]], order[~gold[order]]
        first, past = (
            np.searchsorted(values[negatives], values[positives], side=side) for side in ("left", "right")
        )
        edges = np.unique(np.concatenate((first, past, [0, len(negatives)])))
        return cls(positives, negatives, edges, np.searchsorted(edges, first), np.searchsorted(edges, past))

    def negatives_below(self, weights: F64) -> F64:
        """(n_edges,) weight of the negatives below each edge."""
        below = np.zeros(len(self.edges))
        if len(self.negatives):
            # Sums between edges are several times faster than a running sum: positives are rare.
            np.cumsum(np.add.reduceat(weights[self.negatives], self.edges[:-1]), out=below[1:])
        return below


def _checked(labels: NDArray[Any], scores: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    gold, values = np.asarray(labels, dtype=bool), np.asarray(scores)
    if gold.shape != values.shape or gold.ndim != 1:
        raise DetectorError(
            f"labels {gold.shape} and scores {values.shape} must be one vector each, equally long"
        )
    if np.isnan(values).any():
        raise DetectorError(
            f"{int(np.isnan(values).sum())} of {len(values)} scores are not numbers: nothing ranks"
        )
    return gold, values


def _value(statistic: Statistic, labels: NDArray[Any], weights: NDArray[Any] | None) -> float:
    counted = np.ones(len(labels)) if weights is None else np.asarray(weights, dtype=np.float64)
    value = statistic(counted)
    if value is None:
        raise DetectorError("rows of one class only: this figure needs supported and unsupported ones")
    return value
