"""The side of a node that is measured: it listens where the job will listen, and answers the nodes of the same check.

A client sends the secret of the check and gets this node's id. Then each byte asks for something: ``p`` for the time of day, ``l`` for
the count of packets that TCP has sent again, ``b`` for an acknowledgement of the BULK bytes that follow. Strangers get nothing.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from contextlib import suppress

from elastirun.threads import start_thread

BULK = 2 << 20  # bytes that are sent to measure how many arrive each second
PATIENCE = 10.0  # seconds for each request of a client, and for this node to learn the secret
MOST_CLIENTS = 128  # connections at once; those of strangers count, too
_RETRANSMITTED = 100  # the place of ``tcpi_total_retrans`` in the struct tcp_info of Linux


def sent_again(connection: socket.socket) -> int:
    """Return how many packets of the connection TCP has sent again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED + 4)
    return int.from_bytes(info[_RETRANSMITTED:], "little")


class ProbeServer:
    """Answers on ``listening``, sockets that it then owns. Nothing is raised."""

    def __init__(self, id: str, listening: list[socket.socket]) -> None:
        self._id = id
        self._listening = listening
        self._secret = ""
        self._known = threading.Event()
        self._clients = threading.Semaphore(MOST_CLIENTS)
        for each in listening:
            start_thread("check accepts", self._accept, each)

    def answer(self, secret: str) -> None:
        """Answer clients that know ``secret``, from now on."""
        self._secret = secret
        self._known.set()

    def close(self) -> None:
        """End the threads that accept connections, and free the ports."""
        for each in self._listening:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = listening.accept()
                if not self._clients.acquire(blocking=False) or start_thread("check answers", self._serve, connection) is None:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                connection.settimeout(PATIENCE)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(connection)
        finally:
            self._clients.release()

    def _answer(self, connection: socket.socket) -> None:
        self._known.wait(PATIENCE)
        given = receive(connection, len(self._secret) or 1)
        if not self._secret or not hmac.compare_digest(given, self._secret.encode()):
            return
        name = self._id.encode()
        connection.sendall(struct.pack("<H", len(name)) + name)
        while request := connection.recv(1):
            if request == b"p":
                connection.sendall(struct.pack("<d", time.time()))
            elif request == b"l":
                connection.sendall(struct.pack("<I", sent_again(connection)))
            elif request == b"b":
                receive(connection, BULK)
                connection.sendall(b"b")


def receive(connection: socket.socket, length: int) -> bytes:
    """Return exactly ``length`` bytes. Raises OSError when the other side hangs up before."""
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        if not (count := connection.recv_into(view[got:])):
            raise ConnectionError("hung up")
        got += count
    return bytes(data)
