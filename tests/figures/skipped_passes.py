"""What `least_share` saves and costs: leave-one-out passes of passages that the answer hardly attends to.

    python -m tests.figures.skipped_passes [--answers 100] [--cache FOLDER]

One answer per source, as in `masked_accuracy`, whose measurements it reads from the cache (what is not there
is measured). All passes are made once and each threshold is then applied to what they gave, so that the lines
of the table differ in nothing else. Printed for both ways to leave a passage out: the share of passes saved,
in how many grounded sentences the evidence stays the same, and sentence AUROC of max drop and max JSD.
"""

import argparse
from dataclasses import replace

import numpy as np

from detector import Scorer, gasp
from detector.evaluation import auroc
from detector.heads import F64, Labelled
from detector.probe import Keep
from jobs.config import make_config
from jobs.labelled import measure_labelled, pick, read_labelled
from jobs.traces import TraceStore
from tests.figures.masked_accuracy import FLOOR_NATS
from tests.figures.ragtruth import PATH

LEAST = (0.0, 0.12, 0.15, 0.2, 0.25, 0.3)


def sentence_shares(example: Labelled) -> list[F64]:
    """(K,) of each sentence: how much of the attention on all pieces each of them gets."""
    assert example.trace.attention_pieces is not None
    sums = [example.trace.attention_pieces[:, tokens].sum(axis=1) for tokens in example.sentences]
    return [np.asarray(each / each.sum(), dtype=np.float64) for each in sums]


def compare(examples: list[Labelled]) -> None:
    """Print a line per threshold."""
    shares = [np.max(sentence_shares(example), axis=0) for example in examples]
    of_sentence = [i for i, example in enumerate(examples) for _ in example.sentences]
    labels = np.concatenate([example.sentence_labels for example in examples])
    drops, jsds = [], []
    for example in examples:
        assert example.trace.jsd_without is not None
        for tokens in example.sentences:
            drops.append(gasp.drops(example.trace)[:, tokens].mean(axis=1, dtype=np.float64))
            jsds.append(example.trace.jsd_without[:, tokens].mean(axis=1, dtype=np.float64))
    grounded = ~labels & (np.array([drop.max() for drop in drops]) >= FLOOR_NATS)
    print("least share  saved  same evidence  max_drop  max_jsd")
    for least in LEAST:
        kept = [share >= least for share in shares]
        run = [kept[i] for i in of_sentence]
        saved = 1 - np.concatenate(kept).mean()
        same = np.array([mask[drop.argmax()] for mask, drop in zip(run, drops, strict=True)])
        found = [
            auroc(labels, -np.array([v[mask].max() for v, mask in zip(values, run, strict=True)]))
            for values in (drops, jsds)
        ]
        print(f"{least:11.2f}  {saved:5.1%}  {same[grounded].mean():13.1%}  {found[0]:8.3f}  {found[1]:7.3f}")


def main() -> None:
    """Read the cache, measure what it lacks, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=100)
    arguments.add_argument("--cache", default="~/.cache/leadline/traces")
    given = arguments.parse_args()
    picked = pick(read_labelled([str(PATH)], make_config({})), 1)
    groups = [group for group in picked if group[0].quality == "good"][: given.answers]
    scorer = Scorer.load(bundle=None)
    store = TraceStore(given.cache)
    # With everything in sight, both ways read the same.
    attended, _ = measure_labelled(groups, scorer, store, Keep(leave_one_out=False, piece_attention=True))
    for masked in (False, True):
        examples, _ = measure_labelled(groups, scorer, store, Keep(masked=masked))
        joined = [
            replace(one, trace=replace(one.trace, attention_pieces=two.trace.attention_pieces))
            for one, two in zip(examples, attended, strict=True)
            if one.sentences
        ]
        print("masked" if masked else "exact", f"{len(joined)} answers")
        compare(joined)


if __name__ == "__main__":
    main()
