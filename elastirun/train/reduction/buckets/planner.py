"""Makes plans from the order and times of gradients in the first backwards; all ranks take rank 0's plan.

    reverse order      before the first backward nothing is known: the last parameters are expected first, and nothing is launched early
    ready order        after the first backward: torch's plan, buckets of a fixed size in the order in which the gradients came
    planned            after three more: from the times of the gradients and the measured link (on CPUs, unless a size was asked for)

Later plans put parameters that do not get a gradient in each step into buckets of their own, so that the others need not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train.groups.collectives import broadcast
from elastirun.train.reduction.buckets import plan as plans
from elastirun.train.reduction.buckets.plan import MIB, Gradient, LinkSpeed
from elastirun.train.reduction.transports.base import Storage, Transport
from elastirun.train.sharded import local_part

MEASURED = 3  # backwards; the plan is made from the medians of their times
REPLAN = (10, 100, 1000, 10_000)  # steps after which a plan is made anew for parameters that were seen to lack a gradient
PROBES = (1 << 14, 1 << 20)  # float32 elements: two sizes of reductions, from which latency and bandwidth follow
ROUNDS = 4  # reductions of each size; the fastest counts
LAUNCH = 1e-4  # seconds that a bucket costs the computing thread in our own code: hooks, copies, views, waiting


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was made from measured times, and what the planner of another world needs to go on from there."""

    gradients: Sequence[Gradient]  # that it was made for
    transport: type[Transport]  # that was measured
    buckets: plans.Buckets
    position: Sequence[int]  # see ``Planner``
    link: LinkSpeed | None
    history: Sequence[dict[int, float]]


def gradients_of(params: Sequence[nn.Parameter]) -> list[Gradient]:
    """Return the sizes and types of this rank's gradients of ``params``."""
    return [
        Gradient(p.numel() * 2, p.dtype.to_real(), p.device, True) if p.is_complex() else Gradient(p.numel(), p.dtype, p.device)
        for p in map(local_part, params)
    ]


class Planner:
    """Makes plans. ``buckets`` is the present plan, number ``epoch``; the same on every rank."""

    def __init__(self, params: Sequence[nn.Parameter], sparse: Sequence[int], bucket_cap_mb: float | None) -> None:
        self.gradients = gradients_of(params)
        self.device = params[0].device
        self.epoch = 0
        self.link: LinkSpeed | None = None
        self.learning = True  # order and times of gradients are still noted
        self.held = False  # the plan stays as it is, because a world is being prepared with it
        self._caps = (plans.CAP, plans.FIRST_CAP) if bucket_cap_mb is None else (int(bucket_cap_mb * MIB),) * 2
        self._fixed = bucket_cap_mb is not None or self.device.type != "cpu"  # the host's times are not a GPU's
        self.sparse = sparse
        self._dense = sorted(set(range(len(params))) - set(sparse))
        self._came: dict[int, float] = {}
        self._history: list[dict[int, float]] = []
        self._unsure: set[int] = set()
        self._planned_for: set[int] = set()
        self._steps = 0
        self.buckets = plans.by_size(self.gradients, self._dense[::-1], *self._caps)

    def note(self, index: int, seconds: float) -> None:
        """Note that gradient ``index`` was accumulated (perhaps once more), ``seconds`` after the backward began."""
        self._came.pop(index, None)
        self._came[index] = seconds

    def lacked(self, users: Sequence[int], with_data: int) -> None:
        """Remember the parameters without a gradient on some rank with data. Every rank calls it with the same values."""
        self._unsure.update(index for index in self._dense if users[index] < with_data)

    def advance(self, group: dist.ProcessGroup, transport: Transport) -> bool:
        """Make a new plan if it is time; return whether there is one. Every rank of ``group`` calls it after each reduction."""
        if self.held:
            self._came = {}
            return False
        self._steps += 1
        if self._came:
            self._history.append(self._came)
            self._came = {}
        if self.epoch == 0:
            self._adopt(plans.by_size(self.gradients, self._order(), *self._caps), group)
            self.learning = not self._fixed
        elif self.learning and self._steps > MEASURED:
            self.link = measure(transport, self.device)
            self.learning = False
            self._adopt(self._best(), group)
        elif not self.learning and self._steps in REPLAN and self._unsure > self._planned_for:
            self._adopt(self._best(), group)
        else:
            return False
        self._history = self._history[-1:] if self.epoch == 1 else self._history
        return True

    def take_first_plan(self, group: dist.ProcessGroup) -> None:
        """Take the plan of rank 0 of ``group``, whose ranks all call it."""
        self.buckets = plans.decode(broadcast(plans.encode(self.buckets), group, self.device))

    def measured(self, transport: Transport) -> MeasuredPlan | None:
        """Return the present plan, if it was made from measured times of ``transport``, or is not to be made from them."""
        if self.learning:
            return None
        return MeasuredPlan(self.gradients, type(transport), self.buckets, self.position, self.link, self._history)

    def can_use(self, plan: MeasuredPlan, transport: Transport) -> bool:
        """Return whether ``plan`` was made for these gradients, and from times of such a ``transport``."""
        return plan.gradients == self.gradients and plan.transport is type(transport)

    def continue_from(self, mine: MeasuredPlan | None, group: dist.ProcessGroup, source: int) -> None:
        """Take the plan of rank ``source``, and go on planning from there. ``mine`` is this rank's. Every rank calls it."""
        if mine is not None:
            self.link, self._history = mine.link, list(mine.history)
            self.position, self.buckets = mine.position, mine.buckets
        count = len(self.position)
        numbers = broadcast([*self.position, *plans.encode(self.buckets)], group, self.device, source)
        self.position, self.buckets = numbers[:count], plans.decode(numbers[count:])

    @property
    def position(self) -> list[int]:
        """Numbers that say how far planning is: a new rank that has them makes the next plan at the same step as the others.

        Besides counts there is one for each parameter: whether it was seen to lack a gradient, and whether the plan was made for that.
        """
        marks = [(index in self._unsure) + 2 * (index in self._planned_for) for index in range(len(self.gradients))]
        return [self.epoch, self._steps, int(self.learning), *marks]

    @position.setter
    def position(self, position: Sequence[int]) -> None:
        self.epoch, self._steps, learning, *marks = position
        self.learning = bool(learning)
        self._unsure = {index for index, mark in enumerate(marks) if mark & 1}
        self._planned_for = {index for index, mark in enumerate(marks) if mark & 2}

    def _adopt(self, mine: plans.Buckets, group: dist.ProcessGroup) -> None:
        """Take rank 0's plan; ``mine`` is this rank's. Every rank calls it at the same point."""
        self.buckets = plans.decode(broadcast(plans.encode(mine), group, self.device))
        self._planned_for = set(self._unsure)
        self.epoch += 1

    def _order(self) -> list[int]:
        """Return the gradients in the order of the last backward; those that never came go last."""
        last, dense = self._history[-1] if self._history else {}, set(self._dense)
        return [index for index in last if index in dense] + [index for index in reversed(self._dense) if index not in last]

    def _best(self) -> plans.Buckets:
        """Return the best plan from what is known by now."""
        order = self._order()
        if self.link is None:
            return plans.by_size(self.gradients, sorted(order, key=self._unsure.__contains__), *self._caps)  # the sure ones first
        times = self._history[-MEASURED:]
        last = max((max(came.values()) for came in times if came), default=0.0)
        ready = [last] * len(self.gradients)
        for index in order:
            seen = [came[index] for came in times if index in came]
            ready[index] = median(seen) if seen else last
        order.sort(key=lambda index: ready[index])
        return plans.planned(self.gradients, order, ready, self.link, self._unsure)


def measure(transport: Transport, device: torch.device) -> LinkSpeed:
    """Return the link, from the times of a few reductions of two sizes. Every rank calls it at the same point."""
    arena = transport.allocate([Storage(numel, torch.float32, device) for numel in PROBES])
    best = {numel: float("inf") for numel in PROBES}
    busy = float("inf")  # CPU seconds of this process for the smallest one, with its communication threads: they may need the same cores
    for _ in range(ROUNDS):
        for at, numel in enumerate(PROBES):
            begun, used = time.perf_counter(), time.process_time()
            arena.all_reduce(at).wait()
            best[numel] = min(best[numel], time.perf_counter() - begun)
            busy = min(busy, time.process_time() - used) if at == 0 else busy
    return replace(plans.fit([(numel * 4, seconds) for numel, seconds in best.items()]), host=busy + LAUNCH)
