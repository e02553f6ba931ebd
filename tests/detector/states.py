"""Labelled answers with made-up hidden states, for heads that read them."""

import numpy as np

from detector.heads import Labelled
from detector.trace import Trace

LAYERS = (2, 3)
WIDTH = 6


def states_trace(random, n_tokens, direction=None, labels=None):
    """A trace whose states of LAYERS[0] with all passages move along `direction` at unsupported tokens."""
    states = random.normal(size=(len(LAYERS), 2, n_tokens + 1, WIDTH)).astype(np.float32)
    if direction is not None:
        states[0, 0, 1:][labels] += direction
    alpha = np.tril(random.random((len(LAYERS), n_tokens, n_tokens)), -1) / n_tokens
    carried = (alpha @ (states[:, 0, 1:] - states[:, 1, 1:])).astype(np.float32)
    zeros = np.zeros(n_tokens, dtype=np.float32)
    return Trace(
        token_ids=np.arange(n_tokens),
        offsets=np.stack([np.arange(n_tokens), np.arange(n_tokens) + 1], axis=1).astype(np.int32),
        pieces=(),
        logprob=zeros,
        entropy=zeros,
        logprob_no_context=zeros,
        entropy_no_context=zeros,
        jsd_no_context=zeros,
        logprob_without=None,
        jsd_without=None,
        n_context_tokens=1,
        n_prompt_tokens=2,
        n_computed_tokens=3,
        layers=LAYERS,
        states=states,
        carried=carried,
    )


def labelled_answers(seed, n=40, direction=None, rate=0.25):
    """`n` answers, two per source, of four ten-token sentences, some of them unsupported."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(n):
        bad = random.random(4) < rate
        labels = np.repeat(bad, 10)
        found.append(
            Labelled(
                trace=states_trace(random, 40, direction, labels),
                sentences=tuple(np.arange(40).reshape(4, 10)),
                token_labels=labels,
                sentence_labels=bad,
                label=bool(bad.any()),
                source_id=f"source {i // 2}",
            )
        )
    return found
