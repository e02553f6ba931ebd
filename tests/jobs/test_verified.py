"""Verifiers beside the methods, as real tiny encoders on labelled answers."""

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from detector import Scorer
from detector.errors import RecordRejected, RejectReason
from detector.heads import Labelled
from detector.record import Record
from detector.verifiers import NLIVerifier, TokenClassifier
from jobs.config import make_config
from jobs.errors import ConfigError
from jobs.labelled import LabelledRecord, label
from jobs.training import compare
from jobs.verified import check, verify
from tests.detector.test_verifiers import NLI, save
from tests.jobs.test_training import labelled_rows, options
from tests.runs import write_rows

ANSWER = "Ada built it.  It is green."


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    nli = save(folder / "nli", "bert", AutoModelForSequenceClassification, NLI)
    tokens = save(folder / "tokens", "bert", AutoModelForTokenClassification, {0: "LABEL_0", 1: "LABEL_1"})
    return f"nli:{nli}", f"tokens:{tokens}"


@pytest.fixture(scope="module")
def answer():
    record = Record("Who?", ["Ada built the bridge.", "It is green."], ANSWER)
    return LabelledRecord(record, ((15, 27),), "s", "m", "QA", "en", "good")


@pytest.fixture(scope="module")
def example(tiny_scorer_dir, answer) -> Labelled:
    scorer = Scorer.load(str(tiny_scorer_dir))
    _, (trace,) = scorer.trace(answer.record)
    return label(answer, trace, scorer)


def test_nli_scores_are_those_of_the_sentence_and_its_tokens_share_them(encoders, answer, example):
    tokens, sentences, own = verify(encoders[0], [example], [answer], make_config({}), print)([])(example)
    verifier = NLIVerifier.load(encoders[0].partition(":")[2])
    assert sentences.tolist() == verifier.sentences(answer.record, [(0, 13), (15, 27)]).tolist()
    for members, score in zip(example.sentences, sentences, strict=True):
        assert (tokens[members] == score).all()
    assert own is None


def test_token_scores_land_on_the_scorers_tokens_by_character(encoders, answer, example):
    tokens, sentences, _ = verify(encoders[1], [example], [answer], make_config({}), print)([])(example)
    verifier = TokenClassifier.load(encoders[1].partition(":")[2])
    places, chances = verifier.tokens(answer.record)
    for (start, end), score in zip(example.trace.offsets.tolist(), tokens, strict=True):
        inside = [
            c for (a, b), c in zip(places.tolist(), chances.tolist(), strict=True) if a < end and b > start
        ]
        assert score == pytest.approx(max(inside, default=0.0))
    assert len(sentences) == 2 and ((sentences >= 0) & (sentences <= 1)).all()


def test_verifiers_stand_in_the_tables_beside_the_methods(encoders, tmp_path, tiny_scorer_dir):
    log = write_rows(tmp_path / "labelled.jsonl", labelled_rows())
    config = make_config({"scorer": {"name": str(tiny_scorer_dir)}})
    text = compare([str(log)], None, config, options(tmp_path, "overlap"), "overlap", None, encoders, print)
    assert all(encoder in text for encoder in encoders)


@pytest.mark.parametrize("verifier", ["model", "nli:", "bert:model"])
def test_a_verifier_names_its_kind(verifier):
    with pytest.raises(ConfigError, match="write it as nli:MODEL or tokens:MODEL"):
        check([verifier])


def test_an_answer_that_cannot_be_read_ends_the_comparison(encoders, answer, example, monkeypatch):
    def reject(*_):
        raise RecordRejected(RejectReason.OVER_WINDOW, "too long")

    monkeypatch.setattr(NLIVerifier, "sentences", reject)
    with pytest.raises(ConfigError, match="over_window: too long"):
        verify(encoders[0], [example], [answer], make_config({}), print)


def test_scores_are_the_same_in_every_fold(encoders, answer, example):
    fit = verify(encoders[0], [example], [answer], make_config({}), print)
    first, again = fit([])(example), fit([example])(example)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
