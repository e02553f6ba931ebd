"""Workers as plain forked processes: what `jobs.fleet.Fleet` is to Ray, at the cost of a fork.

A worker really runs, dies, hangs and writes; only the way there is not Ray's.
"""

import multiprocessing
from multiprocessing.connection import Connection, wait

import ray.util.metrics  # noqa: F401 - takes two seconds, in every worker if not here

from jobs.errors import first_line
from jobs.fleet import TaskError, WorkerLost
from jobs.worker_process import WorkerProcess


class ForkedFleet:
    """See `jobs.fleet.Fleet`. A worker is the end of a pipe, and so is the ticket: one task at a time."""

    def __init__(self, out, config, run, load, size=1):
        self.size = size
        self.started = 0
        self.asked = []
        """Everything that was asked for: ("unit" or "probe", unit id, attempt or rows)."""
        self._make = lambda: WorkerProcess(out, config, run, load)
        self._processes = {}

    def start(self):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(there, here, self._make), daemon=True
        )
        process.start()
        there.close()  # so that the end of the process is the end of the pipe
        self._processes[here] = process
        self.started += 1
        return here, here

    def audit(self, worker, unit, attempt, aside):
        self.asked.append(("unit", unit.unit_id, attempt))
        worker.send(("audit_unit", unit.to_json(), attempt, aside))
        return worker

    def probe(self, worker, unit, rows):
        self.asked.append(("probe", unit.unit_id, rows))
        worker.send(("probe_unit", unit.to_json(), rows))
        return worker

    def wait(self, tickets, seconds):
        return wait(tickets, seconds)[:1]

    def answer(self, ticket):
        try:
            kind, value = ticket.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerLost("its worker died") from None
        if kind == "error":
            raise TaskError(value)
        return value

    def kill(self, worker):
        process = self._processes.pop(worker)
        process.kill()
        process.join()
        worker.close()

    @property
    def n_alive(self):
        return len(self._processes)


def _serve(pipe: Connection, other: Connection, make) -> None:
    other.close()
    worker = make()
    pipe.send(("value", worker.ready()))
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(("value", getattr(worker, name)(*arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {first_line(error)}"))
