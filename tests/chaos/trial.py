"""One audit on a Ray cluster of this machine, whose processes are killed when a plan says so."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.plan import Fault, Kind
from tests.chaos.proxy import Proxy
from tests.conftest import REPOSITORY

_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
_HEAD = _NODE | {"num_cpus": 0, "include_dashboard": False}
_NODE_STARTS = 3
_TICK_SECONDS = 0.05
_PAUSE_SECONDS = 2.0  # before a driver that failed is started again
_MARK = "LEADLINE_CHAOS"


class Machines:
    """A Ray cluster: a head that works for nobody and nodes of one CPU, each a raylet of its own."""

    def __init__(self, n_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        # Whoever starts below this process carries the mark: other clusters of this machine are not touched.
        os.environ[_MARK] = uuid.uuid4().hex
        self._cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=_HEAD))
        self._nodes = [self._add() for _ in range(n_nodes)]

    @property
    def address(self) -> str:
        """Where drivers join."""
        return self._cluster.address

    def lose(self, dice: random.Random) -> None:
        """Kill a node with everything on it, and let a new one join."""
        node = self._nodes.pop(dice.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._add())

    def _add(self) -> Any:
        return _patiently(lambda: self._cluster.add_node(**_NODE))

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


def _patiently(start: Callable[[], Any]) -> Any:
    """Try it again: Ray gives a raylet 30 seconds, which are too few on a busy machine."""
    for _ in range(_NODE_STARTS - 1):
        with contextlib.suppress(Exception):  # Ray raises the bare type
            return start()
    return start()


@contextlib.contextmanager
def run_machines(n_nodes: int) -> Iterator[Machines]:
    """A cluster for the time of the block."""
    machines = Machines(n_nodes)
    try:
        yield machines
    finally:
        machines.stop()


@dataclass(slots=True)
class Trial:
    """What became of one audit."""

    seconds: float = 0.0
    n_starts: int = 0
    """Of the driver."""
    failures: list[str] = field(default_factory=list)
    """The last line of each driver that ended by itself and not well."""
    finished: bool = False


def command(scorer: str, logs: str, out: str, settings: dict[str, Any], folder: Path) -> list[str]:
    """The driver's command line: the real one for a real scorer, the tests' own for the null scorer."""
    if scorer == "null":
        spec = {"logs": [logs], "out": out, "config": settings, "moment": "never", "signal": "SIGKILL"}
        return [sys.executable, "-m", "tests.audit_driver", json.dumps(spec)]
    config = folder / "leadline.yaml"  # and not options: a command line is read by everybody
    config.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "jobs.cli", "audit", logs, "--out", out, "--config", str(config)]


def run_trial(
    arguments: list[str],
    machines: Machines,
    proxy: Proxy,
    log: Path,
    seed: int,
    limit_seconds: float,
    n_spare: int,
) -> Trial:
    """Run the driver until it ends well, again and again with the same arguments, and kill what is due.

    The storage's faults are the proxy's. Gives up after `limit_seconds`, and when more than `n_spare`
    drivers have failed that nobody had killed.
    """
    dice, trial, began = random.Random(seed), Trial(), time.monotonic()
    while not trial.finished and len(trial.failures) <= n_spare:
        trial.n_starts += 1
        with log.open("ab") as output:
            driver = subprocess.Popen(arguments, cwd=REPOSITORY, stdout=output, stderr=output)
        try:
            while driver.poll() is None:
                if time.monotonic() - began > limit_seconds:
                    trial.failures.append(f"not finished after {limit_seconds:.0f} s")
                    return trial
                for fault in proxy.plan.due():
                    if _kill(fault, driver, machines, dice):
                        proxy.plan.settle(fault)
                time.sleep(_TICK_SECONDS)
        finally:
            driver.kill()
            driver.wait()
        trial.finished = driver.returncode == 0
        if driver.returncode > 0:
            trial.failures.append(_last_line(log))
            time.sleep(_PAUSE_SECONDS)
    trial.seconds = time.monotonic() - began
    return trial


def _kill(fault: Fault, driver: subprocess.Popen[bytes], machines: Machines, dice: random.Random) -> bool:
    """Whether there was something to kill."""
    if fault.kind == Kind.NODE:
        machines.lose(dice)
    elif fault.kind == Kind.DRIVER:
        driver.kill()
    else:
        workers = machines.workers()
        if not workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(workers), signal.SIGKILL)
    return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"
