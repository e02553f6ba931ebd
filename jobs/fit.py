"""Train a head on labelled answers and write it as a bundle, with figures from sources it had not seen."""

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from detector.bundle import Bundle, Card
from detector.evaluation import folds
from detector.heads import Labelled
from detector.trained import TRAINED
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.evaluate import N_FOLDS, Held, hold_out, keep_for, tables
from jobs.labelled import LabelledRecord, measure_labelled, pick, read_labelled
from jobs.storage import Storage, join
from jobs.traces import TraceStore

RATES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""False-alarm rates that a bundle states thresholds for."""

LIMITS = (
    "Figures and false-alarm rates hold for answers like those it was trained on. On other tasks, languages "
    "and domains ranks mostly carry over and rates do not: check them on labelled answers of your own."
)

Progress = Callable[[str], None]


def measured(
    logs: Sequence[str],
    config: Config,
    methods: Sequence[str],
    *,
    cache: str | Path,
    per_source: int | None,
    on_progress: Progress,
) -> tuple[list[Labelled], list[LabelledRecord], Any]:
    """Good labelled answers with their traces, and the scorer that read them.

    Answers whose `quality` is not good (refusals, truncated ones) are left out, and counted on the way.
    """
    from jobs.worker import load_scorer

    groups = pick(read_labelled(logs, config), per_source)
    scorer = load_scorer(config.model_copy(update={"bundle": "none"}))
    keep = keep_for(methods, n_blocks(scorer))
    good = [[answer for answer in group if answer.quality == "good"] for group in groups]
    n_left_out = sum(map(len, groups)) - sum(map(len, good))
    if n_left_out:
        on_progress(f"{n_left_out} answers left out: their quality is not good")
    examples, answers = measure_labelled(
        [group for group in good if group],
        scorer,
        TraceStore(cache),
        keep,
        lambda done, n: on_progress(f"measured {done} of {n} sources") if done % 20 == 0 else None,
    )
    usable = [i for i, example in enumerate(examples) if example.sentences]
    return [examples[i] for i in usable], [answers[i] for i in usable], scorer


def n_blocks(scorer: Any) -> int:
    """How many transformer blocks the scorer has."""
    return int(scorer.model.config.get_text_config().num_hidden_layers)


def fit_bundle(
    method: str,
    examples: Sequence[Labelled],
    answers: Sequence[LabelledRecord],
    scorer: Any,
    *,
    seed: int = 0,
    data: str,
    limits: str = LIMITS,
    on_progress: Progress = lambda _: None,
) -> Bundle:
    """A bundle of `method`, fitted on everything; thresholds and figures from N_FOLDS folds by source."""
    if method not in TRAINED:
        raise ConfigError(f"fit: no trained method {method!r}; known: {', '.join(TRAINED)}")
    n_layers = n_blocks(scorer)
    part = folds([e.source_id for e in examples], np.array([e.label for e in examples]), N_FOLDS, seed)
    on_progress(f"{method}: held-out scores of {len(examples)} answers in {N_FOLDS} folds")
    held = hold_out(method, examples, part, n_layers, seed=seed)
    on_progress(f"{method}: fitting on everything")
    head = TRAINED[method].fit(examples, n_layers, seed)
    keep = getattr(head, "keep", None) or TRAINED[method].keep(n_layers)
    card = Card(
        method=method,
        scorer=scorer.name,
        scorer_fingerprint=scorer.fingerprint,
        profile=scorer.profile.name,
        keep=keep,
        operating_points=operating_points(examples, held),
        data=data,
        data_fingerprint=data_fingerprint(answers),
        versions={name: version(name) for name in ("leadline", "torch", "transformers", "lightgbm", "numpy")},
        figures=_figures(method, examples, answers, held),
        limits=limits,
    )
    return Bundle(card, head.to_parts())


def operating_points(examples: Sequence[Labelled], held: Held) -> dict[float, float]:
    """False-alarm rate -> the lowest threshold that flags at most this share of the supported sentences."""
    labels = np.concatenate([e.sentence_labels for e in examples])
    supported = np.concatenate(held.sentences)[~labels]
    points = {}
    for rate in RATES:
        highest = np.quantile(supported, 1.0 - rate, method="higher")
        points[rate] = float(np.nextafter(highest, np.inf))  # a flag is a score at or over the threshold
    return points


def data_fingerprint(answers: Sequence[LabelledRecord]) -> str:
    """12 hex digits of every text and label that was learned from, in order."""
    digest = hashlib.sha256()
    for answer in answers:
        record = answer.record
        content = [record.question, [p.text for p in record.passages], record.answer, answer.spans]
        digest.update(json.dumps([answer.source_id, *content]).encode())
    return digest.hexdigest()[:12]


def write_bundle(bundle: Bundle, out: str, storage: Storage) -> None:
    """Write its files below `out`, the card last: a reader finds a whole bundle or none."""
    files = bundle.to_files()
    for name in sorted(files, key=lambda name: (name.endswith(".json"), name)):
        storage.write(join(out, name), files[name])


def _figures(
    method: str, examples: Sequence[Labelled], answers: Sequence[LabelledRecord], held: Held
) -> dict[str, Any]:
    gold = [answer.spans for answer in answers]
    texts = [answer.record.answer for answer in answers]
    rows = tables(examples, texts, gold, {method: held}, None, by=())
    figures: dict[str, Any] = {
        f"{row.level}_{row.metric}": [round(row.value, 4), round(row.low, 4), round(row.high, 4)]
        for row in rows
    }
    tokens = np.concatenate([e.token_labels for e in examples])
    sentences = np.concatenate([e.sentence_labels for e in examples])
    return figures | {
        "n_sources": len({e.source_id for e in examples}),
        "n_answers": len(examples),
        "n_sentences": len(sentences),
        "n_tokens": len(tokens),
        "token_prevalence": round(float(tokens.mean()), 4),
        "sentence_prevalence": round(float(sentences.mean()), 4),
        "protocol": f"{N_FOLDS} folds grouped by source; value, then 95 % bootstrap interval over sources",
    }
