import gzip
import json
import random
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.formats import read_unit
from jobs.formats.source import BLOCK_BYTES
from jobs.storage import Storage
from tests.jobs.formats.reading import (
    GOOD,
    STORAGE,
    answers,
    read,
    read_lines,
    settings,
    summary,
    to_bytes,
    units_of,
)


def compress(data, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def rows_bytes(count):
    return b"".join(
        to_bytes({**GOOD, "answer": f"Answer {i}.", "noise": str(i * 7919)}) + b"\n" for i in range(count)
    )


def test_an_empty_file_is_one_reject(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"")
    (row,) = read(tmp_path / "log.jsonl")
    assert (row.reason, row.detail, row.position) == ("malformed_row", "the file is empty", 0)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_compressed_file_is_one_reject(tmp_path, suffix):
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(gzip.compress(b"") if suffix == ".gz" else compress(b"", "zstd"))
    (row,) = read(path)
    assert row.detail == "the file is empty"


def test_blank_lines_are_no_rows(tmp_path):
    assert summary(read_lines(tmp_path, "", GOOD, "   ", "\t", GOOD, "")) == {"accepted": 2}


def test_position_is_the_byte_offset_of_the_line(tmp_path):
    rows = read_lines(tmp_path, "", {**GOOD, "answer": "é"}, "broken", GOOD)
    lines = (tmp_path / "log.jsonl").read_bytes()
    assert [lines[row.position :].split(b"\n")[0] for row in rows] == lines.split(b"\n")[1:4]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_byte_order_mark_and_line_endings_change_nothing(tmp_path, ending):
    (tmp_path / "log.jsonl").write_bytes(b"\xef\xbb\xbf" + ending.join([to_bytes(GOOD)] * 3))
    assert answers(read(tmp_path / "log.jsonl")) == ["Ada."] * 3


def test_a_line_separator_inside_a_string_does_not_split_the_line(tmp_path):
    answer = "one\u2028two\u0085three\x1cfour"
    assert answers(read_lines(tmp_path, json.dumps({**GOOD, "answer": answer}, ensure_ascii=False))) == [
        answer
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "Who?", "answ',
        b'{"question": "\xff\xfe", "answer": "a", "passages": ["p"]}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"answer": ' + "9" * 5000 + "}",
        '["a list"]',
        "null",
        "17",
        '"a string"',
        "\x00\x00\x00",
    ],
    ids=lambda line: repr(line[:12]),
)
def test_a_broken_line_is_one_reject_and_its_neighbours_are_read(tmp_path, line):
    rows = read_lines(tmp_path, GOOD, line, GOOD)
    assert answers(rows) == ["Ada.", None, "Ada."]
    assert rows[1].reason == "malformed_row"
    assert "\n" not in rows[1].detail and len(rows[1].detail) < 200


def test_a_reject_does_not_quote_the_log(tmp_path):
    (row,) = read_lines(tmp_path, '{"answer": "SECRET", "question": SECRET')
    assert "SECRET" not in row.detail


def test_constants_and_exponents_that_json_does_not_know_are_null(tmp_path):
    line = '{"query": "q", "passages": ["p"], "answer": "a", "score": NaN, "ts": Infinity, "x": 1e999999}'
    (row,) = read_lines(tmp_path, line)
    assert row.record.timestamp is None


def test_lone_surrogates_become_replacement_characters_in_place(tmp_path):
    texts = r'"query": "\udc00", "passages": ["p\ud800q"], "answer": "a\ud800b"'
    (row,) = read_lines(tmp_path, "{" + texts + r', "id": "\udfff", "app": "\ud800"}')
    assert row.record.answer == "a\ufffdb"
    assert row.record.passages[0].text == "p\ufffdq"
    for text in (row.record.question, row.record.response_id, row.record.app, *row.record.metadata.values()):
        text.encode()


def test_a_huge_line_is_one_reject_that_names_the_setting(tmp_path):
    huge = json.dumps({**GOOD, "answer": "x" * (20 << 20)})
    rows = read_lines(tmp_path, GOOD, huge, GOOD)
    assert answers(rows) == ["Ada.", None, "Ada."]
    assert f"{len(huge)} bytes" in rows[1].detail
    assert "read.max_record_bytes" in rows[1].detail


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    line = to_bytes({**GOOD, "answer": "x" * 2000})
    assert summary(read_lines(tmp_path, line, max_record_bytes=len(line))) == {"accepted": 1}
    assert summary(read_lines(tmp_path, line, max_record_bytes=len(line) - 1)) == {"malformed_row": 1}


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "log.jsonl"
    line = to_bytes({**GOOD, "answer": "x" * 60_000}) + b"\n"
    with path.open("wb") as file:
        for _ in range(1000):
            file.write(line)
        file.write(b'{"answer": "' + b"y" * (4 << 20) + b"\n")
    assert path.stat().st_size > 60_000_000
    config = settings(unit_bytes=1 << 40, max_record_bytes=1 << 20)
    (unit,) = units_of(path, config)
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_unit(unit, STORAGE, config))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1001
    assert peak < 4 << 20


def test_memory_does_not_grow_with_a_compressed_line(tmp_path):
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    try:
        rows = read(path, settings(max_record_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary(rows) == {"malformed_row": 1}
    assert peak < 6 << 20


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ")),
        st.sampled_from([b"", b"\r", b"  ", b"{}", "é\u2028".encode()]),
        st.integers(0, 99).map(lambda i: to_bytes({**GOOD, "answer": f"a{i}"})),
    ),
    max_size=30,
)


@given(
    lines=LINES, unit_bytes=st.integers(1, 200), ends_with_newline=st.booleans(), limit=st.integers(1, 100)
)
def test_any_cut_gives_every_row_once_and_in_order(scratch, lines, unit_bytes, ends_with_newline, limit):
    path = scratch / "log.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends_with_newline else b""))
    whole = read(path, settings(unit_bytes=1 << 30, max_record_bytes=limit))
    parts = read(path, settings(unit_bytes=unit_bytes, max_record_bytes=limit))
    assert parts == whole
    n_rows = sum(1 for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip() or len(line) > limit)
    assert len(whole) == n_rows or path.stat().st_size == 0


def test_any_cut_of_a_file_larger_than_a_block_gives_every_row_once(tmp_path):
    rng = random.Random(0)
    lines = [to_bytes({**GOOD, "answer": f"{i}" + "x" * rng.choice([10, 3000, 90_000])}) for i in range(40)]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    assert sum(map(len, lines)) > 3 * BLOCK_BYTES
    whole = read(tmp_path / "log.jsonl", settings(unit_bytes=1 << 30))
    assert len(whole) == 40
    for unit_bytes in (5_000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 700_000):
        assert read(tmp_path / "log.jsonl", settings(unit_bytes=unit_bytes)) == whole


def test_units_inside_a_huge_line_do_not_read_to_its_end(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * 1_000_000 + b"\n" + to_bytes(GOOD))
    counts = []

    class Counting(Storage):
        def open(self, url, block_bytes=None):
            file = super().open(url, block_bytes)
            inner = file.read
            file.read = lambda size=-1: counts.append(size) or inner(size)
            return file

    config = settings(unit_bytes=10_000, max_record_bytes=1000)
    units = units_of(path, config)
    rows = [row for unit in units[1:50] for row in read_unit(unit, Counting(), config)]
    assert rows == []
    assert sum(counts) <= 49 * 10_000


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_read(tmp_path, suffix):
    data = rows_bytes(50)
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == ".gz" else compress(data, "zstd"))
    rows = read(path)
    assert answers(rows) == [f"Answer {i}." for i in range(50)]
    assert data[rows[3].position :].startswith(b'{"question"')


def test_two_gzip_members_in_one_file_are_both_read(tmp_path):
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(rows_bytes(3)) + gzip.compress(rows_bytes(2)))
    assert summary(read(tmp_path / "log.jsonl.gz")) == {"accepted": 5}


def test_a_gz_name_on_plain_bytes_is_read_as_it_is(tmp_path):
    (tmp_path / "log.jsonl.gz").write_bytes(rows_bytes(3))
    assert summary(read(tmp_path / "log.jsonl.gz")) == {"accepted": 3}


@pytest.mark.parametrize(("suffix", "damage"), [(".gz", "cut"), (".gz", "overwritten"), (".zst", "cut")])
def test_a_broken_compressed_file_gives_the_rows_before_the_break_and_one_reject(tmp_path, suffix, damage):
    noise = random.Random(1)
    lines = [to_bytes({**GOOD, "answer": str(i), "noise": noise.randbytes(400).hex()}) for i in range(2000)]
    data = b"\n".join(lines)
    whole = bytearray(gzip.compress(data) if suffix == ".gz" else compress(data, "zstd"))
    half = len(whole) // 2
    if damage == "cut":
        del whole[half:]
    else:
        whole[half : half + 50] = b"\xff" * 50
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(whole)
    *before, last = read(path)
    assert last.reason == "malformed_row" and "breaks off" in last.detail
    assert answers(before) == [str(i) for i in range(len(before))]
    assert 100 < len(before) < 2000
    assert last.position == before[-1].position + len(lines[len(before) - 1]) + 1


class FailingStorage(Storage):
    """Breaks after the first read of an object."""

    def open(self, url, block_bytes=None):
        file = super().open(url, block_bytes)
        inner, calls = file.read, []

        def read_once(size=-1):
            calls.append(size)
            if len(calls) > 1:
                raise ConnectionResetError("the store is gone")
            return inner(size)

        file.read = read_once
        return file


@pytest.mark.parametrize(
    "name", ["log.jsonl", "log.jsonl.gz", "log.jsonl.zst", "log.json", "log.csv", "log.parquet"]
)
def test_a_store_that_fails_raises_and_is_no_reject(tmp_path, name):
    path = tmp_path / name
    data = {
        ".gz": gzip.compress(rows_bytes(2000)),
        ".zst": compress(rows_bytes(2000), "zstd"),
        ".json": json.dumps([GOOD]).encode(),
    }
    path.write_bytes(data.get(path.suffix, rows_bytes(6000)))
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([GOOD] * 100), path)
    (unit,) = units_of(path)
    with pytest.raises(ConnectionResetError, match="the store is gone"):
        list(read_unit(unit, FailingStorage(), settings()))


def test_a_file_that_is_gone_raises(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(rows_bytes(1))
    (unit,) = units_of(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        list(read_unit(unit, STORAGE, settings()))
