import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import ConfigError
from jobs.formats import resolved_mapping
from jobs.formats.aliases import ANSWER, PASSAGES, QUESTION, check_fields
from jobs.formats.paths import Row, snake
from tests.jobs.formats.reading import GOOD, read, read_lines, read_row, settings, summary

LOGGED = {
    "leadline": {"question": "Q", "passages": [{"id": "1", "text": "P"}], "answer": "A"},
    "ragas": {"user_input": "Q", "retrieved_contexts": ["P"], "response": "A", "reference": "R"},
    "ragas old": {"question": "Q", "contexts": ["P"], "answer": "A", "ground_truth": "R"},
    "deepeval": {"input": "Q", "actual_output": "A", "retrieval_context": ["P"], "context": ["ideal"]},
    "deepeval json": {
        "input": "Q",
        "actualOutput": "A",
        "retrievalContext": [{"context": "P", "source": "s"}],
    },
    "ragchecker": {
        "query_id": "7",
        "query": "Q",
        "response": "A",
        "retrieved_context": [{"doc_id": "1", "text": "P"}],
    },
    "lettucedetect": {"question": "Q", "context": ["P"], "answer": "A"},
    "mlflow": {"inputs": {"question": "Q"}, "outputs": "A", "context": ["P"]},
    "mlflow objects": {
        "inputs": {"query": "Q"},
        "outputs": {"response": "A", "documents": [{"page_content": "P"}]},
    },
    "mlflow agent": {
        "request": {"messages": [{"role": "user", "content": "Q"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": "A"}}]},
        "retrieved_context": [{"doc_uri": "u", "content": "P"}],
    },
    "uptrain": {"question": "Q", "context": "P", "response": "A"},
    "promptflow": {"question": "Q", "context": ["P"], "answer": "A", "chat_history": []},
    "langsmith": {
        "inputs": '{"question": "Q"}',
        "outputs": '{"answer": "A", "documents": [{"page_content": "P", "type": "Document"}]}',
    },
    "openinference": {
        "context.span_id": "s",
        "attributes.input.value": "Q",
        "attributes.output.value": "A",
        "attributes.retrieval.documents": [{"document.content": "P"}],
    },
    "trulens": {
        "ai.observability.record_root.input": "Q",
        "ai.observability.record_root.output": "A",
        "ai.observability.retrieval.retrieved_contexts": ["P"],
    },
    "giskard": {"question": "Q", "agent_answer": "A", "documents": ["P"]},
    "lynx": {"QUESTION": "Q", "DOCUMENT": "P", "ANSWER": "A"},
}


@pytest.mark.parametrize("row", LOGGED.values(), ids=LOGGED)
def test_every_tool_is_read_without_configuration(tmp_path, row):
    record = read_row(tmp_path, row).record
    assert (record.question, record.answer, [passage.text for passage in record.passages]) == (
        "Q",
        "A",
        ["P"],
    )
    assert record.undivided == (row in (LOGGED["uptrain"], LOGGED["lynx"]))


@pytest.mark.parametrize("path", QUESTION, ids=".".join)
def test_every_alias_of_the_question_is_found_nested_and_as_a_dotted_key(tmp_path, path):
    for row in nested(path, "Q"), {".".join(path): "Q"}, {camel(".".join(path)): "Q"}:
        assert read_row(tmp_path, {"passages": ["P"], "answer": "A", **row}).record.question == "Q"


@pytest.mark.parametrize("path", [path for path in ANSWER if path != ("messages",)], ids=".".join)
def test_every_alias_of_the_answer_is_found_nested_and_as_a_dotted_key(tmp_path, path):
    for row in nested(path, "A"), {".".join(path): "A"}, {camel(".".join(path)): "A"}:
        assert read_row(tmp_path, {"passages": ["P"], "question": "Q", **row}).record.answer == "A"


@pytest.mark.parametrize("path", PASSAGES, ids=".".join)
def test_every_alias_of_the_passages_is_found_nested_and_as_a_dotted_key(tmp_path, path):
    for row in nested(path, ["P"]), {".".join(path): ["P"]}, {camel(".".join(path)): ["P"]}:
        assert read_row(tmp_path, {"question": "Q", "answer": "A", **row}).record.passages[0].text == "P"


def nested(path, value):
    for part in reversed(path):
        value = [value] if part == "0" else {part: value}
    return value


def camel(name):
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def test_our_own_names_win_over_aliases(tmp_path):
    row = {**GOOD, "query": "x", "response": "x", "contexts": ["x"], "context": "x"}
    record = read_row(tmp_path, row).record
    assert (record.question, record.answer, record.passages[0].text) == ("Who?", "Ada.", "Ada wrote it.")


def test_the_first_alias_with_a_usable_value_wins(tmp_path):
    row = {
        "question": None,
        "query": "  ",
        "input": "Q",
        "answer": "",
        "response": "A",
        "passages": [],
        "documents": ["P"],
    }
    record = read_row(tmp_path, row).record
    assert (record.question, record.answer, record.passages[0].text) == ("Q", "A", "P")


def test_fields_win_over_every_alias_and_fall_back_to_them(tmp_path):
    row = {**GOOD, "payload": {"items": [{"Reply Text": "from fields"}]}}
    assert read_row(tmp_path, row, answer="payload.items.0.Reply Text").record.answer == "from fields"
    assert read_row(tmp_path, GOOD, answer="payload.items.0.Reply Text").record.answer == "Ada."


def test_fields_reach_into_passages(tmp_path):
    row = {"q": "Q", "a": "A", "hits": [{"raw": "P", "key": 7, "metric": "0.5", "file": "f"}]}
    fields = {
        "question": "q",
        "answer": "a",
        "passages": "hits",
        "passages.text": "raw",
        "passages.id": "key",
    }
    more = {"passages.score": "metric", "passages.source": "file"}
    (passage,) = read_row(tmp_path, row, **fields, **more).record.passages
    assert (passage.text, passage.id, passage.score, passage.source) == ("P", "7", 0.5, "f")


@pytest.mark.parametrize(
    ("fields", "named"), [({"anwser": "x"}, "anwser"), ({"answer": ""}, "fields.answer")]
)
def test_a_wrong_field_setting_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        check_fields(fields)


@pytest.mark.parametrize("answer", [None, "", "  \n ", [], {}, True, float("nan"), ["a", "b"], {"x": 1}])
def test_an_answer_without_text_is_missing(tmp_path, answer):
    rejected = read_row(tmp_path, {**GOOD, "answer": answer})
    assert rejected.reason == "missing_answer"
    assert "fields: {answer: your.path}" in rejected.detail


@pytest.mark.parametrize(("answer", "text"), [(42, "42"), (1.5, "1.5"), (0, "0"), (["one"], "one")])
def test_a_number_as_answer_becomes_its_text(tmp_path, answer, text):
    assert read_row(tmp_path, {**GOOD, "answer": answer}).record.answer == text


def test_an_answer_keeps_every_character(tmp_path):
    answer = "  <|im_end|>\n\ttext 👩‍👩‍👧 ไทย é  "
    assert read_row(tmp_path, {**GOOD, "answer": answer}).record.answer == answer


def test_an_answer_that_is_json_text_stays_text(tmp_path):
    for answer in ('{"answer": "Ada."}', '["a", "b"]', '"quoted"'):
        assert read_row(tmp_path, {**GOOD, "answer": answer}).record.answer == answer


@pytest.mark.parametrize("question", [None, "", " ", [], {"x": 1}])
def test_a_missing_question_is_a_reject_unless_allowed(tmp_path, question):
    row = {**GOOD, "question": question}
    assert read_row(tmp_path, row).reason == "missing_question"
    (allowed,) = read_lines(tmp_path, row, allow_missing_question=True)
    assert allowed.record.question == ""


def test_a_conversation_gives_its_last_question_and_its_last_answer(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "reply"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "se"},
                {"type": "image_url"},
                {"type": "text", "text": "cond"},
            ],
        },
        {"role": "assistant", "content": "final"},
    ]
    for value in (messages, json.dumps(messages)):
        record = read_row(tmp_path, {"messages": value, "passages": ["P"]}).record
        assert (record.question, record.answer) == ("second", "final")


@pytest.mark.parametrize(("role", "text"), [("speaker", "text"), ("from", "value"), ("type", "content")])
def test_messages_in_other_words(tmp_path, role, text):
    record = read_row(
        tmp_path,
        {"input": [{role: "human", text: "Q"}], "output": [{role: "ai", text: "A"}], "passages": ["P"]},
    ).record
    assert (record.question, record.answer) == ("Q", "A")


def test_a_conversation_that_ends_with_a_question_has_no_answer(tmp_path):
    messages = [{"role": "assistant", "content": "old"}, {"role": "user", "content": "new"}]
    assert read_row(tmp_path, {"messages": messages, "passages": ["P"]}).reason == "missing_answer"


def test_the_ideal_context_of_deepeval_is_not_taken_for_the_retrieved_one(tmp_path):
    for name, empty in (("retrieval_context", None), ("retrievalContext", []), ("retrieval_context", "")):
        row = {"input": "Q", "actual_output": "A", name: empty, "context": ["ideal"]}
        assert read_row(tmp_path, row).reason == "no_passages"


def test_an_output_text_is_not_its_own_context(tmp_path):
    assert read_row(tmp_path, {"question": "Q", "outputs": {"output": "A"}}).reason == "no_passages"


def test_a_span_context_is_no_passage(tmp_path):
    row = {"input": "Q", "output": "A", "context": {"trace_id": "t", "span_id": "s"}}
    rejected = read_row(tmp_path, row)
    assert (rejected.reason, rejected.trace_id, rejected.span_id) == ("no_passages", "t", "s")


def test_passages_with_text_win_over_references_without(tmp_path):
    row = {"question": "Q", "answer": "A", "documents": [{"id": 1}], "context": ["P"]}
    assert read_row(tmp_path, row).record.passages[0].text == "P"


def test_the_resolved_mapping_names_the_path_in_the_rows_own_spelling():
    rows = [
        {
            "userInput": "Q",
            "outputs": {"answer": "A", "documents": ["P"]},
            "traceId": "t",
            "created_at": "2026-10-01",
        },
        {"userInput": "Q", "outputs": {"answer": "A"}, "deep": {"app": "x"}},
    ]
    assert resolved_mapping(rows, settings({"app": "deep.app"})) == {
        "question": "userInput",
        "answer": "outputs.answer",
        "passages": "outputs.documents",
        "trace_id": "traceId",
        "response_id": "traceId",
        "timestamp": "created_at",
        "app": "deep.app",
    }


def test_the_resolved_mapping_of_nothing_is_empty():
    assert resolved_mapping([], settings()) == resolved_mapping([{}], settings()) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("retrievalContext", "retrieval_context"),
        ("QUESTION", "question"),
        ("Query ID", "query_id"),
        ("a-b.cD", "a_b.c_d"),
    ],
)
def test_spellings(name, expected):
    assert snake(name) == expected


def test_a_path_mixes_nesting_dotted_keys_lists_and_json_text():
    row = Row({"a.b": {"c": '{"d.e": [{"f": 1}, {"g": 2}]}'}})
    assert row.find(("a", "b", "c", "d", "e", "1", "g")) == (2, "a.b.c.d.e.1.g")
    assert row.find(("a", "b", "c", "d", "e", "2", "g")) is None


def test_numbers_beyond_a_float_are_no_trouble(tmp_path):
    huge = 10**400
    row = {
        "question": huge,
        "passages": [{"text": huge, "score": huge}],
        "answer": huge,
        "id": huge,
        "ts": huge,
    }
    record = read_row(tmp_path, row).record
    assert (record.answer, record.passages[0].score, record.timestamp) == (str(huge), None, None)


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.just('[{"role": "user"}]'),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["text", "content", "role", "id", "documents", "answer", "a"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)
NAMES = [
    "answer",
    "question",
    "passages",
    "context",
    "outputs",
    "inputs",
    "messages",
    "id",
    "metadata",
    "timestamp",
]


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_no_row_raises(scratch, row):
    (scratch / "log.jsonl").write_text(json.dumps(row) + "\n")
    assert sum(summary(read(scratch / "log.jsonl")).values()) == 1


LONG = "The bridge was painted green in the spring of 1891 by two brothers."


def test_a_prompt_with_the_passages_in_it_is_no_question(tmp_path):
    prompt = f"Answer from the context.\nContext: {LONG}\nQuestion: Who painted it?"
    row = {"prompt": prompt, "contexts": [LONG], "answer": "Two brothers."}
    found = read_row(tmp_path, row)
    assert found.reason == "missing_question"
    assert "prompt holds the passages beside the question" in found.detail
    assert read_row(tmp_path, row | {"request": {"query": "Who?"}}).record.question == "Who?"
    asked = read_row(tmp_path, row | {"mine": "Who then?"}, question="mine")
    assert asked.record.question == "Who then?"


def test_a_passage_that_is_the_question_word_for_word_makes_no_prompt_of_it(tmp_path):
    found = read_row(tmp_path, {"question": f"{LONG} ", "passages": [LONG, "It is so."], "answer": "Yes."})
    assert found.record.question.strip() == LONG


def test_a_prompt_alone_is_no_question_where_questions_may_be_missing(tmp_path):
    line = {"input": f"{LONG} Who?", "documents": [{"page_content": LONG}], "output": "Two brothers."}
    (found,) = read_lines(tmp_path, line, allow_missing_question=True)
    assert found.record.question == ""
