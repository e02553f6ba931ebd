"""CSR at its edges, spans of tokens, IoU over characters."""

import math

import numpy as np
import pytest

from detector import refind
from detector.record import Record
from tests.detector.test_methods import ANSWERS, PASSAGES, hand_made


def read(full, none):
    """A trace with these two log-probabilities per token."""
    values = lambda v: np.asarray(v, dtype=np.float32)  # noqa: E731
    return hand_made(token_ids=np.arange(len(full)), logprob=values(full), logprob_no_context=values(none))


def ratio(full, none, **kw):
    (found,) = refind.csr(read([full], [none]), **kw)
    return found


@pytest.mark.parametrize("compat", [False, True])
def test_the_ratio_is_that_of_the_log_probabilities(compat):
    rng = np.random.default_rng(0)
    full, none = (-rng.uniform(0.01, 20, 50).astype(np.float32) for _ in range(2))
    wanted = [float(f) / float(n) for f, n in zip(full, none, strict=True)]
    np.testing.assert_allclose(refind.csr(read(full, none), compat=compat), wanted, rtol=1e-5)


def test_a_token_that_the_passages_make_certain_scores_lower_than_one_they_do_not_help():
    grounded, indifferent, contradicted = refind.score(read([-0.01, -2, -6], [-5, -2, -2]))
    assert grounded < min(refind.DELTAS) < indifferent == 1.0 < contradicted


def test_a_token_certain_either_way_is_grounded_and_rounding_noise_has_no_ratio():
    assert ratio(0, 0) == ratio(-1e-7, 0) == ratio(-6e-8, -1e-9) == 0.0


def test_a_token_that_only_the_passages_make_doubtful_is_capped_and_not_infinite():
    assert ratio(-1, 0) == refind.CAP
    assert ratio(-1, -1e-9) == refind.CAP  # the denominator is never closer to 0 than 1e-8
    assert ratio(-1, -1e-3) == pytest.approx(1000)


def test_impossible_tokens_have_finite_ratios():
    assert ratio(-math.inf, -1) == refind.CAP
    assert ratio(-1, -math.inf) == 0.0
    assert ratio(-math.inf, -math.inf) == 1.0


def test_compat_has_the_published_epsilon_with_its_sign_and_the_published_zero_rules():
    assert ratio(-1, -1e-9, compat=True) == -refind.CAP  # 1 / 9e-9, of the wrong sign
    assert ratio(-1, 0, compat=True) == -refind.CAP
    assert ratio(-1e-6, -3e-8, compat=True) == pytest.approx(50, rel=1e-4)
    assert ratio(0, 0, compat=True) == 0.0
    assert ratio(-200, -1, compat=True) == refind.CAP  # exp(-200) is 0 in float32
    assert ratio(-1, -200, compat=True) == 0.0
    assert ratio(-200, -200, compat=True) == 0.0  # skipped, so never flagged
    exactly_zero = hand_made(logprob=np.array([-1.0, 0.0]), logprob_no_context=np.full(2, -refind.EPSILON))
    np.testing.assert_array_equal(refind.csr(exactly_zero, compat=True), [-refind.CAP, 0.0])  # not -inf, NaN


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("compat", [False, True])
def test_real_readings_give_finite_ratios_and_spans_inside_the_answer(tiny, answer, compat):
    _, (found,) = tiny.trace(Record(question="Who?", passages=PASSAGES, answer=answer))
    got = refind.csr(found, compat=compat)
    assert got.shape == found.token_ids.shape and np.isfinite(got).all()
    assert np.array_equal(got, refind.csr(found, compat=compat))
    assert refind.score(found).dtype == np.float32
    covered = set()
    for start, end in refind.flagged_spans(got, found.offsets, 0.9):
        assert 0 <= start < end <= len(answer) and not covered & set(range(start, end))
        covered |= set(range(start, end))
    flagged = found.offsets[got >= 0.9]
    assert covered >= {c for start, end in flagged.tolist() for c in range(start, end)}


def test_soft_is_the_sigmoid_and_has_no_overflow():
    np.testing.assert_allclose(
        refind.soft(np.array([0.0, 1.0, refind.CAP])), [0.5, 1 / (1 + math.exp(-1)), 1]
    )


def offsets(*pairs):
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def test_neighbouring_flagged_tokens_make_one_span_and_others_do_not():
    cut = offsets((0, 3), (3, 7), (7, 9), (9, 12), (12, 13))
    assert refind.flagged_spans(np.array([0.1, 0.3, 0.0, 0.2, 0.9]), cut, 0.2) == [(3, 7), (9, 13)]
    assert refind.flagged_spans(np.ones(5), cut, 0.2) == [(0, 13)]
    assert refind.flagged_spans(np.zeros(5), cut, 0.2) == []


def test_the_space_between_two_flagged_tokens_is_in_their_span():
    assert refind.flagged_spans(np.ones(2), offsets((0, 3), (4, 7)), 0.1) == [(0, 7)]


def test_byte_level_tokens_of_one_emoji_give_it_once():
    cut = offsets((0, 2), (2, 3), (2, 3), (2, 3), (3, 4))
    assert refind.flagged_spans(np.array([0, 1, 0, 1, 0]), cut, 0.4) == [(2, 3)]
    assert refind.flagged_spans(np.array([0, 0, 0, 1, 1]), cut, 0.4) == [(2, 4)]


def test_right_to_left_text_is_in_the_order_of_code_points():
    answer = "שלום עולם"
    assert refind.flagged_spans(np.array([0, 1]), offsets((0, 4), (4, 9)), 0.1) == [(4, len(answer))]


def test_iou_counts_characters_once_and_two_empty_sides_agree():
    assert refind.iou([], []) == 1.0
    assert refind.iou([(0, 3)], []) == refind.iou([], [(0, 3)]) == 0.0
    assert refind.iou([(0, 4), (2, 6)], [(4, 8)]) == pytest.approx(2 / 8)
    assert refind.iou([(0, 2), (2, 5)], [(0, 5)]) == 1.0


def test_without_passages_the_prompt_is_the_bare_question():
    text = refind.prompt_text("Who built it?")
    assert text.none == "Who built it?"
    assert "Who built it?" not in text.before
    assert text.before.endswith("### References\n") and text.after.endswith(refind.ANSWER_HEADER)
    assert text.after.index("### Question\nWho built it?") < text.after.index(refind.ANSWER_HEADER)


def test_a_blank_question_still_leaves_something_to_predict_the_first_token_from():
    assert refind.prompt_text("  ").none == "\n"
