"""The network against a float64 reference, and the head against a hand-made walk through its parts."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from detector.errors import DetectorError
from detector.smoothing import Smoother
from detector.token_mlp import TokenHead, TokenMLP, held_out_sources
from tests.detector.states import labelled_answers


def data(n=2_000, n_features=5, seed=0, rate=0.3):
    """Labels that no single feature tells: the first two have the same sign, or not."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(n, n_features)).astype(np.float32)
    labels = (features[:, 0] * features[:, 1] > 0) & (random.random(n) < 2 * rate)
    return features, labels


def read(trace, layer):
    return trace.states[trace.layers.index(layer), 0, 1:]


def test_the_network_learns_what_no_line_can_separate():
    features, labels = data(rate=0.5)
    mlp = TokenMLP.fit(features, labels, 0, batch_size=64)
    assert roc_auc_score(labels, mlp.probability(features)) > 0.95


@torch.enable_grad()  # gasp-rag, which other tests run, switches gradients off for the process
def test_the_default_training_is_the_papers():
    """Appendix C written out once more: the same seed must give the same network."""
    features, labels = data(n=5_000)
    mlp = TokenMLP.fit(features, labels, 3, standardise=False)
    torch.manual_seed(3)
    network = torch.nn.Sequential(
        torch.nn.Linear(5, 256),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(256, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 1),
    )
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
    weight = torch.tensor((~labels).sum() / labels.sum(), dtype=torch.float32)
    x, y = torch.from_numpy(features), torch.from_numpy(labels).float()
    for _ in range(10):
        order = torch.randperm(5_000)
        for batch in (order[:4096], order[4096:]):
            optimiser.zero_grad()
            logit = network(x[batch])[:, 0]
            loss = torch.nn.functional.softplus(-logit) * y[batch] * weight
            loss = loss + torch.nn.functional.softplus(logit) * (1 - y[batch])
            loss.mean().backward()
            optimiser.step()
    expected = network.eval().double()(x.double())[:, 0].detach().numpy()
    np.testing.assert_allclose(mlp.logit(features), expected, atol=1e-4)


def test_standardisation_is_inside_the_first_layer():
    """Scaled and shifted features give the same scores, where raw training would see one feature only."""
    features, labels = data()
    far = features * np.array([1, 1, 1, 1, 300], np.float32) + np.array([0, 0, 50, 0, 2000], np.float32)
    expected = TokenMLP.fit(features, labels, 0).probability(features)
    np.testing.assert_allclose(TokenMLP.fit(far, labels, 0).probability(far), expected, atol=5e-3)
    assert np.abs(TokenMLP.fit(far, labels, 0, standardise=False).probability(far) - expected).max() > 0.05


def test_a_constant_feature_does_not_divide_by_zero():
    features, labels = data(n=500)
    features[:, 2] = 7.0
    assert np.isfinite(TokenMLP.fit(features, labels, 0).logit(features)).all()


def test_scores_are_those_of_balanced_classes():
    """With nothing to learn from, the weighted network answers one half whatever the base rate is."""
    random = np.random.default_rng(1)
    features = random.normal(size=(4_000, 2)).astype(np.float32)
    labels = random.random(4_000) < 0.05
    assert abs(TokenMLP.fit(features, labels, 0).probability(features).mean() - 0.5) < 0.05


def test_one_seed_gives_one_network_and_leaves_the_callers_randomness_alone():
    features, labels = data(n=500)
    torch.manual_seed(11)
    first = TokenMLP.fit(features, labels, 5)
    after = torch.rand(1)
    torch.manual_seed(12)
    again, other = TokenMLP.fit(features, labels, 5), TokenMLP.fit(features, labels, 6)
    assert np.array_equal(first.logit(features), again.logit(features))
    assert not np.array_equal(first.logit(features), other.logit(features))
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(1))


def test_one_class_alone_is_refused():
    features, labels = data(n=100)
    for alone in (np.zeros_like(labels), np.ones_like(labels)):
        with pytest.raises(DetectorError, match="label more"):
            TokenMLP.fit(features, alone, 0)


def test_a_fifth_of_both_kinds_of_sources_is_held_out_whatever_their_order():
    examples = labelled_answers(0, n=200)
    held_out = held_out_sources(examples)
    marked = {e.source_id for e in examples if e.token_labels.any()}
    for kind in (marked, {e.source_id for e in examples} - marked):
        assert len(held_out & kind) == round(len(kind) / 5)
    assert held_out_sources(examples[::-1]) == held_out


def test_too_few_unsupported_sources_are_refused():
    examples = [e for e in labelled_answers(0) if not e.label]
    with pytest.raises(DetectorError, match="0 of the labelled sources"):
        held_out_sources(examples)
    one = next(e for e in labelled_answers(0) if e.label)
    with pytest.raises(DetectorError, match="1 of the labelled sources"):
        TokenHead.fit([*examples, one], read, layer=2)


def test_two_unsupported_sources_are_enough():
    marked = [e for e in labelled_answers(0, n=4, rate=0.5) if e.label]
    assert len({e.source_id for e in marked}) == 2
    assert len(held_out_sources(marked)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenHead.fit(marked, read, layer=2)


def test_the_network_never_sees_the_sources_that_its_smoother_is_fitted_on():
    examples = labelled_answers(2, direction=1.0)
    held_out = held_out_sources(examples)
    seen = [e for e in examples if e.source_id not in held_out]
    head = TokenHead.fit(examples, read, layer=2, seed=4)
    features = np.concatenate([e.trace.states[0, 0, 1:] for e in seen])
    mlp = TokenMLP.fit(features, np.concatenate([e.token_labels for e in seen]), 4)
    rest = [e for e in examples if e.source_id in held_out]
    scores = [mlp.probability(e.trace.states[0, 0, 1:]) for e in rest]
    smoother = Smoother.fit(scores, [e.token_labels for e in rest])
    assert head.smoother == smoother
    trace = examples[0].trace
    expected = smoother.apply(mlp.probability(trace.states[0, 0, 1:]))
    assert np.array_equal(head.tokens(trace, examples[0].sentences), expected)


@pytest.mark.parametrize(("pooling", "pool"), [("max", max), ("mean", lambda v: sum(v) / len(v))])
def test_a_sentence_has_the_largest_or_mean_score_of_its_tokens(pooling, pool):
    examples = labelled_answers(3, direction=1.0)
    head = TokenHead.fit(examples, read, layer=2, pooling=pooling)
    sentences = (np.array([0, 1, 2]), np.array([5]), np.arange(6, 40))
    scores = head.tokens(examples[0].trace, sentences)
    expected = [pool([scores[i] for i in members]) for members in sentences]
    np.testing.assert_allclose(head.sentences(examples[0].trace, sentences), expected, rtol=1e-12)
    assert head.sentences(examples[0].trace, ()).shape == (0,)


def test_an_unknown_pooling_is_refused():
    with pytest.raises(DetectorError, match="pooling"):
        TokenHead.fit(labelled_answers(0), read, layer=2, pooling="median")
