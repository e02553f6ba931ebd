"""Comparative middle-layer states: which layers, and what is read off them."""

import dataclasses

import numpy as np
import pytest
import torch

from detector.errors import DetectorError
from detector.probe import Keep
from detector.record import Record
from detector.states import features, middle_layers
from tests.detector.states import LAYERS, WIDTH, states_trace


@pytest.mark.parametrize(
    ("n_layers", "layers"),
    [(30, (16, 18, 20)), (1, (1,)), (2, (1,)), (3, (2,)), (12, (6, 7, 8)), (32, (17, 19, 21))],
)
def test_layers_are_read_about_two_thirds_of_the_way_up_without_repeats(n_layers, layers):
    assert middle_layers(n_layers) == layers


def test_every_scorer_has_layers_that_it_can_keep():
    for n_layers in range(1, 130):
        layers = middle_layers(n_layers)
        assert 1 <= layers[0] and layers[-1] <= n_layers
        assert list(layers) == sorted(set(layers))


@pytest.mark.parametrize("layers", [(2,), (3,), (2, 3), (3, 2)])
def test_features_are_state_and_change_of_each_layer_at_the_tokens_own_row(layers):
    trace = states_trace(np.random.default_rng(0), 5)
    found = features(trace, layers)
    assert found.shape == (5, 2 * WIDTH * len(layers)) and found.dtype == np.float32
    for i in range(5):
        row = []
        for layer in layers:
            full, none = trace.states[LAYERS.index(layer), :, i + 1]
            row += [*full, *(full - none)]
        np.testing.assert_array_equal(found[i], row)


def test_the_row_before_the_answer_belongs_to_no_token():
    trace = states_trace(np.random.default_rng(0), 4)
    states = trace.states.copy()
    states[:, :, 0] = np.nan
    blind = dataclasses.replace(trace, states=states)
    np.testing.assert_array_equal(features(blind, LAYERS), features(trace, LAYERS))


def test_a_scorers_features_are_those_of_plain_passes(tiny):
    record = Record("Who built it?", ["Ada built it.", "It is green."], "Ada 😀 built it.")
    reading, (trace,) = tiny.trace(record, Keep(leave_one_out=False, layers=(1,)))
    window, answer = reading.windows[0], reading.answer_ids
    rows = []
    for prompt in (window.full, window.none):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer]])
            out = tiny.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        rows.append(out.hidden_states[1][0, len(prompt) :].numpy())
    full, none = rows
    np.testing.assert_allclose(features(trace, (1,)), np.hstack([full, full - none]), atol=1e-4)


def test_a_layer_that_was_not_kept_is_named_in_one_line():
    trace = states_trace(np.random.default_rng(0), 3)
    for trace_of, layers in ((trace, (2, 9)), (dataclasses.replace(trace, states=None, layers=()), (2,))):
        with pytest.raises(DetectorError, match=r"measure with Keep\(layers=") as caught:
            features(trace_of, layers)
        assert str(layers) in str(caught.value) and "\n" not in str(caught.value)
