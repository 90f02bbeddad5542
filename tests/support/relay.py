"""Stand-ins for a server: a relay whose connections go silent, as behind a firewall that has dropped their state, and a foreign server."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from tests.support.cluster import PATIENCE


class Relay:
    """A relay in front of a server, which listens at ``endpoint``. ``silence`` drops the data of present connections, not of new ones.

    ``delay``: seconds for which each direction holds back what it has read, as a long line does: half of a round-trip time.
    """

    def __init__(self, target: str, delay: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self._delay = delay
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = 0
        self._silent = [threading.Event()]  # the event of the present connections; set: they are silent
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def silence(self) -> None:
        self._silent[-1].set()
        self._silent.append(threading.Event())

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # the server does not listen yet
                client.close()
                continue
            self.connections += 1
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                for thread in (
                    threading.Thread(target=self._read, args=(source, line)),
                    threading.Thread(target=self._write, args=(line, sink, self._silent[-1])),
                ):
                    self._threads.append(thread)
                    thread.start()

    def _read(self, source: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        """Put what ``source`` sends into ``line``, each piece with the time at which it is due; its end is an empty piece."""
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""  # the other direction has closed the connection
            line.put((time.monotonic() + self._delay, data))

    def _write(self, line: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):  # the other direction has closed the connection
            while True:
                due, data = line.get()
                time.sleep(max(0.0, due - time.monotonic()))  # this is the delay itself
                if not data:
                    break
                if not silent.is_set():
                    sink.sendall(data)
            if not silent.is_set():
                sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the connection has ended already
        for thread in self._threads:
            thread.join()
        for one in (self._listening, *self._sockets):
            one.close()


@contextmanager
def something_else(reply: bytes) -> Iterator[tuple[str, int]]:
    """A foreign server. It answers the first bytes of each client with ``reply`` and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
