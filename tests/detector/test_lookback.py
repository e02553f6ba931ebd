import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from detector.errors import DetectorError
from detector.heads import Labelled
from detector.lookback import LookbackHead, fit, from_parts, ratios
from detector.probe import Keep
from detector.trace import Trace
from tests.detector.families import RECORD, make_scorer, read_eagerly

N_LAYERS, N_HEADS = 2, 3


def trace_of(passages, answer, n_context=10, n_prompt=20, n_header=3):
    """A trace with these shares of attention, (L, H, A + 1) each."""
    n_tokens = passages.shape[2] - 1
    zeros = np.zeros(n_tokens, dtype=np.float32)
    return Trace(
        token_ids=np.arange(n_tokens),
        offsets=np.array([(i, i + 1) for i in range(n_tokens)], dtype=np.int32),
        pieces=(),
        logprob=zeros,
        entropy=zeros,
        logprob_no_context=zeros,
        entropy_no_context=zeros,
        jsd_no_context=zeros,
        logprob_without=None,
        jsd_without=None,
        n_context_tokens=n_context,
        n_prompt_tokens=n_prompt,
        n_computed_tokens=0,
        n_header_tokens=n_header,
        attention_passages=passages.astype(np.float32),
        attention_answer=answer.astype(np.float32),
    )


def random_trace(n_tokens, seed=0):
    chooser = np.random.default_rng(seed)
    parts = chooser.dirichlet((2, 2, 2), size=(N_LAYERS, N_HEADS, n_tokens + 1))
    return trace_of(parts[..., 0], parts[..., 1])


@pytest.mark.parametrize("context", ["prompt", "passages"])
@pytest.mark.parametrize("row", ["predicting", "own"])
@pytest.mark.parametrize("per_key", [True, False])
def test_ratios_equal_sums_over_the_raw_attention_of_a_model(tiny_scorer_dir, per_key, row, context):
    scorer = make_scorer(tiny_scorer_dir, "llama with shared keys")
    reading, (trace,) = scorer.trace(RECORD, Keep(leave_one_out=False, attention=True))
    (window,) = reading.windows
    maps, _ = read_eagerly(scorer, window.full + reading.answer_ids)
    n_prompt, header = len(window.full), window.layout.header
    first, stop = window.layout.passages if context == "passages" else (0, header)
    found = ratios(trace, per_key=per_key, row=row, context=context)
    assert found.shape == (len(reading.answer_ids), 12) and found.dtype == np.float32
    for token in range(len(reading.answer_ids)):
        position = n_prompt + token - (row == "predicting")
        for layer in range(3):
            for head in range(4):
                weights = maps[layer, head, position]
                context_keys, own_keys = weights[first:stop], weights[header : position + 1]
                a, b = (
                    (context_keys.mean(), own_keys.mean())
                    if per_key
                    else (context_keys.sum(), own_keys.sum())
                )
                assert found[token, layer * 4 + head] == pytest.approx(a / (a + b), abs=2e-5)


def test_attention_on_neither_side_is_a_half_and_all_on_one_side_is_an_end():
    passages = np.array([0.0, 0.0, 1.0]).reshape(1, 1, 3)
    answer = np.array([0.0, 1.0, 0.0]).reshape(1, 1, 3)
    found = ratios(trace_of(passages, answer), row="own", context="passages")
    assert found[:, 0].tolist() == [0.0, 1.0]
    assert ratios(trace_of(passages, answer), context="passages")[0, 0] == 0.5


def test_a_prompt_without_a_header_has_no_attention_to_share():
    trace = trace_of(np.full((1, 1, 2), 0.4), np.zeros((1, 1, 2)), n_header=0)
    assert ratios(trace).tolist() == [[1.0]]


def test_rounding_of_shares_never_leaves_the_unit_interval():
    answer = np.full((1, 1, 2), 1.0 + 1e-7)
    assert ratios(trace_of(np.zeros((1, 1, 2)), answer)).min() >= 0.0


@pytest.mark.parametrize("field", ["attention_passages", "attention_answer"])
def test_a_trace_without_attention_is_refused(field):
    with pytest.raises(DetectorError, match="attention=True"):
        ratios(dataclasses.replace(random_trace(3), **{field: None}))


def labelled(seed, lengths=(12, 9, 11)):
    """Sentences of which some rest on nothing: there, one head looks at the answer so far."""
    chooser = np.random.default_rng(seed)
    n_tokens = sum(lengths)
    trace = random_trace(n_tokens, seed)
    edges = np.cumsum([0, *lengths])
    sentences = tuple(np.arange(a, b) for a, b in pairwise(edges))
    bad = chooser.random(len(lengths)) < 0.4
    tokens = np.repeat(bad, lengths)
    rows = np.flatnonzero(tokens)
    trace.attention_answer[1, 0, rows] = 0.9
    trace.attention_passages[1, 0, rows] = 0.05
    return Labelled(trace, sentences, tokens, bad, bool(bad.any()), source_id=str(seed))


EXAMPLES = [labelled(seed) for seed in range(30)]
HELD_OUT = [labelled(seed) for seed in range(100, 110)]


@pytest.fixture(scope="module")
def head():
    return fit(EXAMPLES)


def auroc(labels, scores):
    pairs = scores[labels][:, None] - scores[~labels][None, :]
    return ((pairs > 0) + 0.5 * (pairs == 0)).mean()


@pytest.mark.parametrize("by_window", [False, True])
def test_what_looks_at_its_own_text_scores_higher(head, by_window):
    head = dataclasses.replace(head, by_window=by_window)
    sentences = np.concatenate([head.sentences(e.trace, e.sentences) for e in HELD_OUT])
    tokens = np.concatenate([head.tokens(e.trace, e.sentences) for e in HELD_OUT])
    assert auroc(np.concatenate([e.sentence_labels for e in HELD_OUT]), sentences) > 0.95
    assert auroc(np.concatenate([e.token_labels for e in HELD_OUT]), tokens) > 0.8


def test_scores_are_probabilities_one_per_token_and_sentence(head):
    for example in HELD_OUT:
        tokens = head.tokens(example.trace, example.sentences)
        sentences = head.sentences(example.trace, example.sentences)
        assert tokens.shape == example.token_labels.shape and tokens.dtype == np.float64
        assert sentences.shape == example.sentence_labels.shape and sentences.dtype == np.float64
        assert 0 <= min(tokens.min(), sentences.min()) and max(tokens.max(), sentences.max()) <= 1


def test_a_sentence_is_its_mean_ratios_through_the_sentence_model(head):
    example = HELD_OUT[0]
    features = ratios(example.trace)
    expected = [
        head.sentence_model.probability(features[members].mean(axis=0, keepdims=True))[0]
        for members in example.sentences
    ]
    np.testing.assert_allclose(head.sentences(example.trace, example.sentences), expected, atol=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 8, 9, 40])
def test_a_token_is_the_mean_of_the_windows_that_hold_it(head, n_tokens):
    trace = random_trace(n_tokens, seed=5)
    features = ratios(trace).astype(np.float64)
    width = min(8, n_tokens)
    windows = [range(start, start + width) for start in range(n_tokens - width + 1)]
    scores = [head.window_model.probability(features[list(w)].mean(axis=0)[None])[0] for w in windows]
    expected = [
        np.mean([score for window, score in zip(windows, scores, strict=True) if token in window])
        for token in range(n_tokens)
    ]
    np.testing.assert_allclose(head.tokens(trace, ()), expected, atol=1e-6)


def test_a_sentence_by_window_is_its_worst_token(head):
    head = dataclasses.replace(head, by_window=True)
    example = HELD_OUT[1]
    tokens = head.tokens(example.trace, example.sentences)
    expected = [tokens[members].max() for members in example.sentences]
    assert head.sentences(example.trace, example.sentences).tolist() == expected


def test_a_window_is_trained_as_unsupported_if_any_of_its_tokens_is():
    """One bad token at the very end: every window that reaches it must count."""
    trace = random_trace(12)
    marked = np.zeros(12, dtype=bool)
    marked[11] = True
    trace.attention_answer[0, 0, 4:12] = 0.95  # the last window's tokens and no others
    trace.attention_passages[0, 0, 4:12] = 0.02
    example = Labelled(trace, (np.arange(4), np.arange(4, 12)), marked, np.array([False, True]), True, "s")
    head = fit([example])
    tokens = head.tokens(trace, ())
    assert tokens[11] > 0.5 > tokens[0]


def test_fitting_twice_gives_the_same_head_whatever_the_seed(head):
    again = fit(EXAMPLES, seed=7).to_parts()
    for name, value in head.to_parts().items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_a_stored_head_scores_as_before():
    head = fit(EXAMPLES, by_window=True, per_key=False, row="own", context="passages")
    parts = head.to_parts()
    assert all(isinstance(value, np.ndarray | str | int | float) for value in parts.values())
    again = from_parts(parts)
    assert isinstance(again, LookbackHead)
    assert (again.by_window, again.per_key, again.row, again.context) == (True, False, "own", "passages")
    for example in HELD_OUT[:2]:
        for score in ("tokens", "sentences"):
            ours, theirs = (getattr(h, score)(example.trace, example.sentences) for h in (again, head))
            np.testing.assert_array_equal(ours, theirs)


def test_labels_of_one_kind_only_cannot_be_learned_from():
    good = [e for e in EXAMPLES if not e.label]
    with pytest.raises(DetectorError, match="sentences are unsupported; fitting needs some of each"):
        fit(good)
    with pytest.raises(DetectorError, match="0 of 0 sentences"):
        fit([])


def test_a_head_of_another_scorer_is_refused(head):
    other = trace_of(np.full((4, 4, 3), 0.3), np.full((4, 4, 3), 0.3))
    with pytest.raises(DetectorError, match="trained on 6 heads, this trace has 16"):
        head.tokens(other, ())


def test_a_real_answer_is_scored_from_its_trace(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir)
    reading, (trace,) = scorer.trace(RECORD, Keep(leave_one_out=False, attention=True))
    n_tokens = len(reading.answer_ids)
    sentences = (np.arange(20), np.arange(20, n_tokens))
    marked = np.arange(n_tokens) >= 20
    head = fit([Labelled(trace, sentences, marked, np.array([False, True]), True, "s")])
    low, high = head.sentences(trace, sentences)
    assert low < 0.5 < high
