"""The termination message of Kubernetes: one line of JSON about how this node ended, which `kubectl describe pod` shows.

See docs/health.md for the fields. Writing it is a courtesy: a file that is full, absent or hangs changes neither the exit code nor, by
more than ``LIMIT``, the moment of the end.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from elastirun.agent.processes import marks
from elastirun.threads import NONE_LEFT, start_thread

if TYPE_CHECKING:
    from elastirun.rendezvous.wire.records import ExitRecord

DEFAULT = "/dev/termination-log"  # where Kubernetes expects it, unless a container's terminationMessagePath says otherwise
VARIABLE = "ELASTIRUN_TERMINATION_LOG"  # another path; empty: no message
IN_POD = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every container
MAX_BYTES = 4096  # Kubernetes cuts off what is longer, and half of a JSON object is none
LIMIT = 1.0  # seconds to write the message; the file is on a local file system, so that it takes less than a millisecond


def parent(pid: int) -> int:
    """Return the parent of a process; 0: it is outside of the container. Raises OSError."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def descends_from_first(pid: int, parent: Callable[[int], int] = parent) -> bool:
    """Tell whether a process is process 1 of the container or descends from it. What ``kubectl exec`` starts has no parent in there."""
    while pid > 1:
        try:
            pid = parent(pid)
        except OSError:  # hidden (hidepid): of another user, as only the first process may be
            return True
    return pid == 1


STARTED_BY_CONTAINER = descends_from_first(os.getpid())  # found out at once: when its parent ends, a process gets another


def path_in_pod(environ: Mapping[str, str], variable: str, default: str) -> str | None:
    """Return the file that ``variable`` names, or in a pod ``default``; None: there is none for this agent.

    A launcher that runs in a worker of another agent has none: the agent above it has. A second agent in the container, which
    ``kubectl exec`` has started, leaves the file of Kubernetes to the first.
    """
    if environ.get(marks.VARIABLE):
        return None
    if variable in environ:
        return environ[variable] or None
    return default if environ.get(IN_POD) and STARTED_BY_CONTAINER else None


def path(environ: Mapping[str, str]) -> str | None:
    """Return the file for the termination message; None: there is none to write."""
    return path_in_pod(environ, VARIABLE, DEFAULT)


def message(
    verdict: str, code: int, reason: str, round: int = 0, node: str | None = None, failures: Collection[ExitRecord] = ()
) -> dict[str, str | int | None]:
    """Return the fields of the message. ``failures``: of the job, when workers failed; ``round`` 0: there was none."""
    fields: dict[str, str | int | None] = {"verdict": verdict, "exit_code": int(code), "reason": reason, "round": round, "node": node}
    if failures:  # then a round has run here, and all that is imported here is there
        from elastirun.agent.failures.classify import last_words
        from elastirun.rendezvous.failures import root_cause, signal_name

        cause = root_cause(failures)[0]
        fields |= {"host": cause.node, "rank": cause.rank, "local_rank": cause.local_rank, "code": cause.code}
        fields |= {"signal": signal_name(-cause.code) if cause.code < 0 else None, "error": last_words(cause.lines)}
    return fields


def encode(fields: Mapping[str, str | int | None]) -> bytes:
    """Return the fields as one line of JSON of at most ``MAX_BYTES``. The longest texts are cut, and end in an ellipsis then."""
    kept = {name: value[:MAX_BYTES] if isinstance(value, str) else value for name, value in fields.items()}
    while len(line := json.dumps(kept, ensure_ascii=False).encode(errors="replace") + b"\n") > MAX_BYTES:
        name, text = max(((name, value) for name, value in kept.items() if isinstance(value, str)), key=lambda item: len(item[1]))
        kept[name] = text[: -2 - (len(line) - MAX_BYTES) // 6] + "…"  # a character takes at most six bytes
    return line


def write(fields: Mapping[str, str | int | None], environ: Mapping[str, str] = os.environ) -> str:
    """Write the termination message where there is a file for it. Returns a line for people when that failed, else an empty one."""
    to = path(environ)
    if to is None:
        return ""
    trouble = [f"it took longer than {LIMIT:g} s"]

    def try_it() -> None:
        try:
            _write(to, encode(fields), create=VARIABLE in environ)
            trouble[0] = ""
        except (OSError, ValueError) as error:
            trouble[0] = getattr(error, "strerror", None) or str(error)

    if (thread := start_thread("termination log", try_it)) is not None:
        thread.join(LIMIT)
    else:
        trouble[0] = NONE_LEFT
    return trouble[0] and f"cannot write the termination message to {to}: {trouble[0]}"


def _write(to: str, line: bytes, create: bool) -> None:
    """Replace the content of the file. Kubernetes makes its file before the container starts: where there is none, none is wanted."""
    try:
        fd = os.open(to, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    except (FileNotFoundError, PermissionError):
        if create:
            raise
        return
    with open(fd, "wb", buffering=0) as file:
        if file.write(line) != len(line):
            file.truncate(0)  # half of a JSON object is none
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
