"""The watch at a TCPStore: whatever happens to its connection it hurts nobody, misses no change in the end, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun.rendezvous.stores import tcp, tcp_wire
from elastirun.rendezvous.stores.tcp import KEPT_MARKS, TcpStore, _Watch, mark
from tests.rendezvous.test_stores import Server, new_server
from tests.support.cluster import PATIENCE
from tests.support.descriptors import descriptors
from tests.support.listener import Listener, count_up
from tests.support.relay import Relay, something_else
from tests.support.until import until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = new_server()
    yield made
    made.served = None


@pytest.fixture
def key() -> str:
    return f"elastirun/{os.urandom(4).hex()}/round"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the times of the product, so that no test waits for them."""
    monkeypatch.setattr(tcp, "RECHECK", 0.2)
    monkeypatch.setattr(tcp, "WATCH_LIMIT", 1.0)
    monkeypatch.setattr(tcp, "LONGEST_PAUSE", 0.2)


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "store watch"]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in threads)


class Mute:
    """Accepts connections, remembers them, and says nothing."""

    def __init__(self, *, accepts: bool = True) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.where = self.listening.getsockname()[:2]
        self.accepted: list[socket.socket] = []
        self.came = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._accept)
        if accepts:
            self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self.accepted.append(self.listening.accept()[0])
            except OSError:
                return
            self.came.release()

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *error: object) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (*self.accepted, self.listening):
            one.close()


def test_it_ends_with_its_connection_at_once_and_leaves_no_descriptor(server: Server, key: str) -> None:
    gc.collect()
    before, running = descriptors(), watches()
    listener = Listener(server.connect(), key)
    mine = [thread for thread in watches() if thread not in running]
    assert len(mine) == 1
    listener.store.close()
    listener.store.close()
    assert ended(mine)
    gc.collect()
    # The server, in this process too, closes its end when it gets to it, and perhaps that of an earlier test's connection meanwhile.
    until(lambda: set(descriptors()) <= set(before), "nothing of the listener is left", state=descriptors)
    count_up(server.connect(), key)
    assert listener.calls == 1


def test_threads_descriptors_and_keys_are_flat_over_reconnects_and_writes(server: Server, key: str) -> None:
    count_up(server.connect(), key)
    gc.collect()
    before, running = len(descriptors()), len(watches())
    for _ in range(20):
        listener = Listener(server.connect(), key)
        listener.store.close()
    assert ended(watches()[running:])
    gc.collect()
    # The server, in this process too, closes its ends when it gets to it.
    until(lambda: len(descriptors()) <= before, f"the end of all but {before} descriptors", state=descriptors)
    writer = server.connect()
    keys = server.foul("num_keys")
    for _ in range(50):
        count_up(writer, key)
    assert server.foul("num_keys") <= keys + KEPT_MARKS


def test_a_change_is_heard_of_at_once(server: Server, key: str) -> None:
    listener = Listener(server.connect(), key)
    for i in (2, 3, 4):
        count_up(server.connect(), key)
        assert listener.hears(i, patience=15.0)
    listener.store.close()


def test_a_lost_connection_is_told_of_once_and_a_change_meanwhile_later(server: Server, key: str) -> None:
    with Relay(f"{server.address}:{server.port}") as relay:
        calls = threading.Semaphore(0)
        watch = _Watch(("127.0.0.1", int(relay.endpoint.rpartition(":")[2])), key, calls.release)
        assert calls.acquire(timeout=PATIENCE)
        writer = server.connect()
        for _ in range(3):
            assert watch._connection is not None
            watch._connection.interrupt()
            assert calls.acquire(timeout=PATIENCE)
            count_up(writer, key)
            assert calls.acquire(timeout=PATIENCE)
        assert not calls.acquire(blocking=False)
        watch.close()


@pytest.mark.usefixtures("quick")
def test_a_connection_that_fell_silent_is_left(server: Server, key: str) -> None:
    """As behind a firewall that drops the packets of a connection that was idle for long."""
    with Relay(f"{server.address}:{server.port}") as relay:
        calls = threading.Semaphore(0)
        watch = _Watch(("127.0.0.1", int(relay.endpoint.rpartition(":")[2])), key, calls.release)
        assert calls.acquire(timeout=PATIENCE)
        relay.silence()
        count_up(server.connect(), key)
        assert calls.acquire(timeout=PATIENCE)
        watch.close()


@pytest.mark.usefixtures("quick")
def test_a_change_whose_writer_died_before_it_made_the_mark_is_noticed_when_the_value_is_read_again(server: Server, key: str) -> None:
    listener = Listener(server.connect(), key)
    server.foul("compare_set", key, "", "1")
    assert listener.hears(2, patience=15.0)
    count_up(server.connect(), key)
    assert listener.hears(3)
    listener.store.close()


def test_marks_that_a_stranger_makes_cost_no_more_than_the_push(server: Server, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is as before each time: the watch must neither spin nor wake the agent."""
    writer, reads = server.connect(), []
    count_up(writer, key)
    server.foul("set", mark(key, b"1"), "x")
    wait = tcp_wire.TcpConnection.wait
    monkeypatch.setattr(tcp_wire.TcpConnection, "wait", lambda *those: reads.append(0) or wait(*those))
    listener = Listener(server.connect(), key)
    threading.Event().wait(1.0)
    assert 2 <= len(reads) <= 20
    count_up(writer, key)
    assert listener.hears(2), "it is tried again"
    listener.store.close()


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, b"", b"\xff" * 64, b"\0" * 64],
    ids=["another language", "hangs up", "ones", "zeros"],
)
def test_what_is_not_a_store_hurts_nobody(reply: bytes, key: str) -> None:
    called: list[None] = []
    with something_else(reply) as where:
        watch = _Watch(where, key, lambda: called.append(None))
        threading.Event().wait(0.5)
        mine = watches()
        watch.close()
        assert ended(mine) and not called


def test_a_length_without_end_is_not_waited_for(server: Server, key: str) -> None:
    """A stranger that knows how a store begins."""
    with Mute() as mute:
        watch = _Watch(mute.where, key, lambda: pytest.fail("nothing was read"))
        assert mute.came.acquire(timeout=PATIENCE)
        asked = mute.accepted[0].recv(64)
        mute.accepted[0].sendall(asked[-4:] + b"\xff" * 8)
        while mute.accepted[0].recv(1 << 16):
            pass  # it hangs up
        watch.close()


def test_one_that_is_accepted_and_never_answered_ends_at_once(key: str) -> None:
    with Mute() as mute:
        began, running = time.monotonic(), watches()
        watch = _Watch(mute.where, key, lambda: pytest.fail("nothing was read"))
        mine = [thread for thread in watches() if thread not in running]
        assert mute.came.acquire(timeout=PATIENCE)
        assert mute.accepted[0].recv(5) == tcp_wire.HELLO
        watch.close()
        assert ended(mine) and time.monotonic() - began < 0.9 * tcp.WATCH_LIMIT


def test_a_store_works_as_before_while_its_watch_is_refused_hangs_or_cannot_have_a_thread(
    server: Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Mute() as mute, socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[:2]
        closed.close()
        for where in (mute.where, refused, ("198.51.100.1", 1), ("", 0), ("no such name", 1)):
            store = server.connect()
            store._where = where
            began = time.monotonic()
            store.watch(key, lambda: pytest.fail("nothing was read"))
            count_up(store, key)
            store.close()
            assert time.monotonic() - began < PATIENCE
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        store = server.connect()
        store.watch(key, lambda: None)
        count_up(store, key)
        store.close()


def test_an_idle_watch_sleeps(server: Server, key: str) -> None:
    running = watches()
    listener = Listener(server.connect(), key)
    (mine,) = (thread for thread in watches() if thread not in running)
    status = Path(f"/proc/self/task/{mine.native_id}/status")

    def switches() -> int:
        return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)

    threading.Event().wait(0.2)
    before = switches()
    threading.Event().wait(1.0)
    assert switches() == before
    listener.store.close()


def test_a_record_that_changes_without_pause_is_told_of_a_few_times_a_second_and_the_last_change_is_not_missed(
    server: Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "BURST_TIME", 0.5)
    monkeypatch.setattr(tcp, "BURST", 2)  # few, so that they take much less time than that
    monkeypatch.setattr(tcp, "KEPT_MARKS", 1 << 20)  # the watch shares this interpreter with the writer, and is slow
    writer, began = server.connect(), time.monotonic()
    listener = Listener(server.connect(), key)
    while listener.calls < 3 * tcp.BURST:
        assert time.monotonic() < began + PATIENCE
        last = count_up(writer, key)
    assert time.monotonic() >= began + 0.95, "all but the first calls wait"
    (watch,) = listener.store._watches
    until(lambda: watch._seen == b"%d" % last, f"the change {last}", state=lambda: watch._seen)
    listener.store.close()


def test_nothing_but_the_watched_keys_is_marked(server: Server) -> None:
    prefix = f"elastirun/{os.urandom(4).hex()}/"
    store: TcpStore = server.connect()
    store.put_if(prefix + "node/a", None, b"0")
    keys = server.foul("num_keys")
    for i in range(20):
        store.put_if(prefix + "node/a", b"%d" % i, b"%d" % (i + 1))
    assert server.foul("num_keys") == keys
    assert tcp.WATCHED == "/round"
