"""The suite that every method passes, whatever it reads."""

import dataclasses

import numpy as np
import pytest

from detector.errors import DetectorError
from detector.methods import LABEL_FREE, LEAVE_ONE_OUT, METHODS
from detector.probe import Keep
from detector.record import Record
from detector.trace import Trace

PASSAGES = ["The bridge was built in 1891 by Ada.", "Tolls ended in 1950.", "It is green."]
ANSWERS = {
    "plain": "Ada built it in 1891. Tolls ended in 1950.",
    "one token": "a",
    "emoji": "Yes 👩‍👩‍👧! It is 😀 green.",
    "cjk": "橋は1891年に建てられた。緑色です。",
    "combining": "Cafe\u0301 noir. Ne\u0308e.",
    "control tokens": "It <|im_end|><|im_start|>system is green.",
    "html": "<script>alert('x')</script> It is green & old.",
}


FREE = [name for name in METHODS if not METHODS[name].trained]
"""Those that a Trace alone is enough for; the others are read by a bundle's head (test_bundle)."""


def trace(scorer, answer, passages=PASSAGES):
    _, (found,) = scorer.trace(Record(question="Who?", passages=passages, answer=answer))
    return found


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_method_gives_one_finite_score_per_token(tiny, name, answer):
    found = trace(tiny, answer)
    scores = METHODS[name].score(found)
    assert scores.shape == (len(found.token_ids),)
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", FREE)
def test_the_same_record_gives_the_same_scores_whatever_was_read_before(tiny, name):
    first = METHODS[name].score(trace(tiny, ANSWERS["plain"]))
    trace(tiny, ANSWERS["cjk"], ["Something else entirely. " * 9])
    assert np.array_equal(first, METHODS[name].score(trace(tiny, ANSWERS["plain"])))


@pytest.mark.parametrize("name", FREE)
def test_a_method_reads_only_the_trace_fields_it_declares(tiny, name):
    found = trace(tiny, ANSWERS["plain"])
    allowed = METHODS[name].needs | {"token_ids", "pieces"}
    hidden = {f.name: None for f in dataclasses.fields(Trace) if f.name not in allowed}
    expected = METHODS[name].score(found)
    assert np.array_equal(METHODS[name].score(dataclasses.replace(found, **hidden)), expected)


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n].needs & LEAVE_ONE_OUT])
def test_leave_one_out_methods_say_so_when_it_is_missing(tiny, name):
    record = Record(question="Who?", passages=PASSAGES, answer=ANSWERS["plain"])
    _, (found,) = tiny.trace(record, Keep(leave_one_out=False))
    with pytest.raises(DetectorError, match="loo=exact"):
        METHODS[name].score(found)


def hand_made(**changes):
    zeros = np.zeros(2, dtype=np.float32)
    base = Trace(
        token_ids=np.arange(2),
        offsets=np.array([(0, 1), (1, 2)], dtype=np.int32),
        pieces=(),
        logprob=zeros,
        entropy=zeros,
        logprob_no_context=zeros,
        entropy_no_context=zeros,
        jsd_no_context=zeros,
        logprob_without=np.zeros((0, 2), dtype=np.float32),
        jsd_without=np.zeros((0, 2), dtype=np.float32),
        n_context_tokens=0,
        n_prompt_tokens=1,
        n_computed_tokens=3,
    )
    return dataclasses.replace(base, **changes)


def test_a_token_that_needs_its_passages_scores_lower_than_one_that_does_not():
    values = lambda *v: np.array(v, dtype=np.float32)  # noqa: E731
    found = hand_made(
        pieces=("p",),
        logprob=values(-0.1, -1.0),
        logprob_no_context=values(-5.0, -1.0),
        jsd_no_context=values(0.6, 0.0),
        logprob_without=values(-4.1, -1.0)[None],
        jsd_without=values(0.5, 0.0)[None],
    )
    for name in ("gasp", "gap", "jsd_none"):
        grounded, invented = METHODS[name].score(found)
        assert grounded < invented, name
    np.testing.assert_allclose(METHODS["gasp"].score(found), [-(4.9 + 0.6 + 4.0 + 0.5), 0.0], rtol=1e-6)
    np.testing.assert_allclose(METHODS["perplexity"].score(found), [0.1, 1.0])
    assert METHODS["length"].score(found).sum() == 2


def test_what_decides_without_labels_is_one_of_them():
    assert LABEL_FREE in FREE
    assert [name for name in METHODS if METHODS[name].score is None] == ["ensemble"]
