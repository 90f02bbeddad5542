"""A node whose workers plain torchrun starts and stops: torch's rendezvous handler, answered by our machine.

torchrun calls a method now and then, and is busy for as long as its workers take to stop. A thread of our own therefore drives
the session and keeps the node alive in the store. torchrun's thread puts requests into a queue for it and waits for results.
"""

from __future__ import annotations

import atexit
import queue
import selectors
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from elastirun import clock
from elastirun.agent.session import Session
from elastirun.agent.store.store_access import new_row
from elastirun.config import LaunchConfig
from elastirun.errors import ElastirunError
from elastirun.rendezvous.wire import events
from elastirun.rendezvous.wire.actions import Action, Finish, Outcome, Say, Start, Stop
from elastirun.rendezvous.wire.records import ExitRecord, RoundRecord, Status

CLOSE_LIMIT = 5.0  # seconds to wait for the job to be closed once all workers here succeeded; torchrun's own barrier was before
LEAVE_LIMIT = 3.0  # seconds to write that this node has left
LONGEST_WAIT = 60.0  # seconds that the loop sleeps when nothing is due

Reach = Callable[[RoundRecord, int, Callable[[], bool]], Any]
_ERRORS = {Outcome.SUCCEEDED: "Closed", Outcome.FAILED: "Closed", Outcome.TIMEOUT: "Timeout", Outcome.STORE_LOST: "Connection"}


class TorchrunNode:
    """The methods of torch's ``RendezvousHandler``, in which ranks are those of nodes.

    ``reach(record, node_rank, is_on)`` connects to the store of a round and returns what torchrun gets of the round, or the exception to
    raise; it is called in a thread of its own, and ``is_on()`` tells whether the round still runs. ``error(name, why)`` makes torch's
    ``Rendezvous<name>Error``.
    """

    def __init__(self, config: LaunchConfig, reach: Reach, error: Callable[[str, str], Exception]) -> None:
        self._reach, self._error = reach, error
        self._session = Session.of(config, new_row(config), lambda why: self._request(lambda now: self._leave(now, why)))
        self._machine = self._session.machine
        self._round: Start | None = None  # the round that runs
        self._began = 0.0  # when that round started
        self._handed_over = False  # torchrun knows of the round, and may have started workers
        self._requests: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()  # functions to call in our thread, with the time
        self._wake_r, self._wake_w = socket.socketpair()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()  # for torchrun's thread: what ``reach`` returned, or an exception
        self._thread = threading.Thread(target=self._run, name="elastirun", daemon=True)

    # -- in torchrun's thread -------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> Any:
        """Wait for the next round. No worker runs here any more; if the last round still runs, a worker has failed."""
        if self._thread.ident is None:
            self._thread.start()
            atexit.register(self._leave_and_wait)  # after a signal, torchrun does not call ``shutdown``
        self._request(self._rejoin)
        result = self._results.get()
        if isinstance(result, Exception):
            self._results.put(result)  # for the next call
            raise result
        return result

    def num_nodes_waiting(self) -> int:
        """Return 1 when torchrun should stop the workers, for whatever reason."""
        return int(self._round is None)

    def is_closed(self) -> bool:
        return self._machine.record is not None and self._machine.record.closed is not None

    def set_closed(self) -> None:
        self._request(lambda now: self._session.post(events.Close(now)))

    def shutdown(self) -> bool:
        """torchrun ends, by an exception or because all workers here succeeded. After success, wait until the job is closed."""
        if sys.exc_info()[0] is None and self._thread.is_alive():
            self._request(self._succeed)
            self._thread.join(CLOSE_LIMIT)
        return self._leave_and_wait()

    def _leave_and_wait(self) -> bool:
        if self._thread.is_alive():
            self._request(self._leave)
            self._thread.join(LEAVE_LIMIT)
        return not self._thread.is_alive()

    def _request(self, act: Callable[[float], None]) -> None:
        """Have ``act`` called in our thread. May be called in any thread."""
        self._requests.put(act)
        self._wake_w.send(b"\0")

    # -- in our thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # any at all: without a result torchrun would wait for ever
            if not isinstance(error, ElastirunError):
                traceback.print_exc()
            self._fail("", str(error))
        self._session.close()

    def _loop(self) -> None:
        selector = selectors.PollSelector()
        selector.register(self._session, selectors.EVENT_READ)
        selector.register(self._wake_r, selectors.EVENT_READ)
        self._session.begin()
        now = clock.now()
        while not self._machine.finished:
            wait = max(0.0, min(self._session.due, now + LONGEST_WAIT) - now)
            if any(key.fileobj is self._wake_r for key, _ in selector.select(wait)):
                self._wake_r.recv(4096)
            now = clock.now()
            self._session.check_standstill(now, wait)
            while not self._requests.empty():
                self._requests.get()(now)
            for line in self._session.receive():
                _say(line)
            self._session.check_time(now)
            for action in self._session.actions():
                self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Say):
            _say(action.text)
        elif isinstance(action, Start):
            self._start(action, action.record)
        elif isinstance(action, Stop):
            _say(f"round {self._machine.row.round} is over: {action.reason}")
            self._round = None
            if not self._handed_over:
                self._session.post(events.WorkersStopped(clock.now()))
        elif isinstance(action, Finish):
            never_met = action.outcome is Outcome.TIMEOUT and self._session.worker_store is None
            self._fail("Connection" if never_met else _ERRORS.get(action.outcome, ""), action.reason)

    def _start(self, start: Start, record: RoundRecord) -> None:
        count = len(record.members)
        _say(f"round {record.round}: {count} node{'s' * (count > 1)}, here node rank {start.node_rank} ({record.reason})")
        self._round, self._handed_over, self._began = start, False, clock.now()
        if start.node_rank == 0:
            self._session.serve_workers()

        def reach() -> None:
            try:
                result = self._reach(record, start.node_rank, lambda: self._round is start)
            except Exception as error:  # any at all: without a result torchrun would wait for ever
                result = error
            self._request(lambda now: self._hand_over(start, result))

        threading.Thread(target=reach, name="round-store", daemon=True).start()  # nothing can interrupt torch's client

    def _hand_over(self, start: Start, result: Any) -> None:
        if self._round is start:
            self._handed_over = True
            self._results.put(result)

    def _fail(self, error: str, why: str) -> None:
        self._round = None
        self._results.put(self._error(error, why))

    # -- requests of torchrun's thread ------------------------------------------------------------------------------------

    def _rejoin(self, now: float) -> None:
        failures: tuple[ExitRecord, ...] = ()
        if self._round is not None and self._machine.state is Status.RUNNING:
            note = "a worker of that node: torchrun does not say which"
            failures = (ExitRecord(self._machine.row.name, self._round.node_rank, 0, 0, 1, 0, now - self._began, note=note),)
            self._session.post(events.WorkersFailed(now, failures))
        self._session.post(events.WorkersStopped(now, failures))

    def _succeed(self, now: float) -> None:
        self._session.post(events.WorkersSucceeded(now))
        if self._machine.state is not Status.RUNNING:
            self._leave(now)  # the round is over for another reason, and torchrun does not come back

    def _leave(self, now: float, why: str = "its torchrun ended") -> None:
        self._session.post(events.Leave(now, why))
        self._session.post(events.WorkersStopped(now))


def _say(text: str) -> None:
    print(f"elastirun: {text}", file=sys.stderr, flush=True)
