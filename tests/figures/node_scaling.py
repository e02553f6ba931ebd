"""Rows per second against the number of machines, with a scorer that only waits.

    OMP_NUM_THREADS=1 python -m tests.figures.node_scaling [--nodes 1 2 4 8] [--seconds 0.05] [--rows 400]

Machines are simulated: one raylet with one CPU and one worker each (`ray.cluster_utils.Cluster`), beside a
head that does no work. A row takes a fixed sleep, so that a few real cores carry them all. `--rows` is per
node, so that every size runs about as long. The time is from the first marker to the last: loading a scorer
and starting processes is no part of it. Linear is what one node does, times the nodes.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import ray
from ray.cluster_utils import Cluster

from jobs.audit import audit
from jobs.config import Config
from jobs.dispatch import Progress
from tests import fake_scorer

_ROWS_PER_UNIT = 10
_OBJECT_STORE_BYTES = 100 << 20


def main() -> None:
    """One line per number of nodes."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8])
    arguments.add_argument("--seconds", type=float, default=0.05, help="per row")
    arguments.add_argument("--rows", type=int, default=400, help="per node")
    chosen = arguments.parse_args()
    print(f"{'nodes':>5} {'rows':>6} {'units':>5} {'rows/s':>8} {'of linear':>9}")
    first: float | None = None
    for n_nodes in chosen.nodes:
        n_rows = chosen.rows * n_nodes
        with TemporaryDirectory() as folder:
            write_logs(Path(folder, "logs"), n_rows)
            seen = run(folder, n_nodes, chosen.seconds)
        began, ended = next(one for one in seen if one[1]), seen[-1]
        rate = (ended[1] - began[1]) / (ended[0] - began[0])
        first = first or rate / n_nodes
        n_units, share = n_rows // _ROWS_PER_UNIT, rate / n_nodes / first
        print(f"{n_nodes:>5} {n_rows:>6,} {n_units:>5,} {rate:>8.1f} {share:>9.0%}", flush=True)


def write_logs(folder: Path, n_rows: int) -> None:
    """A folder per unit, so that each has as many rows as the next."""
    for start in range(0, n_rows, _ROWS_PER_UNIT):
        rows = [
            {"question": "Where?", "passages": ["On the north side."], "answer": f"At number {number}."}
            for number in range(start, start + _ROWS_PER_UNIT)
        ]
        path = folder / f"unit={start:08d}" / "log.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: str, n_nodes: int, seconds: float) -> list[tuple[float, int]]:
    """Audit on so many nodes. Returns when (seconds) how many rows were committed."""
    config = Config.model_validate(
        {"scorer": {"name": f"{folder}", "device": "cpu"}, "workers": {"count": n_nodes, "device": "cpu"}}
    )
    seen: list[tuple[float, int]] = []

    def watch(progress: Progress) -> None:
        if not seen or progress.n_read > seen[-1][1]:
            seen.append((time.monotonic(), progress.n_read))

    size = {"object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0} | size)
    try:
        for _ in range(n_nodes):
            cluster.add_node(num_cpus=1, **size)
        ray.init(address=cluster.address, log_to_driver=False)
        audit(
            [f"{folder}/logs"],
            f"{folder}/out",
            config,
            on_progress=watch,
            identify=fake_scorer.identify,
            load=_Load(seconds),
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    return seen


class _Load:
    """What makes the scorer in a worker: one that sleeps so long per row."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, config: Config) -> fake_scorer.FakeScorer:
        return fake_scorer.FakeScorer(config.scorer.name, seconds=self._seconds)


if __name__ == "__main__":
    main()
