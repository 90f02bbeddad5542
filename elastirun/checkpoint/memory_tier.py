"""Memory that outlives a worker: the agent of this node holds images for the workers of the next round (``agent/checkpoint_memory.py``).

Every failure means "not held" here: memory saves the way to the disk, and nothing depends on it. Without an agent nothing is held.
"""

from __future__ import annotations

import array
import json
import os
import socket
import time

SOCKET, NAME = "ELASTIRUN_SOCKET", "memory"  # the variable names the agent's first socket; this one is in the same folder
TIMEOUT = 2.0  # seconds for one request; the agent answers in a millisecond
PAUSE = 0.005  # seconds until the next try while too many wait for the agent
MAX_ANSWER = 1 << 20  # bytes; 512 names take 50 kB


def put(name: str, fd: int, timeout: float = TIMEOUT) -> str:
    """Let the agent hold a copy of ``fd``, a memfd of a fixed size, in place of what had that name. Return why not; empty when it is held.

    ``name``: 1 to 64 of the characters A-Z a-z 0-9 _ . -, the same in the next round. The caller's own descriptor stays open.
    """
    answer, _ = _ask(f"put {name}", timeout, fd)
    return "" if answer == "ok" else answer.removeprefix("no ")


def found(prefix: str = "", timeout: float = TIMEOUT) -> dict[str, int]:
    """Return a descriptor of everything whose name begins with ``prefix``, by name. The caller closes them."""
    answer, _ = _ask("list", timeout)
    try:
        names = [name for name in json.loads(answer) if name.startswith(prefix)]
    except (ValueError, TypeError, AttributeError):
        return {}
    held = {}
    for name in names:
        _, fd = _ask(f"get {name}", timeout)
        if fd is not None:
            held[name] = fd
    return held


def drop(name: str, timeout: float = TIMEOUT) -> bool:
    """Let the agent give up what has this name. Return whether there was something."""
    return _ask(f"drop {name}", timeout)[0] == "ok"


def _ask(request: str, timeout: float, fd: int | None = None) -> tuple[str, int | None]:
    """Send one request, with ``fd``; return the answer and the descriptor that came with it. Without an answer: why, with ``no`` before."""
    folder = os.path.dirname(os.environ.get(SOCKET, ""))
    if not folder:
        return "no this process was not started by an agent of elastirun", None
    deadline = time.monotonic() + timeout
    try:
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # a unix socket's address has 107 bytes at most, a path more
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                _connect(connection, f"/proc/self/fd/{at}/{NAME}", deadline)
                along = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                connection.sendmsg([request.encode() + b"\n"], along)
                return _receive(connection, deadline)
        finally:
            os.close(at)
    except OSError as error:
        return f"no the agent does not answer: {error.strerror or error}", None


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    """Connect, when as many as the kernel lets wait have been accepted: the workers of a large node all ask at the same moment."""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE)


def _receive(connection: socket.socket, deadline: float) -> tuple[str, int | None]:
    """Return the line that the agent sends, and the descriptor beside it."""
    received, fds = b"", array.array("i")
    try:
        while len(received) < MAX_ANSWER and not received.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            if not data:
                return "no the agent hung up", None
            received += data
        return received.decode(errors="replace").strip(), fds.pop(0) if fds else None
    finally:
        for left in fds:
            os.close(left)
