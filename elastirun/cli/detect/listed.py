"""Detection where the nodes are listed by name, the first one first: SageMaker, LSF and Volcano. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastirun.cli import parse
from elastirun.cli.detect import node_list
from elastirun.cli.detect.detected import FIRST_PORT, LAST_CALL, OVERRIDE, PORT, PORTS, Detected, UnclearError, nothing, number, source
from elastirun.errors import UsageError

SAGEMAKER_HOSTS, SAGEMAKER_OWN, SAGEMAKER_JOB = "SM_HOSTS", "SM_CURRENT_HOST", "TRAINING_JOB_NAME"
LSF_HOSTS, LSF_TASK, LSF_JOB, LSF_INDEX = "LSB_MCPU_HOSTS", "LSF_PM_TASKID", "LSB_JOBID", "LSB_JOBINDEX"
VOLCANO_HOSTS, VOLCANO_INDEX = re.compile(r"VC_[A-Z0-9_]{1,64}_HOSTS", re.ASCII), "VC_TASK_INDEX"


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a job in their order, each once, and which of them this is."""

    where: str
    hosts: Sequence[str]
    listed: str  # the variable with the list
    index: int
    numbered: str  # the variable that says which node this is
    run_id: tuple[str, str]
    port: int = PORT


def node(environ: Mapping[str, str]) -> Detected | None:
    """Return this node's part in a job of several; None: nothing of the kind is seen. Raises ``UnclearError`` and ``UsageError``."""
    found = _sagemaker(environ) or _lsf(environ) or _volcano(environ)
    if found is None:
        return None
    if len(found.hosts) < 2:
        return nothing(f"{found.where} has one node ({source(environ, found.listed)})")
    if len({*found.hosts}) < len(found.hosts):
        raise UnclearError(f"{source(environ, found.listed)} names a node twice")
    if found.index >= len(found.hosts):
        both = f"{source(environ, found.numbered)} and {source(environ, found.listed)} ({len(found.hosts)} nodes)"
        raise UsageError(f"{both} contradict each other; {OVERRIDE}")
    try:
        first = parse.host(found.hosts[0])
    except ValueError as error:
        raise UnclearError(f"{source(environ, found.listed)}: {error}") from None
    nodes = f"{len(found.hosts)} of {source(environ, found.listed)}"
    return Detected(
        where=found.where,
        values={
            "nnodes": (f"1:{len(found.hosts)}", nodes),
            "rdzv_endpoint": (f"{first}:{found.port}", f"the first of {source(environ, found.listed)}"),
            "rdzv_id": found.run_id,
            "node_rank": (str(found.index), source(environ, found.numbered)),
            "last_call": (str(LAST_CALL), f"all {nodes} are expected"),
        },
        is_host=found.index == 0,
        why=f"{found.where} of {len(found.hosts)} nodes ({source(environ, found.numbered)})",
    )


def _sagemaker(environ: Mapping[str, str]) -> _Nodes | None:
    """Source: ENVIRONMENT_VARIABLES.md of the SageMaker training toolkit."""
    if SAGEMAKER_HOSTS not in environ or SAGEMAKER_OWN not in environ:
        return None
    text = environ[SAGEMAKER_HOSTS]
    try:
        hosts = json.loads(text) if len(text) <= node_list.LONGEST_LIST else None
    except (ValueError, RecursionError):
        hosts = None
    if not (isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)):
        raise UnclearError(f"{source(environ, SAGEMAKER_HOSTS)} is no list of names in JSON")
    own = environ[SAGEMAKER_OWN]
    if own not in hosts:
        raise UnclearError(f"{source(environ, SAGEMAKER_HOSTS)} does not name this node, {source(environ, SAGEMAKER_OWN)}")
    job = _name(environ, SAGEMAKER_JOB) or ("sagemaker", "the same in each job: jobs share no node")
    return _Nodes("a SageMaker training job", hosts, SAGEMAKER_HOSTS, hosts.index(own), SAGEMAKER_OWN, job)


def _lsf(environ: Mapping[str, str]) -> _Nodes | None:
    """Source: the LSF reference, "Environment variables set for job execution", and blaunch(1), which numbers its tasks from 1."""
    if LSF_JOB not in environ or LSF_HOSTS not in environ:
        return None
    words = environ[LSF_HOSTS].split()
    if len(environ[LSF_HOSTS]) > node_list.LONGEST_LIST or len(words) % 2:
        raise UnclearError(f"{source(environ, LSF_HOSTS)} is no list of hosts, each with its number of slots")
    hosts = list(dict.fromkeys(words[::2]))
    if len(hosts) < 2:
        return _Nodes("this LSF job", hosts, LSF_HOSTS, 0, LSF_JOB, ("", ""))
    if LSF_TASK not in environ:
        raise UnclearError(
            f"this LSF job has {len(hosts)} hosts ({LSF_HOSTS}), and this is one of them: start one agent on each with blaunch"
        )
    job, array, task = number(environ, LSF_JOB), number({LSF_INDEX: "0", **environ}, LSF_INDEX), number(environ, LSF_TASK)
    if not 0 < task <= len(hosts):
        several = f"{source(environ, LSF_TASK)} on {len(hosts)} hosts ({LSF_HOSTS}): several tasks on a host, each an agent"
        raise UnclearError(f"{several}: blaunch -z with each host once")
    run_id = f"lsf-{job}" + (f".{array}" if array else "")
    parts = ", ".join(source(environ, name) for name in (LSF_JOB, *([LSF_INDEX] if array else [])))
    return _Nodes("an LSF job", hosts, LSF_HOSTS, task - 1, LSF_TASK, (run_id, parts), FIRST_PORT + (job + array) % PORTS)


def _volcano(environ: Mapping[str, str]) -> _Nodes | None:
    """Source: the plug-ins svc and env of Volcano jobs (volcano.sh/docs). ``VC_<TASK>_HOSTS`` are names below the job's Service."""
    lists = [name for name in sorted(environ) if VOLCANO_HOSTS.fullmatch(name)]
    if VOLCANO_INDEX not in environ or not lists:
        return None
    if len(lists) > 1:
        names = ", ".join(lists[:4])
        raise UnclearError(f"this Volcano job has several kinds of tasks ({names}), and which of them train is not said: --rdzv-endpoint")
    if len(environ[lists[0]]) > node_list.LONGEST_LIST:
        raise UnclearError(f"{lists[0]} has more than {node_list.LONGEST_LIST} characters")
    hosts = environ[lists[0]].split(",")
    job = (hosts[0], f"the first of {source(environ, lists[0])}")
    return _Nodes("a Volcano job", hosts, lists[0], number(environ, VOLCANO_INDEX), VOLCANO_INDEX, job)


def _name(environ: Mapping[str, str], name: str) -> tuple[str, str] | None:
    text = environ.get(name, "").strip()
    return (text, source(environ, name)) if text.isascii() and text.isprintable() and text else None
