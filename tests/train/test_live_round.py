"""Which workers of a round train together: the rule, and what they tell each other by a real store."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastirun.train.groups import connections as group_connections
from elastirun.train.live import live_round
from elastirun.train.live.live_round import LiveRound, RoundOver
from elastirun.worker.live_messages import store_prefix
from elastirun.worker.live_worlds import LiveWorld, first_world, parse_ranks, parse_states
from tests.support.until import PATIENCE

NAMES = ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ELASTIRUN_WORLD")


@pytest.mark.parametrize(
    ("told", "ranks"),
    [
        ([], (0, 1, 2, 3)),
        ([[], []], (0, 1, 2, 3)),
        ([[[0, 5], [1, 5]], [[3, 5]]], (0, 1, 3)),
        ([[], [[3, 5]]], (3,)),
        ([[[0, 4], [1, 4]], [[2, 5]]], (2,)),
    ],
    ids=["first_round", "nobody_has_a_state", "some_have", "of_one_node", "an_older_state_counts_as_none"],
)
def test_those_with_the_newest_state_begin(told: list[list[list[int]]], ranks: tuple[int, ...]) -> None:
    assert first_world(told, 4) == LiveWorld(0, ranks)


@pytest.mark.parametrize("value", [None, 3, {"0": 1}, ["0"], [True], [-1], [4], [0, 0], [[0]]], ids=str)
def test_what_a_stranger_writes_in_place_of_ranks_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no list of ranks below 4"):
        parse_ranks(value, 4)


@pytest.mark.parametrize("value", [None, [0, 5], [[0]], [[0, "5"]], [[0, 5, 5]], [[4, 5]], [[0, 5], [0, 6]]], ids=str)
def test_what_a_stranger_writes_in_place_of_states_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no list of ranks"):
        parse_states(value, 4)


def test_ranks_and_states_are_parsed() -> None:
    assert (parse_ranks([1, 0], 4), parse_states([[3, 5], [0, 4]], 4)) == ((1, 0), [(3, 5), (0, 4)])


@dataclass
class Round:
    """A round of ``workers`` on one node, whose workers are threads of this process."""

    store: Any
    workers: int
    number: int = 2
    asked: threading.Event = field(default_factory=threading.Event)
    made: list[LiveRound] = field(default_factory=list)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    def worker(self, rank: int) -> LiveRound:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.workers), GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(self.store.port)
        self.made.append(LiveRound(self.number, self.asked.is_set))
        return self.made[-1]

    def tell(self, *states: tuple[int, int]) -> None:
        """Say as the agent does which ranks have a state."""
        self.store.set(f"{store_prefix(self.number)}/node/0", json.dumps(states))

    def goes_on(self, worker: LiveRound) -> Future[None]:
        return self.threads.submit(lambda: worker.begin(worker.find_next()))

    def enter(self, worker: LiveRound) -> Future[None]:
        return self.threads.submit(lambda: worker.begin(worker.enter()))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Round]]:
    made: list[Round] = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # what it was comes back afterwards

    def new(workers: int, number: int = 2) -> Round:
        made.append(Round(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), workers, number))  # type: ignore[attr-defined]
        return made[-1]

    yield new
    for one in made:
        one.asked.set()
        one.threads.shutdown()
        for worker in one.made:
            worker.leave()


def test_in_the_first_round_all_begin_together(make: Callable[..., Round]) -> None:
    here = make(2, number=1)
    workers = [here.worker(rank) for rank in range(2)]
    for entered in [here.enter(worker) for worker in workers]:
        entered.result(PATIENCE)
    assert [(worker.rank, worker.size) for worker in workers] == [(0, 2), (1, 2)]


def test_a_world_waits_for_all_its_ranks(make: Callable[..., Round]) -> None:
    worker = make(2, number=1).worker(0)
    asked: list[str] = []  # the key at which it has looked for the others

    def add(key: str, amount: int) -> int:
        if not amount:
            asked.append(key)
        return 1

    worker._store, worker._asked = SimpleNamespace(add=add), lambda: bool(asked)
    with pytest.raises(RoundOver):
        worker.enter()


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_with_a_state_that_hangs_is_not_waited_for_for_ever(
    make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """One of the first round may still be on its way."""
    monkeypatch.setattr(live_round, "COME", 0.0)
    here = make(2, number)
    here.tell((0, 1), (1, 1))
    first, second = (here.worker(rank) for rank in range(2))
    entered = here.enter(first)
    if number == 2:
        with pytest.raises(RuntimeError, match="not all ranks"):
            entered.result(PATIENCE)
        return
    time.sleep(2 * live_round.NAPS[1])
    here.enter(second).result(PATIENCE)
    entered.result(PATIENCE)


def test_those_with_a_state_go_on_and_a_new_one_is_taken_in_when_it_is_ready(make: Callable[..., Round]) -> None:
    here = make(3)
    here.tell((0, 1), (2, 1))
    old = [here.worker(0), here.worker(2)]
    for entered in [here.enter(worker) for worker in old]:
        entered.result(PATIENCE)
    assert [(worker.rank, worker.size) for worker in old] == [(0, 2), (1, 2)]
    asked = threading.Event()
    for worker in old:
        worker.look_for_ready(asked.set)
    new = here.worker(1)
    assert not asked.is_set()
    entered = here.enter(new)
    assert asked.wait(PATIENCE)
    for changed in [here.goes_on(worker) for worker in old]:
        changed.result(PATIENCE)
    entered.result(PATIENCE)
    assert [(worker.rank, worker.size) for worker in (*old, new)] == [(0, 3), (1, 3), (2, 3)]
    assert new.world == LiveWorld(1, (0, 2, 1))


def test_a_world_that_a_stranger_has_written_is_no_world(make: Callable[..., Round]) -> None:
    here = make(2)
    here.tell((0, 1))
    here.store.set(f"{store_prefix(2)}/world/1", "[0, [1]]")
    new = here.worker(1)
    with pytest.raises(ValueError, match="no list of ranks below 2"):
        here.enter(new).result(PATIENCE)


def test_the_same_ranks_meet_again_in_another_world_and_new_ones_find_the_one_after_it(make: Callable[..., Round]) -> None:
    job = make(4)
    job.tell((0, 5), (2, 5))
    first, late = job.worker(0), job.worker(2)
    for waits in [job.enter(first), job.enter(late)]:
        waits.result(PATIENCE)
    again = job.threads.submit(first.repeat)
    late.reconnect()  # what it knows of the round stays, and is not in the environment any more
    late.repeat()
    again.result(PATIENCE)
    assert first.world == late.world == LiveWorld(1, (0, 2)) and (late.rank, late.size, late.whole) == (1, 2, False)
    new = [job.worker(rank) for rank in (1, 3)]
    asked = threading.Event()
    comes = [job.enter(one) for one in new]
    first.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    for waits in [job.goes_on(first), job.goes_on(late), *comes]:
        waits.result(PATIENCE)
    assert {one.world for one in (first, late, *new)} == {LiveWorld(2, (0, 2, 1, 3))}


def test_several_that_are_ready_are_taken_in_together(make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    here = make(3)
    here.tell((1, 1))
    old = here.worker(1)
    here.enter(old).result(PATIENCE)
    monkeypatch.setattr(live_round, "TOGETHER", 1000.0)
    first, second = here.worker(0), here.worker(2)
    entered, looks = [here.enter(first)], 0
    while not old._store.check(["ready/0"]):
        time.sleep(0.001)

    def looks_again(timeout: float | None = None) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            entered.append(here.enter(second))
        return False

    monkeypatch.setattr(old._stopped, "wait", looks_again)
    asked = threading.Event()
    old.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    old.begin(old.find_next())
    for one in entered:
        one.result(PATIENCE)
    assert old.world == LiveWorld(1, (1, 0, 2)) and old.rank == 0


def test_one_that_is_ready_does_not_wait_for_ever_for_another_one(make: Callable[..., Round]) -> None:
    here = make(3)
    here.tell((0, 1))
    old = here.worker(0)
    here.enter(old).result(PATIENCE)
    new = here.worker(2)
    entered = here.enter(new)
    asked = threading.Event()
    old.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    old.begin(old.find_next())
    entered.result(PATIENCE)
    assert new.world == LiveWorld(1, (0, 2))
    last = here.worker(1)
    asked.clear()
    entered = here.enter(last)
    old.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    for changed in [here.goes_on(worker) for worker in (old, new)]:
        changed.result(PATIENCE)
    entered.result(PATIENCE)
    assert last.world == LiveWorld(2, (0, 2, 1)) and (last.rank, new.rank) == (2, 1)


def test_who_has_left_asks_for_no_world(make: Callable[..., Round]) -> None:
    here = make(2)
    here.tell((0, 1))
    old = here.worker(0)
    here.enter(old).result(PATIENCE)
    entered = here.enter(here.worker(1))
    asked: list[bool] = []
    old._stopped.wait = lambda timeout=None: False  # type: ignore[method-assign,assignment]  # it looks once more
    old.leave()
    assert old.world is not None
    old._look(old.world, lambda: asked.append(True))
    assert not asked
    here.asked.set()
    with pytest.raises(RoundOver):
        entered.result(PATIENCE)


def test_who_waits_ends_well_when_training_ends_without_it(make: Callable[..., Round]) -> None:
    here = make(2)
    here.tell((0, 1))
    old = here.worker(0)
    here.enter(old).result(PATIENCE)
    entered = here.enter(here.worker(1))
    old.look_for_ready(lambda: None)
    old._end_training()
    with pytest.raises(SystemExit) as ended:
        entered.result(PATIENCE)
    assert ended.value.code == 0


def connections(port: int) -> dict[int, int]:
    """Return the descriptors of this process's connections to ``port``, by their numbers in the kernel."""
    found = {}
    for inode, fd in group_connections._sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in group_connections.INTERNET and connection.getpeername()[1] == port:
                found[inode] = fd
    return found


class Cut:
    """A worker whose connection to the store can be cut."""

    def __init__(self, here: Round, rank: int) -> None:
        before = connections(here.store.port)
        self.worker = here.worker(rank)
        [self._fd] = [fd for inode, fd in connections(here.store.port).items() if inode not in before]

    def cut(self) -> None:
        with socket.socket(fileno=os.dup(self._fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_round, "AGAIN", 0.01)


@pytest.mark.usefixtures("at_once")
def test_who_looks_for_new_workers_finds_them_although_its_connection_has_broken(make: Callable[..., Round]) -> None:
    here = make(2)
    here.tell((0, 1))
    old = Cut(here, 0)
    here.enter(old.worker).result(PATIENCE)
    asked = threading.Event()
    old.worker.look_for_ready(asked.set)
    old.cut()
    entered = here.enter(here.worker(1))
    assert asked.wait(PATIENCE)
    old.worker.begin(old.worker.find_next())
    entered.result(PATIENCE)


@pytest.mark.usefixtures("at_once")
def test_who_ends_training_says_so_although_its_connection_has_broken(make: Callable[..., Round]) -> None:
    here = make(2)
    here.tell((0, 1))
    old = Cut(here, 0)
    here.enter(old.worker).result(PATIENCE)
    entered = here.enter(here.worker(1))
    old.cut()
    old.worker._end_training()
    with pytest.raises(SystemExit):
        entered.result(PATIENCE)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("waits_for", ["a_world", "the_switch"])
def test_a_new_worker_is_taken_in_although_its_connection_has_broken(make: Callable[..., Round], waits_for: str) -> None:
    here = make(2)
    here.tell((0, 1))
    old, new = here.worker(0), Cut(here, 1)
    here.enter(old).result(PATIENCE)
    entered, asked = here.enter(new.worker), threading.Event()
    while waits_for == "a_world" and not old._store.check(["ready/1"]):
        time.sleep(0.001)
    if waits_for == "a_world":
        new.cut()
    old.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    here.goes_on(old).result(PATIENCE)
    entered.result(PATIENCE)
    assert new.worker.world == LiveWorld(1, (0, 1))
    if waits_for == "a_world":
        return
    waits = here.threads.submit(new.worker.wait_until_switched, new.worker.world)
    new.cut()
    old.say_switched(new.worker.world)
    waits.result(PATIENCE)


@pytest.mark.usefixtures("at_once")
def test_a_switch_that_could_not_be_said_at_once_is_said_again(make: Callable[..., Round]) -> None:
    """What is sent into a broken connection first is lost without an error."""
    here = make(2)
    old = Cut(here, 0)
    old.cut()
    old.worker.say_switched(LiveWorld(1, (0, 1)))
    assert here.store.check([f"{store_prefix(2)}/switched/1"])


@pytest.mark.usefixtures("at_once")
def test_a_wait_without_a_store_ends_so_that_the_agent_hears_of_it(make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_round, "AWAY", 0.0)
    here, missed = make(2), 0
    worker = here.worker(0)
    monkeypatch.setattr(worker, "_opened", lambda: None)

    def fails() -> None:
        nonlocal missed
        if (missed := missed + 1) > 5:
            here.asked.set()
        raise RuntimeError("the connection is broken")

    with pytest.raises(RuntimeError, match="the connection is broken"):
        worker._wait(fails)


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_leaves_the_round_does_not_connect_again(make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are cut then, and the store may be gone: torch would try for seconds."""
    here = make(2)
    worker = here.worker(0)
    monkeypatch.setattr(worker, "_opened", lambda: pytest.fail("it connects again"))

    def is_cut() -> None:
        here.asked.set()
        raise RuntimeError("the connection is cut")

    with pytest.raises(RoundOver):
        worker._wait(is_cut)


def test_a_worker_that_ends_with_an_exception_does_not_say_that_training_is_over(
    make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make(2)
    here.tell((0, 1))
    old = here.worker(0)
    here.enter(old).result(PATIENCE)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    old._end_training()
    assert not old._store.check(["over"])


def test_nobody_is_waited_for_when_the_change_of_the_world_is_given_up(make: Callable[..., Round]) -> None:
    here = make(3)
    here.tell((0, 1), (1, 1))
    old = [here.worker(0), here.worker(1)]
    for entered in [here.enter(worker) for worker in old]:
        entered.result(PATIENCE)
    changes = here.goes_on(old[0])
    time.sleep(2 * live_round.NAPS[1])
    assert not changes.done()
    old[0].stop()
    with pytest.raises(RoundOver):
        changes.result(PATIENCE)


def asked_for(here: Round) -> tuple[LiveRound, Future[None]]:
    """A worker that trains, and has seen a new one and named it in the next world; and the entry of the new one."""
    here.tell((0, 1))
    old = here.worker(0)
    here.enter(old).result(PATIENCE)
    entered, asked = here.enter(here.worker(1)), threading.Event()
    old.look_for_ready(asked.set)
    assert asked.wait(PATIENCE)
    return old, entered


def test_a_new_worker_waits_as_long_as_the_others_need_for_a_step(make: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps they evaluate the model just then, for minutes."""
    monkeypatch.setattr(live_round, "COME", 0.0)
    here = make(2)
    old, entered = asked_for(here)
    while here.store.add(f"{store_prefix(here.number)}/here/1", 0) < 1:
        time.sleep(0.001)
    time.sleep(2 * live_round.NAPS[1])
    here.goes_on(old).result(PATIENCE)
    entered.result(PATIENCE)
    assert here.made[1].world == old.world == LiveWorld(1, (0, 1))


def test_a_new_worker_that_is_asked_for_after_the_last_step_ends_well(make: Callable[..., Round]) -> None:
    old, entered = asked_for(make(2))
    old._end_training()
    with pytest.raises(SystemExit) as ended:
        entered.result(PATIENCE)
    assert ended.value.code == 0


@pytest.mark.parametrize("over", [False, True])
def test_a_new_worker_waits_until_the_others_have_left_their_world_or_have_ended(make: Callable[..., Round], over: bool) -> None:
    here = make(2)
    old, entered = asked_for(here)
    here.goes_on(old).result(PATIENCE)
    entered.result(PATIENCE)
    new = here.made[1]
    assert new.world is not None
    waits = here.threads.submit(new.wait_until_switched, new.world)
    time.sleep(2 * live_round.NAPS[1])
    assert not waits.done()
    old._end_training() if over else old.say_switched(new.world)
    if over:
        with pytest.raises(SystemExit):
            waits.result(PATIENCE)
        with pytest.raises(SystemExit):
            new.end_if_over(0.0)
    else:
        waits.result(PATIENCE)
        new.end_if_over(0.0)
