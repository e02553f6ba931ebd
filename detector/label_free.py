"""The one table of methods that learn nothing: token scores, and sentence features that are standardised and
added.

`methods.METHODS` names those that an audit stores; this table holds every form that the papers compare, for
`leadline evaluate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from detector import baselines, blend, gasp, gasp_head, lumina, refind, token_probability
from detector.errors import DetectorError
from detector.heads import F64, Tokens
from detector.probe import Keep
from detector.trace import F32, Trace


@dataclass(frozen=True, slots=True)
class LabelFree:
    """`tokens`: Trace -> (A,). `sentences`: (n, F) features; each higher = less grounded.

    A sentence's score is the sum of its features, each standardised with the mean and deviation of the
    training sentences (no labels are used).
    """

    keep: Keep
    tokens: Callable[[Trace], F32]
    sentences: Callable[[Trace, Sequence[Tokens]], F64]


_TWO_PASSES = Keep(leave_one_out=False)


def _mean_of(tokens: Callable[[Trace], F32]) -> Callable[[Trace, Sequence[Tokens]], F64]:
    def sentences(trace: Trace, members: Sequence[Tokens]) -> F64:
        scores = np.asarray(tokens(trace), dtype=np.float64)
        return np.array([[scores[rows].mean()] for rows in members]).reshape(len(members), 1)

    return sentences


def _plain(tokens: Callable[[Trace], F32], keep: Keep = _TWO_PASSES) -> LabelFree:
    return LabelFree(keep, tokens, _mean_of(tokens))


def _gasp(tokens: Callable[[Trace], F32], features: str, keep: Keep) -> LabelFree:
    names = gasp_head.FEATURE_SETS[features]
    return LabelFree(keep, tokens, lambda trace, members: -gasp_head.features(trace, members, names))


def _soft(trace: Trace) -> F32:
    return refind.soft(refind.csr(trace)).astype(np.float32)


def _absent(trace: Trace) -> F32:
    if trace.words is None:
        raise DetectorError("overlap reads words, which this trace does not hold: Keep(words=True)")
    return trace.words[:, 0]


def _lumina(trace: Trace) -> F32:
    if trace.mmd_foil is None:
        raise DetectorError("lumina reads a pass with foreign passages: trace with a foil")
    return lumina.score(trace.mmd_foil)


def _lengths(_: Trace, members: Sequence[Tokens]) -> F64:
    return np.array([[float(len(rows))] for rows in members]).reshape(len(members), 1)


LABEL_FREE: dict[str, LabelFree] = {
    "blend": LabelFree(Keep(leave_one_out=False, words=True, attention=True), blend.score, blend.features),
    "gap": _plain(gasp.score_gap),
    "jsd_none": _plain(gasp.score_jsd_none),
    "gasp_economical": _gasp(
        lambda trace: gasp.score_gap(trace) + gasp.score_jsd_none(trace), "two-pass", _TWO_PASSES
    ),
    "gasp": _gasp(gasp.score, "gasp", Keep()),
    "gasp_top2": _gasp(gasp.score_top2, "top2", Keep()),
    "gasp_mean": _gasp(gasp.score_mean, "mean", Keep()),
    "refind": LabelFree(_TWO_PASSES, refind.score, _mean_of(_soft)),
    "token_probability_min": LabelFree(
        Keep(leave_one_out=False, extremes=True),
        token_probability.score,
        lambda trace, members: -token_probability.features(trace, members)[:, :1],
    ),
    "lumina": _plain(_lumina, Keep(leave_one_out=False, foil=True)),
    "perplexity": _plain(baselines.score_perplexity),
    "length": LabelFree(_TWO_PASSES, baselines.score_length, _lengths),
    "overlap": _plain(_absent, Keep(leave_one_out=False, words=True)),
}
"""By name. `gasp_economical` is GASP without leave-one-out (`--loo off`)."""
