"""A history from a seed: a job, a list of faults drawn beforehand, healing, and the end. The list can be shortened and run again."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elastirun.mesh import Mesh
from elastirun.rendezvous.peers import polling
from elastirun.rendezvous.peers.seats import assign
from elastirun.rendezvous.rules import FREE_LOSSES, Rules, hold
from elastirun.rendezvous.transitions import LEFT
from elastirun.rendezvous.wire import lists
from elastirun.rendezvous.wire.actions import Outcome
from elastirun.rendezvous.wire.records import Blame, Cause, NodeRow, RoundRecord
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.sim import invariants
from tests.sim.live import Live, Switching, draw_switching
from tests.sim.world import CODEC, Deaths, Node, Push, Violation, World, one_by_one

TROUBLE = 30.0  # seconds of faults
LOOP = 90.0  # seconds during which a node crashes again and again
HEALED_WITHIN = 200.0  # seconds after the last fault until all nodes are in one round; when all were lost, that takes 88
TRAINED_WITHIN = 60.0  # seconds from then on until all workers of a live job train in one world
JOINED_WITHIN = 20.0  # seconds until the same, after newcomers need not wait any more
ENDED_WITHIN = 60.0  # seconds from the success of all workers to the end of all nodes
# Shares of the histories: with 3 to 9 nodes, which do not read each other's rows all the time; with unlike nodes; with a node that
# crashes again and again; with nodes that import modules when they begin.
# And with workers that keep their state from round to round; the same, where each of them is played (tests/sim/live.py).
WIDE, UNEVEN, LOOPING, IMPORTING, KEEPING, LIVE = 0.1, 0.25, 0.1, 0.125, 0.2, 0.2
MESHED = 0.3  # share of those without live workers in which the workers form a mesh
MESHES = (
    "dp=auto,tp=2",
    "dp=auto,pp=2,tp=2",
    "dp=auto,pp=2,tp=1",
    "dp=auto,pp=3,tp=2",
    "pp=2,dp=auto,tp=2",
    "dp=auto,node=2,worker=2",
    "dp=auto",
)
SUCCESSION = 0.5  # share of the histories with a store that a node hosts in which another node's store may take over
WIDER, CROWDED = 0.6, 0.5  # shares of those with faults of ``WIDER_KINDS``, and of these with four to seven nodes
MAJORITY = 0.4  # share of the histories with succession in which a majority is enough, without the proof that the host has died
LOOK_EVERY = 0.02  # seconds between two looks at whether the moment of a fault has come


@dataclass(frozen=True)
class Fault:
    """A fault of node ``who`` (an index) or of the store, at ``when``, for ``lasts`` seconds."""

    when: float
    kind: str
    who: int = 0
    lasts: float = 0.0
    x: float = 0.0

    def __str__(self) -> str:
        return f"{self.when:7.3f} {self.kind}({self.who}) for {self.lasts:.3f} s, x={self.x:.3f}"


@dataclass(frozen=True)
class Plan:
    """The values that are drawn from the seed beforehand."""

    seed: int
    rules: Rules
    hosted: bool
    nodes: int
    clocks: tuple[tuple[float, float], ...]  # offset and rate, by index of incarnation
    stop_times: tuple[float, ...]
    faults: tuple[Fault, ...]
    slots: tuple[int, ...] = (2,)  # of the nodes, by index modulo their number
    timings: tuple[tuple[float, float, float, float], ...] = ()  # beat, last call, debounce, join timeout; empty: those of ``rules``
    push: Push = Push()
    deaths: Deaths = Deaths()
    sparse: float = 1.0  # factor on the time between two reads of all rows
    large_lists: bool = False  # lists of members count as large however few these are
    prepares_within: float = 0.0  # seconds from when a node begins until its workers can start
    keeps: bool = False  # workers are parked with their state when a round ends
    live: Switching | None = None  # of a live job: what its workers do between rounds
    trouble: float = TROUBLE  # seconds of faults
    goes_on_within: float = 0.0  # seconds from the loss of a node until a round runs without it, and nobody gives up meanwhile; 0: no limit


@dataclass
class Result:
    plan: Plan
    violation: str | None
    seconds: float  # of simulated time
    rounds: int
    transcript: list[str] = field(default_factory=list)


# kind -> (weight, longest duration in seconds)
KINDS = {
    "crash": (4, 20.0),  # a new incarnation starts when it is over
    "reboot": (2, 0.5),
    "cut": (3, 20.0),
    "cut_out": (2, 15.0),
    "cut_in": (2, 15.0),
    "halves": (1, 15.0),
    "cut_round": (0.5, 60.0),
    "loss": (2, 15.0),
    "slow": (2, 15.0),
    "late": (2, 10.0),
    "freeze": (3, 16.0),
    "freeze_node": (2, 16.0),
    "pause_store": (2, 12.0),
    "store_down": (1, 12.0),
    "replace_store": (0.3, 0.0),
    "storm": (1, 1.0),
    "leave": (1.5, 10.0),
    "fail": (4, 0.0),
    "fail_two": (1, 0.0),
    "succeed_one": (1, 0.0),
}


# Faults of the node that hosts the store in use, and of the network: kind -> (weight, longest duration in seconds). They are drawn for
# histories in which another node may take over the store.
HOST_KINDS = {
    "kill_host": (6, 20.0),
    "dark_host": (1, 20.0),  # its machine is off: no guard tells of it
    "leave_host": (2, 10.0),
    "freeze_host": (1, 16.0),
    "split": (4, 20.0),  # in two halves that do not reach each other
}

# Faults of a network that is torn in any way, of a loop that stands still alone, and of all machines at once, for the same histories. Some
# wait for a moment that no drawn time would meet.
WIDER_KINDS = {
    "parts": (2, 20.0),  # the network is in three or four parts
    "walls": (3, 30.0),  # some nodes cannot open a connection to some others
    "wall_off_host": (4, 30.0),  # some nodes cannot open a connection to the host of the store in use; it can to them
    "stall": (1, 16.0),
    "stall_host": (2, 16.0),
    "suspend": (1, 16.0),  # all machines at once
    "suspend_undecided": (2, 16.0),  # the same, once a node waits in a standby store that nobody has taken over yet
    "kill_owner": (2, 20.0),  # the owner of such a store dies
    "kill_unread": (4, 20.0),  # the host dies, and there is a round that its agent has not read
}

# More faults of histories with live workers: a worker dies; a node is away, so that its workers come back with an abandoned state.
LIVE_KINDS = {"fail": (6, 0.0), "crash": (2, 8.0), "freeze_node": (3, 12.0), "cut": (2, 15.0)}

SCALES = [1, 1, 2, 3]  # times that ``elastirun scale`` is called in a history with it

CONNECTED = {
    "scale",
    "crash",
    "reboot",
    "storm",
    "leave",
    "fail",
    "fail_two",
    "succeed_one",
    "kill_host",
    "leave_host",
    "dark_host",
    "loop",
}
CONNECTED |= {"stall", "stall_host", "kill_owner"}


def draw(seed: int) -> Plan:
    """Return the plan of ``seed``. A second generator draws wide and uneven worlds, so that the other histories stay what they were."""
    rng, own = random.Random(seed), random.Random(f"world {seed}")
    wide, uneven = own.random() < WIDE, own.random() < UNEVEN
    high = own.randint(3, 8) if wide else rng.randint(1, 4)
    low = rng.randint(1, high)
    fixed = rng.random() < 0.15
    rules = Rules(
        min_nodes=high if fixed else low,
        max_nodes=high,
        max_restarts=rng.choice([0, 1, 3, 100, 100, 100]),
        restart_window=rng.choice([0.0, 0.0, 10.0]),
        fail_fast=rng.random() < 0.1,
        restart_pause=rng.choice([0.0, 2.0, 10.0]),
        fixed_ranks=fixed,
        store_grace=rng.choice([60.0, 15.0, 15.0, 8.0]),
        join_timeout=600.0,
    )
    nodes = rng.randint(max(low, 3) if wide else low, high + 1) if not fixed else high
    clocks = tuple((rng.uniform(-1e6, 1e6), rng.uniform(0.9, 1.1)) for _ in range(64))
    stop_times = tuple(rng.choice([0.01, 0.1, 1.0, 4.9, 29.0]) for _ in range(64))
    names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    faults = []
    for kind in rng.choices(names, weights, k=rng.choice([1, 2, 3, 5, 8])):
        when = rng.uniform(0.0, TROUBLE)
        if faults and rng.random() < 0.4:
            when = min(TROUBLE, faults[-1].when + rng.expovariate(2.0))  # close to another fault: most bugs show there
        faults.append(Fault(when, kind, rng.randrange(nodes), rng.uniform(0, KINDS[kind][1]), rng.random()))
    hosted = rng.random() < 0.4
    rules = replace(rules, lasting=not hosted and rng.random() < 0.5)
    plan = Plan(seed, rules, hosted, nodes, clocks, stop_times, tuple(sorted(faults, key=lambda f: f.when)))
    plan = replace(plan, push=_push(random.Random(f"push of {seed}")), deaths=_deaths(random.Random(f"deaths of {seed}")))
    imports = random.Random(f"loading {seed}")
    if imports.random() < IMPORTING:
        plan = replace(plan, prepares_within=imports.choice([1.0, 5.0, 30.0]))
    plan = replace(plan, keeps=random.Random(f"keeping {seed}").random() < KEEPING)
    again = random.Random(f"loop {seed}")
    if again.random() < LOOPING:
        loop = Fault(again.uniform(0.0, TROUBLE), "loop", again.randrange(nodes), again.uniform(0.2, 7.0), again.random())
        plan = replace(plan, faults=tuple(sorted((*plan.faults, loop), key=lambda f: f.when)))
    third = random.Random(f"succession {seed}")
    if hosted and high > 1 and third.random() < SUCCESSION:
        plan = replace(plan, rules=replace(plan.rules, store_succession="proof"), faults=_with_host_faults(plan, third))
        if third.random() < WIDER:
            plan = _with_wider_faults(plan, third)
        if third.random() < MAJORITY:
            plan = replace(plan, rules=replace(plan.rules, store_succession="majority"))
    if wide:
        plan = replace(plan, sparse=own.choice([1.0, 4.0, 16.0]))
    if uneven:
        slots = tuple(own.choice([1, 2, 8]) for _ in range(nodes))
        plan = replace(plan, slots=slots, timings=tuple(_timing(own) for _ in range(nodes)))
    switching = random.Random(f"switching {seed}")
    if switching.random() < LIVE:
        faults = _with_close_faults(plan, switching, LIVE_KINDS, switching.uniform(5.0, TROUBLE), [1, 2, 4])
        plan = replace(plan, faults=faults, live=draw_switching(switching))
    return _with_mesh(plan, random.Random(f"mesh {seed}"))


def scaled(seed: int) -> Plan:
    """Return the plan of ``seed`` with calls of ``elastirun scale``. There are more nodes, where the ranks are not fixed."""
    plan, rng = draw(seed), random.Random(f"scale {seed}")
    rules = plan.rules
    if not (rules.fixed_ranks or rules.mesh):
        most = rng.randint(2, 6)
        rules = replace(rules, min_nodes=rng.choice([1, 1, min(2, most)]), max_nodes=most)
        plan = replace(plan, rules=rules, nodes=max(rules.min_nodes, min(8, most + rng.choice([0, 0, 1]))))
    faults = [Fault(rng.uniform(0.0, TROUBLE), "scale", 0, 0.0, rng.random()) for _ in range(rng.choice(SCALES))]
    return replace(plan, faults=tuple(sorted((*plan.faults, *faults), key=lambda f: f.when)))


def _with_mesh(plan: Plan, rng: random.Random) -> Plan:
    """Return the plan with a mesh, in some of those that it concerns: its nodes can form one, and as many as have to be there."""
    if plan.live is not None or plan.rules.fixed_ranks or rng.random() >= MESHED:
        return plan
    mesh = Mesh.parse(rng.choice(MESHES))
    rows = [NodeRow(str(at), str(at), "", 0, plan.slots[at % len(plan.slots)]) for at in range(plan.nodes)]
    most = len(assign(mesh, (), rows, plan.rules.max_nodes).members)
    alike = len(set(plan.slots)) == 1
    if not most or any(row.slots < mesh.inner for row in rows):  # each node may come to host the store, and then needs a place
        return plan
    if not alike and (mesh.outer > 1 or plan.nodes > plan.rules.max_nodes):  # the host, or those that come first, may be too small
        return plan
    low = min(plan.rules.min_nodes, most) if alike else 1  # of unlike nodes, one may have all that the mesh needs
    return replace(plan, rules=replace(plan.rules, mesh_text=str(mesh), min_nodes=low))


def _with_host_faults(plan: Plan, rng: random.Random) -> tuple[Fault, ...]:
    """Return the faults of the plan with one to four more, close to each other, of the node that hosts the store in use."""
    return _with_close_faults(plan, rng, HOST_KINDS, rng.uniform(3.0, TROUBLE), [1, 2, 3, 4])


def _with_wider_faults(plan: Plan, rng: random.Random) -> Plan:
    """Return the plan with one to four more faults, of ``WIDER_KINDS``, mostly just before a fault of the host.

    Often there are more nodes: with three, few things can go wrong between those that do not host the store, and spares take the place of
    members that are cut off. Often there are fewer other faults, and mostly the guards tell: a story needs both to go on to its end.
    """
    others = rng.choice([0.0, 0.5, 1.0])
    plan = replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind in HOST_KINDS or rng.random() < others))
    if not plan.deaths.told and rng.random() < 0.7:
        plan = replace(plan, deaths=replace(plan.deaths, told=1.0))
    if rng.random() < CROWDED and not plan.rules.fixed_ranks:
        nodes = rng.randint(4, 7)
        most = nodes - rng.choice([0, 1, 1, 2])
        plan = replace(plan, nodes=nodes, rules=replace(plan.rules, max_nodes=most, min_nodes=min(most, plan.rules.min_nodes)))
    of_host = [fault.when for fault in plan.faults if fault.kind in HOST_KINDS]
    when = max(2.0, rng.choice(of_host) - rng.expovariate(0.2)) if rng.random() < 0.7 else rng.uniform(3.0, TROUBLE)
    return replace(plan, faults=_with_close_faults(plan, rng, WIDER_KINDS, when, [1, 2, 2, 3, 4]))


def _with_close_faults(
    plan: Plan, rng: random.Random, kinds: dict[str, tuple[float, float]], when: float, counts: list[int]
) -> tuple[Fault, ...]:
    """Return the faults of the plan with some more of ``kinds``, the first one at ``when``, the others close to each other."""
    names, weights, faults = list(kinds), [weight for weight, _ in kinds.values()], []
    for kind in rng.choices(names, weights, k=rng.choice(counts)):
        faults.append(Fault(when, kind, rng.randrange(plan.nodes), rng.uniform(0, kinds[kind][1]), rng.random()))
        when = min(TROUBLE, when + rng.expovariate(rng.choice([0.2, 2.0, 10.0])))
    return tuple(sorted((*plan.faults, *faults), key=lambda f: f.when))


def _timing(rng: random.Random) -> tuple[float, float, float, float]:
    """Return those settings of one node that need not be the same on all nodes of a job."""
    return rng.choice([0.3, 0.5, 0.8]), rng.choice([1.0, 5.0, 15.0]), rng.choice([0.2, 1.0, 3.0]), rng.choice([400.0, 600.0])


def _push(rng: random.Random) -> Push:
    """Return how well the watches work: for half of the histories as they should, for some not at all."""
    kind = rng.random()
    if kind < 0.5:
        return Push()
    return Push(lost=1.0) if kind < 0.65 else Push(*(rng.choice([0.0, 0.1, 0.5]) for _ in range(3)))


def _deaths(rng: random.Random) -> Deaths:
    """Return how well the guards of dead agents work: not at all for a quarter of the histories."""
    ended_within = rng.choice([0.0, 0.3, 1.0])
    if rng.random() < 0.25:
        return Deaths(ended_within=ended_within)
    return Deaths(rng.choice([1.0, 1.0, 0.5]), rng.choice([0.0, 0.0, 0.3]), rng.choice([0.0, 0.3, 1.0]), ended_within)


class History:
    """A plan that is carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed, plan.rules, plan.hosted)
        self.world.graces = (30.0, 5.0)
        kinds = {fault.kind for fault in plan.faults}
        dark = "dark_host" in kinds and len(plan.faults) > 1  # of a store that has moved, nobody says meanwhile that it has: decision 0021
        self.world.disconnected = plan.rules.succession and (dark or bool(kinds - CONNECTED))
        self.world.only_deaths = plan.goes_on_within > 0
        self.world.push, self.world.deaths, self.world.prepares_within = plan.push, plan.deaths, plan.prepares_within
        self.world.keeps = plan.keeps
        if plan.live is not None:
            self.world.live = Live(self.world, plan.live, random.Random(f"live {plan.seed}"))
        self._suspended_until = 0.0  # the end of the time for which all machines are suspended
        self._lost_at, self._formed_then = 0.0, 0  # when the last fault began, and the last round that was formed until then
        invariants.install(self.world)

    def run(self, transcript: bool = False) -> Result:
        world = self.world
        world.transcript = [] if transcript else None
        violation = None
        often = polling.ALL_PER_NODE
        polling.ALL_PER_NODE = often * self.plan.sparse
        limits = lists.LARGE, lists.WORTH
        if self.plan.large_lists:
            lists.LARGE, lists.WORTH = 0, math.inf
        try:
            self._carry_out()
        except Violation as found:
            violation = str(found)
        except Exception as error:  # an assertion or a crash in the machine itself
            violation = f"{type(error).__name__}: {error}"
        finally:
            polling.ALL_PER_NODE = often
            lists.LARGE, lists.WORTH = limits
        return Result(self.plan, violation, world.t, self._formed(), world.transcript or [])

    def _carry_out(self) -> None:
        world = self.world
        for i in range(self.plan.nodes):
            world.at(world.random.uniform(0, 2.0), lambda i=i: self._add(f"n{i}", i))
        for fault in self.plan.faults:
            world.at(fault.when, lambda fault=fault: self._begin(fault))
        world.run(max([self.plan.trouble, *(fault.when + LOOP for fault in self.plan.faults if fault.kind == "loop")]))
        self._heal()
        world.run(5.0)  # nodes that were about to end do so
        for seconds in (HEALED_WITHIN, hold(world.record) if world.record else 0.0, JOINED_WITHIN):
            if world.run(seconds, lambda: invariants.settled(world)):
                break
        else:
            if invariants.two_runs(world):
                return
            raise Violation(f"not settled {HEALED_WITHIN:g} s after everything was healed: {self._state()}")
        invariants.verdicts_agree(world)
        if world.live is not None and not world.run(TRAINED_WITHIN, lambda: invariants.all_train(world)):
            raise Violation(f"not all live workers train {TRAINED_WITHIN:g} s later: {self._state()}")
        self._finish()

    def _finish(self) -> None:
        """Let the job succeed undisturbed; every node must leave with that verdict."""
        world = self.world
        record = world.record
        if record is None or record.closed is not None:
            return
        members = [n for n in world.nodes if n.alive and record.index(n.id) is not None]
        self._let_succeed()
        if not world.run(ENDED_WITHIN, lambda: all(n.finish for n in members)):
            raise Violation(f"not ended {ENDED_WITHIN:g} s after all succeeded: {self._state()}")
        odd = [n.name for n in members if n.outcome is not Outcome.SUCCEEDED]
        if odd:
            raise Violation(f"all workers succeeded, but {odd} ended otherwise: {self._state()}")

    def _let_succeed(self) -> None:
        """Let all running workers succeed, again and again, because a round may have been about to end."""
        for node in self.world.nodes:
            if node.alive and node.working:
                self.world.at(self.world.random.uniform(0, 3.0), node.succeed)
        if not self.world.all_finished():
            self.world.at(5.0, self._let_succeed)

    def _state(self) -> str:
        record = self.world.record
        nodes = ", ".join(
            f"{n.id}:{'down' if not n.up else n.outcome.value if n.outcome else n.machine.state.value}"
            f"{'/' + str(n.working.round) if n.working else ''}"
            for n in self.world.nodes
        )
        on = "no record" if record is None else f"round {record.round} {[m.id for m in record.members]} {record.broken or record.closed}"
        return f"{nodes}; {on}"

    def _add(self, name: str, index: int) -> None:
        if (left := self._suspended_until - self.world.t) > 0:
            self.world.at(left, lambda: self._again(index))
            return
        count = len(self.world.nodes)
        offset, rate = self.plan.clocks[count % 64]
        rank = index if self.plan.rules.fixed_ranks else None
        rules, timings = self.world.rules, self.plan.timings
        if timings:
            beat, last_call, debounce, join_timeout = timings[index % len(timings)]
            rules = replace(rules, beat=beat, last_call=last_call, debounce=debounce, join_timeout=join_timeout)
        slots = self.plan.slots[index % len(self.plan.slots)]
        node = self.world.add(name, node_rank=rank, slots=slots, rules=rules, offset=offset, rate=rate)
        node.stop_time = self.plan.stop_times[count % 64]

    def _current(self, index: int) -> Node | None:
        """Return the newest incarnation of the node."""
        return next((n for n in reversed(self.world.nodes) if n.name == f"n{index}"), None)

    def _again(self, index: int) -> None:
        node = self._current(index)
        over = any(n.outcome in (Outcome.SUCCEEDED, Outcome.FAILED) for n in self.world.nodes)
        if not over and (node is None or not node.alive):
            self._add(f"n{index}", index)

    def _begin(self, fault: Fault) -> None:
        node = self._current(fault.who)
        if node is None:
            return
        getattr(self, f"_{fault.kind}")(node, fault)
        if self.plan.goes_on_within:
            self._lost_at, self._formed_then = self.world.t, self._formed()
            self.world.at(self.plan.goes_on_within, self._must_go_on)

    def _must_go_on(self) -> None:
        """Check that the job has gone on since the last fault, if that was long enough ago: a round runs, or was formed.

        When none is left of those that have taken part, a new run begins, which may have to wait for longer (decision 0021).
        """
        world = self.world
        members = [n for n in world.nodes if n.machine.record is not None and n.machine.record.round > 0]  # before, nobody takes over
        given_up = (Outcome.STORE_LOST, Outcome.TIMEOUT, Outcome.DISAGREES)  # who waits beside a round may: see docs/rendezvous.md
        gave_up = [n.id for n in members if n.outcome in given_up and (n.machine.row.round or n.machine.row.done_round)]
        runs = {n.machine.record.store_id for n in members if n.machine.record is not None}
        if world.succeeded or len(runs) > 1:
            return
        if gave_up:
            raise Violation(f"{gave_up} gave up: {self._state()}")
        held = world.record is not None and world.record.losses >= FREE_LOSSES  # newcomers wait after one more, which may be this one
        if held or self._waits_for_nodes() or not any(n.alive and n.began for n in world.nodes):
            return
        joining = world.record is not None and world.record.broken is not None and world.record.broken.cause is Cause.JOIN
        late = world.t >= self._lost_at + self.plan.goes_on_within and self._formed() == self._formed_then
        if late and not joining and not invariants.goes_on(world):
            raise Violation(f"no round runs {self.plan.goes_on_within:g} s after the last fault: {self._state()}")

    def _formed(self) -> int:
        return max((number for number, _ in self.world.history), default=0)

    def _waits_for_nodes(self) -> bool:
        """Return whether too few nodes are there for a round. Newcomers hear of a job that has moved only where it was started."""
        host = self.world.server(None)
        hear = [n for n in self.world.nodes if n.machine.record is not None or (host is not None and host.alive)]
        return sum(n.alive and n.machine.state is not LEFT for n in hear) < self.world.rules.min_nodes

    def _heal(self) -> None:
        """End all faults, and start the nodes anew that have gone, as a supervisor would."""
        world = self.world
        self._suspended_until = 0.0
        if world.live is not None:
            world.live.calm = True
        world.walls.clear()
        for node in world.nodes:
            node.cut, node.side = False, 0
            node.loss, node.delay, node.late = 0.0, (0.0005, 0.005), None
            node.thaw()
            node.end_stall()
        world.resume_store()
        host_gone = self.plan.hosted and not next((n for n in reversed(world.nodes) if n.hosts), world.nodes[0]).alive
        if not host_gone:
            self._store_is_back()
        for index in range(self.plan.nodes):
            node = self._current(index)
            if node is None or not node.up or (node.finish and node.outcome not in (Outcome.SUCCEEDED, Outcome.FAILED)):
                self._again(index)
        world.at(25.0, self._restart_those_that_gave_up)

    def _restart_those_that_gave_up(self) -> None:
        for index in range(self.plan.nodes):
            node = self._current(index)
            if node is not None and node.finish and node.outcome not in (Outcome.SUCCEEDED, Outcome.FAILED):
                self._again(index)
        if not invariants.settled(self.world):
            self.world.at(5.0, self._restart_those_that_gave_up)

    def _for(self, fault: Fault, undo: Callable[[], object]) -> None:
        self.world.at(fault.lasts, undo)

    # -- the faults -------------------------------------------------------------------------------------------------------

    def _crash(self, node: Node, fault: Fault) -> None:
        node.crash()
        self._for(fault, lambda: self._again(fault.who))

    _reboot = _crash

    def _loop(self, node: Node, fault: Fault) -> None:
        """Kill the node, start it again, kill it, and so on. ``lasts``: how long it is away each time."""
        self._crash(node, fault)
        next_time = fault.lasts + 1.0 + 15.0 * fault.x
        if self.world.t + next_time < fault.when + LOOP:
            self.world.at(next_time, lambda: self._loop(self._current(fault.who) or node, fault))

    def _cut(self, node: Node, fault: Fault) -> None:
        setattr(node, fault.kind, True)
        self._for(fault, lambda: setattr(node, fault.kind, False))

    _cut_out = _cut_in = _cut

    def _halves(self, node: Node, fault: Fault) -> None:
        cut = [n for i, n in enumerate(self.world.nodes) if n.alive and (i + int(fault.x * 2)) % 2]
        for i, other in enumerate(cut):
            self._cut(other, Fault(fault.when, "cut", lasts=fault.lasts + i * fault.x))  # they come back one by one

    def _cut_round(self, node: Node, fault: Fault) -> None:
        """Cut off the whole round together, but not a spare."""
        record = self.world.record
        members = {m.id for m in record.members} if record else set()
        for i, other in enumerate(n for n in self.world.nodes if n.alive and n.id in members):
            self._cut(other, Fault(fault.when, "cut", lasts=fault.lasts + i * fault.x))

    def _loss(self, node: Node, fault: Fault) -> None:
        for other in self.world.nodes if fault.x < 0.5 else [node]:
            other.loss = 0.05 + fault.x * 0.4
            self._for(fault, lambda other=other: setattr(other, "loss", 0.0))

    def _slow(self, node: Node, fault: Fault) -> None:
        for other in self.world.nodes if fault.x < 0.5 else [node]:
            other.delay = (0.0005, 0.1 + 2.0 * fault.x)
            self._for(fault, lambda other=other: setattr(other, "delay", (0.0005, 0.005)))

    def _late(self, node: Node, fault: Fault) -> None:
        node.late = (5.0, 20.0)
        self._for(fault, lambda: setattr(node, "late", None))

    def _freeze(self, node: Node, fault: Fault) -> None:
        node.freeze(workers_too=fault.kind == "freeze_node")
        self._for(fault, node.thaw)

    _freeze_node = _freeze

    def _pause_store(self, node: Node, fault: Fault) -> None:
        self.world.pause_store()
        self._for(fault, self.world.resume_store)

    def _store_down(self, node: Node, fault: Fault) -> None:
        if not self.plan.hosted:
            self.world.store_up = False
            self._for(fault, self._store_is_back)

    def _store_is_back(self) -> None:
        self.world.store_up = True
        self.world.lengthen_leases()

    def _replace_store(self, node: Node, fault: Fault) -> None:
        if not self.plan.hosted:
            self.world.replace_store()

    def _storm(self, node: Node, fault: Fault) -> None:
        for i in range(self.plan.nodes):
            self.world.at(fault.x * i / self.plan.nodes, lambda i=i: self._again(i))

    def _leave(self, node: Node, fault: Fault) -> None:
        node.leave()
        self._for(fault, lambda: self._again(fault.who))

    def _host(self) -> Node | None:
        """Return the node that hosts the store in use."""
        record = self.world.record
        return next((n for n in self.world.nodes if record is not None and n.id == record.host and n.alive), None)

    def _kill_host(self, node: Node, fault: Fault) -> None:
        if host := self._host():
            self._kill(host, fault)

    def _kill(self, node: Node, fault: Fault) -> None:
        self._crash(node, replace(fault, who=int(node.name[1:])))

    def _dark_host(self, node: Node, fault: Fault) -> None:
        if host := self._host():
            host.dark = True
            self._kill_host(node, fault)

    def _leave_host(self, node: Node, fault: Fault) -> None:
        if host := self._host():
            self._leave(host, replace(fault, who=int(host.name[1:])))

    def _freeze_host(self, node: Node, fault: Fault) -> None:
        if host := self._host():
            self._freeze(host, fault)

    def _split(self, node: Node, fault: Fault) -> None:
        bits = int(fault.x * 2**16)
        self._take_sides(fault, [bits >> i % 16 & 1 for i in range(len(self.world.nodes))])

    def _parts(self, node: Node, fault: Fault) -> None:
        rng = random.Random(fault.x)
        parts = rng.choice([3, 4])
        self._take_sides(fault, [rng.randrange(parts) for _ in self.world.nodes])

    def _take_sides(self, fault: Fault, sides: list[int]) -> None:
        """Split the network, so that each node is on its side. New incarnations of a node stay there."""
        for other, side in zip(self.world.nodes, sides, strict=True):
            other.side = side
        self._for(fault, lambda: [setattr(other, "side", 0) for other in self.world.nodes])

    def _walls(self, node: Node, fault: Fault) -> None:
        """Keep some nodes from opening connections to some others; half of the time none of the two reaches the other."""
        rng, names = random.Random(fault.x), [f"n{i}" for i in range(self.plan.nodes)]
        share, both = rng.choice([0.1, 0.3, 0.6]), rng.random() < 0.5
        pairs = {pair for pair in itertools.permutations(names, 2) if rng.random() < share}
        self._build(fault, pairs | {(b, a) for a, b in pairs if both})

    def _wall_off_host(self, node: Node, fault: Fault) -> None:
        rng, host = random.Random(fault.x), self._host()
        self._build(fault, {(f"n{i}", host.name) for i in range(self.plan.nodes) if host and rng.random() < 0.5})

    def _build(self, fault: Fault, pairs: set[tuple[str, str]]) -> None:
        wall = frozenset(pairs)
        self.world.walls.append(wall)
        self._for(fault, lambda: wall in self.world.walls and self.world.walls.remove(wall))

    def _stall(self, node: Node, fault: Fault) -> None:
        node.stall()
        self._for(fault, node.end_stall)

    def _stall_host(self, node: Node, fault: Fault) -> None:
        if host := self._host():
            self._stall(host, fault)

    def _suspend(self, node: Node, fault: Fault) -> None:
        """Suspend all machines. They go on one after the other, within half a second."""
        self._suspended_until = max(self._suspended_until, self.world.t + fault.lasts)
        for i, other in enumerate(self.world.nodes):
            other.freeze(workers_too=True)
            self._for(replace(fault, lasts=fault.lasts + (i * fault.x) % 0.5), other.thaw)

    def _suspend_undecided(self, node: Node, fault: Fault) -> None:
        self._once(lambda: any(map(self.world.undecided, self.world.nodes)), lambda: self._suspend(node, fault))

    def _kill_owner(self, node: Node, fault: Fault) -> None:
        def owner() -> Node | None:
            return next((n for n in self.world.nodes if self.world.undecided(n) and (at := n.machine.store.place) and at.id == n.id), None)

        self._once(owner, lambda: self._kill(owner() or node, fault))

    def _kill_unread(self, node: Node, fault: Fault) -> None:
        """Let the loop of the host stand still when the next round is written, and kill the host when others have read that round.

        Mostly that round is one without many of the members: they cannot open a connection to the host from now on.
        """
        rng, record, host = random.Random(fault.x), self.world.record, self._host()
        if record is not None and host is not None and rng.random() < 0.7:
            others = [m.name for m in record.members if m.id != host.id]
            cut_off = rng.sample(others, rng.randint(len(others) // 2, len(others) // 2 + 1) if others else 0)
            self._build(replace(fault, lasts=self.plan.trouble), {(name, host.name) for name in cut_off})

        def see(world: World, _: Node, old: RoundRecord | None, new: RoundRecord) -> None:
            host = self._host()
            if old is not None and new.round > old.round and host is not None and world.t < self.plan.trouble:
                world.watch = [watch for watch in world.watch if watch is not see]
                host.stall()
                self._for(replace(fault, lasts=0.05 + fault.x), lambda: self._kill(host, fault))

        self.world.watch = [*self.world.watch, see]

    def _once(self, moment: Callable[[], object], act: Callable[[], object]) -> None:
        """Act at the first ``moment`` that comes before all faults end."""
        if moment():
            act()
        elif self.world.t < self.plan.trouble:
            self.world.at(LOOK_EVERY, lambda: self._once(moment, act))

    def _fail(self, node: Node, fault: Fault) -> None:
        blame = Blame.VICTIM if int(fault.x * 3) == 2 else Blame.OWN_FAULT
        node.fail(code=[1, -9, -11, 3][int(fault.x * 4)], blame=blame, after=fault.x * 40)

    def _fail_two(self, node: Node, fault: Fault) -> None:
        self._fail(node, fault)
        other = self._current((fault.who + 1) % self.plan.nodes)
        if other is not None:
            self.world.at(fault.x * 0.01, lambda: self._fail(other, replace(fault, x=1 - fault.x)))

    def _scale(self, node: Node, fault: Fault) -> None:
        """Want another number of nodes, as ``elastirun scale`` does in the store of a node that takes part."""
        world, low, high = self.world, self.plan.rules.min_nodes, self.plan.rules.max_nodes
        asked = next((n for n in world.nodes if n.alive and n.working is not None), node)
        protocol = SyncProtocol("job/", "outside", CODEC, lambda: 0.0)
        steps = protocol.scale(low + int(fault.x * (high - low + 1)))
        world.write_from_outside(asked, asked.machine.store.place, one_by_one(steps))

    def _succeed_one(self, node: Node, fault: Fault) -> None:
        node.succeed()


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Return the plan with as few faults as still fail."""
    faults: Sequence[Fault] = plan.faults
    i = 0
    while i < len(faults):
        fewer = replace(plan, faults=tuple(f for j, f in enumerate(faults) if j != i))
        if fails(fewer):
            faults = fewer.faults
        else:
            i += 1
    return replace(plan, faults=tuple(faults))
