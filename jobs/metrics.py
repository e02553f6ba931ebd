"""Counters of a worker for Prometheus and the Ray dashboard, through Ray's own metrics."""

import resource
from collections.abc import Mapping

from jobs.commit import Marker


class Meter:
    """Counts what a worker did, once per unit. Where Ray's metrics are off, Ray drops the numbers.

    They tell what machines are doing, not what OUT holds: a unit that is measured twice counts twice. Tags
    are run_id, the reason of a reject and the stage, and nothing else; Ray adds node and worker.
    """

    def __init__(self, run_id: str) -> None:
        from ray.util.metrics import Counter, Gauge

        def counter(name: str, what: str, *tags: str) -> Counter:
            made = Counter(f"leadline_{name}", what, ("run_id", *tags))
            return made.set_default_tags({"run_id": run_id})

        self._units = counter("units", "Work units measured and committed.")
        self._rows = counter("rows_read", "Rows read.")
        self._audited = counter("rows_audited", "Rows that became a measured answer.")
        self._rejected = counter("rows_rejected", "Rows that became a reject.", "reason")
        self._tokens = counter("tokens", "Tokens that the scorer computed.")
        self._seconds = counter("stage_seconds", "Seconds spent on read, measure and write.", "stage")
        self._memory = Gauge(
            "leadline_device_memory_bytes",
            "Peak memory: allocated on the GPU, without one resident in the process.",
            ("run_id",),
        ).set_default_tags({"run_id": run_id})

    def count(self, marker: Marker, seconds: Mapping[str, float]) -> None:
        """Add one committed unit and the `seconds` that it took by stage."""
        added = [
            (self._units, 1, {}),
            (self._rows, marker["n_read"], {}),
            (self._audited, marker["n_audited"], {}),
            (self._tokens, marker["n_tokens"], {}),
            *[(self._rejected, count, {"reason": reason}) for reason, count in marker["rejects"].items()],
            *[(self._seconds, spent, {"stage": stage}) for stage, spent in seconds.items()],
        ]
        for counter, value, tags in added:
            if value > 0:  # Ray takes no other
                counter.inc(value, tags)
        self._memory.set(device_memory_bytes())


def device_memory_bytes() -> int:
    """The most memory that this process has taken so far: on its GPU if it uses one, else of the machine."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # KiB on Linux
