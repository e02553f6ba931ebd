"""How many labelled sources a team needs: held-out figures by the number of training sources.

    python -m tests.figures.learning_curve LABELLED [--per-source 2] [--methods ensemble,lookback]

Five folds by source as in `leadline evaluate`; of the training folds only N sources are learned from (chosen
by a hash of their ids), the answers scored are the same for every N.
"""

import argparse
import hashlib
import math
import sys

import numpy as np
from numpy.typing import NDArray

from detector.evaluation import auroc, average_precision, folds
from detector.heads import Labelled
from jobs.config import make_config
from jobs.evaluate import N_FOLDS, hold_out
from jobs.fit import measured, n_blocks

SIZES = (50, 100, 200, 400, None)


def chosen(examples: list[Labelled], part: NDArray[np.int64], n_sources: int | None) -> NDArray[np.bool_]:
    """Which examples may be learned from so that four folds of five hold about `n_sources` sources."""
    if n_sources is None:
        return np.ones(len(examples), dtype=bool)
    keep: set[str] = set()
    for fold in np.unique(part).tolist():
        inside = {e.source_id for e, of in zip(examples, part, strict=True) if of == fold}
        ranked = sorted(inside, key=lambda source: hashlib.sha256(source.encode()).digest())
        keep.update(ranked[: math.ceil(n_sources / (N_FOLDS - 1))])
    return np.array([e.source_id in keep for e in examples])


def main() -> None:
    """Measure, score, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("labelled", nargs="+")
    arguments.add_argument("--per-source", type=int, default=2)
    arguments.add_argument("--cache", default="~/.cache/leadline/traces")
    arguments.add_argument("--methods", default="ensemble,lookback,gasp_two_pass")
    given = arguments.parse_args()
    methods = given.methods.split(",")
    examples, _, scorer = measured(
        given.labelled,
        make_config({}),
        methods,
        cache=given.cache,
        per_source=given.per_source,
        on_progress=lambda text: print(text, file=sys.stderr),
    )
    labels = np.array([e.label for e in examples])
    part = folds([e.source_id for e in examples], labels, N_FOLDS, 0)
    tokens = np.concatenate([e.token_labels for e in examples])
    sentences = np.concatenate([e.sentence_labels for e in examples])
    print("method            sources  token AP  sentence AUROC  response AUROC")
    for method in methods:
        for size in SIZES:
            train = chosen(examples, part, size)
            held = hold_out(method, examples, part, n_blocks(scorer), train=train)
            n_sources = len({e.source_id for e, kept in zip(examples, train, strict=True) if kept})
            print(
                f"{method:16} {n_sources * (N_FOLDS - 1) // N_FOLDS:8} "
                f"{average_precision(tokens, np.concatenate(held.tokens)):9.3f} "
                f"{auroc(sentences, np.concatenate(held.sentences)):15.3f} "
                f"{auroc(labels, held.responses):15.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
