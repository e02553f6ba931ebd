"""What `leadline fit` and `leadline evaluate` do, one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from detector.evaluation import folds, leave_one_out_folds
from detector.label_free import LABEL_FREE
from detector.trained import TRAINED
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.evaluate import N_FOLDS, hold_out, score_held_out, tables
from jobs.evaluation_tables import to_markdown, write_tables
from jobs.fit import fit_bundle, measured, n_blocks, write_bundle
from jobs.options import LabelledOptions, names
from jobs.storage import Storage, join, mask
from jobs.verified import check as check_verifiers
from jobs.verified import verify

Say = Callable[[str], None]


def train(
    labelled: Sequence[str],
    out: str,
    config: Config,
    options: LabelledOptions,
    describe: str | None,
    say: Say,
) -> None:
    """Fit the named heads (default: ensemble) and write each as a bundle: into `out`, or below it by name."""
    methods = names(options.methods) or ["ensemble"]
    _check(methods, list(TRAINED))
    with _one_thread(config):
        examples, answers, scorer = measured(
            labelled,
            config,
            methods,
            cache=options.cache,
            per_source=options.per_source,
            on_progress=say,
        )
        sources = len({e.source_id for e in examples})
        data = describe or f"{len(examples)} answers to {sources} sources in {', '.join(map(mask, labelled))}"
        storage = Storage(config.storage)
        for method in methods:
            bundle = fit_bundle(
                method, examples, answers, scorer, seed=options.seed, data=data, on_progress=say
            )
            place = out if len(methods) == 1 else join(out, method)
            write_bundle(bundle, place, storage)
            say(f"{method}: bundle {bundle.digest} in {mask(place)}")


def compare(
    labelled: Sequence[str],
    out: str | None,
    config: Config,
    options: LabelledOptions,
    against: str,
    leave_out: str | None,
    verifiers: Sequence[str],
    say: Say,
) -> str:
    """Score every named method held out, write the tables below `out`, and return them as markdown."""
    known = [*LABEL_FREE, *TRAINED]
    methods = names(options.methods) or ["all"]
    methods = known if methods == ["all"] else methods
    _check([*methods, against], known)
    if leave_out not in (None, "generator"):
        raise ConfigError(f"--leave-out {leave_out}: only generator is known")
    check_verifiers(verifiers)
    methods = list(dict.fromkeys([*methods, against]))
    with _one_thread(config):
        examples, answers, scorer = measured(
            labelled,
            config,
            methods,
            cache=options.cache,
            per_source=options.per_source,
            on_progress=say,
        )
        n_layers = n_blocks(scorer)
        labels = np.array([e.label for e in examples])
        part = folds([e.source_id for e in examples], labels, N_FOLDS, options.seed)
        held = {}
        for method in methods:
            say(f"{method}: {len(examples)} answers")
            held[method] = hold_out(method, examples, part, n_layers, seed=options.seed)
            if leave_out == "generator" and method in TRAINED:
                one_out = leave_one_out_folds([e.generator for e in examples])
                held[f"{method} (generator left out)"] = hold_out(
                    method, examples, one_out, n_layers, seed=options.seed
                )
        for verifier in verifiers:
            fit = verify(verifier, examples, answers, config, say)
            held[verifier] = score_held_out(fit, examples, part, probabilities=True)
    gold = [answer.spans for answer in answers]
    rows = tables(examples, [answer.record.answer for answer in answers], gold, held, against)
    if out is not None:
        write_tables(Storage(config.storage), out, rows)
    return to_markdown(rows)


def compare_published(folders: Sequence[str], out: str | None, config: Config) -> str:
    """The GASP author's own features under his protocol, beside his printed figures."""
    from jobs import published_features as published

    storage = Storage(config.storage)
    rows = [
        row
        for folder in folders
        for features in published.read_features(storage, folder)
        for row in published.evaluate_features(features)
    ]
    if out is not None:
        published.write_published(storage, out, rows)
    return published.to_markdown(rows)


def _check(methods: Sequence[str], known: Sequence[str]) -> None:
    for name in methods:
        if name not in known:
            raise ConfigError(f"--methods: no method {name!r}; known: {', '.join(known)}")


def _one_thread(config: Config) -> Any:
    """Sums depend on how many threads split them: as many as an audit's worker has, for equal numbers."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(config.workers.cpus_per_worker)
