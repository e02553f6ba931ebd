"""Samples of what tools really write (never copied into the repository)."""

import pytest

from jobs.formats import Accepted
from tests.jobs.formats.reading import read, settings, summary

EXPECTED = {
    "deepeval_goldens.json": {"accepted": 15},
    "deepeval_goldens.csv": {"accepted": 15},
    "deepeval_test_run.json": {"no_passages": 1},
    "ragchecker_inputs.json": {"accepted": 2},
    "promptflow_groundedness.jsonl": {"accepted": 2},
    "promptflow_monitoring_bom.jsonl": {"accepted": 5},
    "uptrain_question_document_response.jsonl": {"accepted": 28, "malformed_row": 2},
    "ragas_eval.csv": {"missing_answer": 66},
    "mtrag_responses.jsonl": {"accepted": 9, "no_passages": 1},
    # One row per passage: not folded yet, and nothing of it disappears.
    "open_rag_eval_passages.csv": {"missing_answer": 9, "no_passages": 7},
    "trulens_events_llamaindex.csv": {"accepted": 1},
    "trulens_otel_record_root_span.json": {"no_passages": 1},
    "langfuse_trace_llamaindex.json": {"no_passages": 1},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_row_of_a_real_log_is_accepted_or_counted(shared, name):
    fields = {"passages": "document_text"} if name.startswith("uptrain") else {}
    assert summary(read(shared / "data" / "logs" / name, settings(fields))) == EXPECTED[name]


def test_deepeval_keeps_retrieved_and_ideal_context_apart(shared):
    record = read(shared / "data" / "logs" / "deepeval_goldens.json")[0].record
    assert [passage.text for passage in record.passages] == ["Mountain heights list", "Moutain list"]


def test_mtrag_takes_the_last_turn_and_the_prediction(shared):
    rows = read(shared / "data" / "logs" / "mtrag_responses.jsonl")
    record = rows[7].record
    assert record.answer == "Bill Belichick is the head coach of the New England Patriots."
    assert len(record.passages) == 2 and all(passage.id and passage.score for passage in record.passages)
    ids = [row.record.response_id for row in rows if isinstance(row, Accepted)]
    assert len(set(ids)) == len(ids)


def test_promptflow_documents_keep_their_citation_marks(shared):
    record = read(shared / "data" / "logs" / "promptflow_monitoring_bom.jsonl")[0].record
    assert record.passages[0].id == "[doc1]"


def test_the_labelled_set_is_read_whole(shared):
    assert summary(read(shared / "data" / "ragtruth_qa_train.jsonl", settings(limit=200))) == {
        "accepted": 200
    }
