"""Which methods notice what they were not trained on: heads of RAGTruth QA on three other sets.

    python -m tests.figures.transfer [--pairs 100] [--seed 1] [--per-source 2] [--cache DIR] [--methods ...]
                                    [--per-language N]

swapped   an answer under another question's passages, beside the same answer under its own
changed   one number, name or date of a grounded sentence replaced, beside the same answer unchanged
mushroom  Mu-SHROOM (de, fr, hi), human spans; passages are the paragraphs of a Wikipedia page, of which those
          that share most words with the question are read, up to 3,000 characters

Heads never learn from a source that an edited answer comes from. Pairs won: how often the unsupported one
of a pair scores higher (a tie counts half), by the whole answer (swapped) or the edited tokens (changed).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detector import Record, refind
from detector.baselines import words
from detector.evaluation import METRICS, auroc, bootstrap
from detector.heads import Labelled
from jobs.config import make_config
from jobs.evaluate import Score, keep_for, scorer_of
from jobs.fit import measured, n_blocks
from jobs.labelled import LabelledRecord, measure_labelled
from jobs.traces import TraceStore
from tests.figures import edited, mushroom, ragtruth

CHARACTERS = 3000
METHODS = (
    "gap,jsd_none,gasp_economical,refind,token_probability_min,perplexity,length,overlap,"
    "blend,lookback,stack,saplma_smoothed,cortex,ensemble"
)


def nearest(record: Record) -> Record:
    """The record with the passages that share most words with its question, up to CHARACTERS."""
    asked = {key for _, _, key in words(record.question)}
    ranked = sorted(
        range(len(record.passages)),
        key=lambda i: -len(asked & {key for _, _, key in words(record.passages[i].text)}),
    )
    kept: list[int] = []
    n_characters = 0
    for index in ranked:
        length = len(record.passages[index].text)
        if kept and n_characters + length > CHARACTERS:
            continue
        kept.append(index)
        n_characters += length
    return replace(record, passages=tuple(record.passages[i] for i in sorted(kept)))


def main() -> None:
    """Measure, fit, score, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--per-source", type=int, default=2)
    arguments.add_argument("--cache", default="~/.cache/leadline/traces")
    arguments.add_argument("--methods", default=METHODS)
    arguments.add_argument("--per-language", type=int, help="at most N answers of Mu-SHROOM per language")
    arguments.add_argument("--measure-only", action="store_true")
    given = arguments.parse_args()
    methods = given.methods.split(",")
    swapped = edited.swapped(given.pairs, given.seed)
    changed = edited.changed(given.pairs, given.seed)
    with_passages = [m for m in mushroom.load() if m.record.passages]
    foreign = [
        m
        for language in ("de", "fr", "hi")
        for m in [m for m in with_passages if m.language == language][: given.per_language]
    ]

    from detector import Scorer

    scorer = Scorer.load(bundle=None)
    keep = keep_for(methods, n_blocks(scorer))
    store = TraceStore(given.cache)

    def measure(records: Sequence[LabelledRecord], name: str) -> list[Labelled]:
        examples, _ = measure_labelled(
            [[record] for record in records], scorer, store, keep, lambda n, of: say(f"{name} {n} of {of}")
        )
        return examples

    sets = {
        "swapped": measure([_labelled(e) for e in swapped], "swapped"),
        "changed": measure([_labelled(e) for e in changed], "changed"),
        "mushroom": measure(
            [
                LabelledRecord(
                    nearest(m.record), m.spans, m.record.response_id or "", "", "", m.language, "good"
                )
                for m in foreign
            ],
            "mushroom",
        ),
    }
    if given.measure_only:
        return
    examples, _, _ = measured(
        [str(ragtruth.PATH)],
        make_config({}),
        methods,
        cache=given.cache,
        per_source=given.per_source,
        on_progress=say,
    )
    away = {e.source_id for name in ("swapped", "changed") for e in sets[name]}
    train = [e for e in examples if e.source_id not in away]
    say(f"training on {len(train)} answers to {len({e.source_id for e in train})} other sources")
    print("pairs won by the unsupported one [95 % interval]; token AUROC [95 % interval]")
    print("method                 swapped            changed            mushroom de       fr       hi")
    for method in methods:
        score = scorer_of(method, train, n_blocks(scorer), 0)
        cells = [_won(sets["swapped"], score, whole=True), _won(sets["changed"], score, whole=False)]
        cells += [
            _token_auroc([e for e in sets["mushroom"] if e.language == language], score)
            for language in ("de", "fr", "hi")
        ]
        print(f"{method:22} {'  '.join(cells)}", flush=True)
    for delta in refind.DELTAS:
        ious = {language: [] for language in ("de", "fr", "hi")}  # type: dict[str, list[float]]
        for e, m in zip(sets["mushroom"], foreign, strict=True):
            predicted = refind.flagged_spans(refind.csr(e.trace), e.trace.offsets, delta)
            ious[e.language].append(refind.iou(predicted, m.spans))
        print(f"refind IoU, delta {delta}: {', '.join(f'{k} {np.mean(v):.3f}' for k, v in ious.items())}")


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def _labelled(example: edited.Edited) -> LabelledRecord:
    return LabelledRecord(example.record, example.spans, example.source_id, "", "QA", "en", "good")


def _won(examples: Sequence[Labelled], score: Score, *, whole: bool) -> str:
    """Share of pairs (edited, twin) in which the edited one scores higher.

    By the mean of its sentences (`whole`), or of the edited tokens beside those that stood there before.
    """
    wins = []
    for bad, good in zip(examples[::2], examples[1::2], strict=True):
        if whole:
            a, b = (float(np.mean(score(e)[1])) for e in (bad, good))
        else:
            rows = np.flatnonzero(bad.token_labels)
            a = float(score(bad)[0][rows].mean())
            b = float(score(good)[0][np.minimum(rows, len(good.token_labels) - 1)].mean())
        wins.append(1.0 if a > b else 0.5 if a == b else 0.0)
    pairs = list(range(len(wins)))
    found = bootstrap(np.ones(len(wins), dtype=bool), {"": np.array(wins)}, pairs, METRICS["iou"])[""]
    return f"{found.interval.value:.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"


def _token_auroc(examples: Sequence[Labelled], score: Score) -> str:
    labels = np.concatenate([e.token_labels for e in examples])
    values = np.concatenate([score(e)[0] for e in examples])
    clusters = np.repeat(np.arange(len(examples)), [len(e.token_labels) for e in examples])
    found = bootstrap(labels, {"": values}, clusters, METRICS["auroc"], n=200)[""].interval
    assert found.value == auroc(labels, values)
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


if __name__ == "__main__":
    main()
