"""CORTEX's features against an obvious double loop; its head on planted signals and on a tiny scorer."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from detector import cortex
from detector.errors import DetectorError
from detector.probe import Keep
from detector.record import Record
from detector.smoothing import answer_score
from tests.detector.states import LAYERS, WIDTH, labelled_answers, states_trace

RECORD = Record(
    question="Who built the bridge?",
    passages=["The bridge was built in 1891 by Ada.", "Tolls ended in 1950."],
    answer="Ada built it in 1891. Tolls ended in 1950. 橋は緑色です。",
)


@pytest.fixture(scope="module")
def head():
    return cortex.fit(labelled_answers(0, n=80, direction=1.5), layer=2)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_features_of_a_real_trace_are_change_and_residual(tiny, layer):
    """From transformers' own states and attention, token by token (CORTEX, eqs. 4-6)."""
    reading, (trace,) = tiny.trace(RECORD, Keep(leave_one_out=False, layers=(layer,), carried=True))
    window, answer = reading.windows[0], list(reading.answer_ids)

    def run(prompt):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            out = tiny.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        return [state[0, len(prompt) :].double().numpy() for state in out.hidden_states]

    if layer == 2:  # transformers lists the last block's output after the norm only
        captured = []
        handle = tiny.model.base_model.layers[1].register_forward_hook(
            lambda _m, _a, out: captured.append(out[0] if isinstance(out, tuple) else out)
        )
        run(window.full), run(window.none)
        handle.remove()
        full, none = (state.reshape(-1, 32)[-len(answer) :].double().numpy() for state in captured)
    else:
        full, none = (run(prompt)[min(layer, 2)] for prompt in (window.full, window.none))
    attention = attention_of(tiny, [*window.full, *answer])[min(layer, 2) - 1].mean(axis=0)
    first = len(window.full)
    expected = np.zeros((len(answer), 64))
    for i in range(len(answer)):
        expected[i, :32] = full[i] - none[i]
        expected[i, 32:] = full[i] - none[i]
        for j in range(i):
            expected[i, 32:] -= attention[first + i, first + j] * (full[j] - none[j])
    found = cortex.features(trace, layer)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-4)


def attention_of(scorer, ids):
    """(L, H, n, n) attention as transformers itself computes it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(scorer.name, attn_implementation="eager")
    with torch.inference_mode():
        maps = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    return [found[0].double().numpy() for found in maps]


def test_each_layer_is_found_by_its_number():
    trace = states_trace(np.random.default_rng(0), 7)
    for place, layer in enumerate(LAYERS):
        found = cortex.features(trace, layer)
        assert found.shape == (7, 2 * WIDTH)
        change = trace.states[place, 0, 1:] - trace.states[place, 1, 1:]
        np.testing.assert_array_equal(found, np.hstack([change, change - trace.carried[place]]))


def test_what_was_not_measured_is_named():
    trace = states_trace(np.random.default_rng(0), 3)
    with pytest.raises(DetectorError, match=r"layer 9: the trace kept layers 2, 3"):
        cortex.features(trace, 9)
    with pytest.raises(DetectorError, match=r"carried=True"):
        cortex.features(dataclasses.replace(trace, carried=None), 2)
    with pytest.raises(DetectorError, match=r"the trace kept layers none"):
        cortex.features(dataclasses.replace(trace, states=None, layers=()), 2)


def test_the_head_learns_a_planted_direction(head):
    others = labelled_answers(1, direction=1.5)
    scores = [head.tokens(e.trace, e.sentences) for e in others]
    assert all(((s >= 0) & (s <= 1)).all() for s in scores)
    labels = [e.token_labels for e in others]
    assert roc_auc_score(np.concatenate(labels), np.concatenate(scores)) > 0.95
    sentences = np.concatenate([head.sentences(e.trace, e.sentences) for e in others])
    assert roc_auc_score(np.concatenate([e.sentence_labels for e in others]), sentences) > 0.95
    assert roc_auc_score([e.label for e in others], [answer_score(s) for s in scores]) > 0.9


def test_the_direction_of_the_scores_does_not_depend_on_that_of_the_states():
    head = cortex.fit(labelled_answers(0, n=80, direction=-1.5), layer=2)
    others = labelled_answers(1, direction=-1.5)
    scores = np.concatenate([head.tokens(e.trace, e.sentences) for e in others])
    assert roc_auc_score(np.concatenate([e.token_labels for e in others]), scores) > 0.95


def test_only_the_chosen_layer_is_read(head):
    example = labelled_answers(1, n=2, direction=1.5)[0]
    states, carried = example.trace.states.copy(), example.trace.carried.copy()
    states[1], carried[1] = np.nan, np.nan
    states[:, :, 0] = np.nan  # the row before the answer predicts its first token and belongs to none
    blind = dataclasses.replace(example.trace, states=states, carried=carried)
    expected = head.tokens(example.trace, example.sentences)
    assert np.array_equal(head.tokens(blind, example.sentences), expected)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_head_survives_storage(smooth):
    examples = labelled_answers(0, direction=1.0)
    head = cortex.fit(examples, layer=2, smooth=smooth, pooling="mean")
    parts = head.to_parts()
    assert all(isinstance(part, np.ndarray | str | float | int) for part in parts.values())
    again = cortex.from_parts(parts)
    for example in examples[:3]:
        for read in ("tokens", "sentences"):
            expected = getattr(head, read)(example.trace, example.sentences)
            assert np.array_equal(getattr(again, read)(example.trace, example.sentences), expected)


def test_the_same_answers_and_seed_give_the_same_head():
    examples = labelled_answers(0, direction=1.0)
    first, again = (cortex.fit(examples, layer=2, seed=1).to_parts() for _ in range(2))
    other = cortex.fit(examples, layer=2, seed=2).to_parts()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["weight_0"], other["weight_0"])
    assert first["weight_0"].shape == (2 * WIDTH, 256)
    assert first["weight_0"].dtype == np.float32


def test_a_head_reads_the_traces_of_a_scorer(tiny):
    record = dataclasses.replace(RECORD, answer="a")
    for layer in (1, 2, 3):
        keep = Keep(leave_one_out=False, layers=(layer,), carried=True)
        examples = []
        for i, example in enumerate(labelled_answers(0, n=8, rate=0.5)):
            _, (trace,) = tiny.trace(dataclasses.replace(RECORD, answer=f"{RECORD.answer} {i}"), keep)
            labels = np.resize(example.token_labels, len(trace.token_ids))
            examples.append(dataclasses.replace(example, trace=trace, token_labels=labels, source_id=str(i)))
        head = cortex.fit(examples, layer=layer)
        _, (trace,) = tiny.trace(record, keep)
        assert head.tokens(trace, (np.array([0]),)).shape == (1,)
        assert np.isfinite(head.sentences(trace, (np.array([0]),))).all()
