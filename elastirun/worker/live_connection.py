"""The worker's end of its connection to the agent in live mode (docs/elastic.md). Needs no torch.

A thread of its own listens, so an order to park is heard while the main thread waits for a peer that is gone.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from elastirun.errors import TrainError
from elastirun.linux import peer_of
from elastirun.worker.live_messages import MAX_MESSAGE, VARIABLE, AllTrain, Hello, Lost, Message, Park, Parked, Resume, decode, encode

log = logging.getLogger("elastirun.live")

REDUCTION = "a reduction failed"  # a worker does not know more of what happened to its peers
ROUND = "ELASTIRUN_ROUND"  # set by the agent: the number of the round
CUT_AGAIN = 0.02  # seconds between two cuts while the main thread is still inside the round: it may open connections after the first
ANSWER = 30.0  # seconds from the word that peers are lost to the agent's order; the agent may have lost its store meanwhile
ENDED = 143  # exit code of a worker whose agent wants no more rounds of it: that of SIGTERM


class LiveConnection:
    """Tells the agent that this worker can be parked, and carries out its orders.

    ``cut`` is called in the thread, again and again, while the agent wants this worker to leave its round and the main thread has not:
    it must make the main thread's waits for peers fail. Set it before ``enter``. Raises OSError if the agent cannot be reached.
    """

    def __init__(self) -> None:
        self.cut: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._round = int(os.environ.get(ROUND, "0"))  # the newest one that the agent wants this worker in
        self._env: Mapping[str, str] = {}  # its variables; empty: those that the process was started with
        self._asked = 0  # the round that the agent wants this worker to leave; 0: none
        self._inside = False  # the main thread takes part in a round, so only it can promise to have left
        self._state = 0, 0  # finished steps, and the round in which the state was agreed upon: as of the last ``leave``
        self._told_at = -1  # finished steps when the agent was last told that peers are lost
        self._closed = False  # the agent has ended, or wants no more of this worker
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect("\0" + os.environ[VARIABLE])
            if peer_of(self._socket)[1] != os.geteuid():  # the name is free when the agent has ended, and anybody may take it
                raise OSError(errno.EPERM, "another user listens at the socket of this worker's agent")
            self._send(Hello())
        except OSError:
            self._socket.close()
            raise
        self.thread = threading.Thread(target=self._listen, name="elastirun live", daemon=True)
        self.thread.start()

    @property
    def asked(self) -> bool:
        """Whether the agent wants this worker to leave its round."""
        return bool(self._asked) or self._closed

    def enter(self, after: int, limit: float) -> tuple[int, Mapping[str, str]]:
        """Wait for a round with a number above ``after``, and take part in it. Return its number and its variables.

        Ends the process if the agent wants no more of it. The agent is told that peers are lost if it starts no new round for ``limit``
        seconds, in which it has not asked this worker to leave the last one either. Raises TrainError if that changes nothing.
        """
        with self._changed:
            while self._asked or self._round <= after:
                if self._closed:
                    raise SystemExit(ENDED)
                if self._changed.wait(None if self._asked else limit) or self._asked:
                    continue
                if not self._report_loss(self._state[0], REDUCTION):
                    raise TrainError(f"{REDUCTION}, and the agent started no new round within {limit + ANSWER:g} s")
            self._inside = True
            return self._round, self._env

    def leave(self, step: int, settled: int) -> None:
        """Promise that no step of the round completes or publishes here any more. ``step``: finished steps.

        ``settled``: the round in which the ranks agreed upon this worker's state; 0: it has none.
        """
        with self._changed:
            self._inside, self._state = False, (step, settled)
            self._promise()
            self._changed.notify_all()

    def gathered(self) -> None:
        """Tell the agent that all workers of the round train together."""
        with suppress(OSError):  # the agent has ended
            self._send(AllTrain(self._round))

    def wait_until_asked(self, limit: float, step: int, why: str) -> bool:
        """Return whether the agent asks this worker to leave its round. After ``limit`` seconds this tells the agent that peers are lost.

        ``step``: finished steps; ``why``: the error, for people.
        """
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.asked, limit)) or self._report_loss(step, why)

    def _report_loss(self, step: int, why: str) -> bool:
        """Tell the agent that peers are lost. Return whether it asks this worker to leave its round then, or has started the next one.

        A worker that has made no step since it told so does not tell it again: the cause may be its own, and it has to end with the error.
        """
        if step == self._told_at:
            return False
        self._told_at, lost = step, self._round
        log.warning("%s; no agent has seen a failure, so peers are taken for lost, and another round is asked for", why)
        with suppress(OSError):  # the agent has ended
            self._send(Lost(lost))
        return bool(self._changed.wait_for(lambda: self.asked or self._round > lost, ANSWER))

    def _listen(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_MESSAGE + 1)
            except OSError:
                data = b""
            message = decode(data) if data else None
            if message is None:  # the agent has hung up, or follows another protocol
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                self._cut_until_left()
                self._socket.close()
                return
            self._take(message)

    def _take(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, Park) and message.round == self._round:
                self._asked = message.round
                self._promise()
            elif isinstance(message, Resume) and message.round > self._round:
                self._round, self._env, self._asked = message.round, message.env, 0
            self._changed.notify_all()
        self._cut_until_left()

    def _promise(self) -> None:
        """Answer the agent's order, if the main thread takes no part in a round."""
        if self._asked and not self._inside:
            with suppress(OSError):  # the agent has ended
                self._send(Parked(self._asked, *self._state))

    def _cut_until_left(self) -> None:
        while self._inside and self.asked and os.getpid() == self._pid:
            self.cut()
            with self._changed:
                self._changed.wait_for(lambda: not self._inside, CUT_AGAIN)

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))
