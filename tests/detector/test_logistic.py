"""The linear model against scikit-learn on data that was standardised beforehand."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from detector.logistic import Logistic, sigmoid


def data(n=400, dtype=np.float64, seed=0):
    """Five features of very different scales, the third one constant."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(n, 5)) * [1, 100, 0, 1e-3, 3] + [0, 5000, 7, 0.2, -1]
    labels = random.random(n) < sigmoid(features[:, 0] + (features[:, 4] + 1) / 3 - 1)
    return features.astype(dtype), labels


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("c", [1e-3, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-6), (np.float32, 2e-3)])
def test_probabilities_are_those_of_a_regression_on_standardised_features(dtype, tolerance, c, balanced):
    features, labels = data(dtype=dtype)
    exact = features.astype(np.float64)
    scaler = StandardScaler().fit(exact)
    wanted = LogisticRegression(C=c, class_weight="balanced" if balanced else None)
    wanted.fit(scaler.transform(exact), labels)
    model = Logistic.fit(features, labels, c=c, balanced=balanced)
    got = model.probability(features)
    assert got.dtype == np.float64 and got.shape == (400,)
    np.testing.assert_allclose(got, wanted.predict_proba(scaler.transform(exact))[:, 1], atol=tolerance)


def test_the_log_odds_are_the_formula_of_the_class():
    features, labels = data()
    model = Logistic.fit(features, labels)
    for row, logit in zip(features[:20], model.logit(features), strict=False):
        by_hand = sum(
            w * (x - m) / s for w, x, m, s in zip(model.weight, row, model.mean, model.sd, strict=True)
        )
        assert logit == pytest.approx(by_hand + model.bias, abs=1e-9)
    np.testing.assert_array_equal(model.probability(features), sigmoid(model.logit(features)))
    assert model.logit(features[:0]).shape == (0,)


def test_a_constant_feature_has_no_say_and_divides_by_one():
    features, labels = data()
    model = Logistic.fit(features, labels)
    assert model.sd[2] == 1.0 and abs(model.weight[2]) < 1e-9
    assert np.isfinite(model.logit(features)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_training_data_are_left_as_they_were(dtype):
    features, labels = data(dtype=dtype)
    before = features.copy()
    Logistic.fit(features, labels)
    np.testing.assert_array_equal(features, before)


def test_deviations_do_not_depend_on_the_blocks_that_they_are_summed_in():
    features, labels = data(n=9001, dtype=np.float32)
    model = Logistic.fit(features, labels)
    exact = features.astype(np.float64)
    np.testing.assert_allclose(model.mean, exact.mean(axis=0), rtol=1e-12, atol=1e-12)
    varying = [0, 1, 3, 4]
    np.testing.assert_allclose(model.sd[varying], exact.std(axis=0)[varying], rtol=1e-5)


def test_a_stronger_penalty_makes_smaller_weights_and_balance_moves_the_bias():
    features, labels = data()
    loose, tight = (Logistic.fit(features, labels, c=c) for c in (1.0, 1e-3))
    assert np.abs(tight.weight).sum() < np.abs(loose.weight).sum() / 2
    assert labels.mean() < 0.5
    assert Logistic.fit(features, labels, balanced=True).bias > loose.bias


def test_fitting_again_gives_the_same_numbers_and_storage_loses_none():
    features, labels = data(dtype=np.float32)
    first, again = Logistic.fit(features, labels), Logistic.fit(features, labels)
    stored = Logistic.from_parts(first.to_parts())
    for model in (again, stored):
        for name in ("mean", "sd", "weight"):
            np.testing.assert_array_equal(getattr(model, name), getattr(first, name))
        assert model.bias == first.bias


def test_training_that_does_not_settle_says_nothing():
    """Separable data with hardly a penalty: L-BFGS runs out of steps, which is no reason to warn."""
    features = np.random.default_rng(0).normal(size=(300, 60))
    labels = features @ np.random.default_rng(1).normal(size=60) > 0
    model = Logistic.fit(features, labels, c=1e12)
    assert ((model.probability(features) > 0.5) == labels).all()


def test_sigmoid_overflows_at_neither_end():
    logits = np.array([-np.inf, -1e4, -2.0, 0.0, 2.0, 1e4, np.inf])
    wanted = [0.0, 0.0, 1 / (1 + np.exp(2)), 0.5, 1 / (1 + np.exp(-2)), 1.0, 1.0]
    np.testing.assert_allclose(sigmoid(logits), wanted, rtol=1e-12)
    assert sigmoid(np.array([-700.0]))[0] > 0
    assert sigmoid(np.array([1], dtype=np.int64)).dtype == np.float64
