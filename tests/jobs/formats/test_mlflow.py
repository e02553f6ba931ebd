import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from tests.jobs.formats.reading import read_row, summary
from tests.jobs.formats.span_reading import (
    FERN,
    MOSS,
    check_reading,
    hostile,
    only_record,
    only_reject,
    read_file,
    read_spans,
    texts,
)

NAME = "mlflow"


def span(kind, key, second, inputs, outputs):
    """A span of MLflow 3: every attribute is JSON text."""
    return {
        "trace_id": "AAAA",
        "span_id": key,
        "parent_span_id": None if key == "root" else "root",
        "name": key,
        "start_time_unix_nano": 1790848800000000000 + second * 10**9,
        "end_time_unix_nano": 1790848900000000000,
        "attributes": {
            "mlflow.spanType": json.dumps(kind),
            "mlflow.spanInputs": json.dumps(inputs),
            "mlflow.spanOutputs": json.dumps(outputs),
            **({"mlflow.llm.model": '"gpt-x"'} if kind == "CHAT_MODEL" else {}),
        },
    }


QUESTION = {"question": "Where does moss grow?"}
DOCUMENTS = [
    {"page_content": MOSS, "metadata": {"doc_uri": "a"}, "id": "d1"},
    {"page_content": FERN, "id": "d2"},
]
SPANS = [
    span("CHAIN", "root", 0, QUESTION, "Here."),
    span("RETRIEVER", "find", 1, "moss", DOCUMENTS),
    span("CHAT_MODEL", "ask", 2, {"messages": []}, {"choices": [{"message": {"content": "There."}}]}),
]
ROW = {
    "trace_id": "tr-1",
    "client_request_id": None,
    "state": "OK",
    "request_time": 1790848800000,
    "execution_duration": 5,
    "request": json.dumps(QUESTION),
    "response": '"Here."',
    "trace_metadata": {"mlflow.trace.session": "s"},
    "tags": {"mlflow.traceName": "garden"},
    "spans": SPANS,
    "assessments": [],
}


@pytest.mark.parametrize("spans", [SPANS, json.dumps(SPANS), [json.dumps(s) for s in SPANS]], ids=type)
def test_a_trace_row_is_one_record(tmp_path, spans):
    record = only_record(read_spans(tmp_path, [{**ROW, "spans": spans}], NAME))
    assert (record.question, record.answer) == ("Where does moss grow?", "Here.")
    assert [(passage.text, passage.id) for passage in record.passages] == [(MOSS, "d1"), (FERN, "d2")]
    assert (record.response_id, record.trace_id, record.app) == ("tr-1", "tr-1", "garden")
    assert (record.model, record.retriever) == ("gpt-x", "find")
    assert record.timestamp.year == 2026
    assert record.metadata["mlflow.trace.session"] == "s"


def test_the_data_frame_as_parquet_is_read_alike(tmp_path):
    rows = [{**ROW, "trace_id": f"tr-{i}", "assessments": None} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "traces.parquet")
    outcomes, _ = read_file(tmp_path / "traces.parquet", NAME)
    assert [row.position for row in outcomes] == [0, 1, 2]
    assert [row.record.response_id for row in outcomes] == ["tr-0", "tr-1", "tr-2"]
    assert texts(outcomes[2].record) == [MOSS, FERN]


def test_a_trace_document_with_info_and_data_is_read(tmp_path):
    info = {"trace_id": "tr-1", "request_time": "2026-10-01T10:00:00Z", "request_preview": "Wh..."}
    record = only_record(read_spans(tmp_path, [{"info": info, "data": {"spans": SPANS}}], NAME, "trace.json"))
    assert (record.question, record.answer, record.trace_id) == ("Where does moss grow?", "Here.", "tr-1")


def test_spans_of_mlflow_2_are_read(tmp_path):
    old = {
        "name": "find",
        "context": {"span_id": "b", "trace_id": "x"},
        "parent_id": "a",
        "span_type": "RETRIEVER",
        "inputs": {"query": "moss"},
        "outputs": DOCUMENTS,
    }
    row = {"request_id": "tr-1", "request": "Where?", "response": "Here.", "spans": [old]}
    assert texts(only_record(read_spans(tmp_path, [row], NAME))) == [MOSS, FERN]


def test_without_retriever_it_is_a_reject_and_not_the_context_of_a_call(tmp_path):
    row = {**ROW, "spans": [SPANS[0], SPANS[2]]}
    reject = only_reject(read_spans(tmp_path, [row], NAME))
    assert (reject.reason, reject.response_id, reject.app) == ("no_passages", "tr-1", "garden")


def test_a_labelled_answer_with_spans_of_characters_stays_a_row(tmp_path):
    row = {"request_id": "1", "request": "Q?", "response": "A.", "context": ["P."]}
    row |= {"spans": [{"start": 0, "end": 2}]}
    assert summary([read_row(tmp_path, row)]) == {"accepted": 1}


@given(
    hostile(
        [
            *("trace_id", "request_id", "request", "response", "spans", "info", "data", "tags", "name"),
            *("attributes", "mlflow.spanType", "mlflow.spanOutputs", "span_type", "inputs", "outputs"),
            *("span_id", "parent_id", "start_time", "page_content", "__mlflow_trace__"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
