"""``elastirun.train.is_current``: True in the current round, never after it was replaced; strangers on the socket harm nobody."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastirun import clock
from elastirun.agent.workers import local_socket
from elastirun.agent.workers.local_socket import MAX_CLIENTS, LocalSocket
from elastirun.agent.workers.round_check import RoundCheck, still_holds
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.events import Synced, SyncFailed
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, Member, Place, RoundRecord, Verdict
from elastirun.train import RoundUnknown, is_current
from tests.support.cluster import Cluster, Worker, dies, kill
from tests.support.descriptors import descriptors
from tests.support.until import PATIENCE

RECORD = RoundRecord(store_id="s", round=3, members=(Member("a", "a", "", 1, "", 0), Member("b", "b", "", 1, "", 0)))


def asks(worker: Worker, timeout: float = PATIENCE) -> bool:
    """What ``is_current`` answers in a process with the worker's environment, however long that worker has been dead."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ELASTIRUN_FENCE", "ELASTIRUN_SOCKET"):
            patch.setenv(name, worker.env[name])
        return is_current(timeout)


# --- real agents


def test_a_round_is_current_until_another_one_has_formed(nodes: Cluster) -> None:
    first = nodes.agent(1, "--last-call=0.2", "--max-restarts=1")
    (old,) = nodes.round(1)
    assert asks(old)
    second = nodes.agent(2, "--last-call=0.2", "--max-restarts=1")
    both = nodes.round(2)
    assert [asks(old), *map(asks, both)] == [False, True, True]
    both[1].tell("exit 1")
    again = nodes.round(2, after=both[0].round)
    assert [asks(w) for w in (*both, *again)] == [False, False, True, True]
    for worker in again:
        worker.tell("exit 0")
    assert [nodes.ends(first), nodes.ends(second)] == [0, 0]
    assert [path.name for path in nodes.tmp_path.glob("elastirun*")] == [], "no folder stays"
    with pytest.raises(RoundUnknown, match=r"nobody could tell.*No such file"):
        asks(again[0], 0.0)


def test_the_answer_takes_milliseconds(nodes: Cluster) -> None:
    nodes.agent(1, nnodes="1")
    (worker,) = nodes.round(1)
    times = []
    for _ in range(20):
        began = time.monotonic()
        assert asks(worker)
        times.append(time.monotonic() - began)
    assert sorted(times)[10] < 0.1, times


def test_while_a_node_is_stopped_for_a_newcomer_it_may_still_publish(nodes: Cluster) -> None:
    """SIGTERM, save, ask, rename: the usual order of a checkpoint at a planned stop."""
    nodes.script.write_text("import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n" + nodes.script.read_text())
    first = nodes.agent(1, "--last-call=0.2")
    (old,) = nodes.round(1)
    nodes.agent(2, "--last-call=0.2")
    nodes.says(1, "stopping the workers here")
    assert asks(old)
    old.tell("exit 0")
    assert [asks(w) for w in (old, *nodes.round(2))] == [False, True, True]
    assert first.poll() is None


def test_never_true_for_a_node_that_was_frozen_while_the_others_went_on(nodes: Cluster) -> None:
    for i in (1, 2):
        nodes.agent(i, "--expire=1", nnodes="1:2")
    both = nodes.round(2)
    frozen = nodes.agents[1]
    stale = next(w for w in both if w.env["GROUP_RANK"] == "1")
    frozen.send_signal(signal.SIGSTOP)
    try:
        (alone,) = nodes.round(1, after=both[0].round)
        assert asks(alone)
        with pytest.raises(RoundUnknown, match=r"within 0.2 s nobody could tell"):
            asks(stale, 0.2)
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(asks(stale)))
        waiting.start()
    finally:
        frozen.send_signal(signal.SIGCONT)
    waiting.join(PATIENCE)
    assert found == [False]


def test_nobody_can_tell_while_the_store_is_away(nodes: Cluster) -> None:
    for i in (1, 2):
        nodes.agent(i, "--store-succession=off", nnodes="2")
    one, two = nodes.round(2)
    assert asks(two)
    kill(nodes.agents[0])  # the store's host
    assert dies(one.pid)
    with pytest.raises(RoundUnknown, match=r"the rendezvous store does not answer: "):
        asks(two, 3.0)


def test_without_an_agent_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_current()
    monkeypatch.setenv("ELASTIRUN_FENCE", "s:3")
    with pytest.raises(RoundUnknown, match="no socket"):
        is_current()


# --- the rule


@pytest.mark.parametrize(
    ("record", "fence", "answer"),
    [
        (RECORD, "s:3", True),
        (RECORD, "s:2", False),
        (RECORD, "t:3", False),
        (None, "s:3", False),
        (replace(RECORD, broken=Broken(Cause.JOIN, "c joined", "b")), "s:3", True),
        (replace(RECORD, broken=Broken(Cause.LOST, "b silent", "a", ("b",))), "s:3", True),
        (replace(RECORD, broken=Broken(Cause.LOST, "a silent", "b", ("a",))), "s:3", False),
        (replace(RECORD, members=RECORD.members[1:]), "s:3", False),
        (replace(RECORD, closed=Closed(Verdict.FAILED, "", "b")), "s:3", True),
    ],
)
def test_what_counts_is_that_nobody_forms_the_next_round_without_this_node(record: RoundRecord | None, fence: str, answer: bool) -> None:
    assert still_holds(record, fence, "a") is answer


def test_a_round_whose_job_has_moved_does_not_hold() -> None:
    assert not still_holds(replace(RECORD, moved=Place("b", "", 1)), "s:3", "a")


# --- the socket


class Agent:
    """The agent's end alone; the test plays the store."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()
        self.reads = 0
        self.socket = LocalSocket(self.selector)
        self.check = RoundCheck("a", self.socket, self.read_store, lambda: "{}")

    def read_store(self) -> None:
        self.reads += 1

    def turn(self) -> None:
        """One round of the loop."""
        for key, mask in self.selector.select(0):
            key.data(mask)

    def synced(self, started: float | None = None) -> None:
        now = clock.now()
        self.check.settle(Synced(now, now if started is None else started, RECORD, {}))

    def client(self, data: bytes = b"") -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(self.socket.path)
        connection.sendall(data)
        self.turn()
        self.turn()
        return connection

    def answers(self, asking: socket.socket) -> bytes:
        """Turn, with an exchange with the store each time, until there is an answer, and return it."""
        ends = time.monotonic() + PATIENCE
        while not select.select([asking], [], [], 0.01)[0]:
            assert time.monotonic() < ends, (len(self.socket.clients), [client.asked for client in self.socket.clients], clock.now())
            self.turn()
            self.synced()
        return asking.recv(100)

    @property
    def descriptors(self) -> int:
        return len(descriptors())


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Agent]:
    monkeypatch.setattr(local_socket.tempfile, "tempdir", str(tmp_path))
    made = Agent()
    yield made
    made.socket.close()
    made.selector.close()
    assert list(tmp_path.iterdir()) == []


def test_only_a_read_that_began_after_the_question_answers_it(agent: Agent) -> None:
    before = clock.now()
    with agent.client(b"current s:3\n") as asking:
        assert agent.reads == 1
        agent.synced(started=before)
        asking.setblocking(False)
        with pytest.raises(BlockingIOError):
            asking.recv(1)
        agent.synced()
        assert asking.recv(100) == b"yes\n"
        assert asking.recv(100) == b""


def test_where_the_others_may_have_gone_on_the_answer_is_no(agent: Agent) -> None:
    with agent.client(b"current s:3\n") as asking:
        now = clock.now()
        agent.check.settle(Synced(now, now, RECORD, {}), lambda: True)
        assert asking.recv(100) == b"no\n"


def test_a_question_does_not_press_a_store_that_is_in_trouble(agent: Agent) -> None:
    agent.check.settle(SyncFailed(0.0, "no answer for 3 s"))
    with agent.client(b"current s:2\n") as asking:
        assert agent.reads == 0
        agent.synced()
        assert asking.recv(100) == b"no\n"
    with agent.client(b"current s:2\n") as asking:
        assert agent.reads == 1
        agent.check.settle(SyncFailed(0.0, "no answer for 3 s"))
        assert asking.recv(100) == b"unknown the rendezvous store does not answer: no answer for 3 s\n"


def test_who_asks_why_it_is_stopped_is_answered_at_once(agent: Agent) -> None:
    stops = Stop(planned=True, reason="why"), Stop(planned=False, reason="why")
    for stop, answer in ((None, "no"), (stops[0], "planned"), (stops[1], "failure")):
        if stop:
            agent.check.round_stops(stop, 1.0)
        with agent.client(b"stop\n") as asking:
            asking.setblocking(False)
            assert asking.recv(100) == answer.encode() + b"\n" and agent.reads == 0


def test_strangers_neither_hang_nor_fill_the_agent(agent: Agent) -> None:
    before = agent.descriptors
    for data in (b"", b"x" * 5000, b"\xff\xfe\n", b"current s:3\ncurrent s:3\n", b"\n", b"current s:3\n"):
        agent.client(data).close()
        agent.turn()
    agent.synced()
    assert agent.descriptors == before
    with contextlib.ExitStack() as silent:
        for _ in range(3 * MAX_CLIENTS):
            silent.enter_context(agent.client())
        assert agent.descriptors <= before + 4 * MAX_CLIENTS
        with agent.client(b"current s:3\n") as asking:
            assert agent.answers(asking) == b"yes\n"
    agent.turn()
    assert agent.descriptors == before


def test_questions_are_answered_again_after_the_descriptors_had_run_out(agent: Agent) -> None:
    """Connections to the workers' store can use up all descriptors of the agent that serves it."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (agent.descriptors + 8, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            asking.connect(agent.socket.path)
            agent.turn()
            assert agent.selector.select(0) == [], "it does not spin"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        due = agent.socket.tick(clock.now())
        assert due is not None
        assert agent.socket.tick(due) == math.inf
        asking.sendall(b"current s:3\n")
        assert agent.answers(asking) == b"yes\n"


def test_another_user_is_not_answered(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.stat(agent.socket.folder).st_mode & 0o777 == 0o700
    monkeypatch.setattr(local_socket.os, "geteuid", lambda: 65534)
    with agent.client() as asking:
        assert asking.recv(100) == b""


def test_a_long_path_and_none_at_all(agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(local_socket.tempfile, "tempdir", str(deep))
    socket = LocalSocket(agent.selector)
    long = RoundCheck("a", socket, agent.read_store, str)
    monkeypatch.setenv("ELASTIRUN_FENCE", "s:3")
    monkeypatch.setenv("ELASTIRUN_SOCKET", socket.path)
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(is_current(PATIENCE)))
    asking.start()
    while not found:
        agent.turn()
        now = clock.now()
        long.settle(Synced(now, now, RECORD, {}))
    asking.join()
    socket.close()
    deep.rmdir()
    assert found == [True]
    none = LocalSocket(agent.selector)
    assert (none.path, none.folder) == ("", "") and "No such file" in none.trouble
