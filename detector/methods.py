"""The one table of methods: what each reads off a Trace, and which measured features its scores come from."""

from collections.abc import Callable
from dataclasses import dataclass

from detector import baselines, gasp
from detector.trace import F32, Trace

LABEL_FREE = "gasp"
"""The best method that needs no labels: what decides where no bundle fits the scorer."""

LEAVE_ONE_OUT = frozenset({"logprob_without", "jsd_without"})
"""Trace fields that exist only when each piece was removed in turn."""


@dataclass(frozen=True, slots=True)
class Method:
    """A plain function of a Trace, and how its sentence score is built from measured features.

    `needs`: names of Trace fields that `score` reads. `score`: Trace -> (A,) token scores, higher = less
    grounded. `features`: the sentence-level features (jobs and `aggregate` name them alike) that are
    standardised and added; `direction` is +1 where a large feature means less grounded, else -1.

    A `trained` method is read by the head of a bundle instead, so it has no `score`: its one feature is the
    probability that the head gave, which is judged as it is.
    """

    needs: frozenset[str]
    score: Callable[[Trace], F32] | None
    features: tuple[str, ...]
    direction: int
    trained: bool = False

    @property
    def needs_leave_one_out(self) -> bool:
        """Whether the two-pass variant (`--loo off`) cannot serve this method."""
        return bool(self.needs & LEAVE_ONE_OUT)


METHODS: dict[str, Method] = {
    "gasp": Method(
        needs=frozenset({"logprob", "logprob_no_context", "jsd_no_context"}) | LEAVE_ONE_OUT,
        score=gasp.score,
        features=("gap", "jsd_none", "max_drop", "max_jsd"),
        direction=-1,
    ),
    "gap": Method(
        needs=frozenset({"logprob", "logprob_no_context"}),
        score=gasp.score_gap,
        features=("gap",),
        direction=-1,
    ),
    "jsd_none": Method(
        needs=frozenset({"jsd_no_context"}),
        score=gasp.score_jsd_none,
        features=("jsd_none",),
        direction=-1,
    ),
    "perplexity": Method(
        needs=frozenset({"logprob"}),
        score=baselines.score_perplexity,
        features=("surprisal",),
        direction=+1,
    ),
    "length": Method(
        needs=frozenset(),
        score=baselines.score_length,
        features=("n_tokens",),
        direction=+1,
    ),
    "ensemble": Method(
        needs=frozenset(),
        score=None,
        features=("ensemble",),
        direction=+1,
        trained=True,
    ),
}
