"""Memory that outlives a worker: the agent of this node holds images for the workers of the next round, see checkpoint_memory.py.

Every failure means "not held": a copy in memory only makes a restart faster. Without an agent nothing is held.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from elastirun.worker.agent_socket import VARIABLE, ask

TIMEOUT = 2.0  # seconds for one request; the agent answers in a millisecond


def put(name: str, fd: int, timeout: float = TIMEOUT) -> str:
    """Let the agent hold a copy of ``fd``, a memfd of a fixed size, in place of what had that name. Return why not; empty when it is held.

    ``name``: 1 to 64 of the characters A-Z a-z 0-9 _ . -, the same in the next round. The caller's own descriptor stays open.
    """
    answer, _ = _ask(f"put {name}", timeout, fd)
    return "" if answer == "ok" else answer.removeprefix("no ")


def names(prefix: str = "", timeout: float = TIMEOUT) -> list[str]:
    """Return the names that begin with ``prefix`` of all that the agent holds."""
    answer, _ = _ask("list", timeout)
    with suppress(ValueError, TypeError, AttributeError):
        return [name for name in json.loads(answer) if name.startswith(prefix)]
    return []


def found(prefix: str = "", timeout: float = TIMEOUT) -> dict[str, int]:
    """Return a descriptor of everything whose name begins with ``prefix``, by name. The caller closes them."""
    fds = {name: _ask(f"get {name}", timeout)[1] for name in names(prefix, timeout)}
    return {name: fd for name, fd in fds.items() if fd is not None}


def drop(name: str, timeout: float = TIMEOUT) -> bool:
    """Let the agent give up what has this name. Return whether there was something."""
    return _ask(f"drop {name}", timeout)[0] == "ok"


def _ask(request: str, timeout: float, fd: int | None = None) -> tuple[str, int | None]:
    """Send one request, with ``fd``; return the answer and the descriptor that came with it. Without an answer: why, with ``no`` before."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return "no this process was not started by an agent of elastirun", None
    try:
        answer, came = ask(path, request, timeout, fd)
    except OSError as error:
        return f"no the agent does not answer: {error.strerror or error}", None
    return answer or "no the agent hung up", came
