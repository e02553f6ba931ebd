"""What it costs to go on with a run whose driver was killed at 90 %, and to call a finished one again.

    OMP_NUM_THREADS=1 python -m tests.figures.resume_cost [--files 20] [--rows 25] [--workers 2]

Files of `--rows` rows are a unit each. The scorer takes 0.1 s a row and notes every row that it is given, so
that rows which were measured twice are counted. The driver gets `kill -9`; the same command goes on.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jobs.audit import audit
from jobs.config import Config
from jobs.fleet import DEPTH
from tests import fake_scorer
from tests.runs import row, write_rows


def main() -> None:
    """Three lines: killed, gone on with, called again."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--files", type=int, default=20)
    arguments.add_argument("--rows", type=int, default=25, help="per file")
    arguments.add_argument("--workers", type=int, default=2)
    chosen = arguments.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scorer").mkdir()
        for number in range(chosen.files):
            # In folders of their own: neighbours would be read together.
            (folder / "logs" / f"part={number}").mkdir(parents=True)
            rows = [row(number * chosen.rows + each) for each in range(chosen.rows)]
            write_rows(folder / "logs" / f"part={number}" / "a.jsonl", rows)
        tree = {
            "scorer": {"name": str(folder / "scorer"), "device": "cpu"},
            "workers": {"count": chosen.workers, "device": "cpu"},
        }
        logs, out = [str(folder / "logs")], folder / "out"
        killed = drive(logs, out, tree, "late")
        n_before = len(list((out / "units").glob("*.json")))
        print(f"killed ({killed}): {n_before} of {chosen.files} units were committed", flush=True)
        began = time.monotonic()
        drive(logs, out, tree, "never")
        times = Counter((folder / "scorer" / "measured").read_text().splitlines())
        n_rows, n_again = chosen.files * chosen.rows, times.total() - chosen.files * chosen.rows
        if len(times) != n_rows:
            raise SystemExit(f"{len(times)} of {n_rows} rows were measured")
        n_in_flight = chosen.workers * DEPTH  # one is measured, one read or written
        print(
            f"gone on with ({time.monotonic() - began:.1f} s): {n_again} of {n_rows:,} rows were measured "
            f"twice; {n_in_flight} units of {chosen.rows} rows were in flight at most",
            flush=True,
        )
        began = time.monotonic()
        result = audit(
            logs,
            str(out),
            Config.model_validate(tree),
            identify=fake_scorer.identify,
            load=fake_scorer.load_counting,
        )
        print(f"called again: {time.monotonic() - began:.2f} s, {result.n_units_measured} units measured")
        if n_again > n_in_flight * chosen.rows:
            raise SystemExit("more was measured again than had been in flight")


def drive(logs: list[str], out: Path, tree: dict[str, Any], moment: str) -> int:
    """Run a driver until that moment. Returns its exit code."""
    spec = {"logs": logs, "out": str(out), "config": tree, "moment": moment, "signal": "SIGKILL"}
    spec["load"] = "load_counting"
    run = [sys.executable, "-m", "tests.audit_driver", json.dumps(spec)]
    return subprocess.run(run, stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    main()
