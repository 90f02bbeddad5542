"""The thread: one exchange in its order, and a thread that may hang, fail or come late without doing harm."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous import store_thread
from elastirun.rendezvous.store_thread import StoreThread
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore, connect
from elastirun.rendezvous.stores.tcp_server import ServedStore
from elastirun.rendezvous.wire import exchanges
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import Codec, clip
from elastirun.rendezvous.wire.events import Changed, Synced, SyncFailed
from elastirun.rendezvous.wire.records import Place, RoundRecord, Status, Vote
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.rendezvous.test_sync import CODEC, JOB, MEMBER, PATIENCE, Watched, key, row
from tests.support.descriptors import descriptors
from tests.support.until import until


class Watching(MemoryStore):
    """A memory store that tells of changes."""

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        self.key, self.changed = key, changed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StoreThread]]:
    """Drivers that are closed at the end."""
    monkeypatch.setattr(exchanges, "CHECK_AGAIN", 0.05)
    threads: list[StoreThread] = []
    yield threads
    for thread in threads:
        thread.close()


def new_thread(
    made: list[StoreThread], connect: Callable[[], Any], time_limit: float = PATIENCE, connect_limit: float = PATIENCE
) -> StoreThread:
    thread = StoreThread(lambda at: connect(), SyncProtocol(JOB, "me", CODEC, time.monotonic), time_limit, connect_limit)
    made.append(thread)
    return thread


def answer(thread: StoreThread) -> Synced | SyncFailed:
    """The next answer, awaited as the agent's loop does: by the descriptor and the deadline."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        deadline = thread.deadline
        assert deadline is not None, "nothing is under way"
        readable = select.select([thread.fileno()], [], [], max(0.0, deadline - time.monotonic()))[0]
        answers = thread.answers() if readable else thread.give_up(time.monotonic())
        found = [one for one in answers if not isinstance(one, Changed)]  # which a store may send at any time
        if found:
            (only,) = found
            assert thread.deadline is None and thread._connection.deadline is None
            assert all(isinstance(one, Changed) for one in thread.answers())
            return only
    raise AssertionError("no answer")


def ask(thread: StoreThread, sync: Sync | None = None) -> Synced | SyncFailed:
    thread.submit(sync or Sync())
    return answer(thread)


def await_threads(count: int, name: str = "store") -> None:
    """Wait until no more than ``count`` threads of that name run."""
    until(lambda: sum(t.name == name for t in threading.enumerate()) <= count, f"at most {count} threads", state=threading.enumerate)


def test_a_store_that_tells_of_a_change_wakes_the_loop_and_is_no_answer(made: list[StoreThread]) -> None:
    store = Watching()
    thread = new_thread(made, lambda: store)
    ask(thread)
    assert store.key == JOB + "round"
    store.changed()
    assert select.select([thread.fileno()], [], [], PATIENCE)[0]
    (told,) = thread.answers()
    assert isinstance(told, Changed) and thread.deadline is None
    thread._pending = True
    store.changed()
    thread.answers()
    assert thread.deadline is not None, "an exchange under way still is"
    thread.reconnect()
    store.changed()
    assert not select.select([thread.fileno()], [], [], 0)[0], "a connection that was given up does not wake the loop"


def test_who_is_not_let_in_is_told_so(made: list[StoreThread]) -> None:
    def refuse() -> MemoryStore:
        raise StoreRefused("no such user")

    def fail() -> MemoryStore:
        raise StoreError("no answer")

    found = [ask(new_thread(made, connect)) for connect in (refuse, fail)]
    assert [(one.why, one.refused) for one in found if isinstance(one, SyncFailed)] == [("no such user", True), ("no answer", False)]


def test_an_answer_wakes_the_loop_once(made: list[StoreThread]) -> None:
    store = Watched()
    thread = new_thread(made, lambda: store)
    assert thread.deadline is None and thread.answers() == [] and thread.give_up(1e12) == []
    before = time.monotonic()
    found = ask(thread)
    assert isinstance(found, Synced) and before <= found.started <= found.now <= time.monotonic()
    assert not select.select([thread.fileno()], [], [], 0)[0]


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process(made: list[StoreThread]) -> None:
    new_thread(made, Watched)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "store")


def test_one_connection_serves_many_exchanges(made: list[StoreThread]) -> None:
    stores: list[Watched] = []
    thread = new_thread(made, lambda: stores.append(Watched()) or stores[-1])  # type: ignore[func-returns-value]
    for _ in range(20):
        assert isinstance(ask(thread), Synced)
    assert len(stores) == 1


def test_a_full_wake_up_pipe_neither_blocks_nor_loses_an_answer(made: list[StoreThread]) -> None:
    thread = new_thread(made, Watched)
    os.write(thread._wake_w, bytes(1 << 16))
    assert isinstance(ask(thread), Synced) and isinstance(ask(thread), Synced)


@pytest.mark.parametrize(
    "error", [StoreError("no such host"), OSError("boom\nat line 1"), ValueError("x" * 9999)], ids=lambda e: type(e).__name__
)
def test_whatever_goes_wrong_is_a_failed_exchange_and_the_next_one_connects_anew(made: list[StoreThread], error: Exception) -> None:
    steps: list[str] = []
    stores = [Watched(), Watched()]

    def connect() -> Watched:
        steps.append("connect")
        if len(steps) == 1:
            raise error
        return stores[len(steps) - 2]

    thread = new_thread(made, connect)
    found = ask(thread)
    words = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    assert isinstance(found, SyncFailed) and found.why == clip(words)
    stores[0].fails = error
    assert isinstance(ask(thread), SyncFailed) and stores[0].closed.is_set()
    assert isinstance(ask(thread), Synced) and isinstance(ask(thread), Synced)
    assert len(steps) == 3
    await_threads(1)


def test_a_store_that_hangs_is_given_up_and_its_late_answer_dropped(made: list[StoreThread]) -> None:
    data: dict[str, bytes] = {}
    slow, fresh = Watched(data), Watched(data)
    slow.go.clear()
    stores = [slow, fresh]
    thread = new_thread(made, lambda: stores.pop(0), time_limit=0.2)
    began = time.monotonic()
    found = ask(thread, Sync(Put(None, row("me"))))
    assert isinstance(found, SyncFailed) and found.why == "no answer for 0.2 s" and time.monotonic() - began >= 0.2
    assert slow.reached.is_set() and stores == [fresh]
    for seq in (1, 2):
        base = row("me", 1, status=Status.RUNNING) if seq == 2 else None
        now = ask(thread, Sync(Put(base, row("me", seq, status=Status.RUNNING)), rows=()))
        assert isinstance(now, Synced) and now.row and now.row.seq == seq
    slow.go.set()  # its write arrives now, and is no news
    assert slow.closed.wait(PATIENCE)
    await_threads(1)
    assert thread.answers() == []
    now = ask(thread, Sync(rows=()))
    assert isinstance(now, Synced) and now.row == row("me", 2, status=Status.RUNNING)


def test_a_connection_that_hangs_is_given_up_too(made: list[StoreThread]) -> None:
    hanging, late = threading.Event(), Watched()
    attempts: list[None] = []

    def connect() -> Watched:
        attempts.append(None)
        if len(attempts) == 1:
            assert hanging.wait(PATIENCE)
            return late
        return Watched()

    thread = new_thread(made, connect, connect_limit=0.2)
    found = ask(thread)
    assert isinstance(found, SyncFailed) and found.why == "no connection within 0.2 s"
    assert isinstance(ask(thread), Synced)
    hanging.set()
    assert late.closed.wait(PATIENCE), "what the abandoned thread got is closed by it"
    await_threads(1)


def test_a_slow_connection_does_not_shorten_the_exchange(made: list[StoreThread]) -> None:
    """Connecting has a limit of its own: importing torch may take longer than an exchange ever should."""
    store, connected = Watched(), threading.Event()
    store.go.clear()

    def connect() -> Watched:
        assert connected.wait(PATIENCE)
        return store

    thread = new_thread(made, connect, time_limit=PATIENCE)
    thread.submit(Sync())
    assert thread.give_up(time.monotonic() + PATIENCE - 1) == []
    begun = time.monotonic()
    connected.set()
    assert store.reached.wait(PATIENCE)
    assert thread.deadline is not None and thread.deadline <= time.monotonic() + exchanges.CHECK_AGAIN
    assert thread.give_up(begun + PATIENCE - 1) == []
    store.go.set()
    assert isinstance(answer(thread), Synced)


def test_reconnect_closes_the_connection_and_opens_another(made: list[StoreThread]) -> None:
    stores: list[Watched] = []
    thread = new_thread(made, lambda: stores.append(Watched()) or stores[-1])  # type: ignore[func-returns-value]
    assert isinstance(ask(thread), Synced)
    thread.reconnect()
    assert stores[0].closed.wait(PATIENCE)
    assert isinstance(ask(thread), Synced) and len(stores) == 2
    thread.close()
    assert stores[1].closed.wait(PATIENCE)


def test_each_exchange_is_with_the_store_that_it_names(made: list[StoreThread]) -> None:
    stores: dict[Place | None, list[Watched]] = {}

    def connect(at: Place | None) -> Watched:
        stores.setdefault(at, []).append(Watched())
        return stores[at][-1]

    thread = StoreThread(connect, SyncProtocol(JOB, "me", CODEC, time.monotonic), PATIENCE, PATIENCE)
    made.append(thread)
    one, other = Place("n1", "10.0.0.1", 1), Place("n2", "10.0.0.2", 1)
    for at, before, opened in ((None, None, 1), (one, None, 1), (one, one, 1), (other, one, 1), (one, other, 2), (None, one, 2)):
        thread.submit(Sync(at=at))
        assert isinstance(answer(thread), Synced) and len(stores[at]) == opened
        assert at == before or stores[before][-1].closed.wait(PATIENCE), "one connection at a time"
    thread.reconnect()
    thread.submit(Sync(at=None))
    assert isinstance(answer(thread), Synced) and len(stores[None]) == 3


def test_what_is_signed_for_one_store_is_nothing_in_another_one(made: list[StoreThread]) -> None:
    """Whoever reaches several stores of a job can copy rows, votes and records from one to the other."""
    data: dict[str, bytes] = {}
    thread = StoreThread(lambda at: Watching(data), SyncProtocol(JOB, "me", Codec(b"token"), time.monotonic), PATIENCE, PATIENCE)
    made.append(thread)
    vote, there = Vote("n1", RoundRecord("s", host="n1"), ("n1",)), Place("n1", "10.0.0.1", 1)
    thread.submit(Sync(Put(None, row("me")), votes=(vote,), rows=(), voters=("n1",), at=there))
    found = answer(thread)
    assert isinstance(found, Synced) and found.rows and found.votes == (vote,)
    for copied_to in (None, Place("n2", "10.0.0.2", 1)):
        thread.submit(Sync(rows=(), voters=("n1",), at=copied_to))
        found = answer(thread)
        assert isinstance(found, Synced) and not found.rows and not found.votes and len(found.ignored) == 2
    thread.submit(Sync(change=Change(None, RoundRecord("s")), rows=(), at=there))
    assert isinstance(answer(thread), Synced)
    thread.submit(Sync(rows=(), at=None))
    assert isinstance(answer(thread), SyncFailed)


def test_threads_and_descriptors_do_not_grow_with_reconnects(made: list[StoreThread]) -> None:
    thread = new_thread(made, Watched)
    await_threads(1)
    before, times = descriptors(), 200
    for _ in range(times):
        assert isinstance(ask(thread), Synced)
        thread.reconnect()
    await_threads(1)
    assert len(descriptors()) < len(before) + times / 2, "threads of earlier tests may come back late, and open or close some"


def test_threads_that_have_only_to_close_their_connection_do_not_delay_the_next_one(made: list[StoreThread]) -> None:
    """On a busy machine a thread that was told to end may wait long for a processor; it does not hang."""
    go = threading.Event()

    class SlowToClose(Watched):
        def close(self) -> None:
            assert go.wait(PATIENCE)
            super().close()

    thread = new_thread(made, SlowToClose)
    for _ in range(store_thread.HANGING + 2):
        assert isinstance(ask(thread), Synced)
        thread.reconnect()
    assert isinstance(ask(thread), Synced)
    go.set()
    await_threads(1)


def test_without_a_thread_the_exchange_fails_and_the_next_one_tries_again(made: list[StoreThread], monkeypatch: pytest.MonkeyPatch) -> None:
    thread = new_thread(made, Watched)
    assert isinstance(ask(thread), Synced)
    thread.reconnect()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        found = ask(thread)
        assert isinstance(found, SyncFailed) and found.why.startswith("no thread can be started")
    assert isinstance(ask(thread), Synced)


def test_threads_that_hang_do_not_pile_up(made: list[StoreThread]) -> None:
    go = threading.Event()

    def connect() -> Watched:
        assert go.wait(PATIENCE)
        return Watched()

    thread = new_thread(made, connect, connect_limit=0.02)
    whys = [found.why for found in (ask(thread) for _ in range(60)) if isinstance(found, SyncFailed)]
    assert sum(t.name == "store" for t in threading.enumerate()) <= store_thread.HANGING + 10
    assert len(whys) == 60 and any("connections hang; the host of the store accepts them" in why for why in whys)
    go.set()
    await_threads(1)
    assert isinstance(ask(thread), Synced)


def test_threads_that_hang_at_one_store_do_not_delay_another_one(made: list[StoreThread]) -> None:
    """A job whose store has moved several times, from hosts that accept connections and do not answer, still looks at the next ones."""
    go, there = threading.Event(), Place("n1", "127.0.0.2", 1)

    def connect(at: Place | None) -> Watched:
        assert at == there or go.wait(PATIENCE)
        return Watched()

    thread = StoreThread(connect, SyncProtocol(JOB, "me", CODEC, time.monotonic), PATIENCE, 0.02)
    made.append(thread)
    while "connections hang" not in getattr(ask(thread), "why", ""):
        pass
    assert isinstance(ask(thread, Sync(at=there)), Synced)
    go.set()
    await_threads(1)


def test_threads_that_hang_at_many_stores_do_not_pile_up(made: list[StoreThread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "HANGING_ELSEWHERE", 5)
    go = threading.Event()

    def connect(at: Place | None) -> Watched:
        assert go.wait(PATIENCE)
        return Watched()

    thread = StoreThread(connect, SyncProtocol(JOB, "me", CODEC, time.monotonic), PATIENCE, 0.02)
    made.append(thread)
    whys = [getattr(ask(thread, Sync(at=Place(f"n{i}", "127.0.0.2", 1))), "why", "") for i in range(40)]
    assert any("connections hang" in why for why in whys)
    assert sum(t.name == "store" for t in threading.enumerate()) <= 5 + store_thread.HANGING + 10
    go.set()
    await_threads(1)


def test_connections_share_nothing_that_changes(made: list[StoreThread]) -> None:
    """An abandoned thread may go on at any moment, beside the one that has taken its place."""
    thread = new_thread(made, Watched)
    ask(thread)
    first = thread._connection.protocol
    thread.reconnect()
    second = thread._connection.protocol
    assert second is not first and second._newest is first._newest
    shared = [name for name, value in vars(first).items() if isinstance(value, dict | list | set) and vars(second)[name] is value]
    assert shared == []


def test_an_exchange_during_which_the_machine_was_suspended_is_given_up(made: list[StoreThread], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Watched()
    store.go.clear()
    stores = [store, Watched()]
    thread = new_thread(made, lambda: stores.pop(0))
    thread.submit(Sync())
    assert store.reached.wait(PATIENCE)
    real = store_thread.clock.now
    monkeypatch.setattr(store_thread.clock, "now", lambda: real() + 1000)
    assert thread.deadline is not None and thread.deadline <= store_thread.clock.now()
    (found,) = thread.give_up(store_thread.clock.now())
    assert isinstance(found, SyncFailed)
    thread.submit(Sync())
    assert select.select([thread.fileno()], [], [], PATIENCE)[0]
    assert isinstance(thread.answers()[0], Synced)
    store.go.set()
    await_threads(1)


# -- what the loop asks by itself -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[ServedStore]:
    """A TCPStore in this process. ``close`` ends it."""
    store = ServedStore(socket.create_server(("127.0.0.1", 0)))
    yield store
    store.close()


def status(thread: StoreThread) -> str:
    """The kernel's words about the thread of the connection."""
    assert thread._connection.thread is not None
    return Path(f"/proc/self/task/{thread._connection.thread.native_id}/status").read_text()


def beats(thread: StoreThread, first: int, last: int, **fields: Any) -> list[Synced | SyncFailed]:
    return [ask(thread, Sync(Put(row("me", seq - 1), row("me", seq)), **{"rows": ("a",), **fields})) for seq in range(first, last)]


def test_a_beat_wakes_no_thread(made: list[StoreThread], served: ServedStore) -> None:
    thread = new_thread(made, served.connect)
    served.connect().put_if(key("a"), None, CODEC.encode(key("a"), row("a")))
    assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
    until(lambda: "State:\tS" in status(thread), "the thread waits")
    before = status(thread)
    for seq, found in enumerate(beats(thread, 2, 22), 2):
        assert isinstance(found, Synced) and found.hosting and found.rows == {"a": row("a"), "me": row("me", seq)}
    switches = [text.split("\nvoluntary_ctxt_switches:")[1].split()[0] for text in (before, status(thread))]
    assert switches[0] == switches[1]
    assert not select.select([thread.fileno()], [], [], 0)[0]


def test_what_a_beat_still_needs_is_left_to_the_thread(made: list[StoreThread], served: ServedStore) -> None:
    """The members of a round that another node has formed, every row, and a row of ours that somebody has written over."""
    thread, other = new_thread(made, served.connect), served.connect()
    assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
    formed = RoundRecord("s", 2, 1, (MEMBER,))
    SyncProtocol(JOB, "a", CODEC, time.monotonic).carry_out(other, Sync(Put(None, row("a")), Change(None, formed), ()), 0.0)
    (found,) = beats(thread, 2, 3)
    assert isinstance(found, Synced) and found.round == formed
    (found,) = beats(thread, 3, 4, rows=None)
    assert isinstance(found, Synced) and found.rows == {"a": row("a"), "me": row("me", 3)}
    other.put_if(key("me"), CODEC.encode(key("me"), row("me", 3)), b"garbage")
    (found,) = beats(thread, 4, 5)
    assert isinstance(found, Synced) and found.row == row("me", 4)


def test_large_answers_are_taken_in_the_thread(made: list[StoreThread], served: ServedStore) -> None:
    """Anybody may have written megabytes into a row. The loop, which keeps what has arrived, takes none of them."""
    stores = list[TcpStore]()
    thread = new_thread(made, lambda: (stores.append(served.connect()), stores[-1])[1])
    served.connect().put_if(key("a"), None, b"x" * (8 << 20))
    assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
    for found in beats(thread, 2, 6):
        assert isinstance(found, Synced) and len(found.ignored) == 1
    assert found.row == row("me", 5) and len(stores) == 2, "it connects anew once"


def test_a_store_that_hangs_up_between_beats_does_not_keep_the_loop_awake(made: list[StoreThread], served: ServedStore) -> None:
    thread = new_thread(made, served.connect)
    assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
    assert isinstance(beats(thread, 2, 3)[0], Synced)
    served.close()
    store = thread._connection.store
    assert isinstance(store, TcpStore) and select.select([store._connection._socket], [], [], PATIENCE)[0], "it has hung up"
    until(lambda: not thread.answers() and not select.select([thread.fileno()], [], [], 0.1)[0], "quiet")


def test_a_store_that_ends_during_a_beat_is_a_failed_exchange_and_the_next_one_connects_anew(
    made: list[StoreThread], served: ServedStore
) -> None:
    stores = [served.connect(), Watched()]
    thread = new_thread(made, lambda: stores.pop(0))
    assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
    served.close()
    (found,) = beats(thread, 2, 3)
    assert isinstance(found, SyncFailed) and found.why.startswith("no answer of the store: ")
    assert isinstance(ask(thread), Synced) and not stores


def test_a_beat_that_is_given_up_holds_up_no_thread(made: list[StoreThread], monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Watched):
        """A store that the loop can ask, and that never answers it."""

        def ask(self, *what: Any) -> int:
            return silent[0]

    silent = os.pipe()
    thread = new_thread(made, Silent, time_limit=0.05)
    for _ in range(store_thread.HANGING + 2):
        thread._time_limit = PATIENCE
        assert isinstance(ask(thread, Sync(Put(None, row("me")), rows=())), Synced)
        thread._time_limit = 0.05
        (found,) = beats(thread, 2, 3)
        assert isinstance(found, SyncFailed) and found.why == "no answer for 0.05 s"
    await_threads(1)
    for descriptor in silent:
        os.close(descriptor)


# -- a real store whose host stands still ---------------------------------------------------------------------------------------------

HOST = """
import socket, sys
from elastirun.rendezvous.stores.tcp_server import serve
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(64)
port = listening.getsockname()[1]
served = serve(listening)
print(port, flush=True)
sys.stdin.read()
"""


def test_while_a_store_stands_still_exchanges_fail_in_time_and_afterwards_they_go_on(made: list[StoreThread]) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", HOST], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout
            port = int(host.stdout.readline())
            thread = new_thread(made, lambda: connect("127.0.0.1", port))
            first = ask(thread, Sync(Put(None, row("me")), rows=()))
            assert isinstance(first, Synced) and first.row == row("me")
            thread._time_limit = thread._connect_limit = 1.0
            host.send_signal(signal.SIGSTOP)
            os.waitpid(host.pid, os.WUNTRACED)  # all its threads stand still
            began = time.monotonic()
            failed = [ask(thread, Sync(Put(row("me"), row("me", 2)), rows=())) for _ in range(2)]
            assert [type(f) for f in failed] == [SyncFailed, SyncFailed]
            assert [f.why for f in failed if isinstance(f, SyncFailed)] == ["no answer for 1 s", "no connection within 1 s"]
            assert time.monotonic() - began < 20
            host.send_signal(signal.SIGCONT)
            thread._time_limit = thread._connect_limit = PATIENCE
            again = ask(thread, Sync(Put(row("me"), row("me", 2)), rows=()))
            assert isinstance(again, Synced) and again.row == row("me", 2)
            await_threads(1)  # those that were abandoned end when the store answers them
            await_threads(1, "store watch")
        finally:
            host.kill()
