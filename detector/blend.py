"""Four readings that need no labels, each standardised and added: what an audit can do best on its own.

    jsd_none          the answer's distributions do not move when all passages go
    absent pairs      the words do not stand in the passages two in a row
    attention         heads look at the answer so far rather than at the passages
    length            long sentences hold more that can be wrong (logarithm of tokens)

Equal weights: nothing is fitted. Which four: chosen by the sentence AUROC on 280 RAGTruth QA sources, where
each of them alone is a weak method (.60 to .74) and they fail on different sentences.

An audit stores the means of the token readings below (`aggregate`) and adds them up later, by FEATURES
(`calibration.score`); `features` is the same sum's terms in one go, for `leadline evaluate`.
"""

from collections.abc import Sequence

import numpy as np

from detector.errors import DetectorError
from detector.heads import F64, Tokens
from detector.trace import F32, Trace
from detector.words import COLUMNS

FEATURES = {"jsd_none": -1, "absent_pairs": +1, "attention_share": -1, "log_tokens": +1}
"""Sentence feature -> +1 where a large one means less grounded, else -1."""

_ABSENT_PAIR = COLUMNS.index("absent_2")


def absent_pairs(trace: Trace) -> F32:
    """(A,) 1 where no run of two words around the token stands in a passage, else 0."""
    if trace.words is None:
        raise DetectorError("blend reads words, which this trace does not hold: Keep(words=True)")
    return trace.words[:, _ABSENT_PAIR]


def attention_share(trace: Trace) -> F32:
    """(A,) attention on the passages over that on passages and answer so far, mean of all heads, in [0, 1].

    The row that predicts the token (Lookback Lens in the article's plain-mass form, averaged over heads).
    """
    passages, answer = trace.attention_passages, trace.attention_answer
    if passages is None or answer is None:
        raise DetectorError("blend reads attention, which this trace does not hold: Keep(attention=True)")
    both = passages + answer
    share = np.divide(passages, both, out=np.full_like(both, 0.5), where=both > 0)
    return np.asarray(share[:, :, :-1].mean(axis=(0, 1)), dtype=np.float32)


def score(trace: Trace) -> F32:
    """(A,) the first three added, each in [0, 1]. Higher = less grounded."""
    moved = trace.jsd_no_context / np.float32(np.log(2))
    return np.asarray(absent_pairs(trace) - moved - attention_share(trace), dtype=np.float32)


def features(trace: Trace, sentences: Sequence[Tokens]) -> F64:
    """(n, 4) FEATURES of each sentence, means over its tokens; each signed so that higher = less grounded."""
    columns = np.stack([trace.jsd_no_context, absent_pairs(trace), attention_share(trace)], axis=1)
    rows = [[*columns[tokens].mean(axis=0, dtype=np.float64), np.log(len(tokens))] for tokens in sentences]
    return np.array(rows, dtype=np.float64).reshape(-1, len(FEATURES)) * list(FEATURES.values())
