"""The HTTP server of the health port: what it answers, what it refuses, and what strangers cost. Real sockets."""

from __future__ import annotations

import errno
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from elastirun import clock
from elastirun.agent.status import http_port
from elastirun.agent.status.http_port import MAX_CONNECTIONS, MAX_REQUEST, HttpPort, Request, Response, Snapshots, parse, text
from tests.support.descriptors import descriptors
from tests.support.until import PATIENCE, until

PATHS = {"/a": None, "/b": None}
ANSWER = text(HTTPStatus.OK, "a")


class Served:
    """A port whose loop is a thread of the test. ``running``: clear it, and the loop stands still."""

    def __init__(self, listening: socket.socket | None = None) -> None:
        self.taken = 0
        self.bug: Exception | None = None
        self.body = b"a\n"
        self.running = threading.Event()
        self.running.set()
        listening = listening or socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        selector = selectors.PollSelector()
        self.snapshots = Snapshots(selector, self._take)
        self.port = HttpPort(listening, {"/a": lambda body: Response(HTTPStatus.OK, body), "/b": self._page}, self.snapshots)
        self._end_read, self._end_write = os.pipe()
        selector.register(self._end_read, selectors.EVENT_READ, None)
        self._selector, self._loop = selector, threading.Thread(target=self._run)
        self._loop.start()

    def _run(self) -> None:
        while True:
            for key, mask in self._selector.select():
                self.running.wait(PATIENCE)
                if key.data is None:
                    return
                key.data(mask)

    def _take(self) -> bytes:
        self.taken += 1
        if self.bug:
            raise self.bug
        return self.body

    def _page(self, body: bytes) -> Response:
        raise KeyError("page")

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE)

    def close(self) -> None:
        self.running.set()
        os.write(self._end_write, b"x")
        self._loop.join()
        self.port.close()
        self._selector.close()
        os.close(self._end_read)
        os.close(self._end_write)


@pytest.fixture
def served() -> Iterator[Served]:
    before = descriptors()
    made = Served()
    yield made
    made.close()
    assert descriptors() == before
    assert "health" not in [thread.name for thread in threading.enumerate()]


def everything(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(65536):
        received += data
    return received


def ask(served: Served, request: bytes) -> tuple[int, bytes]:
    """Return status and body of the answer to a request."""
    with served.connect() as client:
        client.sendall(request)
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head and b"\r\nContent-Length: " in head
    return int(head.split()[1]), body


GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


# -- requests


@pytest.mark.parametrize(
    ("received", "found"),
    [
        (b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n", Request("/a", False)),
        (b"GET /a HTTP/1.0\r\n\r\n", Request("/a", False)),
        (b"GET /a HTTP/1.1\n\n", Request("/a", False)),
        (b"HEAD /b?x=/a HTTP/1.1\r\n\r\n", Request("/b", True)),
        (b"GET http://node0:8080/a HTTP/1.1\r\n\r\n", Request("/a", False)),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * (MAX_REQUEST - 60) + b"\r\n\r\n", Request("/a", False)),
        (b"", None),
        (b"G", None),
        (b"GET /a HTTP/1.1", None),
        (b"GET /a HTTP/1.1\r\n", None),
        (b"GET /a HTTP/1.1\r\nHost: x\r\n", None),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * (MAX_REQUEST - 60), None),
        (b"GET /a\r\n", 400),  # HTTP/0.9
        (b"GET\r\n", 400),
        (b"GET  /a HTTP/1.1\r\n\r\n", 400),
        (b"GET a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a\0 HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xe9 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # a TLS handshake
        (b"\0", 400),
        (b"\r\n", 400),
        (b"SSH-2.0-x\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /a HTTP/3.0\r\n", 505),
        (b"GET /" + b"a" * MAX_REQUEST, 414),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST, 431),
        (b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /a/ HTTP/1.1\r\n\r\n", 404),
        (b"GET //a HTTP/1.1\r\n\r\n", 404),
        (b"GET /%61 HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_a_request_is_understood_or_refused(received: bytes, found: Request | int | None) -> None:
    answer = parse(received, PATHS)
    assert (answer.status.value if isinstance(answer, Response) else answer) == found


def test_a_request_is_answered_and_the_connection_closed(served: Served) -> None:
    assert ask(served, GET) == (200, b"a\n")
    assert ask(served, b"GET /c HTTP/1.1\r\n\r\n") == (404, b"here are /a, /b\n")


def test_head_has_the_length_of_the_body_and_no_body() -> None:
    whole, head = ANSWER.encode(head_only=False), ANSWER.encode(head_only=True)
    assert whole == head + b"a\n" and b"\r\nContent-Length: 2\r\n" in head


def test_head_is_answered_without_a_body(served: Served) -> None:
    assert ask(served, GET.replace(b"GET", b"HEAD")) == (200, b"")


def test_what_is_not_allowed_says_what_is(served: Served) -> None:
    with served.connect() as client:
        client.sendall(b"DELETE /a HTTP/1.1\r\n\r\n")
        assert b"\r\nAllow: GET, HEAD\r\n" in everything(client)


# -- the loop


def test_a_loop_that_stands_still_is_503_and_answers_again_when_it_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "LOOP_LIMIT", 0.1)
    served.running.clear()
    for _ in range(3):
        assert ask(served, GET) == (503, b"the agent's loop has not answered for 0 s\n")
    monkeypatch.setattr(http_port, "LOOP_LIMIT", PATIENCE)
    served.running.set()
    assert ask(served, GET) == (200, b"a\n")


def test_how_long_it_has_stood_still_counts_from_the_first_question(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "LOOP_LIMIT", 0.1)
    served.running.clear()
    ask(served, GET)
    assert served.snapshots.asked_at is not None
    served.snapshots.asked_at -= 100
    assert ask(served, GET)[1].startswith(b"the agent's loop has not answered for 10")


def test_requests_that_wait_together_cost_one_snapshot(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "FRESH", PATIENCE)
    served.running.clear()
    clients = [served.connect() for _ in range(20)]
    for client in clients:
        client.sendall(GET)
    served.running.set()
    for client in clients:
        assert everything(client).endswith(b"a\n")
        client.close()
    assert ask(served, GET) == (200, b"a\n")
    assert served.taken == 1


def test_an_answer_is_no_older_than_the_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "FRESH", 0.0)
    for number in range(1, 20):
        served.body = str(number).encode()
        assert ask(served, GET) == (200, served.body)


def test_nobody_wakes_while_nobody_asks(served: Served) -> None:
    """The thread's poll has no time limit, and the loop was not asked."""
    ask(served, GET)
    thread = next(thread for thread in threading.enumerate() if thread.name == "health")
    until(lambda: not served.port._connections, "the end of all connections", PATIENCE)
    assert served.port._time_to_wait() is None

    def wakes() -> str:
        lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))

    def sleeps_for_half_a_second() -> bool:
        before = wakes()
        select.select([], [], [], 0.5)
        return wakes() == before

    taken = served.taken
    assert any(sleeps_for_half_a_second() for _ in range(10))  # it may not have been back in its poll at the beginning
    assert served.taken == taken


@pytest.mark.parametrize("path", [b"/a", b"/b"])
def test_a_bug_of_ours_is_500_and_the_port_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    monkeypatch.setattr(http_port, "FRESH", 0.0)
    served.bug = ZeroDivisionError("snap") if path == b"/a" else None
    status, body = ask(served, GET.replace(b"/a", path))
    assert status == 500 and body.startswith(b"a bug in elastirun: ZeroDivisionError" if path == b"/a" else b"a bug in elastirun: KeyError")
    served.bug = None
    assert ask(served, GET) == (200, b"a\n")


# -- strangers


def test_a_client_that_sends_half_of_it_is_told_so_and_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "READ_LIMIT", 0.3)
    with served.connect() as silent, served.connect() as slow:
        slow.sendall(b"GET /a HT")
        assert ask(served, GET) == (200, b"a\n")
        assert everything(slow).startswith(b"HTTP/1.1 408 ")
        assert everything(silent) == b""


def test_a_request_may_come_byte_by_byte(served: Served) -> None:
    with served.connect() as client:
        for byte in GET:
            client.sendall(bytes([byte]))
        assert everything(client).endswith(b"a\n")


def test_who_sends_bytes_for_ever_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then does not begin the limit anew."""
    monkeypatch.setattr(http_port, "READ_LIMIT", 0.3)
    with served.connect() as client:
        client.sendall(b"GET /a HTTP/1.1\r\n")
        answered = False
        while not answered:
            client.sendall(b"X: y\r\n" * 10)
            answered = bool(select.select([client], [], [], 0.02)[0])
        assert client.recv(12) == b"HTTP/1.1 408"


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /a HTTP/1.1\r\n" + b"X: " + b"x" * (MAX_REQUEST - 20), 431),
        (b"GET /" + b"a" * (MAX_REQUEST - 5), 414),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        (b"GET /a\r\n", 400),
        (b"EHLO x\r\n", 400),
        (b"\n" * 100, 400),
    ],
)
def test_what_is_no_request_gets_an_answer(served: Served, sent: bytes, status: int) -> None:
    with served.connect() as client:
        client.sendall(sent)
        assert everything(client).startswith(f"HTTP/1.1 {status} ".encode())


def test_who_goes_on_sending_is_cut_off(served: Served) -> None:
    with served.connect() as client, pytest.raises((BrokenPipeError, ConnectionResetError)):
        client.sendall(b"GET /a HTTP/1.1\r\nX: " + b"x" * 100_000_000)
    assert ask(served, GET) == (200, b"a\n")


def test_a_client_that_has_closed_its_side_gets_its_answer(served: Served) -> None:
    with served.connect() as client:
        client.sendall(GET)
        client.shutdown(socket.SHUT_WR)
        assert everything(client).endswith(b"a\n")


@pytest.mark.parametrize("sent", [b"", b"GET /a HTTP/1.1\r\n"])
def test_a_client_that_closes_its_side_too_early_is_dropped(served: Served, sent: bytes) -> None:
    with served.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /a", GET])
def test_a_client_that_resets_its_connection_costs_nothing(served: Served, sent: bytes) -> None:
    for _ in range(20):
        client = served.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(sent)
        client.close()
    assert ask(served, GET) == (200, b"a\n")


def test_a_client_that_does_not_read_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "WRITE_LIMIT", 0.2)
    served.body = b"x" * 20_000_000  # more than the buffers of a connection hold
    with served.connect() as client:
        client.sendall(GET)
        until(lambda: len(served.port._connections) == 1, "a connection", PATIENCE)
        until(lambda: not served.port._connections, "the end of all connections", PATIENCE)
        assert 0 < len(everything(client)) < 20_000_000, "the rest was not sent"
        served.body = b"a\n"


def test_who_does_not_hang_up_costs_nothing(served: Served) -> None:
    with served.connect() as client:
        client.sendall(GET)
        assert everything(client).endswith(b"a\n")
        until(lambda: not served.port._connections, "the end of all connections", PATIENCE)


def test_many_idle_connections_leave_room_for_one_that_asks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_RATE", 10**6)
    monkeypatch.setattr(http_port, "READ_LIMIT", PATIENCE)
    clients = []
    try:
        for number in range(300):
            clients.append(served.connect())
            if number % 100 == 0:
                assert ask(served, GET) == (200, b"a\n")
        assert ask(served, GET) == (200, b"a\n")
        assert len(served.port._connections) <= MAX_CONNECTIONS
    finally:
        for client in clients:
            client.close()


def test_a_request_that_waits_for_the_loop_outlives_newer_idle_connections(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_RATE", 10**6)
    served.running.clear()
    with served.connect() as client:
        client.sendall(GET)
        until(lambda: served.snapshots.asked_at is not None, "a question to the loop", PATIENCE)
        idle = [served.connect() for _ in range(2 * MAX_CONNECTIONS)]
        served.running.set()
        assert everything(client).endswith(b"a\n")
        for other in idle:
            other.close()


def test_the_rate_of_connections_is_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_RATE", 5)
    began = clock.now()
    for _ in range(16):
        assert ask(served, GET)[0] == 200
    assert clock.now() - began > 2.0, "16 connections at 5 a second"


class Exhausted(socket.socket):
    """A listening socket of a process without a free descriptor."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        type(self).tries += 1
        if self.tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_free_descriptor_it_tries_again_later_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "RETRY", 0.1)
    monkeypatch.setattr(Exhausted, "tries", 0)
    listening = Exhausted()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    served = Served(listening)
    try:
        began = clock.now()
        assert ask(served, GET) == (200, b"a\n")
        assert Exhausted.tries in (4, 5) and clock.now() - began > 0.25
    finally:
        served.close()


def test_the_port_is_free_when_it_was_closed(served: Served) -> None:
    idle = served.connect()
    served.port.close()
    with pytest.raises(ConnectionRefusedError):
        served.connect()
    idle.close()
