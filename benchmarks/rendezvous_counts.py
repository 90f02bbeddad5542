"""Counts the store operations and bytes of the rendezvous on a simulated clock, without sockets, threads or load.

    python -m benchmarks.rendezvous_counts [8 32 128 512 1024] [--json FILE]        PyPy is five times as fast

It runs the real machines and the real sync protocol over stores in memory: N nodes join at once, run a round, lose one node, then one in a
hundred at the same moment, then the node that hosts the store, all of them without a word. A request and its answer take 2 ms each; one to
a silent node is given up after 2 s. Each key that is written or read counts as one operation, also in a listing. The bytes are those of
keys and values in both directions. Beyond 16,384 nodes the limits of records are lifted. docs/scale.md has the figures, and
benchmarks/scale_picture.py draws them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

from benchmarks.lab import table
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.timing import EXCHANGE_LIMIT
from elastirun.rendezvous.wire import codec, lists
from elastirun.rendezvous.wire.actions import Finish, Reconnect, Start, Stop, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Event, SyncFailed, Tick, WorkersStopped
from elastirun.rendezvous.wire.lists import MemberLists
from elastirun.rendezvous.wire.records import MemberList, NodeRow, Place, RoundRecord
from elastirun.rendezvous.wire.sync import Steps, SyncProtocol

T = TypeVar("T")
WAY = 0.002  # seconds from a node to the store, as in a data centre


@dataclass
class Tally:
    """The operations and bytes that were asked of a store."""

    operations: float = 0
    size: float = 0  # bytes

    def per(self, count: float) -> Tally:
        return Tally(round(self.operations / count, 3), round(self.size / count, 1))

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


class SharedLists(MemberLists):
    """Lists of members that are decoded once for all nodes of this process."""

    _shared: ClassVar[dict[str, tuple[MemberList, bytes]]] = {}

    def take(self, digest: str, stored: bytes) -> MemberList:
        return self._taken(digest) or super().take(digest, stored)

    def take_changes(self, digest: str, stored: bytes) -> MemberList | None:
        known = any(other.encode() in zlib.decompress(stored) for other in self._known)
        return (known and self._taken(digest)) or super().take_changes(digest, stored)

    def _taken(self, digest: str) -> MemberList | None:
        if digest in self._shared:
            self._remember(digest, *self._shared[digest])
        return self.get(digest)

    def _remember(self, digest: str, members: MemberList, data: bytes) -> None:
        super()._remember(digest, *self._shared.setdefault(digest, (members, data)))


class CrowdProtocol(SyncProtocol):
    """The sync protocol of one of many nodes, which share what they have read: in a cluster each has it in its own memory."""

    _shared: ClassVar[dict[RoundRecord, RoundRecord]] = {}  # by record as it is stored
    _parsed: ClassVar[dict[str, tuple[bytes, Any]]] = {}

    def __init__(self, job: str, me: str, codec: Codec, clock: Callable[[], float]) -> None:
        super().__init__(job, me, codec, clock)
        self._lists = SharedLists(replace(codec, store=""), job + "members")
        self._known = self._parsed

    def _whole_record(self, short: RoundRecord) -> Steps:
        whole = yield from super()._whole_record(short)
        return self._shared.setdefault(short, whole)


class CountedStore:
    """A store in memory that counts its operations."""

    hosting = False  # set anew for each exchange: whether the node serves this store

    def __init__(self, tally: Tally) -> None:
        self._store = MemoryStore()
        self._tally = tally

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        found = self._store.get(wanted)
        self._tally.count(*wanted, *found.values(), operations=len(wanted))
        return found

    def has(self, key: str) -> bool:
        self._tally.count(key)
        return self._store.has(key)

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
    """Return the row of a node, with names as long and as unlike as in a cluster: process and port are different on each node."""
    name, drawn = f"node{index:05}", random.Random(f"{index} {process}")
    node_id = f"{name}-{drawn.randrange(1000, 99999)}-{drawn.getrandbits(32):08x}"
    return NodeRow(node_id, name, f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}", drawn.randrange(32768, 60999), 8)


def rules(nodes: int) -> Rules:
    """Return rules that allow the loss of one node."""
    return Rules(max(1, nodes - 1), nodes)


def lossy(nodes: int) -> Rules:
    """Return rules that allow the loss of a few in a hundred nodes, and of the one that hosts the store."""
    return Rules(max(1, nodes * 9 // 10 - 2), nodes, hosted=True, store_succession="majority")


class Crowd:
    """A simulation of ``nodes`` nodes that join within 0.3 s. The first one hosts the store, and each has a standby store."""

    def __init__(self, nodes: int) -> None:
        self.t = 0.0
        self.tally = Tally()
        self.lost: set[int] = set()
        self.ended: list[str] = []  # why nodes have ended
        self._round: dict[int, int] = {}  # by node: the number of members of its round
        self._sizes: Counter[int] = Counter()  # by number of members: how many nodes run such a round
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        rows = [replace(node_row(i), standby=node_row(i, 2).port) for i in range(nodes)]
        self._machines = [Machine(lossy(nodes), row, 0.3 * i / nodes, f"store-of-{i}") for i, row in enumerate(rows)]
        self._index = {row.id: i for i, row in enumerate(rows)}
        self._codec = Remembering()
        self._stores: dict[str, CountedStore] = {}
        ways: list[SyncProtocol] = [CrowdProtocol("job/", row.id, self._codec, lambda: self.t) for row in rows]
        self._protocols = [("", way) for way in ways]  # by node: the store that it is connected to, and the protocol
        self._armed = [0] * nodes
        self._connected = [0] * nodes  # by node: how many connections it has given up
        for i in range(nodes):
            self._at(0.3 * i / nodes, i, Tick)

    def _at(self, delay: float, index: int, make: Callable[[float], Event]) -> None:
        heapq.heappush(self._heap, (self.t + delay, next(self._count), lambda: self._feed(index, make(self.t))))

    def _feed(self, index: int, event: Event) -> None:
        if index in self.lost:
            return
        machine = self._machines[index]
        for action in machine.step(event):
            if isinstance(action, Sync):
                self._begin(index, action)
            elif isinstance(action, Start):
                self._round[index] = len(action.record.members)
                self._sizes[self._round[index]] += 1
            elif isinstance(action, Stop):
                self._sizes[self._round.pop(index)] -= 1
                self._at(0.0, index, lambda now: WorkersStopped(now, ()))
            elif isinstance(action, Reconnect):
                self._protocols[index] = "?", self._protocols[index][1]
                self._connected[index] += 1
            elif isinstance(action, Finish):
                self.ended.append(f"node {index}: {action.reason}")
        self._armed[index] += 1
        armed = self._armed[index]
        if machine.wake < 1e12:

            def tick() -> None:
                if armed == self._armed[index]:
                    self._feed(index, Tick(self.t))

            heapq.heappush(self._heap, (max(machine.wake, self.t), next(self._count), tick))

    def _begin(self, index: int, sync: Sync) -> None:
        """Make an exchange: after one way it is at the store, after two the answer is here. A lost node answers nobody."""
        started, server, connection = self.t, self._index[sync.at.id] if sync.at else 0, self._connected[index]

        def answer(delay: float, make: Callable[[float], Event]) -> None:
            def feed() -> None:
                if connection == self._connected[index]:  # else the exchange was given up
                    self._feed(index, make(self.t))

            heapq.heappush(self._heap, (self.t + delay, next(self._count), feed))

        if server in self.lost:
            answer(EXCHANGE_LIMIT, lambda now: SyncFailed(now, f"no answer in {EXCHANGE_LIMIT:g} s"))
            return

        def carry_out() -> None:
            protocol, store = self._connection(index, sync.at)
            store.hosting = server == index
            synced = replace(protocol.carry_out(store, sync, started), hosting=server == index)
            answer(WAY, lambda now: synced)

        heapq.heappush(self._heap, (self.t + WAY, next(self._count), carry_out))

    def _connection(self, index: int, at: Place | None) -> tuple[SyncProtocol, CountedStore]:
        name = at.name if at else ""
        if name not in self._stores:
            self._stores[name] = CountedStore(self.tally)
        connected, protocol = self._protocols[index]
        if connected != name:
            protocol = protocol.fresh(name)
            self._protocols[index] = name, protocol
        return protocol, self._stores[name]

    def lose(self, *indexes: int) -> None:
        """Make nodes silent, with the stores that they serve."""
        for index in indexes:
            self.lost.add(index)
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
    """The result for one number of nodes: seconds of simulated time, and what was asked of the stores, per node of the job.

    ``formed``: from the first join until every node runs the round. The other times are from a loss until every other node runs the next
    round: of one node, of one in a hundred at the same moment, of the one that hosts the store.
    """

    nodes: int
    formed: float
    forming: Tally
    running: Tally  # in one second
    one: float
    losing_one: Tally
    hundredth: float
    losing_hundredth: Tally
    host: float
    losing_host: Tally


def lift_limits(nodes: int) -> None:
    """Let records have as many members as a job of more nodes than they allow."""
    if nodes > codec.MAX_ITEMS:
        codec.MAX_ITEMS, codec.MAX_BYTES = nodes, 512 * nodes
        lists.MAX_BYTES = codec.MAX_BYTES


def count(nodes: int, window: float = 10.0) -> Counts:
    """Count a formation, ``window`` seconds of a running round, and the rounds after three losses.

    Errors: ``RuntimeError`` when a round does not form.
    """
    lift_limits(nodes)
    crowd = Crowd(nodes)

    def form() -> tuple[float, Tally]:
        since, before, left = crowd.t, crowd.tally + Tally(), nodes - len(crowd.lost)
        if not crowd.run(120.0 + 0.1 * nodes, left):
            raise RuntimeError(f"{left} nodes have no round after {crowd.t - since:.0f} s; {crowd.ended[:1]}")
        return round(crowd.t - since, 3), (crowd.tally - before).per(nodes)

    formed, forming = form()
    crowd.run(2.0)
    before = crowd.tally + Tally()
    crowd.run(window)
    running = (crowd.tally - before).per(nodes * window)
    losses = [[nodes // 2], range(nodes // 3, nodes // 3 + max(1, nodes // 100)), [0]]
    found: list[tuple[float, Tally]] = []
    for lost in losses:
        crowd.lose(*lost)
        found.append(form())
        crowd.run(5.0)
    (one, losing_one), (hundredth, losing_hundredth), (host, losing_host) = found
    return Counts(nodes, formed, forming, running, one, losing_one, hundredth, losing_hundredth, host, losing_host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, nargs="*", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--json", metavar="FILE", help="write the figures there, a line for each number of nodes")
    options = parser.parse_args()
    each = ["s", "op / node", "kB / node"]
    rows = [
        [
            "nodes",
            *(f"{what}, {unit}" for what in ("formed", "one lost", "1 % lost", "host lost") for unit in each),
            "running: op/s / node",
            "kB/s / node",
        ]
    ]
    for nodes in options.nodes:
        found = count(nodes, window=10.0 if nodes <= 1024 else 4.0)
        cells = [str(nodes)]
        for seconds, tally in (
            (found.formed, found.forming),
            (found.one, found.losing_one),
            (found.hundredth, found.losing_hundredth),
            (found.host, found.losing_host),
        ):
            cells += [f"{seconds:.2f}", f"{tally.operations:.1f}", f"{tally.size / 1e3:.1f}"]
        rows.append([*cells, f"{found.running.operations:.2f}", f"{found.running.size / 1e3:.1f}"])
        print("   ", *rows[-1], flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
