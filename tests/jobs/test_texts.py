"""The texts of flagged answers, read from the logs again: what the worker read, whatever it read it from."""

import gzip
import json
from dataclasses import asdict

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jobs.commit import create_run
from jobs.config import Config
from jobs.listing import cut, freeze
from jobs.redaction import TEXTS
from jobs.storage import Storage
from jobs.texts import read_texts
from jobs.worker import Worker
from tests import fake_scorer
from tests.fake_scorer import FakeScorer
from tests.figures.fuzz_readers import ROWS, SYSTEMS
from tests.runs import row, write_rows

STORAGE = Storage()
N_ROWS = 9


def rows(start=0):
    return [row(number) for number in range(start, start + N_ROWS)]


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(rows()), folder / "a.parquet", row_group_size=4)


def write_csv(folder):
    flat = [one | {"passages": json.dumps(one["passages"])} for one in rows()]
    pa.csv.write_csv(pa.Table.from_pylist(flat), folder / "a.csv")


def write_json(folder):
    (folder / "a.json").write_text(json.dumps(rows()))


def write_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows()).encode()))


def write_small_files(folder):
    for number in range(3):
        write_rows(folder / f"{number}.jsonl", rows(N_ROWS * number))


def write_no_ids(folder):
    write_rows(folder / "a.jsonl", [{**one, "response_id": None} for one in rows()])


WRITERS = (write_parquet, write_csv, write_json, write_gzip, write_small_files, write_no_ids)


def audit(folder, mode, unit_rows, limit=None):
    """Every marker with the responses of its unit, texts and all."""
    config = Config.model_validate({"store_text": mode, "read": {"unit_rows": unit_rows, "limit": limit}})
    out = str(folder / mode)
    files = freeze([str(folder / "logs")], STORAGE, config.read)
    units = list(cut(files, STORAGE, config.read))
    scorer = fake_scorer.identify(config)
    run = create_run(STORAGE, out, ["logs"], config, scorer, [asdict(file) for file in files], len(units))
    worker = Worker(out, config, run, lambda _: FakeScorer())
    for unit in units:
        marker = worker.audit_unit(unit.to_json())
        parts = [part["url_suffix"] for part in marker["parts"] if part["table"] == "responses"]
        tables = [pq.read_table(f"{out}/{part}", partitioning=None) for part in parts]
        if tables:
            yield config, marker, pa.concat_tables(tables)


def check(folder, unit_rows, limit=None):
    n_found = 0
    runs = (audit(folder, mode, unit_rows, limit) for mode in ("flagged", "full"))
    for (config, marker, measured), (_, _, full) in zip(*runs, strict=True):
        texts = read_texts(marker, measured, STORAGE, config, None)
        for one in full.to_pylist():
            assert texts[one["record_index"]] == {name: one[name] for name in TEXTS} | {"withheld": None}
            assert one["answer"]
        n_found += full.num_rows
        assert set(measured["answer"].to_pylist()) == {None}
    return n_found


@pytest.mark.parametrize("unit_rows", [3, 512])
@pytest.mark.parametrize("write", WRITERS)
def test_every_row_gets_back_the_texts_that_it_was_measured_on(tmp_path, write, unit_rows):
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs")
    assert check(tmp_path, unit_rows) == N_ROWS * (3 if write is write_small_files else 1)


def test_a_limit_that_ends_in_a_unit_of_small_files_leaves_its_rows_to_be_found(tmp_path):
    (tmp_path / "logs").mkdir()
    write_small_files(tmp_path / "logs")
    assert check(tmp_path, 512, limit=2 * N_ROWS + 1) == 2 * N_ROWS + 1


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_traces_that_spans_were_folded_into_get_theirs_back(tmp_path, system, form):
    (tmp_path / "logs").mkdir()
    if form == "jsonl":
        write_rows(tmp_path / "logs" / "a.jsonl", ROWS[system])
    else:
        flat = [{name: json.dumps(value) for name, value in one.items()} for one in ROWS[system]]
        pq.write_table(pa.Table.from_pylist(flat), tmp_path / "logs" / "a.parquet")
    n_found = check(tmp_path, 512)
    assert n_found > 0 or form == "parquet"
