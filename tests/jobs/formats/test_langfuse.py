import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from jobs.formats import Accepted, read_unit
from jobs.formats.langfuse import holds_documents
from tests.jobs.formats.reading import STORAGE, settings, units_of
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

NAME = "langfuse"


def observation(kind, key, parent="root", second=0, trace="t1", **more):
    return {
        "id": key,
        "trace_id": trace,
        "parent_observation_id": None if key == "root" else parent,
        "type": kind,
        "name": key,
        "start_time": f"2026-10-01 10:00:{second:02}.000000",
        "end_time": f"2026-10-01 10:01:{second:02}.000000",
        "updated_at": "2026-10-01 10:02:00.000000",
        "environment": "production",
        "trace_name": "garden",
        "provided_model_name": "",
        "input": "",
        "output": "",
        "prompt_version": None,
    } | more


def lang_chain(*texts):
    return json.dumps([{"page_content": text, "metadata": {"source": "a.pdf"}} for text in texts])


ROOT = observation(
    "SPAN", "root", input='{"question": "Where does moss grow?"}', output='{"answer": "In the north."}'
)
RETRIEVER = observation("RETRIEVER", "r", second=1, input="moss", output=lang_chain(MOSS, FERN))
GENERATION = observation(
    "GENERATION",
    "g",
    second=2,
    provided_model_name="gpt-x",
    prompt_version=3,
    input=json.dumps([{"role": "user", "content": f"Use this: {MOSS} Where?"}]),
    output='{"role": "assistant", "content": "In the north."}',
)
LOGGED = [GENERATION, RETRIEVER, ROOT]


def camel(row):
    def spell(name):
        first, *rest = name.split("_")
        return first + "".join(word.capitalize() for word in rest)

    return {spell(name): value for name, value in row.items()}


@pytest.mark.parametrize("spell", [dict, camel], ids=["snake", "camel"])
def test_observations_are_one_record(tmp_path, spell):
    record = only_record(read_spans(tmp_path, [spell(row) for row in LOGGED], NAME))
    assert (record.question, record.answer) == ("Where does moss grow?", "In the north.")
    assert texts(record) == [MOSS, FERN]  # one source, two chunks
    assert (record.response_id, record.span_id, record.app) == ("t1", "root", "garden")
    assert (record.model, record.prompt_version) == ("gpt-x", "3")
    assert record.metadata["environment"] == "production"


def test_csv_and_parquet_are_read_alike(tmp_path):
    pq.write_table(pa.Table.from_pylist(LOGGED), tmp_path / "a.parquet", row_group_size=1)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, LOGGED[0])
        writer.writeheader()
        writer.writerows(LOGGED)
    records = [only_record(read_file(tmp_path / name, NAME)) for name in ("a.parquet", "a.csv")]
    assert records[0] == records[1]
    assert texts(records[0]) == [MOSS, FERN]


@pytest.mark.parametrize("where", ["in the trace", "beside it", "both"])
def test_a_trace_with_its_observations_inside_is_one_record(tmp_path, where):
    trace = {"id": "t1", "name": "garden", "input": '"Where?"', "output": '"\\"In the north.\\""'}
    observations = [camel(row) for row in (GENERATION, RETRIEVER)]
    inside = {**trace, "observations": observations}
    row = {
        "in the trace": inside,
        "beside it": {"trace": trace, "observations": observations},
        "both": {"trace": inside, "observations": observations},
    }[where]
    outcomes = read_spans(tmp_path, [row], NAME, "trace.json")
    record = only_record(outcomes)
    assert (record.question, record.answer, record.app) == ("Where?", "In the north.", "garden")
    assert texts(record) == [MOSS, FERN]
    assert outcomes[1]["repeated_spans"] == (2 if where == "both" else 0)


def test_overlapping_windows_in_one_file_count_once_and_the_later_row_counts(tmp_path):
    newer = {**ROOT, "output": "Everywhere.", "updated_at": "2026-10-01 10:09:00.000000"}
    outcomes = read_spans(tmp_path, [newer, *LOGGED, RETRIEVER], NAME)
    assert only_record(outcomes).answer == "Everywhere."
    assert outcomes[1]["repeated_spans"] == 2


def test_overlapping_windows_in_two_files_have_one_response_id(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        read_spans(tmp_path, LOGGED, NAME, name)
    rows = [row for unit in units_of(tmp_path) for row in read_unit(unit, STORAGE, settings())]
    assert all(isinstance(row, Accepted) for row in rows)
    assert [row.record.response_id for row in rows] == ["t1", "t1"]  # the judge counts a duplicate


def test_the_table_of_traces_folds_with_observations_of_its_file_and_is_a_reject_without(tmp_path):
    trace = {"id": "t1", "timestamp": "2026-10-01 10:00:00", "name": "garden", "input": "Where?"}
    trace |= {"output": "Here.", "session_id": "s", "user_id": "u", "bookmarked": False, "public": False}
    assert only_record(read_spans(tmp_path, [trace, RETRIEVER], NAME)).answer == "Here."
    reject = only_reject(read_spans(tmp_path, [trace], NAME, "b.jsonl"))
    assert (reject.reason, reject.response_id, reject.app) == ("no_passages", "t1", "garden")
    assert "only the trace itself" in reject.detail


def test_scores_are_no_rows(tmp_path):
    score = {"id": "s", "timestamp": "2026-10-01", "trace_id": "t1", "observation_id": "r", "name": "x"}
    score |= {"value": 1.0, "source": "EVAL", "comment": "", "data_type": "NUMERIC", "string_value": None}
    rows, counts = read_spans(tmp_path, [score], NAME)
    assert (rows, counts["other_spans"]) == ([], 1)


def test_a_span_that_returns_documents_is_a_retriever_where_types_are_old(tmp_path):
    old = {**RETRIEVER, "type": "SPAN", "name": "VectorStoreRetriever"}
    record = only_record(read_spans(tmp_path, [ROOT, old, GENERATION], NAME))
    assert (texts(record), record.retriever) == ([MOSS, FERN], "VectorStoreRetriever")


def test_a_reranker_is_told_by_its_name(tmp_path):
    reranker = observation("SPAN", "cohere-rerank", second=1, output=lang_chain(FERN))
    assert texts(only_record(read_spans(tmp_path, [*LOGGED, reranker], NAME))) == [FERN]


def test_a_prompt_with_the_passages_in_it_is_no_question(tmp_path):
    silent = [{**RETRIEVER, "input": ""}, {**GENERATION, "parent_observation_id": None}]
    reject = only_reject(read_spans(tmp_path, silent, NAME))
    assert reject.reason == "missing_question"
    record = only_record(read_spans(tmp_path, silent, NAME, allow_missing_question=True))
    assert (record.question, record.answer) == ("", "In the north.")


def test_messages_are_no_documents():
    assert holds_documents(lang_chain("p"))
    assert not holds_documents([{"role": "user", "content": "p"}])
    assert not holds_documents(["p"]) and not holds_documents([]) and not holds_documents(None)


@pytest.mark.parametrize("name", ["langfuse_trace_langgraph.json", "langfuse_trace_llamaindex.json"])
def test_real_traces_without_retriever_are_one_reject(shared, name):
    reject = only_reject(read_file(shared / "data" / "logs" / name, NAME))
    assert reject.reason == "no_passages"
    assert reject.model.startswith("gpt-4o")


@given(
    hostile(
        [
            *("id", "trace_id", "parent_observation_id", "type", "name", "input", "output", "observations"),
            *("trace", "traceId", "start_time", "updated_at", "metadata", "data_type", "observation_id"),
            *("page_content", "messages", "role", "content", "spans"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
