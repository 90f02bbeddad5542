"""Counts the store operations and bytes of the rendezvous on a simulated clock, without sockets, threads or load.

    python -m benchmarks.rendezvous_counts [8 32 128 512 1024]        10000 takes minutes

It runs the real machines and the real sync protocol over one store in memory. A request and its answer take 2 ms each. Each key that is
written or read counts as one operation, also in a listing. The bytes are those of keys and values in both directions.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from benchmarks.lab import table
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Start, Stop, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Event, Tick, WorkersStopped
from elastirun.rendezvous.wire.records import NodeRow
from elastirun.rendezvous.wire.sync import SyncProtocol

T = TypeVar("T")
WAY = 0.002  # seconds from a node to the store, as in a data centre


@dataclass
class Tally:
    """The operations and bytes that were asked of a store."""

    operations: int = 0
    size: int = 0  # bytes

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.operations + other.operations, self.size + other.size)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.operations - other.operations, self.size - other.size)

    def count(self, *parts: str | bytes | None, operations: int = 1) -> None:
        self.operations += operations
        self.size += sum(len(part) for part in parts if part)


class Remembering(Codec):
    """A codec that decodes the same bytes once for all nodes of this process. In a cluster each node decodes on its own CPU."""

    _parsed: ClassVar[dict[str, tuple[bytes, Any]]] = {}

    def decode(self, key: str, data: bytes, cls: type[T]) -> T:
        known = self._parsed.get(key)
        if known is None or known[0] != data:
            known = self._parsed[key] = (data, super().decode(key, data, cls))
        record: T = known[1]
        return record


class CountedStore:
    """A store in memory that counts its operations."""

    hosting = False

    def __init__(self, data: dict[str, bytes], tally: Tally) -> None:
        self._store = MemoryStore(data)
        self._tally = tally

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        found = self._store.get(wanted)
        self._tally.count(*wanted, *found.values(), operations=len(wanted))
        return found

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        found = self._store.put_if(key, expected, value)
        self._tally.count(key, expected, value, found)
        return found

    def put_if_and_get(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> tuple[bytes | None, dict[str, bytes]]:
        return self.put_if(key, expected, value), self.get(keys)

    def delete(self, key: str) -> None:
        self._store.delete(key)
        self._tally.count(key)

    def under(self, prefix: str) -> dict[str, bytes]:
        found = self._store.under(prefix)
        self._tally.count(prefix, *found.keys(), *found.values(), operations=len(found))
        return found

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def node_row(index: int, process: int = 1) -> NodeRow:
    """Return the row of a node, with names as long as in a cluster."""
    name = f"node{index:05}"
    return NodeRow(f"{name}-{process}-00c0ffee", name, f"10.0.{index // 250}.{index % 250 + 1}", 40000, 8)


def rules(nodes: int) -> Rules:
    """Return rules that allow the loss of one node."""
    return Rules(max(1, nodes - 1), nodes)


class Crowd:
    """A simulation of ``nodes`` nodes that join within 0.3 s."""

    def __init__(self, nodes: int) -> None:
        self.t = 0.0
        self.tally = Tally()
        self._round: dict[int, int] = {}  # by node: the number of members of its round
        self._sizes: Counter[int] = Counter()  # by number of members: how many nodes run such a round
        self._lost = -1
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        data: dict[str, bytes] = {}
        self._store = CountedStore(data, self.tally)
        self._machines = [Machine(rules(nodes), node_row(i), 0.3 * i / nodes, f"store-of-{i}") for i in range(nodes)]
        codec = Remembering()
        self._exchanges = [SyncProtocol("job/", m.row.id, codec, lambda: self.t) for m in self._machines]
        self._armed = [0] * nodes
        for i in range(nodes):
            self._at(0.3 * i / nodes, i, Tick)

    def _at(self, delay: float, index: int, make: Callable[[float], Event]) -> None:
        heapq.heappush(self._heap, (self.t + delay, next(self._count), lambda: self._feed(index, make(self.t))))

    def _feed(self, index: int, event: Event) -> None:
        if index == self._lost:
            return
        machine = self._machines[index]
        for action in machine.step(event):
            if isinstance(action, Sync):
                heapq.heappush(self._heap, (self.t + WAY, next(self._count), self._exchange(index, action, self.t)))
            elif isinstance(action, Start):
                self._round[index] = len(action.record.members)
                self._sizes[self._round[index]] += 1
            elif isinstance(action, Stop):
                self._sizes[self._round.pop(index)] -= 1
                self._at(0.0, index, lambda now: WorkersStopped(now, ()))
        self._armed[index] += 1
        armed = self._armed[index]
        if machine.wake < 1e12:

            def tick() -> None:
                if armed == self._armed[index]:
                    self._feed(index, Tick(self.t))

            heapq.heappush(self._heap, (max(machine.wake, self.t), next(self._count), tick))

    def _exchange(self, index: int, sync: Sync, started: float) -> Callable[[], None]:
        def carry_out() -> None:
            synced = self._exchanges[index].carry_out(self._store, sync, started)
            self._at(WAY, index, lambda now: synced)

        return carry_out

    def lose(self, index: int) -> None:
        """Make the node silent."""
        self._lost = index
        self._sizes[self._round.pop(index)] -= 1

    def run(self, seconds: float, size: int = 0) -> bool:
        """Let ``seconds`` pass, or less if ``size`` nodes run a round of that size before. Tell whether they do."""
        end = self.t + seconds
        while self._heap and self._heap[0][0] <= end:
            self.t, _, what = heapq.heappop(self._heap)
            what()
            if size and self._sizes[size] == size:
                return True
        self.t = max(self.t, end)
        return False


@dataclass(frozen=True)
class Counts:
    """The result for one number of nodes.

    ``formed`` and ``reformed``: simulated seconds from the first join, and from the loss, until every node runs the round.
    """

    formed: float
    forming: Tally
    running: Tally  # of all nodes, in one second
    reformed: float
    reforming: Tally


def count(nodes: int, window: float = 10.0) -> Counts:
    """Count a formation, ``window`` seconds of a running round, and a re-formation after a loss.

    Errors: ``RuntimeError`` when a round does not form.
    """
    crowd = Crowd(nodes)
    if not crowd.run(120.0 + 0.1 * nodes, nodes):
        raise RuntimeError(f"{nodes} nodes have no round after {crowd.t:.0f} s")
    formed, forming = crowd.t, crowd.tally + Tally()
    crowd.run(2.0)
    before = crowd.tally + Tally()
    crowd.run(window)
    ran = crowd.tally - before
    before, since = crowd.tally + Tally(), crowd.t
    crowd.lose(nodes // 2)
    if not crowd.run(120.0 + 0.1 * nodes, nodes - 1):
        raise RuntimeError(f"{nodes - 1} nodes have no round after the loss of one")
    running = Tally(round(ran.operations / window), round(ran.size / window))
    return Counts(formed, forming, running, crowd.t - since, crowd.tally - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, nargs="*", default=[8, 32, 128, 512, 1024])
    head = ["nodes", "formed, s", "op / node", "kB / node", "running: op/s / node", "kB/s / node"]
    rows = [[*head, "re-formed, s", "op / node", "kB / node"]]
    for nodes in parser.parse_args().nodes:
        found = count(nodes, window=10.0 if nodes <= 1024 else 4.0)
        cells = [f"{t.operations / nodes:.2f} {t.size / nodes / 1e3:.1f}" for t in (found.forming, found.running, found.reforming)]
        rows.append(f"{nodes} {found.formed:.2f} {cells[0]} {cells[1]} {found.reformed:.2f} {cells[2]}".split())
        print("   ", *rows[-1], flush=True)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
