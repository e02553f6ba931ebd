"""What every head that reads whole sentences shares: their scores spread over tokens."""

import numpy as np

from detector.heads import spread


def test_every_token_gets_the_score_of_its_sentence_and_others_the_lowest():
    sentences = (np.array([1, 2]), np.array([4]), np.array([5, 6, 7]))
    found = spread(np.array([0.4, 0.9, 0.2]), sentences, 9)
    np.testing.assert_array_equal(found, [0.2, 0.4, 0.4, 0.2, 0.9, 0.2, 0.2, 0.2, 0.2])


def test_without_a_sentence_every_token_gets_nothing():
    found = spread(np.zeros(0), (), 3)
    np.testing.assert_array_equal(found, [0, 0, 0])
    assert found.dtype == np.float64
