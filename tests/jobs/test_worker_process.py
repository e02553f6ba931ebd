"""The process around a worker."""

import logging

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


def test_another_attempt_waits_and_ever_longer(tmp_path, monkeypatch):
    bench, waits = Bench(tmp_path, [row(0)]), []
    process = WorkerProcess(bench.out, bench.config, bench.run, lambda _: FakeScorer())
    monkeypatch.setattr("time.sleep", waits.append)
    for attempt in (1, 2, 3, 9):
        process.audit_unit(bench.unit.to_json(), attempt)
    bounds = [(0.0, 0.0), (0.5, 1.0), (1.5, 3.0), (15.0, 30.0)]
    assert all(low <= wait <= high for wait, (low, high) in zip(waits, bounds, strict=True))
