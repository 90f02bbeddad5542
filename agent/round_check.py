"""Answer workers that ask whether their round is still the current one (``elastirun.train.is_current``).

A worker connects to a unix socket in a folder that only this user can enter, sends the fence token of its round and a newline,
and reads one line: ``yes``, ``no``, or ``unknown`` with a reason. The answer comes from a read of the store that *started* after the
question arrived, never from what the agent knew before. Questions that wait at the same time share one read.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun import clock
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.events import Synced, SyncFailed
from elastirun.rendezvous.records import RoundRecord

VARIABLE = "ELASTIRUN_SOCKET"  # names the socket in a worker's environment
MAX_QUESTION = 256  # bytes; a fence token has about 20
MAX_CLIENTS = 64  # connections at once; one more closes the oldest
RETRY = 1.0  # seconds until connections are accepted again after no descriptor was left for one
MAX_PATH = 107  # bytes of a unix socket's address (unix(7))


def still_holds(record: RoundRecord | None, fence: str, me: str) -> bool:
    """Return whether the round with the token ``fence`` is the newest one, and no newer one can form before the node ``me`` has left it.

    A round that is over counts until the next one has formed, so that workers may save a checkpoint while they are stopped. The next
    round does not wait for a member that is lost, so for that member its round no longer counts.
    """
    if record is None or record.fence != fence or record.index(me) is None:
        return False
    return record.broken is None or me not in record.broken.lost


@dataclass(eq=False)
class _Client:
    """One connection. ``asked``: when the question was complete, on ``elastirun.clock``; None until then."""

    connection: socket.socket
    received: bytes = b""
    fence: str = ""
    asked: float | None = None


class RoundCheck:
    """The agent's end of the socket. All calls happen in the loop's thread; nothing blocks.

    ``me`` is this node's id. ``read_store()`` asks for a read of the store soon. Where no socket could be made, ``path`` and ``folder``
    are empty and ``trouble`` says why; training goes on, and ``is_current`` raises.
    """

    def __init__(self, me: str, selector: selectors.BaseSelector, read_store: Callable[[], None]) -> None:
        self._me = me
        self._selector = selector
        self._read_store = read_store
        self._clients: list[_Client] = []  # oldest first
        self._store_answers = True  # the last exchange with the store succeeded
        self._accept_at: float | None = None  # when to accept again, on ``elastirun.clock``; None: the socket is registered
        self.folder = self.path = self.trouble = ""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.folder = tempfile.mkdtemp(prefix="elastirun-agent-")  # 0700
            _bind(self._listening, self.folder, "agent")
            self._listening.listen(MAX_CLIENTS)
        except OSError as error:
            self.close()
            self.trouble = f"workers cannot ask whether their round is current: no socket in a temporary folder: {error.strerror}"
            self.folder = ""
            return
        self.path = f"{self.folder}/agent"
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def settle(self, event: Synced | SyncFailed) -> None:
        """Answer the questions that came before ``event``, the outcome of an exchange with the store, began."""
        self._store_answers = isinstance(event, Synced)
        for client in [client for client in self._clients if client.asked is not None]:
            if isinstance(event, SyncFailed):
                self._answer(client, f"unknown the rendezvous store does not answer: {clip(event.why)}")
            elif event.started >= (client.asked or 0.0):
                self._answer(client, "yes" if still_holds(event.round, client.fence, self._me) else "no")

    def tick(self, now: float) -> float | None:
        """Accept connections again when it is time. Returns when to be called next, on ``elastirun.clock``; None: not by time."""
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        return self._accept_at

    def close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._accept_at = None
        with suppress(KeyError, ValueError):  # not registered, or closed before
            self._selector.unregister(self._listening)
        self._listening.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self, mask: int) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left: the socket would be readable for ever
            if self._clients:
                self._drop(self._clients[0])
            else:
                self._selector.unregister(self._listening)
                self._accept_at = clock.now() + RETRY
            return
        if _uid_of(connection) != os.geteuid():
            connection.close()
            return
        if len(self._clients) >= MAX_CLIENTS:
            self._drop(self._clients[0])
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._read(client))

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(MAX_QUESTION + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        if not data or client.asked is not None or len(client.received) > MAX_QUESTION:
            self._drop(client)  # it hung up, or follows another protocol
        elif client.received.endswith(b"\n"):
            client.fence = client.received[:-1].decode(errors="replace")
            client.asked = clock.now()
            if self._store_answers:  # else the machine retries by itself, with a backoff
                self._read_store()

    def _answer(self, client: _Client, line: str) -> None:
        with suppress(OSError):
            client.connection.send(line.encode(errors="replace") + b"\n")  # a fresh socket's buffer holds it
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()


def _bind(listening: socket.socket, folder: str, name: str) -> None:
    """Bind to ``folder/name``, however long the folder's path is."""
    path = f"{folder}/{name}"
    if len(os.fsencode(path)) <= MAX_PATH:
        listening.bind(path)
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listening.bind(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


def _uid_of(connection: socket.socket) -> int:
    """Return the user at the other end by the kernel's word; -1 when the kernel does not know."""
    try:
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return -1
    return int(uid)
