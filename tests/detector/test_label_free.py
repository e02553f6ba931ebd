"""The suite that every method without labels passes, and what each of them is."""

from dataclasses import replace

import numpy as np
import pytest

from detector import baselines, blend, gasp, gasp_head, lumina, refind, token_probability
from detector.aggregate import assign_tokens
from detector.errors import DetectorError
from detector.evaluation import auroc
from detector.label_free import LABEL_FREE
from detector.probe import Keep
from detector.record import Passage, Record
from tests.detector.states import full_trace, kept, measured_answers
from tests.detector.test_methods import ANSWERS, PASSAGES

HOSTILE = ANSWERS | {
    "right to left": "הגשר נבנה בשנת 1891. הוא ירוק \u202e1981\u202c.",
    "nothing but marks": "\u0301\u0301 !!! \ufe0f",
    "one word over and over": "no " * 40,
}
FOIL = (Passage("Cats sleep for most of the day."),)


def record(answer):
    return Record("Who?", PASSAGES, answer)


def sentences_of(reading, answer, offsets):
    """Token indices of each sentence that has any."""
    owner = assign_tokens(answer, offsets, reading.sentences)
    members = [np.flatnonzero(owner == i) for i in range(len(reading.sentences))]
    return tuple(tokens for tokens in members if len(tokens))


@pytest.fixture(scope="session")
def read(tiny):
    """An answer's trace with exactly what `keep` asks for, and its sentences; each read once."""
    found = {}

    def of(answer, keep):
        if (answer, keep) not in found:
            reading, (trace,) = tiny.trace(record(answer), keep, foil=FOIL if keep.foil else ())
            found[answer, keep] = trace, sentences_of(reading, answer, trace.offsets)
        return found[answer, keep]

    return of


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", LABEL_FREE)
def test_any_answer_gets_finite_numbers_per_token_and_per_sentence(read, name, answer):
    method = LABEL_FREE[name]
    trace, sentences = read(answer, method.keep)
    tokens, features = method.tokens(trace), method.sentences(trace, sentences)
    assert tokens.shape == (len(trace.token_ids),) and tokens.dtype == np.float32
    assert len(sentences) >= 1
    assert features.shape == (len(sentences), features.shape[1]) and features.shape[1] >= 1
    assert features.dtype == np.float64
    assert np.isfinite(tokens).all() and np.isfinite(features).all()


@pytest.mark.parametrize("name", LABEL_FREE)
def test_the_same_trace_gives_the_same_numbers_whatever_was_read_before(read, name):
    method = LABEL_FREE[name]
    trace, sentences = read(HOSTILE["plain"], method.keep)
    first = method.tokens(trace).copy(), method.sentences(trace, sentences)
    method.sentences(*read(HOSTILE["cjk"], method.keep))
    np.testing.assert_array_equal(method.tokens(trace), first[0])
    np.testing.assert_array_equal(method.sentences(trace, sentences), first[1])


@pytest.mark.parametrize("name", [name for name in LABEL_FREE if not LABEL_FREE[name].keep.foil])
def test_an_answer_scores_alike_alone_and_beside_others(tiny, read, name):
    method = LABEL_FREE[name]
    answers = [HOSTILE["plain"], HOSTILE["cjk"], HOSTILE["one token"], HOSTILE["plain"] + " It is green."]
    together = tiny.trace_together([record(answer) for answer in answers], method.keep)
    for answer, (_, (trace,)) in zip(answers, together, strict=True):
        alone, sentences = read(answer, method.keep)
        np.testing.assert_allclose(method.tokens(trace), method.tokens(alone), rtol=1e-3, atol=1e-4)
        ours, theirs = (method.sentences(some, sentences) for some in (trace, alone))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LABEL_FREE)
def test_an_answer_may_have_no_sentence_or_one_of_one_token(read, name):
    method = LABEL_FREE[name]
    trace, sentences = read(HOSTILE["plain"], method.keep)
    width = method.sentences(trace, sentences).shape[1]
    assert method.sentences(trace, ()).shape == (0, width)
    single = method.sentences(trace, (np.array([3]),))
    assert single.shape == (1, width) and np.isfinite(single).all()


@pytest.mark.parametrize("name", LABEL_FREE)
def test_a_sentence_is_scored_by_its_own_tokens_alone(read, name):
    method = LABEL_FREE[name]
    trace, sentences = read(HOSTILE["plain"], method.keep)
    assert len(sentences) == 2
    together = method.sentences(trace, sentences)
    for i, tokens in enumerate(sentences):
        np.testing.assert_allclose(method.sentences(trace, (tokens,))[0], together[i], rtol=1e-12)


@pytest.mark.parametrize("name", LABEL_FREE)
def test_a_method_needs_nothing_that_its_keep_does_not_ask_for(name):
    method, (example,) = LABEL_FREE[name], measured_answers(0, n=1)
    bare = kept(example.trace, method.keep)
    np.testing.assert_array_equal(method.tokens(bare), method.tokens(example.trace))
    ours, theirs = (method.sentences(some, example.sentences) for some in (bare, example.trace))
    np.testing.assert_array_equal(ours, theirs)


POOREST = Keep(leave_one_out=False)


@pytest.mark.parametrize("name", [name for name in LABEL_FREE if LABEL_FREE[name].keep != POOREST])
def test_a_trace_that_lacks_what_is_needed_is_refused_in_one_line(name):
    method, (example,) = LABEL_FREE[name], measured_answers(0, n=1)
    poor = kept(example.trace, POOREST)
    with pytest.raises(DetectorError) as caught:
        method.tokens(poor)
        method.sentences(poor, example.sentences)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LABEL_FREE)
def test_an_answer_whose_passages_could_not_be_taken_away_is_scored(name):
    labels = np.arange(12) % 2 == 0
    trace = full_trace(np.random.default_rng(0), labels)
    none = np.zeros((0, 12), dtype=np.float32)
    trace = replace(trace, pieces=(), logprob_without=none, jsd_without=none)
    method = LABEL_FREE[name]
    assert np.isfinite(method.tokens(trace)).all()
    assert np.isfinite(method.sentences(trace, (np.arange(12),))).all()


@pytest.mark.parametrize("name", [name for name in LABEL_FREE if name != "length"])
def test_what_rests_on_nothing_scores_higher(name):
    """Unsupported tokens are less likely, react less to losing passages, and stand in none of them."""
    examples, method = measured_answers(0), LABEL_FREE[name]
    tokens = np.concatenate([method.tokens(e.trace) for e in examples])
    assert auroc(np.concatenate([e.token_labels for e in examples]), tokens) > 0.8
    features = np.concatenate([method.sentences(e.trace, e.sentences) for e in examples])
    labels = np.concatenate([e.sentence_labels for e in examples])
    spread = features.std(axis=0)
    varying = features[:, spread > 1e-9]  # four sentences of ten tokens: lengths tell nothing
    assert auroc(labels, ((varying - varying.mean(axis=0)) / spread[spread > 1e-9]).sum(axis=1)) > 0.95
    for column in varying.T:
        assert auroc(labels, column) > 0.8


def test_a_longer_sentence_scores_higher_by_length():
    trace = full_trace(np.random.default_rng(0), np.zeros(9, dtype=bool))
    found = LABEL_FREE["length"].sentences(trace, (np.array([0]), np.arange(1, 9)))
    np.testing.assert_array_equal(found, [[1], [8]])
    np.testing.assert_array_equal(LABEL_FREE["length"].tokens(trace), np.ones(9))


def mean(tokens):
    def sentences(trace, members):
        values = [float(x) for x in tokens(trace)]
        return [[sum(values[i] for i in rows) / len(rows)] for rows in members]

    return sentences


def negated(names):
    return lambda trace, members: -gasp_head.features(trace, members, names)


WANTED = {
    "blend": (blend.score, blend.features),
    "gap": (gasp.score_gap, mean(gasp.score_gap)),
    "jsd_none": (gasp.score_jsd_none, mean(gasp.score_jsd_none)),
    "gasp_economical": (
        lambda trace: -(trace.logprob - trace.logprob_no_context) - trace.jsd_no_context,
        negated(("gap", "jsd_none")),
    ),
    "gasp": (gasp.score, negated(("gap", "jsd_none", "max_drop", "max_jsd"))),
    "gasp_top2": (gasp.score_top2, negated(("gap", "jsd_none", "top2_drop", "top2_jsd"))),
    "gasp_mean": (gasp.score_mean, negated(("gap", "jsd_none", "mean_drop", "mean_jsd"))),
    "refind": (refind.score, mean(lambda trace: 1 / (1 + np.exp(-refind.csr(trace))))),
    "token_probability_min": (
        token_probability.score,
        lambda trace, members: [[-np.exp(float(trace.logprob[rows].min()))] for rows in members],
    ),
    "lumina": (lambda trace: lumina.score(trace.mmd_foil), mean(lambda trace: -trace.mmd_foil)),
    "perplexity": (baselines.score_perplexity, mean(lambda trace: -trace.logprob)),
    "length": (baselines.score_length, lambda _, members: [[len(rows)] for rows in members]),
    "overlap": (lambda trace: trace.words[:, 0], mean(lambda trace: trace.words[:, 0])),
}


def test_every_method_is_the_one_that_its_name_says():
    (example,) = measured_answers(0, n=1)
    sentences = (*example.sentences, np.array([5, 17, 30]))
    assert set(LABEL_FREE) == set(WANTED)
    for name, (tokens, features) in WANTED.items():
        method = LABEL_FREE[name]
        np.testing.assert_allclose(method.tokens(example.trace), tokens(example.trace), rtol=1e-5)
        found, wanted = method.sentences(example.trace, sentences), features(example.trace, sentences)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7, err_msg=name)


def test_what_is_cheap_stays_cheap():
    """Who asks for leave-one-out passes, and who for a foreign one."""
    assert {name for name, m in LABEL_FREE.items() if m.keep.leave_one_out} == {
        "gasp",
        "gasp_top2",
        "gasp_mean",
    }
    assert {name for name, m in LABEL_FREE.items() if m.keep.foil} == {"lumina"}
    assert {name for name, m in LABEL_FREE.items() if m.keep.attention} == {"blend"}
    assert not any(m.keep.layers for m in LABEL_FREE.values())
