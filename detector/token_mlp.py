"""One small network for every method that reads a state vector per token, and the head around it.

CORTEX (arXiv 2606.31033, appendix C) trains the same classifier on the features of all methods, so that only
the features differ. The head adds what turns its scores into answers: calibration, label persistence, and the
step from tokens to sentences.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detector.errors import DetectorError
from detector.heads import F64, Labelled, Tokens
from detector.logistic import sigmoid
from detector.smoothing import Smoother
from detector.trace import F32, Trace

HELD_OUT = 0.2
"""Share of the training sources that the network does not see: the smoother is fitted on them."""

_WIDTHS = (256, 128, 1)
_DROPOUT = 0.1
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 1e-4

Read = Callable[[Trace, int], F32]
"""A trace and a layer to (A, F) features, one row per answer token."""


@dataclass(frozen=True, slots=True)
class TokenMLP:
    """F-256-128-1 with ReLU. `weights[i]`: (in, out), `biases[i]`: (out,), float32."""

    weights: tuple[F32, F32, F32]
    biases: tuple[F32, F32, F32]

    @classmethod
    def fit(
        cls,
        features: F32,
        labels: NDArray[np.bool_],
        seed: int,
        *,
        standardise: bool = True,
        epochs: int = 10,
        batch_size: int = 4096,
    ) -> "TokenMLP":
        """Train on (N, F) finite features and (N,) labels, both classes present.

        CORTEX, appendix C: dropout .1, AdamW (1e-3, weight decay 1e-4), batches of 4,096, 10 epochs, binary
        cross-entropy whose positive class is weighted by negatives per positive. So scores are those of a
        world with as many unsupported tokens as supported ones, and over-confident: calibrate them.

        The paper describes no normalisation. `standardise` (mean 0, deviation 1 per feature) is on because a
        few dimensions of a transformer's states are far larger than the rest and would be all that the
        first steps see. Runs on the CPU; one seed and one number of threads give the same network
        bit for bit. Makes no copy of `features`. Raises DetectorError where a class is missing.
        """
        positives = int(labels.sum())
        if positives in (0, len(labels)):
            raise DetectorError(
                "training needs tokens with and without unsupported text; label more answers of other sources"
            )
        inputs, targets = torch.from_numpy(features), torch.from_numpy(labels.astype(np.float32))
        mean, sd = torch.zeros(features.shape[1]), torch.ones(features.shape[1])
        if standardise:
            variance, mean = torch.var_mean(inputs, dim=0, correction=0)
            sd = variance.sqrt()
            sd[sd < 1e-12] = 1.0  # a constant tells nothing and must not divide by zero
        # Whoever calls may have switched gradients off for the whole process, as scoring code likes to.
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _network(features.shape[1])
            loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor((len(labels) - positives) / positives))
            optimiser = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
            for _ in range(epochs):
                order = torch.randperm(len(targets))
                for start in range(0, len(order), batch_size):
                    batch = order[start : start + batch_size]
                    optimiser.zero_grad()
                    loss(network((inputs[batch] - mean) / sd).squeeze(1), targets[batch]).backward()
                    optimiser.step()
        return cls(*_folded(network, mean, sd))

    def logit(self, features: F32) -> F64:
        """(N,) log-odds of (N, F) features."""
        hidden = features
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.maximum(hidden @ weight + bias, 0.0)
        return np.asarray((hidden @ self.weights[-1] + self.biases[-1])[:, 0], dtype=np.float64)

    def probability(self, features: F32) -> F64:
        """(N,) in [0, 1], as if both classes were equally frequent."""
        return sigmoid(self.logit(features))

    def to_parts(self) -> dict[str, Any]:
        """Three weights and three biases as arrays."""
        named = {f"weight_{i}": weight for i, weight in enumerate(self.weights)}
        return named | {f"bias_{i}": bias for i, bias in enumerate(self.biases)}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> "TokenMLP":
        """What `to_parts` gave."""
        weights = (parts["weight_0"], parts["weight_1"], parts["weight_2"])
        return cls(weights, (parts["bias_0"], parts["bias_1"], parts["bias_2"]))


@dataclass(frozen=True, slots=True)
class TokenHead:
    """A trained method that reads states of one layer (see `heads.Head`)."""

    read: Read
    layer: int
    mlp: TokenMLP
    smoother: Smoother
    pooling: str
    """A sentence's score: `max` or `mean` of its tokens'."""

    @classmethod
    def fit(
        cls,
        examples: Sequence[Labelled],
        read: Read,
        *,
        layer: int,
        seed: int = 0,
        smooth: bool = True,
        pooling: str = "max",
        standardise: bool = True,
    ) -> "TokenHead":
        """Train the network on four fifths of the sources; calibrate it and fit the smoother on the rest.

        A network is far too sure about tokens that it was trained on: a calibration made there would be
        wrong, and so would a p_stay. It is not trained again on all sources afterwards, because the
        calibration would then belong to another network. Raises DetectorError (see `held_out_sources`).
        """
        if pooling not in ("max", "mean"):
            raise DetectorError(f"pooling must be max or mean, got {pooling!r}")
        held_out = held_out_sources(examples)
        training = [example for example in examples if example.source_id not in held_out]
        labels = np.concatenate([np.zeros(0, np.bool_), *(example.token_labels for example in training)])
        mlp = TokenMLP.fit(_matrix(training, read, layer), labels, seed, standardise=standardise)
        rest = [example for example in examples if example.source_id in held_out]
        scores = [mlp.probability(read(example.trace, layer)) for example in rest]
        smoother = Smoother.fit(scores, [example.token_labels for example in rest], smooth=smooth)
        return cls(read, layer, mlp, smoother, pooling)

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) smoothed and calibrated. The answer's score is the largest (`smoothing.answer_score`)."""
        return self.smoother.apply(self.mlp.probability(self.read(trace, self.layer)))

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) largest or mean score of each sentence's tokens."""
        scores = self.tokens(trace, sentences)
        pool = np.max if self.pooling == "max" else np.mean
        return np.array([pool(scores[members]) for members in sentences], dtype=np.float64)

    def to_parts(self) -> dict[str, Any]:
        """Everything but `read`, which is the module's."""
        parts = {"layer": self.layer, "pooling": self.pooling}
        return parts | self.mlp.to_parts() | self.smoother.to_parts()

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any], read: Read) -> "TokenHead":
        """What `to_parts` gave, with the features of the module that fitted it."""
        mlp, smoother = TokenMLP.from_parts(parts), Smoother.from_parts(parts)
        return cls(read, int(parts["layer"]), mlp, smoother, str(parts["pooling"]))


def held_out_sources(examples: Sequence[Labelled]) -> set[str]:
    """A fifth of the sources with unsupported tokens and a fifth of those without, by a hash of their names.

    Both kinds, because a fifth drawn from few sources often holds no unsupported token at all. At least one
    of a kind is held out and one is kept. Raises DetectorError where fewer than two hold unsupported tokens.
    """
    unsupported = {example.source_id for example in examples if example.token_labels.any()}
    if len(unsupported) < 2:
        raise DetectorError(
            f"{len(unsupported)} of the labelled sources hold unsupported text, 2 are needed to train and "
            "calibrate; label answers to more questions"
        )
    sources = {example.source_id for example in examples}
    chosen: set[str] = set()
    for kind in (unsupported, sources - unsupported):
        n_held_out = min(max(1, round(HELD_OUT * len(kind))), max(0, len(kind) - 1))
        chosen.update(sorted(kind, key=_hash)[:n_held_out])
    return chosen


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _matrix(examples: Sequence[Labelled], read: Read, layer: int) -> F32:
    """(N, F) features of all tokens, filled in place: two copies of a training set would be gigabytes."""
    n_tokens = sum(len(example.token_labels) for example in examples)
    matrix, start = np.empty((0, 0), np.float32), 0
    for example in examples:
        rows = read(example.trace, layer)
        if not start:
            matrix = np.empty((n_tokens, rows.shape[1]), np.float32)
        matrix[start : start + len(rows)] = rows
        start += len(rows)
    return matrix


def _network(n_features: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in zip((n_features, *_WIDTHS[:-1]), _WIDTHS, strict=True):
        layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(_DROPOUT)]
    return nn.Sequential(*layers[:-2])  # the last one's output is the logit


def _folded(
    network: nn.Sequential, mean: Tensor, sd: Tensor
) -> tuple[tuple[F32, F32, F32], tuple[F32, F32, F32]]:
    """Weights and biases with the standardisation inside the first layer (summed in float64)."""
    linear = [module for module in network if isinstance(module, nn.Linear)]
    weights = [module.weight.detach().double().T for module in linear]
    biases = [module.bias.detach().double() for module in linear]
    weights[0] = weights[0] / sd.double()[:, None]
    biases[0] = biases[0] - mean.double() @ weights[0]
    w1, w2, w3 = (np.ascontiguousarray(weight.float().numpy()) for weight in weights)
    b1, b2, b3 = (bias.float().numpy() for bias in biases)
    return (w1, w2, w3), (b1, b2, b3)
