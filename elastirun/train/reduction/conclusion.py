"""Consequences of the control words of a reduction, on every rank alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from elastirun.progress import computed
from elastirun.train.errors import TrainError
from elastirun.train.groups.collectives import gather, ranks
from elastirun.train.reduction.control_words import Agreement
from elastirun.train.reduction.reduction import ReducerParts, StepResult
from elastirun.train.reduction.replica_check import GradualCheck, verify_replicas
from elastirun.train.reduction.step_times import describe_lacking, usual_seconds
from elastirun.train.reduction.transports.base import reduction_errors
from elastirun.train.reduction.world import World

log = logging.getLogger("elastirun.train")


class Conclusion:
    """Reads the control words, and does after each reduction what follows from them: refuse the step, learn for the next plan, report.

    On a GPU the words are read a step later while nothing unusual happens (``defers``), so that the host need not wait for the GPU.
    """

    def __init__(self, parts: ReducerParts) -> None:
        self._parts = parts
        self.may_defer = parts.planner.device.type == "cuda"
        self.always_reads = False  # the words of every step are read before its gradients are used; the same on every rank
        self._concluded = 0  # the last step that this was done for
        self.drained: int | None = None  # the first step in which a rank requested "drain", as all know after the same step
        self._reported = False
        self._gradual: GradualCheck | None = None  # that is under way

    @property
    def defers(self) -> bool:
        """Whether a step is used before its words are read: only while nothing unusual was seen.

        The same on every rank, because the collectives that follow the reading come earlier or later with it.
        """
        parts = self._parts
        settled = not parts.planner.learning and not parts.options.mean_over_users and parts.extensions.optimizer_step is None
        return self.may_defer and settled and not self.always_reads and not parts.trained.differs

    def continue_from(self, old: Conclusion) -> None:
        """Take the place of ``old``, of a reducer of other parameters of the same module."""
        self._concluded, self.always_reads = old._concluded, old.always_reads
        self.drained = old.drained

    @property
    def position(self) -> list[int]:
        """Flags that decide about collectives after a reduction, besides its words: a new rank must know them."""
        return [int(self.always_reads), int(self._reported)]

    @position.setter
    def position(self, position: Sequence[int]) -> None:
        self.always_reads, self._reported = map(bool, position)

    def conclude(self, last: StepResult, world: World, expected_samples: float, drained: bool) -> bool:
        """Act upon the words of the last reduction, once. Return whether hooks have to be installed anew.

        ``drained``: this rank's own backward failed, as its user knows. Raises TrainError and what derives from it on every rank alike.
        """
        if last.words.step == self._concluded:
            return False
        self._concluded = last.words.step
        agreement = last.words.agreement
        if self.drained is None and "drain" in agreement.requests:
            self.drained = agreement.step
        if len(set(agreement.trained)) > 1:
            self._parts.trained.drop_gradients()
            self._parts.trained.refuse(world.group, self._parts.planner.device, all_take_part=not self.may_defer)
        computed(agreement.seconds[world.rank], usual_seconds(agreement.seconds, agreement.work)[world.rank])
        self._parts.trained.learn(agreement.trained)
        if last.deferred:
            self._check_deferred(agreement, world.size, expected_samples)
        if agreement.lacking and not self._reported:
            self._report(agreement.step, last.lacked, world)
        if agreement.lacking or agreement.looking:
            self.always_reads = True
        if agreement.failed:
            self._refuse(agreement, drained)
            return False
        if agreement.users:
            self._parts.planner.lacked(agreement.users, agreement.with_data)
        with reduction_errors("what follows a reduction"):
            surprised = self._learn(bool(agreement.late), world)
            every = self._parts.options.check_replicas_every
            held = self._parts.planner.held  # a new rank has no state yet
            if every > 0 and not self._parts.extensions.hooked and not held:
                self._compare(agreement, world, now=agreement.step % every == 0)
        return surprised

    def _check_deferred(self, agreement: Agreement, ranks: int, expected_samples: float) -> None:
        """Raise TrainError if gradients were used that this rank would have changed, had it read the words before."""
        # Another order of adding up the samples, in a ring or a tree, may give another last bit.
        close = math.isclose(agreement.samples, expected_samples, rel_tol=1e-5)
        same = agreement.looking == ranks or close and not agreement.late
        if agreement.failed or not same:
            self.always_reads = True
            raise TrainError(
                f"the gradients of step {agreement.step} were not whole and have been used: on some rank the graph or the number of "
                "samples was not what it had been, or a backward failed. Load the last checkpoint; from now on each step is checked "
                "before it is used"
            )

    def _refuse(self, agreement: Agreement, drained: bool) -> None:
        """Drop the gradients of a step in which a rank's backward ended with an exception."""
        self._parts.trained.drop_gradients()
        if not drained:
            raise TrainError(
                f"the backward of {ranks(agreement.failed)} ended with an exception, so this step has no gradients on any rank (grad is "
                "None); go on with the next batch, or stop"
            )

    def _learn(self, late: bool, world: World) -> bool:
        """Learn how often each parameter fires; make a new plan if it is time. Return whether gradients were late for the first time."""
        if self._parts.hooks.all_watched or late:
            self._parts.hooks.learn()
        surprised = late and not self._parts.hooks.surprised
        self._parts.hooks.surprised = self._parts.hooks.surprised or surprised
        if self._parts.planner.advance(world.group, world.transport):
            world.buckets.outdated = True
        return surprised

    def _report(self, step: int, lacked: Collection[int], world: World) -> None:
        """Log once which parameters lack a gradient, and on which ranks."""
        self._reported = True
        count = len(self._parts.trained.params)
        with reduction_errors("the report of parameters without a gradient"):
            everyone = gather([int(index in lacked) for index in range(count)], world.group, self._parts.planner.device)
        if world.rank == 0:
            log.warning("in step %d %s", step, describe_lacking(self._parts.trained.names, everyone))

    def _compare(self, agreement: Agreement, world: World, now: bool) -> None:
        """Compare the replicas: all of them if it is time ``now``, else some parameters if a gradual check is under way."""
        if now:
            self._gradual = None
            self.check_replicas(world)
        elif self._gradual is not None:
            self._gradual.go_on(max(agreement.seconds), world.group, self._parts.planner.device)
            if self._gradual.done:
                self._gradual = None

    def begin_gradual_check(self, ranks: int) -> None:
        """Compare the replicas in the next steps, some parameters in each. Every rank calls it at the same point."""
        self._gradual = GradualCheck(self._parts.trained.names, self._parts.trained.params) if ranks > 1 else None

    def check_replicas(self, world: World) -> None:
        """Raise Diverged, on every rank alike, if the ranks' parameters are not the same; all call it at the same point."""
        planner, trained = self._parts.planner, self._parts.trained
        parts = [*planner.buckets, *((index,) for index in planner.sparse)]
        names = [[trained.names[index] for index in part] for part in parts]
        verify_replicas(names, [[trained.params[index] for index in part] for part in parts], world.group, planner.device)
