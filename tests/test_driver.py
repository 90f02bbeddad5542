"""The driver: one exchange in its order, and a thread that may hang, fail or come late without doing harm."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastirun.errors import StoreError
from elastirun.rendezvous import driver as driver_module
from elastirun.rendezvous.actions import Change, Put, Sync
from elastirun.rendezvous.codec import Codec, clip
from elastirun.rendezvous.driver import Driver, Exchange
from elastirun.rendezvous.events import Synced, SyncFailed
from elastirun.rendezvous.records import Broken, Cause, ExitRecord, Member, NodeRow, RoundRecord, Status
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore

PATIENCE = 60.0  # seconds; far beyond what anything here takes
JOB = "elastirun/job/"
CODEC = Codec()
MEMBER = Member("a", "name-a", "10.0.0.1", 1000, 2)


def row(i: str, seq: int = 1, **fields: Any) -> NodeRow:
    return NodeRow(i, f"name-{i}", "10.0.0.1", 1000, 2, seq=seq, **fields)


def key(i: str) -> str:
    return f"{JOB}node/{i}"


class Watched(MemoryStore):
    """A memory store that notes what is asked of it, and can be made to hang or fail."""

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        super().__init__(data)
        self.asked: list[str] = []
        self.closed = threading.Event()
        self.reached = threading.Event()  # an operation is under way
        self.go = threading.Event()  # operations hang until this is set
        self.go.set()
        self.fails: Exception | None = None

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.reached.set()
        assert self.go.wait(PATIENCE)
        if self.fails is not None:
            raise self.fails

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = sorted(keys)
        self._note("get " + " ".join(k.removeprefix(JOB) for k in wanted))
        return super().get(wanted)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        self._note("put " + key.removeprefix(JOB))
        return super().put_if(key, expected, value)

    def under(self, prefix: str) -> dict[str, bytes]:
        self._note("under " + prefix.removeprefix(JOB))
        return super().under(prefix)

    def close(self) -> None:
        self.closed.set()


def exchange(data: dict[str, bytes] | Watched, sync: Sync, me: str = "me", codec: Codec = CODEC) -> Synced:
    store = data if isinstance(data, Watched) else Watched(data)
    return Exchange(JOB, me, codec, lambda: 7.0).carry_out(store, sync, 5.0)


# -- one exchange -----------------------------------------------------------------------------------------------------------------


def test_an_exchange_writes_before_it_reads_and_the_round_before_the_rows() -> None:
    store, empty = Watched(), RoundRecord("s")
    sync = Sync(Put(None, row("me")), Change(None, empty), ("a", "b"))
    assert exchange(store, sync) == Synced(7.0, 5.0, empty, {"me": row("me")}, row("me"), hosting=True)
    assert store.asked == ["put node/me", "put round", "get node/a node/b node/me round"]
    store.asked.clear()
    following = replace(empty, version=2)
    answer = exchange(store, Sync(Put(row("me"), row("me", 2)), Change(empty, following)))
    assert (answer.round, answer.row, answer.rows) == (following, row("me", 2), {"me": row("me", 2)})
    assert store.asked == ["put node/me", "put round", "get node/me round", "under node/"]
    store.asked.clear()
    assert exchange(store, Sync(rows=())).row == row("me", 2), "one's own row is always read"
    assert store.asked == ["get node/me round"]


def test_the_members_are_stored_once_beside_the_record_and_before_it() -> None:
    store, empty = Watched(), RoundRecord("s")
    exchange(store, Sync(change=Change(None, empty)))
    store.asked.clear()
    formed = replace(empty, version=2, round=1, members=(MEMBER, replace(MEMBER, id="b")))
    assert exchange(store, Sync(change=Change(empty, formed), rows=())).round == formed
    members, of_the_round, *_ = store.asked
    assert members.startswith("put members/") and of_the_round == "put round"
    store.asked.clear()
    broken = replace(formed, version=3, broken=Broken(Cause.JOIN, "b joined", "b"))
    node = Exchange(JOB, "b", CODEC, lambda: 7.0)
    assert node.carry_out(store, Sync(change=Change(formed, broken), rows=()), 5.0).round == broken
    assert node.carry_out(store, Sync(rows=()), 5.0).round == broken
    assert store.asked == ["put round", "get node/b round", "get node/b round"], "known members are not read again"


def test_of_the_lists_of_members_only_the_last_is_kept() -> None:
    data: dict[str, bytes] = {}
    base: RoundRecord | None = None
    for number in range(1, 4):
        record = RoundRecord("s", number, number, members=(MEMBER, replace(MEMBER, id=f"b{number}")))
        assert exchange(data, Sync(change=Change(base, record))).round == record
        refused = replace(record, version=9, members=(MEMBER,))
        assert exchange(data, Sync(change=Change(RoundRecord("other"), refused))).round == record
        base = record
    lists = [key for key in data if "members/" in key]
    assert len(lists) == 2, "that of the round, and that of one that was refused"


@pytest.mark.parametrize("found", [b"garbage", None], ids=["altered", "gone"])
def test_a_list_of_members_that_is_not_the_one_named_is_not_believed(found: bytes | None) -> None:
    data: dict[str, bytes] = {}
    formed = RoundRecord("s", round=1, members=(MEMBER,))
    exchange(data, Sync(change=Change(None, formed)))
    (members_key,) = (key for key in data if "members/" in key)
    del data[members_key]
    if found is not None:
        data[members_key] = found
    with pytest.raises(StoreError, match="round record is unreadable: .*the members are missing there, or others"):
        exchange(data, Sync(), me="other")
    del data[JOB + "round"]
    assert exchange(data, Sync(change=Change(None, formed)), me="third").round == formed, "whoever forms it writes them anew"


def test_an_empty_store_is_seen_as_empty() -> None:
    answer = exchange({}, Sync())
    assert (answer.round, answer.row, dict(answer.rows), answer.ignored) == (None, None, {}, ())


def test_who_comes_second_sees_what_the_first_has_written() -> None:
    data: dict[str, bytes] = {}
    first, second = RoundRecord("first"), RoundRecord("second")
    assert exchange(data, Sync(change=Change(None, first))).round == first
    assert exchange(data, Sync(change=Change(None, second))).round == first
    assert exchange(data, Sync(change=Change(second, replace(second, version=2)))).round == first


def test_a_write_of_ours_that_was_thought_lost_is_adopted_not_written_over() -> None:
    data = {key("me"): CODEC.encode(key("me"), row("me", 5))}
    store = Watched(data)
    answer = exchange(store, Sync(Put(row("me", 4), row("me", 6, status=Status.LEFT))))
    assert answer.row == row("me", 5) and store.asked.count("put node/me") == 1


def test_a_row_that_has_vanished_is_not_written_as_if_it_had_not() -> None:
    data: dict[str, bytes] = {}
    assert exchange(data, Sync(Put(row("me"), row("me", 2)))).row is None and data == {}


def big_row(i: str) -> NodeRow:
    failure = ExitRecord("n", 0, 0, 1, 1, 0, 1.0, ("x" * 1000,) * 300)
    return row(i, failures=(failure,))


GARBAGE = {
    "no JSON": b"garbage",
    "not ASCII": b"\xff\xfe\x00",
    "another record": CODEC.encode(key("me"), RoundRecord("s")),
    "the row of another node": CODEC.encode(key("me"), row("a")),
    "signed": Codec(b"token").encode(key("me"), row("me")),
    "too large": CODEC.encode(key("me"), big_row("me")),
}


@pytest.mark.parametrize("base", [None, row("me", 3)])
@pytest.mark.parametrize("found", GARBAGE.values(), ids=GARBAGE)
def test_what_others_have_put_into_ones_own_row_is_written_over(found: bytes, base: NodeRow | None) -> None:
    data = {key("me"): found}
    answer = exchange(data, Sync(Put(base, row("me", 4)), rows=()))
    assert answer.row == row("me", 4) and answer.ignored == ()
    assert CODEC.decode(key("me"), data[key("me")], NodeRow) == row("me", 4)


@pytest.mark.parametrize("found", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_row_is_ignored_with_a_word(found: bytes) -> None:
    data = {key("me"): found, key("b"): CODEC.encode(key("b"), row("b"))}
    for sync in (Sync(), Sync(rows=("b", "c"))):
        answer = exchange(data, sync)
        assert dict(answer.rows) == {"b": row("b")} and answer.row is None
        (word,) = answer.ignored
        assert word.startswith(key("me")) and word.isprintable() and len(word) <= 300


def test_the_word_about_an_invented_key_is_fit_for_a_terminal() -> None:
    data = {f"{JOB}node/{i}\x1b[2J" + "x" * 5000: b"?" for i in range(50)}
    answer = exchange(data, Sync())
    assert len(answer.ignored) == 4 and all(word.isprintable() and len(word) <= 300 for word in answer.ignored)


def test_with_a_token_the_rows_and_the_round_of_strangers_do_not_count() -> None:
    signed = Codec(b"token")
    data = {key("b"): CODEC.encode(key("b"), row("b")), key("c"): signed.encode(key("c"), row("c"))}
    data[key("d")] = data[key("c")].replace(b"name-c", b"name-x")
    assert set(exchange(data, Sync(), codec=signed).rows) == {"c"}
    data[JOB + "round"] = CODEC.encode(JOB + "round", RoundRecord("s"))
    with pytest.raises(StoreError, match="the round record is unreadable: .*--token-file"):
        exchange(data, Sync(), codec=signed)


@pytest.mark.parametrize("found", [b"garbage", b"\xff", CODEC.encode("x", row("a")), b"x" * (5 << 20)], ids=lambda b: repr(b[:8]))
def test_an_unreadable_round_is_a_store_error_and_stays_as_it_is(found: bytes) -> None:
    data = {JOB + "round": found}
    with pytest.raises(StoreError, match="the round record is unreadable"):
        exchange(data, Sync(change=Change(None, RoundRecord("s"))))
    assert data[JOB + "round"] == found


class Counting(Codec):
    """Counts what it decodes."""

    decoded: list[str] = []

    def decode(self, key: str, data: bytes, cls: Any) -> Any:
        self.decoded.append(key.removeprefix(JOB))
        return super().decode(key, data, cls)


def test_an_unchanged_row_is_parsed_once_and_a_changed_one_anew() -> None:
    codec = Counting()
    codec.decoded.clear()
    data = {key(i): CODEC.encode(key(i), row(i)) for i in "abc"}
    exchanging, store = Exchange(JOB, "a", codec), MemoryStore(data)
    first = exchanging.carry_out(store, Sync(), 0.0)
    assert sorted(codec.decoded) == ["node/a", "node/b", "node/c"]
    for sync in (Sync(), Sync(rows=("b", "c"))):
        assert exchanging.carry_out(store, sync, 0.0).rows == first.rows
    assert len(codec.decoded) == 3
    data[key("b")] = CODEC.encode(key("b"), row("b", 2))
    assert exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows["b"] == row("b", 2)
    data[key("b")] = b"garbage"
    assert "b" not in exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows, "what was good before does not stand for it"
    data[key("b")] = CODEC.encode(key("b"), row("b", 2))
    assert exchanging.carry_out(store, Sync(rows=("b",)), 0.0).rows["b"] == row("b", 2)
    assert codec.decoded[3:] == ["node/b", "node/b"]


def test_rows_that_are_gone_are_not_remembered() -> None:
    exchanging, data = Exchange(JOB, "me", CODEC), {}
    for i in range(100):
        data.clear()
        data[key(f"n{i}")] = CODEC.encode(key(f"n{i}"), row(f"n{i}"))
        exchanging.carry_out(MemoryStore(data), Sync(), 0.0)
    assert len(exchanging._known) == 1


# -- the thread ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Driver]]:
    """Drivers that are closed at the end."""
    monkeypatch.setattr(driver_module, "LOOK_AGAIN", 0.05)
    drivers: list[Driver] = []
    yield drivers
    for driver in drivers:
        driver.close()


def new_driver(made: list[Driver], connect: Callable[[], Any], time_limit: float = PATIENCE, connect_limit: float = PATIENCE) -> Driver:
    driver = Driver(connect, Exchange(JOB, "me", CODEC), time_limit, connect_limit)
    made.append(driver)
    return driver


def answer(driver: Driver) -> Synced | SyncFailed:
    """The next answer, awaited as the agent's loop does: by the descriptor and the deadline."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        deadline = driver.deadline
        assert deadline is not None, "nothing is under way"
        readable = select.select([driver.fileno()], [], [], max(0.0, deadline - time.monotonic()))[0]
        found = driver.answers() if readable else driver.give_up(time.monotonic())
        if found:
            (only,) = found
            assert driver.deadline is None and driver._line.deadline is None and driver.answers() == []
            return only
    raise AssertionError("no answer")


def ask(driver: Driver, sync: Sync | None = None) -> Synced | SyncFailed:
    driver.submit(sync or Sync())
    return answer(driver)


def await_threads(count: int) -> None:
    """Until no more than ``count`` threads of drivers run."""
    end = time.monotonic() + PATIENCE
    while (running := sum(t.name == "store" for t in threading.enumerate())) > count:
        assert time.monotonic() < end, f"{running} threads"
        time.sleep(0.001)


def test_an_answer_wakes_the_loop_once(made: list[Driver]) -> None:
    store = Watched()
    driver = new_driver(made, lambda: store)
    assert driver.deadline is None and driver.answers() == [] and driver.give_up(1e12) == []
    before = time.monotonic()
    found = ask(driver)
    assert isinstance(found, Synced) and before <= found.started <= found.now <= time.monotonic()
    assert not select.select([driver.fileno()], [], [], 0)[0]


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process(made: list[Driver]) -> None:
    new_driver(made, Watched)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "store")


def test_one_connection_serves_many_exchanges(made: list[Driver]) -> None:
    stores: list[Watched] = []
    driver = new_driver(made, lambda: stores.append(Watched()) or stores[-1])  # type: ignore[func-returns-value]
    for _ in range(20):
        assert isinstance(ask(driver), Synced)
    assert len(stores) == 1


def test_a_full_wake_up_pipe_neither_blocks_nor_loses_an_answer(made: list[Driver]) -> None:
    driver = new_driver(made, Watched)
    os.write(driver._wake_w, bytes(1 << 16))
    assert isinstance(ask(driver), Synced) and isinstance(ask(driver), Synced)


@pytest.mark.parametrize(
    "error", [StoreError("no such host"), OSError("boom\nat line 1"), ValueError("x" * 9999)], ids=lambda e: type(e).__name__
)
def test_whatever_goes_wrong_is_a_failed_exchange_and_the_next_one_connects_anew(made: list[Driver], error: Exception) -> None:
    steps: list[str] = []
    stores = [Watched(), Watched()]

    def connect() -> Watched:
        steps.append("connect")
        if len(steps) == 1:
            raise error
        return stores[len(steps) - 2]

    driver = new_driver(made, connect)
    found = ask(driver)
    words = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    assert isinstance(found, SyncFailed) and found.why == clip(words)
    stores[0].fails = error
    assert isinstance(ask(driver), SyncFailed) and stores[0].closed.is_set()
    assert isinstance(ask(driver), Synced) and isinstance(ask(driver), Synced)
    assert len(steps) == 3
    await_threads(1)


def test_a_store_that_hangs_is_given_up_and_its_late_answer_dropped(made: list[Driver]) -> None:
    data: dict[str, bytes] = {}
    slow, fresh = Watched(data), Watched(data)
    slow.go.clear()
    stores = [slow, fresh]
    driver = new_driver(made, lambda: stores.pop(0), time_limit=0.2)
    began = time.monotonic()
    found = ask(driver, Sync(Put(None, row("me"))))
    assert isinstance(found, SyncFailed) and found.why == "no answer for 0.2 s" and time.monotonic() - began >= 0.2
    assert slow.reached.is_set() and stores == [fresh]
    for seq in (1, 2):
        base = row("me", 1, status=Status.RUNNING) if seq == 2 else None
        now = ask(driver, Sync(Put(base, row("me", seq, status=Status.RUNNING)), rows=()))
        assert isinstance(now, Synced) and now.row and now.row.seq == seq
    slow.go.set()  # its write arrives now, and is no news
    assert slow.closed.wait(PATIENCE)
    await_threads(1)
    assert driver.answers() == []
    now = ask(driver, Sync(rows=()))
    assert isinstance(now, Synced) and now.row == row("me", 2, status=Status.RUNNING)


def test_a_connection_that_hangs_is_given_up_too(made: list[Driver]) -> None:
    hanging, late = threading.Event(), Watched()
    attempts: list[None] = []

    def connect() -> Watched:
        attempts.append(None)
        if len(attempts) == 1:
            assert hanging.wait(PATIENCE)
            return late
        return Watched()

    driver = new_driver(made, connect, connect_limit=0.2)
    found = ask(driver)
    assert isinstance(found, SyncFailed) and found.why == "no connection within 0.2 s"
    assert isinstance(ask(driver), Synced)
    hanging.set()
    assert late.closed.wait(PATIENCE), "what the abandoned thread got is closed by it"
    await_threads(1)


def test_a_slow_connection_does_not_shorten_the_exchange(made: list[Driver]) -> None:
    """Connecting has a limit of its own: importing torch may take longer than an exchange ever should."""
    store, connected = Watched(), threading.Event()
    store.go.clear()

    def connect() -> Watched:
        assert connected.wait(PATIENCE)
        return store

    driver = new_driver(made, connect, time_limit=PATIENCE)
    driver.submit(Sync())
    assert driver.give_up(time.monotonic() + PATIENCE - 1) == []
    begun = time.monotonic()
    connected.set()
    assert store.reached.wait(PATIENCE)
    assert driver.deadline is not None and driver.deadline <= time.monotonic() + driver_module.LOOK_AGAIN
    assert driver.give_up(begun + PATIENCE - 1) == []
    store.go.set()
    assert isinstance(answer(driver), Synced)


def test_reconnect_closes_the_connection_and_opens_another(made: list[Driver]) -> None:
    stores: list[Watched] = []
    driver = new_driver(made, lambda: stores.append(Watched()) or stores[-1])  # type: ignore[func-returns-value]
    assert isinstance(ask(driver), Synced)
    driver.reconnect()
    assert stores[0].closed.wait(PATIENCE)
    assert isinstance(ask(driver), Synced) and len(stores) == 2
    driver.close()
    assert stores[1].closed.wait(PATIENCE)


def test_threads_and_descriptors_do_not_grow_with_reconnects(made: list[Driver]) -> None:
    driver = new_driver(made, Watched)
    await_threads(1)
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        assert isinstance(ask(driver), Synced)
        driver.reconnect()
    await_threads(1)
    assert len(os.listdir("/proc/self/fd")) <= fds


# -- a real store whose host stands still ---------------------------------------------------------------------------------------------

HOST = """
import socket, sys
from elastirun.rendezvous.stores.tcp import serve
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(64)
port = listening.getsockname()[1]
served = serve(listening)
print(port, flush=True)
sys.stdin.read()
"""


def test_while_a_store_stands_still_exchanges_fail_in_time_and_afterwards_they_go_on(made: list[Driver]) -> None:
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen([sys.executable, "-c", HOST], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout
            port = int(host.stdout.readline())
            driver = new_driver(made, lambda: TcpStore("127.0.0.1", port))
            first = ask(driver, Sync(Put(None, row("me")), rows=()))
            assert isinstance(first, Synced) and first.row == row("me")
            driver._time_limit = driver._connect_limit = 1.0
            host.send_signal(signal.SIGSTOP)
            os.waitpid(host.pid, os.WUNTRACED)  # all its threads stand still
            began = time.monotonic()
            failed = [ask(driver, Sync(Put(row("me"), row("me", 2)), rows=())) for _ in range(2)]
            assert [type(f) for f in failed] == [SyncFailed, SyncFailed]
            assert [f.why for f in failed if isinstance(f, SyncFailed)] == ["no answer for 1 s", "no connection within 1 s"]
            assert time.monotonic() - began < 20
            host.send_signal(signal.SIGCONT)
            driver._time_limit = driver._connect_limit = PATIENCE
            again = ask(driver, Sync(Put(row("me"), row("me", 2)), rows=()))
            assert isinstance(again, Synced) and again.row == row("me", 2)
            await_threads(1)  # those that were abandoned end when the store answers them
        finally:
            host.kill()
