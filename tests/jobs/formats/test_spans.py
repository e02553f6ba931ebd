import csv
import gzip
import json
import logging
import sys
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.config import Config
from jobs.formats import Accepted, Incomplete, Reject, read_unit
from jobs.formats.attributes import items_at
from jobs.formats.messages import ASSISTANTS, USERS, text_in
from jobs.formats.paths import Row
from jobs.formats.spans import without_repeats
from jobs.formats.systems import SYSTEMS, begun, recognise, recognise_text
from jobs.formats.trace import Span, fold_trace
from jobs.listing import cut, freeze
from jobs.plan import make_plan
from tests.jobs.formats.reading import GOOD, STORAGE, read, settings, summary, to_bytes, units_of
from tests.jobs.formats.span_reading import FERN, MOSS, only_reject, read_spans, texts
from tests.jobs.formats.test_openinference import LLM, RETRIEVER, ROOT, documents, span

START = datetime(2026, 10, 1, tzinfo=UTC)


def at(second):
    return START + timedelta(seconds=second)


def make(kind, key, parent="root", second=0, **more):
    return Span(kind, "t", key, None if key == "root" else parent, at(second), **more)


CHAIN = make("chain", "root", input="Where?", output="Here.")
FOUND = make("retriever", "r", second=1, documents=[{"id": "d1", "text": MOSS}])
CALL = make("llm", "l", second=2, output="There.", labels={"model": "m"})


def fold(*spans):
    return fold_trace(spans, {})


# What a trace is


def test_the_root_answers_and_the_last_call_does_where_it_is_silent():
    assert fold(CHAIN, FOUND, CALL)["answer"] == "Here."
    silent = make("chain", "root", input="Where?")
    outcome = fold(silent, FOUND, CALL)
    assert (outcome["answer"], outcome["span_id"]) == ("There.", "l")


@pytest.mark.parametrize(
    ("spans", "reason", "word"),
    [
        ([make("chain", "root", input="Q?"), FOUND], "missing_answer", "no span"),
        ([CHAIN, CALL], "no_passages", "no retriever"),
        ([FOUND, CALL], "missing_answer", "root"),
        ([FOUND], "missing_answer", "root"),
        ([CHAIN, make("retriever", "r", documents=[])], "no_passages", "retriever spans"),
        ([CHAIN, make("retriever", "r", documents=[{"id": "d1"}])], "passage_text_missing", "without text"),
        ([make("chain", "root", output="A."), FOUND], "missing_question", "question"),
    ],
    ids=["no answer", "no retriever", "no root", "retriever alone", "nothing found", "ids", "no question"],
)
def test_what_is_incomplete_says_so_and_keeps_its_ids(spans, reason, word):
    outcome = fold(*spans)
    assert isinstance(outcome, Incomplete)
    assert (outcome.reason, outcome.values["trace_id"]) == (reason, "t")
    assert word in outcome.detail


@pytest.mark.parametrize("kind", ["step", "ignored", "chain", "llm"])
def test_a_trace_with_neither_answer_nor_retrieval_is_no_row(kind):
    assert fold(make(kind, "root"), make("step", "s", output="[1, 2]")) is None


def test_a_root_below_another_systems_span_is_a_root_where_everything_hangs_from_it():
    top = make("chain", "top", parent="http", input="Where?", output="Here.")
    inside = [make("retriever", "r", parent="top", second=1, documents=[MOSS])]
    assert fold(top, *inside)["answer"] == "Here."
    beside = make("retriever", "r2", parent="http", second=1, documents=[FERN])
    assert fold(top, *inside, beside).reason == "missing_answer"


@pytest.mark.parametrize(
    "ring", [[("a", "b"), ("b", "a")], [("a", "a")], [("a", "b"), ("b", "c"), ("c", "b")]]
)
def test_parents_in_a_ring_end_nowhere(ring):
    spans = [make("llm", key, parent=parent, output="A.") for key, parent in ring]
    spans += [make("retriever", "r", parent="a", documents=[MOSS])]
    assert fold(*spans).reason == "missing_answer"
    assert fold(CHAIN, *spans)["answer"] == "Here."


def test_a_chain_of_thousands_of_parents_is_followed():
    deep = [make("chain", f"s{i}", parent=f"s{i - 1}" if i else "root", second=i) for i in range(5000)]
    found = make("retriever", "r", parent="s4999", second=6000, documents=[MOSS])
    ignored = make("ignored", "e", parent="s4999", second=6001)
    below = make("llm", "el", parent="e", second=6002, output="fine")
    outcome = fold(make("chain", "root", input="Where?"), *deep, found, ignored, below)
    assert outcome.reason == "missing_answer"
    outcome = fold(CHAIN, *deep, found, ignored, below)
    assert (outcome["answer"], outcome["metadata"]["n_spans"]) == ("Here.", 5002)


def test_the_work_of_a_trace_grows_with_its_spans_and_not_with_their_square():
    def lines(n):
        """How many lines of Python run, which no other program on the machine can change."""
        found = [make("retriever", f"r{i}", parent=f"r{i - 1}" if i else "root", second=i) for i in range(n)]
        calls = [make("llm", f"l{i}", parent=f"r{i}", second=i, output="x") for i in range(n)]
        root, count = make("chain", "root", input="Where?"), 0

        def trace(_frame, event, _argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            fold(root, *found, *calls)
        finally:
            sys.settrace(before)
        return count

    assert lines(1600) < 8 * 2 * lines(200)  # square: 64


def test_of_two_rows_of_one_span_the_later_written_counts_and_without_times_the_last():
    old, new = (make("chain", "root", output=text, updated=at(i)) for i, text in enumerate("ab"))
    assert without_repeats([new, old]) == without_repeats([old, new]) == [new]
    plain = [make("chain", "root", output=text) for text in "ab"]
    assert [span.output for span in without_repeats(plain)] == ["b"]
    assert len(without_repeats([Span("llm"), Span("llm")])) == 2


# Passages


def test_the_union_is_in_time_order_and_holds_each_text_and_each_chunk_once():
    first = make(
        "retriever", "r1", second=1, documents=[{"id": "a", "text": MOSS}, {"id": "b", "text": "B."}]
    )
    second = make(
        "retriever", "r2", second=2, documents=[{"id": "a", "text": MOSS + " "}, {"id": "c", "text": "C."}]
    )
    outcome = fold(CHAIN, second, first)
    assert [passage["text"] for passage in outcome["passages"]] == [MOSS, "B.", "C."]
    again = make("retriever", "r3", second=3, documents=[{"id": "a", "text": "longer " + MOSS}])
    assert len(fold(CHAIN, first, again)["passages"]) == 2


def test_ids_that_name_files_do_not_hide_chunks():
    found = make("retriever", "r", documents=[{"doc_id": "f", "text": text} for text in (MOSS, FERN)])
    more = make("retriever", "r2", documents=[{"doc_id": "f", "text": "C."}])
    assert [passage["text"] for passage in fold(CHAIN, found, more)["passages"]] == [MOSS, FERN, "C."]


def test_a_retriever_that_returned_nothing_does_not_hide_those_below_it():
    outer = make("retriever", "outer", second=1)
    inner = make("retriever", "inner", parent="outer", second=2, documents=[MOSS])
    assert [p["text"] for p in fold(CHAIN, outer, inner)["passages"]] == [MOSS]


def test_a_reranker_that_kept_nothing_means_no_passages():
    reranker = make("reranker", "k", second=2, documents=[])
    assert fold(CHAIN, FOUND, reranker).reason == "no_passages"


def test_documents_without_text_among_others_are_counted():
    mixed = make("retriever", "r", documents=[{"id": "d1"}, {"text": MOSS}])
    assert fold(CHAIN, mixed)["metadata"]["n_passages_without_text"] == 1


# Texts


MESSAGE = {"lc": 1, "type": "constructor", "id": ["langchain", "AIMessageChunk"], "kwargs": {"content": "A"}}


@pytest.mark.parametrize(
    "value",
    [
        "A",
        '"A"',
        json.dumps(json.dumps(json.dumps({"answer": "A"}))),
        {"output": {"result": "A"}},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        "{'answer': 'A'}",
        {"generations": [[{"text": "A"}]]},
        {"generations": [[{"text": "", "message": MESSAGE}]]},
        [MESSAGE],
        {"type": "ai", "data": {"content": "A"}},
        [{"message.role": "assistant", "message.content": "A"}],
        [
            {
                "message": {
                    "role": "assistant",
                    "contents": [{"message_content": {"type": "text", "text": "A"}}],
                }
            }
        ],
        [{"role": "assistant", "parts": [{"type": "text", "content": "A"}]}],
        {"choices": [{"message": {"role": "assistant", "content": "A"}}]},
        {"content": [{"type": "text", "text": "A"}], "role": "assistant"},
        [{"type": "text", "text": "A"}],
        {"candidates": [{"content": {"parts": [{"text": "A"}], "role": "model"}}]},
        ["A"],
    ],
)
def test_an_answer_is_found_in_what_frameworks_log(value):
    assert text_in(value, ASSISTANTS) == "A"


@pytest.mark.parametrize(
    "value",
    [
        {"question": "Q"},
        {"args": ["Q"], "kwargs": {}},
        {"kwargs": {"query": "Q"}},
        {"my_own_name": "Q"},
        {"input": {"messages": [[{"type": "human", "content": "Q"}]]}},
        {"str_or_query_bundle": "Q"},
        json.dumps({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]}),
    ],
)
def test_a_question_is_found_in_what_frameworks_log(value):
    assert text_in(value, USERS) == "Q"


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            "",
            "  ",
            True,
            float("nan"),
            {},
            [],
            {"documents": [{"text": "P"}]},
            '{"documents": [{"a": 1}]}',
        ),
        {"messages": [{"role": "user", "content": "Q"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        {
            "answer": {
                "answer": {"answer": {"answer": {"answer": {"answer": {"answer": {"answer": "deep"}}}}}}
            }
        },
    ],
)
def test_what_is_no_answer_is_none(value):
    assert text_in(value, ASSISTANTS) is None


def test_a_structured_answer_stays_the_text_that_it_is():
    assert text_in('{"city": "Paris", "year": 1900}', ASSISTANTS) == '{"city": "Paris", "year": 1900}'
    assert text_in("[1] is the source [2]", ASSISTANTS) == "[1] is the source [2]"


def nested(depth, leaf="x", key="content"):
    value = leaf
    for _ in range(depth):
        value = [{key: value, "role": "assistant"}]
    return value


@pytest.mark.parametrize("depth", [3, 300, 5000])
@pytest.mark.parametrize("key", ["content", "parts", "answer", "messages"])
def test_depth_is_no_danger(depth, key):
    text_in(nested(depth, key=key), ASSISTANTS)
    text_in(nested(depth, key=key), USERS)
    fold(CHAIN, make("retriever", "r", documents=nested(depth, key=key)))


def test_numbered_keys_are_a_list_without_making_room_for_it():
    row = Row({"a.1000000.b": 2, "a.0.b": 1, "a.x.b": 3, "a.²": 4, "a.3": "s"})
    assert items_at(row, "a") == [{"b": 1}, "s", {"b": 2}]
    assert items_at(Row({"a": {"1": "y", "0": "x"}}), "a") == ["x", "y"]
    assert items_at(Row({}), "a") is None


# Files


LOGGED = [ROOT, RETRIEVER, LLM]


def write(folder, name, rows):
    data = b"".join(to_bytes(row) + b"\n" for row in rows)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return path


def trace(number, *rows):
    rows = rows or LOGGED
    return [{**row, "context": {**row["context"], "trace_id": f"t{number}"}} for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a"])
def test_a_file_of_spans_is_one_unit_however_long(tmp_path, name):
    rows = [row for number in range(50) for row in trace(number)]
    path = write(tmp_path, name, sorted(rows, key=lambda row: row["span_kind"]))
    (unit,) = units_of(path, settings(unit_bytes=1024))
    assert (unit.system, unit.start, unit.stop) == ("openinference", 0, path.stat().st_size)
    outcomes = list(read_unit(unit, STORAGE, settings()))
    assert summary(outcomes) == {"accepted": 50}
    assert [row.record.response_id for row in outcomes] == [f"t{number}" for number in range(50)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_a_file_over_the_limit_is_one_reject_that_says_what_to_do(tmp_path, name):
    rows = [row for number in range(50) for row in trace(number)]
    path = write(tmp_path, name, [json.dumps(rows)] if name == "a.json" else rows)
    reject = only_reject((read(path, settings(max_file_bytes=4000)), None))
    assert reject.reason == "malformed_row"
    assert "read.max_file_bytes" in reject.detail


def test_a_dictionary_that_blows_up_is_over_the_limit_too(tmp_path):
    rows = pa.Table.from_pylist(
        [{"context.trace_id": "t", "span_kind": "LLM", "attributes.output.value": "x" * 10_000}] * 500
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    assert path.stat().st_size < 100_000
    reject = only_reject((read(path, settings(max_file_bytes=1_000_000)), None))
    assert "read.max_file_bytes" in reject.detail


def test_broken_lines_are_rejects_at_their_place_among_traces(tmp_path):
    lines = [*trace(1), '{"broken', *trace(2), "5"]
    outcomes, counts = read_spans(tmp_path, lines, "openinference")
    assert [type(row) for row in outcomes] == [Accepted, Reject, Accepted, Reject]
    assert [row.position for row in outcomes] == sorted(row.position for row in outcomes)
    assert counts["traces"] == 2


def test_a_limit_counts_traces(tmp_path):
    rows = [row for number in range(5) for row in trace(number)]
    write(tmp_path, "a.jsonl", rows)
    write(tmp_path, "b.jsonl", [GOOD] * 3)
    config = settings(limit=6)
    units = units_of(tmp_path, config)
    outcomes = [row for unit in units for row in read_unit(unit, STORAGE, config)]
    assert [row.record.answer for row in outcomes] == ["On the north side."] * 5 + ["Ada."]
    assert len(read(tmp_path / "a.jsonl", settings(limit=2))) == 2


def test_a_trace_over_two_files_is_never_two_answers(tmp_path):
    write(tmp_path, "a.jsonl", [RETRIEVER, LLM])
    write(tmp_path, "b.jsonl", [ROOT])
    outcomes = read(tmp_path)
    assert [row.reason for row in outcomes] == ["missing_answer", "no_passages"]
    assert {row.trace_id for row in outcomes} == {"t1"}


def test_units_of_spans_have_names_of_their_own_and_rows_keep_theirs(tmp_path):
    path = write(tmp_path, "a.jsonl", LOGGED)
    auto, forced = (units_of(path, settings(format=form))[0] for form in ("auto", "jsonl"))
    again = units_of(path)[0]
    assert auto.unit_id == again.unit_id != forced.unit_id
    assert forced.system is None


def test_a_forced_system_goes_for_every_file_and_other_rows_are_told(tmp_path):
    path = write(tmp_path, "a.jsonl", [GOOD, *LOGGED])
    config = settings(format="openinference")
    (file,) = freeze([str(path)], STORAGE, config.read)
    assert (file.format, file.system) == ("jsonl", "openinference")
    assert summary([r for u in cut([file], STORAGE, config.read) for r in read_unit(u, STORAGE, config)]) == {
        "accepted": 1
    }


def test_other_spans_are_reported_when_a_unit_is_read(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jobs.formats")
    path = write(tmp_path, "a.jsonl", [*LOGGED, *LOGGED, *trace(9, span("EMBEDDING", "root"))])
    assert summary(read(path)) == {"accepted": 1}
    assert "7 spans, 3 of them repeated, 1 in 1 traces without retrieval or answer" in caplog.text


def test_the_plan_shows_the_system_and_what_its_spans_are(tmp_path):
    write(tmp_path, "a.jsonl", [*LOGGED, *trace(2, ROOT), *trace(9, span("EMBEDDING", "root"))])
    plan = make_plan([str(tmp_path)], Config())
    assert plan.files[0]["system"] == "openinference"
    (traces,) = plan.traces
    assert (traces.n_spans, traces.n_traces, traces.n_other_spans, traces.n_other_traces) == (5, 2, 1, 1)
    assert (plan.n_sampled_rows, plan.n_accepted) == (2, 1)
    text = plan.to_text()
    assert "openinference jsonl" in text and "5 spans (0 repeated) are 2 rows" in text
    assert "fold within a file" in text
    assert json.loads(plan.to_json())["traces"][0]["system"] == "openinference"


# Recognition


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_rows_of_one_answer_are_no_spans(form):
    head = to_bytes(GOOD) + b"\n" if form == "jsonl" else to_bytes([GOOD])
    assert recognise_text(head, form) is None
    assert recognise([]) is None and recognise([GOOD, {"trace_id": "t", "span_id": "s"}]) is None


def test_most_rows_decide_and_spans_of_no_system_have_no_say():
    plain = {"trace_id": "t", "span_id": "s", "name": "GET /"}
    assert recognise([plain, plain, plain, LLM]) == "openinference"
    assert recognise([GOOD, GOOD, LLM]) is None


@pytest.mark.parametrize("cut_at", [100, 200, 400, 900])
def test_a_document_is_recognised_by_its_beginning(cut_at):
    document = json.dumps({"data": [ROOT, RETRIEVER, LLM]}, indent=1).encode()
    assert recognise_text(document[:cut_at], "json") == ("openinference" if cut_at > 100 else None)
    assert recognise_text(json.dumps({"resourceSpans": []}).encode(), "json") is None


def test_a_header_is_enough_for_csv(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerow(["id", "trace_id", "parent_observation_id", "type", "input", "output"])
    assert units_of(tmp_path / "a.csv")[0].system == "langfuse"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'[{"a": 1}, {"b": [2, 3', [{"a": 1}, {"b": [2]}]),
        (b'{"a": "x, }", "b": {"c": 1}, "d": "unf', {"a": "x, }", "b": {"c": 1}}),
        (b'{"a": "\\"[{", "b": tru', {"a": '"[{'}),
        (b"[" * 100_000, None),
        (b'"text', None),
        (b"}{", None),
        (b"", None),
    ],
)
def test_a_text_that_breaks_off_is_read_to_its_last_whole_item(text, expected):
    assert begun(text) == expected


@given(st.binary(max_size=60) | st.text(alphabet='[]{},:"\\ a1', max_size=60).map(str.encode))
def test_any_beginning_is_read_without_an_error(text):
    begun(text)
    for form in ("json", "jsonl", "csv"):
        recognise_text(text, form)


def test_every_system_can_be_forced():
    literal = Config.model_fields["read"].annotation.model_fields["format"].annotation
    assert set(SYSTEMS) < set(literal.__args__)


def test_passages_by_fields_are_taken_from_every_span(tmp_path):
    rows = [ROOT, {**RETRIEVER, "attributes": {"openinference.span.kind": "CHAIN", "hits": [{"raw": MOSS}]}}]
    fields = {"passages": "attributes.hits", "passages.text": "raw"}
    (row,), _ = read_spans(tmp_path, rows, "openinference", fields=fields)
    assert texts(row.record) == [MOSS]
    more = {**RETRIEVER, "attributes": {"openinference.span.kind": "RETRIEVER", **documents(("d", FERN))}}
    (row,), _ = read_spans(tmp_path, [ROOT, more], "openinference", fields=fields)
    assert texts(row.record) == [FERN]


@pytest.mark.parametrize(
    "more",
    [
        {"trace_id": "t", "gen_ai.operation.name": "chat"},
        {"trace_id": "t", "span_kind": "CHAIN"},
        {"trace_id": "t", "parent_observation_id": "p"},
    ],
)
def test_a_whole_answer_with_a_span_s_ids_is_a_row_and_no_span(tmp_path, more):
    path = tmp_path / "flat.jsonl"
    path.write_bytes(to_bytes({"question": "Who?", "contexts": ["Ada wrote it."], "answer": "Ada."} | more))
    (found,) = read(path)
    assert isinstance(found, Accepted)
    assert found.record.trace_id == "t"
