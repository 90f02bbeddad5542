"""A simulated world: the sessions of many agents over one store, on clocks that disagree, with nothing reliable.

Each node drives the ``Session`` that agents drive; its clock, its exchanges and its workers are the world's. Time is simulated, so an
hour takes a second and the same seed gives the same history. Between any two operations of an exchange anything else may happen; a
request or a reply can be lost, or come late; whoever gave up waiting does not know whether its write was applied, exactly as with a
real store.

Two things are simpler than for real agents: a connection is there at once; and no operation is repeated, as etcd's client does, so that
the limit of an exchange is the shorter one of a TCPStore.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from elastirun.agent.session import Session
from elastirun.agent.store.store_access import NodeAddress, StoreAccess
from elastirun.agent.store.worker_store import RendezvousStoreForWorkers
from elastirun.config import Command, LaunchConfig
from elastirun.errors import StoreError
from elastirun.rendezvous.death_notice import write_notice
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.timing import EXCHANGE_LIMIT
from elastirun.rendezvous.wire.actions import Action, Change, Finish, Outcome, Say, Start, Stop, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import (
    Changed,
    Event,
    FoundAtStart,
    Gathered,
    Leave,
    Prepared,
    SyncFailed,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from elastirun.rendezvous.wire.exchanges import CONNECT_LIMIT, Answer, Connection, Exchanges, failure
from elastirun.rendezvous.wire.records import Blame, ExitRecord, NodeRow, Place, RoundRecord
from elastirun.rendezvous.wire.sync import Operation, PutAndGet, Steps, SyncProtocol

if TYPE_CHECKING:
    from tests.sim.live import Live

CONFIG = LaunchConfig(command=Command("train.py"), min_nodes=1, max_nodes=1, nproc=1, run_id="job", endpoint=None)
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
NOTICE_TAKES = 0.3  # seconds from the end of the workers to the death notice, at most
LATE_NOTICE = 40.0  # seconds by which a death notice may be late: a new agent of the same node may run by then
LOOK_LIMIT = 1.0  # seconds for a look at another store than the one in use
FORWARD_EVERY = 0.3  # seconds between two tries to say, where the job was started, that its store has moved
LATE_PUSH = 20.0  # seconds by which the news of a change may be late
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
                self._world.written_at.setdefault((self._node.id, ""), []).append(self._world.t)
            self.learnt = {"row_lease": lease}
        return found

    def keep_alive(self, key: str) -> bool:
        lease = self._node.row_lease
        if lease not in self._world.leases:
            self.learnt = {"row_lease": 0}
            return False
        self._world.renew(lease)
        self._world.written_at.setdefault((self._node.id, ""), []).append(self._world.t)  # counts like a changed row
        return True


def read_round(data: dict[str, bytes]) -> RoundRecord | None:
    """Return the round record as a node would read it."""
    return SyncProtocol("job/", "reader", CODEC, lambda: 0.0).carry_out(MemoryStore(data), Sync(rows=()), 0.0).round


def one_by_one(steps: Steps) -> Steps:
    """Make two operations of each ``PutAndGet``: at a TCPStore they take one round trip, but others may write between them there, too."""
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as done:
            return done.value
        if isinstance(operation, PutAndGet):
            now = yield partial(put_alone, operation)
            answer = now, (yield partial(get_alone, operation)) if operation.keys else {}
        else:
            answer = yield operation


def put_alone(operation: PutAndGet, store: MemoryStore) -> bytes | None:
    return store.put_if(operation.key, operation.expected, operation.value)


def get_alone(operation: PutAndGet, store: MemoryStore) -> dict[str, bytes]:
    return store.get(operation.keys)


def write_round(data: dict[str, bytes], record: RoundRecord) -> None:
    """Write the round record over whatever stands there."""
    data.pop("job/round", None)
    SyncProtocol("job/", "writer", CODEC, lambda: 0.0).carry_out(MemoryStore(data), Sync(change=Change(None, record), rows=()), 0.0)


@dataclass(frozen=True)
class Deaths:
    """What becomes of a node whose agent dies: chances that its guard writes a death notice, writes it late, or writes it several times."""

    told: float = 0.0
    late: float = 0.0
    repeated: float = 0.0
    ended_within: float = 0.0  # seconds that the workers may outlive the agent


@dataclass(frozen=True)
class Push:
    """How well the nodes' watches work: chances that a node hears of a change never, late, or several times. All others by polls alone."""

    lost: float = 0.0
    late: float = 0.0
    repeated: float = 0.0


class Violation(AssertionError):
    """An event that must never happen."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


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


class WorkerPorts(RendezvousStoreForWorkers):
    """Stands in for the workers' store, which holds another port for each round."""

    def serve(self) -> None:
        self.port += 1


class WorldAccess(StoreAccess):
    """The access to the store of the world, whose route every node knows."""

    def __init__(self, address: str, node: Node) -> None:
        super().__init__(CONFIG)
        self._address = NodeAddress(address, address, None, None)
        self._node = node
        self._ports = itertools.count(2000)
        self._standby_port = next(self._ports)

    @property
    def standby_port(self) -> int:
        return self._standby_port

    def renew_standby(self) -> None:
        self._standby_port = 0
        self._node.standby = {}

    def connected(self) -> None:
        """Serve another standby store after one was given up, with the next connection to another node, as a real agent does."""
        if not self._standby_port:
            self._standby_port = next(self._ports)

    def worker_store(self, on_error: Callable[[str], None]) -> WorkerPorts:
        return WorkerPorts(1000)


class WorldExchanges(Exchanges[Connection]):
    """The exchanges of ``node``, executed by the world one operation at a time."""

    def __init__(self, node: Node, protocol: SyncProtocol) -> None:
        super().__init__(Connection, protocol, lambda: node.now, EXCHANGE_LIMIT, CONNECT_LIMIT)
        self._node = node

    def _execute(self, connection: Connection, sync: Sync) -> None:
        self._node.connection = connection
        self._node.syncs += 1
        self._node.world.begin(self._node, sync)


@dataclass(eq=False)
class Node:
    """One incarnation of a node's agent, with its workers and its connection to the store."""

    world: World
    name: str
    session: Session
    connection: Connection  # of its last exchange
    offset: float  # its clock shows offset + rate * t
    rate: float
    lease: float
    stop_time: float = 0.05  # seconds that its workers take to stop
    up: bool = True
    frozen: bool = False
    workers_frozen: bool = False
    stalled: bool = False  # the loop of its agent stands still; its other threads, and the stores that it serves, go on
    cut_out: bool = False  # its requests are lost
    cut_in: bool = False  # the replies to it are lost
    loss: float = 0.0  # chance of losing a message, each way
    delay: tuple[float, float] = (0.0005, 0.005)  # of a message, seconds
    side: int = 0  # of a network that is split: nodes on different sides do not reach each other
    dark: bool = False  # its machine is off: nobody answers there, and no guard
    standby: dict[str, bytes] = field(default_factory=dict)  # its standby store, which ends with its agent
    late: tuple[float, float] | None = None  # of a request, in place of ``delay``
    hosts: bool = False
    working: RoundRecord | None = None  # the round its workers run in
    stopping: bool = False
    lone: bool = False  # its workers train without another node
    ended_by_guard: bool = False
    ready_for: set[int] = field(default_factory=set)
    starts: list[tuple[int, int, int]] = field(default_factory=list)  # round, node rank, nodes
    began: list[RoundRecord] = field(default_factory=list)  # the records of the same rounds
    stops: list[Stop] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    finish: Finish | None = None
    syncs: int = 0
    row_lease: int = 0  # the lease of its row, as far as its agent knows
    renewed: float = 0.0  # when its guard's lease was last renewed, by its clock
    waiting: list[Callable[[], object]] = field(default_factory=list)  # what its threads will do when it is not frozen any more
    held: list[Callable[[float], Event]] = field(default_factory=list)  # what will happen to its loop when that is not stalled any more
    reached: Connection | None = None  # the last connection that has reached another node's store
    place: Place | None = None  # of the store that it uses, as ``World.on_moving`` has it
    given_up: set[str] = field(default_factory=set)  # names of the standby stores that it has left
    _wait: float = math.inf  # seconds, by its clock, that its loop means to sleep at the end of each turn
    _turns: int = 0

    @property
    def machine(self) -> Machine:
        return self.session.machine

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
    def alive(self) -> bool:
        return self.up and self.finish is None

    @property
    def progressing(self) -> bool:
        """Whether its workers can take a step. They may outlive its agent by a moment."""
        return self.working is not None and not self.workers_frozen

    def feed(self, make: Callable[[float], Event]) -> None:
        """Let the event of ``make`` happen to the node once its loop runs."""
        self.when_running(lambda: self.held.append(make) if self.stalled else self.post(make))

    def post(self, make: Callable[[float], Event]) -> None:
        """Add the event of ``make`` to those of the loop, in a thread of the agent or in the loop itself."""
        self.session.post(make(self.now))
        self.turn()

    def when_running(self, what: Callable[[], object]) -> None:
        """Let a thread of the agent do ``what``, now or when it runs again."""
        if self.frozen:
            self.waiting.append(what)
        elif self.up:
            what()

    def turn(self) -> None:
        """Let the loop of the agent go round."""
        if self.frozen or self.stalled or not self.alive:
            return
        now = self.now
        self.session.check_standstill(now, self._wait, self._guard_acts(0.1 if self.lone else min(0.5, self.lease / 10)))
        self.renewed = now
        self.session.receive()
        self.session.check_time(now)
        for action in self.session.actions():
            self._perform(action)
        if (place := self.machine.store.place) != self.place:
            before, self.place = self.place, place
            self.world.moved(self, before, place)
        if self.machine.state.value == "ready":
            self.ready_for.add(self.machine.row.round)
        self._wait = max(0.0, self.session.due - now)
        self._turns += 1
        wait, turns = min(self._wait, self._lease_end - now if self.lone and self.working else math.inf), self._turns
        if wait < 1e9:
            self.world.at(max(0.0005, wait / self.rate + 1e-6), lambda: self.turn() if turns == self._turns else None)

    def _perform(self, action: Action) -> None:
        self.world.note(self, action)
        if isinstance(action, Start):
            if self.working is not None:
                raise Violation(f"{self.name} starts workers while others still run")
            self.working, self.stopping = action.record, False
            apart = len(action.record.members) == 1 or self.machine.trains_apart
            self.lone = apart and not self.world.rules.private
            self.starts.append((action.record.round, action.node_rank, len(action.record.members)))
            self.began.append(action.record)
            self.world.on_start(self, action)
            if action.node_rank == 0:
                self.session.serve_workers()
        elif isinstance(action, Stop):
            self.stops.append(action)
            self.stopping = True
            if self.world.live is not None:
                self.world.live.stop(self, action)
            else:
                self.world.at(self._stop_time(action), partial(self.stopped, len(self.began), self.world.keeps))
        elif isinstance(action, Say):
            self.said.append(action.text)
        elif isinstance(action, Finish):
            if self.working is not None:
                raise Violation(f"{self.name} goes while its workers still run")
            self.finish = action
            self.world.on_gone(self)
            self.world.tell_standbys(self)

    def _stop_time(self, stop: Stop) -> float:
        if self.ended_by_guard or self.working is None:
            return 0.0
        grace = min(self.world.graces[not stop.planned], math.inf if stop.within is None else stop.within)
        return min(self.stop_time, grace / self.rate)

    def stopped(self, round_: int, kept: bool) -> None:
        if self.up and self.stopping and len(self.began) == round_:
            self.working, self.stopping, self.lone, self.ended_by_guard = None, False, False, False
            self.feed(lambda now: WorkersStopped(now, self.machine.row.failures, kept))

    # -- what can be done to it ---------------------------------------------------------------------------------------

    def succeed(self) -> None:
        if self.working is not None and not self.stopping:
            self.world.succeeded.add((self.id, self.working.round))
            self.working, self.lone = None, False
            self.feed(WorkersSucceeded)

    def gathered(self, record: RoundRecord) -> None:
        """Let all workers of the round train together from now on."""
        if self.working is not None and self.working.fence == record.fence:
            self.lone = self.lone and len(record.members) == 1
            self.feed(lambda now: Gathered(now, record.round))

    def fail(self, code: int = 1, blame: int = Blame.OWN_FAULT, after: float = 1.0) -> None:
        if self.working is not None and not self.stopping:
            if self.world.live is not None:
                self.world.live.fail(self)
            record = ExitRecord(self.name, self.starts[-1][1], 0, 1, code, blame, after, ("boom",))
            self.feed(lambda now: WorkersFailed(now, (record,)))

    def leave(self) -> None:
        self.feed(lambda now: Leave(now, "SIGTERM"))

    def crash(self) -> None:
        """Let the agent die. Its guard ends the workers, and may write the death notice, unless all of the node stands still."""
        if self.up:
            self.up = False
            self.stopping = self.lone = False
            dies_whole = self.workers_frozen or self.working is None or not self.world.deaths.ended_within
            if dies_whole:
                self._workers_ended()
            else:
                self.world.at(self.world.death_random.uniform(0.0, self.world.deaths.ended_within), self._workers_ended)
            self.world.on_gone(self)

    def _workers_ended(self) -> None:
        """Let the guard, which has ended the workers of a dead agent, write the death notice. A guard that stood still writes none."""
        self.working = None
        if self.workers_frozen or self.finish or self.dark:
            return
        if self.machine.hosting or not self.world.is_up(self.machine.store.place):
            self.world.tell_standbys(self)
        else:
            self.world.tell_death(self)

    def freeze(self, workers_too: bool = False) -> None:
        """Stop the agent, or all of the node, as SIGSTOP does. When the guard's lease is over it ends the workers of a frozen agent."""
        if not self.alive or self.frozen:
            return
        self.frozen, self.workers_frozen = True, workers_too
        if self.hosts:
            self.world.pause_store()
        if not workers_too:
            self._let_guard_act()

    def stall(self) -> None:
        """Let the loop of the agent stand still, as a long garbage collection or SIGSTOP of one thread does. Other threads go on."""
        if self.alive and not self.frozen and not self.stalled:
            self.stalled = True
            self._let_guard_act()

    def end_stall(self) -> None:
        """Let the loop go on. What came to the other threads meanwhile is there at once, with the time at which it came."""
        if self.stalled:
            self.stalled = False
            held, self.held = self.held, []
            for make in held:
                self.session.post(make(self.now))
            self.turn()

    def _let_guard_act(self) -> None:
        """Let the guard end the workers when its lease is over, unless the loop of the agent goes on before."""
        if self._lease_end < math.inf:
            over = max(0.0, self._lease_end - self.now) / self.rate
            self.world.at(over, lambda: (self.frozen or self.stalled) and self._guard_acts(1e-6))

    @property
    def _lease_end(self) -> float:
        """When the guard ends the workers, by the clock of the node."""
        if self.lone:
            return self.machine.store.kept_alive + self.world.rules.lone_lease
        return self.renewed + self.lease if self.lease else math.inf

    def _guard_acts(self, early: float) -> bool:
        """Let the guard end the workers if its lease is over, or will be in ``early`` seconds; then it may have ended them or not."""
        over = (self.working is not None or self.ended_by_guard) and self.now > self._lease_end - early
        if over:
            self.working, self.ended_by_guard = None, True
            self.lone = self.lone and (self.frozen or self.stalled)
        return over

    def thaw(self) -> None:
        """Let the agent go on. Its loop or its other threads may be the first to run."""
        if not self.frozen or not self.up:
            return
        self.frozen = self.workers_frozen = False
        if self.hosts:
            self.world.resume_store()
        waiting, self.waiting = self.waiting, []
        if self.world.random.random() < 0.5:
            self.turn()
        for what in waiting:
            what()
        self.turn()

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
        self.push = Push()
        self.push_random = random.Random(f"push {seed}")
        self.deaths = Deaths()
        self.death_random = random.Random(f"deaths {seed}")
        self.prepare_random = random.Random(f"prepares {seed}")
        self.prepares_within = 0.0  # seconds from when a node begins until its workers can start
        self.keeps = False  # workers are parked with their state when a round ends
        self.live: Live | None = None  # the workers of a live job
        self.telling: Node | None = None  # whose death notice is being written at this very moment
        self.own_random = random.Random(~seed)  # for the store: its clock, and how late it notices the end of a lease
        self.store_rate = self.own_random.uniform(0.9, 1.1)
        self._lease_ids = itertools.count(1)
        self.store_up = True
        self.store_paused = False
        self.nodes: list[Node] = []
        self.succeeded: set[tuple[str, int]] = set()  # (node, round): all workers of the node succeeded in the round
        self.written_at: dict[tuple[str, str], list[float]] = {}  # by node and store (see ``writes_to``): when the row changed
        self.writes_to = ""  # the owner of the store that is written to now; empty: where the job was started
        self.formed_at: dict[tuple[str, str], float] = {}  # by fence and store: when the record of the round was written
        self.watch: list[Callable[[World, Node, RoundRecord | None, RoundRecord], None]] = []  # of each write of the round record
        self.on_starting: list[Callable[[World, Node, Start], None]] = []
        self.on_progress: list[Callable[[World], None]] = []  # called after each event that changed which nodes' workers can take a step
        self.on_moving: list[Callable[[World, Node, Place | None, Place | None], None]] = []  # of each node that goes to another store
        self.on_forwarding: list[Callable[[World], None]] = []  # called each ``FORWARD_EVERY`` where stores move
        self.started: dict[str, RoundRecord] = {}  # by name of the store: the last record whose workers a node has started
        self.terms: set[str] = set()  # of all take-overs
        self.counted: dict[str, Place] = {}  # by name and term of a lost store, and node: the store that has counted it and taken over
        self.owners: set[str] = set()  # ids of the nodes that have taken over a store
        self._progressing: list[RoundRecord | None] = []
        self.called_lost: dict[str, set[str]] = {}  # by fence: the members that a record of that round has called lost
        self.last_written: dict[str, RoundRecord] = {}  # by name of the store
        self.walls: list[frozenset[tuple[str, str]]] = []  # pairs of names: the first node cannot open a connection to the second one
        self.disconnected = False  # whoever serves an empty store where the job was started may not hear that its store has moved
        self.only_deaths = False  # nothing else makes nodes silent
        self.replaced = 0  # times that another store has taken the place of this one
        self.graces = (math.inf, math.inf)  # seconds until workers that are to stop are killed: planned, and after a failure
        self.transcript: list[str] | None = None
        self._decoded: dict[bytes, RoundRecord | None] = {}
        self._paused: list[Callable[[], None]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        if self.rules.succession:
            self.at(FORWARD_EVERY, self._forward)

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
        for node in [node for node in self.nodes if node.name == name and not node.up]:
            node.working = None  # the new agent first ends what is left of earlier ones on its machine
        names = list(dict.fromkeys([*(node.name for node in self.nodes), name]))
        row = NodeRow(f"{name}-{len(self.nodes)}", name, "", 0, slots, node_rank=node_rank)
        rules = rules or self.rules
        lease = 0.0 if rules.max_nodes == 1 else rules.guard_lease
        node = Node(self, name, None, None, offset, rate, lease)  # type: ignore[arg-type]
        exchanges = WorldExchanges(node, SyncProtocol("job/", row.id, CODEC, lambda: node.now))
        access = WorldAccess(f"10.0.0.{names.index(name) + 1}", node)
        node.session = Session(Machine(rules, row, node.now, f"store-of-{row.id}"), exchanges, access, node.said.append, lambda: node.now)
        node.hosts = self.hosted and name == (self.nodes or [node])[0].name
        node.side = next((other.side for other in reversed(self.nodes) if other.name == name), 0)
        if self.hosted and node.hosts and self.nodes:
            self.replace_store()  # what its last incarnation held is gone
        self.nodes.append(node)
        prepares = self.prepare_random.uniform(0.0, self.prepares_within) if self.prepares_within else 0.0
        node.session.begin(prepares > 0.0)
        if prepares:
            self.at(prepares, lambda: node.when_running(partial(node.post, Prepared)))
        node.turn()
        return node

    def at(self, delay: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (self.t + delay, next(self._count), what))

    # -- the store ----------------------------------------------------------------------------------------------------

    def server(self, at: Place | None) -> Node | None:
        """Return the node that serves the store ``at``; None: no node does."""
        if at is not None:
            return next(node for node in self.nodes if node.id == at.id)
        return next((node for node in reversed(self.nodes) if node.hosts), None)

    def undecided(self, node: Node) -> bool:
        """Return whether the node waits in a standby store that nobody has taken over yet."""
        at = node.machine.store.place
        return node.alive and at is not None and "job/round" not in self.data_at(at)

    def data_at(self, at: Place | None) -> dict[str, bytes]:
        server = self.server(at)
        if at is None or server is None:
            return self.data
        return server.standby if at.port == server.session.access.standby_port else {}

    def loses(self, node: Node, at: Place | None, rng: random.Random, reply: bool = False) -> bool:
        """Return whether a message of the node to the store ``at``, or the reply to it, is lost."""
        server = self.server(at)
        if node.cut_in if reply else node.cut_out:
            return True
        if self.rules.succession and server is not None and not self._reaches(node, server):
            return True
        return rng.random() < node.loss

    def _reaches(self, node: Node, server: Node) -> bool:
        """Return whether the network, and the machine of the ``server``, let the node speak to the server."""
        if server.dark or server.cut or server.side != node.side:
            return False
        return not any((node.name, server.name) in wall for wall in self.walls)

    def begin(self, node: Node, sync: Sync) -> None:
        """Begin an exchange over the node's connection. After it is given up it goes on: its writes arrive, but nobody hears of them."""
        connection = node.connection
        self._await_answer(node, connection)
        self._go_on(node, connection, one_by_one(connection.protocol.steps(sync, node.now)), None)

    def _await_answer(self, node: Node, connection: Connection) -> None:
        """Give the next operation of an exchange its time."""
        limit = EXCHANGE_LIMIT if connection.at == node.machine.store.place else LOOK_LIMIT
        connection.connected, connection.deadline = True, node.now + limit

    def _go_on(self, node: Node, connection: Connection, steps: Steps, found: Any) -> None:
        try:
            operation = steps.send(found)
        except StopIteration as done:
            answer = replace(done.value, hosting=self._is_local(node, connection.at))
            self.hand_over(node, connection, lambda now: answer)
        except StoreError as error:
            self.hand_over(node, connection, partial(failure, error))
        else:
            local = self._is_local(node, connection.at)
            lost = not local and self.loses(node, connection.at, self.random)
            delay = 0.0002 if local else self.random.uniform(*(node.late or node.delay))
            if not lost:
                self.at(delay, lambda: self._arrive(node, connection, steps, operation))

    def hand_over(self, node: Node, connection: Connection, make: Callable[[float], Answer]) -> None:
        """Let the node's loop have what came over ``connection``, unless that was abandoned."""
        connection.answers.append(answer := make(node.now))
        if not isinstance(answer, Changed):
            connection.deadline = None
        node.turn()

    @staticmethod
    def _is_local(node: Node, at: Place | None) -> bool:
        return node.hosts if at is None else node.id == at.id

    def _held_up(self, at: Place | None, again: Callable[[], None]) -> bool:
        """Return whether the store ``at`` stands still; then ``again`` is called when it goes on."""
        server = self.server(at)
        if at is None and self.store_paused:
            self._paused.append(again)
        elif at is not None and server is not None and server.frozen and server.up:
            server.waiting.append(again)
        else:
            return False
        return True

    def is_up(self, at: Place | None) -> bool:
        server = self.server(at)
        if at is None or server is None:
            return self.store_up
        return server.alive and at.port == server.session.access.standby_port

    def _arrive(self, node: Node, connection: Connection, steps: Steps, operation: Operation) -> None:
        at = connection.at
        if self._held_up(at, lambda: self._arrive(node, connection, steps, operation)):
            return
        if not self.is_up(at):
            refused = partial(self.hand_over, node, connection, lambda now: SyncFailed(now, "connection refused"))
            self.at(0.002, partial(node.when_running, refused))
            return
        if node.reached is not connection and not self._is_local(node, at):
            node.reached = connection
            node.session.access.connected()  # type: ignore[attr-defined]
        store = LeasedStore(self, node) if self.rules.lasting else MemoryStore(self.data_at(at))
        found = self._apply(node, operation, store, at)

        def take() -> None:
            for name, what in store.learnt.items() if isinstance(store, LeasedStore) else ():
                setattr(node, name, what)
            self._await_answer(node, connection)
            self._go_on(node, connection, steps, found)

        local = self._is_local(node, at)
        if local or not self.loses(node, at, self.random, reply=True):
            self.at(0.0002 if local else self.random.uniform(*node.delay), partial(node.when_running, take))

    def _apply(self, node: Node, operation: Operation, store: MemoryStore | None = None, at: Place | None = None) -> Any:
        key, data, self.writes_to = f"job/node/{node.id}", self.data_at(at), at.id if at else ""
        round_before, row_before = data.get("job/round"), data.get(key)
        found = operation(store or MemoryStore(data))
        after = data.get("job/round")
        if data.get(key) != row_before and not self.rules.lasting:  # with leases, a renewal is the sign of life
            self.written_at.setdefault((node.id, self.writes_to), []).append(self.t)
        if after != round_before and after is not None:
            old, new = self._round(round_before, data), self._round(after, data)
            assert new is not None
            self.note(node, new)
            for watch in self.watch:
                watch(self, node, old, new)
            self.last_written[new.store_id] = new
            self.called_lost.setdefault(new.fence, set()).update(new.broken.lost if new.broken else ())
            self._announce_change(at)
        return found

    def write_from_outside(self, node: Node, at: Place | None, steps: Steps, found: Any = None) -> None:
        """Carry out an exchange of a command, which is no node, with the store of ``node``, one operation after the other."""
        try:
            operation = steps.send(found)
        except (StoreError, StopIteration):
            return
        store = LeasedStore(self, node) if self.rules.lasting else None

        def arrive() -> None:
            if self.is_up(at) and not (at is None and self.store_paused):
                self.write_from_outside(node, at, steps, self._apply(node, operation, store, at))

        self.at(self.random.uniform(0.0005, 0.005), arrive)

    # -- death notices --------------------------------------------------------------------------------------------------

    def tell_death(self, node: Node) -> None:
        """Let the guard of a dead agent write the death notice, as well as guards work in this world; if the store is gone, a vote."""
        rng, deaths = self.death_random, self.deaths
        if rng.random() >= deaths.told:
            return
        number, since = node.machine.store.round_known
        ran = node.now - since
        for _ in range(1 + (rng.random() < deaths.repeated) * rng.randint(1, 3)):
            delay = rng.uniform(0.0, LATE_NOTICE if rng.random() < deaths.late else NOTICE_TAKES)
            protocol = SyncProtocol("job/", node.id, CODEC, lambda: 0.0)
            steps = one_by_one(write_notice(protocol, node.id, number, ran))
            self.at(delay, partial(self._go_on_telling, node, node.machine.store.place, steps, None, partial(self.tell_standbys, node)))

    def tell_standbys(self, node: Node) -> None:
        """Let the guard of a node tell the standby stores that it has ended, as well as guards work."""
        rng, deaths, words = self.death_random, self.deaths, node.machine.last_words
        if words is None or rng.random() >= deaths.told:
            return
        for place in words[0]:
            for _ in range(1 + (rng.random() < deaths.repeated) * rng.randint(1, 3)):
                delay = rng.uniform(0.0, LATE_NOTICE if rng.random() < deaths.late else NOTICE_TAKES)
                steps = SyncProtocol("job/", node.id, CODEC, lambda: 0.0).put_vote(words[1])
                self.at(delay, partial(self._go_on_telling, node, place, steps, None))

    def _forward(self) -> None:
        """Let the node that has taken over the store say so where the job was started."""
        for watch in self.on_forwarding:
            watch(self)
        for node in self.nodes:
            told = node.machine.store.forward
            if told is not None and node.alive and not node.frozen:
                (place, job), protocol = told, SyncProtocol("job/", node.id, CODEC, lambda: 0.0)
                self._go_on_telling(node, None, protocol.put_moved(place, job=job, over=job is not None), None)
        self.at(FORWARD_EVERY, self._forward)

    def _go_on_telling(
        self, node: Node, at: Place | None, steps: Steps, found: Any, store_is_gone: Callable[[], object] = lambda: None
    ) -> None:
        """Carry out the next operation of what a guard, or a thread of the agent, writes into the store ``at``. A lost message ends it."""
        try:
            operation = steps.send(found)
        except StoreError:
            return
        except StopIteration as done:
            if done.value is False:
                store_is_gone()
            if isinstance(record := done.value, RoundRecord):
                node.when_running(partial(node.post, lambda now: FoundAtStart(now, record)))
            return
        if not self.loses(node, at, self.death_random):
            self.at(self.death_random.uniform(*node.delay), partial(self._take_notice, node, at, steps, operation, store_is_gone))

    def _take_notice(self, node: Node, at: Place | None, steps: Steps, operation: Operation, store_is_gone: Callable[[], object]) -> None:
        if self._held_up(at, partial(self._take_notice, node, at, steps, operation, store_is_gone)):
            return
        if not self.is_up(at):
            store_is_gone()
            return
        self.telling = node
        found = self._apply(node, operation, LeasedStore(self, node) if self.rules.lasting else None, at)
        self.telling = None
        if not self.loses(node, at, self.death_random, reply=True):
            self.at(self.death_random.uniform(*node.delay), partial(self._go_on_telling, node, at, steps, found, store_is_gone))

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

    def _announce_change(self, at: Place | None) -> None:
        """Tell the nodes that the store ``at`` can reach that its record has changed, as well as their watches work."""
        for node in self.nodes:
            reached = node.connection is not None and node.connection.at == at and not node.cut_in
            if node.alive and reached and self.push_random.random() >= max(self.push.lost, node.loss):
                told = partial(self.hand_over, node, node.connection, Changed)
                for _ in range(1 + (self.push_random.random() < self.push.repeated) * self.push_random.randint(1, 3)):
                    late = self.push_random.random() < self.push.late
                    delay = (0.0, LATE_PUSH) if late else node.delay
                    self.at(self.push_random.uniform(*delay), partial(node.when_running, told))

    @property
    def history(self) -> list[tuple[int, int]]:
        """The rounds that any node has started, with their number of nodes."""
        return sorted({(number, nodes) for node in self.nodes for number, _, nodes in node.starts})

    @property
    def record(self) -> RoundRecord | None:
        """The round record of the store in use: the newest one in a store that is served."""
        if not self.rules.succession:
            return self._round(self.data.get("job/round"), self.data)
        records = (self.record_at_start(), *(self.record_at(node) for node in self.nodes if node.alive))
        found = [record for record in records if record is not None]
        return max(found or self.last_written.values(), key=lambda record: (record.term, record.version), default=None)

    def record_at_start(self) -> RoundRecord | None:
        """Return the round record in the store where the job was started; None: there is none, or that store is gone."""
        return self._round(self.data.get("job/round"), self.data) if self.store_up else None

    def record_at(self, node: Node) -> RoundRecord | None:
        """Return the round record in the standby store of the node; None: nobody has taken that store over."""
        return self._round(node.standby.get("job/round"), node.standby)

    def _round(self, value: bytes | None, data: dict[str, bytes]) -> RoundRecord | None:
        if value is None:
            return None
        if value not in self._decoded:
            if len(self._decoded) > 32:
                self._decoded.clear()
            self._decoded[value] = read_round({**data, "job/round": value})
        return self._decoded[value]

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

    def moved(self, node: Node, before: Place | None, after: Place | None) -> None:
        for watch in self.on_moving:
            watch(self, node, before, after)

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
        progressing = [n.working if n.progressing else None for n in self.nodes]
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
