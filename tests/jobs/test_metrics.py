"""What a worker counts for Ray's metrics: names, tags, and nothing that is private."""

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
