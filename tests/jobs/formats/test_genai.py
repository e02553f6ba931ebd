import json

import pytest
from hypothesis import given

from tests.jobs.formats.reading import read, summary
from tests.jobs.formats.span_reading import (
    FERN,
    MOSS,
    check_reading,
    hostile,
    only_record,
    only_reject,
    read_spans,
    texts,
)

NAME = "genai"


def span(operation, key, second, parent="root", **attributes):
    names = {name.replace("__", "."): value for name, value in attributes.items()}
    return {
        "trace_id": "0xabc",
        "span_id": key,
        "parent_span_id": None if key == "root" else parent,
        "name": f"{operation} {key}",
        "start_time": 1790848800 + second,
        "attributes": {"gen_ai.operation.name": operation, **{f"gen_ai.{k}": v for k, v in names.items()}},
        "resource": {"attributes": {"service.name": "garden"}},
    }


def message(role, text):
    return [{"role": role, "parts": [{"type": "text", "content": text}]}]


HTTP = {
    "trace_id": "0xabc",
    "span_id": "root",
    "name": "GET /ask",
    "start_time": 1790848800,
    "attributes": {},
}
RETRIEVAL = span(
    "retrieval",
    "r",
    1,
    retrieval__query__text="Where does moss grow?",
    retrieval__documents=json.dumps(
        [{"id": "d1", "score": 0.5, "content": MOSS}, {"id": "d2", "content": FERN}]
    ),
    data_source__id="garden-index",
)
CHAT = span(
    "chat",
    "c",
    2,
    response__model="gpt-x-2026",
    request__model="gpt-x",
    input__messages=json.dumps(message("user", f"{MOSS} Where does moss grow?")),
    output__messages=json.dumps(message("assistant", "Here.")),
)


def test_spans_below_a_web_request_are_one_record(tmp_path):
    record = only_record(read_spans(tmp_path, [RETRIEVAL, CHAT, HTTP], NAME))
    assert (record.question, record.answer) == ("Where does moss grow?", "Here.")
    assert texts(record) == [MOSS, FERN]
    assert (record.passages[0].id, record.passages[0].score) == ("d1", 0.5)
    assert (record.trace_id, record.span_id, record.app) == ("0xabc", "c", "garden")
    assert (record.model, record.retriever) == ("gpt-x-2026", "garden-index")


def test_the_output_of_an_agent_is_the_answer(tmp_path):
    agent = span(
        *("invoke_agent", "root", 0),
        input__messages=message("user", "Where?"),
        output__messages=message("assistant", "Everywhere."),
    )
    record = only_record(read_spans(tmp_path, [agent, RETRIEVAL, CHAT], NAME))
    assert (record.question, record.answer) == ("Where?", "Everywhere.")


def test_documents_are_ids_alone_in_the_convention_and_then_a_reject(tmp_path):
    bare = span("retrieval", "r", 1, retrieval__documents=[{"id": "d1", "score": 0.5}])
    assert only_reject(read_spans(tmp_path, [HTTP, bare, CHAT], NAME)).reason == "passage_text_missing"


def test_a_call_before_the_retrieval_is_no_answer(tmp_path):
    early = {**CHAT, "start_time": 1790848800}
    reject = only_reject(read_spans(tmp_path, [HTTP, early, RETRIEVAL], NAME))
    assert reject.reason == "missing_answer"


def test_older_names_of_messages_are_read(tmp_path):
    old = span("chat", "c", 2, completion__0__content="Here.", completion__0__role="assistant")
    assert only_record(read_spans(tmp_path, [HTTP, RETRIEVAL, old], NAME)).answer == "Here."


def test_embeddings_alone_are_no_rows(tmp_path):
    rows, counts = read_spans(tmp_path, [span("embeddings", "root", 0)], NAME)
    assert (rows, counts["other_spans"], counts["other_traces"]) == ([], 1, 1)


def test_one_row_an_answer_with_these_names_stays_a_row(tmp_path):
    row = {
        "gen_ai.input.messages": message("user", "Q?"),
        "gen_ai.output.messages": message("assistant", "A."),
    }
    (tmp_path / "log.jsonl").write_text(json.dumps({**row, "passages": ["P."], "span_id": "s"}))
    assert summary(read(tmp_path / "log.jsonl")) == {"accepted": 1}


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_conversation_that_ends_without_the_assistant_has_no_answer(tmp_path, role):
    silent = span("chat", "c", 2, output__messages=message(role, "x"))
    assert only_reject(read_spans(tmp_path, [HTTP, RETRIEVAL, silent], NAME)).reason == "missing_answer"


@given(
    hostile(
        [
            *(
                "trace_id",
                "span_id",
                "parent_span_id",
                "attributes",
                "start_time",
                "name",
                "resource",
                "spans",
            ),
            *("gen_ai.operation.name", "gen_ai.retrieval.documents", "gen_ai.input.messages"),
            *("gen_ai.output.messages", "gen_ai.completion.0.content", "role", "parts", "content"),
            *("resourceSpans", "scopeSpans", "key", "value", "stringValue"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
