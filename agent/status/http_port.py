"""A small HTTP/1.1 server in one thread, for requests that need a snapshot of what the agent's loop owns.

It is made for a port that strangers reach: GET and HEAD only, one request per connection, and limits on size, time, number and rate. Of a
request only its first line is read. The thread sleeps while nobody connects, and asks the loop, which owns the state, for a
snapshot only when a request has come.
"""

from __future__ import annotations

import enum
import math
import os
import re
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from elastirun import clock

LOOP_LIMIT = 5.0  # seconds for the loop to answer; it answers in milliseconds, and in two seconds while a log disk hangs
FRESH = 0.1  # seconds for which a snapshot serves further requests, so that no number of them wakes the loop more often
READ_LIMIT = 5.0  # seconds until a request must be complete
WRITE_LIMIT = 5.0  # seconds until its answer must have been taken
MAX_REQUEST = 8192  # bytes of a request with all its headers
MAX_CONNECTIONS = 64  # at once; one more closes the oldest that does not wait for the loop
MAX_RATE = 1000  # connections accepted in a second; at 0.1 ms each they take a tenth of a CPU
RETRY = 1.0  # seconds without accepting, after MAX_RATE or when no descriptor is left
END_LIMIT = 1.0  # seconds for the thread to end; it sleeps in its poll, or imports a module
_REQUEST_LINE = re.compile(rb"([!-~]+) (?:https?://[^/?# ]*)?(/[!-~]*|\*) HTTP/([0-9])\.[0-9]")
_END = re.compile(rb"\r?\n\r?\n")

T = TypeVar("T")


@dataclass(frozen=True)
class Response:
    """An answer to a request."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    def encode(self, head_only: bool) -> bytes:
        """Return the bytes to send. ``head_only``: the request was HEAD."""
        headers = {"Content-Type": self.content_type, "Content-Length": len(self.body), "Cache-Control": "no-store", "Connection": "close"}
        if self.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode() + (b"" if head_only else self.body)


def text(status: HTTPStatus, line: str) -> Response:
    """Return an answer of one line."""
    return Response(status, f"{line}\n".encode(errors="replace"))


@dataclass(frozen=True)
class Request:
    """A request that can be answered with a snapshot."""

    path: str
    head_only: bool


def parse(received: bytes, paths: Mapping[str, object]) -> Request | Response | None:
    """Return the request for one of ``paths``, or the answer that refuses it; None: it is not complete. Never raises."""
    line, newline, _ = received.partition(b"\n")
    if not newline and len(received) < MAX_REQUEST:
        # A TLS handshake, or anything else that does not begin with a method, may never send a newline.
        return None if received[:1].isupper() or not received else text(HTTPStatus.BAD_REQUEST, "this port speaks HTTP/1.1")
    found = _REQUEST_LINE.fullmatch(line.removesuffix(b"\r"))
    if found is None:
        too_long = not newline and received[:1].isupper()
        return text(*((HTTPStatus.REQUEST_URI_TOO_LONG, "too long") if too_long else (HTTPStatus.BAD_REQUEST, "this port speaks HTTP/1.1")))
    if found[3] != b"1":
        return text(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this port speaks HTTP/1.1")
    if _END.search(received) is None:
        too_long = len(received) >= MAX_REQUEST
        return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has {MAX_REQUEST} bytes at most") if too_long else None
    path = found[2].partition(b"?")[0].decode()
    if found[1] not in (b"GET", b"HEAD"):
        return text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
    if path not in paths:
        return text(HTTPStatus.NOT_FOUND, f"here are {', '.join(paths)}")
    return Request(path, found[1] == b"HEAD")


class Snapshots(Generic[T]):
    """Lets the server's thread ask the loop for a snapshot, made by ``take`` in the loop's thread."""

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[], T]) -> None:
        self._selector, self._take = selector, take
        self._question = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable for the loop: it is asked
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable for the server's thread: there is a new snapshot, or the end
        self.newest: tuple[float, T | Exception] | None = None  # when it was taken, on ``elastirun.clock``; an exception: a bug in ``take``
        self.asked_at: float | None = None  # since when an answer is missing; None: none is
        self.closed = False
        selector.register(self._question, selectors.EVENT_READ, self._answer)

    def ask(self, now: float) -> None:
        """Ask for a snapshot, unless an answer is missing already. Called in the server's thread, like ``take_answer``."""
        if self.asked_at is None:
            self.asked_at = now
            os.eventfd_write(self._question, 1)

    def take_answer(self) -> None:
        """Note that ``newest`` has come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
            self.asked_at = None

    def _answer(self, mask: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._question)
        self.newest = (clock.now(), self._try())
        os.eventfd_write(self.fd, 1)

    def _try(self) -> T | Exception:
        try:
            return self._take()
        except Exception as error:  # training must not end because somebody asked how it is
            return error

    def end(self) -> None:
        """Tell the server's thread to end, in the loop's thread."""
        self.closed = True
        self._selector.unregister(self._question)
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptors, when the server's thread has ended."""
        os.close(self._question)
        os.close(self.fd)


class HttpStage(enum.Enum):
    """The step of a connection, named by its wait."""

    READING = "its request"
    WAITING = "a snapshot"
    WRITING = "the client to take the answer"


@dataclass(eq=False)
class HttpConnection:
    """One client."""

    socket: socket.socket
    due: float  # when its phase must be over, on ``elastirun.clock``
    phase: HttpStage = HttpStage.READING
    received: bytes = b""
    request: Request | None = None
    asked_at: float = 0.0  # when the request was complete
    unsent: bytes = b""


class HttpPort(Generic[T]):
    """Serves ``pages`` at ``listening``: each turns a snapshot into an answer. Starts its thread, which owns all connections.

    ``snapshots`` is closed with it. Raises RuntimeError when no thread is left.
    """

    def __init__(self, listening: socket.socket, pages: Mapping[str, Callable[[T], Response]], snapshots: Snapshots[T]) -> None:
        self._listening, self._pages, self._snapshots = listening, pages, snapshots
        self._connections: list[HttpConnection] = []  # the oldest first
        self._accept_at = math.inf  # when to accept again; infinity: the socket is registered
        self._second, self._accepted = 0.0, 0  # when the second of MAX_RATE began, connections accepted since
        listening.setblocking(False)
        self._selector = selectors.PollSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(snapshots.fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close everything. Idempotent."""
        if self._snapshots.closed:
            return
        self._snapshots.end()
        self._thread.join(END_LIMIT)
        if not self._thread.is_alive():
            self._snapshots.close()

    # -- everything below happens in the server's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._snapshots.closed:
            for key, _ in self._selector.select(self._time_to_wait()):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj == self._snapshots.fd:
                    self._snapshots.take_answer()
                    self._answer_waiting()
                else:
                    self._go_on(key.data)
            self._on_time(clock.now())
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listening.close()

    def _time_to_wait(self) -> float | None:
        """Return the seconds until something is due; None: nothing is, so the thread sleeps until a client comes."""
        due = min((self._accept_at, *(connection.due for connection in self._connections)))
        return None if due == math.inf else max(0.0, due - clock.now())

    def _on_time(self, now: float) -> None:
        if now >= self._accept_at:
            self._accept_at = math.inf
            self._selector.register(self._listening, selectors.EVENT_READ)
        for connection in [connection for connection in self._connections if now >= connection.due]:
            if connection.phase is HttpStage.WAITING:
                since = now - (self._snapshots.asked_at or connection.asked_at)
                self._send(connection, text(HTTPStatus.SERVICE_UNAVAILABLE, f"the agent's loop has not answered for {since:.0f} s"))
            elif connection.phase is HttpStage.READING and connection.received:
                self._send(connection, text(HTTPStatus.REQUEST_TIMEOUT, f"the request was not complete after {READ_LIMIT:g} s"))
            else:
                self._drop(connection)

    def _accept(self) -> None:
        """Accept what waits, within the limits."""
        now = clock.now()
        if now >= self._second + 1.0:
            self._second, self._accepted = now, 0
        for _ in range(MAX_CONNECTIONS):
            try:
                client, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left: the socket would be readable for ever
                self._pause(now + RETRY)
                return
            self._add(client, now)
            self._accepted += 1
            if self._accepted >= MAX_RATE:
                self._pause(self._second + RETRY)
                return

    def _add(self, client: socket.socket, now: float) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(min(self._connections, key=lambda other: other.phase is HttpStage.WAITING))
        client.setblocking(False)
        connection = HttpConnection(client, now + READ_LIMIT)
        self._connections.append(connection)
        self._selector.register(client, selectors.EVENT_READ, connection)
        self._go_on(connection)  # its request has mostly come, and then newer connections do not push it out

    def _pause(self, until: float) -> None:
        self._selector.unregister(self._listening)
        self._accept_at = until

    def _go_on(self, connection: HttpConnection) -> None:
        """Read or write what the socket is ready for."""
        if connection not in self._connections:
            return  # dropped since the poll
        try:
            if connection.phase is HttpStage.WRITING:
                self._write(connection)
            else:
                self._read(connection)
        except BlockingIOError:
            pass
        except OSError:  # the client has reset the connection
            self._drop(connection)

    def _read(self, connection: HttpConnection) -> None:
        data = connection.socket.recv(MAX_REQUEST)
        connection.received += data
        found = parse(connection.received, self._pages)
        if isinstance(found, Response):
            self._send(connection, found)
        elif isinstance(found, Request):
            self._ask(connection, found)
        elif not data:
            self._drop(connection)

    def _ask(self, connection: HttpConnection, request: Request) -> None:
        """Let the request wait for a snapshot, which may be there."""
        now = clock.now()
        connection.request, connection.asked_at = request, now
        connection.phase, connection.due = HttpStage.WAITING, now + LOOP_LIMIT
        self._selector.unregister(connection.socket)
        self._answer(connection, request)

    def _answer_waiting(self) -> None:
        for connection in list(self._connections):
            if connection.phase is HttpStage.WAITING and connection.request is not None:
                self._answer(connection, connection.request)

    def _answer(self, connection: HttpConnection, request: Request) -> None:
        """Answer with a snapshot that was taken after the request had come, or ``FRESH`` seconds before at most; else ask for one."""
        newest = self._snapshots.newest
        if newest is not None and newest[0] >= connection.asked_at - FRESH:
            self._send(connection, self._page(request.path, newest[1]))
        else:
            self._snapshots.ask(clock.now())

    def _page(self, path: str, snapshot: T | Exception) -> Response:
        """Return the page, or what bug is in its way: this thread must go on, because an agent that does not answer is ended."""
        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            return self._pages[path](snapshot)
        except Exception as error:
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, f"a bug in elastirun: {type(error).__name__}: {error}")

    def _send(self, connection: HttpConnection, response: Response) -> None:
        head_only = connection.request is not None and connection.request.head_only
        connection.unsent = response.encode(head_only)
        if connection.phase is HttpStage.WAITING:
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
        else:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        connection.phase, connection.due = HttpStage.WRITING, clock.now() + WRITE_LIMIT
        self._go_on(connection)

    def _write(self, connection: HttpConnection) -> None:
        connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        if not connection.unsent:
            self._drop(connection)

    def _drop(self, connection: HttpConnection) -> None:
        self._connections.remove(connection)
        if connection.phase is not HttpStage.WAITING:
            self._selector.unregister(connection.socket)
        connection.socket.close()
