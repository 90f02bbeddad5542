"""A simulated world: the real machines, sync protocol and codec over one store, on clocks that disagree, with nothing reliable.

Time is simulated, so an hour takes a second and the same seed gives the same history. Between any two operations of an
exchange anything else may happen; a request or a reply can be lost, or come late; whoever gave up waiting does not know
whether its write was applied, exactly as with a real store.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from elastirun.errors import StoreError
from elastirun.rendezvous.actions import Action, Change, Finish, Outcome, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import Codec
from elastirun.rendezvous.events import Changed, Event, Leave, StoodStill, SyncFailed, Tick, WorkersFailed, WorkersStopped, WorkersSucceeded
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.records import Blame, ExitRecord, NodeRow, RoundRecord
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.sync import Operation, Steps, SyncProtocol
from elastirun.rendezvous.timing import EXCHANGE_LIMIT

STANDSTILL = 2.0  # seconds, as the agent has it
T = TypeVar("T")


class Remembering(Codec):
    """A codec that parses the same bytes once for all nodes: they read each other's records all the time."""

    def decode(self, key: str, data: bytes, cls: type[T]) -> T:
        found: T = _decode(key, data, cls)
        return found


@functools.lru_cache(4096)
def _decode(key: str, data: bytes, cls: Any) -> Any:
    return Codec().decode(key, data, cls)


CODEC = Remembering()
LATE_EXPIRY = 1.0  # seconds by which a store with leases may be late in noticing that a lease is over
ELECTION = 1.0  # seconds by which a new leader of such a store lengthens every lease


class LeasedStore(MemoryStore):
    """The store as one operation of ``node`` finds it, with rows under leases. ``learnt``: what the agent learns with the answer."""

    def __init__(self, world: World, node: Node) -> None:
        super().__init__(world.data)
        self._world, self._node = world, node
        self.learnt: dict[str, int] = {}

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if "/node/" not in key:
            return super().put_if(key, expected, value)
        could = self._data.get(key) == expected
        granted = self._node.row_lease not in self._world.leases
        lease = self._world.grant() if granted else self._node.row_lease
        found = super().put_if(key, expected, value)
        if could:
            self._world.bound[key] = lease
            if granted:
                self._world.written_at.setdefault(self._node.id, []).append(self._world.t)
            self.learnt = {"row_lease": lease}
        return found

    def keep_alive(self, key: str) -> bool:
        lease = self._node.row_lease
        if lease not in self._world.leases:
            self.learnt = {"row_lease": 0}
            return False
        self._world.renew(lease)
        self._world.written_at.setdefault(self._node.id, []).append(self._world.t)  # counts like a changed row in a store without leases
        return True


def read_round(data: dict[str, bytes]) -> RoundRecord | None:
    """Return the round record as a node would read it."""
    return SyncProtocol("job/", "reader", CODEC, lambda: 0.0).carry_out(MemoryStore(data), Sync(rows=()), 0.0).round


def write_round(data: dict[str, bytes], record: RoundRecord) -> None:
    """Write the round record over whatever stands there."""
    data.pop("job/round", None)
    SyncProtocol("job/", "writer", CODEC, lambda: 0.0).carry_out(MemoryStore(data), Sync(change=Change(None, record), rows=()), 0.0)


class Violation(AssertionError):
    """An event that must never happen."""


def brief(what: Action | RoundRecord) -> str:
    """Return a line for people about an action, or about a record that was written."""
    if isinstance(what, RoundRecord):
        members = " ".join(m.id for m in what.members)
        rest = f" {what.broken.cause.value}: {what.broken.reason}" if what.broken else ""
        rest += f" {what.closed.verdict.value}: {what.closed.reason}" if what.closed else ""
        return f"wrote {what.version}: round {what.round} [{members}]{rest}"
    if isinstance(what, Start):
        return f"start round {what.record.round} as node {what.node_rank} ({what.record.reason})"
    if isinstance(what, Stop):
        limit = "" if what.within is None else f" within {what.within:g} s"
        return f"stop {'planned' if what.planned else 'now'}{limit}: {what.reason}"
    if isinstance(what, Finish):
        return f"finish {what.outcome.value}: {what.reason}"
    return f"say {what.text}" if isinstance(what, Say) else type(what).__name__.lower()


@dataclass
class Call:
    """One exchange under way. After it is given up it goes on: its writes still arrive, but no node hears of them."""

    node: Node
    steps: Steps
    given_up: bool = False


@dataclass(eq=False)
class Node:
    """One incarnation of a node's agent, with its workers and its connection to the store."""

    world: World
    name: str
    machine: Machine
    exchange: SyncProtocol
    offset: float  # its clock shows offset + rate * t
    rate: float
    lease: float
    stop_time: float = 0.05  # seconds that its workers take to stop
    up: bool = True
    frozen_at: float | None = None
    workers_frozen: bool = False
    cut_out: bool = False  # its requests are lost
    cut_in: bool = False  # the replies to it are lost
    loss: float = 0.0  # chance of losing a message, each way
    delay: tuple[float, float] = (0.0005, 0.005)  # of a message, seconds
    late: tuple[float, float] | None = None  # of a request, in place of ``delay``
    hosts: bool = False
    working: RoundRecord | None = None  # the round its workers run in
    stopping: bool = False
    lone: bool = False  # the round its workers run in has no other node
    ended_by_guard: bool = False
    ready_for: set[int] = field(default_factory=set)
    starts: list[tuple[int, int, int]] = field(default_factory=list)  # round, node rank, nodes
    began: list[RoundRecord] = field(default_factory=list)  # the records of the same rounds
    stops: list[Stop] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    finish: Finish | None = None
    syncs: int = 0
    call: Call | None = None
    row_lease: int = 0  # the lease of its row, as far as its agent knows
    waiting: deque[Callable[[], None]] = field(default_factory=deque)  # events that came while it was frozen
    _armed: int = 0

    @property
    def id(self) -> str:
        return self.machine.row.id

    @property
    def now(self) -> float:
        return self.offset + self.rate * self.world.t

    @property
    def cut(self) -> bool:
        return self.cut_out and self.cut_in

    @cut.setter
    def cut(self, cut: bool) -> None:
        self.cut_out = self.cut_in = cut

    @property
    def frozen(self) -> bool:
        return self.frozen_at is not None

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        if frozen:
            self.freeze(workers_too=True)
        else:
            self.thaw()

    @property
    def alive(self) -> bool:
        return self.up and self.finish is None

    @property
    def progressing(self) -> bool:
        """Whether its workers can take a step."""
        return self.up and self.working is not None and not self.workers_frozen

    def feed(self, make: Callable[[float], Event]) -> None:
        """Let the event of ``make`` happen to the node once it runs."""
        if not self.alive:
            return
        if self.frozen_at is not None:
            self.waiting.append(lambda: self.feed(make))
            return
        self._perform_all(self.machine.step(make(self.now)))
        if self.machine.state.value == "ready":
            self.ready_for.add(self.machine.row.round)
        self._armed += 1
        armed, wait = self._armed, (self.machine.wake - self.now) / self.rate
        if wait < 1e9:
            self.world.at(max(0.0005, wait), lambda: self.feed(Tick) if armed == self._armed else None)

    def _perform_all(self, actions: list[Action]) -> None:
        for action in actions:
            self.world.note(self, action)
            if isinstance(action, Sync):
                self.syncs += 1
                self.world.begin(self, action)
            elif isinstance(action, Start):
                if self.working is not None:
                    raise Violation(f"{self.name} starts workers while others still run")
                self.working, self.stopping = action.record, False
                lone = len(action.record.members) == 1
                self.lone = lone
                self.starts.append((action.record.round, action.node_rank, len(action.record.members)))
                self.began.append(action.record)
                self.world.on_start(self, action)
            elif isinstance(action, Stop):
                self.stops.append(action)
                self.stopping = True
                self.world.at(self._stop_time(action), partial(self._stopped, len(self.began)))
            elif isinstance(action, Say):
                self.said.append(action.text)
            elif isinstance(action, Finish):
                if self.working is not None:
                    raise Violation(f"{self.name} goes while its workers still run")
                self.finish = action
                self.world.on_gone(self)
            elif isinstance(action, Reconnect):
                self.call = None

    def _stop_time(self, stop: Stop) -> float:
        if self.ended_by_guard or self.working is None:
            return 0.0
        grace = self.world.graces[not stop.planned]
        return min(self.stop_time, grace, math.inf if stop.within is None else stop.within)

    def _stopped(self, round_: int) -> None:
        if self.up and self.stopping and len(self.began) == round_:
            self.working, self.stopping, self.ended_by_guard = None, False, False
            self.feed(lambda now: WorkersStopped(now, self.machine.row.failures))

    # -- what can be done to it ---------------------------------------------------------------------------------------

    def succeed(self) -> None:
        if self.working is not None and not self.stopping:
            self.world.succeeded.add((self.id, self.working.round))
            self.working = None
            self.feed(WorkersSucceeded)

    def fail(self, code: int = 1, blame: int = Blame.OWN_FAULT, after: float = 1.0) -> None:
        if self.working is not None and not self.stopping:
            record = ExitRecord(self.name, self.starts[-1][1], 0, 1, code, blame, after, ("boom",))
            self.feed(lambda now: WorkersFailed(now, (record,)))

    def leave(self) -> None:
        self.feed(lambda now: Leave(now, "SIGTERM"))

    def crash(self) -> None:
        if self.up:
            self.up = False
            self.working = None
            self.world.on_gone(self)

    def freeze(self, workers_too: bool = False) -> None:
        """Stop the agent, or all of the node, as SIGSTOP does. When the guard's lease is over it ends the workers of a frozen agent."""
        if not self.alive or self.frozen_at is not None:
            return
        self.frozen_at, self.workers_frozen = self.world.t, workers_too
        if self.hosts:
            self.world.pause_store()
        end = self._lease_end(self.now)
        if end < math.inf and not workers_too:
            self.world.at(max(0.0, end - self.now) / self.rate, lambda since=self.world.t: self._lease_over(since))

    def _lease_end(self, frozen_at: float) -> float:
        """Return when, by its own clock, the guard ends the workers of an agent that is frozen since ``frozen_at``."""
        if self.lone:
            return self.machine.kept_alive + self.world.rules.lone_lease
        return frozen_at + self.lease if self.lease else math.inf

    def _lease_over(self, since: float) -> None:
        if self.frozen_at == since and self.working is not None:
            self.working, self.ended_by_guard = None, True

    def thaw(self) -> None:
        if self.frozen_at is None or not self.up:
            return
        seconds = (self.world.t - self.frozen_at) * self.rate
        lease_end = self._lease_end(self.now - seconds)
        if self.now >= lease_end and self.working is not None:
            self.working, self.ended_by_guard = None, True
        self.frozen_at, self.workers_frozen = None, False
        if self.hosts:
            self.world.resume_store()
        if seconds > STANDSTILL:
            ended = self.now > lease_end - 0.5
            if ended and self.working is not None:  # so near to the end of the lease that the guard may have ended them or not: here it has
                self.working, self.ended_by_guard = None, True
            self.feed(lambda now: StoodStill(now, seconds, ended))
        while self.waiting and self.frozen_at is None:
            self.waiting.popleft()()

    @property
    def outcome(self) -> Outcome | None:
        return self.finish.outcome if self.finish else None


class World:
    """A job with its nodes and its store. ``hosted``: node 0 serves the store, which is lost with that node."""

    def __init__(self, seed: int = 0, rules: Rules | None = None, hosted: bool = False, **changes: object) -> None:
        self.t = 0.0
        self.random = random.Random(seed)
        self.rules = replace(rules or Rules(1, 3), hosted=hosted, **changes)  # type: ignore[arg-type]
        self.hosted = hosted
        self.data: dict[str, bytes] = {}
        self.leases: dict[int, float] = {}  # in a store that outlives its jobs: the end of each lease
        self.bound: dict[str, int] = {}  # by key: the lease under which it was written
        self.own_random = random.Random(~seed)  # for the store: its clock, and how late it notices the end of a lease
        self.store_rate = self.own_random.uniform(0.9, 1.1)
        self._lease_ids = itertools.count(1)
        self.store_up = True
        self.store_paused = False
        self.nodes: list[Node] = []
        self.succeeded: set[tuple[str, int]] = set()  # (node, round): all workers of the node succeeded in the round
        self.written_at: dict[str, list[float]] = {}  # when a row changed in the store
        self.formed_at: dict[str, float] = {}  # by fence: when the record of the round was written
        self.watch: list[Callable[[World, Node, RoundRecord | None, RoundRecord], None]] = []  # of each write of the round record
        self.on_starting: list[Callable[[World, Node, Start], None]] = []
        self.on_progress: list[Callable[[World], None]] = []  # called after each event that changed which nodes' workers can take a step
        self._progressing: list[RoundRecord | None] = []
        self.replaced = 0  # times that another store has taken the place of this one
        self.graces = (math.inf, math.inf)  # seconds until workers that are to stop are killed: planned, and after a failure
        self.transcript: list[str] | None = None
        self._decoded: tuple[bytes | None, RoundRecord | None] = (None, None)
        self._paused: list[Callable[[], None]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def add(
        self,
        name: str | None = None,
        *,
        node_rank: int | None = None,
        slots: int = 2,
        rules: Rules | None = None,
        offset: float = 0.0,
        rate: float = 1.0,
    ) -> Node:
        """Start an agent. A name that was used before is a new incarnation of that node."""
        name = name or f"n{len(self.nodes)}"
        names = list(dict.fromkeys([*(node.name for node in self.nodes), name]))
        row = NodeRow(f"{name}-{len(self.nodes)}", name, f"10.0.0.{names.index(name) + 1}", 1000, slots, node_rank=node_rank)
        rules = replace(rules or self.rules, new_store_id=f"store-of-{row.id}")
        lease = 0.0 if rules.max_nodes == 1 else rules.guard_lease
        node = Node(self, name, None, None, offset, rate, lease)  # type: ignore[arg-type]
        node.exchange = SyncProtocol("job/", row.id, CODEC, lambda: node.now)
        node.machine = Machine(rules, row, node.now)
        node.hosts = self.hosted and name == (self.nodes or [node])[0].name
        if self.hosted and node.hosts and self.nodes:
            self.replace_store()  # what its last incarnation held is gone
        self.nodes.append(node)
        node.feed(Tick)
        return node

    def at(self, delay: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (self.t + delay, next(self._count), what))

    # -- the store ----------------------------------------------------------------------------------------------------

    def begin(self, node: Node, sync: Sync) -> None:
        call = node.call = Call(node, node.exchange.steps(sync, node.now))
        self.at(EXCHANGE_LIMIT / node.rate, lambda: self._give_up(call))
        self._go_on(call, None)

    def _give_up(self, call: Call) -> None:
        if call.node.call is call:
            self._answer(call, lambda now: SyncFailed(now, "no answer for 3 s"))

    def _answer(self, call: Call, make: Callable[[float], Event]) -> None:
        if call.node.call is not call or call.given_up:
            return
        if call.node.frozen_at is not None:
            call.node.waiting.append(lambda: self._answer(call, make))
            return
        call.given_up, call.node.call = True, None
        call.node.feed(make)

    def _go_on(self, call: Call, found: Any, store: MemoryStore | None = None) -> None:
        node = call.node
        if not node.up:
            return
        if node.frozen_at is not None:
            node.waiting.append(lambda: self._go_on(call, found, store))
            return
        for name, what in store.learnt.items() if isinstance(store, LeasedStore) else ():
            setattr(node, name, what)
        try:
            operation = call.steps.send(found)
        except StopIteration as done:
            answer = done.value
            self._answer(call, lambda now: replace(answer, hosting=node.hosts, now=now))
        except StoreError as error:
            why = str(error)
            self._answer(call, lambda now: SyncFailed(now, why))
        else:
            lost = not node.hosts and (node.cut_out or self.random.random() < node.loss)
            delay = 0.0002 if node.hosts else self.random.uniform(*(node.late or node.delay))
            if not lost:
                self.at(delay, lambda: self._arrive(call, operation))

    def _arrive(self, call: Call, operation: Operation) -> None:
        node = call.node
        if self.store_paused:
            self._paused.append(lambda: self._arrive(call, operation))
            return
        if not self.store_up:
            self.at(0.002, lambda: self._answer(call, lambda now: SyncFailed(now, "connection refused")))
            return
        store = LeasedStore(self, node) if self.rules.lasting else MemoryStore(self.data)
        found = self._apply(node, operation, store)
        lost = not node.hosts and (node.cut_in or self.random.random() < node.loss)
        if not lost:
            self.at(0.0002 if node.hosts else self.random.uniform(*node.delay), lambda: self._go_on(call, found, store))

    def _apply(self, node: Node, operation: Operation, store: MemoryStore | None = None) -> Any:
        key = f"job/node/{node.id}"
        round_before, row_before = self.data.get("job/round"), self.data.get(key)
        found = operation(store or MemoryStore(self.data))
        after = self.data.get("job/round")
        if self.data.get(key) != row_before and not self.rules.lasting:  # with leases, a renewal is the sign of life
            self.written_at.setdefault(node.id, []).append(self.t)
        if after != round_before and after is not None:
            old, new = self._round(round_before), self._round(after)
            assert new is not None
            self.note(node, new)
            for watch in self.watch:
                watch(self, node, old, new)
            if self.rules.lasting:
                self._announce_change()
        return found

    # -- its leases ---------------------------------------------------------------------------------------------------

    def grant(self) -> int:
        lease = next(self._lease_ids)
        self.renew(lease)
        return lease

    def renew(self, lease: int, more: float = 0.0) -> None:
        """Let the lease last for its whole time from now on, and ``more``, by the store's clock."""
        deadline = self.leases[lease] = self.t + (self.rules.row_lease.ttl + more) / self.store_rate
        late = self.own_random.uniform(0, LATE_EXPIRY)
        self.at(deadline + late - self.t, lambda: self.end_lease(lease) if self.leases.get(lease) == deadline else None)

    def end_lease(self, lease: int) -> None:
        """End the lease and delete the keys under it. A store that does not work does not count time, either."""
        if not self.store_up or self.store_paused:
            return
        self.leases.pop(lease, None)
        for key in [key for key, under in self.bound.items() if under == lease]:
            del self.bound[key]
            self.data.pop(key, None)

    def lengthen_leases(self) -> None:
        """Lengthen all leases, as a new leader of the store does."""
        for lease in self.leases:
            self.renew(lease, ELECTION)

    def _announce_change(self) -> None:
        """Tell the nodes that the store can reach that the record has changed."""
        for node in self.nodes:
            if node.alive and not (node.cut or node.cut_in):
                self.at(self.random.uniform(*node.delay), lambda node=node: node.feed(Changed))

    @property
    def history(self) -> list[tuple[int, int]]:
        """The rounds that any node has started, with their number of nodes."""
        return sorted({(number, nodes) for node in self.nodes for number, _, nodes in node.starts})

    @property
    def record(self) -> RoundRecord | None:
        return self._round(self.data.get("job/round"))

    def _round(self, data: bytes | None) -> RoundRecord | None:
        if data is not self._decoded[0]:
            self._decoded = (data, None if data is None else read_round({**self.data, "job/round": data}))
        return self._decoded[1]

    def pause_store(self) -> None:
        self.store_paused = True

    def resume_store(self) -> None:
        self.store_paused = False
        self.lengthen_leases()
        paused, self._paused = self._paused, []
        for arrive in paused:
            arrive()

    def replace_store(self) -> None:
        """Let another, empty store answer under the same address."""
        self.data, self.leases, self.bound = {}, {}, {}
        self.replaced += 1
        self.store_up = True
        self._paused.clear()
        self.store_paused = False

    def on_gone(self, node: Node) -> None:
        if self.hosted and node.hosts:
            self.store_up = False

    # -- time -----------------------------------------------------------------------------------------------------------

    def on_start(self, node: Node, start: Start) -> None:
        for watch in self.on_starting:
            watch(self, node, start)

    def note(self, node: Node, what: Action | RoundRecord) -> None:
        if self.transcript is not None and not isinstance(what, Sync):
            self.transcript.append(f"{self.t:9.3f} {node.id}: {brief(what)}")

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass. Return whether ``until`` came true."""
        end = self.t + seconds
        while self._heap and self._heap[0][0] <= end:
            self.t, _, what = heapq.heappop(self._heap)
            what()
            if self.on_progress:
                self._watch_progress()
            if until():
                return True
        self.t = end
        return until()

    def _watch_progress(self) -> None:
        progressing = [n.working if n.up and not n.workers_frozen else None for n in self.nodes]
        if progressing != self._progressing:
            self._progressing = progressing
            for watch in self.on_progress:
                watch(self)

    def running(self, *nodes: Node) -> Callable[[], bool]:
        """Return a test of whether all of ``nodes``, and no others, work in one round."""

        def together() -> bool:
            rounds = {n.working.round for n in nodes if n.working}
            everyone = all(n.working and len(n.working.members) == len(nodes) for n in nodes)
            return everyone and len(rounds) == 1

        return together

    def all_finished(self) -> bool:
        return all(n.finish or not n.up for n in self.nodes)
