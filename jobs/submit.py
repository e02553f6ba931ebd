"""The same audit as a job on a Ray cluster, through the Ray Jobs API.

What is submitted is a plain `leadline audit ...` command line. Ray runs a job once and never again, and it
can report a job that succeeded as failed when its head is replaced: whether a run is complete is said by OUT
alone (`leadline status OUT`), and submitting it again finishes only what is missing.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jobs.config import Config, fingerprint
from jobs.errors import ConfigError, JobError
from jobs.storage import mask

# Storage options can hold a secret under any name, so these alone may travel in a command line.
_TELLABLE = {
    *("anon", "endpoint_url", "region_name", "addressing_style", "signature_version"),
    *("requester_pays", "use_ssl", "verify", "account_name", "project"),
}
# A user before the host, or a query; a lone `?` is a wildcard.
_KEYED = re.compile(r"://[^/]*@|[?&][\w.-]+=")
_POLL_SECONDS = 1.0
_SILENT_POLLS = 120

JUNK = (
    *(".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "*.py[co]", "*.egg-info", ".*_cache"),
    *(".hypothesis", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store", "/build", "/dist"),
    *("/leadline-demo", ".env", ".env.*", "*.pem", "*.key", ".aws", ".netrc"),
)
"""What no job needs of a working directory, and what must not leave a machine, as `.gitignore` says it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is handed to Ray.

    `name` belongs to OUT; Ray's id of the job is the name and an attempt number. Ray refuses an id that it
    has seen, which makes the id a lock: of two people who submit the same audit one is told so.
    """

    name: str
    entrypoint: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    """Shown with the job on the cluster's dashboard: who asks for what."""

    def to_json(self) -> str:
        """The request, but for the attempt number that the cluster's list of jobs decides."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def describe(
    logs: list[str],
    out: str,
    config: Config,
    *,
    profile: str | None = None,
    working_dir: str | None = None,
) -> Submission:
    """Turn an audit into a job without contacting anything.

    The code is the `leadline` package on the cluster's image, which pins it and all it needs: nothing is
    resolved at night. With `working_dir` it is that folder instead, uploaded by Ray (100 MiB at most) without
    what `.gitignore` and `JUNK` name, and again with everything else of the image.
    Raises ConfigError for what would mean something else on the cluster, or show a secret on its dashboard.
    """
    bundle = [] if config.bundle_place in ("auto", "none") else [config.bundle_place]
    for url in (*logs, out, *([profile] if profile else []), *bundle):
        _check_url(url)
    for key, value in _leaves(config.storage):
        if key.rsplit(".", 1)[-1] not in _TELLABLE or mask(str(value)) != str(value):
            raise ConfigError(
                f"setting storage.{key}: a job's command line is readable on the cluster's dashboard; "
                "leave it out and give the nodes an instance profile or the store's environment variables"
            )
    words = ["audit", *logs, "--out", out]
    if profile:
        words += ["--profile", profile]
    for key, value in _overrides(config):
        words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    words += ["--address", "auto"]
    program = ["python", "-m", "jobs.cli"] if working_dir else ["leadline"]
    runtime_env = {"working_dir": _folder(working_dir), "excludes": list(JUNK)} if working_dir else {}
    label = re.sub(r"[^A-Za-z0-9]+", "-", out.rstrip("/").rsplit("/", 1)[-1])[:40].strip("-")
    name = "-".join(part for part in ("leadline", label, fingerprint(out.rstrip("/"))) if part)
    metadata = {"leadline": version("leadline"), "out": mask(out)}
    return Submission(name, shlex.join([*program, *words]), runtime_env, metadata)


def submit(submission: Submission, address: str) -> str:
    """Hand the job to the cluster at `address` (http://head:8265) and return its id.

    Raises ConfigError when the same OUT is being written by a job of this cluster, JobError when the cluster
    cannot be reached or refuses.
    """
    client = _connect(address)
    earlier = [job for job in client.list_jobs() if _attempt(submission.name, job.submission_id)]
    running = next((job.submission_id for job in earlier if not job.status.is_terminal()), None)
    if running is not None:
        raise ConfigError(f"job {running} is writing this OUT already; follow it: ray job logs -f {running}")
    number = max((_attempt(submission.name, job.submission_id) for job in earlier), default=0) + 1
    try:
        return client.submit_job(
            entrypoint=submission.entrypoint,
            runtime_env=submission.runtime_env,
            metadata=submission.metadata,
            submission_id=f"{submission.name}-a{number}",
        )
    except (RuntimeError, ValueError) as error:
        if "already exists" in str(error):
            raise ConfigError(
                f"{submission.name} was submitted by somebody else just now; one is enough"
            ) from None
        raise JobError(f"cluster {mask(address)} refused the job: {_last_line(error)}") from None


def follow(job_id: str, address: str, write: Callable[[str], object]) -> int:
    """Pass the job's log to `write` until the job ends, and return the exit code of its command."""
    import asyncio
    import time

    import aiohttp

    client = _connect(address)

    async def tail() -> None:
        async for lines in client.tail_job_logs(job_id):
            write(lines)

    try:
        asyncio.run(tail())
    except (RuntimeError, aiohttp.ClientError) as error:
        # A second tail would repeat the log from its start: only wait from here on.
        write(f"the log connection of {job_id} broke off ({_last_line(error)}); waiting for the job's end\n")
    silent = 0
    while True:
        try:
            job, silent = client.get_job_info(job_id), 0
            if job.status.is_terminal():
                break
        except (RuntimeError, OSError) as error:  # a tunnel or a head may be away for a while
            silent += 1
            if silent > _SILENT_POLLS:
                raise JobError(
                    f"cluster {mask(address)} does not answer any more ({_last_line(error)}); {job_id} may "
                    "go on: ask `leadline status OUT`, which alone says whether the run is complete"
                ) from None
        time.sleep(_POLL_SECONDS)
    if job.status == "SUCCEEDED":
        return 0
    # A command that was never started, or was stopped, has no exit code of its own.
    return job.driver_exit_code if job.driver_exit_code and job.driver_exit_code > 0 else 1


def _connect(address: str) -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {mask(address)}: the Jobs API is meant, e.g. http://head:8265")
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if os.environ.get(variable, address) != address:
            raise ConfigError(f"{variable} is set and Ray would use it instead of --address; unset it")
    try:
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError(
            f"cluster {mask(address)} asks for its token: set RAY_AUTH_MODE=token and put the token in "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None
    except (ConnectionError, RuntimeError) as error:
        raise JobError(f"cluster {mask(address)} cannot be reached: {_last_line(error)}") from None


def _attempt(name: str, job_id: str | None) -> int:
    """The attempt number of a job id that belongs to `name`, else 0."""
    found = re.fullmatch(rf"{re.escape(name)}-a(\d+)", job_id or "")
    return int(found[1]) if found else 0


def _folder(working_dir: str) -> str:
    if "://" not in working_dir and not Path(working_dir, "jobs", "cli.py").is_file():
        raise ConfigError(
            f"--working-dir {working_dir}: no jobs/cli.py in it, so no code of Leadline; give a checkout"
        )
    return working_dir


def _check_url(url: str) -> None:
    if "://" not in url:
        if not url.startswith("/"):
            raise ConfigError(
                f"{url}: a relative path is another folder on the cluster; give a URL or a full path"
            )
    elif _KEYED.search(url):
        raise ConfigError(f"{mask(url)}: it carries credentials, which the cluster's dashboard would show")


def _overrides(section: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is not the default, as dotted key and JSON value: no file has to travel."""
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _overrides(value, f"{path}{key}.")
        elif value != type(section).model_fields[key].get_default(call_default_factory=True):
            if f"{path}{key}" != "workers.address":  # the job joins the cluster it runs on
                yield f"{path}{key}", value


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
