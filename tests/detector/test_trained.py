"""The suite that every trained head passes, whatever it learns from."""

from dataclasses import replace

import numpy as np
import pytest

from detector import head_parts
from detector.errors import DetectorError
from detector.evaluation import auroc
from detector.gasp_head import FEATURE_SETS, Trees
from detector.logistic import Logistic
from detector.probe import Keep
from detector.trained import TRAINED
from tests.detector.states import TINY_BLOCKS, TINY_WIDTH, kept, measured_answers
from tests.detector.test_label_free import HOSTILE, read, record

__all__ = ["read"]  # a fixture

READINGS = ("tokens", "sentences")


def keep_of(name):
    return TRAINED[name].keep(TINY_BLOCKS)


def learned_from(name, seed=0, n=24):
    """Labelled answers that hold what the method's keep asks for and nothing else."""
    return [replace(e, trace=kept(e.trace, keep_of(name))) for e in measured_answers(seed, n=n)]


@pytest.fixture(scope="module")
def fitted():
    """Each head, fitted once."""
    heads = {}

    def of(name):
        if name not in heads:
            heads[name] = TRAINED[name].fit(learned_from(name), TINY_BLOCKS, 0)
        return heads[name]

    return of


def scores(head, trace, sentences):
    return [getattr(head, reading)(trace, sentences) for reading in READINGS]


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", TRAINED)
def test_any_answer_gets_a_probability_per_token_and_per_sentence(read, fitted, name, answer):
    trace, sentences = read(answer, keep_of(name))
    tokens, found = scores(fitted(name), trace, sentences)
    assert tokens.shape == (len(trace.token_ids),) and found.shape == (len(sentences),)
    for values in (tokens, found):
        assert values.dtype == np.float64
        assert ((values >= 0) & (values <= 1)).all()  # which no NaN is


@pytest.mark.parametrize("name", TRAINED)
def test_what_rests_on_nothing_scores_higher(fitted, name):
    others = learned_from(name, seed=1)
    tokens, found = zip(*(scores(fitted(name), e.trace, e.sentences) for e in others), strict=True)
    assert auroc(np.concatenate([e.token_labels for e in others]), np.concatenate(tokens)) > 0.9
    assert auroc(np.concatenate([e.sentence_labels for e in others]), np.concatenate(found)) > 0.9


@pytest.mark.parametrize("name", TRAINED)
def test_the_same_trace_gives_the_same_scores_whatever_was_read_before(read, fitted, name):
    trace, sentences = read(HOSTILE["plain"], keep_of(name))
    first = scores(fitted(name), trace, sentences)
    scores(fitted(name), *read(HOSTILE["cjk"], keep_of(name)))
    for ours, theirs in zip(scores(fitted(name), trace, sentences), first, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", TRAINED)
def test_an_answer_scores_alike_alone_and_beside_others(tiny, read, fitted, name):
    answers = [HOSTILE["plain"], HOSTILE["cjk"], HOSTILE["one token"], HOSTILE["plain"] + " It is green."]
    together = tiny.trace_together([record(answer) for answer in answers], keep_of(name))
    for answer, (_, (trace,)) in zip(answers, together, strict=True):
        alone, sentences = read(answer, keep_of(name))
        ours, theirs = (scores(fitted(name), some, sentences) for some in (trace, alone))
        for mine, yours in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, yours, atol=1e-3)


@pytest.mark.parametrize("name", TRAINED)
def test_an_answer_may_have_no_sentence_or_one_of_one_token(read, fitted, name):
    trace, _ = read(HOSTILE["plain"], keep_of(name))
    for sentences in ((), (np.array([3]),)):
        tokens, found = scores(fitted(name), trace, sentences)
        assert tokens.shape == (len(trace.token_ids),) and found.shape == (len(sentences),)
        assert all(((values >= 0) & (values <= 1)).all() for values in (tokens, found))


@pytest.mark.parametrize("name", TRAINED)
def test_stored_parts_make_an_equal_head(read, fitted, name):
    """Equal before anything is rounded, and next to equal as a bundle rounds it (to float32)."""
    parts = fitted(name).to_parts()
    exact, rounded = TRAINED[name].read(parts), TRAINED[name].read(head_parts.settle(parts))
    readings = [read(answer, keep_of(name)) for answer in HOSTILE.values()]
    for trace, sentences in [*readings, *((e.trace, e.sentences) for e in learned_from(name, 1, n=3))]:
        expected = scores(fitted(name), trace, sentences)
        for ours, theirs in zip(scores(exact, trace, sentences), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(scores(rounded, trace, sentences), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("name", TRAINED)
def test_fitting_again_gives_the_same_head(fitted, name):
    again = TRAINED[name].fit(learned_from(name), TINY_BLOCKS, 0)
    assert_equal(again.to_parts(), fitted(name).to_parts())


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        if isinstance(part, dict):
            assert_equal(part, theirs[name])
        else:
            assert np.array_equal(part, theirs[name]), name


POOREST = Keep(leave_one_out=False)


@pytest.mark.parametrize("name", [name for name in TRAINED if keep_of(name) != POOREST])
def test_a_trace_that_lacks_what_is_needed_is_refused_in_one_line(fitted, name):
    (example,) = measured_answers(1, n=1)
    for reading in READINGS:
        with pytest.raises(DetectorError) as caught:
            getattr(fitted(name), reading)(kept(example.trace, POOREST), example.sentences)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [False, True], ids=["all supported", "all unsupported"])
@pytest.mark.parametrize("name", TRAINED)
def test_labels_of_one_kind_are_refused_in_one_line(name, kind):
    same = [
        replace(e, token_labels=np.full(40, kind), sentence_labels=np.full(4, kind), label=kind)
        for e in learned_from(name, n=12)
    ]
    with pytest.raises(DetectorError) as caught:
        TRAINED[name].fit(same, TINY_BLOCKS, 0)
    assert "\n" not in str(caught.value)


def test_every_keep_can_be_measured_whatever_the_scorers_depth():
    for n_layers in (1, 2, 30, 32):
        for name, method in TRAINED.items():
            keep = method.keep(n_layers)
            assert set(keep.layers) <= set(range(1, n_layers + 1)), name
            assert not keep.carried or keep.layers, name


@pytest.mark.parametrize(
    ("name", "layers", "smooth"),
    [
        ("saplma", (30,), False),
        ("saplma_smoothed", (30,), True),
        ("saplma_middle", (20,), True),
        ("cortex", (30,), True),
        ("cortex_raw", (30,), False),
        ("cortex_middle", (20,), True),
        ("ensemble", (16, 18, 20), True),
    ],
)
def test_heads_of_states_read_the_layers_of_their_names(fitted, name, layers, smooth):
    assert TRAINED[name].keep(30).layers == layers
    head = fitted(name)
    assert keep_of(name).layers == (head.layers if name == "ensemble" else (head.layer,))
    assert (head.smoother.p_stay is not None) == smooth
    width = 2 * TINY_WIDTH if name.startswith("cortex") else TINY_WIDTH
    assert name == "ensemble" or head.mlp.weights[0].shape[0] == width


@pytest.mark.parametrize(
    ("name", "features", "form"),
    [
        ("gasp_two_pass", "two-pass", Trees),
        ("gasp_trees", "gasp", Trees),
        ("gasp_base", "base", Trees),
        ("gasp_signed", "signed", Trees),
        ("gasp_logistic", "base", Logistic),
    ],
)
def test_forms_of_gasp_have_the_features_of_their_names(fitted, name, features, form):
    head = fitted(name)
    assert head.names == FEATURE_SETS[features] and type(head.model) is form


def test_only_forms_of_gasp_read_leave_one_out_passes():
    assert {name for name in TRAINED if keep_of(name).leave_one_out} == {
        *("gasp_trees", "gasp_base", "gasp_signed", "gasp_logistic")
    }
