import json

import pytest

from detector.record import Passage
from tests.jobs.formats.reading import GOOD, read_row


def passages(folder, value, **more):
    return read_row(folder, {"question": "Q", "answer": "A", "passages": value, **more}).record


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("P", Passage("P")),
        (7, Passage("7")),
        ({"text": "P", "id": 7, "score": 0.5, "source": "s"}, Passage("P", "7", 0.5, "s")),
        ({"content": "P", "doc_id": "d", "similarity": "0.5"}, Passage("P", "d", 0.5)),
        ({"page_content": "P", "metadata": {"source": "a.md"}}, Passage("P", "a.md", None, "a.md")),
        ({"pageContent": "P", "metadata": {"id": "m", "source": "a.md"}}, Passage("P", "m", None, "a.md")),
        ({"context": "P", "source": "s"}, Passage("P", "s", None, "s")),
        ({"node": {"text": "P", "id_": "n"}, "score": 0.25}, Passage("P", "n", 0.25)),
        ({"document": {"content": "P", "id": "d", "score": 1}}, Passage("P", "d", 1.0)),
        ({"document.content": "P", "document.id": "d"}, Passage("P", "d")),
        ({"document": "P"}, Passage("P")),
        ({"id": "v", "score": 0.5, "metadata": {"text": "P"}}, Passage("P", "v", 0.5)),
        ({"[doc1]": {"title": "t", "content": "P"}}, Passage("P", "[doc1]")),
        ({"text": "P", "score": "high", "id": None}, Passage("P")),
        ({"text": "P", "score": float("nan"), "id": ""}, Passage("P")),
    ],
    ids=repr,
)
def test_one_passage_in_every_shape(tmp_path, item, expected):
    assert passages(tmp_path, [item]).passages == (expected,)


@pytest.mark.parametrize(
    "value",
    [
        ["one", "two"],
        json.dumps(["one", "two"]),
        [["one", "two"]],
        [["one", 0.9], ["two", 0.8]],
        {"documents": ["one", "two"]},
        {"documents": [{"text": "one"}, {"text": "two"}]},
        {"a": {"text": "one"}, "b": {"text": "two"}},
        json.dumps({"documents": ["one", "two"]}),
    ],
    ids=repr,
)
def test_a_list_of_passages_in_every_shape(tmp_path, value):
    record = passages(tmp_path, value)
    assert [passage.text for passage in record.passages] == ["one", "two"]
    assert not record.undivided


@pytest.mark.parametrize(
    "text", ["one text", "[1] not a list", '{"stars": 4, "name": "Ada\'s"}', "[broken", '"a" and "b"']
)
def test_one_plain_text_is_an_undivided_context(tmp_path, text):
    record = passages(tmp_path, text)
    assert record.undivided
    assert record.passages == (Passage(text),)


@pytest.mark.parametrize(
    "value", [None, "", "  ", [], [None], ["", " "], [[]], {}, "[]", "{}", "null", '""', 0 * [1]]
)
def test_nothing_retrieved_is_no_passages(tmp_path, value):
    rejected = read_row(
        tmp_path, {"question": "Q", "answer": "A", "passages": value if value != "null" else None}
    )
    assert rejected.reason == "no_passages"


def test_no_known_name_is_no_passages_and_says_what_to_do(tmp_path):
    rejected = read_row(tmp_path, {"question": "Q", "answer": "A"})
    assert rejected.reason == "no_passages"
    assert "fields: {passages: your.path}" in rejected.detail


@pytest.mark.parametrize(
    "value", [[{"id": "1"}, {"id": "2", "text": ""}], [{"doc_id": 1, "score": 0.5}], '[{"id": 1}]']
)
def test_references_without_text_are_passage_text_missing(tmp_path, value):
    rejected = read_row(tmp_path, {**GOOD, "passages": value})
    assert rejected.reason == "passage_text_missing"
    assert "passages.text" in rejected.detail


def test_passages_without_text_among_others_are_left_out_and_their_places_are_kept(tmp_path):
    record = passages(tmp_path, [{"id": "a", "text": "one"}, {"id": "b"}, None, {"id": "d", "text": "two"}])
    assert [(passage.id, passage.text) for passage in record.passages] == [("a", "one"), ("d", "two")]
    assert record.metadata["passages_without_text"] == "1,2"


@pytest.mark.parametrize("ids", [["x", 7], '["x", 7]'])
def test_ids_beside_plain_texts_are_joined(tmp_path, ids):
    record = passages(tmp_path, ["one", "two"], retrieved_context_ids=ids)
    assert [passage.id for passage in record.passages] == ["x", "7"]


def test_ids_of_another_length_are_ignored(tmp_path):
    record = passages(tmp_path, ["one", "two"], retrieved_context_ids=["x"])
    assert [passage.id for passage in record.passages] == [None, None]
