"""What may happen to a Job, each from its start to its end. A function's docstring is the promise that it checks."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.deploy import manifests
from tests.deploy.containers.jobs import Cluster, Job
from tests.deploy.manifests import Manifest

RIGHT = 95.0  # percent of the held-out images; an undisturbed training reaches 97 to 98
EPOCHS = 12  # of 21 steps each

# The example, slowly until a file is removed: what is to happen then happens during the training, however busy the machine is.
SLOWLY = """
import os, runpy, sys, time
sleep, SLOW = time.sleep, "/checkpoints/slow"
time.sleep = lambda seconds: sleep(seconds) if seconds != 0.125 or os.path.exists(SLOW) else None
sys.argv = ["examples/train.py", "--checkpoint=/checkpoints/digits", "--pause=0.125", "--every=5", *sys.argv[1:]]
runpy.run_path("examples/train.py", run_name="__main__")
"""

Scenario = Callable[[Cluster], Job]


def smoke(size: int = 3, name: str = "cpu-smoke", **variables: str) -> list[Manifest]:
    """Return the manifests of the overlay cpu-smoke with another number of pods and more variables."""
    documents = manifests.overlay(name)
    spec = manifests.only(documents, "Job")["spec"]
    spec["completions"] = spec["parallelism"] = size
    set_variables(container_of(documents), PET_LAST_CALL="2", **variables)
    return documents


def slow(size: int = 3, name: str = "cpu-smoke", **variables: str) -> list[Manifest]:
    """Return the same for a training that goes on slowly until ``hurry`` is called."""
    documents = smoke(size, name, **variables)
    container_of(documents)["args"] = ["--no-python", "python3", "-c", SLOWLY, f"--epochs={EPOCHS}"]
    return documents


def start_slowly(cluster: Cluster, documents: list[Manifest]) -> Job:
    (cluster.claim("smoke-train") / "slow").touch()
    return cluster.apply(documents)


def hurry(cluster: Cluster) -> None:
    (cluster.claim("smoke-train") / "slow").unlink()


def container_of(documents: list[Manifest]) -> Manifest:
    (found,) = manifests.only(documents, "Job")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def set_variables(container: Manifest, **variables: str) -> None:
    container["env"] = [entry for entry in container["env"] if entry["name"] not in variables]
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]


def trained(job: Job) -> None:
    """Check that the Job is complete and the model what it should be."""
    assert job.ends() == "Complete", job.story()
    found = re.findall(r"test accuracy ([\d.]+) %", job.output)
    assert found and float(found[-1]) >= RIGHT, job.story()


def succeeded(job: Job, index: int, which: int = 0) -> bool:
    """Return whether a pod ended with 0, or was deleted because another one had: the success of one is that of the Job."""
    pod = job.at(index, which)
    return pod.phase == "Succeeded" or (pod.deleted and pod.code == 143)


def plain(cluster: Cluster) -> Job:
    """Three pods train to the end."""
    job = cluster.apply(smoke())
    trained(job)
    assert len(job.pods) == 3 and all(succeeded(job, index) for index in range(3)), job.story()
    return job


def eviction(cluster: Cluster) -> Job:
    """An evicted pod ends with 143, uses up no retry, and its replacement joins under the same name. The others go on meanwhile."""
    job = start_slowly(cluster, slow())
    job.at(0).says("epoch +1/.* world size 3")
    job.at(1).terminate(disruption=True)
    assert job.at(1).ends() == 143, job.story()
    job.at(0).says("3 workers on cpu: going on after step")
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and all(succeeded(job, index, which) for index, which in ((0, 0), (1, 1), (2, 0))), job.story()
    assert not job.retries(1), job.story()
    return job


def raising_script(cluster: Cluster) -> Job:
    """A script that raises fails the Job at once, and the pod's status names the exception."""
    documents = smoke(PET_MAX_RESTARTS="0")
    container_of(documents)["args"] = ["--no-python", "python3", "-c", "raise ValueError('no such corpus')"]
    job = cluster.apply(documents)
    assert job.ends().startswith("Failed: PodFailurePolicy"), job.story()
    failed = [pod for pod in job.pods if pod.code == 1]
    assert failed and all("no such corpus" in pod.termination_message for pod in failed), job.story()
    return job


SHORT: dict[str, Scenario] = {"plain": plain, "eviction": eviction, "raising-script": raising_script}
ALL: dict[str, Scenario] = {**SHORT}
