"""Ask the agent of this node at its unix socket: a line each way, and a descriptor beside it where the request has one."""

from __future__ import annotations

import array
import os
import socket
import time

VARIABLE = "ELASTIRUN_SOCKET"  # set by the agent: the path of its socket
MAX_ANSWER = 1 << 20  # bytes
PAUSE = 0.005  # seconds until the next try while more processes than the kernel lets wait are asking


def ask(path: str, line: str, timeout: float, fd: int | None = None) -> tuple[str, int | None]:
    """Send ``line``, with a copy of ``fd``. Return the answer (empty: the agent hung up) and the descriptor that came with the answer.

    The caller closes that descriptor. Raises OSError when there is no answer within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    folder, _, name = path.rpartition("/")
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # a unix socket's address has 107 bytes at most, a path more
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            _connect(connection, f"/proc/self/fd/{at}/{name}", deadline)
            socket.send_fds(connection, [line.encode() + b"\n"], [] if fd is None else [fd])
            return _receive(connection, deadline)
    finally:
        os.close(at)


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    """Connect, however many workers of a large node do so at the same moment."""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE)


def _receive(connection: socket.socket, deadline: float) -> tuple[str, int | None]:
    received, fds = b"", array.array("i")
    try:
        while len(received) < MAX_ANSWER and not received.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            if not data:
                break
            received += data
        return received.decode(errors="replace").strip(), fds.pop(0) if fds else None
    finally:
        for left in fds:
            os.close(left)
