import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import parts
from jobs.errors import JobError
from jobs.parts import delete_stale, encode, put_table, read_part
from jobs.storage import Storage, join

SCHEMA = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("text", pa.string())])
TABLE = pa.table({"n": list(range(100)), "text": [f"t{i % 7}" for i in range(100)]}, schema=SCHEMA)


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def test_a_part_is_named_by_its_bytes_and_says_what_it_holds(out):
    part = put_table(Storage(), out, "findings/sentences", "2026-01-01", "000001-ab12", TABLE)
    data = Storage().read(join(out, part["url_suffix"]))
    sha256 = hashlib.sha256(data).hexdigest()
    assert part == {
        "table": "sentences",
        "date": "2026-01-01",
        "url_suffix": f"findings/sentences/date=2026-01-01/000001-ab12-{sha256[:12]}.parquet",
        "rows": 100,
        "sha256": sha256,
    }
    assert read_part(Storage(), out, part, SCHEMA).equals(TABLE)


def test_the_same_rows_give_the_same_bytes_however_the_table_was_put_together():
    # Long texts: with short ones, chunks of a table do not show in its pages.
    table = pa.table(
        {"n": list(range(3000)), "text": ["x" * 2000 + str(i) for i in range(3000)]}, schema=SCHEMA
    )
    pieces = pa.concat_tables([table.slice(start, 100) for start in range(0, 3000, 100)])
    assert encode(pieces) == encode(table)
    assert encode(table.slice(1)) != encode(table)


def test_a_file_that_reads_back_short_is_not_published(out, monkeypatch):
    write = pq.write_table
    monkeypatch.setattr(parts.pq, "write_table", lambda table, *a, **k: write(table.slice(1), *a, **k))
    with pytest.raises(JobError, match="100 rows reads back as 99"):
        put_table(Storage(), out, "findings/sentences", "2026-01-01", "u", TABLE)
    assert list(Storage().list(out)) == []


@pytest.mark.parametrize(
    "date", ["../../etc", "2026-1-1", "2026-01-01/..", "", "２０２６-01-01", "2026-01-01\n"]
)
def test_a_date_that_is_no_date_never_becomes_a_path(out, date):
    with pytest.raises(JobError, match="dates are written YYYY-MM-DD"):
        put_table(Storage(), out, "findings/sentences", date, "u", TABLE)


@pytest.mark.parametrize("stem", ["../u", "a/b", "", "a\\b"])
def test_a_stem_with_a_separator_never_becomes_a_path(out, stem):
    with pytest.raises(JobError, match="cannot name a part"):
        put_table(Storage(), out, "findings/sentences", "2026-01-01", stem, TABLE)


def test_fewer_columns_can_be_read(out):
    part = put_table(Storage(), out, "findings/sentences", "2026-01-01", "u", TABLE)
    assert read_part(Storage(), out, part, pa.schema([SCHEMA.field("text")])).column_names == ["text"]


def test_changed_bytes_a_lost_file_and_another_schema_are_told_apart(out):
    part = put_table(Storage(), out, "findings/sentences", "2026-01-01", "u", TABLE)
    with pytest.raises(JobError, match="not a part of this version"):
        read_part(Storage(), out, part, pa.schema([pa.field("other", pa.int32())]))
    url = join(out, part["url_suffix"])
    data = Storage().read(url)
    Storage().write(url, data[:-1])
    with pytest.raises(JobError, match="not the bytes that its marker names"):
        read_part(Storage(), out, part, SCHEMA)
    Storage().delete(url)
    with pytest.raises(JobError, match="part is missing"):
        read_part(Storage(), out, part, SCHEMA)


def test_only_our_own_stale_files_are_deleted(tmp_path):
    out = str(tmp_path / "findings" / "x")  # the pattern also occurs in the folders above
    old, new = (
        put_table(Storage(), out, "findings/sentences", "2026-01-01", stem, TABLE) for stem in ("old", "new")
    )
    notes = join(out, "findings", "notes.md")
    Storage().write(notes, b"mine")
    pattern = r"findings/sentences/date=[^/]+/[^/]+\.parquet"
    delete_stale(Storage(), out, "findings", pattern, {new["url_suffix"]})
    assert sorted(found.url for found in Storage().list(out)) == sorted([join(out, new["url_suffix"]), notes])
    assert not Storage().exists(join(out, old["url_suffix"]))
