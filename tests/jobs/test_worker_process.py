"""The process around a worker."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jobs.worker_process import WorkerProcess
from tests.fake_scorer import FakeScorer
from tests.jobs.test_worker import Bench, failing
from tests.runs import row


def test_a_process_that_lost_its_device_ends_at_once(tmp_path, monkeypatch):
    bench = Bench(tmp_path, [row(0)])

    def load(config):
        return failing(torch.AcceleratorError("illegal memory access"))

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    process = WorkerProcess(bench.out, bench.config, bench.run, load)
    assert process.ready() == "float32"
    with pytest.raises(SystemExit):
        process.audit_unit(bench.unit.to_json(), 1)


def test_it_tells_what_a_unit_came_to_and_how_long_each_stage_took(tmp_path, capfd):
    bench = Bench(tmp_path, [row(0), row(1, passages=[])])
    process = WorkerProcess(bench.out, bench.config, bench.run, lambda _: FakeScorer())
    marker = process.audit_unit(bench.unit.to_json(), 1)
    said = capfd.readouterr().err
    assert f"unit {marker['unit_id']}: 2 rows read, 1 rejected; read" in said
    assert "measure" in said and "write" in said
    assert not logging.getLogger("leadline").handlers


class Recorder:
    """A watchdog that tells what it was told."""

    def __init__(self):
        self.told = []

    def alive(self):
        self.told.append("alive")

    def rest(self):
        self.told.append("rest")


def test_what_two_threads_share_is_there_until_the_last_of_them_is_done(tmp_path):
    bench = Bench(tmp_path, [row(0)])
    process = WorkerProcess(bench.out, bench.config, bench.run, lambda _: FakeScorer())
    process._watchdog = watchdog = Recorder()
    handlers = logging.getLogger("leadline").handlers
    for _ in range(2):
        with process._at_work(unit_id="a"):
            with process._at_work(unit_id="b"):
                assert len(handlers) == 1
            assert len(handlers) == 1 and watchdog.told == ["alive", "alive"]
        assert not handlers and watchdog.told == ["alive", "alive", "rest"]
        watchdog.told.clear()


def test_two_units_at_a_time_are_told_once_each(tmp_path, capfd):
    bench = Bench(tmp_path, [row(0), row(1)])
    process = WorkerProcess(bench.out, bench.config, bench.run, lambda _: FakeScorer(seconds=0.05))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: process.audit_unit(bench.unit.to_json(), 1), range(2)))
    assert capfd.readouterr().err.count("2 rows read, 0 rejected") == 2


def test_another_attempt_waits_and_ever_longer(tmp_path, monkeypatch):
    bench, waits = Bench(tmp_path, [row(0)]), []
    process = WorkerProcess(bench.out, bench.config, bench.run, lambda _: FakeScorer())
    monkeypatch.setattr("time.sleep", waits.append)
    for attempt in (1, 2, 3, 9):
        process.audit_unit(bench.unit.to_json(), attempt)
    bounds = [(0.0, 0.0), (0.5, 1.0), (1.5, 3.0), (15.0, 30.0)]
    assert all(low <= wait <= high for wait, (low, high) in zip(waits, bounds, strict=True))
