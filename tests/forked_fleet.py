"""Workers as forked processes of DEPTH threads: what `jobs.fleet.Fleet` is to Ray, at the cost of a fork.

A worker really runs, dies, hangs and writes; only the way there is not Ray's.
"""

import multiprocessing
import threading
from multiprocessing.connection import Connection, wait

import ray.util.metrics  # noqa: F401 - takes two seconds, in every worker if not here

from jobs.errors import first_line
from jobs.fleet import DEPTH, TaskError, WorkerLost
from jobs.worker_process import WorkerProcess


class Hands:
    """A worker: its process, and a pipe to each of its threads."""

    def __init__(self, process, pipes):
        self.process, self.free, self.pipes = process, list(pipes), pipes


class ForkedFleet:
    """See `jobs.fleet.Fleet`. A ticket is the pipe to the thread that does it."""

    def __init__(self, out, config, run, load, size=1):
        self.size = size
        self.started = 0
        self.asked = []
        """Everything that was asked for: ("unit" or "probe", unit id, attempt or rows)."""
        self.held = []
        """At each unit and probe: how many its worker was asked for then."""
        self._make = lambda: WorkerProcess(out, config, run, load)
        self._workers = []

    def start(self):
        here, there = zip(*(multiprocessing.Pipe() for _ in range(DEPTH)), strict=True)
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(there, here, self._make), daemon=True
        )
        process.start()
        for pipe in there:
            pipe.close()  # so that the end of the process is the end of its pipes
        worker = Hands(process, here)
        self._workers.append(worker)
        self.started += 1
        return worker, worker.free.pop()

    def audit(self, worker, unit, attempt, aside):
        self.asked.append(("unit", unit.unit_id, attempt))
        return self._send(worker, "audit_unit", unit.to_json(), attempt, aside)

    def probe(self, worker, unit, rows):
        self.asked.append(("probe", unit.unit_id, rows))
        return self._send(worker, "probe_unit", unit.to_json(), rows)

    def _send(self, worker, *what):
        pipe = worker.free.pop()
        self.held.append(DEPTH - len(worker.free))
        try:
            pipe.send(what)
        except BrokenPipeError:
            pass  # it died: that is its answer
        return pipe

    def wait(self, tickets, seconds):
        return wait(tickets, seconds)[:1]

    def answer(self, ticket):
        try:
            kind, value = ticket.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerLost("its worker died") from None
        next(worker for worker in self._workers if ticket in worker.pipes).free.append(ticket)
        if kind == "error":
            raise TaskError(value)
        return value

    def kill(self, worker):
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        for pipe in worker.pipes:
            pipe.close()

    @property
    def n_alive(self):
        return len(self._workers)


def _serve(pipes: tuple[Connection, ...], others: tuple[Connection, ...], make) -> None:
    for other in others:
        other.close()
    worker = make()
    pipes[-1].send(("value", worker.ready()))
    threads = [threading.Thread(target=_answer, args=(pipe, worker)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(pipe: Connection, worker) -> None:
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(("value", getattr(worker, name)(*arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {first_line(error)}"))
