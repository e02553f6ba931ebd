"""Masked leave-one-out against exact on labelled RAGTruth answers: what hiding a passage does to the numbers.

    python -m tests.figures.masked_accuracy [--answers 420] [--cache FOLDER] [--scorer NAME] [--profile NAME]

One answer per source, those that `leadline fit --per-source 1` learns from, in its order. Both ways are
measured once and kept in the cache of `leadline evaluate`, under different keys. Printed:

- sentence AUROC of every method that reads leave-one-out, and of max drop and max JSD alone, under both, with
  95 % intervals of the difference (1,000 paired bootstrap samples of sources); trained ones are held out on
  five folds of sources, the same for both, and fitted on the numbers that they are judged on;
- beside them, on the same answers, what reads two passes (`--loo off`), LUMINA's third, and the baselines;
- per sentence, the correlation of max drop and of max JSD;
- how often the evidence is the same passage, among supported sentences that some passage carries (exact max
  drop of at least 0.05 nats per token), and how often it is the passage that a supported sentence was copied
  from, where one holds three word pairs more of it than any other.
"""

import argparse
import sys
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from detector import Scorer, gasp, gasp_head
from detector.baselines import words
from detector.evaluation import METRICS, bootstrap, folds
from detector.heads import F64, Labelled
from detector.label_free import LABEL_FREE
from detector.probe import Keep
from detector.scorers import EMBEDDED
from detector.trained import TRAINED
from jobs.config import make_config
from jobs.evaluate import N_FOLDS, hold_out
from jobs.fit import n_blocks
from jobs.labelled import LabelledRecord, measure_labelled, pick, read_labelled
from jobs.traces import TraceStore
from tests.figures.ragtruth import PATH

FLOOR_NATS = 0.05
MARGIN = 3
WAYS = {"exact": Keep(foil=True), "masked": Keep(masked=True)}
BESIDE = (
    "gasp_economical",
    "gasp_two_pass",
    "lumina",
    "jsd_none",
    "gap",
    "refind",
    "overlap",
    "perplexity",
    "length",
)


def methods(n_layers: int) -> list[str]:
    """Every form that reads leave-one-out passes, label-free ones first."""
    free = [name for name, method in LABEL_FREE.items() if method.keep.leave_one_out]
    return free + [name for name, method in TRAINED.items() if method.keep(n_layers).leave_one_out]


def feature(examples: list[Labelled], name: str) -> F64:
    """(n,) one sentence feature of all examples, in nats."""
    return np.concatenate([gasp_head.features(e.trace, e.sentences, (name,))[:, 0] for e in examples])


def scores(examples: list[Labelled], part: NDArray[np.int64], n_layers: int) -> dict[str, F64]:
    """Sentence scores per method, higher = less grounded."""
    found = {name: -feature(examples, name) for name in ("max_drop", "max_jsd")}
    for name in methods(n_layers):
        found[name] = np.concatenate(hold_out(name, examples, part, n_layers).sentences)
    return found


def top_pieces(examples: list[Labelled]) -> NDArray[np.int64]:
    """(n,) the piece whose absence costs the sentence most."""
    return np.concatenate(
        [
            [gasp.drops(e.trace)[:, tokens].mean(axis=1, dtype=np.float64).argmax() for tokens in e.sentences]
            for e in examples
        ]
    ).astype(np.int64)


def copied_from(examples: list[Labelled], answers: list[LabelledRecord]) -> NDArray[np.int64]:
    """(n,) the piece that holds MARGIN more of a sentence's word pairs than any other, -1 where none does.

    Whatever a method says, such a sentence was copied from there.
    """
    found = []
    for example, answer in zip(examples, answers, strict=True):
        record, offsets = answer.record, example.trace.offsets
        texts = [record.passages[p.passage_index].text[p.start : p.end] for p in example.trace.pieces]
        pairs = [_pairs(text) for text in texts]
        for tokens in example.sentences:
            own = _pairs(record.answer[offsets[tokens[0], 0] : offsets[tokens[-1], 1]])
            counts = sorted((len(own & there), k) for k, there in enumerate(pairs))
            clear = len(counts) > 1 and counts[-1][0] - counts[-2][0] >= MARGIN
            found.append(counts[-1][1] if clear else -1)
    return np.array(found, dtype=np.int64)


def _pairs(text: str) -> set[tuple[str, str]]:
    return set(pairwise(key for _, _, key in words(text)))


def measure(
    groups: list[list[LabelledRecord]], scorer: Scorer, cache: str
) -> tuple[dict[str, list[Labelled]], list[LabelledRecord]]:
    """The examples that have sentences, in the same order both ways, and the answers behind them."""
    store = TraceStore(cache)
    found = {}
    behind: list[LabelledRecord] = []
    for way, keep in WAYS.items():
        examples, answers = measure_labelled(
            groups,
            scorer,
            store,
            keep,
            lambda done, n, way=way: (
                print(f"{way}: {done} of {n} answers", file=sys.stderr) if done % 20 == 0 else None
            ),
        )
        found[way] = [example for example in examples if example.sentences]
        behind = [answer for example, answer in zip(examples, answers, strict=True) if example.sentences]
    return found, behind


def compare(found: dict[str, list[Labelled]], answers: list[LabelledRecord], n_layers: int) -> None:
    """Print everything."""
    exact, masked = found["exact"], found["masked"]
    labels = np.concatenate([e.sentence_labels for e in exact])
    sources = np.concatenate([[e.source_id] * len(e.sentences) for e in exact])
    print(f"{len(exact)} answers, {len(labels)} sentences, {labels.mean():.1%} of them unsupported")
    part = folds([e.source_id for e in exact], np.array([e.label for e in exact]), N_FOLDS, 0)
    ours, theirs = scores(masked, part, n_layers), scores(exact, part, n_layers)
    print("sentence AUROC     exact  masked  difference")
    for name in theirs:
        both = {"exact": theirs[name], "masked": ours[name]}
        estimates = bootstrap(labels, both, sources.tolist(), METRICS["auroc"], against="exact")
        difference = estimates["masked"].difference
        assert difference is not None
        print(
            f"{name:17} {estimates['exact'].interval.value:6.3f} {estimates['masked'].interval.value:7.3f}"
            f"  {difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
        )
    beside = {name: np.concatenate(hold_out(name, exact, part, n_layers).sentences) for name in BESIDE}
    beside["max_drop"] = theirs["max_drop"]
    print("beside them         AUROC                    difference from exact max_drop")
    for name, estimate in bootstrap(
        labels, beside, sources.tolist(), METRICS["auroc"], against="max_drop"
    ).items():
        value, difference = estimate.interval, estimate.difference
        print(
            f"{name:17} {value.value:6.3f} [{value.low:.3f}, {value.high:.3f}]"
            + (
                f"  {difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
                if difference
                else ""
            )
        )
    for name in ("max_drop", "max_jsd"):
        correlation = np.corrcoef(feature(exact, name), feature(masked, name))[0, 1]
        print(f"correlation of {name} per sentence: {correlation:.3f}")
    grounded = ~labels & (feature(exact, "max_drop") >= FLOOR_NATS)
    tops = {"exact": top_pieces(exact), "masked": top_pieces(masked)}
    same = tops["exact"] == tops["masked"]
    print(
        f"same top passage: {same[grounded].mean():.1%} of {grounded.sum()} grounded sentences, "
        f"{same.mean():.1%} of all"
    )
    source = copied_from(exact, answers)
    copied = ~labels & (source >= 0)
    for way, top in tops.items():
        right = (top == source)[copied].mean()
        print(
            f"{way}: the top passage is the one that {copied.sum()} sentences were copied from: {right:.1%}"
        )


def main() -> None:
    """Measure what is not measured yet, compare, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=420)
    arguments.add_argument("--cache", default="~/.cache/leadline/traces")
    arguments.add_argument("--scorer", default=EMBEDDED)
    arguments.add_argument("--profile", default="plain")
    arguments.add_argument("--logs", default=str(PATH))
    given = arguments.parse_args()
    picked = pick(read_labelled([given.logs], make_config({})), 1)
    groups = [group for group in picked if group[0].quality == "good"][: given.answers]
    scorer = Scorer.load(given.scorer, profile=given.profile, bundle=None)
    found, answers = measure(groups, scorer, given.cache)
    print(f"{scorer.name}, {scorer.dtype}, profile {given.profile}")
    compare(found, answers, n_blocks(scorer))


if __name__ == "__main__":
    main()
