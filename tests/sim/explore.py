"""Every history of a small world: all next events are tried in every order, except from states seen before.

Exchanges with the store are whole here, and time goes on in steps; what may happen to them is that they are answered, lost on the way,
or carried out with the answer lost. The random histories have the rest.

``explore`` goes breadth first, and so reaches every state that is a few events away. ``deviate`` reaches the end of each history: the usual
event happens next, except in a few places, and those are anywhere. So it tries the death of the store's host at every point.

    python -m tests.sim.explore --seconds 60
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from elastirun.rendezvous.death_notice import write_notice
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Outcome, Sync
from elastirun.rendezvous.wire.events import FoundAtStart, SyncFailed, WorkersStopped
from elastirun.rendezvous.wire.exchanges import Answer
from elastirun.rendezvous.wire.records import Place, RoundRecord, Vote
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.sim import invariants
from tests.sim.world import CODEC, Node, Violation, World, WorldExchanges

STEP = 0.5  # seconds; the longest time that passes at once
FAULTS = 2  # crashes, failures, departures and lost messages in one history
CALM = 8  # usual events in a row, while all nodes are in one running round, after which a history is at its end
ENDLESS = 1000  # usual events in a row without such a round: there will never be one


@dataclass(frozen=True)
class Word:
    """The word of the guard of the dead agent ``node_id`` that has not arrived yet: a death notice, or a vote for the store ``at``."""

    node_id: str
    at: Place | None
    vote: Vote | None = None

    def __str__(self) -> str:
        return f"word of {self.node_id} to {self.at.id if self.at else 'the store'}"


class Small(World):
    """A world in which nothing happens by itself: each event is chosen."""

    def __init__(self, rules: Rules, nodes: int, first_round: bool) -> None:
        super().__init__(0, rules, hosted=rules.succession)
        self.pending: dict[str, Sync] = {}
        self.words: tuple[Word, ...] = ()
        self.once_cut = frozenset[str]()  # nodes that were cut off; they may find the others too late
        self.unheard = 0  # words of guards that were lost, or were for a store that had ended
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

    def tell_death(self, node: Node) -> None:
        self.words += (Word(node.id, node.machine.store.place),)

    def tell_standbys(self, node: Node) -> None:
        places, vote = node.machine.last_words or ((), None)
        self.words += tuple(Word(node.id, place, vote) for place in places)

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

    def _carried_out(self, node: Node) -> Answer:
        sync = self.pending.pop(node.id)
        if not self.is_up(sync.at):
            return SyncFailed(node.now, "connection refused")
        if not self._is_local(node, sync.at) and self.loses(node, sync.at, self.random):
            return SyncFailed(node.now, "lost")
        answer = self._apply(node, lambda store: node.connection.protocol.carry_out(store, sync, node.now), at=sync.at)
        return replace(answer, hosting=self._is_local(node, sync.at))

    def stopped(self, node_id: str) -> None:
        node = self.node(node_id)
        node.working, node.stopping = None, False
        node.feed(lambda now: WorkersStopped(now, node.machine.row.failures))

    def fault(self, kind: str, node_id: str) -> None:
        self.faults += 1
        if kind == "crash":
            self.pending.pop(node_id, None)
        getattr(self.node(node_id), kind)()

    def cut_off(self, node_id: str) -> None:
        """Cut the node off from all others."""
        self.faults, self.once_cut = self.faults + 1, self.once_cut | {node_id}
        self.node(node_id).cut = True

    def hear(self, word: Word) -> None:
        """Let the word of a guard arrive, if its store is still there."""
        self.lose_word(word, unheard=not self.is_up(word.at))
        if self.is_up(word.at):
            self.telling = node = self.node(word.node_id)
            protocol = SyncProtocol("job/", node.id, CODEC, lambda: 0.0)
            steps = protocol.put_vote(word.vote) if word.vote else write_notice(protocol, node.id, 0, 0.0)
            self._apply(node, lambda store: execute(steps, store), at=word.at)
            self.telling = None

    def lose_word(self, word: Word, unheard: bool = True) -> None:
        self.words, self.unheard = tuple(other for other in self.words if other is not word), self.unheard + unheard

    def say_moved(self, node_id: str) -> None:
        """Let the node that has taken over the store say so where the job was started."""
        node = self.node(node_id)
        protocol, told = SyncProtocol("job/", node_id, CODEC, lambda: 0.0), node.machine.store.forward
        assert told is not None
        found = self._apply(node, lambda store: execute(protocol.put_moved(told[0], over=told[1] is not None), store))
        node.feed(lambda now: FoundAtStart(now, found))

    def pass_time(self) -> None:
        """Let time pass until a machine wants to wake up, at most STEP."""
        alive = [n for n in self.nodes if n.alive]
        self.t = max(self.t + 0.001, min([self.t + STEP, *(n.machine.wake for n in alive)]))
        for node in alive:
            node.turn()

    def options(self) -> Iterator[tuple[str, Callable[[Small], object]]]:
        """Yield what can happen next, the usual event first: all that is under way arrives at once, then time passes."""
        for word in self.words:
            yield str(word), lambda w, word=word: w.hear(word)
        for i in sorted(self.pending):
            yield f"answer {i}", lambda w, i=i: w.answer(i)
        alive = [node for node in self.nodes if node.alive]
        for node in alive:
            if node.stopping:
                yield f"stopped {node.id}", lambda w, i=node.id: w.stopped(i)
        for node in alive:
            if node.machine.store.forward is not None and self.may_say_at_start(*node.machine.store.forward):
                yield f"{node.id} says where the store is", lambda w, i=node.id: w.say_moved(i)
        yield "time", Small.pass_time
        for node in alive:
            if node.cut:
                yield f"mend the network of {node.id}", lambda w, i=node.id: setattr(w.node(i), "cut", False)
            if node.working and not node.stopping:
                yield f"succeed {node.id}", lambda w, i=node.id: w.node(i).succeed()
        if self.faults < FAULTS:
            yield from self.possible_faults()

    def possible_faults(self) -> Iterator[tuple[str, Callable[[Small], object]]]:
        for word in self.words if self.hosted else ():
            yield f"lose {word}", lambda w, word=word: w.lose_word(word)
        for i in self.pending:
            yield f"lose request {i}", lambda w, i=i: w.lose(i, False)
            yield f"lose reply {i}", lambda w, i=i: w.lose(i, True)
        for node in self.nodes:
            if node.alive:
                yield f"crash {node.id}", lambda w, i=node.id: w.fault("crash", i)
                yield f"leave {node.id}", lambda w, i=node.id: w.fault("leave", i)
                if node.working and not node.stopping:
                    yield f"fail {node.id}", lambda w, i=node.id: w.fault("fail", i)
                if self.rules.majority and not node.cut:
                    yield f"cut off {node.id}", lambda w, i=node.id: w.cut_off(i)

    def may_say_at_start(self, place: Place, job: RoundRecord | None) -> bool:
        """Return whether a store that has appeared where the job was started does not send others to ``place`` yet, and could."""
        found = self.record_at_start()
        return found is not None and found.round == 0 and found.moved != place and (job is not None or found.moved is None)

    # -- states -----------------------------------------------------------------------------------------------------------

    def branch(self) -> Small:
        """Return a copy that can go on differently. It shares values, but nothing that changes."""
        other = copy.copy(self)
        other.data, other.pending = dict(self.data), dict(self.pending)
        other.succeeded, other.formed_at, other.last_written = set(self.succeeded), dict(self.formed_at), dict(self.last_written)
        other.started, other.terms, other.counted = dict(self.started), set(self.terms), dict(self.counted)
        other.owners = set(self.owners)
        other.called_lost = {fence: set(lost) for fence, lost in self.called_lost.items()}
        other.written_at = {i: times[-3:] for i, times in self.written_at.items()}
        other.nodes = [_copied(node, other) for node in self.nodes]
        return other

    def key(self) -> Hashable:
        """Return a key that is equal for two worlds with the same future. Times count from now."""
        alive = [n for n in self.nodes if n.alive]
        workers = tuple((n.id, n.stopping, n.ended_by_guard, n.working and n.working.round) for n in alive)
        beside = tuple((n.cut, frozenset(n.standby.items())) for n in alive)
        nodes = workers, beside, tuple(_canonical(n.machine, n.now) for n in alive)
        stores = self.store_up, frozenset(self.data.items()), frozenset(self.pending.items()), self.words
        return nodes, stores, self.faults, frozenset(self.succeeded)


def _copied(node: Node, world: Small) -> Node:
    other = copy.copy(node)
    other.world = world
    protocol = copy.copy(node.connection.protocol)
    protocol._known, protocol._clock = dict(protocol._known), lambda: other.now
    exchanges = WorldExchanges(other, protocol)
    exchanges._pending, exchanges._connection.at = node.session._exchanges._pending, node.connection.at
    other.connection = exchanges._connection
    other.session = copy.copy(node.session)
    other.session.machine, other.session._exchanges = _own_copy(node.machine), exchanges
    other.session.worker_store, other.session._now = copy.copy(node.session.worker_store), lambda: other.now
    other.session.access = copy.copy(node.session.access)
    other.session.access._node = other  # type: ignore[attr-defined]
    other.starts, other.began, other.stops = list(node.starts), list(node.began), list(node.stops)
    other.ready_for, other.said, other.standby = set(node.ready_for), [], dict(node.standby)
    other.given_up = set(node.given_up)
    return other


def _own_copy(value: Any) -> Any:
    """Return a copy of a part of a machine. It shares only values that never change: those of records, actions and events."""
    if isinstance(value, dict):
        return {name: _own_copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_own_copy(item) for item in value]
    if not _changes(type(value)):
        return value
    other = copy.copy(value)
    for name, item in vars(value).items():
        setattr(other, name, _own_copy(item))
    return other


@functools.cache
def _changes(kind: type) -> bool:
    """Return whether objects of this class of the rendezvous can change."""
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind.__module__.startswith("elastirun.rendezvous") and not frozen and not issubclass(kind, Enum)


UNIMPORTANT = {"rules", "_rules", "_event", "_history", "_actions", "me", "_probe"}  # ... or set anew in each step
OF_TIMES = ("Contact", "OwnRow", "Evidence", "StoreSearch")  # classes of values that never change, with times


def _canonical(value: Any, now: float) -> Hashable:
    """Return a part of a machine as a value that is equal for two machines with the same future."""
    kind = type(value)
    if kind is float:
        return int((value - now) * 100.0 + 0.5) if abs(value - now) < 1e6 else value
    if kind is dict:
        return frozenset([(name, _canonical(item, now)) for name, item in value.items()])
    if kind is tuple:
        return tuple([_canonical(item, now) for item in value])
    if _has_times(kind):
        return tuple([_canonical(item, now) for name, item in vars(value).items() if name not in UNIMPORTANT])
    return value  # type: ignore[no-any-return]


@functools.cache
def _has_times(kind: type) -> bool:
    return kind.__name__ in OF_TIMES or _changes(kind)


@dataclass(frozen=True)
class Explored:
    states: int
    depth: int  # all histories up to this many steps, or with this many unusual events, were tried
    violation: str | None = None


def _let(world: Small, name: str, act: Callable[[Small], object]) -> Small:
    """Let one more event happen. Raises what must never happen, with the events that led to it."""
    world.done = (*world.done, name)
    try:
        act(world)
        world._watch_progress()
    except AssertionError as violation:
        raise Violation(f"{violation} {_story(world)}") from None
    return world


def _story(world: Small) -> str:
    """Return in words what has happened. Usual events have no names, and are counted."""
    parts = [f"{len(list(events))} usual events" if not name else ", ".join(events) for name, events in itertools.groupby(world.done)]
    return f"after: {', '.join(parts)}"


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
            try:
                other = _let(world.branch(), name, act)
            except Violation as violation:
                return Explored(len(seen), depth, str(violation))
            key = other.key()
            if key not in seen:
                seen.add(key)
                queue.append((other, depth + 1))
    return Explored(len(seen), 10**9)


def _settled(world: Small) -> bool:
    """Return whether all nodes are in one running round, none of them cut off, or at their ends."""
    return world.all_finished() or (invariants.settled(world) and not any(node.cut for node in world.nodes if node.alive))


def _gave_up(world: Small) -> bool:
    """Return whether a node has given up the store although one other node at most is gone, and its guard was heard if that is needed."""
    stayed = [node for node in world.nodes if node.id not in world.once_cut and node.up]
    there = [node for node in stayed if node.outcome in (None, Outcome.STORE_LOST)]
    enough = len(there) >= len(world.nodes) - 1 and (world.rules.majority or not world.unheard)
    return enough and any(node.outcome is Outcome.STORE_LOST for node in there)


def deviate(start: Small, unusual: int, given: str = "", among: tuple[str, ...] = ("",), seconds: float = 1e9) -> Explored:
    """Try all histories from ``start`` to their ends in which at most so many ``unusual`` events happen, until ``seconds`` are over.

    ``given``: an event that may happen at any point besides. ``among``: how the names of the unusual events begin.
    """
    seen: dict[Hashable, int] = {}  # by state: how many unusual events were tried from there on
    end = time.monotonic() + seconds

    def follow(world: Small, left: int) -> None:
        calm = steps = 0
        while calm < CALM and time.monotonic() < end:
            if seen.get(key := world.key(), -1) >= left:
                return
            seen[key] = left
            usual, *others = world.options()
            for name, act in others:
                if name != given and not (left and name.startswith(among)):
                    continue
                follow(_let(world.branch(), name, act), left - (name != given))
            _let(world, "", usual[1])
            steps += 1
            calm = calm + 1 if _settled(world) else 0
            if steps > ENDLESS or _gave_up(world):
                raise Violation(f"{'no end' if steps > ENDLESS else 'the job ended with the store'} {_story(world)}")

    try:
        follow(start.branch(), unusual)
    except Violation as violation:
        return Explored(len(seen), unusual, str(violation))
    return Explored(len(seen), unusual if time.monotonic() < end else 0)


WORLDS = {
    "two nodes meet": lambda: Small(Rules(1, 2, max_restarts=1, last_call=1.2, expire=2.0), 2, False),
    "a round of two runs": lambda: Small(Rules(1, 2, max_restarts=1, last_call=1.2, expire=2.0), 2, True),
    "both of two are needed": lambda: Small(Rules(2, 2, max_restarts=0, last_call=1.2, expire=2.0), 2, True),
    "a round of three runs": lambda: Small(Rules(1, 3, max_restarts=1, last_call=1.2, expire=2.0), 3, True),
}

WITH_SUCCESSION = {  # and the event that may happen at any point
    "the store's host of two dies": (lambda: _taken_over(2), "crash n0-0"),
    "the store's host of three dies": (lambda: _taken_over(3), "crash n0-0"),
    "the store's host of three is cut off": (lambda: _taken_over(3, "majority"), "cut off n0-0"),
}
MESSAGES = ("answer", "lose", "time")  # messages that are lost, late or overtaken


def _taken_over(nodes: int, how: str = "proof") -> Small:
    """Return a world in which another node can take over the store, with a round that runs."""
    rules = Rules(1, nodes, max_restarts=1, last_call=1.2, expire=2.0, store_grace=8.0, store_succession=how)
    return Small(rules, nodes, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each world")
    arguments = parser.parse_args()
    for name, make in WORLDS.items():
        found = explore(make(), arguments.seconds)
        depth = "all of it" if found.depth == 10**9 else f"every history of {found.depth} steps"
        print(f"{name}: {found.states} states, {depth}; {found.violation or 'nothing that must never happen'}", flush=True)
    for name, (make, event) in WITH_SUCCESSION.items():
        found = deviate(make(), 1, event, seconds=arguments.seconds)
        depth = "at every point, with every other unusual event" if found.depth else "not all of it"
        print(f"{name}: {found.states} states, {depth}; {found.violation or 'nothing that must never happen'}", flush=True)


if __name__ == "__main__":
    main()
