"""The blend of four label-free readings, against obvious loops over one trace."""

import numpy as np
import pytest

from detector import blend
from detector.aggregate import sentence_tokens
from detector.calibration import FEATURES, Moments, score
from detector.errors import DetectorError
from detector.label_free import LABEL_FREE
from detector.methods import METHODS
from detector.probe import Keep
from detector.record import Record
from detector.trace import Trace

RECORD = Record(
    question="Who built it?",
    passages=["The bridge was built in 1891 by Ada.", "It is green."],
    answer="Ada built it in 1891. It is painted in purple. Yes.",
)


@pytest.fixture(scope="module")
def read(tiny):
    reading, (trace,) = tiny.trace(RECORD, LABEL_FREE["blend"].keep)
    return reading, trace


def members(reading):
    starts = [start for start, _ in reading.offsets]
    return [
        np.array([i for i, at in enumerate(starts) if start <= at < end]) for start, end in reading.sentences
    ]


def test_attention_share_is_the_mean_over_heads_of_passages_against_passages_and_answer(read):
    trace: Trace = read[1]
    n_layers, n_heads, n_rows = trace.attention_passages.shape
    expected = np.zeros(n_rows - 1)
    for layer in range(n_layers):
        for head in range(n_heads):
            for i in range(n_rows - 1):
                p = float(trace.attention_passages[layer, head, i])
                a = float(trace.attention_answer[layer, head, i])
                expected[i] += p / (p + a) / (n_layers * n_heads)
    np.testing.assert_allclose(blend.attention_share(trace), expected, atol=1e-6)


def test_each_reading_grows_as_grounding_falls(read):
    reading, trace = read
    sentences = members(reading)
    found = blend.features(trace, sentences)
    for row, tokens in zip(found, sentences, strict=True):
        assert row[0] == pytest.approx(-np.mean(trace.jsd_no_context[tokens]), abs=1e-6)
        assert row[1] == pytest.approx(np.mean(trace.words[tokens, 1]), abs=1e-6)
        assert row[2] == pytest.approx(-np.mean(blend.attention_share(trace)[tokens]), abs=1e-6)
        assert row[3] == pytest.approx(np.log(len(tokens)))
    assert found[1, 1] > found[0, 1], "more word pairs of the invented sentence are absent"


def test_no_sentence_gives_no_row(read):
    assert blend.features(read[1], []).shape == (0, 4)


def test_a_trace_without_attention_or_words_is_refused_in_one_line(tiny):
    _, (bare,) = tiny.trace(RECORD, Keep(leave_one_out=False))
    for wanting in (blend.score, blend.attention_share, blend.absent_pairs):
        with pytest.raises(DetectorError, match="blend reads"):
            wanting(bare)


def test_an_audit_adds_up_what_evaluate_does(tiny):
    """One definition: an audit's measured features, standardised with the sample deviation of its run."""
    answers = [RECORD.answer, "Ada did, in 1891. It is green. No.", "Nobody knows who built that thing, 橋."]
    records = [Record(RECORD.question, RECORD.passages, answer) for answer in answers]
    rows, sentences = [], []
    for record in records:
        reading, (trace,) = tiny.trace(record, LABEL_FREE["blend"].keep)
        rows.append(blend.features(trace, list(sentence_tokens(reading, record.answer).values())))
        sentences += tiny.measure(record, leave_one_out=False).sentences
    by_hand = np.concatenate(rows)
    measured = {
        "jsd_none": [s.features.jsd_none for s in sentences],
        "absent_pairs": [s.features.absent_pairs for s in sentences],
        "attention_share": [s.features.attention_share for s in sentences],
        "log_tokens": [s.log_tokens for s in sentences],
    }
    assert list(METHODS["blend"].features) == list(measured) and set(measured) <= set(FEATURES)
    features = {name: np.array(values) for name, values in measured.items()}
    signed = np.stack([sign * features[n] for n, sign in METHODS["blend"].features.items()], axis=1)
    np.testing.assert_allclose(signed, by_hand, atol=1e-6)
    scales = {name: Moments.of(values).scale() for name, values in features.items()}
    expected = ((by_hand - by_hand.mean(axis=0)) / by_hand.std(axis=0, ddof=1)).sum(axis=1)
    np.testing.assert_allclose(score(features, METHODS["blend"], scales), expected, atol=1e-4)
