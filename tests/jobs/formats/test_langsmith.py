import json

import pyarrow as pa
import pyarrow.parquet as pq
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

NAME = "langsmith"
ROOT_ID = "11111111-2222-3333-4444-555555555555"


def run(kind, key, second=0, inputs=None, outputs=None, **more):
    return {
        "id": key,
        "trace_id": ROOT_ID,
        "parent_run_id": None if key == ROOT_ID else ROOT_ID,
        "dotted_order": f"20261001T1000{second:02}000000Z{ROOT_ID}",
        "name": key,
        "run_type": kind,
        "session_id": "project-1",
        "start_time": f"2026-10-01T10:00:{second:02}",
        "end_time": f"2026-10-01T10:01:{second:02}",
        "inputs": None if inputs is None else json.dumps(inputs),
        "outputs": None if outputs is None else json.dumps(outputs),
        "extra": None,
    } | more


ROOT = run("chain", ROOT_ID, inputs={"question": "Where does moss grow?"}, outputs={"answer": "Here."})
RETRIEVER = run(
    "retriever",
    "r",
    second=1,
    inputs={"query": "moss"},
    outputs={
        "documents": [{"page_content": text, "metadata": {}, "type": "Document"} for text in (MOSS, FERN)]
    },
)
MESSAGE = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"]}
LLM = run(
    "llm",
    "l",
    second=2,
    inputs={"messages": [[{**MESSAGE, "id": ["HumanMessage"], "kwargs": {"content": f"{MOSS} Where?"}}]]},
    outputs={"generations": [[{"text": "", "message": {**MESSAGE, "kwargs": {"content": "There."}}}]]},
    extra=json.dumps({"metadata": {"ls_model_name": "gpt-x", "lc_hub_commit_hash": "abc", "app": "garden"}}),
)


def test_the_bulk_export_is_one_record_a_trace(tmp_path):
    folder = tmp_path / "export_id=1" / "session_id=p" / "runs" / "year=2026" / "month=10" / "day=01"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([LLM, RETRIEVER, ROOT]), folder / "a.parquet", row_group_size=2)
    record = only_record(read_file(folder / "a.parquet", NAME))
    assert (record.question, record.answer) == ("Where does moss grow?", "Here.")
    assert texts(record) == [MOSS, FERN]
    assert (record.response_id, record.trace_id, record.span_id) == (ROOT_ID,) * 3
    assert (record.model, record.prompt_version, record.app) == ("gpt-x", "abc", "garden")
    assert record.metadata["month"] == "10"


def test_without_an_output_of_the_root_the_model_answers(tmp_path):
    record = only_record(read_spans(tmp_path, [{**ROOT, "outputs": None}, RETRIEVER, LLM], NAME))
    assert (record.answer, record.span_id) == ("There.", "l")


def test_a_traced_function_that_returns_a_list_is_read(tmp_path):
    wrapped = run("retriever", "r", second=1, outputs={"output": [MOSS, FERN]})
    assert texts(only_record(read_spans(tmp_path, [ROOT, wrapped], NAME))) == [MOSS, FERN]


def test_one_string_of_documents_is_an_undivided_context(tmp_path):
    joined = run("retriever", "r", second=1, outputs={"output": f"{MOSS}\n\n{FERN}"})
    record = only_record(read_spans(tmp_path, [ROOT, joined], NAME))
    assert record.undivided and texts(record) == [f"{MOSS}\n\n{FERN}"]


def test_retrievers_inside_a_retriever_that_merged_them_do_not_count(tmp_path):
    inner = run(
        "retriever", "i", second=2, outputs={"documents": [{"page_content": "More."}]}, parent_run_id="r"
    )
    call = run("llm", "q", second=3, outputs={"generations": [[{"text": "moss, mosses"}]]}, parent_run_id="r")
    silent = {**ROOT, "outputs": None}
    record = only_record(read_spans(tmp_path, [silent, RETRIEVER, inner, LLM, call], NAME))
    assert (texts(record), record.answer) == ([MOSS, FERN], "There.")


def test_several_retrievers_are_united_in_time_order_each_text_once(tmp_path):
    later = run(
        "retriever", "r2", second=3, outputs={"documents": [{"page_content": t} for t in (FERN, "C.")]}
    )
    assert texts(only_record(read_spans(tmp_path, [later, ROOT, RETRIEVER], NAME))) == [MOSS, FERN, "C."]


def test_a_failed_run_without_answer_is_a_reject(tmp_path):
    failed = {**ROOT, "outputs": None, "error": "boom", "status": "error"}
    reject = only_reject(read_spans(tmp_path, [failed, RETRIEVER], NAME))
    assert (reject.reason, reject.response_id) == ("missing_answer", ROOT_ID)


def test_child_runs_are_read_and_the_trace_id_stands_in_the_dotted_order(tmp_path):
    tree = {**ROOT, "child_runs": [{**RETRIEVER, "child_runs": []}, LLM]}
    for each in (tree, RETRIEVER, LLM):
        each = each.pop("trace_id") if each is tree else each
    assert texts(only_record(read_spans(tmp_path, [tree], NAME, "run.json"))) == [MOSS, FERN]


def test_an_export_without_inputs_and_outputs_holds_no_answer(tmp_path):
    bare = [{**row, "inputs": None, "outputs": None} for row in (ROOT, LLM)]
    rows, counts = read_spans(tmp_path, bare, NAME)
    assert (rows, counts["other_spans"]) == ([], 2)
    reject = only_reject(read_spans(tmp_path, [*bare, {**RETRIEVER, "outputs": None}], NAME))
    assert reject.reason == "missing_answer"


@pytest.mark.parametrize("field", ["app", "question", "answer"])
def test_fields_are_looked_up_in_the_runs(tmp_path, field):
    rows = [{**ROOT, "mine": {"x": "from fields"}}, RETRIEVER, LLM]
    record = only_record(read_spans(tmp_path, rows, NAME, fields={field: "mine.x"}))
    assert getattr(record, field) == "from fields"


@given(
    hostile(
        [
            *("id", "trace_id", "parent_run_id", "parent_run_ids", "dotted_order", "name", "run_type"),
            *("inputs", "outputs", "extra", "start_time", "child_runs", "documents", "page_content"),
            *("generations", "messages", "lc", "kwargs", "metadata", "output"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
