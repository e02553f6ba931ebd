"""The one table of trained heads: what each needs of the passes, and how it is made from labelled answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from detector import cortex, ensemble, gasp_head, lookback, saplma, stack, token_probability
from detector.heads import Head, Labelled
from detector.probe import Keep
from detector.states import middle_layers

Fit = Callable[[Sequence[Labelled], int, int], Head]
"""Labelled answers, number of blocks of the scorer, seed."""


@dataclass(frozen=True, slots=True)
class Trained:
    """`keep(n_layers)`: what the passes must keep. `read`: the inverse of the head's `to_parts`."""

    keep: Callable[[int], Keep]
    fit: Fit
    read: Callable[[Mapping[str, Any]], Head]


def _gasp(features: str, form: str = "trees") -> Trained:
    names = gasp_head.FEATURE_SETS[features]
    return Trained(
        keep=lambda _: Keep(leave_one_out=gasp_head.needs_leave_one_out(names)),
        fit=lambda examples, _, seed: gasp_head.fit(examples, seed=seed, names=names, form=form),  # type: ignore[arg-type]
        read=gasp_head.from_parts,
    )


def _states(
    fit: Callable[..., Head], read: Callable[[Mapping[str, Any]], Head], *, middle: bool, smooth: bool
) -> Trained:
    """CORTEX or the single-pass probe, at the last layer (before the final norm) or the top middle one."""

    def layer(n_layers: int) -> int:
        return middle_layers(n_layers)[-1] if middle else n_layers

    return Trained(
        keep=lambda n: Keep(leave_one_out=False, layers=(layer(n),), carried=True),
        fit=lambda examples, n, seed: fit(examples, layer=layer(n), seed=seed, smooth=smooth),
        read=read,
    )


_cortex = partial(_states, cortex.fit, cortex.from_parts)
_saplma = partial(_states, saplma.fit, saplma.from_parts)
_EXTREMES = Keep(leave_one_out=False, extremes=True)
_ATTENTION = Keep(leave_one_out=False, attention=True)

TRAINED: dict[str, Trained] = {
    "token_probability": Trained(
        lambda _: _EXTREMES,
        lambda examples, _, seed: token_probability.fit(examples, seed=seed),
        token_probability.from_parts,
    ),
    "lookback": Trained(
        lambda _: _ATTENTION,
        lambda examples, _, seed: lookback.fit(examples, seed=seed),
        lookback.from_parts,
    ),
    "stack": Trained(
        lambda _: Keep(leave_one_out=False, extremes=True, attention=True),
        lambda examples, _, seed: stack.fit(examples, seed=seed),
        stack.from_parts,
    ),
    "gasp_two_pass": _gasp("two-pass"),
    "gasp_trees": _gasp("gasp"),
    "gasp_base": _gasp("base"),
    "gasp_signed": _gasp("signed"),
    "gasp_logistic": _gasp("base", "logistic"),
    "saplma": _saplma(middle=False, smooth=False),
    "saplma_smoothed": _saplma(middle=False, smooth=True),
    "saplma_middle": _saplma(middle=True, smooth=True),
    "cortex": _cortex(middle=False, smooth=True),
    "cortex_raw": _cortex(middle=False, smooth=False),
    "cortex_middle": _cortex(middle=True, smooth=True),
    "ensemble": Trained(
        lambda n: Keep(
            leave_one_out=False, words=True, extremes=True, attention=True, layers=middle_layers(n)
        ),
        lambda examples, n, seed: ensemble.fit(examples, layers=middle_layers(n), seed=seed),
        ensemble.from_parts,
    ),
}
"""By name. The `gasp_*` ones but `gasp_two_pass` read leave-one-out passes."""
