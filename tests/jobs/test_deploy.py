"""jobs/deploy: accepted by Kubernetes' own schemas, and free of the traps that cost money or a night.

The schema of KubeRay's RayJob comes with KubeRay alone. Its pods are checked as pods; the keys around them
against the fields of KubeRay's Go types (ray-operator/apis/ray/v1 of 1.4), written down here.
"""

import copy
import re
import shlex
import shutil
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from jobs import cli
from jobs.dates import expand

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "jobs" / "deploy"
KUBERNETES = "1.34"

CLUSTER_KEYS = set(
    "rayVersion enableInTreeAutoscaling autoscalerOptions headGroupSpec workerGroupSpecs authOptions".split()
)
JOB_KEYS = set(
    "entrypoint runtimeEnvYAML jobId shutdownAfterJobFinishes ttlSecondsAfterFinished activeDeadlineSeconds "
    "backoffLimit submissionMode submitterConfig submitterPodTemplate rayClusterSpec metadata suspend "
    "entrypointNumCpus entrypointNumGpus entrypointResources clusterSelector managedBy".split()
)
SCALER_KEYS = set(
    "resources image imagePullPolicy env envFrom idleTimeoutSeconds upscalingMode version".split()
)
HEAD_KEYS = set("serviceType headService enableIngress rayStartParams template resources labels".split())
WORKER_KEYS = set(
    "groupName replicas minReplicas maxReplicas numOfHosts idleTimeoutSeconds rayStartParams template".split()
)


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def job():
    (document,) = documents("rayjob.yaml")
    return document


@pytest.fixture
def cluster(job):
    return job["spec"]["rayClusterSpec"]


@pytest.fixture
def cronjob():
    (document,) = documents("cronjob.yaml")
    return document


@pytest.fixture
def pods(job, cluster):
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [job["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]


def steps(cronjob):
    pod = cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


@pytest.mark.parametrize("document", [*documents("accounts.yaml"), *documents("cronjob.yaml")], ids=str)
def test_kubernetes_accepts_what_is_its_own(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schemas_would_notice_a_misspelt_key(cronjob):
    broken = copy.deepcopy(cronjob)
    broken["spec"]["concurrencypolicy"] = broken["spec"].pop("concurrencyPolicy")
    with pytest.raises(kubernetes_validate.ValidationError, match="concurrencypolicy"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_pods_of_the_rayjob_are_pods(pods):
    for pod in pods:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
        assert set(pod) <= {"metadata", "spec"}


def test_the_rayjob_says_nothing_that_kuberay_does_not_know(job, cluster):
    assert (job["apiVersion"], job["kind"], set(job)) == (
        *("ray.io/v1", "RayJob"),
        {"apiVersion", "kind", "metadata", "spec"},
    )
    assert set(job["spec"]) <= JOB_KEYS
    assert set(cluster) <= CLUSTER_KEYS
    assert set(cluster["autoscalerOptions"]) <= SCALER_KEYS
    assert set(cluster["headGroupSpec"]) <= HEAD_KEYS
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKER_KEYS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())


def test_a_night_that_is_over_costs_nothing(job, cluster):
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert 0 < job["spec"]["ttlSecondsAfterFinished"] <= 3600
    assert cluster["enableInTreeAutoscaling"] is True
    assert 0 < cluster["autoscalerOptions"]["idleTimeoutSeconds"] <= 300
    for group in cluster["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == 0 < group["maxReplicas"]


def test_a_night_is_tried_again_and_ends_before_the_next(job, cronjob):
    assert 1 <= job["spec"]["backoffLimit"] <= 3 and job["spec"]["submitterConfig"]["backoffLimit"] >= 1
    deadline = cronjob["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"]
    assert job["spec"]["activeDeadlineSeconds"] < deadline < 24 * 3600


def test_no_work_lands_on_the_head_and_gpus_are_the_workers_alone(cluster):
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in str(head)
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_every_version_is_pinned_and_the_same_everywhere(pods, cluster, cronjob):
    ray = next(d.split("==")[1] for d in project()["dependencies"] if d.startswith("ray"))
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^FROM (.*)$", dockerfile, re.M)[1] == f"rayproject/ray:{ray}-py311-gpu"
    assert f"FROM {yaml.safe_load((ROOT / 'cluster.yaml').read_text())['docker']['image']}\n" in dockerfile
    assert cluster["rayVersion"] == ray
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    (image,) = images
    assert image.endswith(f"/leadline:{project()['version']}") and image in dockerfile
    assert {step["image"] for step in steps(cronjob)} == {"registry.k8s.io/kubectl:v1.34.2"}


def test_every_pod_has_an_account_that_exists_and_memory_that_is_bounded(pods, cronjob):
    accounts = {d["metadata"]["name"] for d in documents("accounts.yaml") if d["kind"] == "ServiceAccount"}
    assert {pod["spec"]["serviceAccountName"] for pod in pods} == {"leadline"} < accounts
    pod = cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] in accounts - {"leadline"}
    containers = [container for pod in pods for container in pod["spec"]["containers"]] + steps(cronjob)
    assert all("memory" in container["resources"]["limits"] for container in containers)


def test_the_entrypoint_is_an_audit_of_the_night_before_that_leadline_understands(job, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_audit", lambda *given: seen.append(given) or 0)
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[0] == "leadline"
    monkeypatch.setattr("sys.argv", [*words, "--date", "2026-12-01"])
    assert cli.main() == 0
    logs, out, config, _ = seen[0]
    assert (logs, out) == (["s3://logs/dt=2026-11-30/"], "s3://audits/2026-11-30")
    assert (config.workers.device, config.workers.address) == ("gpu", "auto")
    assert config.workers.count == job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
    assert expand(job["spec"]["entrypoint"], lambda: date(2027, 1, 1)).count("2026-12-31") == 2


def test_two_nights_are_kept_apart_because_the_job_lasts_as_long_as_its_night(cronjob):
    spec = cronjob["spec"]
    assert (spec["concurrencyPolicy"], spec["timeZone"]) == ("Forbid", "Etc/UTC")
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0
    verbs = [step["args"][0] for step in steps(cronjob)]
    assert verbs == ["delete", "create", "wait", "wait"]
    assert "--for=jsonpath={.status.endTime}" in steps(cronjob)[2]["args"]
    assert "--for=jsonpath={.status.jobStatus}=SUCCEEDED" in steps(cronjob)[3]["args"]


def test_the_nightly_account_may_do_what_its_steps_do_and_nothing_else():
    (role,) = [d for d in documents("accounts.yaml") if d["kind"] == "Role"]
    (rule,) = role["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["ray.io"], ["rayjobs"])
    assert set(rule["verbs"]) == {"create", "delete", "get", "list", "watch"}


def test_kustomize_puts_them_together(job):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which brings kustomize")
    made = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY)], capture_output=True, text=True, check=True, timeout=60
    )
    found = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(made.stdout)}
    (name,) = [name for kind, name in found if kind == "ConfigMap"]
    assert yaml.safe_load(found["ConfigMap", name]["data"]["rayjob.yaml"]) == job
    (volume,) = found["CronJob", "leadline-nightly"]["spec"]["jobTemplate"]["spec"]["template"]["spec"][
        "volumes"
    ]
    assert volume["configMap"]["name"] == name
    namespaced = [d for (kind, _), d in found.items() if kind != "Namespace"]
    assert {d["metadata"]["namespace"] for d in namespaced} == {job["metadata"]["namespace"]}
