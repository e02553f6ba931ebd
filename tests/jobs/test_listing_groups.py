"""Many small files: which of them the listing opens, how they share a unit, what a wrong guess costs."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detector.errors import RejectReason
from jobs.commit import create_run
from jobs.errors import JobError
from jobs.formats import Accepted, read_rows, read_unit
from jobs.judge import judge
from jobs.listing import MAX_FILES, WorkUnit, cut, freeze
from jobs.storage import Storage
from jobs.worker import Worker
from tests import fake_scorer
from tests.jobs.formats.reading import GOOD, STORAGE, answers, read, settings, to_bytes, units_of
from tests.jobs.formats.test_spans import LOGGED

LINE = to_bytes(GOOD) + b"\n"
SPANS = b"".join(to_bytes(span) + b"\n" for span in LOGGED)


class Watching(Storage):
    """Remembers which files were opened."""

    def open(self, url, block_bytes=None):
        self.options.setdefault("opened", []).append(Path(url).name)
        return super().open(url, block_bytes)

    @property
    def opened(self):
        return self.options.get("opened", [])


def number(folder, n, name="{:03d}.jsonl", data=None):
    """`n` files of one row each, whose answer is the file's number."""
    for i in range(n):
        path = folder / name.format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data or to_bytes({**GOOD, "answer": str(i)}) + b"\n")


def read_all(folder, **options):
    config = settings(**options)
    return [row for unit in units_of(folder, config) for row in read_unit(unit, STORAGE, config)]


# What the listing opens


def test_of_many_small_files_a_few_are_opened(tmp_path):
    number(tmp_path, 100)
    number(tmp_path, 100, "b/log.{}", data=LINE * 2)
    watching = Watching()
    files = freeze([str(tmp_path)], watching, settings().read)
    assert len(files) == 200 and len(watching.opened) == 8
    assert {"000.jsonl", "099.jsonl", "log.0", "log.99"} < set(watching.opened)
    assert sum(file.guessed for file in files) == 192
    list(cut(files, watching, settings().read))
    assert len(watching.opened) == 8


def test_small_parquet_files_are_cut_without_their_footers(tmp_path):
    for i in range(20):
        pq.write_table(pa.Table.from_pylist([{**GOOD, "answer": str(i)}]), tmp_path / f"{i:02d}.parquet")
    watching = Watching()
    files = freeze([str(tmp_path)], watching, settings().read)
    (unit,) = cut(files, watching, settings().read)
    assert len(watching.opened) == 4
    assert answers(list(read_unit(unit, STORAGE, settings()))) == [str(i) for i in range(20)]


def test_every_file_that_will_be_cut_is_opened(tmp_path):
    number(tmp_path, 20)
    (tmp_path / "007.jsonl").write_bytes(SPANS + b" " * 2000)
    files = freeze([str(tmp_path)], STORAGE, settings(unit_bytes=2000).read)
    assert files[7].system == "openinference" and not files[7].guessed


def test_a_group_whose_files_differ_is_opened_whole(tmp_path):
    number(tmp_path, 20, data=LINE)
    (tmp_path / "019.jsonl").write_bytes(SPANS)
    (tmp_path / "009.jsonl").write_bytes(SPANS)
    files = freeze([str(tmp_path)], STORAGE, settings().read)
    assert [i for i, file in enumerate(files) if file.system] == [9, 19]
    assert not any(file.guessed for file in files)


def test_logs_behind_strangers_of_the_same_name_are_found(tmp_path):
    number(tmp_path, 20, "x{:02d}", data=b"no log")
    (tmp_path / "x07").write_bytes(LINE)
    assert [Path(file.url).name for file in freeze([str(tmp_path)], STORAGE, settings().read)] == ["x07"]


def test_files_of_a_folder_share_its_partitions(tmp_path):
    number(tmp_path, 10, "day=1/{}.jsonl")
    files = freeze([str(tmp_path)], STORAGE, settings().read)
    assert files[0].partitions == {"day": "1"} and len({id(file.partitions) for file in files}) == 1


# A wrong guess

OTHERS = {
    "spans": (SPANS, [Accepted]),
    "json": (b"[" + LINE + b"," + LINE + b"]", [Accepted] * 2),
    "gzip": (gzip.compress(LINE * 3), [Accepted] * 3),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["{:03d}", "{:03d}.json"])
def test_a_file_that_is_not_like_its_group_is_read_as_what_it_is(tmp_path, kind, name):
    number(tmp_path, 20, name, data=LINE * 2)
    data, expected = OTHERS[kind]
    (tmp_path / name.format(7)).write_bytes(data)
    rows = read(tmp_path)
    assert len(rows) == 38 + len(expected)
    assert [type(row) for row in rows if Path(row.path).name == name.format(7)] == expected


def test_rows_among_files_of_spans_are_not_taken_for_spans(tmp_path):
    """Spans without retrieval or answer are no rows, so a wrong guess would lose these without a word."""
    number(tmp_path, 20, data=SPANS)
    (tmp_path / "007.jsonl").write_bytes(LINE * 5)
    (unit,) = units_of(tmp_path)
    assert unit.system == "openinference" and unit.guessed
    rows = read(tmp_path)
    assert answers(rows).count("Ada.") == 5 and len(rows) == 24


def test_a_file_that_is_no_log_after_all_is_a_reject(tmp_path):
    number(tmp_path, 20, "{:03d}")
    (tmp_path / "007").write_bytes(b"\x89PNG\x00\xff")
    rows = read(tmp_path)
    assert [(Path(row.path).name, row.reason) for row in rows if not isinstance(row, Accepted)] == [
        ("007", RejectReason.MALFORMED_ROW)
    ]
    assert len(rows) == 20


def test_a_format_that_was_asked_for_is_not_guessed_again(tmp_path):
    number(tmp_path, 20)
    config = settings(format="jsonl")
    watching = Watching()
    (unit,) = cut(freeze([str(tmp_path)], watching, config.read), watching, config.read)
    assert watching.opened == []
    assert len(list(read_unit(unit, watching, config))) == len(watching.opened) == 20


# Files together in one unit


def test_small_neighbours_share_a_unit_and_keep_their_paths_and_positions(tmp_path):
    number(tmp_path, 5, data=LINE * 2)
    (unit,) = units_of(tmp_path)
    rows = list(read_unit(unit, STORAGE, settings()))
    assert [(Path(row.path).name, row.position) for row in rows] == [
        (f"{i:03d}.jsonl", position) for i in range(5) for position in (0, len(LINE))
    ]
    assert [position for position, _ in read_rows(unit, STORAGE, settings())] == [0, len(LINE)] * 5


def test_a_unit_holds_at_most_unit_bytes_and_so_many_files(tmp_path):
    number(tmp_path, 10, data=LINE)
    per_unit = [1 + len(unit.more) for unit in units_of(tmp_path, settings(unit_bytes=3 * len(LINE)))]
    assert per_unit == [3, 3, 3, 1]
    number(tmp_path, MAX_FILES + 1, data=b"{}")
    assert [1 + len(unit.more) for unit in units_of(tmp_path)] == [MAX_FILES, 1]


def test_only_files_that_are_read_alike_share_a_unit(tmp_path):
    number(tmp_path, 2, "day=1/{}.jsonl")
    number(tmp_path, 2, "day=2/{}.jsonl")
    number(tmp_path, 2, "e/{}.csv", data=b"question,passages,answer\nq,p,a\n")
    number(tmp_path, 2, "f/{}.jsonl", data=SPANS)
    number(tmp_path, 2, "g/{}.jsonl.gz", data=gzip.compress(LINE))
    assert [len(unit.more) for unit in units_of(tmp_path)] == [1] * 5


def test_a_unit_of_files_is_named_after_their_content_alone(tmp_path):
    number(tmp_path, 6)

    def digests(unit_bytes):
        config = settings(unit_bytes=unit_bytes)
        return [unit.unit_id.split("-")[1] for unit in units_of(tmp_path, config)]

    three = 3 * len(LINE)
    first, second = digests(three)
    assert digests(three) == [first, second] and first != second
    (tmp_path / "005.jsonl").write_bytes(LINE)
    assert digests(three)[0] == first and digests(three)[1] != second


def test_a_unit_of_files_survives_json(tmp_path):
    number(tmp_path, 3)
    (unit,) = units_of(tmp_path)
    assert WorkUnit.from_json(json.loads(json.dumps(unit.to_json()))) == unit


@pytest.mark.parametrize(
    "broken",
    [b"", b"\xff\xfe\x00broken", gzip.compress(LINE)[:-9]],
    ids=["empty", "not text", "half a gzip"],  # a gzip holds the time, and each process collects for itself
)
def test_a_corrupt_file_in_a_unit_is_a_reject_and_hurts_no_neighbour(tmp_path, broken):
    number(tmp_path, 5)
    (tmp_path / "002.jsonl").write_bytes(broken)
    (unit,) = units_of(tmp_path)
    rows = list(read_unit(unit, STORAGE, settings()))
    assert answers(rows)[:2] == ["0", "1"] and answers(rows)[-2:] == ["3", "4"]
    assert {row.reason for row in rows[2:-2]} == {RejectReason.MALFORMED_ROW}


@pytest.mark.parametrize("limit", [1, 2, 5, 7])
def test_a_limit_ends_inside_a_unit_of_files(tmp_path, limit):
    number(tmp_path, 6)
    for unit_bytes in (1 << 20, 3 * len(LINE)):
        rows = read_all(tmp_path, limit=limit, unit_bytes=unit_bytes)
        assert answers(rows) == [str(i) for i in range(min(limit, 6))]


def test_files_are_listed_and_read_in_one_order_however_they_are_put_together(tmp_path):
    number(tmp_path, 40)
    orders = [answers(read_all(tmp_path, unit_bytes=n)) for n in (100, 300, 1000, 1 << 20)]
    assert all(one == other for one, other in pairwise(orders))


@pytest.mark.parametrize("changed", ["000.jsonl", "002.jsonl"])
def test_a_unit_with_a_file_that_changed_is_refused(tmp_path, changed):
    number(tmp_path / "logs", 3)
    config = settings()
    files = freeze([str(tmp_path / "logs")], STORAGE, config.read)
    (unit,) = cut(files, STORAGE, config.read)
    unit.check_unchanged(STORAGE)
    (tmp_path / "logs" / changed).write_bytes(LINE * 2)
    out = str(tmp_path / "out")
    run = create_run(STORAGE, out, [], config, fake_scorer.identify(config), [], 1)
    with pytest.raises(JobError, match=rf"{changed}: changed since"):
        Worker(out, config, run, fake_scorer.load).audit_unit(unit.to_json())


def test_of_two_equal_answers_in_a_unit_the_one_in_the_earlier_file_stays(tmp_path):
    """It stands further from the start of its file than the other from the start of its own."""
    twice = to_bytes({**GOOD, "response_id": "r"}) + b"\n"
    number(tmp_path / "logs", 2, data=twice)
    (tmp_path / "logs" / "000.jsonl").write_bytes(LINE + twice)
    config = settings()
    (unit,) = units_of(tmp_path / "logs")
    out = str(tmp_path / "out")
    run = create_run(STORAGE, out, [], config, fake_scorer.identify(config), [], 1)
    marker = Worker(out, config, run, fake_scorer.load).audit_unit(unit.to_json())
    judge(out, STORAGE, config, run, [marker])
    (duplicates,) = Path(out).rglob("duplicates-*.parquet")
    (row,) = pq.read_table(duplicates).to_pylist()
    assert (Path(row["path"]).name, row["position"]) == ("001.jsonl", 0)
