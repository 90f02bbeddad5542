"""The workers of a live job in the simulated world, and their agents: they park when a round ends, and go on in the next one.

Whose promise counts is decided by the product (``Parking``). What a worker's process does is played here (docs/elastic.md): it answers at
once, late, twice or never, and dies at any moment. ``live_rounds`` has what the workers do together.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import partial

from elastirun.rendezvous.wire.actions import Start, Stop
from elastirun.rendezvous.wire.records import RoundRecord
from tests.sim.live_rounds import AGAIN, Crew, LiveRounds, Training, Worker, must
from tests.sim.world import Node, World

SLOW, USUAL = (0.1, 4.9), (0.001, 0.1)  # seconds until a worker leaves its round; --failure-grace is 5 s
LATE = 8.0  # seconds by which an answer may be late
IMPORTS = (0.2, 3.0)  # seconds until a new process can be parked
SWITCH_LIMIT = 10.0  # seconds after which a worker that does not take part in the next round is killed


@dataclass(frozen=True)
class Switching:
    """Chances of what a worker may do when it is asked to park, or to go on in the next round."""

    slow: float = 0.0  # it answers after seconds
    hangs: float = 0.0  # it does not do so at all, or too late
    repeats: float = 0.0  # it answers twice, the second time late
    dies: float = 0.0  # it dies within seconds


def draw_switching(rng: random.Random) -> Switching:
    """Return how well the workers of a live job switch from round to round."""
    return Switching(rng.choice([0.0, 0.3]), rng.choice([0.0, 0.0, 0.1, 0.3]), rng.choice([0.0, 0.3]), rng.choice([0.0, 0.05, 0.2]))


class Live:
    """All workers of a live job. ``calm``: nothing goes wrong any more."""

    def __init__(self, world: World, switching: Switching, rng: random.Random) -> None:
        self.world, self.switching, self.calm, self.random = world, switching, False, rng
        self.rounds = LiveRounds(world, rng)
        self._crews: dict[Node, Crew] = {}
        self._pids = itertools.count(1)
        world.on_starting.append(self._start)

    def crew(self, node: Node) -> Crew:
        return self._crews.setdefault(node, Crew())

    def _happens(self, chance: float) -> bool:
        return not self.calm and self.random.random() < chance

    # -- the agent ------------------------------------------------------------------------------------------------------

    def _start(self, world: World, node: Node, start: Start) -> None:
        """Let parked workers go on, start one in each other place, and tell all nodes who has a state."""
        crew, record = self.crew(node), start.record
        inside = [worker.pid for worker in (*crew.running.values(), *crew.parked.values()) if worker.inside and worker.lives]
        must(not inside, f"{node.id} begins round {record.round} while {inside} are in the last one")
        training = crew.training = self.rounds.trainings.setdefault(record.fence, Training(record))
        crew.kill_at = math.inf
        base = sum(m.slots for m in record.members[: start.node_rank])
        parked = {local: worker for local, worker in crew.parked.items() if worker.lives and local < record.members[start.node_rank].slots}
        crew.running, crew.parked = {}, {}
        having = {base + local: crew.parking.settled(worker.pid) for local, worker in parked.items()}
        self._tell(node, start, training, [(rank, settled) for rank, settled in having.items() if settled])
        for local in range(record.members[start.node_rank].slots):
            if local in parked:
                worker = crew.running[local] = parked[local]
                must(crew.parking.resume(worker.pid), f"worker {worker.pid} goes on, and is not parked")
                worker.parked, worker.rank, worker.training = False, base + local, training
                self._switch(worker)
            else:
                worker = crew.running[local] = Worker(node, crew, next(self._pids), base + local, training)
                self.rounds.after(self.random.uniform(*IMPORTS), node, partial(self._begin, worker))
            training.workers[worker.rank] = worker

    def _tell(self, node: Node, start: Start, training: Training, having: list[tuple[int, int]]) -> None:
        """Write the word of the node into the store of the round, as soon as that can be reached."""
        if node.working is not start.record or not node.up:
            return
        host = next(n for n in self.world.nodes if n.id == start.record.members[0].id)
        if node.frozen or node.cut or (host is not node and (not host.up or host.frozen or host.cut or host.side != node.side)):
            self.world.at(AGAIN, partial(self._tell, node, start, training, having))
            return
        training.told[start.node_rank] = having
        self.rounds.advance(training)

    def stop(self, node: Node, action: Stop) -> None:
        """Ask the workers of the node to park; end those that cannot be asked, and in the end those that have not answered."""
        crew = self.crew(node)
        self.world.at(0.0, partial(self._check_idle, node))
        if node.working is None:  # its guard has ended them
            return
        pids = [worker.pid for worker in crew.running.values() if worker.lives]
        if crew.kill_at < math.inf:  # the second request for the same round
            grace = action.within or 0.0
        else:
            asked = crew.parking.ask(pids, node.working.round)
            grace = self.world.graces[not action.planned or len(asked) == len(pids)]
            grace = grace if action.within is None else min(grace, action.within)
            for worker in crew.running.values():
                if worker.pid in asked:
                    self.rounds.after(0.0, node, partial(self._ask, worker, node.working.round), process=True)
                else:
                    self.rounds.after(node.stop_time, node, partial(self._die, worker), process=True)
        crew.kill_at = min(crew.kill_at, node.now + grace)
        self.rounds.after(max(0.0, crew.kill_at - node.now) / node.rate, node, partial(self._kill, node, node.working))

    def _kill(self, node: Node, record: RoundRecord) -> None:
        crew = self.crew(node)
        if node.working is record and node.stopping and node.now >= crew.kill_at - 1e-6:
            for worker in list(crew.running.values()):
                self._die(worker)
                self._reap(worker)
        self._check_idle(node)

    def _hear(self, worker: Worker, round: int, settled: int) -> None:
        """Take an answer of a worker."""
        crew = worker.crew
        if not worker.lives:  # its guard has ended it, which the agent sees first
            self._forget(worker)
        if not crew.parking.promise(worker.pid, round, settled):
            return
        must(not worker.ended, f"the answer of worker {worker.pid} counts, which was killed")
        must(worker.inside is None or worker.inside.record.round != round, f"worker {worker.pid} is parked, and still in round {round}")
        for local, other in list(crew.running.items()):
            if other is worker:
                worker.parked = True
                crew.parked[local] = crew.running.pop(local)
        self._check_idle(worker.node)

    def _check_idle(self, node: Node) -> None:
        """Let the node be done with its round when all its workers have ended or are parked."""
        crew = self.crew(node)
        if not node.stopping:
            return
        if node.working is None:  # the guard has ended all
            for worker in (*crew.running.values(), *crew.parked.values()):
                self._forget(worker)
            crew.parked = {}
        if not any(worker.lives for worker in crew.running.values()):
            crew.done.add(node.began[-1].fence)
            kept = any(crew.parking.settled(worker.pid) for worker in crew.parked.values())
            node.stopped(len(node.began), kept)

    def fail(self, node: Node) -> None:
        """Let a running worker die whose failure the agent reports now, unless one has died."""
        running = list(self.crew(node).running.values())
        if all(worker.lives for worker in running):
            self._die(self.random.choice(running))

    def _die(self, worker: Worker) -> None:
        if worker.lives:
            worker.ended, worker.inside = True, None
            self.rounds.after(0.0, worker.node, partial(self._reap, worker))

    def _die_unless_calm(self, worker: Worker) -> None:
        if not self.calm:
            self._die(worker)

    def _forget(self, worker: Worker) -> None:
        worker.ended, worker.inside = True, None
        worker.crew.parking.gone(worker.pid)

    def _reap(self, worker: Worker) -> None:
        """Take note of the end of a worker. Between rounds, and while a round ends, that is no failure."""
        node, crew = worker.node, worker.crew
        self._forget(worker)
        crew.parked = {local: other for local, other in crew.parked.items() if other is not worker}
        if worker in crew.running.values():
            node.fail(code=-9)
            self._check_idle(node)

    # -- the processes --------------------------------------------------------------------------------------------------

    def _begin(self, worker: Worker) -> None:
        """Let a new process connect to its agent and take part."""
        if worker.lives and not worker.node.stopping:
            worker.crew.parking.hello(worker.pid)
            self.rounds.enter(worker, worker.training)

    def _switch(self, worker: Worker) -> None:
        """Let a parked process go on in the next round. One that hangs is killed after a limit."""
        if self._happens(self.switching.dies):
            self.rounds.after(self.random.uniform(0.0, 1.0), worker.node, partial(self._die_unless_calm, worker), process=True)
        if self._happens(self.switching.hangs):
            self.rounds.after(SWITCH_LIMIT, worker.node, lambda: self._die(worker) if worker.inside is None and not worker.parked else None)
        else:
            delay = self.random.uniform(*(SLOW if self._happens(self.switching.slow) else USUAL))
            self.rounds.after(delay, worker.node, partial(self.rounds.enter, worker, worker.training), process=True)

    def _ask(self, worker: Worker, round: int) -> None:
        """Let a process hear that it is to leave its round."""
        if not worker.lives:
            return
        worker.asked = round
        if self._happens(self.switching.dies):
            self.rounds.after(self.random.uniform(0.0, LATE), worker.node, partial(self._die_unless_calm, worker), process=True)
        if self._happens(self.switching.hangs):
            late = self.world.graces[1] + self.random.uniform(0.0, LATE)
            self.rounds.after(late, worker.node, partial(self._leave_late, worker, round), process=True)
            return
        delay = self.random.uniform(*(SLOW if self._happens(self.switching.slow) else USUAL))
        self.rounds.after(delay, worker.node, partial(self._leave, worker, round), process=True)

    def _leave(self, worker: Worker, round: int) -> None:
        """Let a process leave its round, and promise that."""
        if not worker.lives or worker.asked != round:
            return
        if worker.inside is not None:
            worker.word = worker.settled
        worker.inside = None
        self.rounds.after(0.0005, worker.node, partial(self._hear, worker, round, worker.word))
        if self._happens(self.switching.repeats):
            self.rounds.after(self.random.uniform(0.0, LATE), worker.node, partial(self._hear, worker, round, worker.word))

    def _leave_late(self, worker: Worker, round: int) -> None:
        """Let a process that has hung leave its round. If it was killed, its answer was on the way by then."""
        if worker.lives:
            self._leave(worker, round)
        else:
            self.rounds.after(0.0, worker.node, partial(self._hear, worker, round, worker.settled))
