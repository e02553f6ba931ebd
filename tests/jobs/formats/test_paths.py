"""Paths in raw rows: one look-up, whatever the spelling, and nothing of one row in another."""

import itertools
from typing import Any

import pytest

from jobs.formats import paths as module
from jobs.formats.aliases import ANSWER, PASSAGES, QUESTION
from jobs.formats.labels import LABELS, METADATA
from jobs.formats.paths import Found, Row, paths, snake

ROWS: tuple[dict[Any, Any], ...] = (
    {"question": "Why?", "answer": "So.", "passages": ["p"]},
    {"inputs": {"question": "Why?"}, "outputs": '{"answer": "So."}', "metadata": {"app": "shop"}},
    {"Inputs.Question": "Why?", "attributes.retrieval.documents": ["p"], "traceId": "t"},
    {"response": {"choices": [{"message": {"content": "So."}}]}, "input": {"value": "Why?"}},
    {"llm": {"model_name": "m"}, 7: "no name", None: "none either"},
    {"QUESTION": None, "query": "Why?"},
    {},
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("retrievalContext", "retrieval_context"),
        ("Retrieval Context", "retrieval_context"),
        ("RETRIEVAL_CONTEXT", "retrieval_context"),
        (" user-input ", "user_input"),
        ("aB" * 1000, "_".join(["a", *["ba"] * 999, "b"])),
    ],
)
def test_a_name_has_one_spelling(name: str, expected: str) -> None:
    assert snake(name) == expected


@pytest.mark.parametrize("number", range(len(ROWS)))
@pytest.mark.parametrize("candidates", [QUESTION, ANSWER, PASSAGES, METADATA, *LABELS.values()])
def test_nothing_is_found_outside_of_the_paths_within_a_row(
    number: int, candidates: tuple[tuple[str, ...], ...]
) -> None:
    row = Row(ROWS[number])
    within = row.within(candidates)
    assert list(within) == [path for path in candidates if path in within], "the order is the candidates'"
    assert not any(Row(ROWS[number]).find(path) for path in candidates if path not in within)


def test_few_of_many_paths_are_within_a_row() -> None:
    assert Row(ROWS[0]).within(ANSWER) == tuple(path for path in ANSWER if path[0] == "answer")
    assert Row({}).within(ANSWER) == ()


def test_rows_with_the_same_keys_share_no_values() -> None:
    question = paths("question")[0]
    assert Row({"Question": "one"}).find(question) == Found("one", "Question")
    assert Row({"Question": "two"}).find(question) == Found("two", "Question")


@pytest.mark.parametrize("keys", list(itertools.permutations(["userInput", "user_input", "User Input"])))
def test_the_first_of_two_keys_with_one_meaning_wins_unless_one_is_spelled_so(keys: tuple[str, ...]) -> None:
    row = Row({key: key for key in keys})
    assert row.find(("user_input",)) == Found("user_input", "user_input")
    others = [key for key in keys if key != "user_input"]
    assert Row({key: key for key in others}).find(("user_input",)) == Found(others[0], others[0])


def test_the_keys_of_a_nested_object_are_its_own() -> None:
    row = Row({"inputs": {"Query": "inside"}, "Query": "outside"})
    assert row.find(("inputs", "query")) == Found("inside", "inputs.Query")
    assert row.find(("query",)) == Found("outside", "Query")


def test_long_keys_are_found_and_not_kept() -> None:
    for cache in (module._cached_shape, module._cached_snake):
        cache.cache_clear()
    for size in (10_000, 1_000_000):
        long = "longName" * (size // 8)
        assert Row({long: 1, "Answer": "So."}).find(("answer",)) == Found("So.", "Answer")
    assert module._cached_shape.cache_info().currsize == 0
    assert module._cached_snake.cache_info().currsize <= 1


def test_many_short_keys_are_not_kept_either() -> None:
    module._cached_shape.cache_clear()
    row = Row({f"k{number}": number for number in range(10_000)})
    assert row.find(("k9999",)) == Found(9999, "k9999")
    assert module._cached_shape.cache_info().currsize == 0
