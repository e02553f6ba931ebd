import numpy as np
import pyarrow as pa
import pytest

from jobs.errors import JobError
from jobs.findings import (
    duplicate_rejects,
    explain,
    response_findings,
    response_rows,
    sentence_findings,
    weigh,
)
from jobs.parts import read_part
from jobs.storage import Storage
from jobs.tables import MEASURED_RESPONSES, MEASURED_SENTENCES, REJECTS
from tests.jobs.measured import answer, put_unit


def measured(tmp_path, answers):
    """Responses and sentences of one unit and date."""
    unit = put_unit(Storage(), str(tmp_path), "u", answers)
    tables = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES}
    found = {kind: schema.empty_table() for kind, schema in tables.items()}
    for part in unit["parts"]:
        found[part["table"]] = read_part(Storage(), str(tmp_path), part, tables[part["table"]])
    return found["responses"], found["sentences"]


def find(responses, sentences, scores, threshold=0.5, floor_nats=0.05):
    return sentence_findings(
        responses, sentences, {"gap": np.array(scores)}, "gap", threshold=threshold, floor_nats=floor_nats
    )


def test_each_sentence_carries_its_answers_ids_its_text_and_its_evidence(tmp_path):
    responses, sentences = measured(
        tmp_path,
        [answer("a", [{"max_drop": 0.4}]), answer("b", [{"max_drop": 0.2}, {"max_drop": 0.3}], app=None)],
    )
    rows = find(responses, sentences, [0.1, 0.5, 0.9]).to_pylist()
    assert [row["response_id"] for row in rows] == ["a", "b", "b"]
    assert [row["app"] for row in rows] == ["shop", None, None]
    assert [row["text"] for row in rows] == ["word"] * 3
    assert [row["flagged"] for row in rows] == [False, True, True]  # at the threshold is flagged
    assert [row["label"] for row in rows] == ["not_flagged", "flagged", "flagged"]
    assert {row["evidence_text"] for row in rows} == {"second"}
    assert {(row["evidence_passage_id"], row["evidence_passage_index"]) for row in rows} == {("p1", 1)}
    assert [row["evidence_drop_nats"] for row in rows] == [np.float32(x) for x in (0.4, 0.2, 0.3)]
    assert {(row["name"], row["annotator_kind"]) for row in rows} == {("leadline.ungrounded", "CODE")}


@pytest.mark.parametrize(
    "values",
    [
        {"max_drop": 0.04},
        {"max_drop": -1.0},
        {"max_drop": None, "evidence": None},
        {"max_drop": 0.4, "evidence": None},
    ],
)
def test_a_passage_that_matters_too_little_is_no_evidence(tmp_path, values):
    (row,) = find(*measured(tmp_path, [answer("a", [values])]), [0.0]).to_pylist()
    names = ("evidence_passage_id", "evidence_passage_index", "evidence_drop_nats", "evidence_text")
    assert [row[name] for name in names] == [None] * 4


def test_a_drop_of_exactly_the_floor_is_evidence(tmp_path):
    tables = measured(tmp_path, [answer("a", [{"max_drop": 0.25}])])
    assert find(*tables, [0.0], floor_nats=0.25)["evidence_passage_index"].to_pylist() == [1]


def test_without_stored_text_the_evidence_is_still_named(tmp_path):
    tables = measured(tmp_path, [answer("a", [{"max_drop": 0.4}], stored=False)])
    (row,) = find(*tables, [0.0]).to_pylist()
    assert (row["text"], row["evidence_text"]) == (None, None)
    assert (row["evidence_passage_id"], row["evidence_passage_index"]) == ("p1", 1)


def test_a_response_is_as_bad_as_its_worst_sentence_and_the_first_of_equals_counts(tmp_path):
    responses, sentences = measured(
        tmp_path, [answer("a", [{"max_drop": 0.0}, {"max_drop": 0.4}, {"max_drop": 0.4}]), answer("b", [{}])]
    )
    found = find(responses, sentences, [0.2, 0.7, 0.7, 0.1])
    first, second = response_findings(responses, found, response_rows(responses, sentences)).to_pylist()
    assert (first["n_sentences"], first["n_flagged"], first["flagged"]) == (3, 2, True)
    assert (first["score_max"], first["worst_sentence_index"], first["worst_passage_id"]) == (0.7, 1, "p1")
    assert first["score_mean"] == pytest.approx(1.6 / 3, rel=1e-15)
    assert (second["n_flagged"], second["flagged"], second["worst_passage_id"]) == (0, False, None)


def test_a_response_without_sentences_has_no_scores_and_is_not_flagged(tmp_path):
    responses, sentences = measured(tmp_path, [answer("a", []), answer("b", [{}]), answer("c", [])])
    found = find(responses, sentences, [0.9])
    rows = response_findings(responses, found, response_rows(responses, sentences)).to_pylist()
    assert [row["n_sentences"] for row in rows] == [0, 1, 0]
    assert [row["flagged"] for row in rows] == [False, True, False]
    assert [row["score_max"] for row in rows] == [None, 0.9, None]
    assert [row["worst_sentence_index"] for row in rows] == [None, 0, None]


def test_no_rows_make_empty_tables(tmp_path):
    responses, sentences = MEASURED_RESPONSES.empty_table(), MEASURED_SENTENCES.empty_table()
    found = find(responses, sentences, [])
    answers = response_findings(responses, found, response_rows(responses, sentences))
    assert (found.num_rows, answers.num_rows) == (0, 0)


@pytest.mark.parametrize("kept", [[0], [1], []])
def test_sentences_without_their_response_are_an_error(tmp_path, kept):
    responses, sentences = measured(tmp_path, [answer("a", [{}]), answer("b", [{}])])
    with pytest.raises(JobError, match="without their response"):
        response_rows(responses.take(pa.array(kept, pa.int64())), sentences)


def test_a_duplicate_says_where_the_first_one_is_and_keeps_its_own_place(tmp_path):
    responses, _ = measured(tmp_path, [answer("a", [{}], position=77)])
    table = duplicate_rejects(responses, {0: ("s3://user:secret@bucket/b.jsonl", 12)})
    assert table.schema == REJECTS
    (row,) = table.to_pylist()
    assert (row["response_id"], row["path"], row["position"]) == ("a", "logs/a.jsonl", 77)
    assert row["reason"] == "duplicate"
    assert row["detail"] == "the same response_id was read before: s3://***@bucket/b.jsonl, position 12"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            (0.034, 0.011, None, 3),
            "Removing every passage makes this sentence 0.03 nats per token less likely; "
            "no single passage matters (largest drop 0.01).",
        ),
        (
            (0.5, 0.42, 2, 5),
            "Removing every passage makes this sentence 0.50 nats per token less likely; "
            "passage 3 of 5 matters most (drop 0.42).",
        ),
        (
            (-0.5, None, None, 5),
            "Removing every passage makes this sentence 0.50 nats per token more likely; "
            "passages were not removed one at a time.",
        ),
    ],
)
def test_the_explanation_is_one_plain_sentence_with_numbers(numbers, text):
    assert explain(*numbers) == text


@pytest.mark.parametrize(
    ("flagged", "text"),
    [
        (
            True,
            "Ungrounded with probability 0.85, mostly by where it looks "
            "(attention: +1.20 of log-odds against an average sentence).",
        ),
        (
            False,
            "Ungrounded with probability 0.85, mostly by how likely it finds the words "
            "(likelihood: -2.00 of log-odds against an average sentence).",
        ),
    ],
)
def test_a_verdict_names_the_signals_that_speak_most_for_it(flagged, text):
    assert weigh(0.85, {"states": 0.5, "attention": 1.2, "likelihood": -2.0}, flagged) == text


def test_a_trained_head_that_decides_is_explained_before_the_passages(tmp_path):
    verdicts = [{"ensemble": p, "ensemble_states": 2 * p - 1} for p in (0.9, 0.1)]
    responses, sentences = measured(tmp_path, [answer("a", verdicts)])
    scores = {"ensemble": np.array([0.9, 0.1]), "gap": np.array([0.0, 0.0])}
    found = sentence_findings(responses, sentences, scores, "ensemble", threshold=0.5, floor_nats=0.05)
    first, second = found.to_pylist()
    assert (first["flagged"], second["flagged"]) == (True, False)
    assert (first["score"], first["score_ensemble"]) == (0.9, 0.9)
    assert first["ensemble_states"] == pytest.approx(0.8) and first["ensemble_attention"] == 0.0
    assert first["explanation"].startswith(
        "Ungrounded with probability 0.90, mostly by what the scorer holds"
    )
    assert "Removing every passage" in first["explanation"]
    beside = sentence_findings(responses, sentences, scores, "gap", threshold=0.5, floor_nats=0.05)
    assert beside["explanation"].to_pylist()[0].startswith("Removing every passage")
    assert beside["ensemble_states"].to_pylist() == found["ensemble_states"].to_pylist()


def test_without_a_trained_head_there_is_no_column_for_it(tmp_path):
    found = find(*measured(tmp_path, [answer("a", [{}])]), [0.0])
    assert not [name for name in found.column_names if "ensemble" in name]
