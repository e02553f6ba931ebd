import csv
import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.formats import Accepted
from tests.jobs.formats.reading import answers, read, settings, summary

HEADER = ["question", "passages", "answer"]


def write(folder, *rows, delimiter=",", bom=False, name="log.csv"):
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([HEADER, *rows])
    (folder / name).write_bytes(text.getvalue().encode("utf-8-sig" if bom else "utf-8"))
    return folder / name


def write_bytes(folder, data):
    (folder / "log.csv").write_bytes(data)
    return folder / "log.csv"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("bom", [True, False])
def test_the_delimiter_is_read_off_the_header(tmp_path, delimiter, bom):
    path = write(tmp_path, ["Who, really?", "a;b|c,d\te", "Ada"], delimiter=delimiter, bom=bom)
    (row,) = read(path)
    assert (row.record.question, row.record.answer) == ("Who, really?", "Ada")


def test_a_tsv_file_is_a_table(tmp_path):
    assert answers(read(write(tmp_path, ["q", "p", "a"], delimiter="\t", name="log.tsv"))) == ["a"]


def test_cells_may_hold_line_breaks_quotes_and_nulls(tmp_path):
    answer = 'one\ntwo\r\nthree "four" \x00 five'
    rows = read(write(tmp_path, ["q", "p", answer], ["q", "p", "next"]))
    assert answers(rows) == [answer, "next"]
    assert [row.position for row in rows] == [0, 1]


@pytest.mark.parametrize(
    "cell", [json.dumps(["it's one", "two"]), repr(["it's one", "two"])], ids=["json", "python"]
)
def test_a_cell_with_a_json_or_python_list_is_a_list_of_passages(tmp_path, cell):
    (row,) = read(write(tmp_path, ["q", cell, "a"]))
    assert [passage.text for passage in row.record.passages] == ["it's one", "two"]
    assert not row.record.undivided


def test_a_cell_with_python_objects_is_a_list_of_passages(tmp_path):
    (row,) = read(write(tmp_path, ["q", repr([{"text": "one", "score": 0.5, "id": None}]), "a"]))
    assert (row.record.passages[0].text, row.record.passages[0].score) == ("one", 0.5)


@pytest.mark.parametrize(
    "cell",
    [
        "[__import__('os').system('true')]",
        "[" * 5000 + "]" * 5000,
        "[" + "1," * 200_000 + "]",
        "[" + "-" * 50_000 + "1]",
        "['a' 'b', '\\d']",
        "[1 +",
    ],
    ids=lambda cell: cell[:20],
)
def test_a_hostile_cell_is_text_or_a_list_and_never_code(tmp_path, cell):
    (row,) = read(write(tmp_path, ["q", cell, "a"]))
    assert row.record.passages


def test_a_row_with_the_wrong_number_of_cells_is_one_reject(tmp_path):
    rows = read(write(tmp_path, ["q", "p", "a"], ["q", "p"], ["q", "p", "a", "more"], ["q", "p", "b"]))
    assert answers(rows) == ["a", None, None, "b"]
    assert rows[1].detail == "2 cells, the header names 3"


def test_bytes_that_are_not_utf8_cost_one_row(tmp_path):
    rows = read(write_bytes(tmp_path, b"question,passages,answer\nq,p,a\nq,p,\xff\xfe\nq,p,b\n"))
    assert answers(rows) == ["a", None, "b"]
    assert rows[1].detail == "not UTF-8"


def test_an_unclosed_quote_is_one_reject(tmp_path):
    rows = read(write_bytes(tmp_path, b'question,passages,answer\nq,p,a\nq,p,"never closed\n'))
    assert summary(rows) == {"accepted": 1, "malformed_row": 1}


def test_a_cell_over_the_limit_is_one_reject_and_reading_goes_on(tmp_path):
    path = write(tmp_path, ["q", "p", "a"], ["q", "p", "x" * 5000], ["q", "p", "b"])
    assert answers(read(path, settings(max_record_bytes=2000))) == ["a", None, "b"]


def test_a_quoted_cell_of_many_lines_is_bounded_too(tmp_path):
    long = 'a "quoted" line\n' * 5000
    path = write(tmp_path, ["q", "p", "a"], ["q", long, long], ["q", "p", "b"], ["q", "p\np", "c"])
    rows = read(path, settings(max_record_bytes=2000))
    assert answers(rows) == ["a", None, "b", "c"]
    assert "read.max_record_bytes" in rows[1].detail


def test_memory_does_not_grow_with_a_line(tmp_path):
    path = write_bytes(tmp_path, b"question,passages,answer\nq,p," + b"x" * (32 << 20))
    tracemalloc.start()
    try:
        rows = read(path, settings(max_record_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary(rows) == {"malformed_row": 1}
    assert peak < 6 << 20


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_table_file_is_one_reject(tmp_path, data):
    (row,) = read(write_bytes(tmp_path, data))
    assert row.detail == "the file is empty"


def test_a_header_alone_is_no_row(tmp_path):
    assert read(write(tmp_path)) == []


def test_blank_lines_are_no_rows(tmp_path):
    assert answers(read(write_bytes(tmp_path, b"\nquestion,passages,answer\n\nq,p,a\n\n"))) == ["a"]


@pytest.mark.parametrize("header", [b'"question,passages', b'question,"pass"ages",answer\nq,p,a'])
def test_a_broken_header_is_one_reject(tmp_path, header):
    (row,) = read(write_bytes(tmp_path, header))
    assert "header" in row.detail


def test_of_two_columns_with_one_name_the_first_counts(tmp_path):
    (row,) = read(write_bytes(tmp_path, b"question,passages,answer,answer,\nq,p,a,b,c\n"))
    assert row.record.answer == "a"


def test_a_truncated_compressed_table_gives_the_rows_before_the_break_and_one_reject(tmp_path):
    path = write(tmp_path, *[["q", "p", f"answer {i * 7919}"] for i in range(5000)])
    data = gzip.compress(path.read_bytes())
    short = tmp_path / "short.csv.gz"
    short.write_bytes(data[: len(data) // 2])
    *before, last = read(short)
    assert summary(before).keys() == {"accepted"}
    assert "breaks off" in last.detail and last.position == len(before)


@given(rows=st.lists(st.tuples(*[st.text(max_size=20)] * 3), max_size=8))
def test_what_a_csv_writer_writes_is_read_back(scratch, rows):
    writable = [[cell.encode(errors="replace").decode() for cell in row] for row in rows]
    found = read(write(scratch, *writable))
    assert len(found) == len(rows)
    for row, (question, passages, answer) in zip(found, writable, strict=True):
        if isinstance(row, Accepted):
            assert (row.record.question, row.record.answer) == (question, answer)
        else:
            assert not (question.strip() and passages.strip() and answer.strip()) or passages == "{}"
