"""The times that nodes share through real stores, and the median of the job that each of them learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from elastirun.agent.hangs import job_median
from elastirun.agent.hangs.job_median import LASTS, MOST_WORKERS, JobTimes, NodeTimes, SharedMedian
from elastirun.agent.hangs.stragglers import WINDOW, Median
from elastirun.agent.store import locations as status_stores
from elastirun.agent.store import node_reports
from elastirun.agent.store.node_reports import Meeting
from elastirun.errors import StoreError
from elastirun.rendezvous.wire.codec import FORMAT, Codec
from tests.agent.test_hang_reports import PREFIX, TOKEN, Memory
from tests.rendezvous.test_stores import new_server
from tests.support.cluster import PATIENCE
from tests.support.etcd_server import etcd

FENCE = "run:1"


class Nodes:
    """The nodes of a round, each of which has so many seconds per worker; None: it shares nothing."""

    def __init__(self, store: dict[str, Any], count: int = 3) -> None:
        self.times = [JobTimes() for _ in range(count)]
        self.meeting = Meeting(store, PREFIX, TOKEN, FENCE, 0, count)

    def window(self, *seconds: list[float] | None, first: int = 0) -> list[Median | None]:
        """Let a window pass. The nodes share their times one after the other, from ``first`` on. Return what each knows then."""
        order = [*range(len(self.times))]
        for i in order[first:] + order[:first]:
            if (own := seconds[i]) is not None:
                self.times[i].share(replace(self.meeting, node_rank=i), own)
                thread = self.times[i]._thread
                assert thread is not None
                thread.join(PATIENCE)
                assert not thread.is_alive()
        return [one.median(self.meeting.fence) for one in self.times]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()
    monkeypatch.setattr(node_reports, "described", lambda store: made)
    return made


@contextmanager
def served(kind: str) -> Iterator[dict[str, Any]]:
    if kind == "tcp":
        server = new_server()
        yield {"kind": "tcp", "address": server.address, "port": server.port}
        server.served = None
    else:
        with etcd() as made:
            yield {"kind": "etcd", "endpoints": made.endpoints, "access": {}, "prefix": "/elastirun/"}


@pytest.mark.parametrize("kind", ["tcp", "etcd"])
def test_the_nodes_learn_the_median_of_all_ranks_through_a_store(kind: str) -> None:
    with served(kind) as store:
        nodes = Nodes(store)
        every = [0.3], [0.1, 0.11], [0.1, 0.5]
        assert nodes.window(*every, first=1) == [Median(0.11, 5), None, None], "the others have looked before it was there"
        assert nodes.window(*every) == [Median(0.11, 5)] * 3
        assert nodes.window([0.3], [0.2, 0.2], [0.2, 0.5], first=1) == [Median(0.2, 5), Median(0.11, 5), Median(0.11, 5)]


def test_times_and_medians_of_another_round_do_not_count(memory: Memory) -> None:
    nodes = Nodes({})
    assert nodes.window([0.1], [0.1], [0.1], first=1)[0] == Median(0.1, 3)
    nodes.window([0.1], [0.1], [0.1])
    nodes.meeting = replace(nodes.meeting, fence="run:2")
    assert [one.median("run:2") for one in nodes.times] == [None] * 3
    assert nodes.window(None, [0.3], [0.3]) == [None] * 3, "the median that they read is of the round before"
    assert nodes.window([0.3], None, [0.3]) == [Median(0.3, 3), None, Median(0.3, 3)]
    assert nodes.window([0.3], [0.3], None)[1] == Median(0.3, 3)
    other = Nodes({})
    other.meeting = replace(nodes.meeting, fence="run:3")
    assert other.window([0.5], None, None)[0] == Median(0.5, 1), "the times of the others are of the round before"


def test_only_node_rank_0_writes_the_median(memory: Memory) -> None:
    nodes = Nodes({})
    assert nodes.window(None, [0.1], [0.1]) == [None] * 3
    assert sorted(memory.data) == [f"{PREFIX}steps/node/{i}" for i in (1, 2)]


def test_a_node_that_shares_no_times_any_more_is_left_out(memory: Memory) -> None:
    nodes = Nodes({})
    nodes.window([0.1], [0.2], [0.3], first=1)
    ranks = [found.ranks for _ in range(LASTS) if (found := nodes.window([0.1], [0.2], None)[0])]
    assert ranks == [3] * (LASTS - 1) + [2]
    known = [nodes.window(None, [0.2], None)[1] is not None for _ in range(LASTS)]
    assert known == [True] * (LASTS - 1) + [False], "without node rank 0 each node goes by its own median"
    assert nodes.window([0.1], [0.2], None)[1] == Median(0.1, 2)


def test_of_a_store_that_is_away_the_last_median_is_used_for_some_windows(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    nodes = Nodes({})
    nodes.window([0.1], [0.2], [0.3], first=1)

    def away(store: dict[str, Any]) -> Any:
        raise StoreError("away")

    monkeypatch.setattr(node_reports, "described", away)
    known = [nodes.window([0.1], [0.2], [0.3])[0] is not None for _ in range(LASTS)]
    assert known == [True] * (LASTS - 1) + [False]


def record(node_rank: int, seconds: str, fence: str = FENCE, token: bytes | None = TOKEN) -> bytes:
    """Return the times of a node with any text in place of the list of seconds."""
    payload = f'{{"fence":"{fence}","seconds":{seconds},"v":{FORMAT},"window":1}}'.encode()
    codec = Codec(token)
    return payload + b"\n" + codec._mac(f"{PREFIX}steps/node/{node_rank}", payload) if token else payload


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"\xff\x00" * 1000,
        b"[" * 100_000,
        record(1, "[0.5]", token=b"another token of 16"),
        record(1, "[0.5]", token=None),
        record(2, "[0.5]"),  # of another node
        record(1, "[]"),
        record(1, "[-0.5]"),
        record(1, "[NaN]"),
        record(1, "[Infinity]"),
        record(1, "[1e999]"),
        record(1, "[" + "9" * 400 + ".0]"),
        record(1, '["0.5"]'),
        record(1, "[" + ",".join(["0.5"] * (MOST_WORKERS + 1)) + "]"),
        record(1, "[" + ",".join(["0.5"] * 20_000) + "]"),
        record(1, '{"0":0.5}'),
    ],
    ids=lambda value: repr(value[:60]),
)
def test_what_is_not_a_list_of_times_does_not_count(memory: Memory, foreign: bytes) -> None:
    memory.data[f"{PREFIX}steps/node/1"] = foreign
    assert Nodes({}).window([0.1], None, [0.2]) == [Median(0.1, 1), None, Median(0.1, 1)]


def test_what_such_a_list_looks_like(memory: Memory) -> None:
    memory.data[f"{PREFIX}steps/node/1"] = record(1, "[0.5]")
    assert Nodes({}).window([0.1], None, None)[0] == Median(0.1, 2)


def test_a_median_that_cannot_be_does_not_count(memory: Memory) -> None:
    key = f"{PREFIX}steps/node/median"
    for seconds, known in ((-0.1, False), (0.1, True)):
        memory.data[key] = Codec(TOKEN).encode(key, SharedMedian(FENCE, 1, Median(seconds, 9)))
        assert (Nodes({}).window(None, [0.3], None)[1] is not None) is known


def test_a_node_shares_no_more_than_others_read(memory: Memory) -> None:
    Nodes({}).window(None, [-1.0, *[0.1] * 5000], None)
    key = f"{PREFIX}steps/node/1"
    assert Codec(TOKEN).decode(key, memory.data[key], NodeTimes).seconds == (0.1,) * MOST_WORKERS


def test_as_long_as_the_store_is_slow_there_is_one_thread(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    goes_on, opened = threading.Event(), []

    def slow(store: dict[str, Any]) -> Memory:
        opened.append(threading.current_thread())
        assert goes_on.wait(PATIENCE)
        return memory

    monkeypatch.setattr(node_reports, "described", slow)
    nodes = Nodes({}, 2)
    for fence in ("run:1", "run:1", "run:2"):
        nodes.times[0].share(replace(nodes.meeting, fence=fence), [0.1])
    goes_on.set()
    opened[0].join(PATIENCE)
    assert len(opened) == 1 and nodes.times[0].median("run:2") is None
    nodes.meeting = replace(nodes.meeting, fence="run:2")
    assert nodes.window([0.2], None)[0] == Median(0.2, 1)


def test_without_a_thread_nothing_is_shared_and_nothing_fails(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    def limited(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    nodes = Nodes({}, 1)
    with monkeypatch.context() as patched:
        patched.setattr(job_median.threading.Thread, "start", limited)
        nodes.times[0].share(nodes.meeting, [0.1])
    assert nodes.times[0].median(FENCE) is None
    assert nodes.window([0.1]) == [Median(0.1, 1)]


def test_a_report_stays_at_etcd_for_as_long_as_it_counts() -> None:
    assert status_stores.REPORT_LASTS >= LASTS * WINDOW
