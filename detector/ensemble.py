"""Leadline's own method: three groups of signals from the same two passes, added up.

    states       comparative middle-layer states (`states`), linear
    attention    lookback ratios of every head (`lookback`), linear
    likelihood   log-probabilities, divergences, entropies, ranks and the words (`likelihood`), trees

Each group gives log-odds, a logistic regression adds them, and so the share of each group in a flag can be
told. Sentences have models of their own, because people mark sentences and not averages of tokens; tokens
are smoothed as CORTEX does. Everything that sees the output of a group model (the two sums, the smoother,
the rule for answers) is fitted on answers whose source that model did not see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector import likelihood, lookback, states
from detector.bundle import Verdict
from detector.errors import DetectorError
from detector.evaluation import folds
from detector.gasp_head import Trees
from detector.heads import F64, Labelled, Tokens
from detector.logistic import Logistic, sigmoid
from detector.probe import Keep
from detector.smoothing import Smoother
from detector.trace import F32, Trace

GROUPS = ("states", "attention", "likelihood")
"""The signals that a flag is explained by, in the order of every array over groups."""

INNER_FOLDS = 3
WORST_TOKENS = 5
"""How many of an answer's tokens its own score reads. A mean over all of them drowns one invented phrase."""

# Inverse L2 penalties and tree sizes, by sentence AUROC in folds over 280 RAGTruth QA sources.
_C_SENTENCE = {"states": 1e-4, "attention": 1e-2}
_C_TOKEN = {"states": 3e-4, "attention": 1e-3}
_ROUNDS, _LEAVES = 150, 15
_EVERY = 4

Model = Logistic | Trees


@dataclass(frozen=True, slots=True)
class EnsembleHead:
    """Group models, the sums over them, the smoother and the rule for answers."""

    layers: tuple[int, ...]
    sentence_models: Mapping[str, Model]
    token_models: Mapping[str, Model]
    sentence_sum: Logistic
    """Over the (n, 3) log-odds of groups."""
    token_sum: Logistic
    smoother: Smoother
    answer_sum: Logistic
    """Over `answer_features`."""

    @property
    def keep(self) -> Keep:
        """What the passes must keep: no leave-one-out."""
        return Keep(leave_one_out=False, words=True, extremes=True, attention=True, layers=self.layers)

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) smoothed probabilities that the token is unsupported. Higher = less grounded."""
        return self.smoother.apply(sigmoid(self._token_logit(trace)))

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) calibrated probabilities that the sentence is unsupported. Higher = less grounded."""
        return sigmoid(self.sentence_sum.logit(self._sentence_groups(trace, sentences)))

    def judge(self, trace: Trace, sentences: Sequence[Tokens]) -> tuple[list[Verdict], float]:
        """Of each sentence its probability and what each group adds to the log-odds of an average one; of the
        answer the probability that it holds unsupported text.
        """
        groups = self._sentence_groups(trace, sentences)
        added = (groups - self.sentence_sum.mean) / self.sentence_sum.sd * self.sentence_sum.weight
        logit = self.sentence_sum.logit(groups)
        verdicts = [
            Verdict(value, *parts)
            for value, parts in zip(sigmoid(logit).tolist(), added.tolist(), strict=True)
        ]
        row = answer_features(logit, self._token_logit(trace))
        return verdicts, float(self.answer_sum.probability(row[None])[0])

    def response(self, trace: Trace, sentences: Sequence[Tokens]) -> float:
        """Probability that the answer holds unsupported text."""
        return self.judge(trace, sentences)[1]

    def to_parts(self) -> dict[str, Any]:
        """Nested mappings of arrays, numbers and LightGBM texts."""
        return {
            "layers": np.array(self.layers, dtype=np.int64),
            "sentence_models": {name: model.to_parts() for name, model in self.sentence_models.items()},
            "token_models": {name: model.to_parts() for name, model in self.token_models.items()},
            "sentence_sum": self.sentence_sum.to_parts(),
            "token_sum": self.token_sum.to_parts(),
            "smoother": self.smoother.to_parts(),
            "answer_sum": self.answer_sum.to_parts(),
        }

    def _token_logit(self, trace: Trace) -> F64:
        return self.token_sum.logit(_token_groups(self.token_models, trace, self.layers))

    def _sentence_groups(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        return _sentence_groups(self.sentence_models, trace, sentences, self.layers)


def from_parts(parts: Mapping[str, Any]) -> EnsembleHead:
    """What `to_parts` gave."""
    return EnsembleHead(
        layers=tuple(int(layer) for layer in parts["layers"]),
        sentence_models={name: _model(parts["sentence_models"][name]) for name in GROUPS},
        token_models={name: _model(parts["token_models"][name]) for name in GROUPS},
        sentence_sum=Logistic.from_parts(parts["sentence_sum"]),
        token_sum=Logistic.from_parts(parts["token_sum"]),
        smoother=Smoother.from_parts(parts["smoother"]),
        answer_sum=Logistic.from_parts(parts["answer_sum"]),
    )


def answer_features(sentence_logit: F64, token_logit: F64) -> F64:
    """(4,) worst sentence, mean of the two worst, mean of the worst tokens, mean of all tokens, in log-odds.

    An answer without a sentence is read by its tokens alone.
    """
    sentences = np.sort(sentence_logit)[::-1] if len(sentence_logit) else token_logit.mean(keepdims=True)
    tokens = np.sort(token_logit)[::-1]
    return np.array(
        [sentences[0], sentences[:2].mean(), tokens[:WORST_TOKENS].mean(), tokens.mean()], dtype=np.float64
    )


def fit(examples: Sequence[Labelled], *, layers: Sequence[int], seed: int = 0) -> EnsembleHead:
    """Learn from measured answers (Keep as `EnsembleHead.keep`) of at least INNER_FOLDS sources of each kind.

    Group models are fitted on INNER_FOLDS training sets to give every answer held-out log-odds, and once
    more on everything; the rest is fitted on the held-out log-odds. Raises DetectorError where the
    answers, or the sentences or tokens of a fold, are of one kind.
    """
    layers = tuple(layers)
    labels = np.array([e.label for e in examples])
    if labels.all() or not labels.any():
        raise DetectorError(f"ensemble: the {len(labels)} answers are of one kind; add labelled answers")
    part = folds([e.source_id for e in examples], labels, INNER_FOLDS, seed)
    groups: list[tuple[F64, F64]] = [(np.zeros((0, 3)), np.zeros((0, 3)))] * len(examples)
    for fold in range(INNER_FOLDS):
        sentence_models, token_models = _fit_groups(
            [e for e, of in zip(examples, part, strict=True) if of != fold], layers, seed
        )
        for index in np.flatnonzero(part == fold).tolist():
            e = examples[index]
            groups[index] = (
                _sentence_groups(sentence_models, e.trace, e.sentences, layers),
                _token_groups(token_models, e.trace, layers),
            )
    sentence_sum = Logistic.fit(
        np.concatenate([s for s, _ in groups]), np.concatenate([e.sentence_labels for e in examples])
    )
    token_sum = Logistic.fit(
        np.concatenate([t for _, t in groups]), np.concatenate([e.token_labels for e in examples])
    )
    token_logits = [token_sum.logit(t) for _, t in groups]
    smoother = Smoother.fit([sigmoid(t) for t in token_logits], [e.token_labels for e in examples])
    answers = [
        answer_features(sentence_sum.logit(s), t) for (s, _), t in zip(groups, token_logits, strict=True)
    ]
    sentence_models, token_models = _fit_groups(examples, layers, seed)
    return EnsembleHead(
        layers=layers,
        sentence_models=sentence_models,
        token_models=token_models,
        sentence_sum=sentence_sum,
        token_sum=token_sum,
        smoother=smoother,
        answer_sum=Logistic.fit(np.array(answers), labels, c=0.1),
    )


def _sentence_groups(
    models: Mapping[str, Model], trace: Trace, sentences: Sequence[Tokens], layers: tuple[int, ...]
) -> F64:
    """(n, 3) log-odds of each group."""
    tables = [_sentence(name, trace, sentences, layers) for name in GROUPS]
    return np.stack([models[n].logit(t) for n, t in zip(GROUPS, tables, strict=True)], axis=1)


def _token_groups(models: Mapping[str, Model], trace: Trace, layers: tuple[int, ...]) -> F64:
    """(A, 3) log-odds of each group."""
    tables = [_token(name, trace, layers) for name in GROUPS]
    return np.stack([models[n].logit(t) for n, t in zip(GROUPS, tables, strict=True)], axis=1)


def _fit_groups(
    examples: Sequence[Labelled], layers: tuple[int, ...], seed: int
) -> tuple[dict[str, Model], dict[str, Model]]:
    sentence_labels = np.concatenate([e.sentence_labels for e in examples])
    rows = [_learned_tokens(e) for e in examples]
    token_labels = np.concatenate([e.token_labels[r] for e, r in zip(examples, rows, strict=True)])
    for labels, what in ((sentence_labels, "sentences"), (token_labels, "tokens")):
        if labels.all() or not labels.any():
            raise DetectorError(
                f"ensemble: the {len(labels)} {what} of a training fold are of one kind; add labelled answers"
            )
    sentence_models: dict[str, Model] = {}
    token_models: dict[str, Model] = {}
    for name in GROUPS:
        table = np.concatenate([_sentence(name, e.trace, e.sentences, layers) for e in examples])
        sentence_models[name] = _fit_model(name, table, sentence_labels, _C_SENTENCE, seed)
        table = np.concatenate(
            [_token(name, e.trace, layers)[r] for e, r in zip(examples, rows, strict=True)]
        )
        token_models[name] = _fit_model(name, table, token_labels, _C_TOKEN, seed)
    return sentence_models, token_models


def _learned_tokens(example: Labelled) -> NDArray[np.intp]:
    """Indices of the tokens to learn from: all unsupported ones, every fourth of the others (neighbours say
    the same again). The sum over groups, fitted on all tokens, puts the base rate right.
    """
    supported = np.flatnonzero(~example.token_labels)
    return np.sort(np.concatenate([np.flatnonzero(example.token_labels), supported[::_EVERY]]))


def _fit_model(
    name: str, table: NDArray[Any], labels: NDArray[np.bool_], penalties: Mapping[str, float], seed: int
) -> Model:
    if name == "likelihood":
        return Trees.fit(table, labels, seed=seed, rounds=_ROUNDS, leaves=_LEAVES)
    return Logistic.fit(table, labels, c=penalties[name])


def _token(name: str, trace: Trace, layers: tuple[int, ...]) -> F32:
    if name == "states":
        return states.features(trace, layers)
    if name == "attention":
        return lookback.ratios(trace, row="own")
    return likelihood.token_features(trace, _words(trace))


def _sentence(name: str, trace: Trace, sentences: Sequence[Tokens], layers: tuple[int, ...]) -> F32:
    if name == "likelihood":
        return likelihood.sentence_features(trace, sentences, _words(trace))
    rows = _token(name, trace, layers)
    mean = np.array([rows[tokens].mean(axis=0) for tokens in sentences], dtype=rows.dtype)
    mean = mean.reshape(len(sentences), rows.shape[1])
    if name != "states":
        return mean
    # The last token has read the whole sentence, which no mean over its tokens has.
    last = rows[[tokens[-1] for tokens in sentences]]
    return np.concatenate([mean, last.reshape(mean.shape)], axis=1)


def _words(trace: Trace) -> F32:
    if trace.words is None:
        raise DetectorError("ensemble reads words, which this trace does not hold: Keep(words=True)")
    return trace.words


def _model(parts: Mapping[str, Any]) -> Model:
    return Trees(parts["trees"]) if "trees" in parts else Logistic.from_parts(parts)
