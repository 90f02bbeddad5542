"""The thread that carries the machine's ``Sync`` requests to the store and hands the answers back as events.

The agent's loop never waits for the store. An exchange that is not answered within its limit is given up: its thread and its
store connection are abandoned (torch's client cannot be interrupted) and a fresh pair takes over. What the abandoned thread still
writes is harmless, because every write is a compare-and-set.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from elastirun import clock
from elastirun.errors import ElastirunError, StoreRefused, UnreadableRound
from elastirun.rendezvous.actions import Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.events import Changed, Synced, SyncFailed
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.sync import SyncProtocol

CONNECT_LIMIT = 20.0  # seconds to connect; names are resolved, torch is imported, the store is served in that time
HANGING = 4  # abandoned threads that may hang before a new one is delayed; each further one doubles the delay
LONGEST_DELAY = 2.0**7  # of ``connect_limit``: most threads that hang come back, or the host is gone for good
CHECK_AGAIN = 1.0  # seconds; the limit of the connection may by then have become that of the exchange


Answer = Synced | SyncFailed | Changed


@dataclass
class Connection:
    """One thread with its connection to the store and its ``protocol``. Abandoned as a whole."""

    protocol: SyncProtocol
    thread: threading.Thread | None = None  # None: not started yet
    requests: queue.SimpleQueue[Sync | None] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    connected: bool = False
    deadline: float | None = None  # of the exchange under way, or of the connection that is being made for it


class StoreThread:
    """Runs one exchange at a time with the store that ``connect`` opens; ``connect`` is called in the thread.

    ``fileno()`` is readable when ``answers()`` has something. Limits in seconds: ``time_limit`` for one exchange,
    ``connect_limit`` for the connection that the exchange may need first.
    """

    def __init__(
        self, connect: Callable[[], Store], protocol: SyncProtocol, time_limit: float, connect_limit: float = CONNECT_LIMIT
    ) -> None:
        self._connect = connect
        self._time_limit = time_limit
        self._connect_limit = connect_limit
        self._pending = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._connection = Connection(protocol)
        self._abandoned: list[threading.Thread] = []
        self._started = 0.0  # when the last thread was started

    # -- in the agent's loop --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_r

    def submit(self, sync: Sync) -> None:
        self._pending = True
        why = self._start(self._connection) if self._connection.thread is None else ""
        if why:
            self._hand_over(self._connection, SyncFailed(clock.now(), why))
        else:
            self._connection.requests.put(sync)

    def answers(self) -> list[Answer]:
        """Return what has come back since the last call, without waiting."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        found: list[Answer] = []
        while not self._connection.answers.empty():
            found.append(self._connection.answers.get())
            self._pending = self._pending and isinstance(found[-1], Changed)
        return found

    @property
    def deadline(self) -> float | None:
        """The time on ``elastirun.clock`` at which ``give_up`` is to be called; None while nothing is under way."""
        if not self._pending:
            return None
        check_again = clock.now() + CHECK_AGAIN
        return min(self._connection.deadline or check_again, check_again)

    def give_up(self, now: float) -> list[Synced | SyncFailed]:
        """Abandon the exchange under way if it has exceeded its limit."""
        deadline = self._connection.deadline
        if not self._pending or deadline is None or now < deadline:
            return []
        why = f"no answer for {self._time_limit:g} s" if self._connection.connected else f"no connection within {self._connect_limit:g} s"
        self.reconnect()
        self._pending = False
        return [SyncFailed(now, why)]

    def reconnect(self) -> None:
        """Abandon the connection, so that the next exchange uses a fresh one."""
        self._connection.requests.put(None)
        if self._connection.thread is not None:
            self._abandoned.append(self._connection.thread)
        self._connection = Connection(self._connection.protocol.fresh())

    def close(self) -> None:
        """End the thread once its exchange is done."""
        self._connection.requests.put(None)

    def _start(self, connection: Connection) -> str:
        """Start the thread of ``connection``; return why that is not possible now, empty when it was.

        A host that is stopped but not gone holds up every thread that connects to it, and such threads must not pile up.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        hanging = len(self._abandoned)
        delay = self._connect_limit * min(2.0 ** (hanging - HANGING), LONGEST_DELAY) if hanging >= HANGING else 0.0
        if clock.now() < self._started + delay:
            return f"{hanging} connections hang; the host of the store accepts them and does not answer"
        thread = threading.Thread(target=self._serve, args=(connection,), name="store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes is reached, for a while perhaps
            return f"{error} (see ulimit -u, or pids.max of the control group)"
        connection.thread, self._started = thread, clock.now()
        return ""

    # -- in the thread --------------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        store: Store | None = None
        while (sync := connection.requests.get()) is not None:
            try:
                if store is None:
                    connection.connected, connection.deadline = False, clock.now() + self._connect_limit
                    store = self._connect()
                    store.watch(connection.protocol.round_key, lambda: self._hand_over(connection, Changed(clock.now())))
                started = clock.now()
                connection.connected, connection.deadline = True, started + self._time_limit
                answer: Answer = connection.protocol.carry_out(store, sync, started)
            except Exception as error:  # whatever it was: if this thread died, the agent would wait for ever
                if store is not None:
                    store.close()
                    store = None
                why = str(error) if isinstance(error, ElastirunError) else f"{type(error).__name__}: {error}"
                answer = SyncFailed(clock.now(), clip(why), isinstance(error, StoreRefused), isinstance(error, UnreadableRound))
            connection.deadline = None
            self._hand_over(connection, answer)
        if store is not None:
            store.close()

    def _hand_over(self, connection: Connection, answer: Answer) -> None:
        connection.answers.put(answer)
        with suppress(BlockingIOError):  # it is readable already
            os.write(self._wake_w, b"\0")
