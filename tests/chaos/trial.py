"""One audit on a Ray cluster of this machine, whose processes are killed when a plan says so."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.machines import Machines
from tests.chaos.plan import Fault, Kind
from tests.chaos.proxy import Proxy
from tests.conftest import REPOSITORY

_TICK_SECONDS = 0.05
_PAUSE_SECONDS = 2.0  # before a driver that failed is started again


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
    machines.fill()
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
