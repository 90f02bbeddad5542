"""The trainer's end of the writer process: starts it, sends requests, receives the answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastirun.checkpoint.messages import close_all, receive, send
from elastirun.errors import CheckpointError

# -I -S: nothing but the standard library and this package is found, whatever the script's folder or PYTHONPATH holds, and the
# start takes a few ten milliseconds. Storage libraries are found later (see backends/objects.py).
CODE = "import sys; sys.path.append(sys.argv[1]); from elastirun.checkpoint import writer; writer.main(*map(int, sys.argv[2:]))"
PATIENCE = 10.0  # seconds at the end for the request that the writer is at
KILLED = 1.0  # seconds for the end of a writer that was killed


class WriterProcess:
    """The writer process of this rank. One thread sends and receives; answers come in the order of the requests."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it is ready some ten milliseconds later, and requests may be sent at once. Raises ``CheckpointError``."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-I", "-S", "-c", CODE, root, str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except OSError as error:
            ours.close()
            raise CheckpointError(f"the process that writes checkpoints cannot be started: {error}") from None
        self._socket = ours

    def fileno(self) -> int:
        """Return the descriptor that is readable when an answer, or the end of the process, is there."""
        return self._connection().fileno()

    def request(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request, as ``writer`` describes it. Raises ``CheckpointError`` when the process has ended."""
        try:
            send(self._connection(), message, fds)
        except OSError:
            raise CheckpointError(self._end()) from None

    def reply(self) -> dict[str, Any]:
        """Wait for the next answer. Raises ``CheckpointError`` when the process has ended."""
        try:
            received = receive(self._connection())
        except OSError:
            received = None
        if received is None:
            raise CheckpointError(self._end())
        close_all(received[1])
        return received[0]

    def close(self, patience: float = PATIENCE) -> None:
        """End the process after the request that it is at; kill it when that takes longer than ``patience`` seconds."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer, too
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process that waits for a disk ends when that answers
                    self._process.wait(KILLED)
            self._process = None

    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise CheckpointError("the process that writes checkpoints has not been started, or was closed")
        return self._socket

    def _end(self) -> str:
        """Return the message about a process that has ended."""
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        how = "hung up" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process that writes checkpoints {how}"
