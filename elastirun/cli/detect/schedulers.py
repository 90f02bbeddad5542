"""Detection of what was not given for a job of several nodes: nodes, endpoint, job id and rank, from the scheduler's variables. Pure.

Only a command that does not name its rendezvous is completed, see ``why_not_asked``. docs/detection.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastirun.cli.detect import kubernetes as detect_kubernetes
from elastirun.cli.detect import listed as detect_listed
from elastirun.cli.detect import numbered as detect_numbered
from elastirun.cli.detect import slurm as detect_slurm
from elastirun.cli.detect.detected import OVERRIDE, Detected, Host, UnclearError, nothing, number, source
from elastirun.errors import UsageError

_OF_WORKERS = ("TORCHELASTIC_RUN_ID", "ELASTIRUN_AGENT")  # variables that a worker has: a launcher started by one is for this node
PBS_JOB, PBS_SEVERAL = "PBS_JOBID", {"PBS_NODENUM": 0, "PBS_NUM_NODES": 1}  # above these the job has several nodes


def detect(environ: Mapping[str, str], host: Callable[[], Host], several: bool) -> Detected:
    """Return what the scheduler says about this node's part in a job of several nodes. Raises ``UsageError`` for contradictions.

    ``host`` is asked only in a pod: it may look up names. ``several``: a number of nodes above one was given.
    """
    inside = next((name for name in _OF_WORKERS if environ.get(name)), "")
    if inside:
        return nothing(f"this is started inside a worker of another launcher ({inside} is set)")
    try:
        return _by_scheduler(environ, host, several)
    except UnclearError as error:
        return nothing(str(error), warn=True)


def _by_scheduler(environ: Mapping[str, str], host: Callable[[], Host], several: bool) -> Detected:
    detect_numbered.check_tasks(environ)
    in_pod = detect_kubernetes.INDEX in environ
    if detect_slurm.STEP in environ and environ[detect_slurm.STEP].isdecimal():  # else a shell that Slurm has started
        found = detect_slurm.step(environ)
        if found.where and in_pod:
            both = f"{source(environ, detect_slurm.STEP)} and {source(environ, detect_kubernetes.INDEX)}"
            raise UsageError(f"{both} contradict each other: both a Slurm step and an Indexed Job of Kubernetes; {OVERRIDE}")
        if found.where or not in_pod:
            return found
    elif detect_slurm.JOB in environ and not in_pod:
        return detect_slurm.outside_step(environ)
    found = detect_kubernetes.pod(environ, host, several)
    return found if found.where else _elsewhere(environ) or found


def _elsewhere(environ: Mapping[str, str]) -> Detected | None:
    """Return what other schedulers say; None: they are not here. A list of the nodes says more than their number."""
    found = detect_listed.node(environ) or detect_numbered.node(environ)
    return found or (_pbs(environ) if PBS_JOB in environ else None)


def _pbs(environ: Mapping[str, str]) -> Detected | None:
    """Return a warning on a node of a PBS job of several. The nodes are in a file that only the first of them has (qsub(1), pbsdsh(1))."""
    several = [name for name, most in PBS_SEVERAL.items() if number({name: "0", **environ}, name) > most]
    if not several:
        return None
    advice = "start one agent on each, with --rdzv-endpoint=HOST:29400, the first of PBS_NODEFILE"
    return nothing(f"this PBS job has several nodes ({source(environ, several[0])}): {advice}", warn=True)
