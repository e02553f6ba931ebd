from dataclasses import replace

import numpy as np
import pytest

from detector.aggregate import assign_tokens, measure, sentence_tokens, span_features
from detector.prompts import PROFILES, Reading, Window
from detector.trace import Piece, Trace
from detector.windows import Layout, Segment


def trace_of(logprob, none, without, jsd_none, jsd_without):
    array = lambda values: np.array(values, dtype=np.float32)  # noqa: E731
    n = len(logprob)
    return Trace(
        token_ids=np.arange(n),
        offsets=np.array([(i, i + 1) for i in range(n)], dtype=np.int32),
        pieces=tuple(Piece(k, 0, 1) for k in range(len(without))),
        logprob=array(logprob),
        entropy=array([1.0] * n),
        logprob_no_context=array(none),
        entropy_no_context=array([2.0] * n),
        jsd_no_context=array(jsd_none),
        logprob_without=array(without),
        jsd_without=array(jsd_without),
        n_context_tokens=4,
        n_prompt_tokens=9,
        n_computed_tokens=20,
    )


def test_mean_over_tokens_comes_before_the_maximum_over_pieces():
    trace = trace_of(
        logprob=[-1, -1],
        none=[-3, -2],
        without=[[-5, -1], [-3, -4]],  # drops: piece 0 (4, 0), piece 1 (2, 3); token maxima would mean 3.5
        jsd_none=[0.2, 0.4],
        jsd_without=[[0.6, 0.0], [0.1, 0.3]],
    )
    features = span_features(trace, np.array([0, 1]), (0, 1), 2)
    assert features.drops == (2.0, 2.5) and features.max_drop == 2.5
    assert features.jsds == pytest.approx((0.3, 0.2)) and features.max_jsd == pytest.approx(0.3)
    assert features.gap == 1.5 and features.jsd_none == pytest.approx(0.3)
    assert features.surprisal == 1.0 and features.entropy == 1.0


def test_a_token_belongs_to_the_sentence_of_its_first_visible_character():
    answer = "Ab. Cd."
    offsets = np.array([(0, 2), (2, 3), (3, 6), (6, 7)], dtype=np.int32)  # " Cd" carries the space
    assert assign_tokens(answer, offsets, [(0, 3), (4, 7)]).tolist() == [0, 0, 1, 1]
    assert assign_tokens(answer, offsets, [(0, 4), (4, 7)], raw=True).tolist() == [0, 0, 0, 1]


def test_white_space_and_text_between_sentences_belong_to_none():
    offsets = np.array([(0, 1), (1, 2), (2, 3)], dtype=np.int32)
    assert assign_tokens("a b", offsets, [(0, 1)]).tolist() == [0, -1, -1]


def test_tokens_that_share_an_emoji_share_its_sentence():
    offsets = np.array([(0, 1), (1, 2), (1, 2), (1, 2)], dtype=np.int32)
    assert assign_tokens("a😀", offsets, [(0, 2)]).tolist() == [0, 0, 0, 0]


def reading_of(n_windows, sentences, offsets):
    windows = tuple(Window((), (), ((),), (k,), Layout((0, 0), 0), ((0, 0),)) for k in range(n_windows))
    pieces = tuple(Piece(k, 0, 1) for k in range(n_windows))
    return Reading(
        PROFILES["plain"],
        tuple(range(len(offsets))),
        tuple(offsets),
        tuple(sentences),
        pieces,
        windows,
        (Segment(0, 0, len(offsets)),),
        n_context_tokens=8,
    )


def test_a_sentence_takes_its_best_window_and_evidence_from_there():
    reading = reading_of(2, [(0, 1), (1, 2)], [(0, 1), (1, 2)])
    first = trace_of([-1, -3], [-4, -3], [[-3, -3]], [0.3, 0], [[0.2, 0]])
    second = trace_of([-4, -1], [-4, -3], [[-4, -2]], [0, 0.4], [[0, 0.1]])
    found = measure(reading, "ab", [first, second], n_passages=2)
    assert [s.evidence.passage_index for s in found.sentences] == [0, 1]
    assert [s.features.gap for s in found.sentences] == [3.0, 2.0]
    assert found.sentences[0].features.drops == (2.0, None)
    assert found.n_windows == 2 and found.n_computed_tokens == 40


def test_a_sentence_without_a_token_of_its_own_is_not_lost():
    reading = reading_of(1, [(0, 1), (1, 2)], [(0, 2)])  # one token covers both sentences
    trace = trace_of([-1], [-2], [[-2]], [0.1], [[0.1]])
    assert [s.n_tokens for s in measure(reading, "ab", [trace], 1).sentences] == [1, 1]
    assert {i: tokens.tolist() for i, tokens in sentence_tokens(reading, "ab").items()} == {0: [0], 1: [0]}


def test_profiles_that_count_raw_offsets_leave_short_sentences_and_those_without_a_token_out():
    answer, sentences = "abcd ef gh", [(0, 4), (5, 7), (7, 10)]
    offsets = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 8), (8, 9)]  # the last sentence begins inside a token
    reading = reading_of(1, sentences, offsets)
    by_raw = replace(reading, profile=replace(PROFILES["gasp-v2"], min_sentence_tokens=1))
    for changed, members in (
        (reading, {0: [0, 1, 2, 3], 1: [4], 2: [5]}),
        (by_raw, {0: [0, 1, 2, 3], 1: [4], 2: [5]}),
        (replace(by_raw, sentences=((0, 4), (6, 7))), {0: [0, 1, 2, 3]}),
        (replace(reading, sentences=((0, 4), (6, 7))), {0: [0, 1, 2, 3], 1: [4]}),
        (replace(reading, profile=PROFILES["gasp-v2"]), {0: [0, 1, 2, 3]}),
    ):
        found = sentence_tokens(changed, answer)
        assert {i: tokens.tolist() for i, tokens in found.items()} == members


def kept_more(trace, absent, shares):
    """The same with words and the attention of one head in one layer; `shares`: per row passages, answer."""
    words = np.zeros((len(absent), 7), dtype=np.float32)
    words[:, 1] = absent
    rows = np.array(shares, dtype=np.float32).T[:, None, None]
    return replace(trace, words=words, attention_passages=rows[0], attention_answer=rows[1])


def test_absent_pairs_and_attention_share_are_means_over_tokens_of_the_best_window():
    reading = reading_of(2, [(0, 2)], [(0, 1), (1, 2)])
    poor = trace_of([-1, -1], [-1, -1], [[-1, -1]], [0, 0], [[0, 0]])
    good = trace_of([-1, -1], [-3, -3], [[-3, -3]], [0.3, 0.3], [[0.2, 0.2]])
    found = measure(
        reading,
        "ab",
        [
            kept_more(poor, [1, 1], [(0.1, 0.3), (0.1, 0.3), (0.9, 0.1)]),
            kept_more(good, [0, 1], [(0.6, 0.2), (0.2, 0.2), (0.0, 1.0)]),  # the last row predicts nothing
        ],
        n_passages=2,
    )
    for features in (found.sentences[0].features, found.features):
        assert features.absent_pairs == 0.5
        assert features.attention_share == pytest.approx((0.75 + 0.5) / 2)
    assert found.sentences[0].log_tokens == pytest.approx(np.log(2))


def test_what_the_passes_did_not_keep_is_none():
    trace = trace_of([-1], [-2], [[-2]], [0.1], [[0.1]])
    for kept, missing in (
        (trace, (None, None)),
        (replace(kept_more(trace, [1], [(1, 0), (1, 0)]), words=None), (None, 1.0)),
        (replace(kept_more(trace, [1], [(1, 0), (1, 0)]), attention_passages=None), (1.0, None)),
    ):
        found = measure(reading_of(1, [(0, 1)], [(0, 1)]), "a", [kept], n_passages=1).features
        assert (found.absent_pairs, found.attention_share) == missing
