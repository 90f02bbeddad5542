"""Answer workers that ask whether their round is still the current one (``elastirun.train.is_current``), or why they are being stopped.

A worker sends ``current`` and the fence token of its round to the agent's socket (``local_socket.py``). It reads one line:
``yes``, ``no``, or ``unknown`` with a reason. The answer comes from a read of the store that *started* after the question
arrived, never from what the agent knew before. Questions that wait at the same time share one read.

A worker that sends ``stop`` reads why the agent has signalled it: ``planned``, ``failure``, or ``no`` when it has not.
``elastirun status`` sends ``store`` and reads where the job meets.
"""

from __future__ import annotations

from collections.abc import Callable

from elastirun.agent.part import NodeRound, Part
from elastirun.agent.workers.local_socket import LocalClient, LocalSocket
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.events import Synced, SyncFailed
from elastirun.rendezvous.wire.records import RoundRecord

VARIABLE = "ELASTIRUN_SOCKET"  # names the socket in a worker's environment
CURRENT, STOP, STORE = "current", "stop", "store"  # the questions whether the round is, why it stops, and where the job meets


def still_holds(record: RoundRecord | None, fence: str, me: str) -> bool:
    """Return whether the round with the token ``fence`` is the newest one, and no newer one can form before the node ``me`` has left it.

    A round that is over counts until the next one has formed, so that workers may save a checkpoint while they are stopped. The next
    round does not wait for a member that is lost, so for that member its round no longer counts. Nor does it where the job has moved.
    """
    if record is None or record.fence != fence or record.index(me) is None or record.moved is not None:
        return False
    return record.broken is None or me not in record.broken.lost


class RoundCheck(Part):
    """Answers at ``socket``. All calls happen in the loop's thread; nothing blocks.

    ``me`` is this node's id. ``read_store()`` asks for a read of the store soon; ``describe_store()`` says in a line where it is.
    Where there is no socket, training goes on, and ``is_current`` raises.
    """

    def __init__(self, me: str, socket: LocalSocket, read_store: Callable[[], None], describe_store: Callable[[], str]) -> None:
        self._me, self._socket, self._read_store = me, socket, read_store
        self._store_answers = True  # the last exchange with the store succeeded
        self._stopping = "no"  # whether the workers are being stopped: "planned", "failure"
        self._waiting: list[tuple[LocalClient, str]] = []  # who asks about which fence token
        socket.serve(CURRENT, self._asked)
        socket.serve(STOP, lambda client, rest: socket.answer(client, self._stopping))
        socket.serve(STORE, lambda client, rest: socket.answer(client, describe_store()))

    def settle(self, event: Synced | SyncFailed, replaced: Callable[[], bool] = lambda: False) -> None:
        """Answer the questions that came before ``event``, the outcome of an exchange with the store, began.

        ``replaced()``: whether the others may have gone on without this node in another store.
        """
        self._store_answers = isinstance(event, Synced)
        waiting, self._waiting = self._waiting, []
        for client, fence in waiting:
            if client not in self._socket.clients:
                continue  # it has hung up
            if isinstance(event, SyncFailed):
                self._socket.answer(client, f"unknown the rendezvous store does not answer: {clip(event.why)}")
            elif event.started >= (client.asked or 0.0):
                self._socket.answer(client, "yes" if not replaced() and still_holds(event.round, fence, self._me) else "no")
            else:
                self._waiting.append((client, fence))

    def round_starts(self, round: NodeRound) -> None:
        self._stopping = "no"

    def round_stops(self, stop: Stop, grace: float) -> None:
        self._stopping = "planned" if stop.planned else "failure"

    def _asked(self, client: LocalClient, fence: str) -> None:
        self._waiting.append((client, fence))
        if self._store_answers:  # else the machine retries by itself, with a backoff
            self._read_store()
