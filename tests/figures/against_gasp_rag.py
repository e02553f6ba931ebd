"""Leadline against the GASP author's package `gasp-rag` 0.2.1: same scorer, prompts and chunks, one run.

    OMP_NUM_THREADS=2 python -m tests.figures.against_gasp_rag [--answers 20] [--seed 0] [--repeats 3]

Both read every answer of the sample; their turns alternate and the median time of the repeats is shown.
"""

import argparse
import statistics
import time
import warnings

from gasp import GASP

from detector import Record, Scorer
from detector.aggregate import SentenceMeasurement
from detector.weights import default_cache, embedded_scorer
from tests.figures.ragtruth import sample

FEATURES = {"gap": "gap", "jsd_none": "jsd_noctx", "max_drop": "max_drop", "max_jsd": "max_jsd"}


def their_features(package: GASP, record: Record) -> dict[int, dict[str, float]]:
    """Sentence index -> features, from the author's package."""
    context = "\n".join(passage.text for passage in record.passages)
    found = package.detect(context=context, answer=record.answer, query=record.question)
    return {sentence.index: sentence.features for sentence in found}


def largest_difference(ours: tuple[SentenceMeasurement, ...], theirs: dict[int, dict[str, float]]) -> float:
    """Over all features of all sentences of one answer; the sentences must be the same ones."""
    if [sentence.index for sentence in ours] != sorted(theirs):
        raise SystemExit(f"sentences differ: {[s.index for s in ours]} and {sorted(theirs)}")
    return max(
        abs(getattr(sentence.features, name) - theirs[sentence.index][their_name])
        for sentence in ours
        for name, their_name in FEATURES.items()
    )


def main() -> None:
    """Print the largest difference and both times."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--repeats", type=int, default=3)
    chosen = arguments.parse_args()
    records = [labelled.record for labelled in sample(chosen.answers, chosen.seed)]
    warnings.simplefilter("ignore")  # the package uses a deprecated argument of transformers
    package = GASP(str(embedded_scorer(default_cache())), k_chunks=5)
    scorer = Scorer.load("smollm2-135m", profile="gasp-v2")
    own_prompts = Scorer.load("smollm2-135m")
    seconds: dict[str, list[float]] = {"gasp-rag": [], "leadline gasp-v2": [], "leadline plain": []}
    worst, n_sentences = 0.0, 0
    for _ in range(chosen.repeats):
        for spent in seconds.values():
            spent.append(0.0)
        n_sentences = 0
        for record in records:
            started = time.perf_counter()
            theirs = their_features(package, record)
            middle = time.perf_counter()
            ours = scorer.measure(record).sentences
            end = time.perf_counter()
            own_prompts.measure(record)
            seconds["gasp-rag"][-1] += middle - started
            seconds["leadline gasp-v2"][-1] += end - middle
            seconds["leadline plain"][-1] += time.perf_counter() - end
            worst = max(worst, largest_difference(ours, theirs))
            n_sentences += len(ours)
    print(
        f"{len(records)} answers, {n_sentences} sentences: largest difference of a feature {worst:.1e} nats"
    )
    base = statistics.median(seconds["gasp-rag"])
    for name, spent in seconds.items():
        median = statistics.median(spent)
        print(f"{name:18} {median:6.1f} s  {base / median:.2f}x")


if __name__ == "__main__":
    main()
