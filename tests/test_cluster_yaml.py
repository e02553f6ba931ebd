"""cluster.yaml: accepted by Ray's own validator, and free of the traps that cost money or a night."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.fixture(scope="module")
def ray_version():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(d.split("==")[1] for d in dependencies if d.startswith("ray"))


@pytest.fixture(scope="module")
def workers(cluster):
    return {k: v for k, v in cluster["available_node_types"].items() if k != cluster["head_node_type"]}


def is_spot(node_type):
    return node_type["node_config"].get("InstanceMarketOptions") == {"MarketType": "spot"}


def test_ray_accepts_the_file_once_its_defaults_are_filled_in(cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


def test_rays_validator_would_notice_a_misspelt_key(cluster):
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError, match="idle_timeout"):
        validate_config(prepare_config(copy.deepcopy(cluster) | {"idle_timeout": 5}))


def test_every_pinned_ray_is_the_one_of_pyproject(cluster, ray_version):
    text = (ROOT / "cluster.yaml").read_text()
    pins = re.findall(r"rayproject/ray:([\d.]+)", text) + re.findall(r'ray\[default\]==([\d.]+)"', text)
    assert len(pins) >= 2
    assert set(pins) == {ray_version}
    import ray

    assert ray.__version__ == ray_version


def test_the_image_pins_a_python_minor_that_the_package_supports(cluster):
    major, minor = re.search(r"-py(\d)(\d+)-", cluster["docker"]["image"]).groups()
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (int(major), int(minor)) >= tuple(int(part) for part in required.removeprefix(">=").split("."))


def test_what_the_setup_installs_is_the_same_every_night(cluster):
    installs = [c for c in cluster["setup_commands"] if "pip install" in c]
    assert installs and all("--constraint /home/ray/dist/constraints.txt" in c for c in installs)
    assert cluster["file_mounts"]["/home/ray/dist"] == "dist"
    assert not cluster["docker"]["image"].endswith(("latest", "nightly"))


def test_no_work_lands_on_the_head_and_the_head_is_never_reclaimed(cluster):
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in head["node_config"]


def test_spot_comes_first_and_an_equal_on_demand_type_stands_behind_it(workers):
    spot = {name: t for name, t in workers.items() if is_spot(t)}
    on_demand = {name: t for name, t in workers.items() if not is_spot(t)}
    assert spot and on_demand
    assert min(t["priority"] for t in spot.values()) > max(t["priority"] for t in on_demand.values())
    resources = [t["resources"] for t in workers.values()]
    assert all(r == resources[0] and r["GPU"] == 1 for r in resources)
    assert all(0 < t["max_workers"] <= 2 for t in on_demand.values())


def test_nothing_is_paid_for_while_there_is_no_work(cluster, workers):
    assert all(t["min_workers"] == 0 for t in workers.values())
    assert 0 < cluster["idle_timeout_minutes"] <= 5
    assert cluster["provider"]["cache_stopped_nodes"] is False


def test_every_node_type_has_a_profile_an_image_and_metadata_reachable_from_docker(cluster):
    for name, node_type in cluster["available_node_types"].items():
        node = node_type["node_config"]
        assert node["IamInstanceProfile"], name
        assert node["ImageId"], name
        assert node["MetadataOptions"]["HttpPutResponseHopLimit"] == 2, name
        assert node["MetadataOptions"]["HttpTokens"] == "required", name


def test_docker_gets_more_shared_memory_than_its_default(cluster):
    assert any(option.startswith("--shm-size=") for option in cluster["docker"]["run_options"])


def test_the_jobs_api_is_not_opened_to_the_network(cluster):
    start = " ".join(cluster["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in start


def test_every_node_asks_for_the_token_and_has_it(cluster):
    assert "--env RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]
    assert cluster["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_boto3_is_resolved_together_with_s3fs(cluster):
    commands = [c for c in cluster["setup_commands"] if "boto3" in c and "leadline-" in c]
    assert commands
    assert cluster["head_setup_commands"] == []  # Ray's default would install the newest boto3 over it
