"""Every history of a small world, breadth first: all next events are tried in every order, except from states seen before.

Exchanges with the store are whole here, and time goes on in steps; what may happen to them is that they are answered, lost on the way,
or carried out with the answer lost. The random histories have the rest.

    python -m tests.sim.explore --seconds 60
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from elastirun.rendezvous.actions import Sync
from elastirun.rendezvous.death_notice import write_notice
from elastirun.rendezvous.events import SyncFailed, WorkersStopped
from elastirun.rendezvous.link import Link
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.progress import Wait
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.sync import SyncProtocol, execute
from tests.sim import invariants
from tests.sim.world import CODEC, Node, World, WorldExchanges

STEP = 0.5  # seconds; the longest time that passes at once
FAULTS = 2  # crashes, failures, departures and lost messages in one history


class Small(World):
    """A world in which nothing happens by itself: each event is chosen."""

    def __init__(self, rules: Rules, nodes: int, first_round: bool) -> None:
        super().__init__(0, rules)
        self.pending: dict[str, Sync] = {}
        self.faults = 0
        self.done: tuple[str, ...] = ()  # the names of the events so far
        for i in range(nodes):
            self.add(f"n{i}")
        if first_round:
            for _ in range(100):
                if self.running(*self.nodes)():
                    break
                for node in [n for n in self.nodes if n.id in self.pending]:
                    self.answer(node.id)
                self.pass_time()
            assert self.running(*self.nodes)()
        invariants.install(self)

    def begin(self, node: Node, sync: Sync) -> None:
        self.pending[node.id] = sync

    def at(self, delay: float, what: Callable[[], Any]) -> None:
        pass  # ``pass_time`` wakes the machines; the end of workers is one of the options

    def node(self, node_id: str) -> Node:
        return next(n for n in self.nodes if n.id == node_id)

    # -- what can happen ----------------------------------------------------------------------------------------------

    def answer(self, node_id: str) -> None:
        node = self.node(node_id)
        answer = self._carried_out(node)
        self.hand_over(node, node.connection, lambda now: answer)

    def lose(self, node_id: str, applied: bool) -> None:
        """Lose the reply to an exchange that is ``applied``, or the request."""
        self.faults += 1
        node = self.node(node_id)
        if applied:
            self._carried_out(node)
        self.pending.pop(node_id, None)
        self.hand_over(node, node.connection, lambda now: SyncFailed(now, "lost"))

    def _carried_out(self, node: Node) -> Any:
        sync = self.pending.pop(node.id)
        answer = self._apply(node, lambda store: node.connection.protocol.carry_out(store, sync, node.now))
        return replace(answer, hosting=node.hosts)

    def stopped(self, node_id: str) -> None:
        node = self.node(node_id)
        node.working, node.stopping = None, False
        node.feed(lambda now: WorkersStopped(now, node.machine.row.failures))

    def fault(self, kind: str, node_id: str) -> None:
        self.faults += 1
        if kind == "crash":
            self.pending.pop(node_id, None)
        getattr(self.node(node_id), kind)()

    def write_notice(self, node_id: str) -> None:
        """Write the death notice of an agent that has died, as its guard does."""
        self.telling = node = self.node(node_id)
        protocol = SyncProtocol("job/", node_id, CODEC, lambda: 0.0)
        self._apply(node, lambda store: execute(write_notice(protocol, node_id, 0, 0.0), store))
        self.telling = None

    def pass_time(self) -> None:
        """Let time pass until a machine wants to wake up, at most STEP."""
        alive = [n for n in self.nodes if n.alive]
        self.t = max(self.t + 0.001, min([self.t + STEP, *(n.machine.wake for n in alive)]))
        for node in alive:
            node.turn()

    def options(self) -> Iterable[tuple[str, Callable[[Small], None]]]:
        yield "time", Small.pass_time
        for node in self.nodes:
            i = node.id
            if not node.up and not node.finish:
                yield f"death notice of {i}", lambda w, i=i: w.write_notice(i)
            if not node.alive:
                continue
            if i in self.pending:
                yield f"answer {i}", lambda w, i=i: w.answer(i)
            if node.stopping:
                yield f"stopped {i}", lambda w, i=i: w.stopped(i)
            elif node.working:
                yield f"succeed {i}", lambda w, i=i: w.node(i).succeed()
            if self.faults < FAULTS:
                if i in self.pending:
                    yield f"lose request {i}", lambda w, i=i: w.lose(i, False)
                    yield f"lose reply {i}", lambda w, i=i: w.lose(i, True)
                yield f"crash {i}", lambda w, i=i: w.fault("crash", i)
                yield f"leave {i}", lambda w, i=i: w.fault("leave", i)
                if node.working and not node.stopping:
                    yield f"fail {i}", lambda w, i=i: w.fault("fail", i)

    # -- states -----------------------------------------------------------------------------------------------------------

    def branch(self) -> Small:
        """Return a copy that can go on differently. It shares values, but nothing that changes."""
        other = copy.copy(self)
        other.data, other.pending = dict(self.data), dict(self.pending)
        other.succeeded = set(self.succeeded)
        other.written_at = {i: times[-3:] for i, times in self.written_at.items()}
        other.nodes = [_copied(node, other) for node in self.nodes]
        return other

    def key(self) -> object:
        """Return a key that is equal for two worlds with the same future. Times count from now."""
        alive = [n for n in self.nodes if n.alive]
        workers = tuple((n.id, n.stopping, n.ended_by_guard, n.working and n.working.round) for n in alive)
        nodes = workers, tuple(_canonical(vars(n.machine), n.now) for n in alive)
        return nodes, frozenset(self.data.items()), frozenset(self.pending.items()), self.faults, frozenset(self.succeeded)


def _copied(node: Node, world: Small) -> Node:
    other = copy.copy(node)
    other.world = world
    protocol = copy.copy(node.connection.protocol)
    protocol._known, protocol._clock = dict(protocol._known), lambda: other.now
    exchanges = WorldExchanges(other, protocol)
    exchanges._pending = node.session._exchanges._pending
    other.connection = exchanges._connection
    other.session = copy.copy(node.session)
    other.session.machine, other.session._exchanges = _copied_machine(node.machine), exchanges
    other.session.worker_store, other.session._now = copy.copy(node.session.worker_store), lambda: other.now
    other.starts, other.began, other.stops = list(node.starts), list(node.began), list(node.stops)
    other.ready_for, other.said = set(node.ready_for), []
    return other


def _copied_machine(machine: Machine) -> Machine:
    other, link = copy.copy(machine), copy.copy(machine._link)
    other._actions, other._link = [], link
    other._waiting, other._moves = copy.copy(machine._waiting), copy.copy(machine._moves)
    link.rows, link.live = dict(link.rows), copy.copy(link.live)
    link.plan, link.schedule = copy.copy(link.plan), copy.copy(link.schedule)
    link.live._seen = {i: copy.copy(seen) for i, seen in link.live._seen.items()}
    return other


UNIMPORTANT = {"rules", "_event", "_history", "_actions"}


def _canonical(value: Any, now: float) -> object:
    if isinstance(value, float):
        return round(value - now, 2) if abs(value - now) < 1e6 else value
    if isinstance(value, dict):
        return frozenset((name, _canonical(item, now)) for name, item in value.items() if name not in UNIMPORTANT)
    if isinstance(value, tuple):
        return tuple(_canonical(item, now) for item in value)
    if isinstance(value, Link):
        return _canonical(vars(value), now)
    if type(value).__name__ == "Liveness":
        return _canonical(value._seen, now)
    if isinstance(value, Wait):
        return _canonical(value.since, now)
    if type(value).__name__ in ("_Seen", "PollPlan", "Schedule", "Contact", "OwnRow", "Moves"):
        return tuple(_canonical(getattr(value, f.name), now) for f in fields(value) if f.name not in UNIMPORTANT)
    return value


@dataclass(frozen=True)
class Explored:
    states: int
    depth: int  # all histories up to this many steps were tried
    violation: str | None = None


def explore(start: Small, seconds: float, most: int = 10**9) -> Explored:
    """Try all histories from ``start`` until ``seconds`` are over or ``most`` states are seen."""
    seen = {start.key()}
    queue = deque([(start, 0)])
    end = time.monotonic() + seconds
    while queue:
        world, depth = queue.popleft()
        if time.monotonic() > end or len(seen) >= most:
            return Explored(len(seen), depth)
        for name, act in world.options():
            other = world.branch()
            other.done = (*world.done, name)
            try:
                act(other)
            except AssertionError as violation:
                return Explored(len(seen), depth, f"{violation} after: {', '.join(other.done)}")
            key = other.key()
            if key not in seen:
                seen.add(key)
                queue.append((other, depth + 1))
    return Explored(len(seen), 10**9)


WORLDS = {
    "two nodes meet": lambda: Small(Rules(1, 2, max_restarts=1, last_call=1.2, expire=2.0), 2, False),
    "a round of two runs": lambda: Small(Rules(1, 2, max_restarts=1, last_call=1.2, expire=2.0), 2, True),
    "both of two are needed": lambda: Small(Rules(2, 2, max_restarts=0, last_call=1.2, expire=2.0), 2, True),
    "a round of three runs": lambda: Small(Rules(1, 3, max_restarts=1, last_call=1.2, expire=2.0), 3, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each world")
    arguments = parser.parse_args()
    for name, make in WORLDS.items():
        found = explore(make(), arguments.seconds)
        depth = "all of it" if found.depth == 10**9 else f"every history of {found.depth} steps"
        print(f"{name}: {found.states} states, {depth}; {found.violation or 'nothing that must never happen'}", flush=True)


if __name__ == "__main__":
    main()
