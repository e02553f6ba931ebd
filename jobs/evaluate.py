"""Every method on labelled answers under one protocol: folds by source, intervals by source.

Each answer is scored by a head that saw no answer to its question. Thresholds and the rule that turns
sentences into an answer are chosen on the other folds. Label-free methods are standardised with the training
folds' features and no labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.evaluation import (
    METRICS,
    bootstrap,
    character_counts,
    character_iou,
    choose_threshold,
    token_spans,
)
from detector.heads import F64, Head, Labelled
from detector.label_free import LABEL_FREE
from detector.probe import Keep
from detector.response import apply_rule, choose_rule
from detector.trained import TRAINED
from jobs.evaluation_tables import Row

N_FOLDS = 5
_RESAMPLES = {"token": 200, "sentence": 1000, "response": 1000}


@dataclass(frozen=True, slots=True)
class Held:
    """What one method says of every answer, each scored without having seen its source. Index = example."""

    tokens: list[F64]
    sentences: list[F64]
    responses: F64
    flags: list[NDArray[np.bool_]]
    """Tokens at or over the threshold with the best F1 on the other folds."""
    response_flags: NDArray[np.bool_]


def union(keeps: Sequence[Keep]) -> Keep:
    """One Keep that serves all of them, so that nothing is measured twice."""
    return Keep(
        leave_one_out=any(keep.leave_one_out for keep in keeps),
        words=any(keep.words for keep in keeps),
        foil=any(keep.foil for keep in keeps),
        extremes=any(keep.extremes for keep in keeps),
        attention=any(keep.attention for keep in keeps),
        layers=tuple(sorted({layer for keep in keeps for layer in keep.layers})),
        carried=any(keep.carried for keep in keeps),
    )


def keep_for(methods: Sequence[str], n_layers: int) -> Keep:
    """What the passes must keep for these methods."""
    return union([LABEL_FREE[m].keep if m in LABEL_FREE else TRAINED[m].keep(n_layers) for m in methods])


Score = Callable[[Labelled], tuple[F64, F64, float | None]]
"""Of one example: token scores, sentence scores, and the response's where the method has its own rule."""

Fit = Callable[[Sequence[Labelled]], Score]


def hold_out(
    name: str,
    examples: Sequence[Labelled],
    part: NDArray[np.int64],
    n_layers: int,
    *,
    seed: int = 0,
    train: NDArray[np.bool_] | None = None,
) -> Held:
    """Scores of method `name` for every example of fold k by a head fitted on the other folds.

    `part`: (N,) fold of each example. `train`: examples that may be learned from (a learning curve).
    """
    return score_held_out(
        lambda chosen: scorer_of(name, chosen, n_layers, seed),
        examples,
        part,
        probabilities=name in TRAINED,
        train=train,
    )


def score_held_out(
    fit: Fit,
    examples: Sequence[Labelled],
    part: NDArray[np.int64],
    *,
    probabilities: bool,
    train: NDArray[np.bool_] | None = None,
) -> Held:
    """The same for any `fit`; `probabilities`: whether its sentence scores are some."""
    n = len(examples)
    usable = np.ones(n, dtype=bool) if train is None else train
    tokens: list[F64] = [np.zeros(0)] * n
    sentences: list[F64] = [np.zeros(0)] * n
    own: list[float | None] = [None] * n
    for fold in np.unique(part).tolist():
        rows = np.flatnonzero((part != fold) & usable)
        score = fit([examples[i] for i in rows])
        for i in np.flatnonzero(part == fold).tolist():
            tokens[i], sentences[i], own[i] = score(examples[i])
    labels = np.array([e.label for e in examples])
    responses = np.zeros(n)
    flags: list[NDArray[np.bool_]] = [np.zeros(0, dtype=bool)] * n
    response_flags = np.zeros(n, dtype=bool)
    for fold in np.unique(part).tolist():
        inside = np.flatnonzero(part == fold)
        rest = np.flatnonzero((part != fold) & usable)
        if own[0] is not None:
            answer = np.array([value or 0.0 for value in own], dtype=np.float64)
        else:
            rule = choose_rule(
                [sentences[i] for i in rest], labels[rest].tolist(), probabilities=probabilities
            )
            answer = apply_rule(rule, sentences)
        responses[inside] = answer[inside]
        threshold = choose_threshold(
            np.concatenate([examples[i].token_labels for i in rest]),
            np.concatenate([tokens[i] for i in rest]),
        )
        response_flags[inside] = answer[inside] >= choose_threshold(labels[rest], answer[rest])
        for i in inside.tolist():
            flags[i] = tokens[i] >= threshold
    return Held(tokens, sentences, responses, flags, response_flags)


def scorer_of(name: str, examples: Sequence[Labelled], n_layers: int, seed: int) -> Score:
    """A function of one example: token scores, sentence scores, and the response's where the head has one."""
    if name in TRAINED:
        head: Head = TRAINED[name].fit(examples, n_layers, seed)
        respond = getattr(head, "response", None)

        def score(e: Labelled) -> tuple[F64, F64, float | None]:
            answer = None if respond is None else respond(e.trace, e.sentences)
            return head.tokens(e.trace, e.sentences), head.sentences(e.trace, e.sentences), answer

        return score
    method = LABEL_FREE[name]
    seen = np.concatenate([method.sentences(e.trace, e.sentences) for e in examples])
    mean, sd = seen.mean(axis=0), np.maximum(seen.std(axis=0, ddof=1), 1e-9)

    def standardised(e: Labelled) -> tuple[F64, F64, float | None]:
        features = method.sentences(e.trace, e.sentences)
        return np.asarray(method.tokens(e.trace), np.float64), ((features - mean) / sd).sum(axis=1), None

    return standardised


def tables(
    examples: Sequence[Labelled],
    answers: Sequence[str],
    gold: Sequence[Sequence[tuple[int, int]]],
    held: Mapping[str, Held],
    against: str | None,
    *,
    by: Sequence[str] = ("task", "generator"),
    n_resamples: int | None = None,
) -> list[Row]:
    """Rows of every method, level and metric: pooled, and per value of the dimensions in `by`.

    `answers` and `gold` (texts and marked spans, same order as `examples`) serve the character metrics.
    Intervals draw sources with replacement; differences are to `against` within the same draws.
    """
    rows: list[Row] = []
    everything = np.arange(len(examples))
    rows += _group(examples, answers, gold, held, against, everything, {}, n_resamples)
    for dimension in by:
        values = np.array([getattr(e, dimension) for e in examples])
        names = [name for name in np.unique(values).tolist() if name]
        for name in names if len(names) > 1 else ():
            chosen = np.flatnonzero(values == name)
            rows += _group(examples, answers, gold, held, against, chosen, {dimension: name}, n_resamples)
    return rows


def _group(
    examples: Sequence[Labelled],
    answers: Sequence[str],
    gold: Sequence[Sequence[tuple[int, int]]],
    held: Mapping[str, Held],
    against: str | None,
    chosen: NDArray[np.intp],
    dimension: Mapping[str, str],
    n_resamples: int | None,
) -> list[Row]:
    rows: list[Row] = []
    sources = np.array([examples[i].source_id for i in chosen])
    levels: dict[str, tuple[NDArray[np.bool_], NDArray[Any], dict[str, F64]]] = {
        "token": (
            np.concatenate([examples[i].token_labels for i in chosen]),
            np.repeat(sources, [len(examples[i].token_labels) for i in chosen]),
            {name: np.concatenate([h.tokens[i] for i in chosen]) for name, h in held.items()},
        ),
        "sentence": (
            np.concatenate([examples[i].sentence_labels for i in chosen]),
            np.repeat(sources, [len(examples[i].sentence_labels) for i in chosen]),
            {name: np.concatenate([h.sentences[i] for i in chosen]) for name, h in held.items()},
        ),
        "response": (
            np.array([examples[i].label for i in chosen]),
            sources,
            {name: h.responses[chosen] for name, h in held.items()},
        ),
    }
    flags = {name: h.response_flags[chosen].astype(np.float64) for name, h in held.items()}
    for level, (labels, clusters, scores) in levels.items():
        if labels.all() or not labels.any():
            continue
        draws = n_resamples or _RESAMPLES[level]
        metrics = {"auroc": scores, "average_precision": scores} | (
            {"f1": flags} if level == "response" else {}
        )
        for metric, values in metrics.items():
            rows += _rows(level, metric, labels, values, clusters, against, draws, dimension)
    characters: dict[str, dict[str, NDArray[Any]]] = {"iou": {}, "span_f1": {}}
    for name, h in held.items():
        spans = [token_spans(h.flags[i], examples[i].trace.offsets, answers[i]) for i in chosen]
        characters["iou"][name] = np.array(
            [character_iou(s, gold[i], len(answers[i])) for s, i in zip(spans, chosen, strict=True)]
        )
        characters["span_f1"][name] = np.array(
            [character_counts(s, gold[i]) for s, i in zip(spans, chosen, strict=True)]
        )
    labels = levels["response"][0]
    for metric, values in characters.items():
        draws = n_resamples or _RESAMPLES["response"]
        rows += _rows("character", metric, labels, values, sources, against, draws, dimension)
    return rows


def _rows(
    level: str,
    metric: str,
    labels: NDArray[np.bool_],
    scores: Mapping[str, NDArray[Any]],
    clusters: NDArray[Any],
    against: str | None,
    draws: int,
    dimension: Mapping[str, str],
) -> list[Row]:
    found = bootstrap(labels, scores, clusters, METRICS[metric], against=against, n=draws)
    rows = []
    for name, estimate in found.items():
        difference = estimate.difference
        rows.append(
            Row(
                method=name,
                level=level,
                metric=metric,
                n=len(labels),
                n_positive=int(labels.sum()),
                value=estimate.interval.value,
                low=estimate.interval.low,
                high=estimate.interval.high,
                difference=None if difference is None else difference.value,
                difference_low=None if difference is None else difference.low,
                difference_high=None if difference is None else difference.high,
                against=None if difference is None else against,
                **{"task": "", "generator": "", "language": ""} | dict(dimension),
            )
        )
    return rows
