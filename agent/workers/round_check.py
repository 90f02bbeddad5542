"""Answer workers that ask whether their round is still the current one (``elastirun.train.is_current``), or why they are being stopped.

A worker connects to a unix socket in a folder that only this user can enter, sends the fence token of its round and a newline,
and reads one line: ``yes``, ``no``, or ``unknown`` with a reason. The answer comes from a read of the store that *started* after the
question arrived, never from what the agent knew before. Questions that wait at the same time share one read.

A worker that sends ``stop`` in place of a token reads why the agent has signalled it: ``planned``, ``failure``, or ``no`` when it has not.
``elastirun status`` sends ``store`` and reads where the job meets.
"""

from __future__ import annotations

import math
import selectors
import shutil
import tempfile
from collections.abc import Callable

from elastirun.agent.part import NodeRound, Part
from elastirun.agent.workers.local_socket import Client, LocalSocket
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.events import Synced, SyncFailed
from elastirun.rendezvous.wire.records import RoundRecord

VARIABLE = "ELASTIRUN_SOCKET"  # names the socket in a worker's environment
FOLDER, NAME = "elastirun-agent-", "agent"  # what the folder of the socket begins with, and the socket in it
STOP, STORE = "stop", "store"  # the questions why, and where the job meets; no fence token is like that
MAX_QUESTION = 256  # bytes; a fence token has about 20


def still_holds(record: RoundRecord | None, fence: str, me: str) -> bool:
    """Return whether the round with the token ``fence`` is the newest one, and no newer one can form before the node ``me`` has left it.

    A round that is over counts until the next one has formed, so that workers may save a checkpoint while they are stopped. The next
    round does not wait for a member that is lost, so for that member its round no longer counts. Nor does it where the job has moved.
    """
    if record is None or record.fence != fence or record.index(me) is None or record.moved is not None:
        return False
    return record.broken is None or me not in record.broken.lost


class RoundCheck(Part):
    """The agent's end of the socket. All calls happen in the loop's thread; nothing blocks.

    ``me`` is this node's id. ``read_store()`` asks for a read of the store soon; ``describe_store()`` says in a line where it is. Where no
    socket could be made, ``path`` and ``folder`` are empty and ``trouble`` says why; training goes on, and ``is_current`` raises.
    """

    def __init__(
        self, me: str, selector: selectors.BaseSelector, read_store: Callable[[], None], describe_store: Callable[[], str]
    ) -> None:
        self._me = me
        self._read_store = read_store
        self._describe_store = describe_store
        self._store_answers = True  # the last exchange with the store succeeded
        self._socket: LocalSocket | None = None
        self._stopping = "no"  # whether the workers are being stopped: "planned", "failure"
        self.folder = self.path = self.trouble = ""
        try:
            self.folder = tempfile.mkdtemp(prefix=FOLDER)  # 0700
            self._socket = LocalSocket(self.folder, NAME, selector, self._asked, MAX_QUESTION)
            self.path = self._socket.path
        except OSError as error:
            self.close()
            self.trouble = f"workers cannot ask whether their round is current: no socket in a temporary folder: {error.strerror}"
            self.folder = ""

    def settle(self, event: Synced | SyncFailed, replaced: Callable[[], bool] = lambda: False) -> None:
        """Answer the questions that came before ``event``, the outcome of an exchange with the store, began.

        ``replaced()``: whether the others may have gone on without this node in another store.
        """
        self._store_answers = isinstance(event, Synced)
        if self._socket is None:
            return
        for client in [client for client in self._socket.clients if client.asked is not None]:
            if isinstance(event, SyncFailed):
                self._socket.answer(client, f"unknown the rendezvous store does not answer: {clip(event.why)}")
            elif event.started >= (client.asked or 0.0):
                self._socket.answer(client, "yes" if not replaced() and still_holds(event.round, client.line, self._me) else "no")

    def round_starts(self, round: NodeRound) -> None:
        self._stopping = "no"

    def round_stops(self, stop: Stop, grace: float) -> None:
        self._stopping = "planned" if stop.planned else "failure"

    def tick(self, now: float) -> float:
        return math.inf if self._socket is None else self._socket.tick(now)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _asked(self, client: Client) -> None:
        if client.line in (STOP, STORE):
            assert self._socket is not None
            self._socket.answer(client, self._stopping if client.line == STOP else self._describe_store())
        elif self._store_answers:  # else the machine retries by itself, with a backoff
            self._read_store()
