"""Sentence AUROC of the label-free methods on labelled RAGTruth answers.

    python -m tests.figures.sentence_auroc [--answers 200] [--seed 0] [--profile plain]

A sentence counts as unsupported when it overlaps a marked span. Standardisation uses the same sentences and
no labels, as a run without a profile does. Intervals: 1,000 bootstrap samples of sources (answers to one
question stay together), 2.5 % to 97.5 %.
"""

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray

from detector import Scorer
from detector.calibration import FEATURES, Moments, score
from detector.methods import METHODS
from tests.figures.ragtruth import Labelled, sample


def auroc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Probability that an unsupported sentence scores above a supported one; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n_bad = int(labels.sum())
    n_good = len(labels) - n_bad
    return float((ranks[labels].sum() - n_bad * (n_bad + 1) / 2) / (n_bad * n_good))


def interval(
    labels: NDArray[np.bool_], scores: NDArray[np.float64], groups: NDArray[np.int64]
) -> tuple[float, float]:
    """Bootstrap interval over groups, drawn with multiplicity."""
    chooser = np.random.default_rng(0)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    values = []
    for _ in range(1000):
        rows = np.concatenate([members[i] for i in chooser.integers(len(members), size=len(members))])
        if 0 < labels[rows].sum() < len(rows):
            values.append(auroc(labels[rows], scores[rows]))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def measured(answers: list[Labelled], scorer: Scorer) -> tuple[dict[str, NDArray[np.float64]], ...]:
    """Sentence features, labels and sources, one row per sentence."""
    columns: dict[str, list[float]] = {name: [] for name in FEATURES}
    labels: list[bool] = []
    sources: list[int] = []
    names = sorted({answer.source_id for answer in answers})
    for n_done, answer in enumerate(answers, start=1):
        if n_done % 20 == 0:
            print(f"{n_done} of {len(answers)} answers", file=sys.stderr)
        for sentence in scorer.measure(answer.record).sentences:
            for name in FEATURES:
                of = sentence if name in ("n_tokens", "log_tokens") else sentence.features
                columns[name].append(getattr(of, name))
            labels.append(any(s < sentence.end and e > sentence.start for s, e in answer.spans))
            sources.append(names.index(answer.source_id))
    features = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    return features, {"label": np.array(labels), "source": np.array(sources)}


def main() -> None:
    """Measure, score, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--profile", default="plain")
    arguments.add_argument("--scorer", default="smollm2-135m")
    chosen = arguments.parse_args()
    answers = sample(chosen.answers, chosen.seed)
    started = time.perf_counter()
    features, truth = measured(answers, Scorer.load(chosen.scorer, profile=chosen.profile, bundle=None))
    labels, sources = truth["label"].astype(bool), truth["source"]
    print(
        f"{len(answers)} answers, seed {chosen.seed}, profile {chosen.profile}, {chosen.scorer}: "
        f"{len(labels)} sentences, {labels.mean():.1%} unsupported, "
        f"{time.perf_counter() - started:.0f} s"
    )
    scales = {name: Moments.of(values).scale() for name, values in features.items()}
    for name, method in METHODS.items():
        if method.trained:
            continue
        scores = score(features, method, scales)
        low, high = interval(labels, scores, sources)
        print(f"{name:12} AUROC {auroc(labels, scores):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
