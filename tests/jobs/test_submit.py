"""Submitting: what is handed to Ray, and a real Ray head on loopback that runs it."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen
from zipfile import ZipFile

import pytest

from jobs.config import Config, load_config
from jobs.errors import ConfigError, JobError
from jobs.submit import JUNK, Submission, describe, follow, submit

# Ray's client says ssl=None to aiohttp.
pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")

LOGS = ["s3://bucket/logs/"]
OUT = "s3://bucket/audits/2026-11-30"
ROOT = Path(__file__).resolve().parents[2]


class Status(str):
    def is_terminal(self):
        return self in ("SUCCEEDED", "FAILED", "STOPPED")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settings_of(submission):
    words = shlex.split(submission.entrypoint)
    return [words[i + 1] for i, word in enumerate(words) if word == "--set"]


def test_the_entrypoint_is_the_same_audit_and_joins_the_cluster_it_runs_on():
    submission = describe(LOGS, OUT, Config())
    assert submission.entrypoint == f"leadline audit s3://bucket/logs/ --out {OUT} --address auto"
    assert submission.runtime_env == {}


def test_settings_travel_in_the_command_and_come_out_the_same(tmp_path):
    yaml = tmp_path / "night.yaml"
    yaml.write_text("methods: [gap, length]\njudge: {deciding_method: gap, flag_budget: 0.00001}\n")
    overrides = ["fields.question=a b.c", "report.title='the \"night\": \N{SNOWMAN}'", "read.limit=7"]
    config = load_config(str(yaml), overrides, {"loo": "off", "workers.address": "http://elsewhere:8265"})
    submission = describe(LOGS, OUT, config)
    again = load_config(None, settings_of(submission), {})
    here = config.model_dump()
    here["workers"]["address"] = None
    assert again.model_dump() == here


def test_a_path_with_blanks_and_quotes_stays_one_word():
    hostile = "s3://bucket/it's; rm -rf $HOME/"
    words = shlex.split(describe([hostile], OUT, Config()).entrypoint)
    assert words[2] == hostile


def test_the_job_is_named_by_its_out_alone():
    name = describe(LOGS, OUT, Config()).name
    assert name == describe(["s3://other/"], OUT + "/", load_config(None, ["loo=exact"], {})).name
    assert name != describe(LOGS, OUT + "-b", Config()).name
    assert "2026-11-30" in name


def test_a_working_directory_is_uploaded_and_runs_without_an_installed_command():
    submission = describe(LOGS, OUT, Config(), working_dir=str(ROOT))
    assert submission.runtime_env == {"working_dir": str(ROOT), "excludes": list(JUNK)}
    assert submission.entrypoint.startswith("python -m jobs.cli audit ")


def test_a_working_directory_without_our_code_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no jobs/cli\.py in it"):
        describe(LOGS, OUT, Config(), working_dir=str(tmp_path))


def test_what_is_uploaded_of_a_working_directory_is_code_and_neither_junk_nor_secrets(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    kept = {"jobs/cli.py", "jobs/report/template.html", "detector/bundles/a/bundle.json", "cluster.yaml"}
    junk = [
        *(
            ".git/HEAD",
            ".venv/bin/python",
            "jobs/__pycache__/cli.cpython-311.pyc",
            "leadline.egg-info/PKG-INFO",
        ),
        *(".mypy_cache/x", ".pytest_cache/x", ".hypothesis/x", "dist/leadline.whl", "leadline-demo/run.json"),
        *(".env", ".env.local", "keys/node.pem", ".aws/credentials"),
    ]
    for name in (*kept, *junk):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    env = describe(LOGS, OUT, Config(), working_dir=str(tmp_path / "work")).runtime_env
    create_package(env["working_dir"], tmp_path / "package.zip", True, excludes=env["excludes"])
    with ZipFile(tmp_path / "package.zip") as package:
        assert {name for name in package.namelist() if not name.endswith("/")} == kept


def test_the_request_says_which_leadline_asks_and_where_the_run_goes():
    request = json.loads(describe(LOGS, OUT, Config()).to_json())
    assert request["metadata"] == {"leadline": version("leadline"), "out": OUT}
    assert request["entrypoint"].startswith("leadline audit ")
    assert request["name"].startswith("leadline-2026-11-30-") and request["runtime_env"] == {}


def test_waiting_survives_a_silence_and_gives_up_after_a_long_one(monkeypatch):
    answers = iter([OSError("reset"), RuntimeError("503"), SimpleNamespace(status=Status("RUNNING"))])

    class Client:
        async def tail_job_logs(self, job_id):
            raise RuntimeError("gone")
            yield

        def get_job_info(self, job_id):
            answer = next(answers, OSError("refused"))
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr("jobs.submit._connect", lambda address: Client())
    monkeypatch.setattr("jobs.submit._POLL_SECONDS", 0.0)
    with pytest.raises(JobError, match="leadline status OUT"):
        follow("leadline-x-a1", "http://head:8265", lambda text: None)
    done = SimpleNamespace(status=Status("SUCCEEDED"))
    answers = iter([OSError("reset"), SimpleNamespace(status=Status("RUNNING")), OSError("reset"), done])
    assert follow("leadline-x-a1", "http://head:8265", lambda text: None) == 0


@pytest.mark.parametrize(
    "storage",
    [
        {"key": "AKIA", "secret": "hunter2"},
        {"client_kwargs": {"aws_secret_access_key": "hunter2"}},
        {"endpoint_url": "http://user:hunter2@store:9000"},
        {"sas": "hunter2"},
    ],
)
def test_a_secret_in_the_settings_is_refused_and_not_repeated(storage):
    with pytest.raises(ConfigError, match="setting storage") as refused:
        describe(LOGS, OUT, Config(storage=storage))
    assert "hunter2" not in str(refused.value)


def test_an_endpoint_without_credentials_may_travel():
    config = Config(storage={"endpoint_url": "http://store:9000"})
    assert settings_of(describe(LOGS, OUT, config)) == ['storage={"endpoint_url": "http://store:9000"}']


@pytest.mark.parametrize(
    "url", ["s3://me:hunter2@bucket/logs", "https://host/logs.jsonl?X-Amz-Signature=hunter2"]
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="credentials") as refused:
        describe([url], OUT, Config())
    assert "hunter2" not in str(refused.value)


def test_a_wildcard_is_no_query():
    assert "day=?/*.jsonl" in describe(["s3://bucket/day=?/*.jsonl"], OUT, Config()).entrypoint


def test_a_bundle_must_be_where_the_cluster_finds_it():
    with pytest.raises(ConfigError, match="my-bundle: a relative path"):
        describe(LOGS, OUT, Config(bundle="my-bundle#0123456789ab"))
    assert "s3://b/bundle" in describe(LOGS, OUT, Config(bundle="s3://b/bundle")).entrypoint


@pytest.mark.parametrize("logs, out", [(["logs"], OUT), (LOGS, "out")])
def test_a_relative_path_is_refused_because_it_names_another_folder_there(logs, out):
    with pytest.raises(ConfigError, match="relative path"):
        describe(logs, out, Config())


def test_an_address_that_is_not_the_jobs_api_is_refused():
    with pytest.raises(ConfigError, match="Jobs API"):
        submit(Submission("leadline-x", "true", {}), "ray://head:10001")


def test_an_environment_that_overrides_the_address_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is set"):
        submit(Submission("leadline-x", "true", {}), "http://127.0.0.1:1")


def test_a_cluster_that_is_not_there_is_one_line():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(JobError, match="cannot be reached") as failed:
        submit(Submission("leadline-x", "true", {}), address)
    assert "\n" not in str(failed.value)


def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(monkeypatch):
    from ray import job_submission
    from ray.exceptions import AuthenticationError

    def refuse(address):
        raise AuthenticationError("Authentication required")

    monkeypatch.setattr(job_submission, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        submit(Submission("leadline-x", "true", {}), "http://127.0.0.1:8265")


@pytest.fixture(scope="module")
def cluster():
    """A Ray head of its own on loopback. `ray stop` would end every Ray of the machine; this ends one."""
    ports = [free_port() for _ in range(3)]
    folder = tempfile.mkdtemp(prefix="leadline-", dir="/tmp")  # socket paths must stay under 107 bytes
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment["RAY_AUTH_MODE"] = "disabled"  # whatever this process has been told by another Ray
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    head = subprocess.Popen(
        [
            *("ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=1", "--num-gpus=0"),
            *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={ports[0]}"),
            *(f"--dashboard-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}"),
            *(f"--temp-dir={folder}", "--object-store-memory=80000000"),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        wait_for(f"{address}/api/jobs/", head)
        yield address
    finally:
        head.terminate()  # `--block` ends what it started
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(url, process, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"ray start ended with {process.returncode}")
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"{url} did not answer within {seconds} s")


@pytest.mark.ray
def test_a_submitted_audit_runs_there_and_leaves_a_finished_run(cluster, tiny_scorer_dir, tmp_path):
    rows = [
        {"id": f"r{i}", "question": "Who?", "contexts": ["Ada wrote it.", "It rained."], "answer": "Ada did."}
        for i in range(3)
    ]
    logs, out = tmp_path / "logs.jsonl", tmp_path / "out"
    logs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(None, [], {"scorer.name": str(tiny_scorer_dir)})
    submission = describe([str(logs)], str(out), config)
    job_id = submit(submission, cluster)
    written = []
    assert follow(job_id, cluster, written.append) == 0, "".join(written)
    assert job_id == f"{submission.name}-a1"
    assert "3 rows read: 3 answers audited, 0 rejected" in "".join(written)
    assert (out / "_SUCCESS").exists()


@pytest.mark.ray
def test_the_exit_code_of_the_quality_gate_comes_back(cluster):
    job_id = submit(Submission("leadline-gate", "exit 3", {}), cluster)
    assert follow(job_id, cluster, lambda text: None) == 3


@pytest.mark.ray
def test_a_second_submission_is_refused_while_the_first_runs_and_counted_after_it(cluster):
    slow = Submission("leadline-slow", "sleep 300", {})
    first = submit(slow, cluster)
    with pytest.raises(ConfigError, match=f"job {first} is writing this OUT already"):
        submit(slow, cluster)
    from ray.job_submission import JobSubmissionClient

    JobSubmissionClient(cluster).stop_job(first)
    assert follow(first, cluster, lambda text: None) == 1  # stopped: no exit code of its own
    again = submit(Submission("leadline-slow", "true", {}), cluster)
    assert again == "leadline-slow-a2"
    assert follow(again, cluster, lambda text: None) == 0


@pytest.mark.ray
def test_of_two_submitters_at_the_same_moment_ray_refuses_one(cluster, monkeypatch):
    from ray.job_submission import JobSubmissionClient

    race = Submission("leadline-race", "true", {})
    submit(race, cluster)
    monkeypatch.setattr(JobSubmissionClient, "list_jobs", lambda client: [])  # listed before the other came
    with pytest.raises(ConfigError, match="submitted by somebody else"):
        submit(race, cluster)
