"""The plan: what would be read is shown as it would be read, and nothing is written."""

import csv
import gzip
import json
import random

import pytest

from jobs.config import Config, load_config
from jobs.errors import ConfigError
from jobs.formats import read_rows
from jobs.listing import cut, freeze
from jobs.plan import _count_rows, _Metered, make_plan


def row(i, **changes):
    return {
        "id": f"r{i}",
        "question": f"Question {i}?",
        "contexts": [f"Passage {i}a.", f"Passage {i}b."],
        "answer": f"Answer {i}.",
    } | changes


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_files_units_and_fields_are_those_of_the_run(tmp_path):
    write_lines(tmp_path / "logs" / "a.jsonl", [row(i) for i in range(40)])
    plan = make_plan([str(tmp_path / "logs")], load_config(None, ["read.unit_bytes=1024"], {}))
    size = (tmp_path / "logs" / "a.jsonl").stat().st_size
    assert [(f["format"], f["compression"], f["size"]) for f in plan.files] == [("jsonl", None, size)]
    assert plan.n_bytes == size
    assert plan.n_units == -(-size // 1024)
    (mapping,) = plan.mappings
    assert mapping.n_units == plan.n_sampled_units
    wanted = {"question": "question", "passages": "contexts", "answer": "answer", "response_id": "id"}
    assert mapping.fields == wanted


def test_two_applications_that_log_differently_show_two_mappings(tmp_path):
    write_lines(tmp_path / "a.jsonl", [row(1)])
    with (tmp_path / "b.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["query", "documents", "completion"], ["Q?", '["P."]', "A."]])
    plan = make_plan([str(tmp_path)], Config())
    assert {mapping.fields["answer"] for mapping in plan.mappings} == {"answer", "completion"}
    assert {record.answer.text for record in plan.records} == {"Answer 1.", "A."}


def test_three_records_are_shown_one_from_each_file_before_a_second_one(tmp_path):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [row(f"{name}{i}") for i in range(9)])
    shown = [record.labels["response_id"] for record in make_plan([str(tmp_path)], Config()).records]
    assert shown == ["ra0", "rb0", "ra1"]


def test_rejects_are_counted_by_reason_and_the_first_of_each_is_located(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        [row(1), row(2, contexts=[]), '{"broken', row(3, contexts=None), row(4, answer="")],
    )
    plan = make_plan([path], Config())
    assert {reject.reason: reject.n_rows for reject in plan.rejects} == {
        "no_passages": 2,
        "malformed_row": 1,
        "missing_answer": 1,
    }
    assert (plan.n_sampled_rows, plan.n_accepted) == (5, 1)
    first = next(reject for reject in plan.rejects if reject.reason == "no_passages")
    assert first.position == len(json.dumps(row(1))) + 1
    assert "5 rows of 1 units; 1 can be audited, 4 are rejected" in plan.to_text()
    assert f"no_passages 2, first at {first.position} of {path}" in plan.to_text()


def test_a_field_that_is_found_nowhere_is_said_to_be_missing_and_can_be_given(tmp_path):
    rows = [{"question": "Q?", "evidence": {"texts": ["P."]}, "answer": "A."}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert "passages        not found" in make_plan([path], Config()).to_text()
    given = make_plan([path], load_config(None, ["fields.passages=evidence.texts"], {}))
    assert "passages        from evidence.texts" in given.to_text()
    assert given.n_accepted == 1


def test_a_long_text_is_cut_visibly(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [row(1, answer="x" * 1234)])
    plan = make_plan([path], Config())
    assert "x" * 200 + "... (1,034 more characters)" in plan.to_text()
    tree = json.loads(plan.to_json())
    assert tree["records"][0]["answer"] == {"text": "x" * 200, "n_characters": 1234}


def test_log_text_cannot_drive_the_terminal(tmp_path):
    hostile = "\x1b[2J\x1b]0;owned\x07 line\nbreak \u202e\u2066"
    path = write_lines(tmp_path / "a.jsonl", [row(1, answer=hostile, question=hostile, id=hostile)])
    text = make_plan([path], Config()).to_text()
    assert all(c.isprintable() for c in text.replace("\n", ""))
    assert "\\x1b[2J" in text and "line\\nbreak" in text and "\\u202e" in text
    assert all(c.isascii() for c in make_plan([path], Config()).to_json())


def test_a_large_listing_is_sampled_and_its_tail_counted(tmp_path):
    for i in range(100):
        write_lines(tmp_path / f"day={i:03}" / "log.jsonl", [row(i)])
    plan = make_plan([str(tmp_path)], Config())
    assert plan.n_units == 100
    assert plan.n_sampled_units <= 16
    assert len(plan.files) == 100
    assert "and 80 more jsonl" in plan.to_text()


def test_a_limit_shortens_what_would_be_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [row(i) for i in range(40)])
    plan = make_plan([path], load_config(None, ["read.limit=3"], {}))
    assert plan.n_sampled_rows == 3


def test_tokens_are_said_to_be_a_guess(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [row(1, contexts=["x" * 400], answer="y" * 40)])
    text = make_plan([path], Config()).to_text()
    assert "about 100 tokens of passages and 10 of answer each, guessed from characters" in text


def test_logs_without_a_single_usable_row_still_get_a_plan(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ['{"broken'])
    plan = make_plan([path], Config())
    assert plan.n_accepted == 0
    assert plan.estimated_context_tokens_per_answer is None
    assert "0 can be audited, 1 are rejected" in plan.to_text()


def test_logs_that_are_not_there_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        make_plan([str(tmp_path / "absent")], Config())


def test_rows_of_a_file_that_is_too_long_to_count_are_told_by_its_bytes(tmp_path, monkeypatch):
    chooser = random.Random(3)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        for i in range(12_000):
            file.write(json.dumps(row(i, answer=f"{chooser.random()}")) + "\n")
    storage = _Metered()
    (unit,) = cut(freeze([str(tmp_path)], storage, Config().read), storage, Config().read)
    counted = _count_rows(unit, storage, 0, read_rows(unit, storage, Config()))
    assert counted != 12_000 and counted == pytest.approx(12_000, rel=0.1)
    monkeypatch.setattr("jobs.plan._COUNTED_ROWS", 20_000)
    assert _count_rows(unit, storage, 0, read_rows(unit, storage, Config())) == 12_000


def test_planning_writes_nothing(tmp_path):
    write_lines(tmp_path / "a.jsonl", [row(1)])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    make_plan([str(tmp_path)], Config())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_real_logs_of_other_tools_are_planned(shared):
    plan = make_plan([str(shared / "data" / "logs")], Config())
    assert plan.n_accepted > 0
    assert plan.n_accepted + sum(reject.n_rows for reject in plan.rejects) == plan.n_sampled_rows
