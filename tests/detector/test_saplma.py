"""The single-pass probe reads the state with passages and nothing else."""

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from detector import cortex, saplma
from detector.errors import DetectorError
from detector.probe import Keep
from detector.record import Record
from tests.detector.states import LAYERS, WIDTH, labelled_answers, states_trace


def test_features_are_the_states_with_passages_at_the_tokens_own_rows():
    trace = states_trace(np.random.default_rng(0), 5)
    for place, layer in enumerate(LAYERS):
        found = saplma.features(trace, layer)
        assert found.shape == (5, WIDTH)
        for i in range(5):
            assert np.array_equal(found[i], trace.states[place, 0, i + 1])


def test_a_scorer_gives_one_row_per_token(tiny):
    record = Record(question="Who?", passages=["Ada built it."], answer="Ada 😀 built it.")
    _, (trace,) = tiny.trace(record, Keep(leave_one_out=False, layers=(2, 3)))
    assert saplma.features(trace, 3).shape == (len(trace.token_ids), 32)
    with pytest.raises(DetectorError, match=r"layer 1: the trace kept layers 2, 3"):
        saplma.features(trace, 1)


def test_the_probe_learns_a_planted_direction_without_the_second_pass():
    examples = labelled_answers(0, n=80, direction=1.5)
    head = saplma.fit(examples, layer=2)
    others = labelled_answers(1, direction=1.5)
    scores = np.concatenate([head.tokens(e.trace, e.sentences) for e in others])
    assert roc_auc_score(np.concatenate([e.token_labels for e in others]), scores) > 0.95

    states = others[0].trace.states.copy()
    states[:, 1] = np.nan
    one_pass = dataclasses.replace(others[0].trace, states=states, carried=None)
    assert np.array_equal(head.tokens(one_pass, others[0].sentences), scores[:40])


def test_cortex_and_the_probe_are_made_alike():
    """The same options, the same held-out sources, the same smoothing: only the features differ."""
    examples = labelled_answers(0, direction=1.5)
    for options in ({"smooth": True}, {"smooth": False, "pooling": "mean", "standardise": False}):
        probe = saplma.fit(examples, layer=2, **options)
        full = cortex.fit(examples, layer=2, **options)
        assert probe.to_parts().keys() == full.to_parts().keys()
        assert probe.to_parts()["weight_0"].shape == (WIDTH, 256)
        assert probe.pooling == full.pooling


def test_a_probe_survives_storage():
    examples = labelled_answers(0, direction=1.0)
    head = saplma.fit(examples, layer=2)
    again = saplma.from_parts(head.to_parts())
    example = examples[0]
    expected = head.sentences(example.trace, example.sentences)
    assert np.array_equal(again.sentences(example.trace, example.sentences), expected)
