"""Ends a worker at once when its agent stops it after a failure, also while the main thread waits for a peer that is lost.

Python runs signal handlers in the main thread only, between two steps of the interpreter. A main thread that waits in gloo or NCCL
for a lost peer never comes to that, so a worker with a handler for SIGTERM would stay until SIGKILL. The C part of the handler also writes
to a descriptor (``signal.set_wakeup_fd``), which a thread reads here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from elastirun.worker.agent_socket import VARIABLE, ask

QUESTION, FAILURE = "stop", "failure"  # see agent/workers/round_check.py
TIMEOUT = 5.0  # seconds for the agent's answer; it takes a millisecond


class FailureStop:
    """Calls ``on_failure`` in a thread when one of ``signums`` arrives and the agent says that it stops the workers after a failure.

    Made in the main thread. Does nothing where another library uses the descriptor for signals (asyncio), or where there is no agent.
    """

    def __init__(self, signums: Collection[int], on_failure: Callable[[], None]) -> None:
        self._signums, self._on_failure = frozenset(signums), on_failure
        self._write = -1
        self._socket = os.environ.get(VARIABLE, "")
        before = signal.set_wakeup_fd(-1)
        if before != -1 or not self._socket:
            signal.set_wakeup_fd(before)
            return
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read,), name="elastirun failure stop", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Call it in the main thread."""
        if self._write == -1:
            return
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._write):
            signal.set_wakeup_fd(current)  # another library's, since then
        os.close(self._write)
        self._write = -1

    def _watch(self, read: int) -> None:
        with open(read, "rb", buffering=0) as arrived:
            while signums := arrived.read(64):
                if self._signums.intersection(signums) and self._after_failure():
                    self._on_failure()

    def _after_failure(self) -> bool:
        with suppress(OSError):  # no agent any more
            return ask(self._socket, QUESTION, TIMEOUT)[0] == FAILURE
        return False
