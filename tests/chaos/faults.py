"""What is done to the job, drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastirun.rendezvous.timing import Timing
from tests.chaos.job import Job, Terms

MINUTE = {"kill": 0.0, "worker": 0.0, "term": 0.0}  # these are over as soon as they are done
LOSS, DELAY = 0.2, 0.1  # of noise: the share of packets, and the longest delay of each in seconds
WEIGHTS = {"cut": 3, "mute": 2, "deaf": 2, "apart": 2, "noise": 2, "stop": 4, "freeze": 2, "kill": 3, "worker": 3, "term": 2}


@dataclass(frozen=True)
class Fault:
    """``seconds``: how long it lasts; ``after``: when it begins, from the beginning of its step."""

    kind: str
    node: int
    seconds: float
    after: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind} h{self.node}{lasts}" + (f" after {self.after:g} s" if self.after else "")

    def touched(self, nodes: int, terms: Terms) -> set[int]:
        """Who may be taken for lost because of it. Without the network of the store's host, nobody reaches the store.

        Any node may host the store where it moves. A host that stood still for so long that the store has moved misses all others there.
        """
        if self.kind in ("worker", "term"):
            return set()
        network = self.kind in ("cut", "mute", "deaf", "noise") and (self.node == 0 or terms.succession != "off")
        moves = terms.succession == "majority" and self.seconds >= Timing(expire=terms.expire).doubt
        return set(range(nodes)) if network or moves else {self.node}


def draw(seed: int, count: int, nodes: int, terms: Terms, longest: float = 100.0) -> list[list[Fault]]:
    """``count`` faults in steps; between two steps everything heals. Some steps have two faults, that may overlap."""
    luck = random.Random(seed)
    steps: list[list[Fault]] = []
    while count:
        step = [_one(luck, nodes, terms, longest)]
        if count > 1 and luck.random() < 0.3:
            more = _one(luck, nodes, terms, longest)
            step.append(Fault(more.kind, more.node, more.seconds, after=round(luck.uniform(0.0, step[0].seconds or 1.0), 1)))
        steps.append(step)
        count -= len(step)
    return steps


def _one(luck: random.Random, nodes: int, terms: Terms, longest: float) -> Fault:
    """Shorter and longer than ``expire``, than the lease (10 s), and seldom than ``store_grace``."""
    kind = luck.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    node = luck.randrange(1 if kind == "apart" else 0, nodes)
    if kind in MINUTE:
        return Fault(kind, node, 0.0)
    if kind == "noise":
        return Fault(kind, node, min(longest, 8.0))
    spans = [0.3 * terms.expire, 1.6 * terms.expire, 3 * terms.expire, 12.0, terms.store_grace + 3]
    return Fault(kind, node, min(longest, round(luck.choices(spans, [35, 35, 15, 10, 5])[0] * luck.uniform(0.9, 1.1), 1)))


def begin(job: Job, fault: Fault) -> Callable[[], None]:
    """Do it. Returns what undoes it."""
    network, host, agent = job.network, job.network[fault.node], job.agents[fault.node]
    others = [i for i in range(len(job.agents)) if i != fault.node]
    if fault.kind == "cut":
        host.carrier(False)
        return lambda: host.carrier(True)
    if fault.kind in ("mute", "deaf", "apart"):
        out, into = {(fault.node, i) for i in others}, {(i, fault.node) for i in others}
        apart = {(fault.node, 0), (0, fault.node)}
        pairs = {"mute": out, "deaf": into, "apart": apart}[fault.kind]
        network.dropped |= pairs
        return lambda: network.dropped.difference_update(pairs)
    if fault.kind == "noise":
        network.noisy[fault.node] = (LOSS, DELAY)
        return lambda: network.noisy.pop(fault.node, None) and None
    if fault.kind == "stop":
        agent.send(signal.SIGSTOP)
        return lambda: agent.send(signal.SIGCONT)
    if fault.kind == "freeze":
        agent.sent.add(signal.SIGSTOP)
        host.signal(signal.SIGSTOP)
        return lambda: host.signal(signal.SIGCONT)
    if fault.kind == "worker":
        _kill_worker(job, fault.node)
    else:
        agent.send(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
    return lambda: None


def _kill_worker(job: Job, node: int) -> None:
    """That of the node; when it is a spare, any."""
    alive = [ticks for ticks, _ in job.alive()]
    mine = [ticks for ticks in alive if ticks.agent == job.agents[node].name] or alive
    for ticks in mine[:1]:
        pid = int(ticks.path.name.rpartition("_")[2])
        with suppress(ProcessLookupError):
            if str(job.ticks).encode() in _environ(pid):  # and no process that has got its number
                os.kill(pid, signal.SIGKILL)


def _environ(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()
    return b""
