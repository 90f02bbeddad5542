"""The thread that carries the machine's ``Sync`` requests to the store and hands the answers back as events.

The agent's loop never waits for the store. The thread of an exchange that is abandoned is abandoned with it (a look-up of a name cannot
be interrupted), and a fresh thread takes over.

A beat of a running round writes this node's row and reads some others, which is one round trip. Where the store can be asked without
waiting, the loop itself makes it, so that no thread wakes. A connection, with all that it has, belongs to who makes the exchange under
way: the thread from ``requests.put`` until it hands over the answer, else the loop.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from elastirun import clock
from elastirun.errors import LargeAnswer
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.wire import exchanges
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.events import Changed, SyncFailed
from elastirun.rendezvous.wire.exchanges import CONNECT_LIMIT, Answer, Exchanges
from elastirun.rendezvous.wire.records import Place
from elastirun.rendezvous.wire.sync import PutAndGet, Steps, SyncProtocol
from elastirun.threads import NONE_LEFT, start_thread

HANGING = 4  # abandoned threads that may hang at one store before a new one is delayed; each further one doubles the delay
HANGING_ELSEWHERE = 60  # abandoned threads that may hang at earlier stores; each further one counts as one at the store in question
LONGEST_DELAY = 2.0**7  # of ``connect_limit``: most threads that hang come back, or the host is gone for good


@dataclass(frozen=True)
class Beat:
    """An exchange that the loop makes: its steps wait for the answer, after which ``descriptor`` is readable."""

    sync: Sync
    store: Store
    steps: Steps
    descriptor: int


@dataclass(eq=False)
class StoreConnection(exchanges.Connection):
    """One thread with its connection to the store."""

    thread: threading.Thread | None = None  # None: not started yet
    requests: queue.SimpleQueue[Sync | None] = field(default_factory=queue.SimpleQueue)
    store: Store | None = None  # None: not open
    watched: bool = False  # ``store`` tells of changes
    beat: Beat | None = None  # that the loop has asked the store for
    beats: bool = True  # the loop may ask: the answers are short, as those to an honest node are


class StoreThread(Exchanges[StoreConnection]):
    """Runs exchanges with the stores that ``connect`` opens, each given by its place (``Sync.at``); it is called in the thread."""

    def __init__(
        self, connect: Callable[[Place | None], Store], protocol: SyncProtocol, time_limit: float, connect_limit: float = CONNECT_LIMIT
    ) -> None:
        super().__init__(StoreConnection, protocol, clock.now, time_limit, connect_limit)
        self._connect = connect
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ready = select.epoll()  # readable when the thread has handed over an answer, or the store has answered the loop
        self._ready.register(self._wake_r, select.EPOLLIN)
        self._abandoned: list[tuple[Place | None, threading.Thread]] = []  # each with the store at which it may hang
        self._started = 0.0  # when the last thread was started

    # -- in the agent's loop --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._ready.fileno()

    def answers(self) -> list[Answer]:
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        self._ready.poll(0)  # only this disarms the descriptor of a beat, which would stay readable when its store has hung up
        if self._connection.beat is not None:
            self._take_answer(self._connection, self._connection.beat)
        return super().answers()

    def _execute(self, connection: StoreConnection, sync: Sync) -> None:
        try:
            if self._asks(connection, sync):
                return
        except Exception as error:  # whatever it was, as in the thread
            self._fail(error)
            return
        why = self._start(connection) if connection.thread is None else ""
        if why:
            self._hand_over(connection, SyncFailed(clock.now(), why))
        else:
            connection.requests.put(sync)

    def _asks(self, connection: StoreConnection, sync: Sync) -> bool:
        """Ask the store for ``sync`` from the loop. False: nothing was asked, because the exchange takes more than one round trip."""
        known = connection.store if connection.watched and connection.beats else None
        if known is None or sync.rows is None or sync.fresh or sync.change is not None:
            return False
        steps = connection.protocol.steps(sync, clock.now())
        operation = next(steps)
        if not isinstance(operation, PutAndGet):
            return False
        descriptor = known.ask(operation.key, operation.expected, operation.value, operation.keys)
        if descriptor is None:
            return False
        self._await_answer(connection)
        connection.beat = Beat(sync, known, steps, descriptor)
        self._await_readable(descriptor)
        return True

    def _await_readable(self, descriptor: int) -> None:
        """Let ``fileno`` be readable once when ``descriptor`` is. Later answers there may be for the thread."""
        try:
            self._ready.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        except FileNotFoundError:
            self._ready.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def _take_answer(self, connection: StoreConnection, beat: Beat) -> None:
        """Take what the store has answered so far. Where that tells of something new, the thread makes the exchange again."""
        try:
            answer = beat.store.answer()
            if answer is None:
                self._await_readable(beat.descriptor)
                return
            connection.beat = None
            beat.steps.send(answer)
            connection.requests.put(beat.sync)
        except StopIteration as done:
            connection.deadline = None
            connection.answers.append(replace(done.value, hosting=beat.store.hosting))
        except LargeAnswer:
            self.reconnect()
            self._connection.beats = False
            self._execute(self._connection, beat.sync)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Abandon the connection, and hand over that the exchange has failed."""
        self.reconnect()
        self._hand_over(self._connection, exchanges.failure(error, clock.now()))

    def _abandon(self, connection: StoreConnection) -> None:
        connection.requests.put(None)
        if connection.thread is not None and self._pending:  # an idle thread ends by itself, as soon as it gets a processor
            self._abandoned.append((connection.at, connection.thread))

    def _start(self, connection: StoreConnection) -> str:
        """Start the thread of ``connection``; return why that is not possible now, empty when it was.

        A host that is stopped but not gone holds up every thread that connects to it, and such threads must not pile up.
        """
        self._abandoned = [(at, thread) for at, thread in self._abandoned if thread.is_alive()]
        hanging = sum(at == connection.at for at, _ in self._abandoned)
        hanging += max(0, len(self._abandoned) - hanging - HANGING_ELSEWHERE)
        delay = self._connect_limit * min(2.0 ** (hanging - HANGING), LONGEST_DELAY) if hanging >= HANGING else 0.0
        if clock.now() < self._started + delay:
            return f"{hanging} connections hang; the host of the store accepts them and does not answer"
        if (thread := start_thread("store", self._serve, connection)) is None:  # for a while perhaps
            return NONE_LEFT
        connection.thread, self._started = thread, clock.now()
        return ""

    # -- in the thread --------------------------------------------------------------------------------------------------

    def _serve(self, connection: StoreConnection) -> None:
        while (sync := connection.requests.get()) is not None:
            try:
                if connection.store is None:
                    connection.connected, connection.deadline = False, clock.now() + self._connect_limit
                    connection.store, connection.watched = self._connect(connection.at), False
                if not (connection.watched or sync.look):
                    connection.watched = True
                    connection.store.watch(connection.protocol.round_key, lambda: self._on_changed(connection))
                self._await_answer(connection)
                answered = partial(self._await_answer, connection)
                answer: Answer = connection.protocol.carry_out(connection.store, sync, clock.now(), answered)
            except Exception as error:  # whatever it was: if this thread died, the agent would wait for ever
                if connection.store is not None:
                    connection.store.close()
                    connection.store = None
                answer = exchanges.failure(error, clock.now())
            connection.deadline = None
            self._hand_over(connection, answer)
        if connection.store is not None:
            connection.store.close()

    def _await_answer(self, connection: StoreConnection) -> None:
        """Give the next operation of the exchange its time: on a slow network, each answer is progress."""
        connection.connected, connection.deadline = True, clock.now() + self._time_limit

    def _on_changed(self, connection: StoreConnection) -> None:
        """Hand over that the record has changed. In the watch's thread, which may outlive an exchange that hangs, and is not heard then."""
        if connection is self._connection:
            self._hand_over(connection, Changed(clock.now()))

    def _hand_over(self, connection: StoreConnection, answer: Answer) -> None:
        connection.answers.append(answer)
        with suppress(BlockingIOError):  # it is readable already
            os.write(self._wake_w, b"\0")
