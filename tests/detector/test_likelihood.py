"""Cheap signals per token and per sentence, against loops in float64."""

import dataclasses
import math

import numpy as np
import pytest

from detector.errors import DetectorError
from detector.likelihood import sentence_features, token_features
from detector.probe import Keep
from detector.record import Record
from detector.words import word_features
from tests.detector.states import full_trace
from tests.detector.test_methods import ANSWERS, PASSAGES

SENTENCES = (np.array([0, 1, 2]), np.array([4]), np.arange(5, 23))


def trace_of(n=23):
    return full_trace(np.random.default_rng(0), np.arange(n) % 3 == 0)


def signals(trace, i):
    """The twenty signals of one token."""
    own, alone = float(trace.logprob[i]), float(trace.logprob_no_context[i])
    entropy, entropy_alone = float(trace.entropy[i]), float(trace.entropy_no_context[i])
    top, top_alone = map(float, trace.top_logprob[:, i])
    return [
        *(own, alone, own - alone, float(trace.jsd_no_context[i])),
        *(entropy, entropy_alone, entropy - entropy_alone),
        *(top - own, top_alone - alone, math.log(1 + trace.rank[0, i]), math.log(1 + trace.rank[1, i])),
        *(top, top_alone, *map(float, trace.words[i])),
    ]


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10, 23])
def test_a_tokens_features_are_its_signals_and_their_mean_over_nine_tokens(n):
    trace = trace_of(n)
    found = token_features(trace, trace.words)
    assert found.shape == (n, 40) and found.dtype == np.float32
    for i in range(n):
        around = [signals(trace, j) for j in range(n) if abs(i - j) <= 4]
        mean = [sum(column) / len(around) for column in zip(*around, strict=True)]
        np.testing.assert_allclose(found[i], [*signals(trace, i), *mean], rtol=1e-5, atol=1e-5)


def test_a_sentences_features_are_five_readings_of_each_signal_and_where_it_stands():
    trace = trace_of()
    found = sentence_features(trace, SENTENCES, trace.words)
    assert found.shape == (3, 106) and found.dtype == np.float32
    for row, tokens in zip(found, SENTENCES, strict=True):
        columns = list(zip(*(signals(trace, i) for i in tokens), strict=True))
        means = [sum(c) / len(c) for c in columns]
        deviations = [
            math.sqrt(sum((x - m) ** 2 for x in c) / len(c)) for c, m in zip(columns, means, strict=True)
        ]
        place = [len(tokens), tokens[0] / 23, tokens[0], 23, 3, 50]
        wanted = [
            *(means + [min(c) for c in columns] + [max(c) for c in columns]),
            *(deviations + [c[0] for c in columns] + place),
        ]
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=2e-5)


def test_an_answer_without_a_sentence_has_no_rows_of_the_same_width():
    trace = trace_of()
    assert sentence_features(trace, (), trace.words).shape == (0, 106)


@pytest.mark.parametrize("missing", ["top_logprob", "rank"])
def test_a_trace_without_extremes_is_refused_with_what_to_do(missing):
    trace = trace_of()
    poor = dataclasses.replace(trace, **{missing: None})
    with pytest.raises(DetectorError, match=r"Keep\(extremes=True\)") as caught:
        token_features(poor, trace.words)
    assert "\n" not in str(caught.value)
    with pytest.raises(DetectorError, match="extremes"):
        sentence_features(poor, SENTENCES, trace.words)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_any_answer_of_a_scorer_has_finite_features(tiny, answer):
    keep = Keep(leave_one_out=False, extremes=True)
    _, (trace,) = tiny.trace(Record("Who?", PASSAGES, answer), keep)
    words = word_features(answer, trace.offsets, PASSAGES, "Who?")
    everything = (np.arange(len(trace.token_ids)),)
    assert np.isfinite(token_features(trace, words)).all()
    assert np.isfinite(sentence_features(trace, everything, words)).all()
