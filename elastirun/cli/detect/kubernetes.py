"""Detection of a pod of an Indexed Job, a JobSet or a StatefulSet, by its index and its name below a headless Service. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastirun.cli.detect.detected import OVERRIDE, PORT, Detected, Host, UnclearError, nothing, number, source
from elastirun.errors import UsageError

ANY_NUMBER = "1:1024"  # nodes, where nobody says how many pods there are

INDEX = "JOB_COMPLETION_INDEX"  # of the pod in its Indexed Job; set by Kubernetes
API_SERVER = "KUBERNETES_SERVICE_HOST"  # set by Kubernetes in every pod
JOB_SET = "JOBSET_NAME"  # set by the manifest, from the label jobset.sigs.k8s.io/jobset-name

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_FULL_NAME = re.compile(rf"({_LABEL})\.({_LABEL})\.({_LABEL})\.svc(?:\.[a-z0-9.-]{{1,253}})?")
_NUMBERED = re.compile(r"(.+)-([0-9]{1,9})")


@dataclass(frozen=True)
class _Pod:
    """A pod that has a name below a headless Service: ``train-1.train.default.svc.cluster.local``."""

    host_name: str  # train-1
    service: str  # train
    namespace: str  # default
    domain: str  # train.default.svc.cluster.local

    @property
    def numbered(self) -> tuple[str, int] | None:
        """The host name without its number, and the number; None without a number at the end."""
        match = _NUMBERED.fullmatch(self.host_name)
        return (match[1], int(match[2])) if match else None


def pod(environ: Mapping[str, str], host: Callable[[], Host], several: bool) -> Detected:
    """Return this pod's part in a job of all pods. Raises ``UnclearError``, and ``UsageError`` for contradictions.

    ``several``: a number of nodes above one was given. Without it a pod of a StatefulSet is taken for one that works alone: a notebook
    or a server may be in one.
    """
    if INDEX in environ:
        return _of_job(environ, host)
    if API_SERVER not in environ:
        return nothing("no scheduler is seen here: neither a step of Slurm nor a pod of an Indexed Job, nor another of docs/detection.md")
    if not several:
        return nothing("this pod is of no Indexed Job; pods of a StatefulSet form a job where --nnodes or PET_NNODES is given")
    return _of_stateful_set(host)


def _of_job(environ: Mapping[str, str], host: Callable[[], Host]) -> Detected:
    index, found = number(environ, INDEX), _named(host())
    if found is None:
        pods = f"the pods of this Indexed Job ({source(environ, INDEX)})"
        return nothing(f"{pods} have no names below a headless Service: no subdomain is set")
    prefix, from_name = found.numbered or ("", -1)
    if from_name != index:
        both = f"{source(environ, INDEX)} and the host name {found.host_name}"
        raise UsageError(f"{both} contradict each other: the pod of an Indexed Job has its index at the end of its name; {OVERRIDE}")
    group, job = _in_job_set(environ, found, prefix)
    if group:
        first, name, where = f"{group}-0-0", group, "a JobSet of Kubernetes"
    else:
        first, name, where, job = f"{prefix}-0", prefix, "an Indexed Job of Kubernetes", 0
    values = _values(found, first, name)
    if job == 0:  # how many pods the jobs before this one have is not visible here
        values["node_rank"] = (str(index), source(environ, INDEX))
    why = f"{where} ({source(environ, INDEX)}; the pod is {found.host_name} of Service {found.service} in {found.namespace})"
    return Detected(where, values, is_host=job == index == 0, why=why)


def _of_stateful_set(host: Callable[[], Host]) -> Detected:
    found = _named(host())
    if found is None or found.numbered is None:
        return nothing("this pod has no numbered name below a headless Service, as those of a StatefulSet or an Indexed Job have")
    prefix, ordinal = found.numbered
    values = _values(found, f"{prefix}-0", prefix)
    values["node_rank"] = (str(ordinal), f"the host name {found.host_name}")
    why = f"a StatefulSet of Kubernetes (the pod is {found.host_name} of Service {found.service} in {found.namespace})"
    return Detected("a StatefulSet of Kubernetes", values, is_host=ordinal == 0, why=why)


def _values(found: _Pod, first: str, name: str) -> dict[str, tuple[str, str]]:
    """Return the values that all pods of the job have in common. ``first``: the host name of the pod that hosts the store."""
    full_name = f"the name {found.host_name}.{found.domain}"
    return {
        "nnodes": (ANY_NUMBER, "a pod is not told how many there are; give --nnodes=MIN:MAX or PET_NNODES"),
        "rdzv_endpoint": (f"{first}.{found.domain}:{PORT}", full_name),
        "rdzv_id": (f"{found.namespace}.{name}", full_name),
    }


def _in_job_set(environ: Mapping[str, str], found: _Pod, prefix: str) -> tuple[str, int]:
    """Return the name that the jobs of the JobSet's group have in common, and this job's index in the group; "" for a Job of its own.

    Raises ``UsageError`` where the JobSet that was given is not in the host name.

    Jobs of a JobSet are named ``<set>-<group>-<job>``, and their Service as the set, by default. A Job of its own may be named alike:
    only the manifest can say.
    """
    name = environ.get(JOB_SET) or found.service
    match = re.fullmatch(rf"({re.escape(name)}-.+)-([0-9]{{1,9}})", prefix)
    if match is None:
        if environ.get(JOB_SET):
            both = f"{source(environ, JOB_SET)} and the host name {found.host_name}"
            raise UsageError(f"{both} contradict each other: a pod of a JobSet is named <set>-<group>-<job>-<index>; {OVERRIDE}")
        return "", 0
    if not environ.get(JOB_SET) and int(match[2]) > 0:
        could = f"the host name {found.host_name} could be of job {match[2]} of JobSet {name}, or of a Job of its own"
        raise UnclearError(f"{could}: set {JOB_SET} from the label jobset.sigs.k8s.io/jobset-name, or give --rdzv-endpoint")
    return (match[1], int(match[2])) if environ.get(JOB_SET) else ("", 0)  # for job 0 both readings are the same


def _named(host: Host) -> _Pod | None:
    """Return the pod by its full name, which /etc/hosts of a pod with a subdomain has; None without one."""
    own = host.name.partition(".")[0].lower()
    for name in (host.name, *host.full_names):
        match = _FULL_NAME.fullmatch(name.lower().rstrip("."))
        if match and match[1] == own:
            return _Pod(own, match[2], match[3], match[0].partition(".")[2])
    return None
