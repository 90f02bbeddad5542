"""A node whose workers plain torchrun starts and stops: what torch asks of a rendezvous handler, answered by our machine.

torchrun calls when it likes, and is away for as long as its workers take to stop. So a thread owns the machine and keeps the
node alive in the store; torchrun's own thread gives it functions to call, and waits for what it has found.
"""

from __future__ import annotations

import atexit
import queue
import selectors
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from elastirun import clock
from elastirun.agent.store_access import Place, introduction, rules
from elastirun.agent.worker_store import SharedStore, WorkerStore
from elastirun.config import LaunchConfig
from elastirun.errors import ElastirunError
from elastirun.rendezvous import events
from elastirun.rendezvous.actions import Action, Outcome, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import Codec
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.records import ExitRecord, RoundRecord, Status
from elastirun.rendezvous.store_thread import Driver
from elastirun.rendezvous.sync import Exchange

CLOSE_LIMIT = 5.0  # seconds until the job is closed once all workers here succeeded; torchrun's own barrier was before
LEAVE_LIMIT = 3.0  # seconds to say goodbye
STANDSTILL = 2.0  # seconds later than due, after which the loop says that it did not run
LONGEST_WAIT = 60.0  # seconds

Reach = Callable[[RoundRecord, int, Callable[[], bool]], Any]
_ERRORS = {Outcome.SUCCEEDED: "Closed", Outcome.FAILED: "Closed", Outcome.TIMEOUT: "Timeout", Outcome.STORE_LOST: "Connection"}


class TorchrunNode:
    """The public methods are those of torch's ``RendezvousHandler``; ranks are those of nodes.

    ``reach`` gives what torchrun gets of a round, or the exception to raise, once its store is reached; called in a thread of its own
    with the record, this node's rank, and a function that tells if the round is on. ``error`` makes torch's ``Rendezvous<name>Error``.
    """

    def __init__(self, config: LaunchConfig, reach: Reach, error: Callable[[str, str], Exception]) -> None:
        self._reach, self._error = reach, error
        self._place = Place(config)
        self._machine = Machine(rules(config), introduction(config), clock.now())
        self._events: deque[events.Event] = deque()
        self._worker_store: WorkerStore | SharedStore | None = None
        self._round: Start | None = None  # the one that is on
        self._began = 0.0  # when it did
        self._known = False  # torchrun knows of it, and may have workers
        self._asked: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()  # to be called with the time, in our thread
        self._cord, self._bell = socket.socketpair()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a round, or why there is none
        self._thread = threading.Thread(target=self._run, name="elastirun", daemon=True)

    # -- in torchrun's thread -------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> Any:
        """Wait for the next round. No worker runs here any more; if the last round is still on, one has failed."""
        if self._thread.ident is None:
            self._thread.start()
            atexit.register(self._leave)  # after a signal, torchrun does not call ``shutdown``
        self._ask(self._rejoin)
        found = self._found.get()
        if isinstance(found, Exception):
            self._found.put(found)  # for whoever asks again
            raise found
        return found

    def num_nodes_waiting(self) -> int:
        """1 when the workers are to be stopped, for whatever reason."""
        return int(self._round is None)

    def is_closed(self) -> bool:
        return self._machine.record is not None and self._machine.record.closed is not None

    def set_closed(self) -> None:
        self._ask(lambda now: self._events.append(events.Close(now)))

    def shutdown(self) -> bool:
        """torchrun ends: by an exception, or because all workers here succeeded; then those of the others are waited for."""
        if sys.exc_info()[0] is None and self._thread.is_alive():
            self._ask(self._succeed)
            self._thread.join(CLOSE_LIMIT)
        return self._leave()

    def _leave(self) -> bool:
        if self._thread.is_alive():
            self._ask(self._go)
            self._thread.join(LEAVE_LIMIT)
        return not self._thread.is_alive()

    def _ask(self, act: Callable[[float], None]) -> None:
        self._asked.put(act)
        self._cord.send(b"\0")

    # -- in our thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        exchange = Exchange(self._place.prefix, self._machine.row.id, Codec(None), clock.now)
        self._driver = Driver(self._place.connect, exchange, self._place.exchange_limit)
        try:
            self._loop()
        except Exception as error:  # whatever it was: torchrun would wait for ever
            if not isinstance(error, ElastirunError):
                traceback.print_exc()
            self._end("", str(error))
        self._driver.close()

    def _loop(self) -> None:
        selector = selectors.PollSelector()
        selector.register(self._driver, selectors.EVENT_READ)
        selector.register(self._bell, selectors.EVENT_READ)
        looked = clock.now()
        while not self._machine.finished:
            wait = max(0.0, min(self._machine.wake, self._driver.deadline or looked + LONGEST_WAIT) - looked)
            if any(key.fileobj is self._bell for key, _ in selector.select(wait)):
                self._bell.recv(4096)
            overdue, looked = clock.now() - looked - wait, clock.now()
            if overdue > STANDSTILL:
                self._events.append(events.StoodStill(looked, overdue, workers_ended=False))
            while not self._asked.empty():
                self._asked.get()(looked)
            self._events += [*self._driver.answers(), *self._driver.give_up(looked), events.Tick(looked)]
            while self._events:
                self._step(self._events.popleft())
            while self._place.notices:
                _say(self._place.notices.popleft())

    def _step(self, event: events.Event) -> None:
        if isinstance(event, events.Synced) and self._worker_store is None:  # the store was reached, so our address is known
            self._worker_store = self._place.worker_store(lambda why: self._ask(lambda now: self._go(now, why)))
            self._step(events.Reachable(event.now, self._place.here.address, self._worker_store.port))
        for action in self._machine.step(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Sync):
            self._driver.submit(action)
        elif isinstance(action, Reconnect):
            self._driver.reconnect()
        elif isinstance(action, Say):
            _say(action.text)
        elif isinstance(action, Start):
            self._start(action, action.record)
        elif isinstance(action, Stop):
            _say(f"round {self._machine.row.round} is over: {action.reason}")
            self._round = None
            if not self._known:
                self._events.append(events.WorkersStopped(clock.now()))
        else:
            never_met = action.outcome is Outcome.TIMEOUT and self._worker_store is None
            self._end("Connection" if never_met else _ERRORS.get(action.outcome, ""), action.reason)

    def _start(self, start: Start, record: RoundRecord) -> None:
        count = len(record.members)
        _say(f"round {record.round}: {count} node{'s' * (count > 1)}, here node rank {start.node_rank} ({record.reason})")
        self._round, self._known, self._began = start, False, clock.now()
        if start.node_rank == 0 and self._worker_store is not None:
            self._worker_store.serve()
            self._events.append(events.Reachable(self._began, self._machine.row.address, self._worker_store.port))

        def reach() -> None:
            try:
                found = self._reach(record, start.node_rank, lambda: self._round is start)
            except Exception as error:  # whatever it was: torchrun would wait for ever
                found = error
            self._ask(lambda now: self._hand_over(start, found))

        threading.Thread(target=reach, name="round-store", daemon=True).start()  # nothing can interrupt torch's client

    def _hand_over(self, start: Start, found: Any) -> None:
        if self._round is start:
            self._known = True
            self._found.put(found)

    def _end(self, error: str, why: str) -> None:
        self._round = None
        self._found.put(self._error(error, why))

    # what torchrun's thread asks for

    def _rejoin(self, now: float) -> None:
        failures: tuple[ExitRecord, ...] = ()
        if self._round is not None and self._machine.state is Status.RUNNING:
            note = "a worker of that node: torchrun does not say which"
            failures = (ExitRecord(self._machine.row.name, self._round.node_rank, 0, 0, 1, 0, now - self._began, note=note),)
            self._events.append(events.WorkersFailed(now, failures))
        self._events.append(events.WorkersStopped(now, failures))

    def _succeed(self, now: float) -> None:
        self._events.append(events.WorkersSucceeded(now))
        if self._machine.state is not Status.RUNNING:
            self._go(now)  # the round is over for another reason, and torchrun does not come back

    def _go(self, now: float, why: str = "its torchrun ended") -> None:
        self._events += [events.Leave(now, why), events.WorkersStopped(now)]


def _say(text: str) -> None:
    print(f"elastirun: {text}", file=sys.stderr, flush=True)
