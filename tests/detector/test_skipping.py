"""Pieces that the answer hardly attends to, and the passes that they save (Keep.least_share)."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from detector import ProfileError, Record
from detector.aggregate import measure
from detector.probe import Keep
from tests.detector.families import RECORD, make_scorer

MODES = pytest.mark.parametrize("masked", [False, True])


def sentence_shares(reading, trace):
    """(sentences, K) of the attention on all pieces, how much each gets; token by token."""
    found = []
    for start, end in reading.sentences:
        sums = np.zeros(len(trace.pieces))
        for token, (a, b) in enumerate(reading.offsets):
            if a < end and b > start:
                sums += trace.attention_pieces[:, token]
        found.append(sums / sums.sum())
    return np.array(found)


def thresholds(reading, trace):
    """One that skips a piece and one that skips two, in the middle between what pieces get at most."""
    most = np.sort(sentence_shares(reading, trace).max(axis=0))
    return [(most[i] + most[i + 1]) / 2 for i in (0, 1)]


@MODES
@pytest.mark.parametrize("n_skipped", [1, 2])
def test_skipped_are_the_pieces_with_a_smaller_share_in_every_sentence(tiny_scorer_dir, masked, n_skipped):
    scorer = make_scorer(tiny_scorer_dir)
    keep = Keep(masked=masked, piece_attention=True)
    reading, (every,) = scorer.trace(RECORD, keep)
    least = thresholds(reading, every)[n_skipped - 1]
    _, (some,) = scorer.trace(RECORD, dataclasses.replace(keep, least_share=least))
    shares = sentence_shares(reading, every)
    assert (
        some.skipped == tuple(np.flatnonzero((shares < least).all(axis=0))) and len(some.skipped) == n_skipped
    )
    for piece in range(3):
        if piece in some.skipped:
            np.testing.assert_array_equal(some.logprob_without[piece], some.logprob)
            assert not some.jsd_without[piece].any()
        else:
            np.testing.assert_allclose(some.logprob_without[piece], every.logprob_without[piece], atol=1e-5)
            np.testing.assert_allclose(some.jsd_without[piece], every.jsd_without[piece], atol=1e-5)
    np.testing.assert_array_equal(some.logprob, every.logprob)
    np.testing.assert_array_equal(some.jsd_no_context, every.jsd_no_context)


def test_masked_a_skipped_piece_saves_one_reading_of_question_and_answer(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir)
    keep = Keep(masked=True, piece_attention=True)
    reading, (every,) = scorer.trace(RECORD, keep)
    least = thresholds(reading, every)[1]
    _, (some,) = scorer.trace(RECORD, dataclasses.replace(keep, least_share=least))
    (window,) = reading.windows
    branch = len(window.full) - window.layout.passages[1] + len(reading.answer_ids)
    assert every.n_computed_tokens - some.n_computed_tokens == 2 * branch


@MODES
def test_the_effect_of_a_skipped_piece_is_unknown_to_sentences(tiny_scorer_dir, masked):
    scorer = make_scorer(tiny_scorer_dir)
    keep = Keep(masked=masked, piece_attention=True)
    reading, (every,) = scorer.trace(RECORD, keep)
    least = thresholds(reading, every)[0]
    _, traces = scorer.trace(RECORD, dataclasses.replace(keep, least_share=least))
    (skipped,) = traces[0].skipped
    found = measure(reading, RECORD.answer, traces, 3)
    for features in (found.features, *(sentence.features for sentence in found.sentences)):
        assert features.drops[skipped] is None and features.jsds[skipped] is None
        assert features.max_drop == max(drop for drop in features.drops if drop is not None)


@MODES
def test_a_sole_piece_is_never_skipped(tiny_scorer_dir, masked):
    scorer = make_scorer(tiny_scorer_dir)
    record = Record("q", ["Ada built the bridge."], "Ada did.")
    _, (trace,) = scorer.trace(record, Keep(masked=masked, least_share=0.99))
    assert trace.skipped == () and np.abs(trace.logprob_without - trace.logprob).max() > 0


def test_each_segment_of_a_long_answer_decides_by_itself(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir, window_tokens=260)
    answer = " ".join(f"Sentence {i} says so." for i in range(9))
    passages = [f"Passage {i} is about many things." for i in range(3)]
    record = Record("q", passages, answer)
    reading, every = scorer.trace(record, Keep(masked=True))
    _, some = scorer.trace(record, Keep(masked=True, least_share=0.34))
    assert len(reading.segments) > 1
    saved = 0
    for whole, part in zip(every, some, strict=True):
        same = np.isclose(part.logprob_without, whole.logprob_without, atol=1e-5)
        without_effect = part.logprob_without == part.logprob
        assert (same | without_effect).all()
        saved += whole.n_computed_tokens - part.n_computed_tokens
    assert saved > 0


def test_without_leave_one_out_there_is_nothing_to_skip(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir)
    _, (trace,) = scorer.trace(RECORD, Keep(leave_one_out=False, least_share=0.5))
    assert trace.skipped == () and trace.logprob_without is None


def test_a_head_that_reads_leave_one_out_refuses_a_run_that_skips(tiny_scorer_dir, monkeypatch):
    scorer = make_scorer(tiny_scorer_dir)
    monkeypatch.setattr(scorer, "_judge", SimpleNamespace(keep=Keep()))
    with pytest.raises(ProfileError, match="every leave-one-out pass"):
        scorer.measure(RECORD, least_share=0.2)
