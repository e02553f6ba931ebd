"""What a chaos run would say about an OUT in which something is wrong."""

import json

import pyarrow as pa
import pytest

from jobs.parts import put_table
from jobs.storage import Storage
from tests.chaos.outcome import contradictions, differences, read_outcome
from tests.jobs.measured import DATE, answer, put_unit

N_ROWS, REJECTS = 4, {"no_passages": 1}


def write_out(folder, ids=("a", "b", "c")):
    """An OUT of one unit: three answers of one sentence, and a reject."""
    storage, out = Storage(), str(folder)
    marker = put_unit(storage, out, "u1", [answer(i, [{}], position=n) for n, i in enumerate(ids)])
    rejected = put_unit(storage, out, "u1", [], rejects=[(DATE, "no_passages")], path="logs/b.jsonl")
    marker = marker | {"parts": marker["parts"] + rejected["parts"], "n_read": N_ROWS}
    rows = [{"run_id": folder.name, "response_id": i, "sentence_index": 0} for i in ids]
    for kind in ("responses", "sentences"):
        put_table(storage, out, f"findings/{kind}", DATE, "u1", pa.Table.from_pylist(rows))
    totals = {"n_read": 4, "n_audited": 3, "n_rejected": 1, "n_no_passages": 1}
    for name, tree in (("units/u1.json", marker), ("_SUCCESS", {"totals": totals}), ("profile.json", {})):
        storage.write(f"{out}/{name}", json.dumps(tree).encode())
    return folder


def found_wrong(out, other):
    here, there = (read_outcome(Storage(), str(folder)) for folder in (out, other))
    return contradictions(here, N_ROWS, REJECTS) + differences(here, there)


@pytest.fixture
def outs(tmp_path):
    return write_out(tmp_path / "one"), write_out(tmp_path / "two")


def part_of(out, kind):
    return next((out / kind).rglob("*.parquet"))


def test_two_runs_with_the_same_rows_differ_in_nothing_but_the_files_that_name_the_run(outs):
    here, there = (read_outcome(Storage(), str(folder)) for folder in outs)
    assert contradictions(here, N_ROWS, REJECTS) == []
    assert differences(here, there) == [
        "files: 4 differ, the first is " + min(here.files.keys() ^ there.files)
    ]
    assert differences(here, here) == []


def orphan(out):
    part = part_of(out, "measurements/responses")
    part.with_name("u1-0123456789ab.parquet").write_bytes(part.read_bytes())
    return "is no unit's part", "holds 3 rows twice", "measurements/responses: 6 rows here, 3 there"


def lost_part(out):
    part_of(out, "measurements/sentences").unlink()
    return "is missing", "measurements/sentences: only there"


def other_row(out):
    part_of(out, "findings/responses").unlink()
    rows = [{"run_id": "x", "response_id": i, "sentence_index": 0} for i in "abd"]
    put_table(Storage(), str(out), "findings/responses", DATE, "u1", pa.Table.from_pylist(rows))
    return ("row 2 has response_id 'd' here and 'c' there",)


def lease(out):
    (out / "lease").mkdir()
    (out / "lease" / "000001.json").write_text("{}")
    return ("lease/000001.json is left over",)


def unfinished(out):
    (out / "_SUCCESS").unlink()
    return ("no _SUCCESS",)


def uncounted_row(out):
    totals = json.loads((out / "_SUCCESS").read_text())["totals"] | {"n_read": 3, "n_audited": 2}
    (out / "_SUCCESS").write_text(json.dumps({"totals": totals}))
    return "n_read is 3, not 4", "n_audited is 2, not 3", "totals: 2 differ"


@pytest.mark.parametrize("spoil", [orphan, lost_part, other_row, lease, unfinished, uncounted_row])
def test_what_is_wrong_is_told(outs, spoil):
    expected = spoil(outs[0])
    told = found_wrong(*outs)
    for words in expected:
        assert any(words in line for line in told), (words, told)
