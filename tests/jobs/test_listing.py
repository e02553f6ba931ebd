import gzip
import json
import logging
import random
from itertools import chain, pairwise
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import ConfigError
from jobs.formats import Accepted, read_unit
from jobs.listing import InputFile, WorkUnit, cut, freeze, partitions_of
from jobs.storage import Storage
from tests.jobs.formats.reading import GOOD, STORAGE, answers, read, settings, to_bytes, units_of

LINE = to_bytes(GOOD) + b"\n"


def make(folder, *names, data=LINE):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(folder, *logs, **options):
    files = freeze(list(logs) or [str(folder)], STORAGE, settings(**options).read)
    return [file.url.removeprefix(f"{folder}/") for file in files]


def only(path, **options):
    (file,) = freeze([str(path)], STORAGE, settings(**options).read)
    return file


# What is listed


def test_a_folder_is_listed_sorted_and_unique(tmp_path):
    make(tmp_path, "b.jsonl", "a.jsonl", "sub/c.jsonl")
    everything = ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names(tmp_path) == everything
    assert (
        names(tmp_path, f"{tmp_path}/b.jsonl", str(tmp_path), f"{tmp_path}/sub/", f"{tmp_path}/*.jsonl")
        == everything
    )


def test_a_file_is_listed_with_its_size_and_etag(tmp_path):
    make(tmp_path, "a.jsonl")
    file = only(tmp_path / "a.jsonl")
    assert (file.size, file.format, file.compression, file.partitions) == (len(LINE), "jsonl", None, {})
    make(tmp_path, "a.jsonl", data=LINE * 2)
    assert only(tmp_path / "a.jsonl").etag != file.etag


def test_globs_match_files_and_folders(tmp_path):
    make(tmp_path, "day=1/a.jsonl", "day=2/b.jsonl", "day=2/deep/c.jsonl", "other/d.jsonl")
    assert names(tmp_path, f"{tmp_path}/day=*") == ["day=1/a.jsonl", "day=2/b.jsonl", "day=2/deep/c.jsonl"]
    assert names(tmp_path, f"{tmp_path}/day=*/*.jsonl") == ["day=1/a.jsonl", "day=2/b.jsonl"]
    assert names(tmp_path, f"{tmp_path}/**/c.jsonl") == ["day=2/deep/c.jsonl"]


def test_relative_paths_are_listed_as_absolute_ones(tmp_path, monkeypatch):
    make(tmp_path, "logs/a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert (
        names(tmp_path, "logs")
        == names(tmp_path, "logs/*.jsonl")
        == names(tmp_path, "./logs/a.jsonl")
        == ["logs/a.jsonl"]
    )


def test_names_with_glob_characters_are_files_first(tmp_path):
    make(tmp_path, "run[1].jsonl", "run1.jsonl")
    assert names(tmp_path, f"{tmp_path}/run[1].jsonl") == ["run[1].jsonl"]


@pytest.mark.parametrize(
    "name",
    [
        "_SUCCESS",
        ".hidden.jsonl",
        "_temporary/0/a.jsonl",
        ".sub/a.jsonl",
        "a.jsonl.crc",
        ".a.jsonl.17.partial",
        "a.tmp",
    ],
)
def test_hidden_and_unfinished_files_are_left_out(tmp_path, name):
    make(tmp_path, "a.jsonl", name)
    assert names(tmp_path) == names(tmp_path, f"{tmp_path}/**") == ["a.jsonl"]


def test_folders_above_the_argument_do_not_hide_its_files(tmp_path):
    make(tmp_path, "_archive/.day/a.jsonl")
    assert names(tmp_path, f"{tmp_path}/_archive/.day") == ["_archive/.day/a.jsonl"]
    assert names(tmp_path, f"{tmp_path}/_archive/.day/*.jsonl") == ["_archive/.day/a.jsonl"]


def test_a_hive_folder_may_begin_with_an_underscore(tmp_path):
    make(tmp_path, "_day=1/a.jsonl")
    assert names(tmp_path) == ["_day=1/a.jsonl"]


def test_a_hidden_file_named_in_full_is_read(tmp_path):
    make(tmp_path, "_a.jsonl")
    assert names(tmp_path, f"{tmp_path}/_a.jsonl") == ["_a.jsonl"]
    with pytest.raises(ConfigError, match="hidden"):
        names(tmp_path)


def test_langfuse_manifests_are_left_out(tmp_path):
    make(tmp_path, "p/observations_v2/2026-10-01T02-00-00.jsonl", "p/manifests/2026-10-01T02-00-00.json")
    assert names(tmp_path) == ["p/observations_v2/2026-10-01T02-00-00.jsonl"]


@pytest.mark.parametrize("argument", ["missing", "missing/", "missing/*.jsonl", "*.parquet"])
def test_a_missing_prefix_is_refused_with_what_to_do(tmp_path, argument):
    make(tmp_path, "a.jsonl")
    with pytest.raises(ConfigError, match="nothing there; check"):
        names(tmp_path, str(tmp_path), f"{tmp_path}/{argument}")


def test_credentials_in_a_url_are_not_repeated(tmp_path):
    with pytest.raises(ConfigError) as caught:
        freeze(["memory://user:secret@nowhere/logs"], STORAGE, settings().read)
    assert "secret" not in str(caught.value)


def test_files_that_are_no_logs_are_left_out_with_a_warning(tmp_path, caplog):
    make(tmp_path, "a.jsonl")
    make(tmp_path, "README.md", "picture.png", data=b"\x89PNG nothing to read")
    with caplog.at_level(logging.WARNING):
        assert names(tmp_path) == ["a.jsonl"]
    assert "2 files" in caplog.text and "README.md" in caplog.text


def test_nothing_but_strangers_is_refused(tmp_path):
    make(tmp_path, "README.md", data=b"# Title")
    for argument in (tmp_path, tmp_path / "README.md"):
        with pytest.raises(ConfigError, match=r"read\.format"):
            names(tmp_path, str(argument))


def test_other_stores_are_listed_by_url():
    fs = fsspec.filesystem("memory")
    fs.pipe("/listing/day=7/a.jsonl", LINE)
    try:
        (file,) = freeze(["memory://listing/"], STORAGE, settings().read)
        assert file.url.startswith("memory://") and file.partitions == {"day": "7"}
        (unit,) = cut([file], STORAGE, settings().read)
        (row,) = read_unit(unit, STORAGE, settings())
        assert row.record.answer == "Ada."
    finally:
        fs.rm("/listing", recursive=True)


# Formats


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", ("jsonl", None)),
        ("a.ndjson", ("jsonl", None)),
        ("A.JSONL.GZ", ("jsonl", "gzip")),
        ("a.2026-10-01.jsonl.zst", ("jsonl", "zstd")),
        ("a.csv", ("csv", None)),
        ("a.tsv.gz", ("csv", "gzip")),
        ("part-0.snappy.parquet", ("parquet", None)),
        ("a.pq", ("parquet", None)),
    ],
)
def test_formats_by_name(tmp_path, name, expected):
    make(tmp_path, name)
    file = only(tmp_path / name)
    assert (file.format, file.compression) == expected


PRETTY = json.dumps({"testCases": [GOOD]}, indent=2).encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LINE * 2, ("jsonl", None)),
        (b"\xef\xbb\xbf" + LINE * 2, ("jsonl", None)),
        (LINE.replace(b"\n", b"\r\n") * 2, ("jsonl", None)),
        (to_bytes({**GOOD, "x": "y" * 700_000}) + b"\n" + LINE, ("jsonl", None)),
        (LINE, ("json", None)),
        (b"\n" + PRETTY, ("json", None)),
        (b'{"results": [\n' + LINE.strip() + b",\n" + LINE + b"]}", ("json", None)),
        (b"[" + LINE.strip() + b"]", ("json", None)),
        (gzip.compress(LINE * 2), ("jsonl", "gzip")),
    ],
    ids=["lines", "bom", "crlf", "long lines", "one line", "pretty", "rows by line", "list", "gzip"],
)
@pytest.mark.parametrize("name", ["log.json", "log", "log.1", "log.txt"])
def test_json_and_json_lines_are_told_apart_by_their_first_bytes(tmp_path, name, data, expected):
    make(tmp_path, name, data=data)
    file = only(tmp_path / name)
    assert (file.format, file.compression) == expected
    assert {type(row) for row in read(tmp_path / name)} == {Accepted}


def test_unknown_names_are_sniffed(tmp_path):
    pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "part-0")
    make(tmp_path, "firehose-2026-10-01", data=gzip.compress(LINE * 2))
    make(tmp_path, "archive.gz", data=gzip.compress(b"[" + LINE + b"]"))
    files = freeze([str(tmp_path)], STORAGE, settings().read)
    assert [(Path(f.url).name, f.format, f.compression) for f in files] == [
        ("archive.gz", "json", "gzip"),
        ("firehose-2026-10-01", "jsonl", "gzip"),
        ("part-0", "parquet", None),
    ]


@pytest.mark.parametrize("data", [b"[2026-10-01 02:03] INFO started", b"{ not json", b"", b"a,b\n1,2"])
def test_what_only_looks_like_json_is_no_log(tmp_path, data):
    make(tmp_path, "a.jsonl")
    make(tmp_path, "server.log", data=data)
    assert names(tmp_path) == ["a.jsonl"]


def test_a_forced_format_goes_for_every_file(tmp_path):
    make(tmp_path, "a.json", "b.log", "c.csv")
    make(tmp_path, "d", data=gzip.compress(LINE))
    files = freeze([str(tmp_path)], STORAGE, settings(format="jsonl").read)
    assert [(f.format, f.compression) for f in files] == [("jsonl", None)] * 3 + [("jsonl", "gzip")]
    assert answers(read(tmp_path, settings(format="jsonl"))) == ["Ada."] * 4


def test_a_store_that_fails_while_sniffing_raises(tmp_path):
    class Failing(Storage):
        def open(self, url, block_bytes=None):
            raise ConnectionResetError("the store is gone")

    make(tmp_path, "a.json")
    with pytest.raises(ConnectionResetError):
        freeze([str(tmp_path)], Failing(), settings().read)


# Hive folders


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/date=2026-10-01/app=shop/a.jsonl", {"date": "2026-10-01", "app": "shop"}),
        ("/logs/app=caf%C3%A9%20bar/a.jsonl", {"app": "café bar"}),
        ("/logs/app=a/app=b/x.jsonl", {"app": "b"}),
        ("/logs/app=__HIVE_DEFAULT_PARTITION__/x.jsonl", {}),
        ("/logs/=x/app=/1a=b/a b=c/app=%00/x=1.jsonl", {}),
        ("/logs/eq=a=b/x.jsonl", {"eq": "a=b"}),
        ("/logs/app=..%2F..%2Fetc/x.jsonl", {"app": "../../etc"}),
        ("https://h/app=shop/a.jsonl?token=x/y=z", {"app": "shop"}),
    ],
)
def test_hive_folders_become_columns(url, expected):
    assert partitions_of(url) == expected


# Units


def test_units_are_the_same_for_the_same_listing_and_numbered_in_its_order(tmp_path):
    make(tmp_path, "a.jsonl", "b.jsonl", data=LINE * 100)
    pq.write_table(pa.Table.from_pylist([GOOD] * 50), tmp_path / "c.parquet", row_group_size=20)
    config = settings(unit_bytes=1500, unit_rows=7)
    units = units_of(tmp_path, config)
    assert units == units_of(tmp_path, config)
    ids = [unit.unit_id for unit in units]
    assert ids == sorted(ids) and len(set(ids)) == len(ids) > 12
    assert [one.split("-")[0] for one in ids] == [f"{i:06d}" for i in range(len(ids))]
    assert [unit.url for unit in units] == sorted(unit.url for unit in units)


def test_the_digest_of_a_unit_does_not_depend_on_its_neighbours_and_changes_with_the_bytes(tmp_path):
    def digest():
        return units_of(tmp_path)[-1].unit_id.split("-")[1]

    make(tmp_path, "b=1/b.jsonl")
    alone = digest()
    make(tmp_path, "a.jsonl")
    assert digest() == alone
    make(tmp_path, "b=1/b.jsonl", data=LINE * 2)
    assert digest() != alone


def test_units_cover_a_file_without_gap_or_overlap(tmp_path):
    make(tmp_path, "a.jsonl", data=LINE * 50)
    units = units_of(tmp_path, settings(unit_bytes=333))
    assert units[0].start == 0 and units[-1].stop == len(LINE) * 50
    assert all(one.stop == other.start for one, other in pairwise(units))


def test_a_row_group_is_cut_into_at_most_sixteen_slices(tmp_path):
    pq.write_table(pa.Table.from_pylist([GOOD] * 1000), tmp_path / "a.parquet")
    slices = [(unit.start, unit.stop) for unit in units_of(tmp_path, settings(unit_rows=1, unit_bytes=100))]
    assert len(slices) == 16 and slices[0][0] == 0 and slices[-1][1] == 1000
    assert len(units_of(tmp_path, settings(unit_rows=500, unit_bytes=100))) == 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.json"])
def test_what_cannot_be_cut_is_one_unit(tmp_path, name):
    data = b"[" + b",".join([LINE] * 100) + b"]" if name == "a.json" else LINE * 100
    make(tmp_path, name, data=data)
    assert len(units_of(tmp_path, settings(unit_bytes=100))) == 1


def test_an_empty_file_is_one_unit(tmp_path):
    make(tmp_path, "a.jsonl", data=b"")
    assert len(units_of(tmp_path)) == 1


def test_units_and_files_survive_json(tmp_path):
    make(tmp_path, "app=x/a.jsonl")
    (unit,) = units_of(tmp_path, settings(limit=1))
    assert WorkUnit.from_json(json.loads(json.dumps(unit.to_json()))) == unit
    file = only(tmp_path / "app=x/a.jsonl")
    assert InputFile(**json.loads(json.dumps({k: getattr(file, k) for k in InputFile.__slots__}))) == file


def test_a_store_that_fails_while_reading_a_footer_raises_and_is_no_unreadable_file(tmp_path):
    class Failing(Storage):
        def open(self, url, block_bytes=None):
            file = super().open(url, block_bytes)
            file.read = lambda size=-1: (_ for _ in ()).throw(ConnectionResetError("the store is gone"))
            return file

    pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "a.parquet")
    files = freeze([str(tmp_path)], STORAGE, settings().read)
    with pytest.raises(ConnectionResetError):
        list(cut(files, Failing(), settings(unit_bytes=100).read))


# A limit


def write_mixed_logs(folder):
    """60 rows over five files of every format, two of them broken lines."""
    numbered = [to_bytes({**GOOD, "answer": str(i)}) + b"\n" for i in range(60)]
    make(folder, "a.jsonl", data=b"\n".join(numbered[:20]) + b"broken\n")
    make(folder, "b.jsonl.gz", data=gzip.compress(b"".join(numbered[20:30]) + b"broken\n"))
    make(
        folder, "c.csv", data=b"question,passages,answer\n" + b"".join(b"q,p,%d\n" % i for i in range(30, 40))
    )
    pq.write_table(
        pa.Table.from_pylist([{**GOOD, "answer": str(i)} for i in range(40, 50)]),
        folder / "d.parquet",
        row_group_size=4,
    )
    make(folder, "e.json", data=b"[" + b",".join(numbered[50:]) + b"]")


@pytest.mark.parametrize("limit", [1, 5, 20, 21, 22, 31, 32, 33, 45, 62, 1000])
def test_a_limit_gives_the_first_rows_of_the_listing_however_it_is_cut(tmp_path, limit):
    write_mixed_logs(tmp_path)
    everything = answers(read(tmp_path))
    assert len(everything) == 62
    for unit_bytes, unit_rows in ((1 << 20, 512), (100, 3), (777, 1)):
        config = settings(limit=limit, unit_bytes=unit_bytes, unit_rows=unit_rows)
        units = units_of(tmp_path, config)
        assert [a for u in units for a in answers(list(read_unit(u, STORAGE, config)))] == everything[:limit]
        shuffled = random.Random(0).sample(units, len(units))
        by_id = {unit.unit_id: answers(list(read_unit(unit, STORAGE, config))) for unit in shuffled}
        assert list(chain.from_iterable(by_id[key] for key in sorted(by_id))) == everything[:limit]


def test_a_limit_reads_no_further_than_it_needs(tmp_path):
    make(tmp_path, "a.jsonl", "b.jsonl", data=LINE * 10)
    files = freeze([str(tmp_path)], STORAGE, settings().read)
    opened = []

    class Watching(Storage):
        def open(self, url, block_bytes=None):
            opened.append(Path(url).name)
            return super().open(url, block_bytes)

    assert len(list(cut(files, Watching(), settings(limit=10).read))) == 1
    assert opened == ["a.jsonl"]
