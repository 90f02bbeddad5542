"""Detection of what was not given for a job of several nodes: nodes, endpoint, job id and rank, from the scheduler's variables. Pure.

Only a command that does not name its rendezvous is completed, see ``why_not_asked``. docs/detection.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastirun.cli.detect import kubernetes as detect_kubernetes
from elastirun.cli.detect import slurm as detect_slurm
from elastirun.cli.detect.detected import OVERRIDE, Detected, Host, UnclearError, nothing, source
from elastirun.errors import UsageError

_OF_WORKERS = ("TORCHELASTIC_RUN_ID", "ELASTIRUN_AGENT")  # variables that a worker has: a launcher started by one is for this node


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
    return detect_kubernetes.pod(environ, host, several)
