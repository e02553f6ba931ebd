"""The one table of methods: what each reads off a Trace, and which measured features its scores come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from detector import baselines, blend, gasp
from detector.trace import F32, Trace

LEAVE_ONE_OUT = frozenset({"logprob_without", "jsd_without"})
"""Trace fields that exist only when each piece was removed in turn."""

ATTENTION = frozenset({"attention_passages", "attention_answer"})
"""Trace fields that exist only where the scorer's attention can be read (`scorers.READABLE`)."""


@dataclass(frozen=True, slots=True)
class Method:
    """A plain function of a Trace, and how its sentence score is built from measured features.

    `needs`: names of Trace fields that `score` reads. `score`: Trace -> (A,) token scores, higher = less
    grounded. `features`: the sentence-level features (jobs and `aggregate` name them alike) that are
    standardised and added, each with +1 where a large one means less grounded, else -1.

    A `trained` method is read by the head of a bundle instead, so it has no `score`: its one feature is the
    probability that the head gave, which is judged as it is.
    """

    needs: frozenset[str]
    score: Callable[[Trace], F32] | None
    features: Mapping[str, int]
    trained: bool = False

    @property
    def needs_leave_one_out(self) -> bool:
        """Whether the two-pass variant (`--loo off`) cannot serve this method."""
        return bool(self.needs & LEAVE_ONE_OUT)

    @property
    def needs_attention(self) -> bool:
        """Whether a scorer whose attention cannot be read cannot serve this method."""
        return bool(self.needs & ATTENTION)


METHODS: dict[str, Method] = {
    "ensemble": Method(
        needs=frozenset(),
        score=None,
        features={"ensemble": +1},
        trained=True,
    ),
    "blend": Method(
        needs=frozenset({"jsd_no_context", "words"}) | ATTENTION,
        score=blend.score,
        features=blend.FEATURES,
    ),
    "gasp": Method(
        needs=frozenset({"logprob", "logprob_no_context", "jsd_no_context"}) | LEAVE_ONE_OUT,
        score=gasp.score,
        features={"gap": -1, "jsd_none": -1, "max_drop": -1, "max_jsd": -1},
    ),
    "jsd_none": Method(
        needs=frozenset({"jsd_no_context"}),
        score=gasp.score_jsd_none,
        features={"jsd_none": -1},
    ),
    "gap": Method(
        needs=frozenset({"logprob", "logprob_no_context"}),
        score=gasp.score_gap,
        features={"gap": -1},
    ),
    "perplexity": Method(
        needs=frozenset({"logprob"}),
        score=baselines.score_perplexity,
        features={"surprisal": +1},
    ),
    "length": Method(
        needs=frozenset(),
        score=baselines.score_length,
        features={"n_tokens": +1},
    ),
}
"""By name, best first (sentence AUROC on RAGTruth QA, see the README): of those that a run has, the first
decides where nobody names another.
"""


def usable(*, trained: bool, leave_one_out: bool, attention: bool) -> tuple[str, ...]:
    """The methods that passes of this kind can serve, best first, at least one.

    `trained`: a bundle's head reads the passes too. `attention`: the scorer's attention can be read.
    """
    return tuple(
        name
        for name, method in METHODS.items()
        if (trained or not method.trained)
        and (leave_one_out or not method.needs_leave_one_out)
        and (attention or not method.needs_attention)
    )
