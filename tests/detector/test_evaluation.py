import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from detector.errors import DetectorError
from detector.evaluation import (
    METRICS,
    auroc,
    average_precision,
    best_f1,
    bootstrap,
    character_counts,
    character_iou,
    choose_threshold,
    f1_at,
    folds,
    leave_one_out_folds,
    resample,
    span_f1,
    splits,
    token_spans,
)

rng = np.random.default_rng


def rows(seed, n=200, levels=None):
    """Labels and scores that know something about them; `levels` makes ties."""
    random = rng(seed)
    labels = random.random(n) < 0.3
    scores = random.normal(size=n) + labels
    return labels, scores if levels is None else np.round(scores * levels) / levels


class TestRanking:
    @pytest.mark.parametrize("levels", [None, 2, 0.5])
    def test_is_scikit_learns_with_and_without_ties_and_weights(self, levels):
        labels, scores = rows(1, levels=levels)
        weights = rng(2).integers(0, 4, len(labels)).astype(float)
        assert auroc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert average_precision(labels, scores) == pytest.approx(
            average_precision_score(labels, scores), abs=1e-12
        )
        assert auroc(labels, scores, weights) == pytest.approx(
            roc_auc_score(labels, scores, sample_weight=weights), abs=1e-12
        )
        assert average_precision(labels, scores, weights) == pytest.approx(
            average_precision_score(labels, scores, sample_weight=weights), abs=1e-12
        )

    @given(st.lists(st.tuples(st.booleans(), st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=14))
    def test_auroc_is_the_share_of_pairs_in_the_right_order(self, drawn):
        labels, scores, weights = (np.array(column) for column in zip(*drawn, strict=True))
        right = total = 0.0
        for bad, high, one in zip(labels, scores, weights, strict=True):
            for good, low, other in zip(labels, scores, weights, strict=True):
                if bad and not good:
                    total += one * other
                    right += one * other * (high > low) + 0.5 * one * other * (high == low)
        if total == 0:
            with pytest.raises(DetectorError, match="one class only"):
                auroc(labels, scores, weights)
        else:
            assert auroc(labels, scores, weights) == pytest.approx(right / total)

    @given(st.lists(st.tuples(st.booleans(), st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=14))
    def test_average_precision_adds_precision_times_gained_recall_threshold_by_threshold(self, drawn):
        labels, scores, weights = (np.array(column) for column in zip(*drawn, strict=True))
        positive = float((weights * labels).sum())
        if positive == 0:
            with pytest.raises(DetectorError, match="one class only"):
                average_precision(labels, scores, weights)
            return
        expected = recall = 0.0
        for threshold in sorted(set(scores.tolist()), reverse=True):
            flagged = scores >= threshold
            true = float((weights * (labels & flagged)).sum())
            if true:
                expected += true / float((weights * flagged).sum()) * (true / positive - recall)
            recall = true / positive
        assert average_precision(labels, scores, weights) == pytest.approx(expected)

    def test_a_weight_of_two_is_the_row_written_twice(self):
        labels, scores = rows(3, n=40, levels=2)
        weights = rng(4).integers(0, 3, 40)
        for metric in (auroc, average_precision):
            assert metric(labels, scores, weights) == pytest.approx(
                metric(np.repeat(labels, weights), np.repeat(scores, weights))
            )

    def test_single_precision_scores_are_summed_in_double(self):
        labels, scores = rows(5, n=3000)
        assert auroc(labels, scores.astype(np.float32)) == pytest.approx(
            roc_auc_score(labels, scores.astype(np.float32)), abs=1e-13
        )

    def test_infinity_ranks_and_nan_does_not(self):
        assert auroc([True, False, False], [np.inf, 0.0, -np.inf]) == 1
        with pytest.raises(DetectorError, match="1 of 2 scores are not numbers"):
            auroc([True, False], [np.nan, 0.0])

    def test_labels_and_scores_must_be_of_the_same_rows(self):
        with pytest.raises(DetectorError, match="equally long"):
            auroc([True, False], [0.0, 1.0, 2.0])


class TestThreshold:
    @pytest.mark.parametrize("levels", [None, 1])
    def test_no_other_score_gives_a_better_f1(self, levels):
        labels, scores = rows(6, n=80, levels=levels)
        chosen = choose_threshold(labels, scores)
        every = [f1_score(labels, scores >= score) for score in scores]
        assert f1_at(labels, scores, chosen) == pytest.approx(max(every))
        assert best_f1(labels, scores) == pytest.approx(max(every))
        best = [score for score, f1 in zip(scores, every, strict=True) if f1 > max(every) - 1e-12]
        assert chosen == max(best)

    def test_is_chosen_on_one_set_of_rows_and_judged_on_another(self):
        labels, scores = rows(7)
        chosen = choose_threshold(labels[:100], scores[:100])
        assert f1_at(labels[100:], scores[100:], chosen) == pytest.approx(
            f1_score(labels[100:], scores[100:] >= chosen)
        )
        assert f1_at(labels[100:], scores[100:], chosen) < best_f1(labels[100:], scores[100:])

    def test_nothing_right_is_zero(self):
        assert f1_at([True, False], [0.0, 1.0], 0.5) == 0
        assert f1_at([False, False], [0.0, 1.0], 2.0) == 0

    def test_needs_an_unsupported_row(self):
        with pytest.raises(DetectorError, match="none of the training rows"):
            choose_threshold([False, False], [0.0, 1.0])


class TestCharacters:
    def test_iou_counts_characters_in_both_over_characters_in_either(self):
        assert character_iou([(0, 4)], [(2, 6)], 10) == pytest.approx(2 / 6)
        assert character_iou([(0, 4), (3, 5)], [(0, 5)], 5) == 1
        assert character_iou([(0, 4)], [], 10) == 0
        assert character_iou([], [(0, 4)], 10) == 0

    def test_nothing_marked_and_nothing_flagged_is_right(self):
        assert character_iou([], [], 10) == 1
        assert character_iou([(3, 3)], [], 10) == 1

    def test_a_span_outside_the_answer_is_an_error(self):
        with pytest.raises(DetectorError, match="span 8:11 lies outside an answer of 10 characters"):
            character_iou([(8, 11)], [], 10)

    def test_marks_that_overlap_count_once(self):
        assert character_counts([(0, 10)], [(2, 6), (4, 8)]) == (6, 10, 6)

    def test_span_f1_pools_the_characters_of_all_answers(self):
        predicted = [[(0, 4)], [], [(5, 6), (0, 2)]]
        gold = [[(2, 6), (3, 6)], [(0, 3)], []]
        both, flagged, marked = 2, 4 + 0 + 3, 4 + 3 + 0
        assert span_f1(predicted, gold) == pytest.approx(2 * both / (flagged + marked))

    def test_span_f1_without_any_mark_is_zero(self):
        assert span_f1([[], []], [[], []]) == 0

    @given(
        st.lists(st.tuples(*[st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=3)] * 2)),
    )
    def test_span_f1_is_the_f1_of_all_characters_as_rows(self, drawn):
        spans = [[[(start, start + n) for start, n in side] for side in pair] for pair in drawn]
        inside = [
            [any(start <= place < end for start, end in side) for side in pair]
            for pair in spans
            for place in range(14)
        ]
        both = sum(p and g for p, g in inside)
        either = sum(p + g for p, g in inside)
        expected = 2 * both / either if either else 0
        assert span_f1([p for p, _ in spans], [g for _, g in spans]) == pytest.approx(expected)


class TestTokenSpans:
    OFFSETS = np.array([(0, 3), (3, 8), (8, 9), (9, 10), (9, 10), (11, 14)])
    ANSWER = "It rains.🌧 now"

    def test_neighbours_join_and_others_do_not(self):
        assert token_spans([1, 1, 0, 0, 0, 1], self.OFFSETS) == ((0, 8), (11, 14))

    def test_the_space_that_a_token_carries_does_not_count(self):
        offsets = np.array([(0, 2), (2, 8), (8, 9)])
        assert token_spans([0, 1, 0], offsets, "It rains.") == ((3, 8),)
        assert token_spans([0, 1, 0], offsets) == ((2, 8),)

    def test_one_of_two_tokens_that_share_a_character_marks_it(self):
        assert token_spans([0, 0, 0, 0, 1, 0], self.OFFSETS) == ((9, 10),)
        assert token_spans([0, 0, 0, 1, 1, 1], self.OFFSETS) == ((9, 14),)

    def test_a_token_of_white_space_alone_marks_nothing(self):
        assert token_spans([0, 1, 0], np.array([(0, 2), (2, 4), (4, 5)]), "It\n\nx") == ()

    def test_no_flag_no_span(self):
        assert token_spans(np.zeros(6, dtype=bool), self.OFFSETS, self.ANSWER) == ()


class TestFolds:
    SOURCES = tuple(f"q{index // 4}" for index in range(400))
    LABELS = rng(8).random(400) < 0.3

    def test_no_source_is_in_two_folds(self):
        fold = folds(self.SOURCES, self.LABELS)
        assert all(len({*fold[np.array(self.SOURCES) == source]}) == 1 for source in set(self.SOURCES))

    def test_folds_are_of_equal_size_and_prevalence(self):
        fold = folds(self.SOURCES, self.LABELS)
        assert np.bincount(fold).tolist() == pytest.approx([80] * 5, abs=4)
        assert np.bincount(fold, weights=self.LABELS) == pytest.approx([self.LABELS.sum() / 5] * 5, abs=2)

    def test_one_huge_source_does_not_drag_others_along(self):
        sources = ["huge"] * 100 + [f"q{index}" for index in range(100)]
        fold = folds(sources, np.arange(200) % 2 == 0, n_folds=2)
        assert np.bincount(fold).tolist() == [100, 100]

    def test_the_order_of_the_answers_does_not_matter_and_the_seed_does(self):
        order = rng(9).permutation(400)
        fold = folds(self.SOURCES, self.LABELS, seed=1)
        moved = folds([self.SOURCES[i] for i in order], self.LABELS[order], seed=1)
        assert np.array_equal(fold[order], moved)
        assert not np.array_equal(fold, folds(self.SOURCES, self.LABELS, seed=2))

    def test_more_folds_than_sources_is_an_error(self):
        with pytest.raises(DetectorError, match="cannot make 5 folds of 2 sources"):
            folds(["a", "b", "a"], [True, False, True])

    def test_one_class_can_be_spread_too(self):
        assert np.bincount(folds(["a", "b", "c", "d"], [False] * 4, n_folds=2)).tolist() == [2, 2]

    def test_each_name_is_left_out_once(self):
        fold = leave_one_out_folds(["llama", "mistral", "llama", "alpaca"])
        assert fold.tolist() == [1, 2, 1, 0]
        held_out = [test.tolist() for _, test in splits(fold)]
        assert held_out == [[3], [0, 2], [1]]
        assert all(sorted([*train, *test]) == [0, 1, 2, 3] for train, test in splits(fold))

    def test_two_partitions_leave_out_both(self):
        generators = leave_one_out_folds([name for _ in range(4) for name in "ab"])
        questions = np.repeat(np.arange(4), 2)
        seen = []
        for train, test in splits(generators, questions):
            assert not {*generators[train]} & {*generators[test]}
            assert not {*questions[train]} & {*questions[test]}
            seen += test.tolist()
        assert sorted(seen) == list(range(8))

    def test_nothing_to_train_on_is_an_error(self):
        with pytest.raises(DetectorError, match="no row is left to train on"):
            list(splits(np.zeros(4, dtype=np.int64)))


def slow_resample(labels, scores, clusters, metric, n, seed, membership_only=False):
    """Draws written out as rows."""
    chooser, names = rng(seed), sorted(set(clusters))
    values = []
    for _ in range(n):
        drawn = chooser.integers(len(names), size=len(names))
        drawn = sorted(set(drawn.tolist())) if membership_only else drawn
        picked = np.concatenate([np.flatnonzero(clusters == names[index]) for index in drawn])
        values.append(metric(labels[picked], scores[picked]))
    return np.array(values)


class TestBootstrap:
    def clustered(self, seed=10, n_clusters=40):
        random = rng(seed)
        clusters = np.repeat(np.arange(n_clusters), 5)
        labels = random.random(5 * n_clusters) < 0.4
        base = labels + random.normal(size=5 * n_clusters) + random.normal(size=n_clusters)[clusters]
        return (
            clusters,
            labels,
            {"base": base, "better": base + 0.7 * labels, "coin": random.normal(size=200)},
        )

    @pytest.mark.parametrize(
        ("name", "reference"), [("auroc", roc_auc_score), ("average_precision", average_precision_score)]
    )
    def test_weights_give_what_repeated_rows_give(self, name, reference):
        clusters, labels, scores = self.clustered()
        fast = resample({"base": METRICS[name](labels, scores["base"])}, clusters, n=50, seed=3)["base"]
        assert fast == pytest.approx(slow_resample(labels, scores["base"], clusters, reference, 50, 3))

    def test_multiplicity_is_kept_and_widens_the_interval(self):
        clusters, labels, scores = self.clustered()
        interval = bootstrap(labels, scores, clusters, METRICS["auroc"], n=400)["base"].interval
        once = slow_resample(labels, scores["base"], clusters, roc_auc_score, 400, 0, membership_only=True)
        low, high = np.quantile(once, [0.025, 0.975])
        assert high - low < 0.9 * (interval.high - interval.low)

    def test_drawing_rows_instead_of_clusters_would_be_too_sure(self):
        clusters = np.repeat(np.arange(30), 20)
        labels = clusters % 2 == 0
        scores = {"source": labels + 2 * rng(11).normal(size=30)[clusters]}
        whole = bootstrap(labels, scores, clusters, METRICS["auroc"], n=200)["source"].interval
        alone = bootstrap(labels, scores, np.arange(600), METRICS["auroc"], n=200)["source"].interval
        assert whole.high - whole.low > 2 * (alone.high - alone.low)

    def test_a_difference_is_taken_within_each_resample(self):
        clusters, labels, scores = self.clustered()
        found = bootstrap(labels, scores, clusters, METRICS["auroc"], against="base", n=300)
        statistics = {name: METRICS["auroc"](labels, values) for name, values in scores.items()}
        drawn = resample(statistics, clusters, n=300)
        difference = found["better"].difference
        assert difference.value == pytest.approx(
            auroc(labels, scores["better"]) - auroc(labels, scores["base"])
        )
        assert (difference.low, difference.high) == pytest.approx(
            tuple(np.quantile(drawn["better"] - drawn["base"], [0.025, 0.975]))
        )
        alone = found["better"].interval
        assert difference.high - difference.low < 0.6 * (alone.high - alone.low)
        assert found["coin"].difference.high < 0
        assert found["base"].difference is None

    def test_the_value_is_of_all_rows_and_lies_in_its_interval(self):
        clusters, labels, scores = self.clustered()
        for name, found in bootstrap(labels, scores, clusters, METRICS["auroc"], n=100).items():
            assert found.interval.value == auroc(labels, scores[name])
            assert found.interval.low < found.interval.value < found.interval.high

    def test_the_same_seed_gives_the_same_bits(self):
        clusters, labels, scores = self.clustered()
        runs = [bootstrap(labels, scores, clusters, METRICS["auroc"], n=50, seed=s) for s in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]

    def test_other_metrics_are_resampled_alike(self):
        labels = np.array([True, True, False, False, True])
        flags = np.array([True, False, True, False, True])
        counts = np.array([[2, 3, 4], [0, 0, 1], [0, 2, 0], [0, 0, 0], [5, 5, 5]])
        iou = np.array([0.4, 0.0, 0.0, 1.0, 1.0])
        clusters = np.arange(5)
        drawn = {
            name: resample({"m": METRICS[name](labels, values)}, clusters, n=30)["m"]
            for name, values in {"f1": flags, "span_f1": counts, "iou": iou}.items()
        }
        chooser = rng(0)
        for index in range(30):
            rows = chooser.integers(5, size=5)
            both, flagged, gold = counts[rows].sum(axis=0)
            assert drawn["f1"][index] == pytest.approx(f1_score(labels[rows], flags[rows], zero_division=0))
            assert drawn["iou"][index] == pytest.approx(iou[rows].mean())
            assert drawn["span_f1"][index] == pytest.approx(2 * both / max(flagged + gold, 1))

    def test_draws_of_one_class_are_left_out_for_all_methods(self):
        labels, scores = np.array([True, False, False]), np.array([3.0, 2.0, 1.0])
        drawn = resample({"m": METRICS["auroc"](labels, scores)}, range(3), n=200)["m"]
        assert 100 < len(drawn) < 200
        assert (drawn == 1).all()

    def test_too_few_labelled_clusters_is_an_error(self):
        labels, scores = np.array([True, False]), np.array([1.0, 0.0])
        with pytest.raises(DetectorError, match="resamples of 1 clusters hold one class only"):
            resample({"m": METRICS["auroc"](labels[:1], scores[:1])}, [0])

    def test_an_unknown_baseline_is_an_error(self):
        with pytest.raises(DetectorError, match="no baseline 'length' among the methods: base, better, coin"):
            clusters, labels, scores = self.clustered()
            bootstrap(labels, scores, clusters, METRICS["auroc"], against="length")
