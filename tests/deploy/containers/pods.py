"""One pod in a container: what the kubelet does for a pod that a launcher can notice."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.annotation import Annotation

if TYPE_CHECKING:
    from tests.deploy.containers.jobs import Job, StatefulSet

PATIENCE = 180.0  # seconds for what takes some at most, on a machine with other work
NEVER_STARTED = ("created", "configured", "initialized")  # podman's states
START_ERROR = 128  # Kubernetes' exit code of a container that could not be started
GRACE = 30  # seconds between SIGTERM and SIGKILL where the manifest says nothing


class Pod:
    """A pod of an Indexed Job or a StatefulSet. ``code`` is None while its container runs."""

    def __init__(self, job: Job | StatefulSet, index: int) -> None:
        self.job, self.index, self.uid = job, index, str(uuid.uuid4())
        self.name, self.hostname = f"{job.name}-{index}-{self.uid[:5]}", f"{job.name}-{index}"  # the pod of a StatefulSet is its hostname
        self.address = job.cluster.new_address()
        self.folder = job.cluster.folder / self.name
        self.folder.mkdir()
        self.disrupted = self.deleted = self.oom_killed = False
        self.code: int | None = None
        self.lines: list[str] = []
        self.times: list[float] = []  # when each line came
        self.annotation: Annotation | None = None  # the file of the one that a volume of the downward API has
        self.message_file = self.folder / "termination-log"
        self.message_file.touch()
        self.message_file.chmod(0o666)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None

    @property
    def phase(self) -> str:
        return "Running" if self.code is None else "Failed" if self.code else "Succeeded"

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def termination_message(self) -> str:
        """The text in the pod's status: what was written to the file, else the end of the output of a container that failed."""
        found = self.message_file.read_text()[:4096]
        fallback = self.job.container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and self.code
        return found or ("\n".join(self.lines[-80:])[-2048:] if fallback else "")

    def start(self, image: str, options: list[str]) -> None:
        """Start the container and a thread that reads its output."""
        command = self.job.container.get("command", [])
        options = [*self._options(), *options]
        if command:
            options += ["--entrypoint", json.dumps([self._expand(part) for part in command])]
        args = [self._expand(part) for part in self.job.container.get("args", [])]
        self._process = self.job.cluster.podman.start("run", "--sig-proxy=false", *options, image, *args)
        threading.Thread(target=self._follow, daemon=True).start()

    def says(self, text: str, after: int = 0, patience: float = PATIENCE) -> str:
        """Wait until the pod has printed a line with ``text``, a regular expression, and return the line. ``after``: of its first lines."""

        def found() -> str | None:
            return next((line for line in self.lines[after:] if re.search(text, line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self.code is not None, patience)
            if (line := found()) is None:
                what = "did not say" if self.code is None else f"ended with {self.code} without saying"
                raise AssertionError(f"{self.name} {what} {text!r}; {self.job.story()}")
            return line

    def ends(self, patience: float = PATIENCE) -> int:
        """Wait until the container has ended and return its exit code."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.code is not None, patience):
                raise AssertionError(f"{self.name} did not end; {self.job.story()}")
        assert self.code is not None
        return self.code

    def terminate(self, disruption: bool) -> None:
        """Begin what the kubelet does to end a pod: SIGTERM, the grace period, SIGKILL. ``disruption``: evicted, not deleted."""
        self.disrupted, self.deleted = self.disrupted or disruption, self.deleted or not disruption
        threading.Thread(target=self._stop, daemon=True).start()

    def do(self, *command: str) -> None:
        """Call podman for this container: ``do("pause")``."""
        self.job.cluster.podman(*command, self.name)

    def run(self, *command: str) -> str:
        """Run a command in the container, as `kubectl exec` does, and return what it prints. Raises RuntimeError when it fails."""
        return self.job.cluster.podman("exec", self.name, *command)

    def get(self, path: str, port: int = 8080, patience: float = 30) -> tuple[int, str]:
        """Ask the pod by HTTP, as a probe of the kubelet does; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{path}", timeout=patience) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def _stop(self) -> None:
        podman = self.job.cluster.podman
        while self.code is None and not podman("ps", "--quiet", "--filter", f"name={self.name}", "--filter", "status=running"):
            time.sleep(0.1)  # until the container has started
        podman("stop", self.name, check=False)

    def _follow(self) -> None:
        assert self._process is not None
        with self._process as process:  # waits, and closes the pipe
            assert process.stdout is not None
            for line in process.stdout:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self.times.append(time.monotonic())
                    self._changed.notify_all()
            code = process.wait()
        wanted = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
        state = self.job.cluster.podman("inspect", "--format", wanted, self.name, check=False).split()
        if state and state[0] in NEVER_STARTED:  # its exit code is 0
            state[1] = str(START_ERROR)
        with self._changed:
            self.code, self.oom_killed = (int(state[1]), state[2] == "true") if len(state) == 3 else (code, False)
            self._changed.notify_all()
        self.job.tell(self)

    def _field(self, path: str) -> str:
        labels = {**self.job.pod_labels, "batch.kubernetes.io/job-completion-index": str(self.index)}
        if found := re.match(r"metadata\.(?:labels|annotations)\['(.+)'\]", path):
            return {**self.job.pod_annotations, **labels}.get(found[1], "")
        known = {
            "metadata.name": self.name if self.job.indexed else self.hostname, "metadata.namespace": "default", "metadata.uid": self.uid,
            "spec.nodeName": f"machine-{self.index}", "status.podIP": self.address, "status.hostIP": self.job.cluster.gateway,
        }  # fmt: skip
        return known[path]

    def _variables(self) -> dict[str, str]:
        """Return the container's environment. ``$(NAME)`` in a value stands for a variable further up."""
        made: dict[str, str] = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        for entry in self.job.container.get("env", []):
            value = entry["valueFrom"]["fieldRef"]["fieldPath"] if "valueFrom" in entry else entry.get("value", "")
            made[entry["name"]] = self._field(value) if "valueFrom" in entry else expand(value, made)
        return made | ({"JOB_COMPLETION_INDEX": str(self.index)} if self.job.indexed else {})

    def _expand(self, text: str) -> str:
        return expand(text, self._variables())

    def _options(self) -> list[str]:
        pod, container, cluster = self.job.pod, self.job.container, self.job.cluster
        grace = pod.get("terminationGracePeriodSeconds", GRACE)
        options = [
            *("--pull", "never", "--name", self.name, "--hostname", self.hostname),
            *("--network", cluster.network, "--ip", self.address, "--stop-timeout", str(grace)),
            *("--no-hosts", "--volume", f"{self._hosts()}:/etc/hosts:ro", "--volume", f"{self.message_file}:/dev/termination-log"),
            *("--dns-search", "default.svc.cluster.local", "--dns-option", "ndots:5"),
        ]
        for name in self._names():
            options += ["--network-alias", name]
        for key, value in self._variables().items():
            options += ["--env", f"{key}={value}"]
        if "workingDir" in container:
            options += ["--workdir", container["workingDir"]]
        memory = container.get("resources", {}).get("limits", {}).get("memory")
        if memory:
            options += ["--memory", size(memory)]
        return [*options, *self._security(), *self._mounts()]

    def _names(self) -> list[str]:
        """Return the names under which others find this pod: those that a headless Service gives it."""
        names = []
        for service in self.job.cluster.kind("Service"):
            name = service["metadata"]["name"]
            if self.job.selected(service["spec"]["selector"]):
                names += [f"{name}.default.svc.cluster.local"]
                if self.job.pod.get("subdomain") == name:
                    names += [f"{self.hostname}.{name}.default.svc.cluster.local"]
        return names

    def _hosts(self) -> Path:
        """Write the pod's /etc/hosts as the kubelet does, which has the pod's own names."""
        subdomain = self.job.pod.get("subdomain")
        full = f"{self.hostname}.{subdomain}.default.svc.cluster.local\t" if subdomain else ""
        path = self.folder / "hosts"
        path.write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n{self.address}\t{full}{self.hostname}\n")
        return path

    def _security(self) -> list[str]:
        pod, own = self.job.pod.get("securityContext", {}), self.job.container.get("securityContext", {})
        options = []
        user = own.get("runAsUser", pod.get("runAsUser"))
        if user is not None:
            options += ["--user", f"{user}:{own.get('runAsGroup', pod.get('runAsGroup', user))}"]
        if "fsGroup" in pod:
            options += ["--group-add", str(pod["fsGroup"])]
        if own.get("readOnlyRootFilesystem"):
            options += ["--read-only", "--read-only-tmpfs=false"]
        for name in own.get("capabilities", {}).get("drop", []):
            options += ["--cap-drop", name.lower()]
        if own.get("allowPrivilegeEscalation") is False:
            options += ["--security-opt", "no-new-privileges"]
        return options

    def _mounts(self) -> list[str]:
        volumes = {volume["name"]: volume for volume in self.job.volumes(self.hostname)}
        options = []
        for mount in self.job.container.get("volumeMounts", []):
            volume, where = volumes[mount["name"]], mount["mountPath"]
            scratch = volume.get("emptyDir")
            if scratch is not None and scratch.get("medium") == "Memory":
                limit = size(scratch.get("sizeLimit", "64Mi"))
                options += ["--shm-size", limit] if where == "/dev/shm" else ["--tmpfs", f"{where}:rw,mode=1777,size={limit}"]
            else:
                kind = "ro" if mount.get("readOnly") or "emptyDir" not in volume and "persistentVolumeClaim" not in volume else "rw"
                options += ["--volume", f"{self._folder(volume)}:{where}:{kind}"]
        return options

    def _folder(self, volume: dict[str, Any]) -> Path:
        """Return the folder that stands for a volume, with what the volume's source holds."""
        cluster = self.job.cluster
        if "emptyDir" in volume:
            folder = self.folder / volume["name"]
            folder.mkdir()
            folder.chmod(0o2777)
            return folder
        if "persistentVolumeClaim" in volume:
            return cluster.claim(volume["persistentVolumeClaim"]["claimName"])
        if "downwardAPI" in volume:
            (item,) = volume["downwardAPI"]["items"]
            (self.folder / volume["name"]).mkdir()
            self.annotation = Annotation(self.folder / volume["name"], self._field(item["fieldRef"]["fieldPath"]), item["path"])
            return self.folder / volume["name"]
        (kind,) = volume.keys() & {"configMap", "secret"}
        name = volume[kind]["name" if kind == "configMap" else "secretName"]
        folder = cluster.folder / f"{kind}-{name}"
        inner = folder / "..2026"  # as the kubelet does, so that all files change at once
        inner.mkdir(parents=True, exist_ok=True)
        (found,) = [doc for doc in cluster.kind("ConfigMap" if kind == "configMap" else "Secret") if doc["metadata"]["name"] == name]
        for key, text in found.get("data", {}).items():
            path = inner / key
            path.write_bytes(base64.b64decode(text) if kind == "secret" else text.encode())
            path.chmod(volume[kind].get("defaultMode", 0o644))
            os.chown(path, 0, self.job.pod.get("securityContext", {}).get("fsGroup", 0))
            if not (folder / key).is_symlink():
                (folder / key).symlink_to(f"..2026/{key}")
        return folder


def expand(text: str, variables: dict[str, str]) -> str:
    """Return ``text`` with ``$(NAME)`` replaced as Kubernetes does: unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def size(text: str) -> str:
    """Return a size of Kubernetes (``1Gi``) as podman writes it (``1g``)."""
    return re.sub(r"([KMG])i$", lambda found: found[1].lower(), text)
