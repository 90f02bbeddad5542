"""The rounds of a live job in the simulated world: who begins them, whose state wins, which steps are made, and what must never happen.

Who begins a round, and whose state wins, is decided by the product (``live_worlds``). The workers' own network never fails, which lets them
make more steps than real ones could.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from elastirun.agent.workers.parking import Parking
from elastirun.rendezvous.wire.records import RoundRecord
from elastirun.worker.live_worlds import first_world, furthest
from tests.sim.world import Node, Violation, World

STEP = 0.5  # seconds from one reduction to the next
JOINING = 4  # steps at most until a new worker has the state of the others
AGAIN = 0.2  # seconds until what could not happen, because a process or a machine stood still, is tried again


@dataclass(frozen=True, eq=False)
class State:
    """Parameters and optimizer of a worker, as the steps that have led to them.

    ``agreed``: which of all agreements of the world's ranks was the last one. Unlike the number of a round, it never begins anew.
    """

    agreed: int
    steps: int
    before: State | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.agreed, self.steps


@dataclass(eq=False)
class Worker:
    """One process. What it keeps of its state for the agent is what ``elastirun/train/elastic.py`` keeps."""

    node: Node
    crew: Crew
    pid: int
    rank: int
    training: Training  # the round that the agent wants it in; once it is parked, the one that it has left
    ended: bool = False
    state: State | None = None  # None: it has none, or a mixture
    settled: int = 0  # the round in which the ranks agreed upon the state; 0: it has none
    steps: int = 0  # that it has finished, also on the way to a state
    round: int = 0  # the newest one that the agent wants this worker in
    inside: Training | None = None  # that it takes part in: only when this is over can it promise anything
    asked: int = 0  # the round that it is to leave; 0: none
    word: int = 0  # ``settled`` when it last left a round
    rehearsed: bool = False
    parked: bool = False

    @property
    def lives(self) -> bool:
        """Whether the process runs. Those of a round that goes on end as the workers of the node do, others with its agent."""
        working, fence = self.node.working, self.training.record.fence
        if self.ended or self.node.finish is not None:
            return False
        if not self.parked and working is not None and working.fence == fence:
            return True
        return self.node.up and (self.parked or fence in self.crew.done)

    @property
    def runs(self) -> bool:
        """Whether the process can do something now."""
        return self.lives and not self.node.workers_frozen


@dataclass(eq=False)
class Training:
    """One round of the workers: what the agents say in its store, and the world that trains now."""

    record: RoundRecord
    told: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by node rank
    workers: dict[int, Worker] = field(default_factory=dict)  # by rank: those that the agents have started or resumed
    came: set[int] = field(default_factory=set)  # ranks that take part
    first: tuple[int, ...] | None = None  # world 0
    ranks: tuple[int, ...] = ()  # of the present world, after the ranks have agreed on its state
    joining: dict[int, int] = field(default_factory=dict)  # ranks that are taken in: steps until they have the state
    ready: set[int] = field(default_factory=set)  # ranks that wait to be taken in
    steps: int = 0

    @property
    def size(self) -> int:
        return sum(m.slots for m in self.record.members)

    def take_part(self, ranks: tuple[int, ...]) -> list[Worker] | None:
        """Return the workers of ``ranks``; None if one of them has left, or has ended."""
        found = [self.workers[rank] for rank in ranks]
        return found if all(worker.inside is self and worker.lives for worker in found) else None


@dataclass(eq=False)
class Crew:
    """The workers of one node, as its agent knows them."""

    parking: Parking = field(default_factory=Parking)
    training: Training | None = None
    running: dict[int, Worker] = field(default_factory=dict)  # by local rank; also those that are asked to park
    parked: dict[int, Worker] = field(default_factory=dict)
    kill_at: float = math.inf  # when those that have not parked are killed
    done: set[str] = field(default_factory=set)  # fences of the rounds that the node is done with


class LiveRounds:
    """The rounds of the workers, in which they make steps together."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.random = world, rng
        self.trainings: dict[str, Training] = {}  # by fence
        self.reduced: dict[str, int] = {}  # by store: the last round in which a step was made
        self._agreements = itertools.count(1)

    def after(self, seconds: float, node: Node, act: Callable[[], object], process: bool = False) -> None:
        """Let the loop of an agent act, or a ``process`` of its node, when that time is over and the loop or the process runs."""
        self.world.at(seconds, partial(self._act, node, act, process))

    def _act(self, node: Node, act: Callable[[], object], process: bool) -> None:
        if node.workers_frozen if process else (node.frozen or node.stalled):
            self.after(AGAIN, node, act, process)
        elif process or node.alive:
            act()

    def enter(self, worker: Worker, training: Training) -> None:
        """Let a process take part in the round that its agent wants it in."""
        if worker.training is not training or not worker.lives or worker.parked:
            return
        number = training.record.round
        if worker.inside is None and number > worker.round and worker.asked != number:
            worker.round, worker.asked, worker.inside = number, 0, training
            training.came.add(worker.rank)
            self.advance(training)

    def advance(self, training: Training) -> None:
        """Let the first world of the round begin when every agent has given its word and all its ranks have come."""
        if training.ranks:
            self._rehearse(training)
            return
        nodes = len(training.record.members)
        if training.record.round > 1 and len(training.told) < nodes:
            return
        told = [training.told[node] for node in range(nodes)] if training.record.round > 1 else []
        training.first = first_world(told, training.size).ranks
        self._rehearse(training)
        if training.came.issuperset(training.first) and (world := training.take_part(training.first)):
            self._agree(training, world)

    def _rehearse(self, training: Training) -> None:
        """Let those that are not in the first world make a step alone, in no round, and then wait to be taken in."""
        assert training.first is not None
        for rank in training.came - {*training.first} - training.ready:
            worker = training.workers[rank]
            if worker.inside is not training or rank in training.joining or rank in training.ranks:
                continue
            if worker.rehearsed or worker.settled:
                training.ready.add(rank)
            else:
                training.came.discard(rank)
                worker.inside, worker.word, worker.rehearsed, worker.round = None, 0, True, worker.round - 1
                self.after(self.random.uniform(0.1, 1.0), worker.node, partial(self.enter, worker, training), process=True)

    def _agree(self, training: Training, world: list[Worker]) -> None:
        """Let all ranks of the first world have the state of the furthest one. Some may be interrupted before they have."""
        assert training.first is not None
        record = training.record
        source, behind = furthest([(worker.settled, worker.steps) for worker in world])
        anew, state = world[source].settled == 0, world[source].state
        alike = all(rank == source or rank in behind or worker.state is state for rank, worker in enumerate(world))
        must(alike and (not anew or len(behind) == len(world) - 1), f"the ranks of round {record.round} do not have one state")
        self._check_choice(training, world, None if anew else state, anew)
        agreed = State(next(self._agreements), 0 if anew or state is None else state.steps, None if anew else state)
        training.ranks = training.first
        for worker in world:
            copies = self.random.uniform(0.001, 0.3)
            self.after(copies, worker.node, partial(self._settle, worker, training, agreed, max(record.round, 1)), process=True)
        self.world.at(STEP, partial(self._step, training))

    def _settle(self, worker: Worker, training: Training, state: State, round: int) -> None:
        if worker.inside is training and worker.lives:
            worker.state, worker.settled, worker.steps = state, round, state.steps
            self._tell_gathered(training)

    def _tell_gathered(self, training: Training) -> None:
        """Tell the agents if all workers of the round train together."""
        if len(training.ranks) == training.size:
            for worker in training.workers.values():
                self.after(0.0005, worker.node, partial(worker.node.gathered, training.record))

    def _check_choice(self, training: Training, world: list[Worker], chosen: State | None, anew: bool) -> None:
        """No state of an abandoned branch begins a world, and no finished step is lost, while a member of the round has a newer one."""
        round = training.record.round
        must(anew or chosen is not None, f"round {round} begins with a mixture of two states")
        members = [worker for worker in training.workers.values() if worker.lives and worker.training is training]
        states = [worker.state for worker in members if worker.state is not None]
        newest = max(states, key=lambda state: state.order, default=None)
        if newest is None:
            return
        must(chosen is not None and chosen.agreed == newest.agreed, f"round {round} begins with an abandoned state")
        assert chosen is not None
        must(chosen.steps == newest.steps, f"round {round} begins with step {chosen.steps}, a member has {newest.steps}")
        older = [worker.pid for worker in world if worker.state is not None and worker.state.agreed < newest.agreed]
        told = any(training.told.values())
        must(not older or not told, f"workers {older} with an abandoned state are in the first world of round {round}")
        for state in states:
            one_apart = state is newest or state is newest.before
            must(state.agreed < newest.agreed or one_apart, f"members of round {round} have states that are more than one step apart")

    def _step(self, training: Training) -> None:
        """Let all ranks of the present world reduce the gradients of a step. Each of them finishes the step by itself."""
        everyone = (*training.ranks, *training.joining)
        world = training.take_part(everyone)
        if world is None:
            return  # the round is over
        self.world.at(STEP, partial(self._step, training))
        trains = world[: len(training.ranks)]
        states = {worker.state for worker in trains}
        if len(states) > 1 or not all(worker.runs for worker in world):
            return  # a rank has not finished the last step, or stands still
        [state] = states
        if state is None or any(worker.settled != training.record.round for worker in trains):
            return
        if not training.joining and training.ready:
            self._take_in(training)
            return
        self._check_reduction(training, world)
        training.steps += 1
        made = State(state.agreed, state.steps + 1, state)
        for worker in world:
            delay = self.random.choice([0.001, 0.01, 0.2])
            self.after(delay, worker.node, partial(self._finish, worker, training, made), process=True)

    def _take_in(self, training: Training) -> None:
        """Let those that are ready make the same steps as the others from now on. What they had is overwritten meanwhile."""
        for rank in sorted(training.ready):
            worker = training.workers[rank]
            if worker.inside is training and worker.lives:
                training.joining[rank] = self.random.randint(1, JOINING)
                worker.state, worker.settled, worker.steps = None, 0, 0
        training.ready.clear()

    def _finish(self, worker: Worker, training: Training, made: State) -> None:
        """Let a rank finish a step whose gradients are reduced, unless it has left the round."""
        if worker.inside is not training or not worker.lives:
            return
        done = training.record.fence in worker.crew.done
        must(not done, f"worker {worker.pid} makes a step in round {training.record.round}, which its node is done with")
        if worker.rank in training.ranks:
            worker.state, worker.steps = made, made.steps
            return
        worker.steps += 1
        training.joining[worker.rank] -= 1
        if not training.joining[worker.rank]:
            worker.state, worker.settled, worker.steps = made, training.record.round, made.steps
            del training.joining[worker.rank]
            training.ranks = (*training.ranks, worker.rank)
            self._tell_gathered(training)

    def _check_reduction(self, training: Training, world: list[Worker]) -> None:
        """P1: nobody makes a step in a round that its node is done with, or after a step of a later round."""
        record = training.record
        done = [worker.node.id for worker in world if record.fence in worker.crew.done]
        must(not done, f"a step of round {record.round} is made, which {done} are done with")
        last = self.reduced.get(record.store_id, 0)
        must(last <= record.round, f"a step of round {record.round} is made after one of round {last}")
        self.reduced[record.store_id] = record.round

    def all_train(self) -> bool:
        """Return whether all workers of the present round train in one world."""
        record = self.world.record
        training = self.trainings.get(record.fence) if record else None
        return training is not None and len(training.ranks) == training.size and training.take_part(training.ranks) is not None


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
