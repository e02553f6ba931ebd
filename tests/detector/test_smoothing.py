"""Label persistence against enumeration of all label sequences, and what the fitted smoother promises."""

from itertools import pairwise, product

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from detector.errors import DetectorError
from detector.smoothing import (
    CLIP,
    Platt,
    Smoother,
    answer_score,
    calibrate,
    choose_p_stay,
    persist,
    persist_all,
    window_maximum,
)


def by_enumeration(scores, p_stay):
    """Weigh each of the 2^A label sequences (CORTEX, eqs. 8-12)."""
    total, unsupported = 0.0, np.zeros(len(scores))
    for labels in product((0, 1), repeat=len(scores)):
        weight = 0.5
        for score, label in zip(scores, labels, strict=True):
            weight *= score if label else 1 - score
        for left, right in pairwise(labels):
            weight *= p_stay if left == right else 1 - p_stay
        total += weight
        unsupported += weight * np.array(labels)
    return unsupported / total


def answers(seed, n=60, rate=0.1, strength=1.0):
    """Scores and labels of answers whose unsupported tokens come in spans of about ten."""
    random = np.random.default_rng(seed)
    scores, labels = [], []
    for _ in range(n):
        truth = np.repeat(random.random(12) < rate, 10)
        logit = strength * (2.0 * truth - 1.0) + random.normal(size=len(truth)) * 1.5
        scores.append(1 / (1 + np.exp(-logit)))
        labels.append(truth)
    return scores, labels


@pytest.mark.parametrize("p_stay", [0.01, 0.3, 0.5, 0.9, 0.993])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 9])
def test_persistence_is_the_posterior_over_all_label_sequences(n_tokens, p_stay):
    scores = np.random.default_rng(n_tokens).uniform(0.001, 0.999, n_tokens)
    np.testing.assert_allclose(persist(scores, p_stay), by_enumeration(scores, p_stay), rtol=1e-10)


def test_certain_scores_are_clipped_to_the_named_distance():
    scores = np.array([0.0, 1.0, 0.5, 1.0])
    clipped = np.clip(scores, 0.01, 0.99)
    np.testing.assert_allclose(persist(scores, 0.9, clip=0.01), by_enumeration(clipped, 0.9), rtol=1e-10)
    np.testing.assert_allclose(persist(scores, 0.5), np.clip(scores, CLIP, 1 - CLIP), rtol=1e-10)


def test_a_long_answer_does_not_underflow():
    scores = np.full(10_000, 1e-4)
    scores[5_000:] = 1.0
    smoothed = persist(scores, 0.995)
    assert np.isfinite(smoothed).all()
    assert smoothed[:4_990].max() < 1e-4
    assert smoothed[5_010:].min() > 1 - 1e-4


def test_a_lone_high_token_is_doubted_and_a_gap_in_a_span_is_filled():
    lone, span = np.full(21, 0.1), np.full(21, 0.9)
    lone[10], span[10] = 0.9, 0.1
    assert persist(lone, 0.98)[10] < 0.1
    assert persist(span, 0.98)[10] > 0.9


def test_reading_backwards_and_exchanging_labels_change_nothing_else():
    scores = np.random.default_rng(0).random(200)
    smoothed = persist(scores, 0.97)
    np.testing.assert_allclose(persist(scores[::-1], 0.97)[::-1], smoothed, rtol=1e-12)
    np.testing.assert_allclose(1 - persist(1 - scores, 0.97), smoothed, rtol=1e-9)


def test_an_answer_is_smoothed_alike_alone_and_beside_longer_ones():
    groups = [np.random.default_rng(n).random(n) for n in (1, 40, 7, 300, 0)]
    for alone, together in zip(groups, persist_all(groups, 0.99), strict=True):
        assert np.array_equal(persist(alone, 0.99), together)
    assert persist_all([], 0.9) == []


@pytest.mark.parametrize("p_stay", [0.0, 1.0, -0.1, float("nan")])
def test_a_stay_probability_outside_its_range_is_refused(p_stay):
    with pytest.raises(DetectorError, match="p_stay"):
        persist(np.array([0.5]), p_stay)


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_scores_that_are_no_probabilities_are_refused(score):
    for read in (lambda s: persist(s, 0.9), Platt(1.0, 0.0).apply):
        with pytest.raises(DetectorError, match="probabilities"):
            read(np.array([0.5, score]))


def test_a_clip_that_leaves_no_room_is_refused():
    with pytest.raises(DetectorError, match="clip"):
        persist(np.array([0.5]), 0.9, clip=0.5)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 30])
def test_the_window_maximum_is_the_largest_score_around_each_token(width):
    scores = np.random.default_rng(1).random(12)
    left, right = (width - 1) // 2, width // 2
    expected = [max(scores[max(0, i - left) : i + right + 1]) for i in range(12)]
    assert np.array_equal(window_maximum(scores, width), expected)


def test_the_answer_score_is_that_of_its_worst_token():
    assert answer_score(np.array([0.2, 0.7, 0.4])) == 0.7


def test_calibration_finds_the_line_that_made_the_labels():
    random = np.random.default_rng(2)
    logit = random.normal(size=40_000) * 3
    labels = random.random(40_000) < 1 / (1 + np.exp(-(0.4 * logit - 2.0)))
    found = calibrate(1 / (1 + np.exp(-logit)), labels)
    assert abs(found.slope - 0.4) < 0.02
    assert abs(found.bias + 2.0) < 0.05


def test_balanced_calibration_gives_the_odds_of_a_world_with_as_many_of_each():
    random = np.random.default_rng(3)
    labels = random.random(60_000) < 0.05
    logit = random.normal(size=60_000) + np.where(labels, 1.0, -1.0)  # true log ratio of densities: 2 x
    found = calibrate(1 / (1 + np.exp(-logit)), labels, balanced=True)
    assert abs(found.slope - 2.0) < 0.08
    assert abs(found.bias) < 0.08


def test_calibration_never_turns_scores_around_nor_makes_certainties_of_a_few_tokens():
    scores, labels = np.array([0.1, 0.2, 0.8, 0.9]), np.array([True, True, False, False])
    assert calibrate(scores, labels).slope > 0
    assert 0.02 < calibrate(scores, ~labels).apply(scores).min()


def test_calibration_reads_certain_scores():
    scores, labels = np.array([0.0, 0.0, 1.0, 1.0, 1.0]), np.array([False, False, True, True, False])
    assert np.isfinite(calibrate(scores, labels).apply(scores)).all()


def test_one_class_alone_is_refused():
    scores = np.array([0.2, 0.3])
    with pytest.raises(DetectorError, match="label more"):
        calibrate(scores, np.array([True, True]))
    with pytest.raises(DetectorError, match="label more"):
        choose_p_stay([scores], [np.array([False, False])])


def test_the_chosen_stay_probability_has_the_highest_average_precision():
    scores, labels = answers(4)
    candidates = (0.5, 0.8, 0.95, 0.999)
    truth = np.concatenate(labels)
    by_hand = {
        p: average_precision_score(truth, np.concatenate([persist(s, p) for s in scores])) for p in candidates
    }
    chosen = choose_p_stay(scores, labels, candidates)
    assert chosen == max(by_hand, key=by_hand.get)
    assert chosen > 0.5


def test_labels_without_spans_choose_no_smoothing():
    random = np.random.default_rng(5)
    labels = [random.random(200) < 0.5 for _ in range(20)]
    scores = [np.clip(0.5 + 0.3 * (2.0 * l - 1) + random.normal(size=200) * 0.2, 0, 1) for l in labels]  # noqa: E741
    assert choose_p_stay(scores, labels) == 0.5


@pytest.mark.parametrize("smooth", [True, False])
def test_a_smoother_gives_calibrated_probabilities_on_other_answers(smooth):
    scores, labels = answers(6, n=200)
    smoother = Smoother.fit(scores, labels, smooth=smooth)
    others, truth = answers(7, n=200)
    found, truth = np.concatenate([smoother.apply(s) for s in others]), np.concatenate(truth)
    assert abs(found.mean() - truth.mean()) < 0.02
    sure = found > 0.5
    assert abs(found[sure].mean() - truth[sure].mean()) < 0.1
    assert (smoother.p_stay is not None) == smooth


def test_a_smoother_helps_where_labels_come_in_rare_spans():
    scores, labels = answers(8, rate=0.05, strength=0.7)
    others, truth = answers(9, rate=0.05, strength=0.7)
    truth = np.concatenate(truth)

    def precision(found):
        return average_precision_score(truth, np.concatenate(found))

    smoother = Smoother.fit(scores, labels)
    smoothed = precision([smoother.apply(s) for s in others])
    assert smoothed > precision(others) + 0.1
    # The same chain on plain probabilities counts the base rate once per token.
    plain = calibrate(np.concatenate(scores), np.concatenate(labels))
    assert smoothed > precision([persist(plain.apply(s), smoother.p_stay) for s in others]) + 0.05


@pytest.mark.parametrize("smooth", [True, False])
def test_a_smoother_survives_storage(smooth):
    scores, labels = answers(10, n=10)
    smoother = Smoother.fit(scores, labels, smooth=smooth)
    again = Smoother.from_parts(smoother.to_parts() | {"another": 1})
    assert again == smoother
    assert np.array_equal(again.apply(scores[0]), smoother.apply(scores[0]))
    assert all(type(number) is float for number in smoother.to_parts().values())
