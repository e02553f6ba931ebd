import csv
import json

import pytest
from hypothesis import given

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

NAME = "trulens"
AI = "ai.observability."


def event(kind, key, parent, second, record="rec-1", **attributes):
    return {
        "event_id": key,
        "record": {"name": f"app.{key}", "kind": 1, "parent_span_id": parent},
        "record_type": "SPAN",
        "record_attributes": {
            f"{AI}span_type": kind,
            f"{AI}record_id": record,
            f"{AI}app_name": "garden",
            f"{AI}app_version": "v2",
            **{AI + name.replace("__", "."): value for name, value in attributes.items()},
        },
        "resource_attributes": {"service.name": "trulens"},
        "start_timestamp": f"2026-10-01 10:00:{second:02}.000000",
        "timestamp": f"2026-10-01 10:01:{second:02}.000000",
        "trace": {"trace_id": "7", "span_id": key, "parent_id": parent},
    }


ROOT = event(
    "record_root", "a", "", 0, record_root__input="Where does moss grow?", record_root__output="Here."
)
RETRIEVAL = event("retrieval", "b", "a", 1, retrieval__retrieved_contexts=[MOSS, FERN])
GENERATION = event("generation", "c", "a", 2, call__return="Here.", cost__model="gpt-x")
LOGGED = [ROOT, RETRIEVAL, GENERATION]


@pytest.mark.parametrize("write", [dict, json.dumps, repr], ids=["object", "json", "repr"])
def test_events_of_one_record_are_one_record(tmp_path, write):
    rows = [{**row, "record_attributes": write(row["record_attributes"])} for row in LOGGED]
    record = only_record(read_spans(tmp_path, rows, NAME))
    assert (record.question, record.answer) == ("Where does moss grow?", "Here.")
    assert texts(record) == [MOSS, FERN]
    assert (record.response_id, record.trace_id, record.span_id) == ("rec-1", "7", "a")
    assert (record.app, record.model, record.retriever) == ("garden", "gpt-x", "app.b")
    assert record.metadata["app_version"] == "v2"


def test_a_data_frame_saved_as_csv_is_read(tmp_path):
    with (tmp_path / "events.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, LOGGED[0])
        writer.writeheader()
        writer.writerows(LOGGED)
    assert texts(only_record(read_file(tmp_path / "events.csv", NAME))) == [MOSS, FERN]


def test_two_records_of_one_trace_stay_two(tmp_path):
    second = [event("record_root", "x", "", 3, "rec-2", record_root__input="Q?", record_root__output="B.")]
    second.append(event("retrieval", "y", "x", 4, "rec-2", retrieval__retrieved_contexts=[FERN]))
    rows, counts = read_spans(tmp_path, [*LOGGED, *second], NAME)
    assert [(row.record.response_id, row.record.answer) for row in rows] == [
        ("rec-1", "Here."),
        ("rec-2", "B."),
    ]
    assert counts["traces"] == 2


def test_evaluations_of_a_record_are_ignored(tmp_path):
    evaluation = event("eval_root", "e", "", 9, call__return=0.5, record_root__output="0.5")
    assert only_record(read_spans(tmp_path, [*LOGGED, evaluation], NAME)).answer == "Here."


def test_the_real_events_are_one_record(shared):
    record = only_record(read_file(shared / "data" / "logs" / "trulens_events_llamaindex.csv", NAME))
    assert record.question == "What is multi-headed attention?"
    assert len(record.passages) == 3
    assert record.app == "Simple RAG"


@pytest.mark.parametrize(
    ("part", "reason"),
    [("record_root", "no_passages"), ("retrieval", "missing_answer"), ("generation", "no_passages")],
)
def test_each_real_span_alone_is_a_reject_and_together_they_are_a_record(shared, tmp_path, part, reason):
    logs = shared / "data" / "logs"
    reject = only_reject(read_file(logs / f"trulens_otel_{part}_span.json", NAME))
    assert reject.reason == reason
    parts = ("generation", "retrieval", "record_root")
    rows = [json.loads((logs / f"trulens_otel_{name}_span.json").read_text()) for name in parts]
    record = only_record(read_spans(tmp_path, rows, NAME))
    assert (len(record.passages), record.app, record.response_id) == (4, "coffee_rag", reject.response_id)


@given(
    hostile(
        [
            *("record_attributes", "record_type", "event_id", "record", "trace", "start_timestamp"),
            *(AI + "span_type", AI + "record_id", AI + "record_root.output", AI + "call.return"),
            *(AI + "retrieval.retrieved_contexts", "trace_id", "span_id", "parent_id", "name"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
