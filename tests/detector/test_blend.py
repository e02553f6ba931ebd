"""The blend of four label-free readings, against obvious loops over one trace."""

import numpy as np
import pytest

from detector import blend
from detector.errors import DetectorError
from detector.record import Record
from detector.trace import Trace

RECORD = Record(
    question="Who built it?",
    passages=["The bridge was built in 1891 by Ada.", "It is green."],
    answer="Ada built it in 1891. It is painted in purple. Yes.",
)


@pytest.fixture(scope="module")
def read(tiny):
    reading, (trace,) = tiny.trace(RECORD, blend.KEEP)
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
    from detector.probe import Keep

    _, (bare,) = tiny.trace(RECORD, Keep(leave_one_out=False))
    for wanting in (blend.score, blend.attention_share, blend.absent_pairs):
        with pytest.raises(DetectorError, match="blend reads"):
            wanting(bare)
