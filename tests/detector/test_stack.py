"""The stacked detector: two components, and a regression over scores that they gave unseen answers."""

from dataclasses import replace

import numpy as np
import pytest

from detector import lookback, stack, token_probability
from detector.errors import DetectorError
from detector.evaluation import auroc, folds
from detector.logistic import Logistic
from tests.detector.states import measured_answers


@pytest.fixture(scope="module")
def examples():
    return measured_answers(0)


@pytest.fixture(scope="module")
def head(examples):
    return stack.fit(examples, seed=3)


def test_the_regression_reads_scores_of_answers_whose_source_was_not_seen(examples, head):
    """By hand, one answer at a time: components from the other folds' answers, its own score from them."""
    fold = folds([e.source_id for e in examples], np.array([e.label for e in examples]), 5, seed=3)
    rows, labels = [], []
    for index, example in enumerate(examples):
        others = [e for e, of in zip(examples, fold, strict=True) if of != fold[index]]
        assert example.source_id not in {e.source_id for e in others}
        components = token_probability.fit(others), lookback.fit(others)
        for i, tokens in enumerate(example.sentences):
            rows.append([float(c.sentences(example.trace, [tokens])[0]) for c in components])
            labels.append(example.sentence_labels[i])
    wanted = Logistic.fit(np.array(rows), np.array(labels))
    for name in ("mean", "sd", "weight"):
        np.testing.assert_allclose(getattr(head.combined, name), getattr(wanted, name), rtol=1e-6, atol=1e-9)
    assert head.combined.bias == pytest.approx(wanted.bias, abs=1e-6)


def test_the_components_are_those_of_all_answers(examples, head):
    for component, module in ((head.probability, token_probability), (head.attention, lookback)):
        ours, theirs = component.to_parts(), module.fit(examples).to_parts()
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_sentences_score_is_the_regression_over_both_scores_and_tokens_share_it(examples, head):
    trace, sentences = examples[0].trace, examples[0].sentences
    scores = head.sentences(trace, sentences)
    for i, tokens in enumerate(sentences):
        both = [head.probability.sentences(trace, [tokens])[0], head.attention.sentences(trace, [tokens])[0]]
        assert scores[i] == pytest.approx(head.combined.probability(np.array([both]))[0], rel=1e-9)
        assert (head.tokens(trace, sentences)[tokens] == scores[i]).all()


@pytest.mark.parametrize("planted", ["likelihood", "attention"])
def test_the_stack_follows_the_component_that_knows(planted):
    head = stack.fit(measured_answers(0, n=40, planted=(planted,)))
    others = measured_answers(1, planted=(planted,))
    truth = np.concatenate([e.sentence_labels for e in others])
    scores = np.concatenate([head.sentences(e.trace, e.sentences) for e in others])
    assert auroc(truth, scores) > 0.95
    weights = dict(zip(("likelihood", "attention"), head.combined.weight, strict=True))
    assert weights.pop(planted) > 4 * max(map(abs, weights.values()))


def test_fewer_sources_than_folds_and_labels_of_one_kind_are_refused(examples):
    with pytest.raises(DetectorError, match="folds"):
        stack.fit(examples[:8])  # two answers to each of four questions
    grounded = [replace(e, sentence_labels=np.zeros(4, dtype=bool)) for e in examples]
    with pytest.raises(DetectorError, match="one kind"):
        stack.fit(grounded)
