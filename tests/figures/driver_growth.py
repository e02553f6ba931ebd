"""Memory and time of the driver against the number of rows and files, with a scorer that takes no time.

    OMP_NUM_THREADS=1 python -m tests.figures.driver_growth [--shapes ROWS/FILES ...] [--in DIR]

Each shape is audited in a process of its own, which is the driver; CPU seconds are that process's alone.
`starting` (listing, cutting, Ray) ends with the first unit that is handed out, `measuring` with the last
marker, `judging` with _SUCCESS. Full size: --shapes 10000000/20000, in some 20 GB of DIR. Linux only.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.audit import audit
from jobs.config import Config
from tests import fake_scorer

SHAPES = ("2000/100", "10000/100", "10000/1000")
_FILES_PER_FOLDER = 1000


@dataclass(frozen=True, slots=True)
class Lap:
    """Where the driver is at the end of a stage."""

    stage: str
    wall_seconds: float
    cpu_seconds: float
    rss_mib: float
    peak_mib: float


def main() -> None:
    """One line per shape and stage."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWS/FILES")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--unit-bytes", type=int, default=1 << 20)
    arguments.add_argument("--in", dest="folder", default=None, metavar="DIR", help="a temporary folder")
    chosen = arguments.parse_args()
    print(
        f"{'rows':>10} {'files':>7} {'units':>6} {'stage':>10} {'wall s':>8} {'CPU s':>7} {'ms/unit':>8} "
        f"{'RSS MiB':>8} {'peak MiB':>8}"
    )
    for shape in chosen.shapes:
        n_rows, n_files = map(int, shape.split("/"))
        with TemporaryDirectory(dir=chosen.folder) as folder:
            write_logs(Path(folder, "logs"), n_rows, n_files)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                n_units, laps = pool.apply(run, (folder, n_rows, chosen.workers, chosen.unit_bytes))
        for before, lap in pairwise(laps):
            wall, cpu = lap.wall_seconds - before.wall_seconds, lap.cpu_seconds - before.cpu_seconds
            print(
                f"{n_rows:>10,} {n_files:>7,} {n_units:>6,} {lap.stage:>10} {wall:>8.1f} {cpu:>7.2f} "
                f"{1000 * cpu / n_units:>8.2f} {lap.rss_mib:>8.0f} {lap.peak_mib:>8.0f}",
                flush=True,
            )


def write_logs(folder: Path, n_rows: int, n_files: int) -> None:
    """`n_rows` short answers with ids of their own, over `n_files` files of JSON lines."""
    for number in range(n_files):
        path = folder / f"part={number // _FILES_PER_FOLDER}" / f"{number:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = range(number * n_rows // n_files, (number + 1) * n_rows // n_files)
        path.write_text("".join(json.dumps(_row(row)) + "\n" for row in rows))


def run(folder: str, n_rows: int, n_workers: int, unit_bytes: int) -> tuple[int, list[Lap]]:
    """Audit the logs in `folder` in this process. Returns the units, and a lap at the start and per stage."""
    config = Config.model_validate(
        {
            "scorer": {"name": folder, "device": "cpu"},
            "read": {"unit_bytes": unit_bytes},
            "workers": {"count": n_workers, "device": "cpu"},
        }
    )
    laps = [_lap("start")]
    measuring: list[Lap] = []
    result = audit(
        [f"{folder}/logs"],
        f"{folder}/out",
        config,
        # The first call comes before the first unit, the last one after the last marker.
        on_progress=lambda _: measuring.append(_lap("measuring")),
        identify=fake_scorer.identify,
        load=fake_scorer.load,
    )
    if result.totals["n_audited"] != n_rows:
        raise SystemExit(f"{result.totals['n_audited']} of {n_rows} rows were audited")
    return result.n_units, [*laps, replace(measuring[0], stage="starting"), measuring[-1], _lap("judging")]


def _row(number: int) -> dict[str, object]:
    return {
        "response_id": f"r{number:09d}",
        "app": ("shop", "bank", "help")[number % 3],
        "question": f"Where is {number}?",
        "passages": [f"Number {number} stands on shelf {number % 977}.", "Shelves stand in halls."],
        "answer": f"It is on shelf {number % 977}. It is green.",
    }


def _lap(stage: str) -> Lap:
    status = Path("/proc/self/status").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.endswith("kB")}
    return Lap(stage, time.monotonic(), time.process_time(), kib["VmRSS"] / 1024, kib["VmHWM"] / 1024)


if __name__ == "__main__":
    main()
