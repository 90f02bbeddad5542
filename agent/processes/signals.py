"""Signals to the agent, as events of its loop: the handler only enqueues a signal, the loop acts on it."""

from __future__ import annotations

import math
import os
import selectors
import signal
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from types import FrameType
from typing import Any

from elastirun import clock

REQUEST_WINDOW = 1.0  # seconds after a counted signal in which further ones count as the same request; see ``Signals``
FORWARD_WINDOW = 0.1  # seconds in which the same signal is forwarded only once; a group and each of its members may be signalled


@dataclass(eq=False)
class Signals:
    """Handles the signals ``names`` and ``forward`` until ``close``. Unblocks those that were blocked when the agent started.

    Callbacks, all in the loop's thread: ``on_signal(signum, count)`` for ``names``, with ``count`` from 1 over all of them;
    ``on_forward(signum)`` for ``forward``; ``on_child()`` when children may have ended.

    Signals that arrive within REQUEST_WINDOW seconds of a counted one are the same request and not counted. GNU timeout signals
    the child and then its group, systemd may send SIGHUP after SIGTERM, and a shell's trap sends SIGTERM after a terminal's SIGINT.

    If SIGHUP was ignored when the agent started (nohup), it stays ignored, also in the workers.
    """

    names: InitVar[Iterable[str]]
    forward: InitVar[Iterable[str]]
    _selector: selectors.BaseSelector
    _on_signal: Callable[[int, int], None]
    _on_forward: Callable[[int], None]
    _on_child: Callable[[], None]

    def __post_init__(self, names: Iterable[str], forward: Iterable[str]) -> None:
        self._forward = {int(signal.Signals[name]) for name in forward}
        self._count = 0
        self._counted_at = -math.inf  # when the last counted signal arrived
        self._forwarded_at: dict[int, float] = {}  # by signal: when the last forwarded one arrived
        self._arrived: deque[tuple[float, int]] = deque()  # when, which signal
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}
        for signum in {*self._forward, *(int(signal.Signals[name]) for name in names)}:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._arrive)
        # If SIGCHLD was inherited as ignored, the kernel would discard the workers' exit codes.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._arrive)
        # Python runs a handler between two bytecodes. A signal that arrives after the last bytecode before poll() must still wake poll().
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        self._selector.register(self._read, selectors.EVENT_READ, self._ready)

    def close(self) -> None:
        """Restore the handlers and the signal mask that were there before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        signal.set_wakeup_fd(self._wakeup_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._selector.unregister(self._read)
        os.close(self._read)
        os.close(self._write)

    def _arrive(self, signum: int, frame: FrameType | None) -> None:
        self._arrived.append((clock.now(), signum))
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def _ready(self, mask: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if any(signum == signal.SIGCHLD for _, signum in arrived):
            self._on_child()
        for when, signum in arrived:
            if signum in self._forward:
                if when >= self._forwarded_at.get(signum, -math.inf) + FORWARD_WINDOW:
                    self._forwarded_at[signum] = when
                    self._on_forward(signum)
            elif signum != signal.SIGCHLD and when >= self._counted_at + REQUEST_WINDOW:
                self._counted_at = when
                self._count += 1
                self._on_signal(signum, self._count)
