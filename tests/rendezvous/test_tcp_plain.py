"""The connection to a TCPStore without torch: torch's clients see what it replaces, and whatever else listens there does no harm."""

from __future__ import annotations

import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.stores import tcp, tcp_wire
from elastirun.rendezvous.stores.tcp import TcpStore
from tests.rendezvous.test_stores import Server, new_server
from tests.support.listener import Listener
from tests.support.relay import something_else


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = new_server()
    yield made
    made.served = None


@pytest.fixture
def plain(server: Server) -> Iterator[TcpStore]:
    made = TcpStore(server.address, server.port)
    yield made
    made.close()


@pytest.fixture
def key() -> str:
    return f"elastirun/{os.urandom(4).hex()}/round"


def test_it_reads_what_exists_and_replaces_what_it_expects(server: Server, plain: TcpStore, key: str) -> None:
    store = server.connect()
    assert store.put_if(key, None, b"one") == b"one"
    assert plain.get([key, key + "x"]) == {key: b"one"}
    assert plain.put_if(key, b"none", b"two") == b"one", "another value stands there"
    assert plain.put_if(key, b"one", b"two") == b"two"
    big = os.urandom(1 << 20)
    assert plain.put_if(key, b"two", big) == big and store.get([key]) == {key: big}


def test_it_lists_what_torchs_clients_have_written(server: Server, plain: TcpStore, key: str) -> None:
    store, folder = server.connect(), key.removesuffix("round") + "node/"
    written = {f"{folder}{number}": os.urandom(1 + 100 * (number % 50)) for number in range(800)}
    for name, value in written.items():
        store.put_if(name, None, value)
    store.get([folder])  # answered once the server has the last name in its list, which nobody waits for
    assert plain.under(folder) == plain.get(written) == written
    store.delete(f"{folder}1")
    assert plain.under(folder).keys() == written.keys() - {f"{folder}1"} and plain.under(folder + "none/") == {}


def test_requests_for_long_keys_fit_into_the_buffers_of_a_connection(plain: TcpStore, key: str) -> None:
    """Else the old server of torch 2.6, which reads nothing while it writes an answer, and this client would wait for each other."""
    connection, sizes = plain._connection, list[int]()
    send = connection.send
    connection.send = lambda data: (sizes.append(len(data)), send(data))[1]  # type: ignore[method-assign]
    assert plain.get([f"{key}{k}".ljust(4000, "k") for k in range(100)]) == {}
    assert max(sizes) <= tcp_wire.AT_ONCE and len(sizes) < 20


def test_no_request_waits_for_the_acknowledgement_of_one_that_is_not_answered(server: Server, key: str) -> None:
    """The mark of a round is not answered, and the server acknowledges it 40 ms later, unless it has something to send."""
    store, took = server.connect(), []
    store.put_if(key, None, b"0")
    for number in range(41):
        asked = time.monotonic()
        store.put_if(key, b"%d" % number, b"%d" % (number + 1))
        store.get([key])
        took.append(time.monotonic() - asked)
    store.close()
    assert statistics.median(took) < 0.02, "about 0.0004 s"


def test_it_creates_no_key(server: Server, plain: TcpStore, key: str) -> None:
    for expected in (None, b"", b"one"):
        assert plain.put_if(key, expected, b"two") is None
    assert server.connect().get([key]) == {}


def test_it_creates_the_keys_that_it_may_and_replaces_none(server: Server, key: str) -> None:
    with closing(TcpStore(server.address, server.port, creates=(key + "/a", key + "/b"))) as plain:
        assert plain.put_if(key + "/a1", None, b"one") == b"one" and plain.put_if(key + "/c", None, b"one") is None
        assert plain.put_if(key + "/a1", None, b"two") == b"one", "it exists"
        assert plain.put_if(key + "/a2", b"one", b"two") is None, "another value is expected there"
        assert server.connect().get([key + "/a1", key + "/a2", key + "/c"]) == {key + "/a1": b"one"}


def test_who_watches_hears_of_what_it_replaces(server: Server, plain: TcpStore, key: str) -> None:
    store = server.connect()
    store.put_if(key, None, b"one")
    listener = Listener(server.connect(), key)
    assert plain.put_if(key, b"one", b"two") == b"two"
    assert listener.hears(2, patience=15.0)
    listener.store.close()


def test_what_is_no_tcpstore_or_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ANSWER_LIMIT", 0.3)
    with something_else(b"SSH-2.0-OpenSSH_9.2\r\n") as where:
        with pytest.raises(StoreError, match="^what listens at 127.0.0.1:[0-9]+ is no TCPStore$"):
            TcpStore(*where)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        with pytest.raises(StoreError, match="no answer"):
            TcpStore(*mute.getsockname())
        port = mute.getsockname()[1]
    with pytest.raises(StoreError, match="cannot connect"):
        TcpStore("127.0.0.1", port)


def test_a_peer_that_answers_byte_by_byte_has_no_more_time() -> None:
    with dripping() as where:
        began = time.monotonic()
        with pytest.raises(StoreError, match="no answer of the store at .*: timed out"):
            TcpStore(*where, limit=0.5)
        assert time.monotonic() - began < 5.0


def test_large_answers_have_more_time_but_not_without_end(server: Server, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "LARGEST", 50_000)
    server.connect().put_if(key, None, b"x" * 20_000)
    with closing(TcpStore(server.address, server.port, limit=30.0)) as store:
        connection = store._connection
        connection.send(3 * tcp_wire.compare_set(key, b"?", b"?"))
        began = connection._until
        more = [(connection.value(), round((connection._until - began) * tcp_wire.SLOWEST))[1] for _ in range(3)]
    assert more == [20_000, 40_000, 50_000]


@pytest.mark.parametrize("late", [-1.0, 30.0])
def test_what_has_arrived_is_taken_after_the_limit_too(late: float) -> None:
    """This process may have stood still. What has not arrived is not waited for."""
    with connected() as (connection, peer):
        peer.sendall(struct.pack("<Q", 100_000) + b"x" * 100_000)
        connection._until = clock.now() + late
        assert connection.value() == b"x" * 100_000
        peer.sendall(struct.pack("<Q", 100_000) + b"x" * 99_999)
        connection._until = clock.now() - 1.0
        with pytest.raises(TimeoutError):
            connection.value()


def test_answers_that_arrive_together_are_read_at_once() -> None:
    with connected() as (connection, peer):
        peer.sendall(10 * (struct.pack("<Q", 5) + b"value"))
        connection.send(b"")
        assert connection.value() == b"value"
        peer.sendall(b"later")
        assert [connection.value() for _ in range(9)] == [b"value"] * 9
        assert not connection._arrived, "what came later is still in the socket"


@contextmanager
def connected() -> Iterator[tuple[tcp_wire.TcpConnection, socket.socket]]:
    """A connection, and the socket of its peer, in which all that is sent arrives at once."""
    ours, theirs = socket.socketpair()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tcp_wire, "_connect", lambda *_: ours)
        connection = tcp_wire.TcpConnection("peer", 1, 5.0)
    with closing(connection), theirs:
        yield connection, theirs


@contextmanager
def dripping() -> Iterator[tuple[str, int]]:
    """A peer that sends a byte each 0.2 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip() -> None:
            connection = server.accept()[0]
            with connection, suppress(OSError):
                while not ended.wait(0.2):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        yield server.getsockname()
        ended.set()
        thread.join()


@pytest.mark.parametrize("answer", [b"\xff" * 8, b"\x08" + b"\0" * 7 + b"half"])
def test_an_answer_that_makes_no_sense_is_an_error(answer: bytes) -> None:
    with connected() as (connection, peer):
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionError, ValueError)):
            connection.get(["a"])
