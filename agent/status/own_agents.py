"""Finds the agents of this user on this machine, and asks each where its job meets. For ``elastirun status``.

The kernel lists the unix sockets of this network namespace. An agent whose socket has too long a path is not listed with it, and is found
only from within a worker, whose environment names the socket.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.workers.local_socket import FOLDER, NAME
from elastirun.agent.workers.round_check import STORE, VARIABLE
from elastirun.worker import agent_socket

ASK_LIMIT = 1.0  # seconds for the answer of an agent, which may be busy
MOST_AGENTS = 64  # that are asked
SNAPSHOT = "snapshot"  # the question for the fields of /status, which ``health.described`` answers
LISTENS = "00010000"  # in the column Flags of /proc/net/unix


@dataclass(frozen=True)
class OwnAgent:
    """The word of one agent. ``endpoints``: of its launch. ``store``: where its job meets, as ``StoreAccess.for_status`` describes it.

    ``steps``: of its workers that stamp them, by rank. ``live``: ranks of its live workers; ``finished``: of those that have ended with 0.
    ``devices``: the GPUs that its workers see, as ``shared_devices.devices`` says it.
    """

    job: str
    endpoints: tuple[str, ...]
    store: dict[str, Any]
    steps: tuple[WorkerSteps, ...] = ()
    live: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    devices: str = ""  # none, also where an agent of an earlier version says nothing
    began: float = field(default=0.0, compare=False)  # when it made its socket, in seconds since the epoch


def sockets() -> list[str]:
    """Return the sockets of the agents. Some of these agents may have ended."""
    paths = dict.fromkeys([*_listed(), *filter(None, [os.environ.get(VARIABLE)])])
    return [path for path in paths if _is_ours(path)][:MOST_AGENTS]


def ask(path: str) -> OwnAgent | None:
    """Return what the agent with this socket says; None when it does not answer, or is of another version."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        answer = json.loads(agent_socket.ask(path, STORE, ASK_LIMIT)[0])
        steps = tuple(_steps(**one) for one in answer["steps"])
        live, finished = (tuple(map(int, answer.get(name, ()))) for name in ("live", "finished"))
        endpoints, devices = tuple(map(str, answer["endpoints"])), str(answer.get("devices", ""))
        return OwnAgent(str(answer["job"]), endpoints, dict(answer["store"]), steps, live, finished, devices, os.stat(path).st_mtime)
    return None


def _steps(rank: Any, local_rank: Any, steps: Any, seconds_since_step: Any, steps_per_second: Any, times_median: Any) -> WorkerSteps:
    rate, slowness = (None if number is None else float(number) for number in (steps_per_second, times_median))
    return WorkerSteps(int(rank), int(local_rank), int(steps), float(seconds_since_step), rate, slowness)


def _listed(table: Path = Path("/proc/net/unix")) -> list[str]:
    """Return the paths of sockets that look like an agent's."""
    try:
        rows = [line.split(maxsplit=7) for line in table.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    paths = [row[7] for row in rows if len(row) == 8 and row[3] == LISTENS]
    return [path for path in paths if path.startswith("/") and Path(path).name == NAME and Path(path).parent.name.startswith(FOLDER)]


def _is_ours(path: str) -> bool:
    """Return whether nobody but this user can have made the socket: another's would send us to a store of its choice."""
    with suppress(OSError, ValueError):
        found = os.stat(os.path.dirname(path))
        return found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False
