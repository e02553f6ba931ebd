"""Four statistics of a sentence's tokens, and the regression on them."""

import numpy as np
import pytest

from detector import token_probability
from detector.errors import DetectorError
from detector.heads import Labelled
from detector.probe import Keep
from detector.record import Record
from tests.detector.test_methods import ANSWERS, PASSAGES, hand_made

EXTREMES = Keep(leave_one_out=False, extremes=True)


def read(own, top, bottom):
    both = lambda v: np.log(np.array([v, [0.5] * len(v)], dtype=np.float64))  # noqa: E731
    return hand_made(
        token_ids=np.arange(len(own)),
        logprob=np.log(np.array(own)),
        top_logprob=both(top),
        bottom_logprob=both(bottom),
    )


def labelled(rng, n=40):
    """Answers whose even tokens are improbable and unsupported."""
    examples = []
    for index in range(n):
        own = np.where(np.arange(6) % 2 == 0, rng.uniform(0.05, 0.5, 6), rng.uniform(0.4, 0.9, 6))
        trace = read(own, np.full(6, 0.95), np.full(6, 1e-6))
        sentences = (np.array([0, 2, 4]), np.array([1, 3, 5]))
        truth = np.array([True, False])
        examples.append(Labelled(trace, sentences, np.arange(6) % 2 == 0, truth, True, str(index)))
    return examples


def test_features_are_those_of_the_paper():
    found = read([0.5, 0.1, 0.8], [0.6, 0.7, 0.8], [0.01, 0.2, 0.001])
    got = token_probability.features(found, [np.array([0, 1, 2]), np.array([2])])
    np.testing.assert_allclose(got[0], [0.1, 1.4 / 3, 0.6, 0.5])
    np.testing.assert_allclose(got[1], [0.8, 0.8, 0.0, 0.799], atol=1e-12)


def test_features_read_the_distribution_that_predicts_the_token(tiny):
    import torch

    record = Record(question="Who?", passages=PASSAGES, answer="Ada built it in 1891.")
    reading, (found,) = tiny.trace(record, EXTREMES)
    prompt, answer = reading.windows[0].full, reading.answer_ids
    with torch.inference_mode():
        logits = tiny.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    p = torch.softmax(logits[len(prompt) - 1 : -1], dim=-1)
    own = p[torch.arange(len(answer)), torch.tensor(answer)]
    top, bottom = p.amax(-1), p.amin(-1)
    wanted = [own.min(), own.mean(), (top - own).max(), (top - bottom).min()]
    got = token_probability.features(found, [np.arange(len(answer))])
    np.testing.assert_allclose(got[0], [float(x) for x in wanted], atol=1e-5)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_any_answer_has_finite_features_and_token_scores(tiny, answer):
    _, (found,) = tiny.trace(Record(question="Who?", passages=PASSAGES, answer=answer), EXTREMES)
    everything = [np.arange(len(found.token_ids))]
    features = token_probability.features(found, everything)
    assert features.shape == (1, 4) and ((features >= 0) & (features <= 1)).all()
    scores = token_probability.score(found)
    assert scores.shape == found.token_ids.shape and scores.dtype == np.float32
    np.testing.assert_allclose(scores, 1 - np.exp(found.logprob.astype(np.float64)), atol=1e-6)


def test_a_trace_without_extremes_is_refused_with_what_to_do():
    with pytest.raises(DetectorError, match="extremes"):
        token_probability.features(hand_made(), [np.array([0])])


def test_the_head_learns_that_improbable_sentences_are_unsupported():
    examples = labelled(np.random.default_rng(0))
    head = token_probability.fit(examples)
    for example in examples[:5]:
        improbable, probable = head.sentences(example.trace, example.sentences)
        assert 0 < probable < 0.5 < improbable < 1
        tokens = head.tokens(example.trace, example.sentences)
        np.testing.assert_array_equal(tokens, [improbable, probable] * 3)


def test_a_stored_head_is_equal_and_fitting_again_gives_the_same():
    examples = labelled(np.random.default_rng(0))
    first, again = token_probability.fit(examples), token_probability.fit(examples, seed=9)
    stored = token_probability.from_parts(first.to_parts())
    for head in (again, stored):
        np.testing.assert_array_equal(
            head.sentences(examples[0].trace, examples[0].sentences),
            first.sentences(examples[0].trace, examples[0].sentences),
        )


def test_a_head_reads_an_answer_without_sentences():
    head = token_probability.fit(labelled(np.random.default_rng(0)))
    trace = labelled(np.random.default_rng(1), 1)[0].trace
    assert head.sentences(trace, ()).shape == (0,)
    np.testing.assert_array_equal(head.tokens(trace, ()), np.zeros(6))


def test_labels_of_one_kind_are_refused():
    import dataclasses

    examples = [
        dataclasses.replace(e, sentence_labels=np.array([True, True]))
        for e in labelled(np.random.default_rng(0), 3)
    ]
    with pytest.raises(DetectorError, match="one kind"):
        token_probability.fit(examples)
