"""Labelled answers with made-up signals, for heads that learn from them."""

from dataclasses import replace

import numpy as np

from detector.heads import Labelled
from detector.trace import Piece, Trace

LAYERS = (2, 3)
WIDTH = 6

TINY_BLOCKS, TINY_HEADS, TINY_WIDTH = 2, 4, 32
"""The tiny scorer's sizes: a head that was fitted on `measured_answers` reads its traces."""

GROUPS = ("states", "attention", "likelihood")


def states_trace(random, n_tokens, direction=None, labels=None, *, layers=LAYERS, width=WIDTH):
    """A trace whose states of layers[0] with all passages move along `direction` at unsupported tokens."""
    states = random.normal(size=(len(layers), 2, n_tokens + 1, width)).astype(np.float32)
    if direction is not None:
        states[0, 0, 1:][labels] += direction
    alpha = np.tril(random.random((len(layers), n_tokens, n_tokens)), -1) / n_tokens
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
        layers=layers,
        states=states,
        carried=carried,
    )


def labelled_answers(seed, n=40, direction=None, rate=0.25):
    """`n` answers, two per source, of four ten-token sentences, some of them unsupported."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(n):
        bad = random.random(4) < rate
        trace = states_trace(random, 40, direction, np.repeat(bad, 10))
        found.append(_labelled(i, bad, trace))
    return found


def measured_answers(seed, n=24, planted=GROUPS, rate=0.3):
    """The same, with every field that any method reads, in the sizes of the tiny scorer.

    Only the groups in `planted` tell unsupported tokens from supported ones; the others are noise.
    """
    random = np.random.default_rng(seed)
    found = []
    for i in range(n):
        bad = random.random(4) < rate
        found.append(_labelled(i, bad, full_trace(random, np.repeat(bad, 10), planted)))
    return found


def full_trace(random, labels, planted=GROUPS):
    """A trace of len(labels) tokens with every optional field (see `measured_answers`)."""
    n = len(labels)
    layers = tuple(range(1, TINY_BLOCKS + 1))
    trace = states_trace(random, n, layers=layers, width=TINY_WIDTH)
    if "states" in planted:
        trace.states[:, 0, 1:][:, labels] += 0.7

    def draw(low, high, *shape):
        return random.uniform(low, high, (*shape, n)).astype(np.float32)

    reads, leans = draw(0, 2) + 1, draw(0, 2) + 1  # what the token's evidence adds, in nats
    if "likelihood" in planted:
        reads, leans = np.where(labels, 0.5, 1.5) * reads, np.where(labels, 0.5, 1.5) * leans
    logprob = -0.3 * draw(0, 2) - (0.4 * labels if "likelihood" in planted else 0.2)
    without = np.stack([logprob - 0.8 * leans, logprob + draw(-0.1, 0.1)])
    moved = 0.1 * np.stack([reads, leans, draw(0, 1), reads])
    shares = random.uniform(0.1, 0.4, (2, TINY_BLOCKS, TINY_HEADS, n + 1)).astype(np.float32)
    if "attention" in planted:
        shares[1, :, :, :-1][..., labels] += 0.25  # the row that predicts the token
        shares[1, :, :, 1:][..., labels] += 0.25  # and its own
    chances = np.where(labels, 0.9, 0.1) if "likelihood" in planted else np.full(n, 0.3)
    return replace(
        trace,
        pieces=(Piece(0, 0, 9), Piece(1, 0, 9)),
        logprob=logprob,
        entropy=draw(0, 3),
        logprob_no_context=logprob - reads,
        entropy_no_context=draw(0, 3),
        jsd_no_context=moved[0],
        logprob_without=np.minimum(without, 0.0),
        jsd_without=moved[1:3],
        top_logprob=np.stack([logprob, logprob - reads]) * draw(0.2, 0.6, 2),
        bottom_logprob=draw(-20, -15, 2),
        rank=random.integers(0, 40, (2, n)).astype(np.int32),
        attention_passages=shares[0],
        attention_answer=shares[1],
        mmd_foil=moved[3],
        words=(random.random((n, 7)) < chances[:, None]).astype(np.float32),
        n_context_tokens=50,
        n_prompt_tokens=70,
        n_header_tokens=3,
    )


def kept(trace, keep):
    """The trace without what `keep` did not ask for, the layers in its order."""
    missing = {
        name: None
        for names, wanted in (
            (("logprob_without", "jsd_without"), keep.leave_one_out),
            (("top_logprob", "bottom_logprob", "rank"), keep.extremes),
            (("attention_passages", "attention_answer"), keep.attention),
            (("words",), keep.words),
            (("mmd_foil",), keep.foil),
            (("states", "carried"), bool(keep.layers)),
            (("carried",), keep.carried),
        )
        if not wanted
        for name in names
    }
    rows = [trace.layers.index(layer) for layer in keep.layers]
    more = {"layers": keep.layers, "states": trace.states[rows], "carried": trace.carried[rows]}
    return replace(trace, **more | missing)


def _labelled(index, bad, trace):
    n = len(trace.token_ids)
    return Labelled(
        trace=trace,
        sentences=tuple(np.arange(n).reshape(len(bad), -1)),
        token_labels=np.repeat(bad, n // len(bad)),
        sentence_labels=bad,
        label=bool(bad.any()),
        source_id=f"source {index // 2}",
    )
