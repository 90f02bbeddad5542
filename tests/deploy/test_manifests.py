"""The manifests of deploy/kubernetes: what Kubernetes checks when they are applied, and what it does not. See ``rules``."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy import manifests, models, rules
from tests.deploy.manifests import FOLDER, OVERLAYS, Manifest, needs_kubectl

pytestmark = needs_kubectl

VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")
FOLDERS = [FOLDER / "base", FOLDER / "etcd", *(FOLDER / "overlays" / name for name in OVERLAYS)]
FOREIGN = (
    "JobSet",
    "TrainingRuntime",
    "PyTorchJob",
    "PodMonitor",
    "PrometheusRule",
)  # resources of other projects, whose schemas are not here

REQUIRED = {
    "autoscale",
    "cpu-smoke",
    "etcd",
    "gpu",
    "jobset",
    "kueue",
    "kueue-elastic",
    "monitoring",
    "pytorchjob",
    "rdma",
    "trainer-runtime",
}


@pytest.fixture(scope="module")
def base() -> list[Manifest]:
    return manifests.render(FOLDER / "base")


def invalid(documents: list[Manifest], version: str) -> list[str]:
    """Return what the schemas of a version of Kubernetes refuse, also in the pod templates of other projects' resources."""
    own = [document for document in documents if document["kind"] not in FOREIGN]
    for found in rules.workloads(documents):
        if found.kind in FOREIGN:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": found.job}
            own.append(job if found.job else {"apiVersion": "v1", "kind": "PodTemplate", "template": found.template})
    errors = []
    for document in own:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']} in {version}: {error.message}")
    return errors


def test_there_is_an_overlay_for_each_way_that_the_docs_name() -> None:
    assert set(OVERLAYS) >= REQUIRED


@pytest.mark.daily(3)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_overlay_is_valid_in_every_version_of_kubernetes_and_does_what_an_elastic_job_needs(folder: Path) -> None:
    documents = manifests.render(folder)
    assert bool(rules.workloads(documents)) == (folder.name != "monitoring")
    assert [error for version in VERSIONS for error in invalid(documents, version)] == []
    assert [error for document in documents if document["kind"] in models.KINDS for error in models.invalid(document)] == []
    assert rules.check(documents) == []


@pytest.mark.parametrize(
    ("name", "kind", "change", "expected"),
    [
        (
            "trainer-runtime",
            "TrainingRuntime",
            lambda spec: spec["mlPolicy"].update(torch={"numProcPerNode": "auto"}),
            "spec.mlPolicy.torch.numProcPerNode: there is no such field",  # removed in 2.2
        ),
        ("jobset", "JobSet", lambda spec: spec["failurePolicy"]["rules"][0].pop("name"), "spec.failurePolicy.rules.0.name: Field required"),
        ("jobset", "JobSet", lambda spec: spec["replicatedJobs"][0].update(replica=2), "spec.replicatedJobs[0].replica: there is no"),
        ("jobset", "JobSet", lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(completions="3"), "valid integer"),
    ],
)
def test_a_field_that_trainer_or_jobset_do_not_have_is_found(name: str, kind: str, change: Callable[[Any], Any], expected: str) -> None:
    document = manifests.only(manifests.overlay(name), kind)
    assert models.invalid(document) == []
    change(document["spec"])
    (error,) = models.invalid(document)
    assert expected in error


def test_the_train_job_of_the_docs_is_one() -> None:
    page = (FOLDER.parents[1] / "docs" / "kubernetes.md").read_text()
    (text,) = (text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "kind: TrainJob" in text)
    assert models.invalid(yaml.safe_load(text)) == []


@pytest.mark.parametrize("name", ["autoscale", "gpu", "jobset", "pytorchjob", "rdma"])
def test_a_prefix_and_a_suffix_rename_a_job_in_all_places(tmp_path: Path, name: str) -> None:
    base = os.path.relpath(FOLDER / "overlays" / name, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\nnamePrefix: digits-\nnameSuffix: '-2'\n")
    documents = manifests.render(tmp_path)
    assert {document["metadata"]["name"] for document in documents if document["kind"] != "PriorityClass"} == {"digits-train-2"}
    assert rules.check(documents) == []


def job(documents: list[Manifest]) -> Manifest:
    spec: Manifest = manifests.only(documents, "Job")["spec"]
    return spec


def spec(kind: str) -> Callable[[list[Manifest]], Any]:
    return lambda documents: manifests.only(documents, kind)["spec"]


def pod(documents: list[Manifest]) -> Manifest:
    found: Manifest = job(documents)["template"]["spec"]
    return found


def container(documents: list[Manifest]) -> Manifest:
    found: Manifest = pod(documents)["containers"][0]
    return found


def policy(documents: list[Manifest]) -> list[Any]:
    found: list[Any] = job(documents)["podFailurePolicy"]["rules"]
    return found


def env(documents: list[Manifest]) -> dict[str, Manifest]:
    return {entry["name"]: entry for entry in container(documents)["env"]}


def swap(items: list[Any], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


LAST_INDEX = {"name": "PET_RDZV_ENDPOINT", "value": "train-2.train:29400"}

# Each is a mistake that is easily made, with a part of the line that names it.
MISTAKES: dict[str, tuple[Callable[[list[Manifest]], Any], str]] = {
    "disruption is not first": (lambda d: swap(policy(d), 0, 1), "first failure rule"),
    "catch-all rule too early": (lambda d: swap(policy(d), 1, 4), "exit code 1 leads to Count"),
    "SIGTERM counts": (lambda d: policy(d).pop(2), "exit code 143 leads to Count"),
    "peers lost fails the job": (lambda d: policy(d)[1]["onExitCodes"]["values"].append(200), "exit code 200 leads to FailJob"),
    "success is listed": (lambda d: policy(d)[1]["onExitCodes"]["values"].append(0), "exit code 0 with In"),
    "rule for another container": (lambda d: policy(d)[1]["onExitCodes"].update(containerName="main"), "container main"),
    "condition without status": (lambda d: policy(d)[0]["onPodConditions"][0].pop("status"), "no status"),
    "FailIndex without its limit": (lambda d: job(d).pop("backoffLimitPerIndex"), "FailIndex needs backoffLimitPerIndex"),
    "more failed indexes than there are": (lambda d: job(d).update(maxFailedIndexes=9), "at most completions"),
    "restarts in place": (lambda d: pod(d).update(restartPolicy="OnFailure"), "restartPolicy"),
    "replaced while it ends": (lambda d: job(d).update(podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy"),
    "scaled by half": (lambda d: job(d).update(parallelism=2), "completions and parallelism differ"),
    "not indexed": (lambda d: job(d).pop("completionMode"), "not Indexed"),
    "more pods than nodes": (lambda d: env(d)["PET_NNODES"].update(value="1:2"), "outside of PET_NNODES"),
    "all must succeed": (lambda d: job(d).pop("successPolicy"), "successPolicy"),
    "no names": (lambda d: pod(d).pop("subdomain"), "subdomain"),
    "a Service with an address": (lambda d: spec("Service")(d).pop("clusterIP"), "not headless"),
    "names only when ready": (lambda d: spec("Service")(d).pop("publishNotReadyAddresses"), "not ready"),
    "Service of others": (lambda d: spec("Service")(d)["selector"].update({"batch.kubernetes.io/job-name": "x"}), "selects other pods"),
    "the store on the last index": (lambda d: container(d)["env"].append(dict(LAST_INDEX)), "index 0"),
    "the job's name as its id": (lambda d: env(d)["PET_RDZV_ID"].update(value="train"), "uid"),
    "variable used above its value": (lambda d: swap(container(d)["env"], 0, 3), "is not above it"),
    "no time to stop": (lambda d: pod(d).pop("terminationGracePeriodSeconds"), "kills the agent before"),
    "no disruption budget": (lambda d: d.remove(manifests.only(d, "PodDisruptionBudget")), "no PodDisruptionBudget"),
    "a budget without a number": (lambda d: spec("PodDisruptionBudget")(d).update(maxUnavailable=1), "no pod can be evicted"),
    "pods cannot reach each other": (lambda d: spec("NetworkPolicy")(d)["ingress"].pop(0), "reach each other"),
    "root": (lambda d: pod(d)["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
    "capabilities": (lambda d: container(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "capabilities"),
    "64 MB of shared memory": (lambda d: container(d)["volumeMounts"].pop(1), "/dev/shm"),
    "too much shared memory": (lambda d: container(d)["resources"].update(limits={"memory": "1Gi"}), "larger than the memory limit"),
    "nowhere to write": (lambda d: container(d)["volumeMounts"].pop(0), "/tmp"),
    "no such claim": (lambda d: d.remove(manifests.only(d, "PersistentVolumeClaim")), "claim"),
    "an annotation that never changes": (lambda d: container(d)["volumeMounts"][3].update(subPath="nodes"), "elastirun.io/nodes"),
    "another annotation": (lambda d: pod(d)["volumes"][3]["downwardAPI"]["items"][0].update(path="node"), "elastirun.io/nodes"),
    "probe of another port": (lambda d: env(d)["PET_HEALTH_PORT"].update(value="9090"), "livenessProbe"),
    "ready when training": (lambda d: container(d).update(readinessProbe={"httpGet": {"path": "/readyz", "port": 8080}}), "readinessProbe"),
    "last words lost": (lambda d: container(d).pop("terminationMessagePolicy"), "terminationMessagePolicy"),
    "GPUs overcommitted": (lambda d: container(d)["resources"]["requests"].update({"nvidia.com/gpu": 8}), "nvidia.com/gpu differ"),
    "beta": (lambda d: manifests.only(d, "PodDisruptionBudget").update(apiVersion="policy/v1beta1"), "not stable"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(base: list[Manifest], mistake: str) -> None:
    documents = copy.deepcopy(base)
    make, expected = MISTAKES[mistake]
    make(documents)
    found = rules.check(documents)
    assert any(expected in line for line in found), found


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: job(d).update(backofLimitPerIndex=1), "backofLimitPerIndex"),
        (lambda d: job(d).update(completions="3"), "'3'"),
        (lambda d: container(d).update(restartPolicyRule=[]), "restartPolicyRule"),
        (lambda d: pod(d)["volumes"][1]["emptyDir"].update(size="1Gi"), "size"),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_is_found(base: list[Manifest], make: Callable[[list[Manifest]], Any], expected: str) -> None:
    documents = copy.deepcopy(base)
    make(documents)
    for version in VERSIONS:
        assert any(expected in line for line in invalid(documents, version))
