"""A model of live workers that follow the table of phases, and a walk through all that can happen to them.

Each worker runs a script: loops over epochs, a ``save``, perhaps one after each epoch, perhaps a loop that it leaves early. Between two
points at which it waits for others, a worker acts alone, so only these points are states. A move lets one worker go on from there, lets
the agents do something, or is a disturbance, of which there is a number. Workers meet in collectives. One of which all have come to it
may end well on some ranks and fail on others if a peer is lost then.

The model leaves out: values of the state (it knows the finished steps, and the round of the agreement), times, and what an agent waits
for. A worker that waits for an order 10 s, and reports lost peers then, is an exit only where a reduction has failed with no peer lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from elastirun.train.live.phases import NONE, Fact, Phase, PhaseAction, PhaseEvent

Table = Callable[[Phase, PhaseEvent, Fact], tuple[Phase, tuple[PhaseAction, ...]]]
COLLECTIVES = ("agree", "reduce", "leave", "publish")
GONE = ("dead", "ended", "waits")


BEYOND = "a worker trains beyond the last epoch"


@dataclass(frozen=True)
class Plan:
    """A script, and how much may happen to its workers. ``at_first``: the workers of the first round; more of them may come."""

    ranks: int = 2
    at_first: int = 2
    epochs: int = 2
    steps: int = 2  # of an epoch
    saves: bool = False  # after each epoch, too
    breaks: int = -1  # the finished steps with which the script leaves the loop in the next step
    breaks_failed: bool = False  # it leaves the loop in each step that has failed
    trains_late: bool = False  # a loop in which its rank has become late has a batch
    losses: int = 0
    joins: int = 0  # new processes in place of lost ones, or of those that were missing at first
    ends: int = 0  # rounds that end without a loss
    faults: int = 0  # reductions that fail on one rank, and no peer is lost


class Worker:
    """A worker: its phase, what it has to do, what it waits at (none: it acts), where its script goes on, and what it knows."""

    FIELDS = ("phase", "todo", "at", "then", "settled", "step", "epoch", "round", "world", "failed", "asked", "rehearsed")
    FIELDS += ("left", "saves", "saves_done", "number", "trained", "change", "word", "restored", "final")
    __slots__ = FIELDS

    def __init__(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(self.FIELDS, values, strict=True):
            setattr(self, name, value)


NEW = (Phase.LEFT, (PhaseAction.WAIT_FOR_ROUND,), "", "made", 0, 0, 0, 0, -1, False, False, False)
NEW += (False, False, 0, 0, True, "", "", -1, False)
DEAD, WAITS = (*NEW[:1], (), "dead", *NEW[3:]), (*NEW[:1], (), "waits", *NEW[3:])
worker_state = attrgetter(*Worker.FIELDS)


@dataclass(frozen=True)
class World:
    """A world of the round: its workers, those that have come, the collectives that each has come to, and the step at the switch."""

    ranks: tuple[int, ...]
    here: frozenset[int] = frozenset()
    counts: tuple[int, ...] = ()  # by rank of the job
    done: tuple[tuple[Any, Any], ...] = ()  # by collective: its kind, and its result once all have come
    switched: int = -1


class Job:
    """All workers, and what the agents and the store of the round know."""

    FIELDS = ("round", "ending", "over", "faulted", "published", "worlds", "ready", "losses", "joins", "ends", "faults")

    def __init__(self, plan: Plan, table: Table, state: tuple[Any, ...]) -> None:
        self.plan, self.table = plan, table
        self.workers = [Worker(values) for values in state[0]]
        for name, value in zip(self.FIELDS, state[1:], strict=True):
            setattr(self, name, value)
        self.wrong = ""

    round: int
    ending: bool
    over: bool
    faulted: bool
    published: int
    worlds: tuple[World, ...]
    ready: frozenset[int]
    losses: int
    joins: int
    ends: int
    faults: int

    def state(self) -> tuple[Any, ...]:
        return (tuple(map(worker_state, self.workers)), *(getattr(self, name) for name in self.FIELDS))

    # -- a worker acts

    def happens(self, one: Worker, event: PhaseEvent, facts: Fact = NONE) -> None:
        one.phase, one.todo = self.table(one.phase, event, facts)

    def run(self, rank: int) -> None:
        """Let a worker act until it waits."""
        one = self.workers[rank]
        while not one.at:
            if one.todo:
                action, one.todo = one.todo[0], one.todo[1:]
                getattr(self, action.name.lower())(rank, one)
            else:
                getattr(self, f"then_{one.then}")(rank, one)

    def over_fact(self, one: Worker) -> Fact:
        return Fact.ROUND_OVER if one.failed or one.asked else NONE

    def epoch(self, one: Worker) -> int:
        return one.step // self.plan.steps

    def enter(self, rank: int, number: int) -> None:
        world = self.worlds[number]
        self.put(number, World(world.ranks, world.here | {rank}, world.counts, world.done, world.switched))

    def put(self, number: int, world: World) -> None:
        self.worlds = (*self.worlds[:number], world, *self.worlds[number + 1 :])

    def add(self, ranks: tuple[int, ...]) -> None:
        self.worlds = (*self.worlds, World(ranks, counts=(0,) * self.plan.ranks))

    def arrive(self, rank: int, one: Worker, kind: str) -> None:
        """Come to the next collective of the world, and wait there."""
        world = self.worlds[one.world]
        number, known = world.counts[rank], (kind, one.step if kind != "agree" else -1)
        done = world.done
        if number == len(done):
            done = (*done, (known, None))
        elif done[number][0] != known:
            self.wrong = f"ranks of one world meet in {done[number][0]} and {known}"
            done = (*done[:number], (known, "differs"))
        counts = (*world.counts[:rank], number + 1, *world.counts[rank + 1 :])
        one.at, one.todo = kind, one.todo
        self.put(one.world, World(world.ranks, world.here, counts, done, world.switched))
        if kind == "agree" and all(counts[other] > number for other in world.ranks):
            self.decide(one.world, number, self.agree(world.ranks))

    def decide(self, number: int, collective: int, result: Any) -> None:
        world = self.worlds[number]
        done = (*world.done[:collective], (world.done[collective][0], result), *world.done[collective + 1 :])
        self.put(number, World(world.ranks, world.here, world.counts, done, world.switched))

    def agree(self, ranks: tuple[int, ...]) -> tuple[bool, int, frozenset[int]]:
        """Return whether nobody has a state, the steps of the furthest, and who is late."""
        workers = {rank: self.workers[rank] for rank in ranks}
        places = {rank: (self.epoch(one), not one.saves, one.saves_done) for rank, one in workers.items()}
        best = max((one.settled, one.step, places[rank]) for rank, one in workers.items())
        late = frozenset(rank for rank in ranks if places[rank] < max(places.values()))
        return best[0] == 0, best[1], late if best[0] else frozenset()

    # -- actions

    def wait_for_round(self, rank: int, one: Worker) -> None:
        one.at = "round"

    def find_world(self, rank: int, one: Worker) -> None:
        is_in, is_prepared = rank in self.worlds[0].ranks, one.rehearsed or one.settled > 0
        self.happens(one, PhaseEvent.WORLD_FOUND, Fact.IN_WORLD if is_in else Fact.PREPARED if is_prepared else NONE)

    def enter_world(self, rank: int, one: Worker) -> None:
        one.world, one.at = 0, "come"
        self.enter(rank, 0)

    def make_groups(self, rank: int, one: Worker) -> None:
        one.failed = False
        self.arrive(rank, one, "agree")

    def wait_until_taken_in(self, rank: int, one: Worker) -> None:
        one.at = "ready"
        self.ready |= {rank}

    def join(self, rank: int, one: Worker) -> None:
        one.settled, one.at, one.failed = 0, "switched", False

    def begin_rehearsal(self, rank: int, one: Worker) -> None:
        one.world = -1

    def end_rehearsal(self, rank: int, one: Worker) -> None:
        one.round, one.rehearsed, one.left = one.round - 1, True, False

    def begin(self, rank: int, one: Worker) -> None:
        if not one.word and one.settled == 0 and one.phase is Phase.TRAINING and one.change == "":
            self.wrong = "a world begins without a state"
        one.settled, one.rehearsed, one.left = one.round, False, False

    def begin_anew(self, rank: int, one: Worker) -> None:
        one.step = self.published
        one.restored = self.published if self.published else -1
        one.settled = one.round
        self.begin(rank, one)

    def look_for_others(self, rank: int, one: Worker) -> None:
        one.change = ""

    def change_world(self, rank: int, one: Worker) -> None:
        word, one.word = one.word, ""
        if word == "admit":
            one.change = "prepares"
            self.enter(rank, one.world + 1)
        elif word == "switch":
            one.world, one.change = one.world + 1, "switched"
            if rank == self.worlds[one.world].ranks[0]:
                world = self.worlds[one.world]
                self.put(one.world, World(world.ranks, world.here, world.counts, world.done, one.step))
        elif word == "whole":
            self.happens(one, PhaseEvent.ALL_WHOLE)

    def share_data(self, rank: int, one: Worker) -> None:
        one.settled = one.round

    def be_late(self, rank: int, one: Worker) -> None:
        one.failed, one.left = True, False

    def put_back(self, rank: int, one: Worker) -> None:
        pass

    def meet_again(self, rank: int, one: Worker) -> None:
        ranks = self.worlds[one.world].ranks
        one.world, one.at = one.world + 1, "come"
        if one.world == len(self.worlds):
            self.add(ranks)
        self.enter(rank, one.world)

    def publish(self, rank: int, one: Worker) -> None:
        if one.phase is Phase.TRAINING and one.failed:
            one.at = "ask"
        elif one.phase is Phase.TRAINING and one.restored != one.step:
            self.arrive(rank, one, "publish")

    def end_if_over(self, rank: int, one: Worker) -> None:
        if self.over:
            self.end(one)

    def leave(self, rank: int, one: Worker) -> None:
        one.world, one.change, one.word, one.failed, one.restored = -1, "", "", False, -1
        one.trained &= one.settled > 0

    # -- the script, and the methods that it calls

    def then_made(self, rank: int, one: Worker) -> None:
        if self.epoch(one) < self.plan.epochs:
            one.saves_done, one.then = 0, "came"
            self.happens(one, PhaseEvent.COMES_BACK)
        else:
            self.save(one, True)

    def then_came(self, rank: int, one: Worker) -> None:
        one.then, left, one.left = "caught_up", one.left, False
        if left:
            self.step_ends(one, True)

    def then_caught_up(self, rank: int, one: Worker) -> None:
        one.then, one.left = "begun", False
        self.happens(one, PhaseEvent.LOOP_BEGINS, self.over_fact(one))

    def then_begun(self, rank: int, one: Worker) -> None:
        one.epoch = self.epoch(one)
        self.next_batch(rank, one)

    def next_batch(self, rank: int, one: Worker) -> None:
        if self.epoch(one) != one.epoch or (one.phase is Phase.LATE and not self.plan.trains_late):
            one.at = "script"
        elif one.phase is Phase.REHEARSING:
            one.at = "rehearse"
        elif one.world < 0:
            self.wrong = f"a batch without a world in {one.phase.name}"
            one.at = "dead"
        elif one.failed:
            one.at = "failed"
        else:
            self.arrive(rank, one, "reduce")

    def reduced(self, rank: int, one: Worker, counts: bool) -> None:
        """Go on after the reduction of a batch."""
        one.at, leaves = "", self.plan.breaks == one.step or (self.plan.breaks_failed and one.failed)
        one.trained = one.phase is Phase.TRAINING or (one.phase is Phase.JOINING and counts)
        one.step += counts and one.phase is not Phase.REHEARSING
        one.restored = -1 if counts else one.restored
        if one.step > self.plan.epochs * self.plan.steps:
            self.wrong, one.at, self.ending = BEYOND, "dead", True
            return
        if leaves:
            one.left, one.at = counts, "script"
        else:
            one.then = "stepped"
            self.step_ends(one, counts)

    def step_ends(self, one: Worker, counts: bool) -> None:
        is_alone = one.world >= 0 and len(self.worlds[one.world].ranks) == 1
        left = one.step % self.plan.steps > 0
        facts = (Fact.COUNTS if counts else NONE) | (NONE if left else Fact.EPOCH_ENDS) | (Fact.ALONE if is_alone else NONE)
        self.happens(one, PhaseEvent.STEP_ENDS, facts | self.over_fact(one))

    def then_stepped(self, rank: int, one: Worker) -> None:
        if not one.trained or one.phase is Phase.JOINING:
            one.epoch = self.epoch(one)
        self.next_batch(rank, one)

    def save(self, one: Worker, final: bool) -> None:
        one.saves, one.final = True, final
        one.then = "late_came" if one.phase is Phase.LATE else "save_came"
        self.happens(one, PhaseEvent.COMES_BACK)

    def is_whole(self, one: Worker) -> bool:
        """Let a worker end with an error if it is in ``save`` with a part of the state."""
        if one.phase is Phase.JOINING:
            one.at, one.todo, self.ending = "dead", (), True
        return one.at != "dead"

    def then_late_came(self, rank: int, one: Worker) -> None:
        if self.is_whole(one):
            self.publishes(one)

    def then_save_came(self, rank: int, one: Worker) -> None:
        one.number, one.then = one.round, "save_stepped"
        if one.phase is Phase.REHEARSING:
            self.publishes(one)
        elif one.left:
            one.left = False
            self.step_ends(one, True)

    def then_save_stepped(self, rank: int, one: Worker) -> None:
        if self.is_whole(one):
            if one.round != one.number or one.failed:
                self.publishes(one)
            else:
                self.arrive(rank, one, "leave")

    def publishes(self, one: Worker) -> None:
        one.then, one.number = "saved", one.round
        self.happens(one, PhaseEvent.SAVES)

    def then_saved(self, rank: int, one: Worker) -> None:
        if one.round != one.number:
            if self.is_whole(one):
                self.publishes(one)
            return
        one.saves, one.saves_done, one.then = False, one.saves_done + 1, "made"
        if one.final:
            one.at = "exit"
            if one.step != self.published and one.phase is not Phase.REHEARSING:
                self.wrong = f"the script ends in {one.phase.name} with step {one.step}, and {self.published} is published"

    def end(self, one: Worker) -> None:
        one.at, one.todo, self.over = "ended", (), True

    # -- moves

    def is_broken(self, rank: int, one: Worker) -> bool:
        """Return whether a wait in a collective may fail: another rank has left the world, or the agent ends the round."""
        number = self.worlds[one.world].counts[rank]
        for other in self.worlds[one.world].ranks:
            peer = self.workers[other]
            left = peer.at in ("dead", "waits") or (peer.at != "ended" and (peer.round != one.round or peer.world < one.world))
            if left or (peer.at == "ended" and self.worlds[one.world].counts[other] < number):
                return True
        return bool(one.asked)

    def options(self, rank: int, one: Worker) -> list[str]:
        """Return how the wait of a worker may end now, if it may."""
        at, world = one.at, self.worlds[one.world] if one.world >= 0 else None
        if at in COLLECTIVES:
            assert world is not None
            has_all = all(world.counts[other] >= world.counts[rank] for other in world.ranks)
            fails = ["fails"] if self.is_broken(rank, one) else ["fault"] if has_all and at == "reduce" and self.faults else []
            return (["ends"] if has_all else []) + fails
        if at == "come":
            assert world is not None
            if self.over and rank in self.ready:
                return ["over"]
            return ["ends"] if world.here >= set(world.ranks) else ["fails"] if one.asked else []
        if at == "round":
            return ["ends"] if self.round > one.round and not one.asked else ["report"] if self.may_report(one) else []
        if at in ("ready", "switched"):
            return ["over"] if self.over else ["fails"] if one.asked else ["ends"] if self.is_taken_in(rank, one) else []
        if at == "ask":
            return ["ends"] if one.asked else ["report"] if self.may_report(one) else []
        return ["ends"] if at in ("script", "rehearse", "failed", "exit") else []

    def may_report(self, one: Worker) -> bool:
        return self.round == one.round and not one.asked and not self.ending

    def is_taken_in(self, rank: int, one: Worker) -> bool:
        if one.at == "ready":
            return any(rank in world.ranks for world in self.worlds[1:])
        return self.worlds[one.world].switched >= 0

    def go_on(self, rank: int, how: str) -> Iterator[Job]:
        """Let the wait of a worker end. Yield the jobs that this may lead to."""
        one, at = self.workers[rank], self.workers[rank].at
        if how == "over":
            self.end(one)
            yield self
        elif how == "report":
            self.ending = True
            yield self
        elif how in ("fails", "fault"):
            self.faults -= how == "fault"
            self.faulted |= how == "fault"
            one.failed |= at in ("reduce", "leave")
            yield self.after_failure(rank, one, at)
        elif at in COLLECTIVES and self.worlds[one.world].done[-1][1] == "differs":
            one.at, one.todo, self.ending = "dead", (), True  # with an error that says so
            yield self
        elif at == "reduce":
            yield from self.after_reduction(rank, one)
        else:
            yield self.after_wait(rank, one, at)

    def after_failure(self, rank: int, one: Worker, at: str) -> Job:
        one.at, one.todo = "", ()
        if at == "reduce":
            self.reduced(rank, one, False)
        elif at == "leave":
            self.publishes(one)
        else:
            one.at = "ask"
            if one.asked:
                return self.after_wait(rank, one, "ask")
        return self

    def after_reduction(self, rank: int, one: Worker) -> Iterator[Job]:
        """Go on with a whole reduction. The first rank of which this is known settles what all have asked for in it."""
        number, collective = one.world, self.worlds[one.world].counts[rank] - 1
        result = self.worlds[number].done[collective][1]
        for word in [result] if result is not None else self.words(number, one):
            job = Job(self.plan, self.table, self.state())
            if result is None:
                job.decide(number, collective, word)
                if word == "admit":
                    missing = job.ready - {*job.worlds[number].ranks}
                    job.add((*job.worlds[number].ranks, *sorted(missing)))
            job.workers[rank].word = word
            job.reduced(rank, job.workers[rank], True)
            yield job

    def words(self, number: int, one: Worker) -> list[str]:
        """Return what the ranks of a world may all ask for in a reduction."""
        world, left = self.worlds[number], (one.step + 1) % self.plan.steps
        if any(self.workers[rank].phase is Phase.JOINING for rank in world.ranks):
            return ["whole", ""] if left else ["whole"]
        if number + 1 < len(self.worlds):
            return ["switch", ""] if left and self.worlds[number + 1].here >= {*self.worlds[number + 1].ranks} else [""]
        return ["admit", ""] if self.ready - {*world.ranks} else [""]

    def after_wait(self, rank: int, one: Worker, at: str) -> Job:
        one.at = ""
        if at == "ask":
            one.todo = ()
            self.happens(one, PhaseEvent.PEERS_LOST)
        elif at == "round":
            one.round = self.round
            self.happens(one, PhaseEvent.ROUND_BEGINS)
        elif at == "come" and one.phase is Phase.MEETING and rank in self.ready:
            self.happens(one, PhaseEvent.TAKEN_IN)
        elif at == "ready":
            one.world, one.at = max(number for number, world in enumerate(self.worlds) if rank in world.ranks), "come"
            self.enter(rank, one.world)
        elif at == "switched":
            one.step = self.worlds[one.world].switched
            self.epoch(one)
        elif at == "agree":
            self.agreed(rank, one)
        elif at == "leave":
            self.publishes(one)
        elif at == "publish":
            self.published, one.restored = one.step, one.step
        elif at == "exit":
            self.end(one)
        elif at in ("rehearse", "failed"):
            self.reduced(rank, one, at == "rehearse")
        elif at == "script":
            self.after_loop(one)
        return self

    def agreed(self, rank: int, one: Worker) -> None:
        world = self.worlds[one.world]
        begins_anew, step, late = world.done[world.counts[rank] - 1][1]
        one.step = step
        facts = Fact.NEW if begins_anew else Fact.BEHIND if rank in late else Fact.AHEAD if late else NONE
        self.happens(one, PhaseEvent.AGREED, facts)

    def after_loop(self, one: Worker) -> None:
        if self.plan.saves:
            self.save(one, False)
        else:
            one.then = "made"

    # -- agents form rounds; workers are lost, join and fail

    def form(self) -> None:
        """Begin a round with all that live, and with the processes that are to come."""
        for rank, one in enumerate(self.workers):
            if one.at == "waits":
                self.workers[rank] = Worker(NEW)
        self.round, self.ending, self.ready, self.worlds = self.round + 1, False, frozenset(), ()
        members = [rank for rank, one in enumerate(self.workers) if one.at not in GONE]
        newest = max(self.workers[rank].settled for rank in members)
        self.add(tuple(rank for rank in members if not newest or self.workers[rank].settled == newest))
        for rank in members:
            self.workers[rank].asked = False
            if not self.workers[rank].at:
                self.workers[rank].round = self.round - 1
                self.run(rank)

    def can_form(self) -> bool:
        if not self.ending or all(one.at in ("dead", "ended") for one in self.workers):
            return False
        return all(one.asked and (one.at == "round" or one.phase is Phase.REHEARSING) for one in self.workers if one.at not in GONE)

    def is_good(self) -> bool:
        """Return whether all that live train in one world, or all have ended."""
        alive = [one for one in self.workers if one.at not in GONE]
        worlds = {(one.round, one.world, one.phase, len(self.worlds[one.world].ranks)) for one in alive if one.world >= 0}
        return not alive or worlds == {(self.round, alive[0].world, Phase.TRAINING, len(alive))} and not any(one.failed for one in alive)


def moves(plan: Plan, table: Table, state: tuple[Any, ...]) -> Iterator[tuple[str, str, Job]]:
    """Yield all that may happen in ``state``: its kind, its name, and the job after it.

    A kind is progress, disturbance, or report: a worker has waited 10 s for its agent.
    """
    here = Job(plan, table, state)

    def fresh() -> Job:
        return Job(plan, table, state)

    alive = [rank for rank, one in enumerate(here.workers) if one.at not in GONE]
    for rank in alive:
        one = here.workers[rank]
        for how in here.options(rank, one):
            kind = "disturbance" if how == "fault" else "report" if how == "report" and not here.faulted else "progress"
            for job in fresh().go_on(rank, how):
                job.run(rank)
                yield kind, f"{rank} {one.at} {how}", job
        if here.ending and not one.asked:
            (job := fresh()).workers[rank].asked = True
            yield "progress", f"{rank} is asked", job
        if here.losses:
            (job := fresh()).workers[rank] = Worker(DEAD)
            job.losses, job.ending = job.losses - 1, True
            yield "disturbance", f"{rank} dies", job
    if here.can_form():
        (job := fresh()).form()
        yield "progress", "a round forms", job
    if here.ends and not here.ending:
        (job := fresh()).ending = True
        job.ends -= 1
        yield "disturbance", "the round ends", job
    if here.joins and not here.over:
        for rank in [rank for rank, one in enumerate(here.workers) if one.at == "dead"][:1]:
            (job := fresh()).workers[rank] = Worker(WAITS)
            job.joins, job.ending = job.joins - 1, True
            yield "disturbance", "a process is to come", job
    if here.over and all(here.workers[rank].at == "round" and here.may_report(here.workers[rank]) for rank in alive):
        job = fresh()
        for rank in alive:
            job.end(job.workers[rank])
        yield "progress", "the agents end", job


def first(plan: Plan, table: Table) -> tuple[Any, ...]:
    """Return the state in which the first round has formed."""
    workers = tuple(NEW if rank < plan.at_first else DEAD for rank in range(plan.ranks))
    start = (workers, 0, True, False, False, 0, (), frozenset(), plan.losses, plan.joins, plan.ends, plan.faults)
    job = Job(plan, table, start)
    for one in job.workers[: plan.at_first]:
        one.todo, one.phase = (), Phase.LEFT
        job.happens(one, PhaseEvent.STARTS)
    job.form()
    return job.state()


@dataclass
class Walk:
    """What a walk has found. ``stuck``: the numbers of states without an exit; ``wrong``: by state, what must not be."""

    states: list[tuple[Any, ...]]
    came: list[tuple[int, str]]  # by state: that from which the walk came to it, and by which move
    depth: int
    stuck: list[int]
    wrong: dict[int, str]
    asked: set[tuple[Phase, PhaseEvent, Fact]]  # what the table was asked

    def way(self, number: int) -> list[str]:
        """Return the moves that lead to a state."""
        found: list[str] = []
        while number:
            number, name = self.came[number]
            found.append(name)
        return found[::-1]


def walk(plan: Plan, table: Table) -> Walk:
    """Walk through all states of ``plan``, breadth first."""
    asked: set[tuple[Phase, PhaseEvent, Fact]] = set()

    def noting(phase: Phase, event: PhaseEvent, facts: Fact = NONE) -> tuple[Phase, tuple[PhaseAction, ...]]:
        asked.add((phase, event, facts))
        return table(phase, event, facts)

    states = [first(plan, noting)]
    known, came, depths, wrong = {states[0]: 0}, [(0, "")], [0], dict[int, str]()
    before: list[list[int]] = [[]]  # by state: those from which progress leads to it
    good: list[int] = []
    for number, state in enumerate(states):  # grows
        if Job(plan, table, state).is_good():
            good.append(number)
        for kind, name, job in moves(plan, noting, state):
            if (to := known.get(found := job.state())) is None:
                to = known[found] = len(states)
                states.append(found)
                came.append((number, name))
                depths.append(depths[number] + 1)
                before.append([])
                if job.wrong:
                    wrong[to] = job.wrong
            if kind == "progress":
                before[to].append(number)
    with_exit, reached = {*good}, deque(good)
    while reached:
        for number in before[reached.popleft()]:
            if number not in with_exit:
                with_exit.add(number)
                reached.append(number)
    return Walk(states, came, max(depths), [number for number in range(len(states)) if number not in with_exit], wrong, asked)
