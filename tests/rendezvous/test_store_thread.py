"""The driver: one exchange in its order, and a thread that may hang, fail or come late without doing harm."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous import store_thread as driver_module
from elastirun.rendezvous.actions import Put, Sync
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.events import Changed, Synced, SyncFailed
from elastirun.rendezvous.records import Status
from elastirun.rendezvous.store_thread import Driver
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.sync import Exchange
from tests.rendezvous.test_sync import CODEC, JOB, PATIENCE, Watched, row
from tests.support.descriptors import descriptors


class Watching(MemoryStore):
    """A memory store that tells of changes."""

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        self.key, self.changed = key, changed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Driver]]:
    """Drivers that are closed at the end."""
    monkeypatch.setattr(driver_module, "LOOK_AGAIN", 0.05)
    drivers: list[Driver] = []
    yield drivers
    for driver in drivers:
        driver.close()


def new_driver(made: list[Driver], connect: Callable[[], Any], time_limit: float = PATIENCE, connect_limit: float = PATIENCE) -> Driver:
    driver = Driver(connect, Exchange(JOB, "me", CODEC, time.monotonic), time_limit, connect_limit)
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
            assert not isinstance(only, Changed)
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


def test_a_store_that_tells_of_a_change_wakes_the_loop_and_is_no_answer(made: list[Driver]) -> None:
    store = Watching()
    driver = new_driver(made, lambda: store)
    ask(driver)
    assert store.key == JOB + "round"
    store.changed()
    assert select.select([driver.fileno()], [], [], PATIENCE)[0]
    (told,) = driver.answers()
    assert isinstance(told, Changed) and driver.deadline is None
    driver._pending = True
    store.changed()
    driver.answers()
    assert driver.deadline is not None, "an exchange under way still is"


def test_who_is_not_let_in_is_told_so(made: list[Driver]) -> None:
    def refuse() -> MemoryStore:
        raise StoreRefused("no such user")

    def fail() -> MemoryStore:
        raise StoreError("no answer")

    found = [ask(new_driver(made, connect)) for connect in (refuse, fail)]
    assert [(one.why, one.refused) for one in found if isinstance(one, SyncFailed)] == [("no such user", True), ("no answer", False)]


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
    fds = len(descriptors())
    for _ in range(200):
        assert isinstance(ask(driver), Synced)
        driver.reconnect()
    await_threads(1)
    assert len(descriptors()) <= fds


def test_without_a_thread_the_exchange_fails_and_the_next_one_tries_again(made: list[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = new_driver(made, Watched)
    assert isinstance(ask(driver), Synced)
    driver.reconnect()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        found = ask(driver)
        assert isinstance(found, SyncFailed) and found.why.startswith("can't start new thread")
    assert isinstance(ask(driver), Synced)


def test_threads_that_hang_do_not_pile_up(made: list[Driver]) -> None:
    go = threading.Event()

    def connect() -> Watched:
        assert go.wait(PATIENCE)
        return Watched()

    driver = new_driver(made, connect, connect_limit=0.02)
    whys = [found.why for found in (ask(driver) for _ in range(60)) if isinstance(found, SyncFailed)]
    assert sum(t.name == "store" for t in threading.enumerate()) <= driver_module.HANGING + 10
    assert len(whys) == 60 and any("connections hang; the host of the store accepts them" in why for why in whys)
    go.set()
    await_threads(1)
    assert isinstance(ask(driver), Synced)


def test_lines_share_nothing_that_changes(made: list[Driver]) -> None:
    """An abandoned thread may go on at any moment, beside the one that has taken its place."""
    driver = new_driver(made, Watched)
    ask(driver)
    first = driver._line.exchange
    driver.reconnect()
    second = driver._line.exchange
    assert second is not first and second._newest is first._newest
    shared = [name for name, value in vars(first).items() if isinstance(value, dict | list | set) and vars(second)[name] is value]
    assert shared == []


def test_an_exchange_during_which_the_machine_was_suspended_is_given_up(made: list[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Watched()
    store.go.clear()
    stores = [store, Watched()]
    driver = new_driver(made, lambda: stores.pop(0))
    driver.submit(Sync())
    assert store.reached.wait(PATIENCE)
    real = driver_module.clock.now
    monkeypatch.setattr(driver_module.clock, "now", lambda: real() + 1000)
    assert driver.deadline is not None and driver.deadline <= driver_module.clock.now()
    (found,) = driver.give_up(driver_module.clock.now())
    assert isinstance(found, SyncFailed)
    driver.submit(Sync())
    assert select.select([driver.fileno()], [], [], PATIENCE)[0]
    assert isinstance(driver.answers()[0], Synced)
    store.go.set()
    await_threads(1)


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
    root = Path(__file__).resolve().parents[2]
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
