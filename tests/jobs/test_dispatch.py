"""The queue under workers that die, hang, lag and fail. Workers are real processes; only Ray is left out."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import jobs.dispatch
import jobs.poison
import jobs.worker
import jobs.worker_process
from detector.errors import RecordRejected, RejectReason
from jobs.commit import create_run, read_markers
from jobs.config import Config
from jobs.dispatch import Dispatch
from jobs.errors import JobError
from jobs.fleet import WorkerLost
from jobs.listing import cut, freeze
from jobs.storage import Storage
from tests import fake_scorer
from tests.fake_scorer import FakeScorer
from tests.forked_fleet import ForkedFleet
from tests.runs import row, write_rows

STORAGE = Storage()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(jobs.worker_process, "_LONGEST_WAIT_SECONDS", 0.0)


class Scene:
    """A run over local files, and what its workers do at each record."""

    def __init__(self, folder, rows, *, per_file=None, size=1, act=None, **workers):
        self.folder, self.size, self.act = folder, size, act
        self.out = str(folder / "out")
        for start in range(0, len(rows), per_file or len(rows)):
            if not (path := folder / f"{start:03}.jsonl").exists():
                write_rows(path, rows[start : start + (per_file or len(rows))])
        paths = sorted(folder.glob("*.jsonl"))
        logs = [str(path) for path in paths]
        # So that no two files make one unit.
        whole = max(1024, *(path.stat().st_size for path in paths))
        self.config = Config.model_validate({"workers": workers, "read": {"unit_bytes": whole}})
        files = freeze(logs, STORAGE, self.config.read)
        self.units = list(cut(files, STORAGE, self.config.read))
        self.run = create_run(
            STORAGE,
            self.out,
            logs,
            self.config,
            fake_scorer.identify(self.config),
            [asdict(file) for file in files],
            len(self.units),
        )
        self.fleet = ForkedFleet(self.out, self.config, self.run, self.load, size)
        self.seen = []

    def load(self, config):
        scorer = FakeScorer()
        measure = scorer.measure

        def act_and_measure(record, **options):
            if self.act is not None:
                self.act(record)
            return measure(record, **options)

        scorer.measure = act_and_measure
        return scorer

    def once(self, name):
        """True for the first process that asks."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def measure(self):
        arguments = (STORAGE, self.out, self.run, self.config, self.load, self.seen.append, {})
        Dispatch(*arguments, fleet=self.fleet).measure(self.units)
        assert self.fleet.n_alive == 0
        return read_markers(STORAGE, self.out)

    def take_machines_back(self, times):
        """The cloud does, at the first `times` markers, which are lost with their machines."""
        answer, left = self.fleet.answer, iter(range(times))

        def answer_or_vanish(ticket):
            value = answer(ticket)
            if isinstance(value, dict) and next(left, None) is not None:
                Path(self.out, "units", f"{value['unit_id']}.json").unlink()
                raise WorkerLost("its machine was taken away", blameless=True)
            return value

        self.fleet.answer = answer_or_vanish

    def asked(self, kind):
        return [what for what in self.fleet.asked if what[0] == kind]


def poisoned(n_rows, *killers):
    rows = [row(number) for number in range(n_rows)]
    for number in killers:
        rows[number] = row(number, answer=f"die here {number}")
    return rows


def counts(markers):
    return [
        sum(marker[name] for marker in markers.values()) for name in ("n_read", "n_audited", "n_rejected")
    ]


def test_a_record_that_kills_every_worker_is_rejected_alone(tmp_path):
    """Table for table what a run leaves in which the scorer had refused the record and killed nobody."""
    scene = Scene(tmp_path, poisoned(40, 23))
    (marker,) = scene.measure().values()
    assert (marker["n_read"], marker["n_audited"], marker["rejects"]) == (40, 39, {"scoring_failed": 1})
    assert scene.seen[-1].n_units_done == 1 and scene.seen[-1].n_read == 40

    def refuse(record):
        if "die here" in record.answer:
            raise RecordRejected(RejectReason.SCORING_FAILED, jobs.worker._KILLER)

    (tmp_path / "out").rename(tmp_path / "first")
    again = Scene(tmp_path, poisoned(40, 23), act=refuse)
    (undisturbed,) = again.measure().values()
    assert again.asked("probe") == []
    assert [part["sha256"] for part in marker["parts"]] == [p["sha256"] for p in undisturbed["parts"]]
    assert [part["rows"] for part in marker["parts"] if part["table"] == "rejects"] == [1]


def test_the_search_is_bounded_and_leaves_other_units_alone(tmp_path):
    scene = Scene(tmp_path, poisoned(16, 3, 14, 15), per_file=8, size=2)
    markers = scene.measure()
    assert counts(markers) == [16, 13, 3]
    for unit in scene.units:
        probes = [rows for _, unit_id, rows in scene.asked("probe") if unit_id == unit.unit_id]
        assert sum(stop - first for first, stop in probes) <= 3 * 8 + 2
    assert sorted(marker["attempt"] for marker in markers.values()) == [3, 3]
    assert scene.fleet.started <= 25


def test_two_lost_machines_under_one_unit_reject_nothing(tmp_path):
    def act(record):
        if record.question == row(5)["question"] and (scene.once("first") or scene.once("second")):
            os._exit(1)

    scene = Scene(tmp_path, poisoned(12), act=act)
    (marker,) = scene.measure().values()
    assert (marker["n_audited"], marker["n_rejected"], marker["attempt"]) == (12, 0, 3)
    assert len(scene.asked("probe")) == 3  # how many rows, and both halves


def test_a_unit_with_too_many_killers_is_given_up_and_the_others_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.poison, "MAX_KILLERS", 1)
    scene = Scene(tmp_path, [*poisoned(4, *range(4)), *poisoned(6)[4:]], per_file=4)
    with pytest.raises(JobError, match=r"1 of 2 units failed.*more than 1 of its rows kill a worker each"):
        scene.measure()
    assert counts(read_markers(STORAGE, scene.out)) == [2, 2, 0]
    assert list(scene.seen[-1].failed) == [scene.units[0].unit_id]
    assert scene.fleet.n_alive == 0


def test_a_single_attempt_is_a_single_attempt(tmp_path):
    scene = Scene(tmp_path, poisoned(3, 1), max_attempts=1)
    with pytest.raises(JobError, match="its worker died"):
        scene.measure()
    assert scene.asked("probe") == []


def test_a_storage_that_fails_during_the_search_does_not_end_it(tmp_path, monkeypatch):
    stat = Storage.stat

    def stat_or_fail(self, url):
        if (tmp_path / "searching").exists() and scene.once("failed"):
            raise OSError("503 SlowDown")
        return stat(self, url)

    def act(record):
        if "die here" in record.answer:
            (tmp_path / "searching").touch()

    scene = Scene(tmp_path, poisoned(4, 2), act=act)
    monkeypatch.setattr(Storage, "stat", stat_or_fail)
    assert counts(scene.measure()) == [4, 3, 1]
    assert (tmp_path / "failed").exists()


def test_a_machine_that_the_cloud_takes_back_costs_no_attempt(tmp_path):
    scene = Scene(tmp_path, poisoned(4), max_attempts=1)
    scene.take_machines_back(2)
    (marker,) = scene.measure().values()
    assert (marker["attempt"], marker["n_audited"]) == (1, 4)
    assert len(scene.asked("unit")) == 3


def test_a_straggler_is_given_to_a_second_worker_and_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.dispatch, "_STRAGGLER_SECONDS", 0.3)
    monkeypatch.setattr(jobs.dispatch, "_TICK_SECONDS", 0.1)

    def act(record):
        if record.question == row(0)["question"] and scene.once("hung"):
            time.sleep(600)

    scene = Scene(tmp_path, poisoned(6), per_file=2, size=2, act=act)
    started = time.monotonic()
    markers = scene.measure()
    assert time.monotonic() - started < 60
    assert counts(markers) == [6, 6, 0]
    assert (scene.seen[-1].n_units_done, scene.seen[-1].n_read) == (3, 6)
    asked = [unit_id for _, unit_id, _ in scene.asked("unit")]
    assert sorted(asked.count(unit.unit_id) for unit in scene.units) == [1, 1, 2]
    assert {marker["attempt"] for marker in markers.values()} == {1}


def test_units_that_take_no_longer_than_the_others_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.dispatch, "_STRAGGLER_SECONDS", 0.0)
    scene = Scene(tmp_path, poisoned(6), per_file=2, size=3, act=lambda record: time.sleep(0.2))
    scene.measure()
    assert len(scene.asked("unit")) == 3


@pytest.mark.parametrize(("size", "held"), [(1, [1, 2, 2, 1]), (2, [1, 2, 1, 1]), (4, [1] * 4)])
def test_a_worker_holds_a_second_unit_unless_another_could_begin_it_sooner(tmp_path, size, held):
    scene = Scene(tmp_path, poisoned(12), per_file=3, size=size, act=lambda record: time.sleep(0.1))
    assert counts(scene.measure()) == [12, 12, 0]
    assert sorted(scene.fleet.held) == sorted(held)


@pytest.mark.parametrize("killer", range(4))
def test_of_units_that_were_lost_together_only_the_one_that_kills_is_blamed(tmp_path, killer):
    scene = Scene(tmp_path, poisoned(12, 3 * killer + 1), per_file=3)
    markers = scene.measure()
    assert counts(markers) == [12, 11, 1]
    bad = next(unit_id for unit_id, marker in markers.items() if marker["n_rejected"])
    assert {unit_id for _, unit_id, _ in scene.asked("probe")} == {bad}
    assert {marker["attempt"] for unit_id, marker in markers.items() if unit_id != bad} == {1}
    assert markers[bad]["attempt"] == 3


def test_a_unit_that_was_lost_with_a_killer_has_all_its_attempts(tmp_path):
    scene = Scene(tmp_path, poisoned(18, 4), per_file=3, max_attempts=1)
    with pytest.raises(JobError, match=r"1 of 6 units failed.*its worker died"):
        scene.measure()
    assert counts(read_markers(STORAGE, scene.out)) == [15, 15, 0]


def test_two_units_on_a_machine_that_the_cloud_takes_back_go_on_as_before(tmp_path):
    scene = Scene(tmp_path, poisoned(15), per_file=3, max_attempts=1)
    scene.take_machines_back(1)
    markers = scene.measure()
    assert counts(markers) == [15, 15, 0] and {marker["attempt"] for marker in markers.values()} == {1}
    assert scene.fleet.held == [1, 2, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("size", [2, 3])  # with three there is a free worker for either
def test_a_unit_that_waits_behind_a_straggler_is_freed_with_it(tmp_path, monkeypatch, size):
    monkeypatch.setattr(jobs.dispatch, "_STRAGGLER_SECONDS", 0.3)
    monkeypatch.setattr(jobs.dispatch, "_TICK_SECONDS", 0.1)

    first_two = {row(number)["question"] for number in range(6)}  # held together, read first is done first

    def act(record):
        if record.question in first_two and scene.once("hung"):
            time.sleep(600)

    scene = Scene(tmp_path, poisoned(18), per_file=3, size=size, act=act)
    assert counts(scene.measure()) == [18, 18, 0]
    asked = [unit_id for _, unit_id, _ in scene.asked("unit")]
    assert sorted(asked.count(unit.unit_id) for unit in scene.units) == [1, 1, 1, 1, 2, 2]


def test_a_record_that_hangs_for_ever_is_rejected_alone_even_with_one_worker(tmp_path):
    def act(record):
        if record.question == row(2)["question"]:
            time.sleep(600)

    scene = Scene(tmp_path, poisoned(4), act=act, stall_seconds=0.4)
    assert counts(scene.measure()) == [4, 3, 1]


def test_lines_of_the_driver_about_a_unit_name_it_and_the_attempt(tmp_path, capsys):
    from jobs.logs import line_handler, logging_to

    scene = Scene(tmp_path, poisoned(3, 1))
    with logging_to(line_handler("json")):
        scene.measure()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    attempts = [(line["unit_id"], line["attempt"]) for line in lines if line["level"] == "warning"]
    assert attempts[:2] == [(scene.units[0].unit_id, 1), (scene.units[0].unit_id, 2)]
