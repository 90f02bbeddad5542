"""Measures how long a large job takes to go on when the node that hosts the rendezvous store is lost (docs/decisions/0020).

    python -m benchmarks.store_move [--nodes 8 64 256 512] [--how killed silent] [--repeat 1] [--limit 120]

N nodes without workers: node 0, which hosts the store, in a process of its own, the others in eight more. Each is a session as in the
agent, with its store thread, its standby store and its way to the stores of the others. The rest of the agent is left out: Start has no
effect, and workers stop at once. This program stands in for the guard of node 0.

killed: the process of node 0 is killed with SIGKILL, and its guard's word is written into the standby stores as the guard does it.
silent: that process is stopped with SIGSTOP, so its store takes connections and answers nothing. The others doubt after twice ``expire``,
and go on because they are more than half (``--store-succession=majority``). mute: killed, and no guard tells of it.

All times are counted from the loss: until the guard's word is written; until the first node has given up the store, and the last one;
until a node has taken over; until all have started the next round.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import os
import selectors
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fleet import Fleet, Plan, Rows, report, split
from elastirun import clock
from elastirun.agent.host import descriptors
from elastirun.agent.processes import death_notice
from elastirun.agent.session import Session
from elastirun.agent.store.store_access import new_row
from elastirun.config import Command, Endpoint, LaunchConfig
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.timing import Timing
from elastirun.rendezvous.wire.actions import Finish, Start, Stop
from elastirun.rendezvous.wire.events import WorkersStopped
from tests.support.cluster import free_port

HOST = 0  # the node that hosts the store at first
SETTLE = 3.0  # seconds of a running round before that node is lost
AFTERWARDS = 2.0  # seconds of the next round in which it must not end
WAYS = ("killed", "silent", "mute")


def configuration(plan: Plan, index: int) -> LaunchConfig:
    """Return the configuration of a node, in a job that allows the loss of one node."""
    return LaunchConfig(
        min_nodes=plan.nodes - 1,
        max_nodes=plan.nodes,
        run_id="bench",
        endpoint=Endpoint(*split(plan.endpoint)),
        is_host=index == HOST,
        store_succession="majority",
        command=Command("none"),
        nproc=8,
        local_addr="127.0.0.1",
    )


@dataclass
class Node:
    """One node. ``owner``, ``term`` and ``notice``: what it has reported."""

    index: int
    session: Session
    due: float = math.inf  # when it wants its next turn
    turned: float = 0.0  # when it had its last one
    armed: int = 0
    owner: str = ""  # id of the node to whose standby store it has moved
    term: int = 0  # of the record there
    notice: tuple[Any, ...] = ()  # what the guard is to tell


class Nodes:
    """The nodes of one process, in one loop. Each has its turn as in the loop of the agent."""

    def __init__(self, plan: Plan, main: Connection) -> None:
        self._main = main
        self._selector = selectors.DefaultSelector()
        self._selector.register(main, selectors.EVENT_READ)
        self._heap: list[tuple[float, int, int]] = []
        self._lag = 0.0
        self._nodes: dict[int, Node] = {}
        for index in plan.mine:
            config = configuration(plan, index)
            self._nodes[index] = node = Node(index, Session.of(config, new_row(config), lambda why: None))
            self._selector.register(node.session, selectors.EVENT_READ, node)

    def run(self) -> None:
        self._main.send(("connected",))
        while True:
            wait = max(0.0, self._heap[0][0] - clock.now()) if self._heap else None
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._carry_out(*self._main.recv())
                else:
                    self._turn(key.data)
            now = clock.now()  # what falls due later waits until all that is ready was heard
            while self._heap and self._heap[0][0] <= now:
                due, index, armed = heapq.heappop(self._heap)
                if armed == self._nodes[index].armed:
                    self._lag = max(self._lag, clock.now() - max(due, self._nodes[index].turned))
                    self._turn(self._nodes[index])

    def _carry_out(self, command: str) -> None:
        if command == "go":
            for node in self._nodes.values():
                node.session.begin()
                node.due = node.turned = clock.now()
                self._turn(node)
            self._main.send(("gone", clock.now()))
        elif command == "costs":
            self._main.send(("costs", self._lag, time.process_time()))

    def _turn(self, node: Node) -> None:
        session, index = node.session, node.index
        session.check_standstill(clock.now(), max(0.0, node.due - node.turned))
        session.receive()
        session.check_time(clock.now())
        for action in session.actions():
            if isinstance(action, Start):
                record = action.record
                self._main.send(("round", index, len(record.members), clock.now(), record.round))
            elif isinstance(action, Stop):
                self._main.send(("stopped", index, action.reason))
                session.post(WorkersStopped(clock.now()))
            elif isinstance(action, Finish):
                self._main.send(("ended", index, f"{action.outcome.value}: {action.reason}"))
        self._report(node)
        node.due, node.turned, node.armed = session.due, clock.now(), node.armed + 1
        if node.due < math.inf:
            heapq.heappush(self._heap, (node.due, index, node.armed))

    def _report(self, node: Node) -> None:
        """Say whether the node has moved to another store, and read there that it has taken over; of the host, its guard's notice."""
        machine, access = node.session.machine, node.session.access
        if machine.store.place is not None and machine.store.place.id != node.owner:
            node.owner = machine.store.place.id
            self._main.send(("moved", node.index, clock.now()))
        if machine.record is not None and machine.record.term > node.term:
            node.term = machine.record.term
            self._main.send(("taken", node.index, clock.now()))
        words = machine.last_words if node.index == HOST else None
        if words is not None and (machine.store.round_known, words[1]) != node.notice:
            node.notice = machine.store.round_known, words[1]
            spelled = death_notice.encode_vote(words[1], None)
            notice = death_notice.Notice(None, access.key_prefix, machine.row.id, None, *machine.store.round_known, spelled)
            self._main.send(("notice", notice.encode()))


def run_nodes(plan: Plan, main: Connection) -> None:
    threading.stack_size(256 << 10)
    descriptors.raise_limit()
    torch_class.store_only()
    torch_class.tcp_store_class()  # not on the clock
    Nodes(plan, main).run()


@dataclass
class Measured:
    """The result of one measurement. Times in seconds from the loss; None: not within the limit, or nobody has."""

    formed: float | None = None  # from the last join on
    told: float | None = None
    first_moved: float | None = None
    last_moved: float | None = None
    taken: float | None = None
    reformed: float | None = None
    rounds: int = 0  # formed after the loss; more than one: the first was broken at once
    cpu: float = 0.0  # seconds, of all nodes together, from the loss to the next round of all, or to the limit
    lag: float = 0.0  # longest delay of a timer, seconds; above one this machine is too slow for so many nodes
    notes: list[str] = field(default_factory=list)


class Moving(Fleet):
    """The processes of one measurement, and what the nodes have reported of the move. Times are those of ``elastirun.clock``."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.moved: dict[int, float] = {}  # by node: when it gave up its store last
        self.first_moved = self.taken = math.inf
        self.rounds: set[int] = set()
        self._notice = b""
        endpoint = f"127.0.0.1:{free_port()}"
        self._host, self._to_host = self.start(run_nodes, Plan(endpoint, nodes, HOST, nodes))
        self._pipes.append(self._to_host)
        self.start_nodes(run_nodes, endpoint, first=HOST + 1)
        self.answers("connected")

    def note(self, what: str, rest: list[Any]) -> None:
        super().note(what, rest)
        if what == "moved":
            self.moved[rest[0]] = rest[1]
            self.first_moved = min(self.first_moved, rest[1])
        elif what == "taken":
            self.taken = min(self.taken, rest[1])
        elif what == "round":
            self.rounds.add(rest[3])
        elif what == "notice":
            self._notice = rest[0]

    def lose_host(self, how: str) -> tuple[float, float | None]:
        """Lose the host of the store. Return when it was lost, and when its guard's word was written; None: there is none."""
        while self.hear(0.0):
            pass
        self._pipes.remove(self._to_host)
        self.sizes.pop(HOST, None)
        self.rounds.clear()
        lost_at = clock.now()
        if how == "silent":
            os.kill(self._host.pid, signal.SIGSTOP)
            return lost_at, None
        self._host.kill()
        self._host.join()
        if how == "mute":
            return lost_at, None
        death_notice.write(self._notice, clock.now())
        return lost_at, clock.now()

    def costs(self) -> tuple[float, float]:
        """Return the longest lag of any process so far, and the CPU seconds of all."""
        self.tell("costs")
        answers = self.answers("costs")
        return max(answer[0] for answer in answers), sum(answer[1] for answer in answers)


def measure(nodes: int, how: str, limit: float) -> Measured:
    with Moving(nodes) as fleet:
        found = Measured(notes=fleet.notes)
        begun = fleet.go()
        at = fleet.in_round(nodes, limit)
        if at is None:
            return found
        found.formed = at - begun
        fleet.rest(SETTLE)
        lost_at, told_at = fleet.lose_host(how)
        _, before = fleet.costs()
        at = fleet.in_round(nodes - 1, limit)
        found.lag, after = fleet.costs()
        found.cpu = after - before
        fleet.rest(AFTERWARDS)
        found.rounds = len(fleet.rounds)
        moments = (told_at, fleet.first_moved, max(fleet.moved.values(), default=None), fleet.taken, at)
        since = (None if moment is None or moment == math.inf else moment - lost_at for moment in moments)
        found.told, found.first_moved, found.last_moved, found.taken, found.reformed = since
    return found


HEAD = ["nodes", "host", "formed, s", "told, s", "first moved, s", "last moved, s", "taken over, s", "next round, s"]
HEAD += ["after 2 x expire, s", "rounds", "CPU, s", "lag, s", "load"]


def row(nodes: int, how: str, found: Measured, load: float) -> list[str]:
    late = None if found.reformed is None or how == "killed" else found.reformed - Timing().doubt
    times = (found.formed, found.told, found.first_moved, found.last_moved, found.taken, found.reformed, late)
    cells = ["-" if seconds is None else f"{seconds:.2f}" for seconds in times]
    return [str(nodes), how, *cells, str(found.rounds), f"{found.cpu:.1f}", f"{found.lag:.2f}", f"{load:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 64, 256, 512])
    parser.add_argument("--how", nargs="*", choices=WAYS, default=["killed", "silent"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds each for the first round and for the next one")
    chosen = parser.parse_args()

    def rows() -> Rows:
        for nodes, how, _ in itertools.product(chosen.nodes, chosen.how, range(chosen.repeat)):
            load = os.getloadavg()[0]
            found = measure(nodes, how, chosen.limit)
            yield row(nodes, how, found, load), found.notes

    report(HEAD, rows())


if __name__ == "__main__":
    main()
