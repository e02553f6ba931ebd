import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.calibration import (
    FEATURES,
    Moments,
    Reference,
    Scale,
    budget_threshold,
    operating_threshold,
    score,
)
from detector.errors import ProfileError
from detector.methods import METHODS

FLOATS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e100, max_value=1e100)
BUDGETS = st.floats(min_value=0.001, max_value=0.999)
REFERENCE = Reference(
    statistics_from="run-1",
    scorer="tiny",
    scorer_fingerprint="f00",
    profile="plain",
    loo="exact",
    n_sentences=40,
    n_responses=9,
    sentences={"gap": Scale(0.1, 2.5), "n_tokens": Scale(12.0, 3.0)},
    responses={"gap": Scale(1 / 3, 0.7)},
    deciding_method="gap",
    threshold=1.25,
    threshold_from="run-1",
    flag_budget=0.1,
)


class TestMoments:
    @given(st.lists(FLOATS, max_size=40), st.data())
    def test_sums_are_exact_whatever_the_order_and_the_split(self, values, data):
        shuffled = data.draw(st.permutations(values))
        cut = data.draw(st.integers(0, len(values)))
        parts = Moments.of(np.array(shuffled[:cut])) + Moments.of(np.array(shuffled[cut:]))
        assert parts == Moments.of(np.array(values))
        assert parts - Moments.of(np.array(shuffled[:cut])) == Moments.of(np.array(shuffled[cut:]))
        assert parts.n == len(values)
        assert parts.total == float(sum(map(Fraction, values)))
        assert parts.total_squares == float(sum(Fraction(value) ** 2 for value in values))

    def test_the_smallest_and_very_many_values_lose_nothing(self):
        assert Moments.of(np.array([5e-324] * 3)).total == 3 * 5e-324
        assert Moments.of(np.full(5000, -1 - 2**-52)).total == 5000 * (-1 - 2**-52)

    def test_mean_and_sd_are_those_of_numpy(self):
        values = np.random.default_rng(0).normal(3, 2, 1000).astype(np.float32)
        scale = Moments.of(values).scale()
        assert scale.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-14)
        assert scale.sd == pytest.approx(values.std(ddof=1, dtype=np.float64), rel=1e-12)

    def test_a_small_spread_far_from_zero_does_not_cancel(self):
        assert Moments.of(np.array([1e9, 1e9 + 2**-10, 1e9 + 2**-9])).scale().sd == 2**-10

    @given(FLOATS, st.integers(0, 9))
    def test_what_has_no_spread_gets_unit_sd(self, value, n):
        assert Moments.of(np.full(n, value)).scale() == Scale(value if n else 0.0, 1.0)

    def test_a_spread_too_small_for_a_float_gets_unit_sd(self):
        assert Moments.of(np.array([0.0, 5e-324])).scale().sd == 1.0

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
    def test_a_value_that_is_not_finite_is_refused(self, value):
        with pytest.raises(ValueError, match="not finite"):
            Moments.of(np.array([1.0, value]))


FREE = [method for method in METHODS.values() if not method.trained]


class TestScore:
    def test_is_the_signed_sum_of_standardised_features(self):
        rng = np.random.default_rng(1)
        features = {name: rng.normal(size=20) for name in FEATURES}
        scales = {name: Scale(rng.normal(), rng.uniform(0.5, 2)) for name in FEATURES}
        for method in FREE:
            expected = [
                sum(s * (features[f][i] - scales[f].mean) / scales[f].sd for f, s in method.features.items())
                for i in range(20)
            ]
            np.testing.assert_allclose(score(features, method, scales), expected, rtol=1e-12)

    def test_higher_is_less_grounded_for_every_method(self):
        grounded = {"gap": 2.0, "jsd_none": 0.6, "max_drop": 1.5, "max_jsd": 0.5}
        grounded |= {"surprisal": 0.1, "entropy": 0.1, "n_tokens": 4.0, "log_tokens": 1.4}
        grounded |= {"absent_pairs": 0.1, "attention_share": 0.8}
        floating = {"gap": 0.0, "jsd_none": 0.0, "max_drop": 0.0, "max_jsd": 0.0}
        floating |= {"surprisal": 3.0, "entropy": 3.0, "n_tokens": 9.0, "log_tokens": 2.2}
        floating |= {"absent_pairs": 0.9, "attention_share": 0.4}
        features = {name: np.array([grounded[name], floating[name]]) for name in FEATURES}
        for method in FREE:
            first, second = score(features, method, Reference.identity().sentences)
            assert first < second

    def test_a_probability_is_its_own_score(self):
        said = np.array([0.0, 0.25, 1.0])
        assert score({"ensemble": said}, METHODS["ensemble"], {}).tolist() == said.tolist()

    def test_a_feature_without_statistics_is_named(self):
        with pytest.raises(ProfileError, match="max_drop"):
            score(
                {f: np.zeros(1) for f in FEATURES}, METHODS["gasp"], dict.fromkeys(FEATURES[:2], Scale(0, 1))
            )


class TestBudgetThreshold:
    @given(st.lists(FLOATS | st.sampled_from([0.0, 1.0]), min_size=1, max_size=60), BUDGETS)
    def test_flags_as_much_as_the_budget_allows_and_never_more(self, values, budget):
        scores = np.array(values)
        threshold = budget_threshold(scores, budget)
        assert np.mean(scores >= threshold) <= budget
        # One float lower would flag at least one more (or all of a tie), and that is too much.
        assert np.mean(scores >= np.nextafter(threshold, -np.inf)) > budget

    @given(st.lists(FLOATS, min_size=1, max_size=30), BUDGETS, st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order(self, values, budget, random):
        shuffled = random.sample(values, len(values))
        assert budget_threshold(np.array(values), budget) == budget_threshold(np.array(shuffled), budget)

    @pytest.mark.parametrize(
        ("n", "budget", "flagged"), [(100, 0.29, 29), (30, 0.1, 3), (10, 0.3, 3), (7, 0.5, 3)]
    )
    def test_the_share_is_not_lost_to_a_rounding(self, n, budget, flagged):
        scores = np.arange(n, dtype=np.float64)
        assert (scores >= budget_threshold(scores, budget)).sum() == flagged

    def test_ties_are_never_split(self):
        scores = np.array([5.0, 5.0, 5.0, 1.0, 0.0])
        assert (scores >= budget_threshold(scores, 0.4)).sum() == 0
        assert (scores >= budget_threshold(scores, 0.6)).sum() == 3

    @pytest.mark.parametrize("scores", [[2.0] * 50, [1.0, 2.0, 3.0], [7.0]])
    def test_all_equal_or_too_few_flag_nothing(self, scores):
        threshold = budget_threshold(np.array(scores), 0.1)
        assert max(scores) < threshold < max(scores) + 1e-9

    def test_no_scores_have_no_threshold(self):
        with pytest.raises(ValueError, match="no scores"):
            budget_threshold(np.array([]), 0.1)


class TestReference:
    def test_survives_the_file_to_the_last_bit(self):
        assert Reference.from_json(REFERENCE.to_json()) == REFERENCE
        assert Reference.from_json(REFERENCE.to_json().encode()) == REFERENCE

    def test_a_run_without_sentences_can_be_written_too(self):
        empty = replace(REFERENCE, sentences={}, threshold=None, threshold_from=None, flag_budget=None)
        assert Reference.from_json(empty.to_json()) == empty

    def test_the_file_says_that_the_threshold_is_no_error_rate(self):
        assert "not an error rate" in json.loads(REFERENCE.to_json())["note"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"extra": 1}, "'extra' is unknown"),
            ({"version": 2}, "version 1"),
            ({"scorer": 3}, "scorer must be text"),
            ({"threshold_from": 3}, "threshold_from must be text"),
            ({"n_sentences": 1.5}, "n_sentences"),
            ({"n_sentences": True}, "n_sentences"),
            ({"n_responses": -1}, "n_responses"),
            ({"threshold": "1"}, "threshold must be a finite number"),
            ({"threshold": math.nan}, "threshold must be a finite number"),
            ({"threshold": 10**400}, "threshold must be a finite number"),
            ({"flag_budget": 1.5}, "flag_budget must lie between"),
            ({"sentences": []}, "sentences must map"),
            ({"sentences": {"charm": {"mean": 0, "sd": 1}}}, "'charm', which is no feature"),
            ({"sentences": {"gap": {"mean": 0}}}, "sentences.gap must hold"),
            ({"sentences": {"gap": {"mean": math.inf, "sd": 1}}}, "sentences.gap.mean must be"),
            ({"responses": {"gap": {"mean": 0, "sd": 0}}}, "responses.gap.sd must be positive"),
        ],
    )
    def test_anything_else_is_refused_in_one_line(self, change, message):
        with pytest.raises(ProfileError, match=message) as raised:
            Reference.from_json(json.dumps(json.loads(REFERENCE.to_json()) | change))
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("text", ["", "[]", "{}", "{", b"\xff\xfe\x00", '{"version": 1e999}'])
    def test_what_is_no_profile_is_refused(self, text):
        with pytest.raises(ProfileError):
            Reference.from_json(text)

    def test_a_missing_key_is_named(self):
        tree = json.loads(REFERENCE.to_json())
        del tree["loo"]
        with pytest.raises(ProfileError, match="'loo' is missing"):
            Reference.from_json(json.dumps(tree))

    def test_a_profile_from_before_there_were_bundles_is_read(self):
        tree = json.loads(REFERENCE.to_json())
        del tree["target_fpr"], tree["bundle"]
        assert Reference.from_json(json.dumps(tree)) == REFERENCE

    def test_an_operating_point_is_kept_with_what_it_belongs_to(self):
        point = replace(REFERENCE, deciding_method="ensemble", target_fpr=0.05, bundle="b0", flag_budget=None)
        assert Reference.from_json(point.to_json()) == point
        assert "error rate" in REFERENCE.to_json() and "had not seen" in point.to_json()
        for wrong in ('"target_fpr": 1.5', '"target_fpr": NaN', '"target_fpr": "x"'):
            with pytest.raises(ProfileError, match="target_fpr"):
                Reference.from_json(point.to_json().replace('"target_fpr": 0.05', wrong))

    def test_an_operating_point_that_was_not_measured_is_refused_with_those_that_were(self):
        points = {0.1: 0.4, 0.05: 0.6}
        assert operating_threshold(points, 0.05) == 0.6
        with pytest.raises(ProfileError, match=r"0\.02 was not measured.*measured: 0\.05, 0\.1"):
            operating_threshold(points, 0.02)

    def test_identity_leaves_features_as_they_are(self):
        scales = Reference.identity().sentences
        assert set(scales) == set(FEATURES)
        assert score({"gap": np.array([1.5])}, METHODS["gap"], scales).tolist() == [-1.5]

    def test_without_statistics_a_sum_of_one_unit_decides(self):
        method = METHODS[Reference.identity().deciding_method]
        assert set(method.features) <= {"gap", "jsd_none", "max_drop", "max_jsd"}

    def test_a_profile_from_before_the_blend_is_read_and_names_what_it_lacks(self):
        old = ("gap", "jsd_none", "max_drop", "max_jsd", "surprisal", "entropy", "n_tokens")
        scales = dict.fromkeys(old, Scale(0.0, 1.0))
        given = replace(REFERENCE, sentences=scales, responses=scales, deciding_method="gasp")
        found = Reference.from_json(given.to_json())
        assert found == given
        features = {name: np.zeros(1) for name in FEATURES}
        with pytest.raises(ProfileError, match="no reference statistics for absent_pairs"):
            score(features, METHODS["blend"], found.sentences)
