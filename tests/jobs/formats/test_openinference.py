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

NAME = "openinference"


def span(kind, span_id, parent="root", second=0, trace="t1", **attributes):
    return {
        "name": f"{kind.lower()}-{span_id}",
        "context": {"trace_id": trace, "span_id": span_id},
        "span_kind": kind,
        "parent_id": None if span_id == "root" else parent,
        "start_time": f"2026-10-01T10:00:{second:02}+00:00",
        "end_time": f"2026-10-01T10:01:{second:02}+00:00",
        "status_code": "OK",
        "attributes": {"openinference.span.kind": kind, **attributes},
    }


def documents(*pairs, at="retrieval.documents"):
    flat = {}
    for i, (key, text) in enumerate(pairs):
        flat |= {f"{at}.{i}.document.id": key, f"{at}.{i}.document.content": text}
    return flat


ROOT = span("CHAIN", "root", **{"input.value": "Where does moss grow?", "output.value": "On the north side."})
RETRIEVER = span("RETRIEVER", "r", second=1, **documents(("d1", MOSS), ("d2", FERN)))
LLM = span(
    "LLM",
    "l",
    second=2,
    **{
        "llm.model_name": "gpt-x",
        "llm.prompt_template.version": "7",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "On the north side.",
    },
)


def test_spans_in_any_order_are_one_record_at_the_first_of_them(tmp_path):
    other = {**ROOT, "context": {"trace_id": "t0", "span_id": "x"}, "attributes": {}}
    rows, counts = read_spans(tmp_path, [other, LLM, RETRIEVER, ROOT], NAME)
    (row,) = rows
    record = row.record
    assert row.position == len(json.dumps(other)) + 1
    assert (record.question, record.answer) == ("Where does moss grow?", "On the north side.")
    assert texts(record) == [MOSS, FERN]
    assert [passage.id for passage in record.passages] == ["d1", "d2"]
    assert (record.response_id, record.trace_id, record.span_id) == ("t1", "t1", "root")
    assert (record.model, record.prompt_version, record.retriever) == ("gpt-x", "7", "retriever-r")
    assert record.timestamp.isoformat() == "2026-10-01T10:00:00+00:00"
    assert counts == {"spans": 4, "repeated_spans": 0, "traces": 1, "other_spans": 1, "other_traces": 1}


def nest(flat):
    tree = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[leaf] = value
    return tree


def as_pairs(flat):
    return [{"key": name, "value": {"stringValue": value}} for name, value in flat.items()]


@pytest.mark.parametrize("shape", [nest, json.dumps, as_pairs], ids=["nested", "json text", "pairs"])
def test_attributes_nested_as_text_and_as_pairs_are_the_same(tmp_path, shape):
    rows = [{**each, "attributes": shape(each["attributes"])} for each in (ROOT, RETRIEVER, LLM)]
    record = only_record(read_spans(tmp_path, rows, NAME))
    assert (record.answer, texts(record), record.model) == ("On the north side.", [MOSS, FERN], "gpt-x")


def test_the_phoenix_data_frame_is_read_whole_over_its_row_groups(tmp_path):
    rows = []
    for each in (LLM, RETRIEVER, ROOT):
        attributes = each["attributes"]
        found = [{"document.content": MOSS, "document.id": "d1"}] if each is RETRIEVER else None
        rows.append(
            {
                "name": each["name"],
                "span_kind": each["span_kind"],
                "parent_id": each["parent_id"],
                "start_time": each["start_time"],
                "context.span_id": each["context"]["span_id"],
                "context.trace_id": "t1",
                "attributes.input.value": attributes.get("input.value"),
                "attributes.output.value": attributes.get("output.value"),
                "attributes.retrieval.documents": found,
                "attributes.llm.model_name": attributes.get("llm.model_name"),
                "attributes.metadata": json.dumps({"language": "en-GB", "tenant": "acme"}),
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "spans.parquet", row_group_size=1)
    (row,), _ = read_file(tmp_path / "spans.parquet", NAME)
    assert (row.position, row.record.answer, texts(row.record)) == (0, "On the north side.", [MOSS])
    assert (row.record.model, row.record.language) == ("gpt-x", "en")
    assert row.record.metadata["tenant"] == "acme"


def test_an_otlp_file_brings_the_service_name(tmp_path):
    spans = [
        {
            "traceId": "t1",
            "spanId": each["context"]["span_id"],
            "parentSpanId": each["parent_id"] or "",
            "name": each["name"],
            "startTimeUnixNano": "1790848800000000000",
            "attributes": as_pairs(each["attributes"]),
        }
        for each in (ROOT, RETRIEVER, LLM)
    ]
    resource = {"attributes": as_pairs({"service.name": "garden"})}
    export = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}
    for name in ("spans.jsonl", "spans.json"):
        record = only_record(read_spans(tmp_path, [export], NAME, name))
        assert (record.app, record.answer, texts(record)) == ("garden", "On the north side.", [MOSS, FERN])
        (tmp_path / name).unlink()


def test_a_reranker_is_what_the_answer_was_given(tmp_path):
    reranker = span("RERANKER", "k", second=2, **documents(("d2", FERN), at="reranker.output_documents"))
    record = only_record(read_spans(tmp_path, [ROOT, RETRIEVER, reranker, LLM], NAME))
    assert texts(record) == [FERN]
    assert record.metadata["passages_from"] == "reranker"


def test_a_reranker_that_logs_ids_alone_takes_the_texts_of_the_retriever(tmp_path):
    reranker = span("RERANKER", "k", second=2, **{"reranker.output_documents": [{"document.id": "d2"}]})
    assert texts(only_record(read_spans(tmp_path, [ROOT, RETRIEVER, reranker], NAME))) == [FERN]


def test_documents_without_text_are_a_reject(tmp_path):
    bare = span("RETRIEVER", "r", second=1, **{"retrieval.documents.0.document.id": "d1"})
    reject = only_reject(read_spans(tmp_path, [ROOT, bare, LLM], NAME))
    assert (reject.reason, reject.trace_id, reject.model) == ("passage_text_missing", "t1", "gpt-x")


def test_the_output_of_a_retriever_is_read_where_it_has_no_documents(tmp_path):
    chunks = json.dumps([{"page_content": MOSS, "metadata": {"source": "a.pdf"}}])
    plain = span("RETRIEVER", "r", second=1, **{"output.value": chunks})
    assert texts(only_record(read_spans(tmp_path, [ROOT, plain], NAME))) == [MOSS]


def test_what_evaluators_say_is_neither_answer_nor_passage(tmp_path):
    judge = span("EVALUATOR", "e", second=4, **{"output.value": "fine"})
    verdict = {"output.value": "grounded", "input.value": "x"}
    inner = span("LLM", "el", parent="e", second=5, **verdict)
    silent = {**ROOT, "attributes": {"openinference.span.kind": "CHAIN", "input.value": "Where?"}}
    record = only_record(read_spans(tmp_path, [silent, RETRIEVER, LLM, judge, inner], NAME))
    assert record.answer == "On the north side."


@given(
    hostile(
        [
            *("context", "trace_id", "span_id", "parent_id", "span_kind", "attributes", "start_time", "name"),
            *("input.value", "output.value", "retrieval.documents", "retrieval.documents.0.document.content"),
            *("llm.output_messages", "reranker.output_documents", "document.content", "metadata", "spans"),
        ]
    )
)
def test_any_rows_fold_without_loss(scratch, rows):
    check_reading(rows, NAME, scratch)
