"""The unix socket of the agent, for processes of its own user on this node. A connection brings one request and gets one answer.

A request is a line: a word, and what belongs to it. ``RoundCheck`` and ``CheckpointMemory`` each answer some words.

All calls happen in the loop's thread; nothing blocks. A client that hangs costs one descriptor until MAX_CLIENTS newer ones have come.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun import clock, linux
from elastirun.agent.host.accepting import Accepting
from elastirun.agent.part import Part
from elastirun.linux import peer_of
from elastirun.threads import start_thread

FOLDER, NAME = "elastirun-agent-", "agent"  # what the folder of the socket begins with, and the socket in it
MAX_CLIENTS = 64  # connections at once; one more closes the oldest
MAX_LINE = 1024  # bytes of a request; a fence token has about 20, a name of an image as well, and one that is too long gets an answer
MAX_PATH = 107  # bytes of a unix socket's address (unix(7))


@dataclass(eq=False)
class LocalClient:
    """One connection. ``asked``: when its request was complete, on ``elastirun.clock``; None until then."""

    connection: socket.socket
    received: bytes = b""
    asked: float | None = None
    fd: int | None = None  # the descriptor that came along; None: none came, or it was taken
    lost_fds: bool = False  # more than one descriptor came along, or none was free for it here

    def take_fd(self) -> int | None:
        """Return the descriptor that came along. The caller closes it."""
        fd, self.fd = self.fd, None
        return fd


class LocalSocket(Part):
    """The agent's end of the socket.

    ``serve`` names who answers a word. Where no socket could be made, ``path`` and ``folder`` are empty and ``trouble`` says why.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._serves: dict[str, Callable[[LocalClient, str], None]] = {}
        self._accepting: Accepting | None = None
        self.clients: list[LocalClient] = []  # the oldest first
        self.folder = self.path = self.trouble = ""
        try:
            self.folder = tempfile.mkdtemp(prefix=FOLDER)  # 0700
            self._accepting = Accepting(_listen(self.folder), selector, self._take, self._make_room)
            self.path = f"{self.folder}/{NAME}"
        except OSError as error:
            self.close()
            what = "workers cannot ask whether their round is current, nor keep checkpoints in memory"
            self.trouble = f"{what}: no socket in a temporary folder: {error.strerror}; set TMPDIR to a folder that can be written"
            self.folder = ""

    def serve(self, word: str, answer: Callable[[LocalClient, str], None]) -> None:
        """Let ``answer(client, rest)`` get each request that begins with ``word``. It calls ``self.answer`` at any time."""
        self._serves[word] = answer

    def serve_no_longer(self, word: str) -> None:
        self._serves.pop(word, None)

    def tick(self, now: float) -> float:
        """Accept connections again when it is time."""
        return math.inf if self._accepting is None else self._accepting.tick(now)

    def answer(self, client: LocalClient, line: str, fd: int | None = None) -> None:
        """Send one line, with a copy of ``fd``, and close the connection."""
        data = line.encode(errors="replace") + b"\n"
        with suppress(OSError):  # a fresh socket's buffer holds it
            socket.send_fds(client.connection, [data], [] if fd is None else [fd])
        self.drop(client)

    def drop(self, client: LocalClient) -> None:
        """Close the connection, and the descriptor that came along."""
        if client in self.clients:
            self.clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()
        if (fd := client.take_fd()) is not None:
            close_aside(fd)

    def close(self) -> None:
        for client in list(self.clients):
            self.drop(client)
        if self._accepting is not None:
            self._accepting.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_room(self) -> bool:
        """Close the oldest connection, if there is one."""
        if not self.clients:
            return False
        self.drop(self.clients[0])
        return True

    def _take(self, connection: socket.socket) -> None:
        if peer_of(connection)[1] != os.geteuid():
            connection.close()
            return
        if len(self.clients) >= MAX_CLIENTS:
            self.drop(self.clients[0])
        connection.setblocking(False)
        client = LocalClient(connection)
        self.clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._read(client))

    def _read(self, client: LocalClient) -> None:
        try:
            data = self._receive(client)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        if not data or client.asked is not None or len(client.received) > MAX_LINE:
            self.drop(client)  # it hung up, or follows another protocol
        elif client.received.endswith(b"\n"):
            client.asked = clock.now()
            word, _, rest = client.received[:-1].decode(errors="replace").partition(" ")
            if word in self._serves:
                self._serves[word](client, rest)
            else:
                self.answer(client, f"no such request: {', '.join(sorted(self._serves))}")

    def _receive(self, client: LocalClient) -> bytes:
        """Return what has come. Keep the first descriptor that came along; the kernel closes those beyond the room for one."""
        # Close-on-exec from the first moment, so that no worker that is started meanwhile gets a copy.
        data, fds, flags = linux.recv_fds(client.connection, MAX_LINE + 1, 1)
        client.lost_fds = client.lost_fds or bool(flags & socket.MSG_CTRUNC)
        for fd in fds:
            if client.fd is None:
                client.fd = fd
            else:
                client.lost_fds = True
                close_aside(fd)
        return data


def close_aside(fd: int) -> None:
    """Close a descriptor that a client has sent, in a thread: to close a file of a network or user file system may take for ever."""
    if start_thread("close", os.close, fd) is None:
        os.close(fd)


def _listen(folder: str) -> socket.socket:
    """Return a socket that listens at ``folder/NAME``, however long the folder's path is."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with linux.Descriptor(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            path = f"{folder}/{NAME}"
            listening.bind(path if len(os.fsencode(path)) <= MAX_PATH else f"/proc/self/fd/{fd}/{NAME}")
            listening.listen(MAX_CLIENTS)
    except OSError:
        listening.close()
        raise
    return listening
