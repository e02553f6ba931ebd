"""Leadline's own method: groups that add up, fitted without looking at their own training answers."""

from dataclasses import replace

import numpy as np
import pytest

from detector import ensemble
from detector.ensemble import GROUPS, WORST_TOKENS, answer_features
from detector.errors import DetectorError
from detector.evaluation import auroc
from detector.logistic import sigmoid
from detector.trained import TRAINED
from tests.detector.states import TINY_BLOCKS, kept, measured_answers

LAYERS = (1,)
KEEP = TRAINED["ensemble"].keep(TINY_BLOCKS)


@pytest.fixture(scope="module")
def head():
    return ensemble.fit(measured_answers(0), layers=LAYERS)


@pytest.fixture(scope="module")
def others():
    return measured_answers(1)


def shares(head, examples):
    """(n, 3) what each group added to each sentence, and (n,) the sentences' labels."""
    verdicts = [v for e in examples for v in head.judge(e.trace, e.sentences)[0]]
    found = np.array([[getattr(v, group) for group in GROUPS] for v in verdicts])
    return found, np.concatenate([e.sentence_labels for e in examples])


def test_a_head_keeps_what_the_table_of_trained_methods_says(head):
    assert head.keep == KEEP
    assert not KEEP.leave_one_out


def test_a_verdict_is_the_sentences_probability_and_the_groups_add_up_to_it(head, others):
    for example in others[:5]:
        verdicts, answer = head.judge(example.trace, example.sentences)
        assert answer == head.response(example.trace, example.sentences)
        probabilities = head.sentences(example.trace, example.sentences)
        assert [v.probability for v in verdicts] == probabilities.tolist()
        for verdict in verdicts:
            added = verdict.states + verdict.attention + verdict.likelihood
            total = sigmoid(np.array([head.sentence_sum.bias + added]))[0]
            assert total == pytest.approx(verdict.probability, rel=1e-9)
    assert head.judge(others[0].trace, ())[0] == []


@pytest.mark.parametrize("planted", GROUPS)
def test_a_flag_is_explained_by_the_group_that_carries_it(planted):
    head = ensemble.fit(measured_answers(0, n=40, planted=(planted,)), layers=LAYERS)
    found, labels = shares(head, measured_answers(1, planted=(planted,)))
    added = dict(zip(GROUPS, found[labels].mean(axis=0), strict=True))
    assert added.pop(planted) > 1 > 5 * max(map(abs, added.values()))
    assert auroc(labels, found.sum(axis=1)) > 0.95


def test_groups_that_know_nothing_are_not_trusted():
    """Trees know their own training answers by heart: a sum fitted on those would believe them."""
    examples = measured_answers(0, n=40, planted=())
    head = ensemble.fit(examples, layers=LAYERS)
    labels = np.concatenate([e.sentence_labels for e in examples])
    groups = np.concatenate([head._sentence_groups(e.trace, e.sentences) for e in examples])
    assert auroc(labels, groups[:, GROUPS.index("likelihood")]) > 0.99
    for weight in (head.sentence_sum.weight, head.token_sum.weight, head.answer_sum.weight):
        assert np.abs(weight).max() < 0.7
    scores = np.concatenate([head.sentences(e.trace, e.sentences) for e in measured_answers(1, planted=())])
    assert abs(scores.mean() - labels.mean()) < 0.1


def test_no_source_is_among_those_that_its_held_out_log_odds_come_from(monkeypatch):
    """Every group model is asked, during the fit, about answers to other questions than it was fitted on."""
    examples = measured_answers(0, n=12)
    source_of = {id(e.trace): e.source_id for e in examples}
    seen, asked = {}, []
    fit, read = ensemble._fit_groups, ensemble._sentence_groups

    def fit_groups(some, *rest):
        models = fit(some, *rest)
        seen[id(models[0])] = (models[0], {e.source_id for e in some})
        return models

    def sentence_groups(models, trace, *rest):
        asked.append((source_of[id(trace)], seen[id(models)][1]))
        return read(models, trace, *rest)

    monkeypatch.setattr(ensemble, "_fit_groups", fit_groups)
    monkeypatch.setattr(ensemble, "_sentence_groups", sentence_groups)
    head = ensemble.fit(examples, layers=LAYERS)
    assert len(asked) == len(examples)
    assert all(source not in sources for source, sources in asked)
    assert seen[id(head.sentence_models)][1] == set(source_of.values())


def test_tokens_are_smoothed_sums_over_groups(head, others):
    trace, sentences = others[0].trace, others[0].sentences
    logits = head.token_sum.logit(
        np.stack(
            [
                head.token_models[name].logit(ensemble._token(name, trace, LAYERS)).astype(np.float64)
                for name in GROUPS
            ],
            axis=1,
        )
    )
    wanted = head.smoother.apply(sigmoid(logits))
    np.testing.assert_allclose(head.tokens(trace, sentences), wanted, rtol=1e-9)


def test_token_probabilities_keep_the_base_rate_although_most_supported_tokens_were_left_out():
    head = ensemble.fit(measured_answers(0, n=40, planted=()), layers=LAYERS)
    examples = measured_answers(1, planted=())
    found = np.concatenate([head.tokens(e.trace, e.sentences) for e in examples])
    assert abs(found.mean() - 0.3) < 0.1  # every fourth supported token alone would say .63


def test_an_answer_with_unsupported_text_scores_higher(head, others):
    scores = np.array([head.response(e.trace, e.sentences) for e in others])
    assert ((scores >= 0) & (scores <= 1)).all()
    assert auroc(np.array([e.label for e in others]), scores) > 0.95


@pytest.mark.parametrize(("n_sentences", "n_tokens"), [(1, 1), (1, 7), (2, 20), (3, 21), (9, 200)])
def test_an_answer_is_read_by_its_worst_sentences_and_tokens(n_sentences, n_tokens):
    random = np.random.default_rng(n_tokens)
    sentences, tokens = random.normal(size=n_sentences), random.normal(size=n_tokens)
    worst, worst_tokens = sorted(sentences, reverse=True), sorted(tokens, reverse=True)
    wanted = [
        worst[0],
        sum(worst[:2]) / len(worst[:2]),
        sum(worst_tokens[:WORST_TOKENS]) / min(WORST_TOKENS, n_tokens),
        sum(tokens) / n_tokens,
    ]
    np.testing.assert_allclose(answer_features(sentences, tokens), wanted, rtol=1e-12, atol=1e-12)


def test_an_answer_without_a_sentence_is_read_by_its_tokens(head, others):
    tokens = np.array([1.0, -3.0, 0.5])
    np.testing.assert_allclose(answer_features(np.zeros(0), tokens), [-0.5, -0.5, -0.5, -0.5])
    assert 0 <= head.response(others[0].trace, ()) <= 1


def test_only_the_layers_in_use_are_read(others):
    two = ensemble.fit(measured_answers(0), layers=(2, 1))
    assert two.layers == (2, 1) and two.keep.layers == (2, 1)
    trace = others[0].trace
    swapped = replace(trace, layers=(2, 1), states=trace.states[::-1], carried=trace.carried[::-1])
    expected = two.sentences(trace, others[0].sentences)
    np.testing.assert_array_equal(two.sentences(swapped, others[0].sentences), expected)


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ({"words": None}, r"Keep\(words=True\)"),
        ({"rank": None}, r"Keep\(extremes=True\)"),
        ({"attention_answer": None}, r"Keep\(attention=True\)"),
        ({"states": None, "layers": ()}, r"Keep\(layers="),
    ],
    ids=["words", "extremes", "attention", "layers"],
)
def test_a_trace_without_a_signal_is_refused_with_what_to_do(head, others, missing, what):
    poor = replace(others[0].trace, **missing)
    for read in (head.tokens, head.sentences, head.judge):
        with pytest.raises(DetectorError, match=what) as caught:
            read(poor, others[0].sentences)
        assert "\n" not in str(caught.value)


def test_the_same_answers_give_the_same_head_and_it_needs_nothing_but_its_keep():
    examples = measured_answers(0, n=12)
    bare = [replace(e, trace=kept(e.trace, KEEP)) for e in examples]
    first, again = (ensemble.fit(some, layers=LAYERS) for some in (examples, bare))
    assert_equal(first.to_parts(), again.to_parts())


def test_a_stored_head_is_equal(head):
    assert_equal(ensemble.from_parts(head.to_parts()).to_parts(), head.to_parts())


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        if isinstance(part, dict):
            assert_equal(part, theirs[name])
        else:
            assert np.array_equal(part, theirs[name]), name


def one_kind(examples, what):
    match what:
        case "answers":  # every answer holds a bad sentence and a good one
            bad = np.array([True, False, False, False])
            tokens = np.repeat(bad, 10)
            return [
                replace(e, sentence_labels=bad, token_labels=tokens, label=True, source_id=str(i))
                for i, e in enumerate(examples)
            ]
        case "sentences":
            return [replace(e, sentence_labels=np.zeros(4, dtype=bool)) for e in examples]
        case "tokens":
            return [replace(e, token_labels=np.ones(40, dtype=bool)) for e in examples]
        case _:
            return [replace(e, source_id="one") for e in examples]


@pytest.mark.parametrize("what", ["answers", "sentences", "tokens", "sources"])
def test_labels_of_one_kind_are_refused_in_one_line(what):
    with pytest.raises(DetectorError) as caught:
        ensemble.fit(one_kind(measured_answers(0, n=12), what), layers=LAYERS)
    assert "\n" not in str(caught.value)
