"""CORTEX: how the passages change a token's state, and how much of that came through earlier tokens.

Two readings of the same answer, with all passages and with none, give for each token

    change    delta h_i = h_i(with) - h_i(without)
    residual  c_i = delta h_i - sum over earlier answer tokens j < i of alpha_ij delta h_j

(arXiv 2606.31033, eqs. 4-6); a small network reads [delta h; c]. A token that repeats what the answer has
already taken from a passage hardly changes by itself, and the sum knows that it need not.

What the paper leaves open: it says "final transformer layer" but not whether before or after the final norm,
and not which layer or heads give alpha. Here `layer` may be any that the trace kept (n_layers = the last one
before the norm, n_layers + 1 = after it; any earlier one works too), and alpha is the mean over the heads of
that same layer's attention in the reading with passages, not renormalised (`Trace.carried`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from detector.errors import DetectorError
from detector.heads import Labelled
from detector.token_mlp import TokenHead
from detector.trace import F32, Trace


def features(trace: Trace, layer: int) -> F32:
    """(A, 2D) [delta h; c] of each answer token, read at its own row. Raises DetectorError."""
    if trace.carried is None:
        raise DetectorError("cortex reads the attention-weighted sums: measure with Keep(carried=True)")
    (full, none), index = kept(trace, layer)
    change = full[1:] - none[1:]
    return np.concatenate([change, change - trace.carried[index]], axis=1)


def fit(
    examples: Sequence[Labelled],
    *,
    layer: int,
    seed: int = 0,
    smooth: bool = True,
    pooling: str = "max",
    standardise: bool = True,
) -> TokenHead:
    """A CORTEX head from labelled answers (see `TokenHead.fit`, `TokenMLP.fit` for the options).

    `layer`: the paper's is the scorer's n_layers. The paper smooths with one p_stay for tokens and another
    for answers; here one is chosen, by the tokens.
    """
    return TokenHead.fit(
        examples,
        features,
        layer=layer,
        seed=seed,
        smooth=smooth,
        pooling=pooling,
        standardise=standardise,
    )


def from_parts(parts: Mapping[str, Any]) -> TokenHead:
    """The head whose `to_parts` these are."""
    return TokenHead.from_parts(parts, features)


def kept(trace: Trace, layer: int) -> tuple[F32, int]:
    """(2, A + 1, D) states of `layer`, and its place among the layers kept. Raises DetectorError."""
    if trace.states is None or layer not in trace.layers:
        known = ", ".join(map(str, trace.layers)) or "none"
        raise DetectorError(
            f"states of layer {layer}: the trace kept layers {known}; measure with Keep(layers=({layer},))"
        )
    index = trace.layers.index(layer)
    return trace.states[index], index
