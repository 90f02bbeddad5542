"""Counts what a check, and the reports of step times, ask of the store, on a simulated clock.

    python -m benchmarks.check_counts [10 100 1000]        1000 nodes take minutes: each is a thread

The nodes run the real meeting of ``elastirun check``, each in a thread, one at a time; what they would measure takes a second. A round trip
to the store takes 4 ms. Each key that is read or written counts as one operation. docs/scale.md has the figures.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import threading
from typing import Any

from benchmarks.lab import table
from benchmarks.rendezvous_counts import WAY, CountedStore, Tally
from elastirun import clock
from elastirun.agent.check import plan
from elastirun.agent.check.meeting import CheckMeeting
from elastirun.agent.check.records import Arrival, Collective, Facts, Gpu, Link, Measured
from elastirun.agent.check.verdict import judge
from elastirun.agent.hangs import job_median
from elastirun.agent.hangs.job_median import JobTimes, NodeTimes
from elastirun.agent.store.node_reports import Meeting, NodeReports
from elastirun.rendezvous.wire.codec import Codec

JOINED_WITHIN, MEASURING = 0.3, 1.0  # seconds
GPU = Gpu("NVIDIA H200", 143_771, 143_166, 0)
FACTS = Facts("0.1.0", "3.12.1", "2.13.0", "13.0", "2.27.5", 192, 10.0, (GPU,) * 8, "", 1 << 40, 1 << 20, 1 << 20, "", (), ())


def arrival(index: int) -> Arrival:
    name, address = f"node{index:05}", f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}"
    return Arrival(f"{name}-{index * 2654435761 % 2**32:08x}", name, None, name, address, (address,), (40000,), 40001, 8, index == 0, FACTS)


class Timed(CountedStore):
    """A counted store whose node waits for each answer."""

    waited = 0.0  # seconds of the round trips since the node's last pause

    def __init__(self, tally: Tally, data: Any) -> None:
        super().__init__(tally)
        self._store = data

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "put_if", "under", "delete", "has"):
            self.waited += 2 * WAY
        return super().__getattribute__(name)


class Nodes:
    """All nodes of one check. Exactly one thread runs at a time: a node's until it pauses, then the scheduler's."""

    def __init__(self, count: int) -> None:
        self.t, self.tally, self.count = 0.0, Tally(), count
        self.results = 0
        self._data = CountedStore(Tally())._store
        self._heap: list[tuple[float, int, threading.Semaphore]] = []
        self._order, self._back = itertools.count(), threading.Semaphore(0)
        self._errors: list[BaseException] = []

    def run(self) -> float:
        """Run the check. Return how many seconds it takes."""
        threading.stack_size(256 << 10)
        for index in range(self.count):
            go = threading.Semaphore(0)
            threading.Thread(target=self._node, args=(index, go), daemon=True).start()
            heapq.heappush(self._heap, (JOINED_WITHIN * index / self.count, next(self._order), go))
        while self._heap:
            self.t, _, go = heapq.heappop(self._heap)
            go.release()
            self._back.acquire()
        if self._errors:
            raise self._errors[0]
        return self.t

    def _node(self, index: int, go: threading.Semaphore) -> None:
        store = Timed(self.tally, self._data)

        def pause(seconds: float) -> None:
            heapq.heappush(self._heap, (self.t + seconds + store.waited, next(self._order), go))
            store.waited = 0.0
            self._back.release()
            go.acquire()

        go.acquire()
        try:
            self._take_part(CheckMeeting(store, "job/", Codec(), arrival(index), pause))
        except BaseException as error:
            self._errors.append(error)
        self._back.release()

    def _take_part(self, meeting: CheckMeeting) -> None:
        """Do what ``agent.check.run`` does, without the network."""
        me = meeting.arrival.id
        roster = meeting.assemble(self.count, self.count, 600.0, 5.0)
        peers, partners = plan.peers(roster.ids, roster.secret), plan.turns(roster.ids, me)
        arrivals = meeting.arrivals(roster.ids if meeting.leads else [one for one in (*peers[me], *partners) if one])
        links = tuple(Link(peer, 40000, "", 0.05, 3000.0, 1e-4, 1e-5, 400, 0) for peer in peers[me])
        self._measure(meeting)
        here, found = roster.meet, []
        for turn, partner in enumerate(partners):
            here = meeting.await_all(turn, here, 30.0)
            if partner is not None:
                self._measure(meeting)
                found.append(Collective(partner, "", 0.5, 100.0))
        measured = meeting.collect(roster, Measured(me, links, (), (), tuple(found)), 60.0)
        if meeting.leads:
            meeting.publish(judge([arrivals[id] for id in roster.ids], measured, peers, self.count, meeting.unreadable))
        result = meeting.result(60.0)
        self.results += len(result.nodes) == self.count
        meeting.part()

    def _measure(self, meeting: CheckMeeting) -> None:
        end = self.t + MEASURING
        meeting.meanwhile(lambda: self.t >= end, 60.0)


def window(nodes: int) -> Tally:
    """Return what one window of step times asks of the store, by all nodes."""
    tally = Tally()
    store = CountedStore(tally)

    class Counted(NodeReports):
        def __init__(self, meeting: Meeting, topic: str) -> None:
            self._prefix, self._nodes, self._codec, self._store = f"job/{topic}/node/", meeting.nodes, Codec(), store

    job_median.NodeReports = Counted  # type: ignore[misc]
    for rank in range(nodes):
        JobTimes()._run(Meeting({}, "job/", None, "store:1", rank, nodes), NodeTimes("store:1", 1, (0.123456,) * 8))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, nargs="*", default=[10, 100, 1000])
    rows = [["nodes", "check, s", "op / node", "kB / node", "a window of step times, op / node", "kB / node"]]
    for count in parser.parse_args().nodes:
        nodes = Nodes(count)
        clock.now = lambda nodes=nodes: nodes.t
        seconds = nodes.run()
        assert nodes.results == count, f"{nodes.results} of {count} nodes have the result"
        check, steps = nodes.tally.per(count), window(count).per(count)
        rows.append([str(count), f"{seconds:.1f}", f"{check.operations:.0f}", f"{check.size / 1e3:.1f}"])
        rows[-1] += [f"{steps.operations:.1f}", f"{steps.size / 1e3:.2f}"]
        print(*rows[-1], flush=True)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
