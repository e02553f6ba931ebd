"""From sentences to the answer: four rules, and the choice among them."""

import itertools
import math

import numpy as np
import pytest

from detector.errors import DetectorError
from detector.response import RULES, apply_rule, choose_rule


def by_hand(name, scores):
    if name == "max":
        return max(scores)
    if name == "mean":
        return sum(scores) / len(scores)
    if name == "top2":
        best = sorted(scores, reverse=True)[:2]
        return sum(best) / len(best)
    product = 1.0
    for score in scores:
        product *= 1 - score
    return -math.log(product)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_a_rule_is_its_formula_in_any_order_of_the_sentences(name, n):
    scores = np.random.default_rng(n).uniform(0, 0.99, n)
    assert RULES[name](scores) == pytest.approx(by_hand(name, scores.tolist()), rel=1e-12)
    for order in itertools.islice(itertools.permutations(range(n)), 5):
        assert RULES[name](scores[list(order)]) == pytest.approx(RULES[name](scores), rel=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_worse_sentence_never_makes_a_better_answer(name):
    scores = np.array([0.1, 0.5, 0.7])
    for i in range(3):
        worse = scores.copy()
        worse[i] += 0.25
        assert RULES[name](worse) >= RULES[name](scores)
    assert type(RULES[name](scores)) is float


def test_noisy_or_is_finite_for_certainties_and_still_tells_long_answers_apart():
    sure = RULES["noisy_or"](np.array([1.0, 1.0]))
    assert math.isfinite(sure) and sure > RULES["noisy_or"](np.array([1.0]))
    thirty, forty = (RULES["noisy_or"](np.full(n, 0.9)) for n in (30, 40))
    assert thirty < forty
    assert 1 - 0.1**30 == 1.0  # as a probability both would be the same


@pytest.mark.parametrize("name", RULES)
def test_an_answer_without_a_sentence_gets_the_lowest_of_the_others(name):
    scores = [np.array([0.9, 0.1]), np.zeros(0), np.array([0.3]), np.zeros(0)]
    found = apply_rule(name, scores)
    assert found.dtype == np.float64
    assert found[0] == RULES[name](scores[0]) and found[2] == RULES[name](scores[2])
    assert found[1] == found[3] == min(found[0], found[2])
    np.testing.assert_array_equal(apply_rule(name, [np.zeros(0)]), [0.0])
    assert apply_rule(name, []).shape == (0,)


CASES = {
    # What makes an answer bad, and the only rule that sees it.
    "max": ([[0.9, 0, 0, 0], [0.8, 0.1]], [[0.7, 0.7, 0.7, 0.7], [0.6, 0.6]]),
    "mean": ([[0.5, 0.5, 0.5, 0.5], [0.6, 0.4, 0.5]], [[0.9, 0.9, 0, 0, 0, 0], [0.8, 0.8, 0, 0, 0, 0]]),
    "top2": ([[0.5, 0.5, 0, 0], [0.6, 0.5, 0, 0]], [[0.8, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.3]]),
    "noisy_or": ([[0.5] * 9, [0.4] * 9], [[0.6], [0.7, 0.6]]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule_that_separates_the_training_answers_is_chosen(name):
    bad, good = CASES[name]
    scores = [np.array(answer) for answer in (*bad, *good)]
    assert choose_rule(scores, [True, True, False, False], probabilities=True) == name


def test_scores_that_are_no_probabilities_are_not_multiplied():
    bad, good = CASES["noisy_or"]
    scores = [np.array(answer) for answer in (*bad, *good)]
    assert choose_rule(scores, [True, True, False, False], probabilities=False) != "noisy_or"
    raw = [np.array([-7.0]), np.array([3.0, 2.0])]
    assert choose_rule(raw, [False, True], probabilities=False) == "max"  # the first of equals


def test_labels_of_one_kind_choose_nothing():
    with pytest.raises(DetectorError):
        choose_rule([np.array([0.5])], [True], probabilities=True)
