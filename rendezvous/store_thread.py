"""Carries the machine's ``Sync`` requests to the store, in a thread of its own, and hands the answers back as events.

The agent's loop never waits for the store. An exchange that does not come back within its limit is given up: its
thread and connection are abandoned (torch's client cannot be interrupted), a fresh pair takes over, and what the late
one still writes is harmless because every write is a compare-and-set.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastirun import clock
from elastirun.errors import ElastirunError, StoreRefused, UnreadableRound
from elastirun.rendezvous.actions import Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.events import Changed, Synced, SyncFailed
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.sync import Exchange

CONNECT_LIMIT = 20.0  # seconds to be connected: names resolved, torch imported, the store served
HANGING = 4  # abandoned threads that may hang before a new one is delayed: each further one has to wait twice as long
LONGEST_DELAY = 2.0**7  # of ``connect_limit``
LOOK_AGAIN = 1.0  # seconds after which the limit is asked for again: that to connect may have become that of the exchange


Answer = Synced | SyncFailed | Changed


@dataclass
class Line:
    """One thread, its connection and its ``exchange``. Abandoned as a whole."""

    exchange: Exchange
    thread: threading.Thread | None = None  # None: not started yet
    requests: queue.SimpleQueue[Sync | None] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    connected: bool = False
    deadline: float | None = None  # of the exchange under way, or of the connection that is being made for it


class Driver:
    """``connect`` opens a store; it is called in the thread.

    ``fileno()`` is readable when ``answers()`` has something. Limits in seconds: ``time_limit`` for one exchange,
    ``connect_limit`` for the connection it may need first.
    """

    def __init__(self, connect: Callable[[], Store], exchange: Exchange, time_limit: float, connect_limit: float = CONNECT_LIMIT) -> None:
        self._connect = connect
        self._time_limit = time_limit
        self._connect_limit = connect_limit
        self._pending = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._line = Line(exchange)
        self._abandoned: list[threading.Thread] = []
        self._started = 0.0  # when the last thread was started

    # -- in the agent's loop --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_r

    def submit(self, sync: Sync) -> None:
        self._pending = True
        why = self._start(self._line) if self._line.thread is None else ""
        if why:
            self._tell(self._line, SyncFailed(clock.now(), why))
        else:
            self._line.requests.put(sync)

    def answers(self) -> list[Answer]:
        """What has come back since the last call, without waiting."""
        try:
            os.read(self._wake_r, 4096)
        except BlockingIOError:
            pass
        found: list[Answer] = []
        while not self._line.answers.empty():
            found.append(self._line.answers.get())
            self._pending = self._pending and isinstance(found[-1], Changed)
        return found

    @property
    def deadline(self) -> float | None:
        """When ``give_up`` is to be called, on ``elastirun.clock``; None while nothing is under way."""
        if not self._pending:
            return None
        look_again = clock.now() + LOOK_AGAIN
        return min(self._line.deadline or look_again, look_again)

    def give_up(self, now: float) -> list[Synced | SyncFailed]:
        """Abandon the exchange under way if it is over its limit."""
        deadline = self._line.deadline
        if not self._pending or deadline is None or now < deadline:
            return []
        why = f"no answer for {self._time_limit:g} s" if self._line.connected else f"no connection within {self._connect_limit:g} s"
        self.reconnect()
        self._pending = False
        return [SyncFailed(now, why)]

    def reconnect(self) -> None:
        """The next exchange uses a fresh connection."""
        self._line.requests.put(None)
        if self._line.thread is not None:
            self._abandoned.append(self._line.thread)
        self._line = Line(self._line.exchange.fresh())

    def close(self) -> None:
        self._line.requests.put(None)

    def _start(self, line: Line) -> str:
        """Start the thread of ``line``; return why that is not possible now, or nothing.

        A host that is stopped, not gone, holds up every thread that connects to it: they must not pile up.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        hanging = len(self._abandoned)
        delay = self._connect_limit * min(2.0 ** (hanging - HANGING), LONGEST_DELAY) if hanging >= HANGING else 0.0
        if clock.now() < self._started + delay:
            return f"{hanging} connections hang; the host of the store accepts them and does not answer"
        thread = threading.Thread(target=self._serve, args=(line,), name="store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes is reached, for a while perhaps
            return f"{error} (see ulimit -u, or pids.max of the control group)"
        line.thread, self._started = thread, clock.now()
        return ""

    # -- in the thread --------------------------------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        store: Store | None = None
        while (sync := line.requests.get()) is not None:
            try:
                if store is None:
                    line.connected, line.deadline = False, clock.now() + self._connect_limit
                    store = self._connect()
                    store.watch(line.exchange.round_key, lambda: self._tell(line, Changed(clock.now())))
                started = clock.now()
                line.connected, line.deadline = True, started + self._time_limit
                answer: Answer = line.exchange.carry_out(store, sync, started)
            except Exception as error:  # whatever it was: if this thread died, the agent would wait for ever
                if store is not None:
                    store.close()
                    store = None
                why = str(error) if isinstance(error, ElastirunError) else f"{type(error).__name__}: {error}"
                answer = SyncFailed(clock.now(), clip(why), isinstance(error, StoreRefused), isinstance(error, UnreadableRound))
            line.deadline = None
            self._tell(line, answer)
        if store is not None:
            store.close()

    def _tell(self, line: Line, answer: Answer) -> None:
        line.answers.put(answer)
        try:
            os.write(self._wake_w, b"\0")
        except BlockingIOError:
            pass  # it is readable already
