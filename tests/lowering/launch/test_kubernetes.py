"""Kubernetes manifest: its objects are of the public API, and its pods train together, also after one was replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from legoai.cli import main
from legoai.lowering.launch import LaunchError
from legoai.lowering.launch.job import GRACE_SECONDS, Job
from legoai.lowering.launch.kubernetes import CLAIM, IMAGE, text
from legoai.runtime.launching.torchrun import SHUTDOWN_SECONDS

PLAN = """plan {name}
model   {model}
cluster {cluster}
batch   (global = {ranks}, micro = 1, seq_len = 32)
mesh    (dp_shard = {ranks})
fsdp blocks on dp_shard
"""
GPUS = "h100_sxm(hosts = 4, fabric = infiniband_ndr)"
CPUS = "cpu(hosts = 2, devices = 1, fabric = ethernet_100)"

API: dict[str, dict[str, Any]] = {
    "ConfigMap": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "data": dict},
    "Service": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "ServiceSpec"},
    "ServiceSpec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": dict},
    "Job": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "JobSpec"},
    "JobSpec": {
        "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
        "podFailurePolicy": "PodFailurePolicy", "template": "PodTemplateSpec",
    },
    "PodFailurePolicy": {"rules": ["PodFailurePolicyRule"]},
    "PodFailurePolicyRule": {"action": str, "onPodConditions": ["PodFailurePolicyOnPodConditionsPattern"]},
    "PodFailurePolicyOnPodConditionsPattern": {"type": str},
    "PodTemplateSpec": {"spec": "PodSpec"},
    "PodSpec": {
        "subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": ["Container"],
        "volumes": ["Volume"],
    },
    "Container": {
        "name": str, "image": str, "workingDir": str, "command": [str], "args": [str], "env": ["EnvVar"],
        "resources": "ResourceRequirements", "volumeMounts": ["VolumeMount"],
    },
    "EnvVar": {"name": str, "value": str},
    "ResourceRequirements": {"limits": dict},
    "VolumeMount": {"name": str, "mountPath": str, "readOnly": bool},
    "Volume": {
        "name": str, "configMap": "ConfigMapVolumeSource", "emptyDir": "EmptyDirVolumeSource",
        "persistentVolumeClaim": "PersistentVolumeClaimVolumeSource",
    },
    "ConfigMapVolumeSource": {"name": str},
    "PersistentVolumeClaimVolumeSource": {"claimName": str},
    "EmptyDirVolumeSource": {"medium": str},
    "ObjectMeta": {"name": str, "labels": dict},
}  # fmt: skip
"""Fields of https://kubernetes.io/docs/reference/kubernetes-api, as in the models of the official client 37.0.2."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def manifest(cluster: str, ranks: int, *, name: str = "small", model: str = 'llama3("tiny")') -> dict[str, Any]:
    """The objects that are written, by kind."""
    Path("small.plan").write_text(PLAN.format(cluster=cluster, ranks=ranks, name=name, model=model), encoding="utf-8")
    assert main(["lower", "small.plan", "-o", "small.py", "--launch", "k8s"]) == 0
    objects = list(yaml.safe_load_all(Path("small.yaml").read_text(encoding="utf-8")))
    assert len({one["kind"] for one in objects}) == len(objects) == 3
    return {one["kind"]: one for one in objects}


def conforms(value: Any, kind: Any, where: str) -> None:
    """Check a value against the API: known fields, each with a value of its type."""
    if isinstance(kind, str):
        assert isinstance(value, dict), where
        for name, field in value.items():
            assert name in API[kind], f"{where}.{name} is no field of {kind}"
            conforms(field, API[kind][name], f"{where}.{name}")
    elif isinstance(kind, list):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            conforms(item, kind[0], f"{where}[{number}]")
    else:
        assert type(value) is kind, where


@pytest.mark.parametrize("cluster, ranks", [(GPUS, 32), (CPUS, 2)])
def test_every_field_is_in_the_kubernetes_api(cluster: str, ranks: int):
    for kind, one in manifest(cluster, ranks).items():
        conforms(one, kind, kind)
        assert one["apiVersion"] == ("batch/v1" if kind == "Job" else "v1")


@pytest.mark.parametrize("name", ["no", "off", "null", "y"])
def test_names_that_yaml_reads_as_other_values_stay_texts(name: str):
    objects = manifest(CPUS, 2, name=name)
    for kind, one in objects.items():
        conforms(one, kind, kind)
    assert {one["metadata"]["name"] for one in objects.values()} == {name}
    assert objects["Service"]["spec"]["selector"] == {"job-name": name}


def test_manifest_has_hosts_gpus_and_processes_of_the_plan():
    objects = manifest(GPUS, 32)
    job, name = objects["Job"]["spec"], objects["Job"]["metadata"]["name"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "--nnodes=4 --nproc-per-node=8" in container["command"][2]
    assert f'--rdzv-endpoint="{name}-0.{name}:' in container["command"][2], "the first pod, in the Service's domain"
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"] == name
    assert objects["Service"]["spec"]["selector"] == {"job-name": name}
    assert manifest(CPUS, 2)["Job"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {}


def test_config_map_holds_the_program_bytes():
    (program,) = manifest(GPUS, 32)["ConfigMap"]["data"].items()
    assert program == ("lowered-program.py", Path("small.py").read_text(encoding="utf-8"))


def test_site_settings_are_marked_and_volumes_are_mounted():
    pod = manifest(GPUS, 32)["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert container["image"] == IMAGE
    assert volumes["work"]["persistentVolumeClaim"]["claimName"] == CLAIM
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert container["workingDir"] == mounts["work"], "data and checkpoints are relative to it"
    assert (mounts["shm"], volumes["shm"]["emptyDir"]) == ("/dev/shm", {"medium": "Memory"})


def test_grace_period_covers_saving_on_shutdown():
    pod = manifest(GPUS, 32)["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(SHUTDOWN_SECONDS)
    assert pod["terminationGracePeriodSeconds"] == GRACE_SECONDS > SHUTDOWN_SECONDS
    assert container["command"][2].startswith("exec "), "torchrun itself gets the pod's SIGTERM"


def test_job_name_is_a_valid_kubernetes_name():
    long = "a_plan_with_a_name_that_is_longer_than_host_names_of_pods_may_be_by_some"
    for given, name in (("small_V2", "small-v2"), ("_8b_", "plan-8b"), (long, long.replace("_", "-")[:61])):
        found = manifest(GPUS, 32, name=given)["Job"]["metadata"]["name"]
        assert found == name.strip("-")
        assert len(f"{found}-3") <= 63


def test_factory_is_imported_from_the_volume():
    body = "def build() -> nn.Module:\n    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    Path("ours.py").write_text(f"from torch import nn\n\n\n{body}", encoding="utf-8")
    plan = PLAN.format(cluster="cpu(devices = 2)", ranks=2, name="small", model='python("ours:build")')
    Path("small.plan").write_text(plan.replace("fsdp blocks on dp_shard\n", "fsdp on dp_shard\n"), encoding="utf-8")
    assert main(["lower", "small.plan", "-o", "small.py", "--launch", "k8s"]) == 0
    written = Path("small.yaml").read_text(encoding="utf-8")
    assert "the module ours" in written
    assert '- name: PYTHONPATH\n              value: "/work"\n' in written


def test_program_too_large_for_a_config_map_is_refused():
    job = Job(name="big", hosts=1, processes=1, gpus=0, program=Path("big.py"), text="#" * (1 << 20) + "\n")
    with pytest.raises(LaunchError, match="1,048,577 bytes"):
        text(job)


class Cluster:
    """Pods of a manifest as processes of this machine, without the names that a cluster resolves."""

    def __init__(self, objects: dict[str, Any], folder: Path, *options: str) -> None:
        (self.container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        self.limit = objects["Job"]["spec"]["backoffLimit"]
        (program,) = objects["ConfigMap"]["data"].values()
        (folder / "mounted.py").write_text(program, encoding="utf-8")
        name = objects["Job"]["metadata"]["name"]
        script = self.container["command"][2].replace(
            f"{name}-0.{name}:29400", f"localhost:{20000 + os.getpid() % 20000}"
        )
        script = script.replace("/program/lowered-program.py", str(folder / "mounted.py"))
        self.command = [*self.container["command"][:2], script, *self.container["command"][3:], *options]
        self.folder = folder

    def start(self, index: int, *options: str) -> subprocess.Popen[bytes]:
        variables = {variable["name"]: variable["value"] for variable in self.container["env"]}
        environment = os.environ | variables | {
            "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        return subprocess.Popen([*self.command, *options], env=environment, cwd=self.folder)

    def steps(self) -> list[int]:
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]


@pytest.fixture
def cluster(here: Path) -> Cluster:
    (here / "text.txt").write_text("some text to read " * 4000, encoding="utf-8")
    return Cluster(manifest(CPUS, 2), here, "--data", "text.txt", "--out", "run", "--log-every", "0")


@pytest.mark.slow
def test_pods_train_together(cluster: Cluster):
    second = cluster.start(1, "--steps", "2")  # before the pod that serves the rendezvous
    first = cluster.start(0, "--steps", "2")
    try:
        assert (first.wait(100), second.wait(100)) == (0, 0)
    finally:
        first.kill()
        second.kill()
    assert cluster.steps() == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 0], ids=["a pod", "the pod with the rendezvous"])
def test_replaced_pod_continues_training(stopped: int, cluster: Cluster):
    options, failures = ("--steps", "60"), 0
    pods = [cluster.start(index, *options) for index in range(2)]
    try:
        until(lambda: len(cluster.steps()) > 3)
        pods[stopped].send_signal(signal.SIGTERM)  # to torchrun, as `exec` has it in the pod's process
        assert pods[stopped].wait(60) != 0
        assert max(cluster.steps()) < 60, "it has left before the end"
        while any(pod.poll() != 0 for pod in pods):  # as the Job does
            time.sleep(0.1)
            for index, pod in enumerate(pods):
                if pod.poll() not in (None, 0):
                    pods[index] = cluster.start(index, *options)
                    failures += index != stopped
            assert failures <= cluster.limit
    finally:
        for pod in pods:
            pod.kill()
    assert cluster.steps() == list(range(1, 61)), "each step once, as it goes on from where it has saved"


def until(condition: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
