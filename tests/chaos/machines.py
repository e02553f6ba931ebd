"""A Ray cluster on this machine, of which a node may be lost at any time."""

import contextlib
import os
import random
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
_HEAD = _NODE | {"num_cpus": 0, "include_dashboard": False}
_STARTS = 3
_MARK = "LEADLINE_CHAOS"


class Machines:
    """A head that works for nobody and nodes of one CPU, each a raylet of its own."""

    def __init__(self, n_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        # Whoever starts below this process carries the mark: other clusters of this machine are not touched.
        os.environ[_MARK] = uuid.uuid4().hex
        self._n_nodes = n_nodes
        self._nodes: list[Any] = []
        self._cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=_HEAD))
        self.fill()

    @property
    def address(self) -> str:
        """Where drivers join."""
        return self._cluster.address

    def lose(self, dice: random.Random) -> None:
        """Kill a node with everything on it, and let a new one join."""
        node = self._nodes.pop(dice.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self.fill()

    def fill(self) -> None:
        """Let nodes join until there are as many as there should be; one is enough to go on with."""
        while len(self._nodes) < self._n_nodes:
            try:
                self._nodes.append(_patiently(lambda: self._cluster.add_node(**_NODE)))
            except Exception:  # Ray raises the bare type
                if not self._nodes:
                    raise
                return

    def workers(self) -> list[int]:
        """Processes that hold a scorer or load it."""
        mark = f"{_MARK}={os.environ[_MARK]}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if folder.joinpath("cmdline").read_bytes().startswith(b"ray::WorkerProcess"):
                    if mark in folder.joinpath("environ").read_bytes():
                        found.append(int(folder.name))
        return sorted(found)

    def stop(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@contextlib.contextmanager
def run_machines(n_nodes: int) -> Iterator[Machines]:
    """A cluster for the time of the block."""
    machines = Machines(n_nodes)
    try:
        yield machines
    finally:
        machines.stop()


def _patiently(start: Callable[[], Any]) -> Any:
    """Try it again: Ray gives a raylet 30 seconds, which are too few on a busy machine, and then leaves its
    processes alone.
    """
    before = _children()
    for attempt in range(_STARTS):
        try:
            return start()
        except Exception:
            for pid in _children() - before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if attempt == _STARTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _children() -> set[int]:
    """Processes that this one started and that run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.add(int(folder.name))
    return found
