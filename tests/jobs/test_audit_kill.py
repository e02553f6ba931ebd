"""kill -9 of a worker and of the driver, at several moments: the same tables as an undisturbed run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.audit import audit
from tests import fake_scorer
from tests.conftest import REPOSITORY
from tests.runs import N_ROWS, markers, settings, tables, write_logs

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_local")]


@pytest.fixture(scope="module")
def scene(tmp_path_factory, ray_local):
    """Logs, a scorer's folder, and the OUT of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("kill")
    write_logs(folder / "logs")
    (folder / "scorer").mkdir()
    finish(folder, folder / "undisturbed")
    return folder


def finish(scene, out):
    return audit(
        [str(scene / "logs")],
        str(out),
        settings(scene / "scorer"),
        identify=fake_scorer.identify,
        load=fake_scorer.load,
    )


def start_driver(scene, out, moment, address, signal_name="SIGKILL", load="load"):
    """The audit in another process, which gets the signal at `moment`."""
    config = settings(scene / "scorer").model_dump(mode="json")
    config["workers"]["address"] = address
    spec = {
        "logs": [str(scene / "logs")],
        "out": str(out),
        "config": config,
        "moment": moment,
        "signal": signal_name,
        "load": load,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.audit_driver", json.dumps(spec)],
        cwd=REPOSITORY,
        env=os.environ | {"LEADLINE_TEST": str(scene)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def drive(*arguments):
    """Run such a driver to its end. Returns its exit code and what it printed."""
    process = start_driver(*arguments)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


def assert_undisturbed(scene, out):
    assert tables(out) == tables(scene / "undisturbed")
    names = [{path.name for path in markers(folder)} for folder in (out, scene / "undisturbed")]
    assert names[0] == names[1]
    totals = [
        json.loads((folder / "_SUCCESS").read_text())["totals"] for folder in (out, scene / "undisturbed")
    ]
    assert totals[0] == totals[1]
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize(
    ("event", "share"),
    [
        ("measure", 0.0),  # before the first marker
        ("part", 0.5),  # in the middle: parts are written, their marker is not
        ("marker", 1.0),  # the last marker is written, the driver does not know it yet
    ],
)
def test_a_killed_worker_changes_nothing(scene, tmp_path, event, share):
    out, n_units = tmp_path / "out", len(markers(scene / "undisturbed"))
    fake_scorer.order_fault(scene / "scorer", "kill", event, out, int(share * n_units))
    try:
        result = finish(scene, out)
    finally:
        killed = fake_scorer.withdraw_fault(scene / "scorer")
    assert killed, "no worker was killed"
    assert result.totals["n_read"] == N_ROWS
    assert_undisturbed(scene, out)
    attempts = sorted(json.loads(path.read_text())["attempt"] for path in markers(out))
    # Of two units that it held none is blamed. The first marker stands: what was done is not done again.
    assert attempts[:-1] == [1] * (n_units - 1)
    assert attempts[-1] in ((1,) if event == "marker" else (1, 2))


@pytest.mark.parametrize("moment", ["start", "middle", "measured", "reported"])
def test_a_killed_driver_is_finished_by_the_same_command(scene, tmp_path, moment, ray_local):
    out, n_units = tmp_path / "out", len(markers(scene / "undisturbed"))
    exit_code, printed = drive(scene, out, moment, ray_local)
    assert exit_code == -signal.SIGKILL, printed
    n_done = len(markers(out))
    assert {"start": n_done == 0, "middle": 0 < n_done < n_units}.get(moment, n_done == n_units)
    assert (out / "run.json").exists() and not (out / "_SUCCESS").exists()
    before = {path: path.read_bytes() for path in markers(out)}
    result = finish(scene, out)
    assert result.n_units_measured <= n_units - n_done
    assert all(path.read_bytes() == content for path, content in before.items()), "a unit was done twice"
    assert_undisturbed(scene, out)


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_a_driver_with_a_ray_of_its_own_takes_its_workers_along(scene, tmp_path, signal_name):
    """SIGTERM is how Ray Jobs, Kubernetes and systemd stop a job."""
    out = tmp_path / "out"
    exit_code, printed = drive(scene, out, "middle", None, signal_name)
    assert exit_code not in (0, 1), printed
    assert 0 < len(markers(out)) < len(markers(scene / "undisturbed"))
    deadline = time.monotonic() + 30
    while workers_of(scene) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(scene) == []
    finish(scene, out)
    assert_undisturbed(scene, out)


def test_a_lost_machine_costs_no_more_than_one_attempt_of_a_unit_it_had(scene, tmp_path):
    """Two machines of one CPU each (simulated: a raylet each), of which one is taken away."""
    from ray.cluster_utils import Cluster

    out = tmp_path / "out"
    size = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0} | size)
    try:
        lost, _ = cluster.add_node(num_cpus=1, **size), cluster.add_node(num_cpus=1, **size)
        driver = start_driver(scene, out, "never", cluster.address, load="load_slow")
        while len(markers(out)) < 3 and driver.poll() is None:
            time.sleep(0.05)
        cluster.remove_node(lost, allow_graceful=False)
        printed, _ = driver.communicate(timeout=120)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0, printed
    assert_undisturbed(scene, out)
    attempts = [json.loads(path.read_text())["attempt"] for path in markers(out)]
    assert sorted(attempts)[-2:] in ([1, 1], [1, 2])


def workers_of(scene):
    """Workers that outlive their driver. (Ray's own agents do, by up to a minute, and touch nothing.)"""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = folder.joinpath("cmdline").read_bytes()
            # Children inherit the environment, by which those of other tests are told apart.
            if b"ray::" in command and b"Agent" not in command:
                if f"LEADLINE_TEST={scene}".encode() in folder.joinpath("environ").read_bytes():
                    found.append(command)
    return found
