"""Starts fork servers (``forkserver.py``): the first one before the agent is imported, so that both import at the same time."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastirun.agent.processes import marks, proc
from elastirun.agent.processes.preload import forkserver
from elastirun.agent.processes.spawn import Spawned, WorkerSpec, spawn
from elastirun.config import Preload


@dataclass(frozen=True)
class StartedServer:
    """A fork server, child of this process. ``control``: this end of its socket.

    ``env``: the environment that it was started with; None: it has stayed from an earlier job, and is told the environment of this one.
    ``mark``: of the agent that this process becomes, where ``env`` has it.
    """

    pid: int
    control: int
    env: Mapping[str, str] | None = None
    mark: marks.Mark | None = None


def start(preload: Preload, like: WorkerSpec) -> tuple[socket.socket, Spawned]:
    """Start a fork server for workers that are as ``like``. Return this end of its control socket, and its process. Raises OSError."""
    ours, theirs = socket.socketpair()
    program = (sys.executable, "-u", forkserver.__file__, str(os.getpid()), str(theirs.fileno()))
    argv = (*program, ",".join(preload.modules), ",".join(preload.tried), *like.argv[2:])
    try:
        with theirs:  # not in the workers' control group, which is killed after each round
            return ours, spawn(replace(like, argv=argv, env=without_round(like.env), group=""), 2, 2, (theirs.fileno(),))
    except OSError:
        ours.close()
        raise


def start_ahead(preload: Preload, like: WorkerSpec, mark: marks.Mark) -> StartedServer | None:
    """Start one for the agent that this process becomes, whose ``mark`` is in the environment of ``like``.

    None: that cannot be; then the agent tries, and says why not.
    """
    if not preload.modules or runs_as_another_user():
        return None
    try:
        ours, spawned = start(preload, like)
    except OSError:
        return None
    os.close(spawned.pidfd)
    return StartedServer(spawned.pid, ours.detach(), without_round(like.env), mark)


def taken_over(pid: int, control: int) -> StartedServer | None:
    """Return the fork server that a warm server has made for the agent that this process becomes; None: it is no child of this process."""
    found = proc.look(pid)
    return StartedServer(pid, control) if found is not None and found.parent == os.getpid() else None


def without_round(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that do not differ between workers or rounds."""
    return {name: value for name, value in env.items() if name not in forkserver.ROUND_NAMES}


def runs_as_another_user() -> bool:
    """Return whether the interpreter runs as another user than the one who starts it."""
    return bool(os.stat(sys.executable).st_mode & (stat.S_ISUID | stat.S_ISGID))
