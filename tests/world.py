"""A small simulated world: the real machines and the real exchange over one memory store, on simulated clocks.

Nodes can crash, be cut from the store, freeze; workers succeed or fail on command. Everything is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastirun.errors import StoreError
from elastirun.rendezvous.actions import Finish, Outcome, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import Codec
from elastirun.rendezvous.driver import Exchange
from elastirun.rendezvous.events import Event, Leave, Synced, SyncFailed, Tick, WorkersFailed, WorkersStopped, WorkersSucceeded
from elastirun.rendezvous.forming import Rules
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.records import ExitRecord, NodeRow, RoundRecord
from elastirun.rendezvous.stores.memory import MemoryStore

TIME_LIMIT = 2.5  # of one exchange, seconds


@dataclass
class Node:
    world: World
    name: str
    machine: Machine
    offset: float
    stop_time: float = 0.05  # how long its workers take to stop
    up: bool = True
    cut: bool = False
    frozen: bool = False
    working: RoundRecord | None = None  # the round its workers run in
    starts: list[tuple[int, int, int]] = field(default_factory=list)  # round, node rank, nodes
    stops: list[Stop] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    finish: Finish | None = None
    syncs: int = 0
    _ticks: int = 0

    @property
    def id(self) -> str:
        return self.machine.row.id

    @property
    def now(self) -> float:
        return self.world.t + self.offset

    def feed(self, make: Callable[[float], Event]) -> None:
        if not self.up or self.finish:
            return
        if self.frozen:
            self.world.at(0.5, lambda: self.feed(make))
            return
        for action in self.machine.step(make(self.now)):
            self._perform(action)
        self._ticks += 1
        mine = self._ticks
        wait = max(0.001, self.machine.wake - self.now)
        if wait < 1e9:
            self.world.at(wait, lambda: self.feed(lambda now: Tick(now)) if mine == self._ticks else None)

    def _perform(self, action: object) -> None:
        if isinstance(action, Sync):
            self.syncs += 1
            self.world.exchange(self, action)
        elif isinstance(action, Start):
            assert self.working is None, "started while workers still run"
            self.working = action.record
            self.starts.append((action.record.round, action.node_rank, len(action.record.members)))
            self.world.on_start(self, action)
        elif isinstance(action, Stop):
            self.stops.append(action)
            self.world.at(self.stop_time, self._stopped)
        elif isinstance(action, Say):
            self.said.append(action.text)
        elif isinstance(action, Finish):
            assert self.working is None, "finished while workers still run"
            self.finish = action
        else:
            assert isinstance(action, Reconnect)

    def _stopped(self) -> None:
        self.working = None
        self.feed(lambda now: WorkersStopped(now, self.machine.row.failures))

    def succeed(self) -> None:
        self.working = None
        self.feed(lambda now: WorkersSucceeded(now))

    def fail(self, code: int = 1, blame: int = 0, after: float = 1.0) -> None:
        record = ExitRecord(self.name, self.starts[-1][1], 0, 1, code, blame, after, ("boom",))
        self.feed(lambda now: WorkersFailed(now, (record,)))

    def leave(self) -> None:
        self.feed(lambda now: Leave(now, "SIGTERM"))

    def crash(self) -> None:
        self.up = False
        self.working = None

    @property
    def outcome(self) -> Outcome | None:
        return self.finish.outcome if self.finish else None


class World:
    def __init__(self, seed: int = 0, rules: Rules | None = None, **changes: object) -> None:
        self.t = 0.0
        self.random = random.Random(seed)
        self.rules = replace(rules or Rules(1, 3), **changes)  # type: ignore[arg-type]
        self.data: dict[str, bytes] = {}
        self.nodes: list[Node] = []
        self.store_up = True
        self.history: list[tuple[int, int]] = []  # round, size: as first started
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def add(self, name: str | None = None, *, node_rank: int | None = None, rules: Rules | None = None, offset: float = 0.0) -> Node:
        name = name or f"n{len(self.nodes)}"
        row = NodeRow(f"{name}-{len(self.nodes)}", name, f"10.0.0.{len(self.nodes) + 1}", 1000, 2, node_rank=node_rank)
        rules = replace(rules or self.rules, new_store_id=f"store-of-{row.id}")
        node = Node(self, name, Machine(rules, row, self.t + offset), offset)
        self.nodes.append(node)
        node.feed(lambda now: Tick(now))
        return node

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.t + delay, next(self._count), what))

    def exchange(self, node: Node, sync: Sync) -> None:
        started, lag = node.now, self.random.uniform(0.0005, 0.005)
        if node.cut or not self.store_up:
            self.at(TIME_LIMIT, lambda: node.feed(lambda now: SyncFailed(now, "no answer")))
            return

        def arrive() -> None:
            exchange = Exchange("job/", node.id, Codec(), lambda: node.now)
            try:
                answer: Event = exchange.carry_out(MemoryStore(self.data), sync, started)
            except StoreError as error:
                answer = SyncFailed(node.now, str(error))
            if isinstance(answer, Synced):
                answer = replace(answer, hosting=node is self.nodes[0])
            self.check()
            self.at(lag, lambda: node.feed(lambda now: replace(answer, now=now)))

        self.at(lag, arrive)

    def on_start(self, node: Node, start: Start) -> None:
        if not self.history or self.history[-1][0] < start.record.round:
            self.history.append((start.record.round, len(start.record.members)))

    def check(self) -> None:
        """What must hold at every step."""
        rounds = {}
        for node in self.nodes:
            if node.working and node.up:
                rounds.setdefault(node.working.round, []).append(node)
        for number, nodes in rounds.items():
            tables = {n.working.members for n in nodes if n.working}
            assert len(tables) == 1, f"round {number} has two member tables"
        complete = [n for n, nodes in rounds.items() if len(nodes) == len(nodes[0].working.members)]  # type: ignore[union-attr]
        assert len(complete) <= 1, f"rounds {complete} could both make progress"

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; True when ``until`` came true."""
        end = self.t + seconds
        while self._heap and self._heap[0][0] <= end:
            self.t, _, what = heapq.heappop(self._heap)
            what()
            if until():
                return True
        self.t = end
        return until()

    def running(self, *nodes: Node) -> Callable[[], bool]:
        """All of ``nodes``, and nobody else, work in one round."""

        def test() -> bool:
            rounds = {n.working.round for n in nodes if n.working}
            everyone = all(n.working and len(n.working.members) == len(nodes) for n in nodes)
            return everyone and len(rounds) == 1

        return test

    def all_finished(self) -> bool:
        return all(n.finish or not n.up for n in self.nodes)
