"""Start one worker process. The only place that knows how; ``agent/processes/process.py`` watches what was started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastirun import linux

_EXEC_WORKER = str(Path(__file__).with_name("exec_worker.py"))
STARTUP = str(Path(__file__).absolute().with_name("startup"))  # at the beginning of PYTHONPATH: Python workers show their stacks
_NONE = "-"  # stands for an argument of exec_worker.py that is not given


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]  # the complete environment; nothing is added
    cpus: frozenset[int] | None = None  # CPUs the worker may run on; None: the agent's
    group: str = ""  # the control group the worker enters; empty: it stays in the agent's
    files: int | None = None  # the worker's soft limit of open descriptors; None: the agent's
    pause: float = 0.0  # seconds for which the process waits before it runs ``argv``


@dataclass(frozen=True)
class Spawned:
    """A child of this process that is the leader of a session of its own. Whoever called ``spawn`` reaps it and closes ``pidfd``."""

    pid: int
    pidfd: int


Starts = Callable[[WorkerSpec, int | None, int | None], Spawned]
"""Starts a worker with descriptors for its stdout and stderr: ``spawn``, or another function that does what ``spawn`` promises."""


def spawn(spec: WorkerSpec, stdout: int | None = None, stderr: int | None = None, keep: Collection[int] = ()) -> Spawned:
    """Start a worker. ``stdout`` and ``stderr`` are descriptors for it (None: this process's own); the caller closes its copies.

    Standard input is this process's own for rank 0 and empty for the others, which would compete for it.
    It has the descriptors in ``keep``, too, by the same numbers.

    Call it in the thread that lives as long as the worker may: the parent-death signal is tied to the *thread* that forked.
    Raises OSError when no process can be made. A command that cannot be executed is the worker's exit code 126 or 127.
    """
    cpus = ",".join(map(str, sorted(spec.cpus))) if spec.cpus else _NONE
    command = [sys.executable, "-I", "-S", _EXEC_WORKER, str(os.getpid()), cpus, spec.group or _NONE]
    command += [_NONE if spec.files is None else str(spec.files), f"{spec.pause:g}", *spec.argv]
    stdin = None if spec.rank == 0 else subprocess.DEVNULL
    child = subprocess.Popen(command, env=dict(spec.env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, pass_fds=keep)
    try:
        pidfd = linux.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise
    child.returncode = 0  # else Popen reaps the child behind the caller's back
    return Spawned(child.pid, pidfd)
