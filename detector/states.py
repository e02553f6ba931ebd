"""Comparative middle-layer states: where a model knows what it has read.

The last layer of a small model is busy with the next token. About two thirds of the way up, the state of an
answer token says whether the passages carry what it claims, most clearly beside its change when they go:
per layer in use [h with passages; h with passages - h without]. Read at the token's own row, which knows
the token. Known from probes (SAPLMA reads h, CORTEX the change at the last layer); which layers, and both
together, is ours.
"""

from collections.abc import Sequence

import numpy as np

from detector.errors import DetectorError
from detector.trace import F32, Trace

DEPTHS = (0.53, 0.60, 0.67)
"""Where to read, as shares of the number of blocks: 16, 18 and 20 of 30. Chosen by the sentence AUROC of
single layers on 280 RAGTruth QA sources."""


def middle_layers(n_layers: int) -> tuple[int, ...]:
    """The layers at DEPTHS of a model with `n_layers` blocks, without repeats."""
    return tuple(sorted({max(1, round(depth * n_layers)) for depth in DEPTHS}))


def features(trace: Trace, layers: Sequence[int]) -> F32:
    """(A, 2 * D * len(layers)) [h; change] of each layer in order.

    Raises DetectorError where one was not kept.
    """
    if trace.states is None or not set(layers) <= set(trace.layers):
        raise DetectorError(
            f"states of layers {tuple(layers)} are read, but this trace holds {trace.layers}: "
            "measure with Keep(layers=...)"
        )
    parts = []
    for layer in layers:
        full, none = trace.states[trace.layers.index(layer), :, 1:]
        parts += [full, full - none]
    return np.concatenate(parts, axis=1, dtype=np.float32)
