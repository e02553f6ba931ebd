"""The workers of a run as Ray actors: everything that the queue needs from Ray, and nothing else of it."""

from collections.abc import Callable, Collection
from typing import Any

from jobs.commit import Run
from jobs.config import Config
from jobs.errors import JobError, first_line
from jobs.poison import Rows


class TaskError(Exception):
    """A worker answered with an error and lives on."""


class WorkerLost(Exception):  # noqa: N818 - what happened, to whoever has to replace the worker
    """A worker died, or is out of reach. The message says of what, as far as Ray knows."""

    def __init__(self, why: str, *, blameless: bool = False) -> None:
        super().__init__(why)
        self.blameless = blameless
        """The cloud announced that it takes the machine back: no fault of what ran there."""


DEPTH = 2
"""Units that a worker may hold: while its device measures one, it reads the next or writes the one before."""


class Fleet:
    """The actors of a run. What is asked of one is answered later, under the ticket that was returned.

    An actor may be asked for DEPTH things at a time.
    Raises JobError for settings that no machine of the cluster can serve.
    """

    def __init__(self, out: str, config: Config, run: Run, load: Callable[[Config], Any] | None) -> None:
        import ray

        from jobs.worker import load_scorer
        from jobs.worker_process import WorkerProcess

        resources, self.size = _place_workers(config)
        """`size`: how many workers there may be."""
        actor = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=DEPTH)(WorkerProcess)
        process = actor.options(**resources)
        self._start = lambda: process.remote(out, config, run, load or load_scorer)

    def start(self) -> tuple[Any, Any]:
        """A new worker, and the ticket under which it tells its dtype once its scorer is loaded."""
        worker = self._start()
        return worker, worker.ready.remote()

    def audit(self, worker: Any, unit: Any, attempt: int, aside: Collection[int]) -> Any:
        """Ask for a unit to be committed, with the rows `aside` as rejects. The answer is its marker."""
        return worker.audit_unit.remote(unit.to_json(), attempt, aside)

    def probe(self, worker: Any, unit: Any, rows: Rows) -> Any:
        """Ask to measure these rows and commit nothing. The answer is how many rows the unit has."""
        return worker.probe_unit.remote(unit.to_json(), rows)

    def wait(self, tickets: list[Any], seconds: float) -> list[Any]:
        """A ticket that is answered, or none after so many seconds."""
        import ray

        return ray.wait(tickets, timeout=seconds)[0]

    def answer(self, ticket: Any) -> Any:
        """What was answered under a ticket. Raises TaskError or WorkerLost."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(ticket)
        except RayTaskError as error:
            raise TaskError(f"{type(error.cause).__name__}: {first_line(error.cause)}") from None
        except RayError as error:
            raise _loss(error) from None

    def kill(self, worker: Any) -> None:
        """End a worker. One that is only out of reach must not come back beside its successor."""
        import ray

        ray.kill(worker)


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


def _loss(error: Exception) -> WorkerLost:
    from ray.exceptions import OutOfMemoryError, RayActorError

    if isinstance(error, OutOfMemoryError):
        return WorkerLost(
            f"its worker died: Ray ended it because the machine ran out of memory ({first_line(error)}); "
            "run fewer workers per machine, or larger machines"
        )
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return WorkerLost(str(error).strip().splitlines()[-1].strip())
    if isinstance(error, RayActorError) and error.preempted:
        return WorkerLost("its machine was taken away (preempted)", blameless=True)
    return WorkerLost("its worker died: out of memory, a crash, a hang, or a lost machine")
