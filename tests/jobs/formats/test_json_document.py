import gzip
import json

import pytest

from tests.jobs.formats.reading import GOOD, answers, read, settings, summary


def write(folder, document, name="log.json"):
    (folder / name).write_text(document if isinstance(document, str) else json.dumps(document))
    return folder / name


def test_a_list_of_rows_is_read_with_row_numbers_as_positions(tmp_path):
    rows = read(write(tmp_path, [GOOD, {**GOOD, "answer": "B"}]))
    assert answers(rows) == ["Ada.", "B"]
    assert [row.position for row in rows] == [0, 1]


@pytest.mark.parametrize("key", ["results", "testCases", "data", "records", "rows", "samples", "examples"])
def test_an_object_may_hold_the_list_of_rows(tmp_path, key):
    assert summary(read(write(tmp_path, {"version": 3, key: [GOOD, GOOD]}))) == {"accepted": 2}


def test_one_object_is_one_row(tmp_path):
    assert summary(read(write(tmp_path, GOOD))) == {"accepted": 1}


def test_a_row_that_logs_its_search_results_is_not_taken_for_a_holder_of_rows(tmp_path):
    row = {"question": "Who?", "answer": "Ada.", "passages": ["p"], "results": [{"text": "a"}, {"text": "b"}]}
    assert summary(read(write(tmp_path, row))) == {"accepted": 1}


@pytest.mark.parametrize("document", ["[]", '{"results": []}'])
def test_a_document_without_rows_has_no_rows(tmp_path, document):
    assert read(write(tmp_path, document)) == []


@pytest.mark.parametrize("document", ["", "  \n ", "\ufeff"])
def test_an_empty_document_is_one_reject(tmp_path, document):
    (row,) = read(write(tmp_path, document))
    assert (row.reason, row.detail) == ("malformed_row", "the file is empty")


@pytest.mark.parametrize("document", ['[{"answer": "a"', "[" * 100_000, "[1" + "0" * 5000 + "]", "no json"])
def test_a_broken_document_is_one_reject(tmp_path, document):
    (row,) = read(write(tmp_path, document))
    assert row.reason == "malformed_row"
    assert "read.format=jsonl" in row.detail


def test_items_that_are_no_objects_are_one_reject_each(tmp_path):
    assert summary(read(write(tmp_path, [GOOD, 5, None, "x", [GOOD]]))) == {"accepted": 1, "malformed_row": 4}


def test_a_document_over_the_limit_is_one_reject_that_says_what_to_do(tmp_path):
    (row,) = read(write(tmp_path, [GOOD] * 1000), settings(max_file_bytes=2000))
    assert "read.max_file_bytes" in row.detail and "JSON lines" in row.detail


def test_the_limit_counts_decompressed_bytes(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 10_000_000 + b"]"))
    (row,) = read(path, settings(max_file_bytes=1_000_000))
    assert row.reason == "malformed_row" and "read.max_file_bytes" in row.detail


def test_a_truncated_compressed_document_is_one_reject(tmp_path):
    path = tmp_path / "log.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{**GOOD, "n": str(i)} for i in range(5000)]).encode())[:-500])
    (row,) = read(path)
    assert row.reason == "malformed_row" and "breaks off" in row.detail
