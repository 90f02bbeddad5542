"""The Job controller of Kubernetes, as far as an Indexed Job with a failure policy needs it.

Not here: quotas, finalizers, time limits, and schedulers but for the number of pods that have a machine. Pauses before a retry are a
twentieth of those of Kubernetes.
"""

from __future__ import annotations

import copy
import functools
import ipaddress
import itertools
import queue
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.containers.podman import Podman
from tests.deploy.containers.pods import PATIENCE, Pod

Manifest = dict[str, Any]

BACKOFF = 0.5  # seconds before the first retry of an index; Kubernetes: 10
BATCH = 1.0  # seconds from the end of a pod until the controller looks, as in Kubernetes


class Cluster:
    """A network for pods, a folder for their volumes, and the documents that were applied."""

    def __init__(self, podman: Podman, folder: Path, image: str, options: list[str]) -> None:
        self.podman, self.folder, self.image, self.options = podman, folder, image, options
        self.network = f"pods-{uuid.uuid4().hex[:8]}"
        podman("network", "create", "--internal", self.network)
        subnet = podman("network", "inspect", "--format", "{{range .Subnets}}{{.Subnet}} {{.Gateway}}{{end}}", self.network).split()
        self.gateway = subnet[1]
        self._addresses = (str(address) for address in itertools.islice(ipaddress.ip_network(subnet[0]).hosts(), 9, None))
        self._lock = threading.Lock()
        self.documents: list[Manifest] = []
        self.jobs: list[Job] = []

    def new_address(self) -> str:
        """Return an address that no pod has had: a replacement never has that of its predecessor."""
        with self._lock:
            return next(self._addresses)

    def kind(self, kind: str) -> list[Manifest]:
        return [document for document in self.documents if document["kind"] == kind]

    def apply(self, documents: list[Manifest], image: Callable[[int], list[str]] | None = None, machines: int | None = None) -> Job:
        """Take the documents, of which one is a Job, and start the Job.

        ``image``: more options of podman, by index. ``machines``: how many pods have a place, the lowest indexes first; None: all.
        """
        self.documents += copy.deepcopy(documents)
        (manifest,) = [document for document in documents if document["kind"] == "Job"]
        job = Job(self, manifest, image, machines)
        self.jobs.append(job)
        job.begin()
        return job

    def serve(self, documents: list[Manifest], options: list[str]) -> StatefulSet:
        """Take the documents, of which one is a StatefulSet, and start its pods. ``options``: more of podman."""
        self.documents += copy.deepcopy(documents)
        (manifest,) = [document for document in documents if document["kind"] == "StatefulSet"]
        return StatefulSet(self, manifest, options)

    def claim(self, name: str) -> Path:
        """Return the folder of a PersistentVolumeClaim. fsGroup lets every pod write to it."""
        folder = self.folder / f"claim-{name}"
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o2777)
        return folder

    def close(self) -> None:
        for job in self.jobs:
            job.cancel()
        names = self.podman("ps", "--all", "--filter", f"network={self.network}", "--format", "{{.Names}}", check=False).split()
        if names:
            self.podman("rm", "--force", "--time", "0", *names, check=False)
        self.podman("network", "rm", "--force", self.network, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def cluster(podman: Podman, folder: Path, image: str, options: list[str]) -> Iterator[Cluster]:
    folder.mkdir(parents=True)
    made = Cluster(podman, folder, image, options)
    try:
        yield made
    finally:
        made.close()


class StatefulSet:
    """Pods that are started once, all at the same time."""

    indexed = False

    def __init__(self, cluster: Cluster, manifest: Manifest, options: list[str]) -> None:
        spec = manifest["spec"]
        self.cluster, self.name = cluster, manifest["metadata"]["name"]
        self.pod: Manifest = spec["template"]["spec"] | {"subdomain": spec["serviceName"]}
        self.pod_labels: dict[str, str] = spec["template"]["metadata"]["labels"]
        self.pod_annotations: dict[str, str] = {}
        (self.container,) = self.pod["containers"]
        self._claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        self.pods = [Pod(self, index) for index in range(spec["replicas"])]
        for pod in self.pods:
            pod.start(cluster.image, [*cluster.options, *options])

    def at(self, index: int) -> Pod:
        return self.pods[index]

    def tell(self, pod: Pod) -> None:
        """Leave pods that have ended as they are."""

    def selected(self, labels: dict[str, str]) -> bool:
        return labels.items() <= self.pod_labels.items()

    def volumes(self, hostname: str) -> list[Manifest]:
        claims = [{"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{hostname}"}} for name in self._claims]
        return [*self.pod.get("volumes", []), *claims]

    def story(self) -> str:
        return "\n".join(f"--- {pod.hostname} {pod.code}\n" + "\n".join(pod.lines[-12:]) for pod in self.pods)


class Job:
    """An Indexed Job. A thread of its own is the controller: it alone changes what is below ``# state``."""

    indexed = True

    def __init__(self, cluster: Cluster, manifest: Manifest, extra: Callable[[int], list[str]] | None, machines: int | None) -> None:
        self.cluster, self.spec, self.name = cluster, copy.deepcopy(manifest["spec"]), manifest["metadata"]["name"]
        self.uid, self._extra = str(uuid.uuid4()), extra or (lambda index: [])
        self.pod: Manifest = self.spec["template"]["spec"]
        own = {"batch.kubernetes.io/job-name": self.name, "batch.kubernetes.io/controller-uid": self.uid}
        self.pod_labels: dict[str, str] = {**self.spec["template"].get("metadata", {}).get("labels", {}), **own}
        self.pod_annotations: dict[str, str] = self.spec["template"].get("metadata", {}).get("annotations", {})
        (self.container,) = self.pod["containers"]
        assert self.spec["completionMode"] == "Indexed" and self.pod["restartPolicy"] == "Never"
        # state
        self.size = self.spec["completions"]
        self._machines = machines  # pods beyond so many are Pending; None: none is
        self.pods: list[Pod] = []  # all that were ever started
        self._live: dict[int, Pod] = {}  # those whose end has not been judged, by index
        self.status = ""  # "Complete" or "Failed: REASON" at the end
        self.succeeded: set[int] = set()
        self.failed: set[int] = set()
        self.events: list[str] = []
        self._retries: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}
        self._verdict = ""  # what the status will be when the last pod has ended
        self._changed = threading.Condition()
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()  # what the controller is to do next
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = time.monotonic()

    def begin(self) -> None:
        self._thread.start()

    def tell(self, pod: Pod) -> None:
        timer = threading.Timer(BATCH, self._inbox.put, [functools.partial(self._ended, pod)])
        timer.daemon = True
        timer.start()

    def scale(self, size: int) -> None:
        """Do what `kubectl patch` of completions and parallelism does."""
        self._inbox.put(functools.partial(self._resize, size))

    def place(self, machines: int) -> None:
        """Give this many pods a machine, as when an autoscaler has found more of them."""
        self._inbox.put(functools.partial(self._place, machines))

    def annotate(self, text: str) -> None:
        """Do what `kubectl annotate pods -l batch.kubernetes.io/job-name=NAME` does with the annotation of a volume."""
        for pod in self.pods:
            if pod.annotation is not None and pod.code is None:
                pod.annotation.set(text)

    def cancel(self) -> None:
        self._inbox.put(self._cancel)
        self._thread.join(PATIENCE)

    def selected(self, labels: dict[str, str]) -> bool:
        return labels.items() <= self.pod_labels.items()

    def volumes(self, hostname: str) -> list[Manifest]:
        found: list[Manifest] = self.pod.get("volumes", [])
        return found

    def at(self, index: int, which: int = 0) -> Pod:
        """Wait for a pod of this index and return it. ``which``: 0 is the first, 1 its replacement."""

        def found() -> list[Pod]:
            return [pod for pod in self.pods if pod.index == index]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) > which or self.status, PATIENCE) or len(found()) <= which:
                raise AssertionError(f"no pod {which} of index {index}; {self.story()}")
            return found()[which]

    def ends(self, patience: float = PATIENCE) -> str:
        """Wait until the Job has ended and return its status."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.status, patience):
                raise AssertionError(f"the job did not end; {self.story()}")
        return self.status

    def codes(self, index: int) -> list[int | None]:
        """Return the exit codes of the pods of an index, first the oldest."""
        return [pod.code for pod in self.pods if pod.index == index]

    def retries(self, index: int) -> int:
        """Return how many failures of an index have counted."""
        return self._retries[index]

    @property
    def output(self) -> str:
        return "\n".join(pod.output for pod in self.pods)

    def story(self) -> str:
        """Return what happened, what the agent of each pod said, and the last lines of its workers, for people."""
        told = [f"job {self.name}: {self.status or 'runs'}", *self.events]
        for pod in self.pods:
            lines = list(zip(pod.times, pod.lines, strict=False))
            said = [(moment, line) for moment, line in lines[:-12] if " elastirun: " in line][-60:] + lines[-12:]
            told += [f"--- {pod.name} {pod.phase} {pod.code}", *(f"{moment - self._begun:6.1f} s  {line}" for moment, line in said)]
        return "\n".join(told)

    def note(self, text: str) -> None:
        """Add a line to the story."""
        self.events.append(f"{time.monotonic() - self._begun:6.1f} s  {text}")

    def _run(self) -> None:
        while not self.status:
            with self._changed:
                self._start_pods()
                self._changed.notify_all()
            try:
                change = self._inbox.get(timeout=self._until_retry())
            except queue.Empty:
                continue
            with self._changed:
                change()
                self._judge()
                self._changed.notify_all()

    def _until_retry(self) -> float | None:
        waits = [moment - time.monotonic() for index, moment in self._not_before.items() if index not in self._live]
        return max(0.01, min(waits)) if waits and not self._verdict else None

    def _start_pods(self) -> None:
        for index in range(self.size):
            done = index in self._live or index in self.succeeded or index in self.failed
            room = self.size if self._machines is None else min(self.size, self._machines)
            if self._verdict or done or len(self._live) >= room or self._not_before.get(index, 0.0) > time.monotonic():
                continue
            self._not_before.pop(index, None)
            pod = Pod(self, index)
            self.pods.append(pod)
            self._live[index] = pod
            self.note(f"{pod.name} starts")
            pod.start(self.cluster.image, [*self.cluster.options, *self._extra(index)])

    def _cancel(self) -> None:
        self.status = "Failed: cancelled"

    def _place(self, machines: int) -> None:
        self.note(f"{machines} pods have a machine")
        self._machines = machines

    def _resize(self, size: int) -> None:
        self.note(f"scaled from {self.size} to {size}")
        self.size = size
        self.succeeded = {index for index in self.succeeded if index < size}
        for index, pod in list(self._live.items()):
            if index >= size:
                pod.terminate(disruption=False)

    def _ended(self, pod: Pod) -> None:
        assert pod.code is not None
        del self._live[pod.index]
        action = "deleted" if pod.deleted else "" if pod.code == 0 else self._action(pod)
        self.note(f"{pod.name} ended with {pod.code}{' out of memory' * pod.oom_killed}{' disrupted' * pod.disrupted} {action}".rstrip())
        if pod.code == 0 and pod.index < self.size:
            self.succeeded.add(pod.index)
        elif action == "FailJob":
            self._finish(f"Failed: PodFailurePolicy: index {pod.index} ended with {pod.code}")
        elif action == "FailIndex":
            self.failed.add(pod.index)
        elif action == "Count":
            self._count(pod.index)
        if len(self.failed) > self.spec.get("maxFailedIndexes", self.size):
            self._finish("Failed: MaxFailedIndexesExceeded")

    def _count(self, index: int) -> None:
        self._retries[index] += 1
        self._not_before[index] = time.monotonic() + BACKOFF * 2 ** (self._retries[index] - 1)
        if "backoffLimitPerIndex" not in self.spec:
            if self._retries.total() > self.spec.get("backoffLimit", 6):
                self._finish("Failed: BackoffLimitExceeded")
        elif self._retries[index] > self.spec["backoffLimitPerIndex"]:
            self.failed.add(index)

    def _action(self, pod: Pod) -> str:
        """Return the action of the first rule that matches the end of the pod."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            codes = rule.get("onExitCodes")
            if codes:
                if (pod.code in codes["values"]) == (codes["operator"] == "In"):
                    return str(rule["action"])
            elif pod.disrupted and any(pattern["type"] == "DisruptionTarget" for pattern in rule["onPodConditions"]):
                return str(rule["action"])
        return "Count"

    def _judge(self) -> None:
        """Decide whether the Job has succeeded or failed, and end it when its last pod has ended."""
        if not self._verdict:
            rules = self.spec.get("successPolicy", {}).get("rules", [])
            if any(self._fulfilled(rule) for rule in rules):
                self._finish("Complete")
            elif len(self.succeeded | self.failed) >= self.size:
                self._finish("Failed: FailedIndexes" if self.failed else "Complete")
        if self._verdict and not self._live and not self.status:
            self.status = self._verdict
            self.note(self.status)

    def _fulfilled(self, rule: Manifest) -> bool:
        wanted = set(range(self.size))
        if "succeededIndexes" in rule:
            parts = [part.partition("-") for part in rule["succeededIndexes"].split(",")]
            wanted = {index for first, _, last in parts for index in range(int(first), int(last or first) + 1)}
        return len(wanted & self.succeeded) >= rule.get("succeededCount", len(wanted))

    def _finish(self, verdict: str) -> None:
        if not self._verdict:
            self._verdict = verdict
            self.note(f"will be {verdict}")
            for pod in self._live.values():
                pod.terminate(disruption=False)
