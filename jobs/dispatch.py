"""Which worker measures which unit: the queue between the driver and its Ray actors."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from jobs.commit import Marker, Run, write_progress
from jobs.config import Config
from jobs.errors import JobError
from jobs.storage import Storage

log = logging.getLogger("leadline")

_TICK_SECONDS = 1.0
_TELL_SECONDS = 30.0
_FAILED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the measuring is. Counts of rows cover the whole run; the rate is this driver's alone."""

    run_id: str
    at: str
    n_units: int
    n_units_done: int
    n_units_running: int
    n_workers: int
    """Workers whose scorer is loaded or loading."""
    n_read: int
    n_audited: int
    n_rejected: int
    rejects: dict[str, int]
    tokens_per_second: float
    eta_seconds: float | None
    failed: dict[str, str]
    """Unit id -> last error, of the units that were given up."""


def _place_workers(config: Config) -> tuple[dict[str, Any], int]:
    """What Ray reserves for a worker, and how many workers there may be."""
    import ray

    workers = config.workers
    there = ray.cluster_resources()
    n_gpus = int(there.get("GPU", 0))
    if workers.device == "gpu" or (workers.device == "auto" and n_gpus and config.scorer.device != "cpu"):
        if not (workers.count or n_gpus):
            # An autoscaled cluster shows its GPUs only after somebody asked for them.
            raise JobError(
                "workers.device is gpu and Ray shows no GPU; set workers.count to how many to ask for"
            )
        return {"num_gpus": 1}, workers.count or n_gpus
    n_cpus = int(there.get("CPU", 0))
    return {"num_cpus": workers.cpus_per_worker}, workers.count or max(1, n_cpus // workers.cpus_per_worker)


@dataclass(frozen=True, slots=True)
class _Task:
    """What a worker was asked for: a unit, or (unit None) to say when its scorer is loaded."""

    worker: Any
    unit: Any = None
    attempt: int = 0


class Dispatch:
    """The queue of units and the workers that empty it.

    A worker has one unit at a time and gets the next when its marker is back; a unit takes seconds to minutes
    and the way back milliseconds. So the unit that kills a worker is always known, a worker that is still
    waiting for its machine holds nothing up, and one with nothing left to do is given back to the cluster.
    """

    def __init__(
        self,
        storage: Storage,
        out: str,
        run: Run,
        config: Config,
        load: Callable[[Config], Any] | None,
        on_progress: Callable[[Progress], None] | None,
        markers: dict[str, Marker],
    ) -> None:
        import ray

        from jobs.worker import WorkerProcess, load_scorer

        self._storage, self._out, self._run, self._config = storage, out, run, config
        self._on_progress = on_progress
        self._waiting: deque[tuple[Any, int]] = deque()
        self._tasks: dict[Any, _Task] = {}
        self._failed: dict[str, str] = {}
        self._dtypes = {marker["dtype"] for marker in markers.values()}
        self._lost_starts = 0
        resources, self._n_workers = _place_workers(config)
        process = ray.remote(max_restarts=0, max_task_retries=0)(WorkerProcess).options(**resources)
        self._start = lambda: process.remote(out, config, run, load or load_scorer)
        self._started = time.monotonic()
        self._rejects: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        for marker in markers.values():
            self._count(marker)
        self._before = self._counts.copy()
        self._told = float("-inf")

    def measure(self, units: list[Any]) -> None:
        """Measure every unit or raise JobError that names those that failed, after all others are done."""
        import ray

        self._waiting.extend((unit, 1) for unit in units)
        self._tell()
        try:
            while self._waiting or any(task.unit for task in self._tasks.values()):
                self._hire()
                ready, _ = ray.wait(list(self._tasks), timeout=_TICK_SECONDS)
                for answer in ready:
                    self._take(answer)
                self._tell()
        finally:
            # Also on Ctrl-C and SIGTERM: what they had begun is measured again, what they committed stays.
            for task in self._tasks.values():
                ray.kill(task.worker)
        if self._failed:
            shown = [f"{unit} ({error})" for unit, error in list(self._failed.items())[:_FAILED_SHOWN]]
            more = f" and {len(self._failed) - len(shown)} more" if len(self._failed) > len(shown) else ""
            raise JobError(
                f"{len(self._failed)} of {self._run.n_units} units failed every one of "
                f"{self._config.workers.max_attempts} attempts: {'; '.join(shown)}{more}; "
                "the others are kept, run again to retry these"
            )

    def _hire(self) -> None:
        starting = sum(task.unit is None for task in self._tasks.values())
        while len(self._tasks) < self._n_workers and starting < len(self._waiting):
            worker = self._start()
            self._tasks[worker.ready.remote()] = _Task(worker)
            starting += 1

    def _take(self, answer: Any) -> None:
        """Settle one answer and give its worker the next unit."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        task = self._tasks.pop(answer)
        try:
            value = ray.get(answer)
        except RayTaskError as error:
            self._requeue(task, f"{type(error.cause).__name__}: {first_line(error.cause)}")
        except RayError as error:
            # Dead, or out of reach, which is the same: it must not come back beside its successor.
            ray.kill(task.worker)
            self._lose(task, error)
            return
        else:
            self._settle(task, value)
        if self._waiting:
            unit, attempt = self._waiting.popleft()
            answer = task.worker.audit_unit.remote(unit.to_json(), attempt)
            self._tasks[answer] = _Task(task.worker, unit, attempt)
        else:
            ray.kill(task.worker)  # an idle worker would keep its machine alive and paid for

    def _settle(self, task: _Task, value: Any) -> None:
        if task.unit is not None:
            self._count(value)
            return
        self._lost_starts = 0
        self._dtypes.add(value)
        if len(self._dtypes) > 1:
            raise JobError(
                f"workers of one run compute in {' and in '.join(sorted(self._dtypes))}, which do not mix; "
                "set scorer.dtype, or finish the run on the kind of machine that began it"
            )

    def _lose(self, task: _Task, error: Exception) -> None:
        if task.unit is not None:
            self._requeue(task, "its worker died: out of memory, a crash, or a lost machine")
            return
        self._lost_starts += 1
        if self._lost_starts >= self._config.workers.max_attempts * self._n_workers:
            last_line = str(error).strip().splitlines()[-1].strip()
            raise JobError(f"no worker can load the scorer {self._run.scorer['name']}: {last_line}") from None

    def _requeue(self, task: _Task, error: str) -> None:
        if task.attempt < self._config.workers.max_attempts:
            self._waiting.append((task.unit, task.attempt + 1))
            log.warning("unit %s, attempt %d: %s", task.unit.unit_id, task.attempt, error)
        else:
            self._failed[task.unit.unit_id] = error
            log.error("unit %s is given up: %s", task.unit.unit_id, error)

    def _tell(self) -> None:
        """Call `on_progress`; twice a minute also write progress.json and one line to the log."""
        progress = self._progress()
        if self._on_progress is not None:
            self._on_progress(progress)
        finished = progress.n_units_done + len(progress.failed) == progress.n_units
        if not finished and time.monotonic() - self._told < _TELL_SECONDS:
            return
        self._told = time.monotonic()
        write_progress(self._storage, self._out, asdict(progress))
        eta = progress.eta_seconds
        log.info(
            "%d of %d units, %d rows read, %d rejected, %d of %d workers busy, %.0f tokens/s, %s",
            progress.n_units_done,
            progress.n_units,
            progress.n_read,
            progress.n_rejected,
            progress.n_units_running,
            progress.n_workers,
            progress.tokens_per_second,
            "time left unknown" if eta is None else f"{eta / 60:.0f} min left",
        )

    def _progress(self) -> Progress:
        elapsed = time.monotonic() - self._started
        done, here = self._counts["n_units"], self._counts - self._before
        left = self._run.n_units - done
        return Progress(
            run_id=self._run.run_id,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            n_units=self._run.n_units,
            n_units_done=done,
            n_units_running=sum(task.unit is not None for task in self._tasks.values()),
            n_workers=len(self._tasks),
            n_read=self._counts["n_read"],
            n_audited=self._counts["n_audited"],
            n_rejected=self._counts["n_rejected"],
            rejects=dict(self._rejects),
            tokens_per_second=round(here["n_tokens"] / elapsed, 1),
            eta_seconds=round(elapsed / here["n_units"] * left, 1) if here["n_units"] else None,
            failed=dict(self._failed),
        )

    def _count(self, marker: Marker) -> None:
        self._counts["n_units"] += 1
        for name in ("n_read", "n_audited", "n_rejected", "n_tokens"):
            self._counts[name] += marker[name]
        self._rejects.update(marker["rejects"])


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a line of a log."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
