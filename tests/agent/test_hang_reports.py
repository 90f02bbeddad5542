"""The nodes' reports of a hang and the verdict on all of them, through real stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elastirun.agent.hangs import reports as hang_reports
from elastirun.agent.hangs.causes import ELSEWHERE, WorkerState
from elastirun.agent.hangs.reports import HangReports, Report
from elastirun.agent.store import node_reports
from elastirun.agent.store.node_reports import Meeting
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.codec import Codec
from tests.rendezvous.test_stores import new_server
from tests.support.until import until

PREFIX = "elastirun/job/j/"
TOKEN = b"the token of this job"


def state(rank: int, place: str = "train.py:9") -> WorkerState:
    return WorkerState(rank, 40, False, True, True, place)


class Connection(MemoryStore):
    """A connection that counts the reads that have begun."""

    reads, closed = 0, False

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        self.reads += 1
        return super().get(keys)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Memory:
    """A store of this test, in place of one that an agent describes."""

    data: dict[str, bytes] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    connections: list[Connection] = field(default_factory=list)

    owner = ""

    def open(self) -> MemoryStore:
        self.connections.append(Connection(self.data, self.lock))
        return self.connections[-1]

    def two_more_reads(self, *nodes: HangReports) -> None:
        """Wait until each of ``nodes`` has judged by a new read, which it has when it begins another one, or one has a verdict."""
        wanted = {one: one.reads + 2 for one in self.connections}

        def done() -> bool:
            return any(node.verdict for node in nodes) or all(one.closed or one.reads >= reads for one, reads in wanted.items())

        until(done, "two more reads of each node")

    def report(self, node_rank: int) -> Report:
        key = f"{PREFIX}hang/node/{node_rank}"
        return Codec(TOKEN).decode(key, self.data[key], Report)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()
    monkeypatch.setattr(node_reports, "described", lambda store: made)
    monkeypatch.setattr(hang_reports, "PAUSE", 0.01)
    return made


@pytest.fixture
def hang() -> Iterator[Callable[..., HangReports]]:
    """``hang(node_rank, ...)`` is one node's part in a hang of a round of three nodes."""
    made = []

    def begin(node_rank: int, place: str = "train.py:9", fence: str = "run:1", store: dict[str, Any] | None = None) -> HangReports:
        meeting = Meeting(store or {}, PREFIX, TOKEN, fence, node_rank, 3)
        made.append(HangReports(meeting, [state(node_rank, place)]))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def test_all_nodes_learn_the_verdict_on_their_reports_through_a_tcpstore(hang: Callable[..., HangReports]) -> None:
    server = new_server()
    store = {"kind": "tcp", "address": server.address, "port": server.port}
    nodes = [hang(i, "train.py:12" if i == 1 else "train.py:9", store=store) for i in range(3)]
    until(lambda: all(node.verdict for node in nodes), "the verdict")
    assert {(node.verdict.ranks, node.verdict.how) for node in nodes if node.verdict} == {((1,), ELSEWHERE)}
    for node in nodes:
        node.close()
    keys = [f"{PREFIX}hang/node/{i}" for i in range(3)]
    with closing(server.connect()) as client:

        def over() -> bool:
            return not any(Codec(TOKEN).decode(key, value, Report).workers for key, value in client.get(keys).items())

        until(over, "the end of the reports")
    server.served = None


def test_without_the_reports_of_all_nodes_there_is_no_verdict(memory: Memory, hang: Callable[..., HangReports]) -> None:
    first, second, of_an_earlier_round = hang(0), hang(1), hang(2, fence="run:0")
    until(lambda: len(memory.data) == 3, "the reports of three nodes")
    memory.two_more_reads(first, second, of_an_earlier_round)
    assert first.verdict is second.verdict is of_an_earlier_round.verdict is None
    of_an_earlier_round.close()
    until(lambda: not memory.report(2).workers, "the end of the report")
    third = hang(2)
    until(lambda: all(node.verdict for node in (first, second, third)), "the verdict")


def test_what_was_said_of_an_earlier_hang_of_the_round_does_not_count(memory: Memory, hang: Callable[..., HangReports]) -> None:
    nodes = [hang(i) for i in range(3)]
    until(lambda: all(node.verdict for node in nodes), "the verdict")
    for node in nodes:
        node.close()
    until(lambda: not any(memory.report(i).workers for i in range(3)), "the end of the reports")
    again = [hang(i) for i in (0, 1)]
    until(lambda: all(memory.report(i).workers for i in (0, 1)), "the new reports")
    memory.two_more_reads(*again)
    assert [node.verdict for node in again] == [None, None]


def test_reports_of_strangers_do_not_count(memory: Memory, hang: Callable[..., HangReports]) -> None:
    nodes = [hang(0), hang(1)]
    key = f"{PREFIX}hang/node/2"
    memory.data[key] = Codec(b"another token of 16").encode(key, Report("run:1", "x", (state(2),)))
    until(lambda: len(memory.data) >= 3, "the reports of two nodes")
    memory.two_more_reads(*nodes)
    assert [node.verdict for node in nodes] == [None, None]


def test_a_place_of_any_length_and_a_number_of_any_size_fit_into_a_report(memory: Memory) -> None:
    wild = replace(state(0, "\n\0" + "x" * 5000), steps=(1 << 64) - 1)
    one = HangReports(Meeting({}, PREFIX, TOKEN, "run:1", 0, 2), [wild])
    until(lambda: f"{PREFIX}hang/node/0" in memory.data, "the report")
    assert len(memory.report(0).workers[0].place) == 200
    one.close()
