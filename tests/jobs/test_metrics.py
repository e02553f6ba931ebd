"""What a worker counts for Ray's metrics: names, tags, and nothing that is private."""

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import ray.util.metrics

from jobs.metrics import Meter, device_memory_bytes

MARKER = {
    "n_read": 10,
    "n_audited": 7,
    "n_tokens": 900,
    "rejects": {"no_passages": 2, "scoring_failed": 1},
}


@pytest.fixture
def recorded(monkeypatch):
    """Every number that reaches Ray, after Ray's own checks of names, tags and values."""
    seen = {}
    record = ray.util.metrics.Metric._record

    def note(self, value, tags=None):
        record(self, value, tags)
        tags = self._get_final_tags(tags)
        seen[self.info["name"], tuple(sorted(tags.items()))] = value

    monkeypatch.setattr(ray.util.metrics.Metric, "_record", note)
    return seen


def test_a_unit_is_counted_by_reason_and_stage(recorded):
    Meter("run1").count(MARKER, {"read": 0.5, "measure": 8.0, "write": 0.0})
    memory = recorded.pop(("leadline_device_memory_bytes", (("run_id", "run1"),)))
    assert 10 << 20 < memory <= device_memory_bytes()
    run = ("run_id", "run1")
    assert recorded == {
        ("leadline_units", (run,)): 1,
        ("leadline_rows_read", (run,)): 10,
        ("leadline_rows_audited", (run,)): 7,
        ("leadline_tokens", (run,)): 900,
        ("leadline_rows_rejected", (("reason", "no_passages"), run)): 2,
        ("leadline_rows_rejected", (("reason", "scoring_failed"), run)): 1,
        ("leadline_stage_seconds", (run, ("stage", "read"))): 0.5,
        ("leadline_stage_seconds", (run, ("stage", "measure"))): 8.0,
    }


def count_and_wait(port: int) -> None:
    """A worker counts two units of its own Ray, which stays until standard input ends."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 500},
    )

    @ray.remote
    class Counting:
        def __init__(self) -> None:
            self.meter = Meter("run1")

        def count(self) -> None:
            self.meter.count(MARKER, {"read": 0.5})

    worker = Counting.remote()
    ray.get([worker.count.remote() for _ in range(2)])
    sys.stdin.read()


@pytest.mark.ray
def test_prometheus_reads_them_from_ray(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"from tests.jobs.test_metrics import count_and_wait; count_and_wait({port})"
    told = (tmp_path / "told").open("wb")
    with told, subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=told) as process:
        try:
            found = scrape(f"http://127.0.0.1:{port}/metrics", process)
        finally:
            process.stdin.close()
            process.wait(60)
    assert found["ray_leadline_rows_audited_total", None] == 14
    assert found["ray_leadline_rows_rejected_total", "no_passages"] == 4
    assert found["ray_leadline_stage_seconds_total", "read"] == 1.0
    assert found["ray_leadline_device_memory_bytes", None] > 10 << 20


def scrape(url, process, seconds=120):
    """Name and reason or stage of every number that Ray shows, once they are all of two units."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            continue
        found = {}
        for line in lines:
            if line.startswith("ray_leadline_"):
                assert 'run_id="run1"' in line
                part = re.search(r'(?:reason|stage)="(\w+)"', line)
                found[line.split("{")[0], part and part[1]] = float(line.split()[-1])
        if found.get(("ray_leadline_units_total", None)) == 2:
            return found
    raise AssertionError("Ray showed no numbers")
