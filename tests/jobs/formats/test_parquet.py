import gzip
import io
import subprocess
import sys
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.formats import parquet, read_unit
from jobs.listing import WorkUnit
from tests.jobs.formats.reading import GOOD, STORAGE, answers, read, settings, summary, units_of


def rows(count, **more):
    return [{**GOOD, "answer": f"Answer {i}.", **more} for i in range(count)]


def write(folder, table, name="log.parquet", **options):
    table = table if isinstance(table, pa.Table) else pa.Table.from_pylist(table)
    pq.write_table(table, folder / name, **options)
    return folder / name


def test_rows_keep_their_order_and_their_number_in_the_file(tmp_path):
    found = read(write(tmp_path, rows(25), row_group_size=10))
    assert answers(found) == [f"Answer {i}." for i in range(25)]
    assert [row.position for row in found] == list(range(25))


@given(count=st.integers(0, 60), group=st.integers(1, 40), unit_rows=st.integers(1, 50))
def test_any_cut_gives_every_row_once_and_in_order(scratch, count, group, unit_rows):
    table = pa.Table.from_pylist(rows(count), schema=pa.Table.from_pylist([GOOD]).schema)
    path = write(scratch, table, row_group_size=group)
    config = settings(unit_rows=unit_rows, unit_bytes=1)
    found = read(path, config)
    assert [row.position for row in found] == list(range(count))
    assert answers(found) == [f"Answer {i}." for i in range(count)]
    per_group = {}
    for unit in units_of(path, config):
        per_group[unit.row_group] = per_group.get(unit.row_group, 0) + 1
    assert all(n <= 16 for n in per_group.values())


@pytest.mark.parametrize(
    ("passages", "texts"),
    [
        (pa.array([["one", "two"]]), ["one", "two"]),
        (pa.array([[{"text": "one", "id": "1"}, {"text": "two", "id": "2"}]]), ["one", "two"]),
        (pa.array([[{"page_content": "one", "metadata": {"source": "a.md"}}]]), ["one"]),
        (pa.array(['["one", "two"]']), ["one", "two"]),
        (pa.array(["one and two"]), ["one and two"]),
        (pa.array([["one"]], pa.large_list(pa.large_string())), ["one"]),
        (pa.array([["one"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))), ["one"]),
        (pa.array([[b"one"]]), ["one"]),
        (pa.array([[[("text", "one"), ("id", "7")]]], pa.list_(pa.map_(pa.string(), pa.string()))), ["one"]),
    ],
    ids=["list", "structs", "langchain", "json", "text", "large", "dictionary", "binary", "maps"],
)
def test_passages_in_every_column_type(tmp_path, passages, texts):
    (row,) = read(write(tmp_path, pa.table({"question": ["q"], "answer": ["a"], "contexts": passages})))
    assert [passage.text for passage in row.record.passages] == texts
    assert row.record.undivided == (texts == ["one and two"])


def test_structs_and_maps_are_walked_by_dotted_path(tmp_path):
    table = pa.table(
        {
            "inputs": [{"question": "Who?", "top_k": 3}],
            "outputs": ['{"answer": "Ada.", "documents": [{"page_content": "p"}]}'],
            "metadata": pa.array([[("app", "shop"), ("lang", "en-GB")]], pa.map_(pa.string(), pa.string())),
        }
    )
    record = read(write(tmp_path, table))[0].record
    assert (record.question, record.answer, record.passages[0].text) == ("Who?", "Ada.", "p")
    assert (record.app, record.language) == ("shop", "en")


def test_columns_named_with_dots_are_found(tmp_path):
    table = pa.table(
        {
            "context.span_id": ["s1"],
            "context.trace_id": ["t1"],
            "attributes.input.value": ["q"],
            "attributes.output.value": ["a"],
            "attributes.retrieval.documents": pa.array([[{"document.content": "p", "document.id": "d"}]]),
        }
    )
    record = read(write(tmp_path, table))[0].record
    assert (record.trace_id, record.span_id, record.response_id) == ("t1", "s1", "s1")
    assert (record.passages[0].text, record.passages[0].id) == ("p", "d")


def test_only_columns_that_matter_are_decoded(tmp_path, monkeypatch):
    asked = []
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, **options: asked.append(options["columns"]) or iter_batches(self, **options),
    )
    path = write(tmp_path, rows(3, embedding=[0.5] * 100, my_col="app1"))
    assert summary(read(path, settings({"app": "my_col"}))) == {"accepted": 3}
    assert set(asked[0]) == {"question", "passages", "answer", "my_col"}


def test_a_table_without_any_known_column_still_counts_its_rows(tmp_path):
    found = read(write(tmp_path, pa.table({"x": range(5)})))
    assert summary(found) == {"missing_answer": 5}


@pytest.mark.parametrize(
    "value",
    [
        pa.array([datetime(2026, 10, 1, 2, 3, 4)], pa.timestamp("ns")),
        pa.array([datetime(2026, 10, 1, 2, 3, 4)], pa.timestamp("s")),
        pa.array([datetime(2026, 10, 1, 2, 3, 4, tzinfo=UTC)], pa.timestamp("us", tz="America/New_York")),
        pa.array([1790820184123456789], pa.int64()).cast(pa.timestamp("ns")),
        pa.array([1790820184], pa.int64()),
        pa.array(["2026-10-01T02:03:04Z"]),
    ],
    ids=lambda value: str(value.type),
)
def test_timestamps_of_every_type(tmp_path, value):
    table = pa.Table.from_pylist([GOOD]).append_column("timestamp", value)
    found = read(write(tmp_path, table))[0].record.timestamp
    assert found.replace(microsecond=0) == datetime(2026, 10, 1, 2, 3, 4, tzinfo=UTC)


def test_a_file_cut_off_in_the_middle_is_one_unit_and_one_reject(tmp_path):
    path = write(tmp_path, rows(5000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (unit,) = units_of(path)
    (row,) = read_unit(unit, STORAGE, settings())
    assert row.reason == "malformed_row" and "footer" in row.detail


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1" * 3, b"PAR1\xff\xff\xff\x7fPAR1", b"no parquet at all"]
)
def test_what_is_no_parquet_is_one_reject(tmp_path, data):
    (tmp_path / "log.parquet").write_bytes(data)
    (row,) = read(tmp_path / "log.parquet")
    assert row.reason == "malformed_row"


def overwrite_page(path, group, column="answer"):
    """Destroy the pages of one column of one row group; the footer stays whole."""
    metadata = pq.read_metadata(path)
    chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
    chunk = next(c for c in chunks if c.path_in_schema == column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def test_no_damaged_byte_of_a_footer_ends_the_process(tmp_path):
    # Arrow's own answer to some of them is std::terminate, so that they are read in a process of their own.
    path = write(tmp_path, rows(20), row_group_size=10)
    run = [sys.executable, "-m", "tests.jobs.formats.damaged_footers", str(path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    n_files, n_rows = map(int, done.stdout.split())
    assert n_files > 1500 and n_rows > n_files


@pytest.mark.parametrize("unit_rows", [1000, 30, 7, 1])
def test_a_broken_page_is_one_reject_however_the_file_is_cut(tmp_path, unit_rows):
    path = write(tmp_path, rows(90), row_group_size=30)
    overwrite_page(path, group=1)
    found = read(path, settings(unit_rows=unit_rows, unit_bytes=1 if unit_rows < 1000 else 1 << 20))
    assert answers(found) == [
        *(f"Answer {i}." for i in range(30)),
        None,
        *(f"Answer {i}." for i in range(60, 90)),
    ]
    broken = found[30]
    assert (broken.reason, broken.position) == ("malformed_row", 30)
    assert "30 rows are lost" in broken.detail


@pytest.mark.parametrize("unit_rows", [10_000, 700])
def test_rows_before_a_break_inside_a_row_group_are_read(tmp_path, unit_rows):
    table = pa.Table.from_pylist([{**GOOD, "answer": f"Answer {i}." + "x" * 100} for i in range(5000)])
    path = write(tmp_path, table, data_page_size=4096, use_dictionary=False, compression="none")
    data = path.read_bytes()
    at = data.index(b"Answer 3000.")
    path.write_bytes(data[: at - 2000] + b"\xff" * 8000 + data[at + 6000 :])
    *before, last = read(path, settings(unit_rows=unit_rows, unit_bytes=1))
    assert last.reason == "malformed_row" and "breaks off" in last.detail
    assert answers(before)[:2000] == [f"Answer {i}." + "x" * 100 for i in range(2000)]
    assert last.position == len(before)


@pytest.mark.parametrize("declared", [pa.binary(), pa.string()], ids=str)
def test_text_that_is_not_utf8_costs_one_row(tmp_path, declared):
    data = pa.array([b"a", b"\xff\xfe", b"b"]).buffers()
    answer = pa.Array.from_buffers(declared, 3, data)
    table = pa.table({"question": ["q"] * 3, "passages": ["p"] * 3, "answer": answer})
    assert answers(read(write(tmp_path, table))) == ["a", None, "b"]


def test_a_row_over_the_limit_is_one_reject(tmp_path):
    path = write(tmp_path, [*rows(3), {**GOOD, "answer": "x" * 50_000}, *rows(2)])
    found = read(path, settings(max_record_bytes=20_000))
    assert summary(found) == {"accepted": 5, "malformed_row": 1}
    assert "read.max_record_bytes" in found[3].detail


def test_a_row_group_whose_rows_are_over_the_limit_is_not_decoded(tmp_path, monkeypatch):
    path = write(tmp_path, [{**GOOD, "answer": "x" * 100_000}] * 2)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, **_: pytest.fail("decoded"))
    (row,) = read(path, settings(max_record_bytes=20_000, unit_rows=1, unit_bytes=1))
    assert row.reason == "malformed_row" and "read.max_record_bytes" in row.detail


def test_a_bomb_of_one_repeated_value_is_decoded_in_small_batches(tmp_path, monkeypatch):
    """One large dictionary entry in every row: 1 MB stored, 50 MB decoded at once."""
    rows = {"question": ["q"] * 50, "passages": ["p"] * 50, "answer": ["x" * 1_000_000] * 50}
    path = write(tmp_path, pa.table(rows), dictionary_pagesize_limit=2_000_000)
    assert path.stat().st_size < 2_000_000
    monkeypatch.setattr(parquet, "BATCH_BYTES", 4 << 20)
    before = pa.total_allocated_bytes()
    (unit,) = units_of(path)
    peak = 0
    for _ in read_unit(unit, STORAGE, settings()):
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 16 << 20


def test_a_file_that_changed_after_it_was_listed_is_a_reject(tmp_path):
    path = write(tmp_path, rows(30), row_group_size=10)
    unit = units_of(path, settings(unit_bytes=1))[-1]
    write(tmp_path, rows(5))
    (row,) = read_unit(unit, STORAGE, settings())
    assert "changed" in row.detail


def test_a_unit_survives_json(tmp_path):
    for unit in units_of(write(tmp_path, rows(30), row_group_size=10), settings(unit_bytes=1)):
        assert WorkUnit.from_json(unit.to_json()) == unit


def test_an_empty_table_has_no_rows(tmp_path):
    assert read(write(tmp_path, pa.Table.from_pylist([GOOD]).slice(0, 0))) == []


def test_a_compressed_parquet_file_is_one_reject(tmp_path):
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(3)), data)
    (tmp_path / "log.parquet.gz").write_bytes(gzip.compress(data.getvalue()))
    assert summary(read(tmp_path / "log.parquet.gz")) == {"malformed_row": 1}
