"""SAPLMA: the single-pass probe, a classifier on the hidden state with the passages and nothing else.

The yardstick for everything that compares two readings: whatever CORTEX adds must show over this one, with
the same network and the same smoothing. Source: Azaria and Mitchell, 2023, as the token-level baseline of
CORTEX (arXiv 2606.31033, section 4.1 and appendices C, D); the original classifies whole statements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from detector.cortex import kept
from detector.heads import Labelled
from detector.token_mlp import TokenHead
from detector.trace import F32, Trace


def features(trace: Trace, layer: int) -> F32:
    """(A, D) state of each answer token at its own row, with all passages. Raises DetectorError."""
    found, _ = kept(trace, layer)
    full: F32 = found[0, 1:]
    return full


def fit(
    examples: Sequence[Labelled],
    *,
    layer: int,
    seed: int = 0,
    smooth: bool = True,
    pooling: str = "max",
    standardise: bool = True,
) -> TokenHead:
    """A probe of `layer` from labelled answers, made like a CORTEX head (see `TokenHead.fit`)."""
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
