"""The suite that every method passes, whatever it reads."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from detector.errors import DetectorError
from detector.methods import METHODS, usable
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


EVERYTHING = Keep(words=True, attention=True)


def trace(scorer, answer, passages=PASSAGES, keep=EVERYTHING):
    _, (found,) = scorer.trace(Record(question="Who?", passages=passages, answer=answer), keep)
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


@pytest.mark.parametrize(
    ("lacks", "keep", "told"),
    [
        ("needs_leave_one_out", replace(EVERYTHING, leave_one_out=False), "loo=exact"),
        ("needs_attention", Keep(words=True), "Keep(attention=True)"),
    ],
)
def test_a_method_says_so_when_what_it_needs_is_missing_and_the_others_do_not_mind(tiny, lacks, keep, told):
    found = trace(tiny, ANSWERS["plain"], keep=keep)
    wanting = [name for name in FREE if getattr(METHODS[name], lacks)]
    assert wanting
    for name in FREE:
        if name in wanting:
            with pytest.raises(DetectorError, match=re.escape(told)):
                METHODS[name].score(found)
        else:
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
        words=np.array([[0.0] * 7, [1.0] * 7], dtype=np.float32),
        attention_passages=values(0.6, 0.1, 0.3)[None, None],
        attention_answer=values(0.2, 0.3, 0.3)[None, None],
    )
    for name in ("blend", "gasp", "gap", "jsd_none"):
        grounded, invented = METHODS[name].score(found)
        assert grounded < invented, name
    np.testing.assert_allclose(METHODS["gasp"].score(found), [-(4.9 + 0.6 + 4.0 + 0.5), 0.0], rtol=1e-6)
    np.testing.assert_allclose(METHODS["blend"].score(found), [-0.6 / np.log(2) - 0.75, 1 - 0.25], rtol=1e-6)
    np.testing.assert_allclose(METHODS["perplexity"].score(found), [0.1, 1.0])
    assert METHODS["length"].score(found).sum() == 2


def test_a_method_is_trained_or_has_a_score_and_every_feature_a_direction():
    assert [name for name in METHODS if METHODS[name].score is None] == ["ensemble"]
    assert {sign for method in METHODS.values() for sign in method.features.values()} == {-1, 1}


@pytest.mark.parametrize(
    ("passes", "best", "missing"),
    [
        ((True, True, True), "ensemble", set()),
        ((False, True, True), "blend", {"ensemble"}),
        ((False, False, True), "blend", {"ensemble", "gasp"}),
        ((False, True, False), "gasp", {"ensemble", "blend"}),
        ((False, False, False), "jsd_none", {"ensemble", "blend", "gasp"}),
    ],
)
def test_what_passes_can_serve_comes_best_first(passes, best, missing):
    trained, leave_one_out, attention = passes
    found = usable(trained=trained, leave_one_out=leave_one_out, attention=attention)
    assert found[0] == best and set(METHODS) - set(found) == missing


def test_the_table_of_methods_needs_neither_torch_nor_transformers():
    code = "import sys; import detector.methods; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
