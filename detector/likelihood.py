"""Cheap signals of the two passes and of the words, per token and per sentence, for trees to combine."""

from collections.abc import Sequence

import numpy as np

from detector.errors import DetectorError
from detector.heads import Tokens
from detector.trace import F32, Trace

_NEIGHBOURS = 4


def token_features(trace: Trace, words: F32) -> F32:
    """(A, 40) per token: log-probabilities, gap, divergence, entropies, distance to the preferred token and
    rank in both conditions, `words.word_features`; then the same averaged over the nine tokens around it.

    Raises DetectorError where the passes did not keep extremes.
    """
    own = _columns(trace, words)
    n_tokens = len(own)
    before = np.concatenate([np.zeros((1, own.shape[1])), np.cumsum(own, axis=0, dtype=np.float64)])
    first = np.maximum(np.arange(n_tokens) - _NEIGHBOURS, 0)
    stop = np.minimum(np.arange(n_tokens) + _NEIGHBOURS + 1, n_tokens)
    around = (before[stop] - before[first]) / (stop - first)[:, None]
    return np.concatenate([own, around], axis=1, dtype=np.float32)


def sentence_features(trace: Trace, sentences: Sequence[Tokens], words: F32) -> F32:
    """(n, 106) per sentence: mean, least, largest, deviation and first of every token signal; then its
    length and place, the answer's length, its number of sentences and the length of its context.
    """
    own = _columns(trace, words)
    rows = []
    for tokens in sentences:
        part = own[tokens]
        place = [
            len(tokens),
            tokens[0] / len(own),
            tokens[0],
            len(own),
            len(sentences),
            trace.n_context_tokens,
        ]
        rows.append(
            np.concatenate([part.mean(0), part.min(0), part.max(0), part.std(0), part[0], np.array(place)])
        )
    return np.array(rows, dtype=np.float32).reshape(len(sentences), 5 * own.shape[1] + 6)


def _columns(trace: Trace, words: F32) -> F32:
    if trace.top_logprob is None or trace.rank is None:
        raise DetectorError("likelihood signals read extremes: measure with Keep(extremes=True)")
    rank = np.log1p(trace.rank.astype(np.float32))
    columns = [
        trace.logprob,
        trace.logprob_no_context,
        trace.logprob - trace.logprob_no_context,
        trace.jsd_no_context,
        trace.entropy,
        trace.entropy_no_context,
        trace.entropy - trace.entropy_no_context,
        trace.top_logprob[0] - trace.logprob,
        trace.top_logprob[1] - trace.logprob_no_context,
        rank[0],
        rank[1],
        trace.top_logprob[0],
        trace.top_logprob[1],
    ]
    return np.concatenate([np.stack(columns, axis=1), words], axis=1, dtype=np.float32)
