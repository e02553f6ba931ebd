"""The trivial baselines that every figure is shown beside."""

import numpy as np

from detector.trace import F32, Trace


def score_perplexity(trace: Trace) -> F32:
    """(A,) surprisal -log p(token | all passages) in nats, >= 0; its mean is the log of the perplexity."""
    return -trace.logprob


def score_length(trace: Trace) -> F32:
    """(A,) ones: summed over a span they are its length in tokens."""
    return np.ones(len(trace.token_ids), dtype=np.float32)
