"""A unix socket of the agent for processes of its own user on this node. A connection brings one line and gets one answer.

All calls happen in the loop's thread; nothing blocks. A client that hangs costs one descriptor until MAX_CLIENTS newer ones have come.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun import clock
from elastirun.agent.host.accepting import Accepting
from elastirun.linux import peer_of
from elastirun.threads import start_thread

MAX_CLIENTS = 64  # connections at once; one more closes the oldest
MAX_PATH = 107  # bytes of a unix socket's address (unix(7))


@dataclass(eq=False)
class Client:
    """One connection. ``asked``: when its line was complete, on ``elastirun.clock``; None until then."""

    connection: socket.socket
    received: bytes = b""
    line: str = ""  # without the newline
    asked: float | None = None
    fd: int | None = None  # the descriptor that came along; None: none came, or it was taken
    lost_fds: bool = False  # more than one descriptor came along, or none was free for it here

    def take_fd(self) -> int | None:
        """Return the descriptor that came along. The caller closes it."""
        fd, self.fd = self.fd, None
        return fd


class LocalSocket:
    """The agent's end of the socket ``folder/name``. ``on_line(client)`` is called for each complete line; ``answer`` it at any time.

    ``max_line``: bytes of a line. ``takes_fds``: a descriptor may come along; without this the kernel closes what a client sends.
    ``clients``: the connections, the oldest first. Raises OSError.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        selector: selectors.BaseSelector,
        on_line: Callable[[Client], None],
        max_line: int,
        takes_fds: bool = False,
    ) -> None:
        self._selector, self._on_line, self._max_line = selector, on_line, max_line
        self._room_for_fds = socket.CMSG_LEN(array.array("i").itemsize) if takes_fds else 0  # CMSG_SPACE has room for two
        self.clients: list[Client] = []
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            _bind(listening, folder, name)
            listening.listen(MAX_CLIENTS)
        except OSError:
            listening.close()
            raise
        self.path = f"{folder}/{name}"
        self._accepting = Accepting(listening, selector, self._take, self._make_room)

    def tick(self, now: float) -> float:
        """Accept connections again when it is time. Returns when to be called next, on ``elastirun.clock``; infinity: not by time."""
        return self._accepting.tick(now)

    def answer(self, client: Client, line: str, fd: int | None = None) -> None:
        """Send one line, with a copy of ``fd``, and close the connection."""
        data = line.encode(errors="replace") + b"\n"
        with suppress(OSError):  # a fresh socket's buffer holds it
            if fd is None:
                client.connection.send(data)
            else:
                client.connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        self.drop(client)

    def drop(self, client: Client) -> None:
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
        self._accepting.close()

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
        client = Client(connection)
        self.clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._read(client))

    def _read(self, client: Client) -> None:
        try:
            data = self._receive(client)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        if not data or client.asked is not None or len(client.received) > self._max_line:
            self.drop(client)  # it hung up, or follows another protocol
        elif client.received.endswith(b"\n"):
            client.line = client.received[:-1].decode(errors="replace")
            client.asked = clock.now()
            self._on_line(client)

    def _receive(self, client: Client) -> bytes:
        """Return what has come. Keep the first descriptor that came along; the kernel closes those beyond the room for one."""
        # Close-on-exec from the first moment, so that no worker that is started meanwhile gets a copy.
        data, ancillary, flags, _ = client.connection.recvmsg(self._max_line + 1, self._room_for_fds, socket.MSG_CMSG_CLOEXEC)
        client.lost_fds = client.lost_fds or bool(flags & socket.MSG_CTRUNC)
        for _, kind, payload in ancillary:
            fds = array.array("i")
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
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
