"""Rules for manifests that the schemas of Kubernetes do not have: what the API server refuses, and what an elastic job needs.

``check`` gets the rendered documents of an overlay and returns what is wrong, one line for each. Pod templates inside of the resources
of other projects (JobSet, TrainingRuntime, PyTorchJob) are found too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.wanted_nodes import FILE

Manifest = dict[str, Any]

HIGHEST = 255  # the highest exit code
GRACE_BEYOND = 15  # seconds for the agent to kill workers, leave and end, beyond --grace for the workers
WORKLOADS = ("Job", "JobSet", "TrainingRuntime", "PyTorchJob", "StatefulSet")

# The action of the failure policy for each exit code of the agent.
ACTIONS = {
    **{int(code): "FailJob" for code in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT)},
    **{ExitCode.signalled(signum): "Ignore" for signum in (2, 15)},
    **{int(code): "Count" for code in (ExitCode.PEERS_LOST, ExitCode.RENDEZVOUS, ExitCode.SICK, ExitCode.BUG)},
    ExitCode.EXCLUDED: "FailIndex",
    137: "Count",  # killed from outside
}


@dataclass(frozen=True)
class Workload:
    """A pod template with what is around it. ``job``: the spec of its Job; empty where another controller makes the pods."""

    kind: str
    name: str
    job: Manifest
    template: Manifest
    documents: list[Manifest]

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        first: Manifest = self.pod["containers"][0]
        return first

    @property
    def variables(self) -> dict[str, str]:
        """The environment, with ``valueFrom`` as the path that it names."""
        entries = self.container.get("env", [])
        return {entry["name"]: entry.get("value", entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")) for entry in entries}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods: those of the template, and those that controllers add."""
        own: dict[str, str] = self.template.get("metadata", {}).get("labels", {})
        added = {"batch.kubernetes.io/job-name": self.name} if self.job else {}
        if self.kind == "JobSet":
            added["jobset.sigs.k8s.io/jobset-name"] = self.kinds("JobSet")[0]["metadata"]["name"]
        if self.kind == "PyTorchJob":
            added["training.kubeflow.org/job-name"] = self.name
        return own | added

    @property
    def is_agent(self) -> bool:
        return any(name.startswith("PET_") for name in self.variables)

    def kinds(self, kind: str) -> list[Manifest]:
        return [document for document in self.documents if document["kind"] == kind]

    def selected(self, labels: dict[str, str]) -> bool:
        return labels.items() <= self.labels.items()


Rule = Callable[[Workload], Iterator[str]]


def workloads(documents: list[Manifest]) -> list[Workload]:
    """Return all pod templates of the documents."""
    return [found for document in documents if document["kind"] in WORKLOADS for found in _workloads(document, documents)]


def _workloads(document: Manifest, documents: list[Manifest]) -> Iterator[Workload]:
    kind, name, spec = document["kind"], document["metadata"]["name"], document["spec"]
    if kind == "Job":
        yield Workload(kind, name, spec, spec["template"], documents)
    elif kind == "StatefulSet":
        yield Workload(kind, name, {}, spec["template"], documents)
    elif kind == "PyTorchJob":
        for replicas in spec["pytorchReplicaSpecs"].values():
            yield Workload(kind, name, {}, replicas["template"], documents)
    else:
        sets = spec if kind == "JobSet" else spec["template"]["spec"]
        for replicated in sets["replicatedJobs"]:
            job = replicated["template"]["spec"]
            yield Workload(kind, f"{name}-{replicated['name']}-0", job, job["template"], documents)


def check(documents: list[Manifest]) -> list[str]:
    """Return what is wrong with the documents."""
    return [f"{found.kind} {found.name}: {text}" for found in workloads(documents) for rule in RULES for text in rule(found)]


def stable_versions(found: Workload) -> Iterator[str]:
    for document in found.documents:
        group, _, version = document["apiVersion"].rpartition("/")
        of_kubernetes = "." not in group or (group.endswith(".k8s.io") and not group.endswith(".x-k8s.io"))
        if of_kubernetes and not re.fullmatch(r"v\d+", version):
            yield f"{document['kind']} is {version}, which is not stable"


def indexed(found: Workload) -> Iterator[str]:
    job = found.job
    if found.kind not in ("Job", "JobSet"):
        return
    if job.get("completionMode") != "Indexed":
        yield "completionMode is not Indexed, so pods have no names by which others find them"
    if job.get("completions") != job.get("parallelism"):
        yield "completions and parallelism differ: Kubernetes then refuses to scale, and some pods wait for others to end"


def restart_policy(found: Workload) -> Iterator[str]:
    if found.job and found.pod.get("restartPolicy") != "Never":
        yield "restartPolicy is not Never, which podFailurePolicy and backoffLimitPerIndex ask for"


def replacement(found: Workload) -> Iterator[str]:
    if "podFailurePolicy" in found.job and found.job.get("podReplacementPolicy", "Failed") != "Failed":
        yield "podReplacementPolicy is not Failed, which podFailurePolicy asks for"


def failure_rules(found: Workload) -> list[Manifest]:
    rules: list[Manifest] = found.job.get("podFailurePolicy", {}).get("rules", [])
    return rules


def disruption_first(found: Workload) -> Iterator[str]:
    if not found.job:
        return
    first = (failure_rules(found) or [{}])[0]
    conditions = first.get("onPodConditions", [])
    if first.get("action") != "Ignore" or [condition.get("type") for condition in conditions] != ["DisruptionTarget"]:
        yield "the first failure rule does not ignore DisruptionTarget: an evicted pod whose script fails on SIGTERM would fail the job"
    if any("status" not in condition for rule in failure_rules(found) for condition in rule.get("onPodConditions", [])):
        yield "a pod condition has no status, which Kubernetes before 1.35 asks for"


def rules_are_accepted(found: Workload) -> Iterator[str]:
    names = {container["name"] for container in found.pod["containers"]}
    for rule in failure_rules(found):
        codes = rule.get("onExitCodes")
        if bool(codes) == ("onPodConditions" in rule):
            yield "a failure rule needs onExitCodes or onPodConditions, and not both"
        if not codes:
            continue
        if codes["operator"] == "In" and 0 in codes["values"]:
            yield "a failure rule lists exit code 0 with In, which Kubernetes refuses"
        if not 0 < len(codes["values"]) <= HIGHEST or len(set(codes["values"])) < len(codes["values"]):
            yield "a failure rule lists no exit codes, too many, or one twice"
        if codes.get("containerName", found.container["name"]) not in names:
            yield f"a failure rule names the container {codes['containerName']}, which is not there: it never applies"


def action(found: Workload, code: int) -> str:
    """Return what the failure policy does with an exit code."""
    for rule in failure_rules(found):
        codes = rule.get("onExitCodes")
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def exit_codes(found: Workload) -> Iterator[str]:
    if found.job:
        for code, wanted in ACTIONS.items():
            if (does := action(found, code)) != wanted:
                yield f"exit code {code} leads to {does}, and should to {wanted}"


def limits_per_index(found: Workload) -> Iterator[str]:
    job = found.job
    per_index = "backoffLimitPerIndex" in job
    if not per_index and any(rule["action"] == "FailIndex" for rule in failure_rules(found)):
        yield "FailIndex needs backoffLimitPerIndex"
    if "maxFailedIndexes" in job and (not per_index or job["maxFailedIndexes"] > job.get("completions", 1)):
        yield "maxFailedIndexes needs backoffLimitPerIndex, and is at most completions"
    least = int(found.variables.get("PET_NNODES", "1").partition(":")[0])
    if found.kind in ("Job", "JobSet") and job.get("maxFailedIndexes") != job.get("completions", 1) - least:
        yield f"maxFailedIndexes is not completions less {least}, the least nodes with which the job goes on"
    if found.job and not per_index:
        yield "without backoffLimitPerIndex one bad machine uses up the retries of all"


def success(found: Workload) -> Iterator[str]:
    if found.kind in ("Job", "JobSet") and found.job.get("successPolicy") != {"rules": [{"succeededCount": 1}]}:
        yield "successPolicy is not succeededCount: 1: a pod that cannot be placed would hold up the end"


def names_and_service(found: Workload) -> Iterator[str]:
    if found.kind != "Job":
        return
    services = {service["metadata"]["name"]: service["spec"] for service in found.kinds("Service")}
    service = services.get(found.pod.get("subdomain", ""))
    if service is None:
        yield "subdomain names no Service: pods have no names by which others find them"
        return
    if service.get("clusterIP") != "None":
        yield "the Service is not headless"
    if not service.get("publishNotReadyAddresses"):
        yield "the Service does not publish addresses of pods that are not ready, and the nodes meet before that"
    if not found.selected(service["selector"]):
        yield "the Service selects other pods"


def expanded(found: Workload) -> dict[str, str]:
    """Return the variables as the container gets them: a value may name variables above it."""
    known: dict[str, str] = {}
    for entry in found.container.get("env", []):
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = found.name if path.endswith("job-name']") else path or entry.get("value", "")
        known[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: known.get(name[1], name[0]), value)
    return known


def variables_are_known(found: Workload) -> Iterator[str]:
    for name, value in expanded(found).items():
        if "$(" in value:
            yield f"{name} is {value}: a variable that it names is not above it"
    names = [entry["name"] for entry in found.container.get("env", [])]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"{name} is given twice"


def meeting_point(found: Workload) -> Iterator[str]:
    if found.kind != "Job":
        return
    variables = expanded(found)
    endpoint = variables.get("PET_RDZV_ENDPOINT", "")
    if variables.get("PET_RDZV_BACKEND") != "etcd" and endpoint not in ("", f"{found.name}-0.{found.pod.get('subdomain')}:29400"):
        yield f"PET_RDZV_ENDPOINT is {endpoint}, and should name index 0, which is never removed"
    if "controller-uid" not in variables.get("PET_RDZV_ID", ""):
        yield "PET_RDZV_ID is not the Job's uid: a job made again under its name would meet rows of the one before"


def number_of_nodes(found: Workload) -> Iterator[str]:
    if found.kind not in ("Job", "JobSet"):
        return
    low, _, high = found.variables.get("PET_NNODES", "1:1").partition(":")
    if not int(low) <= found.job.get("completions", 1) <= int(high or low):
        yield f"completions is outside of PET_NNODES={low}:{high or low}"


def time_to_stop(found: Workload) -> Iterator[str]:
    grace, needed = found.pod.get("terminationGracePeriodSeconds", 30), float(found.variables.get("PET_GRACE", 30)) + GRACE_BEYOND
    if found.is_agent and grace < needed:
        yield f"terminationGracePeriodSeconds is {grace}: the kubelet kills the agent before it has stopped its workers ({needed:.0f} s)"


def disruption_budget(found: Workload) -> Iterator[str]:
    if found.kind == "TrainingRuntime":  # the pods are of TrainJobs, whose names are not known here
        return
    budgets = [budget["spec"] for budget in found.kinds("PodDisruptionBudget") if found.selected(budget["spec"]["selector"]["matchLabels"])]
    if not budgets:
        yield "no PodDisruptionBudget selects its pods"
    for budget in budgets:
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield "the PodDisruptionBudget keeps unhealthy pods from being drained"
        # A Job has no scale subresource, from which Kubernetes would know how many pods it should have.
        least = int(found.variables.get("PET_NNODES", "1:1").partition(":")[0])
        if found.kind != "StatefulSet" and (budget.get("minAvailable") != least or "maxUnavailable" in budget):
            yield f"the PodDisruptionBudget of a {found.kind} needs minAvailable: {least}, as in PET_NNODES: else no pod can be evicted"
        if found.kind == "StatefulSet" and budget.get("maxUnavailable") != 1:
            yield "the PodDisruptionBudget has another maxUnavailable than 1"


def network_policy(found: Workload) -> Iterator[str]:
    if found.kind not in ("Job", "JobSet", "PyTorchJob"):
        return
    policies = [policy["spec"] for policy in found.kinds("NetworkPolicy") if found.selected(policy["spec"]["podSelector"]["matchLabels"])]
    peers = [
        peer["podSelector"]["matchLabels"] for policy in policies for rule in policy["ingress"]
        if "ports" not in rule for peer in rule["from"]
    ]  # fmt: skip
    if not any(found.selected(labels) for labels in peers):
        yield "no NetworkPolicy lets its pods reach each other on every port"


def restricted(found: Workload) -> Iterator[str]:
    """The Pod Security standard "restricted", and what goes beyond it. RDMA needs more: pinned memory, and mostly the host's cards."""
    devices = found.container.get("resources", {}).get("limits", {})
    rdma = ["IPC_LOCK"] if any(name.startswith("rdma/") for name in devices) else []
    pod, own = found.pod.get("securityContext", {}), found.container.get("securityContext", {})
    wrong = {
        "runAsNonRoot": not pod.get("runAsNonRoot"),
        "runAsUser": not pod.get("runAsUser"),
        "seccompProfile": pod.get("seccompProfile", {}).get("type") != "RuntimeDefault",
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
        "readOnlyRootFilesystem": not own.get("readOnlyRootFilesystem"),
        "capabilities": own.get("capabilities", {}).get("drop") != ["ALL"] or own.get("capabilities", {}).get("add", []) != rdma,
        "hostPath": any("hostPath" in volume for volume in found.pod.get("volumes", [])),
        "host namespaces": any(found.pod.get(key) for key in ("hostPID", "hostIPC", *([] if rdma else ["hostNetwork"]))),
        "automountServiceAccountToken": found.pod.get("automountServiceAccountToken") is not False,
        "enableServiceLinks": found.pod.get("enableServiceLinks") is not False,
    }
    yield from (f"{name} is not as restricted as it can be" for name, is_wrong in wrong.items() if is_wrong)


def mounts(found: Workload) -> Iterator[str]:
    claims = found.documents[0:0] if found.kind != "StatefulSet" else found.kinds("StatefulSet")[0]["spec"].get("volumeClaimTemplates", [])
    volumes = {volume["name"]: volume for volume in found.pod.get("volumes", [])}
    there = {*volumes, *(claim["metadata"]["name"] for claim in claims)}
    mounted = {mount["mountPath"]: mount["name"] for mount in found.container.get("volumeMounts", [])}
    yield from (f"the volume {name} is mounted, and not there" for name in mounted.values() if name not in there)
    yield from (f"the volume {name} is not mounted" for name in there if name not in mounted.values())
    made = {claim["metadata"]["name"] for claim in found.kinds("PersistentVolumeClaim")}
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in made:
            yield f"the claim {volume['persistentVolumeClaim']['claimName']} is not there"
    if found.is_agent:
        if "/tmp" not in mounted:
            yield "/tmp, which is also HOME, cannot be written to"
        shm = volumes.get(mounted.get("/dev/shm", ""), {}).get("emptyDir", {})
        if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
            yield "/dev/shm has 64 MB: it needs a volume of medium Memory with a limit"
        elif (limit := found.container.get("resources", {}).get("limits", {}).get("memory")) and size(shm["sizeLimit"]) > size(limit):
            yield "/dev/shm is larger than the memory limit that it counts against"


def wanted_nodes(found: Workload) -> Iterator[str]:
    """The annotation for the number of nodes, in the file that the agent reads."""
    if not found.is_agent or found.kind not in ("Job", "JobSet", "PyTorchJob"):
        return
    volumes = {volume["name"]: volume.get("downwardAPI", {}).get("items", []) for volume in found.pod.get("volumes", [])}
    paths = {
        f"{mount['mountPath']}/{item['path']}": item["fieldRef"]["fieldPath"]
        for mount in found.container.get("volumeMounts", [])
        if "subPath" not in mount  # such a file never changes
        for item in volumes.get(mount["name"], [])
    }
    if paths.get(FILE) != "metadata.annotations['elastirun.io/nodes']":
        yield f"the annotation elastirun.io/nodes is not the content of {FILE}"


def size(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def resources(found: Workload) -> Iterator[str]:
    limits, requests = (found.container.get("resources", {}).get(key, {}) for key in ("limits", "requests"))
    for name in {*limits, *requests} - {"cpu"}:
        if limits.get(name) != requests.get(name):
            if name != "memory" or found.is_agent:
                yield f"requests and limits of {name} differ"


def probes(found: Workload) -> Iterator[str]:
    if not found.is_agent:
        return
    ports = {port["name"]: port["containerPort"] for port in found.container.get("ports", [])}
    wanted = found.variables.get("PET_HEALTH_PORT", "")
    for kind in ("startupProbe", "livenessProbe"):
        get = found.container.get(kind, {}).get("httpGet", {})
        if get.get("path") != "/healthz" or str(ports.get(get.get("port"), "")) != wanted:
            yield f"{kind} does not ask /healthz at PET_HEALTH_PORT"
    if "readinessProbe" in found.container:
        yield "a readinessProbe: pods are replaced and found by name before they are ready"
    if found.container.get("livenessProbe", {}).get("timeoutSeconds", 1) <= 5:
        yield "livenessProbe: the agent itself gives its loop 5 s to answer, so timeoutSeconds must be more"


def last_words(found: Workload) -> Iterator[str]:
    if found.is_agent and found.container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        yield "terminationMessagePolicy is not FallbackToLogsOnError: the end of a killed agent's output would be lost"
    if found.container.get("terminationMessagePath", "/dev/termination-log") != found.variables.get(
        "ELASTIRUN_TERMINATION_LOG", "/dev/termination-log"
    ):
        yield "terminationMessagePath is not where the agent writes"


RULES: tuple[Rule, ...] = (
    *(stable_versions, indexed, restart_policy, replacement, disruption_first, rules_are_accepted, exit_codes, limits_per_index, success),
    *(names_and_service, variables_are_known, meeting_point, number_of_nodes, time_to_stop, disruption_budget, network_policy),
    *(restricted, mounts, wanted_nodes, resources, probes, last_words),
)
