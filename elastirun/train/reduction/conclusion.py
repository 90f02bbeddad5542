"""Consequences of the control words of a reduction, on every rank alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastirun.progress import computed
from elastirun.train.errors import TrainError
from elastirun.train.groups.collectives import gather, ranks
from elastirun.train.reduction.buckets.planner import Planner
from elastirun.train.reduction.control_words import Agreement, PendingAgreement
from elastirun.train.reduction.grad_hooks import GradHooks
from elastirun.train.reduction.replica_check import GradualCheck, verify_replicas
from elastirun.train.reduction.step_times import describe_lacking, median
from elastirun.train.reduction.trainable_params import Trained
from elastirun.train.reduction.transports.base import reduction_errors
from elastirun.train.reduction.user_hooks import Extensions
from elastirun.train.reduction.world import World

log = logging.getLogger("elastirun.train")


@dataclass(frozen=True)
class Options:
    """The options of a reduction; the same on every rank. See ``DistributedDataParallel``."""

    bucket_cap_mb: float | None = None
    mean_over_users: bool = False
    check_finite: bool = False
    check_replicas_every: int = 1000


@dataclass(frozen=True)
class Outcome:
    """A rank's knowledge of a reduction when it sets the gradients. ``agreed``: the control words; None if they are read later.

    ``common``: the words, if every rank has read them by now. What this rank alone has read must change neither a collective nor a factor.
    ``expected_samples``: the number of samples that the ranks have scaled their gradients for. ``params``: the number of parameters.
    """

    agreed: Agreement | None
    common: Agreement | None
    expected_samples: float
    params: int
    mean_over_users: bool

    @property
    def failed(self) -> bool:
        """Whether this step is known to have no gradients, because a rank's backward failed."""
        return self.agreed is not None and bool(self.agreed.failed)

    @property
    def late(self) -> Sequence[int]:
        """The buckets that are reduced once more."""
        return self.common.late if self.common else ()

    @property
    def samples(self) -> float:
        """The samples of all ranks, as all of them know by now."""
        return self.common.samples if self.common and self.common.samples else self.expected_samples

    @property
    def correction(self) -> float:
        """The factor of reduced gradients that were scaled for another number of samples."""
        return self.expected_samples / self.samples

    @property
    def users(self) -> Sequence[int] | None:
        """By parameter, the number of ranks that had a gradient. None: not known, or all ranks with data."""
        if self.agreed is None:
            return None
        return self.agreed.users or (None if self.agreed.with_data else [0] * self.params)

    @property
    def unused(self) -> list[int]:
        """Indices of the parameters for which no rank had a gradient; empty while this is unknown, or if no rank had data."""
        return [index for index, count in enumerate(self.agreed.users) if not count] if self.agreed and self.agreed.with_data else []

    def factor(self, users: float) -> float:
        """Return the factor for a gradient that ``users`` ranks have. Where asked for, the mean is over these ranks only."""
        share = self.agreed.with_data / users if self.agreed and users and self.mean_over_users else 1.0
        return self.correction * share


class Conclusion:
    """Reads the control words, and does after each reduction what follows from them: refuse the step, learn for the next plan, report.

    On a GPU the words are read a step later while nothing unusual happens (``defers``), so that the host need not wait for the GPU.
    """

    def __init__(
        self,
        trained: Trained,
        planner: Planner,
        watch: GradHooks,
        extensions: Extensions,
        options: Options,
    ) -> None:
        self._trained, self._planner, self._watch = trained, planner, watch
        self._extensions, self._options = extensions, options
        self.pending: PendingAgreement | None = None  # the words of the last reduction
        self.may_defer = planner.device.type == "cuda"
        self.always_reads = False  # the words of every step are read before its gradients are used; the same on every rank
        self._deferred = False  # the gradients of the last step were used before its words were read
        self._concluded = 0  # the last step that this was done for
        self.drained: int | None = None  # the first step in which a rank requested "drain", as all know after the same step
        self.lacked: set[int] = set()  # parameters without a gradient in the last reduction, on this rank
        self._reported = False
        self._gradual: GradualCheck | None = None  # that is under way

    @property
    def defers(self) -> bool:
        """Whether a step is used before its words are read: only while nothing unusual was seen.

        The same on every rank, because the collectives that follow the reading come earlier or later with it.
        """
        settled = not self._planner.learning and not self._options.mean_over_users and self._extensions.optimizer_step is None
        return self.may_defer and settled and not self.always_reads and not self._trained.differs

    def read_always(self) -> None:
        """Read the words of every step before its gradients are used. Every rank calls it at the same point."""
        self.always_reads = True

    def continue_from(self, old: Conclusion) -> None:
        """Take the place of ``old``, of a reducer of other parameters of the same module."""
        self.pending, self._concluded, self.always_reads = old.pending, old._concluded, old.always_reads
        self.drained = old.drained

    @property
    def position(self) -> list[int]:
        """Flags that decide about collectives after a reduction, besides its words: a new rank must know them."""
        return [int(self.always_reads), int(self._reported)]

    @position.setter
    def position(self, position: Sequence[int]) -> None:
        self.always_reads, self._reported = map(bool, position)

    def receive(self, pending: PendingAgreement, wants: bool, expected_samples: float, ranks: int) -> Outcome:
        """Take the words of a reduction of so many ``ranks``; read them if they may not be deferred, or if this rank ``wants`` to."""
        self.pending = pending
        self._deferred = self.defers
        agreed = None if self._deferred and not wants else pending.agreement
        read_by_all = agreed is not None and (not self._deferred or agreed.looking == ranks)
        common = agreed if agreed is not None and read_by_all and len(set(agreed.trained)) == 1 else None
        return Outcome(agreed, common, expected_samples, len(self._trained.params), self._options.mean_over_users)

    @property
    def due(self) -> int | None:
        """The step whose words have not been acted upon."""
        return None if self.pending is None or self.pending.step == self._concluded else self.pending.step

    def conclude(self, world: World, expected_samples: float, drained: bool) -> bool:
        """Act upon the words of the last reduction, once. Return whether hooks have to be installed anew.

        ``drained``: this rank's own backward failed, as its user knows. Raises TrainError and what derives from it on every rank alike.
        """
        assert self.pending is not None
        self._concluded = self.pending.step
        agreement = self.pending.agreement
        if self.drained is None and "drain" in agreement.requests:
            self.drained = agreement.step
        if len(set(agreement.trained)) > 1:
            self._trained.drop_gradients()
            self._trained.refuse(world.group, self._planner.device, all_take_part=not self.may_defer)
        computed(agreement.seconds[world.rank], median(agreement.seconds))
        self._trained.learn(agreement.trained)
        self._check_deferred(agreement, world.size, expected_samples)
        if agreement.lacking and not self._reported:
            self._report(agreement.step, world)
        if agreement.lacking or agreement.looking:
            self.read_always()
        if agreement.failed:
            self._refuse(agreement, drained)
            return False
        if agreement.users:
            self._planner.lacked(agreement.users, agreement.with_data)
        with reduction_errors("what follows a reduction"):
            surprised = self._learn(bool(agreement.late), world)
            every = self._options.check_replicas_every
            compares = every > 0 and self._extensions.compares_replicas and not self._planner.held  # held: a new rank has no state yet
            if compares:
                self._compare(agreement, world, now=agreement.step % every == 0)
        return surprised

    def _check_deferred(self, agreement: Agreement, ranks: int, expected_samples: float) -> None:
        """Raise TrainError if gradients were used that this rank would have changed, had it read the words before."""
        # Another order of adding up the samples, in a ring or a tree, may give another last bit.
        close = math.isclose(agreement.samples, expected_samples, rel_tol=1e-5)
        same = agreement.looking == ranks or close and not agreement.late
        if self._deferred and (agreement.failed or not same):
            self.read_always()
            raise TrainError(
                f"the gradients of step {agreement.step} were not whole and have been used: on some rank the graph or the number of "
                "samples was not what it had been, or a backward failed. Load the last checkpoint; from now on each step is checked "
                "before it is used"
            )

    def _refuse(self, agreement: Agreement, drained: bool) -> None:
        """Drop the gradients of a step in which a rank's backward ended with an exception."""
        self._trained.drop_gradients()
        if not drained:
            raise TrainError(
                f"the backward of {ranks(agreement.failed)} ended with an exception, so this step has no gradients on any rank (grad is "
                "None); go on with the next batch, or stop"
            )

    def _learn(self, late: bool, world: World) -> bool:
        """Learn how often each parameter fires; make a new plan if it is time. Return whether gradients were late for the first time."""
        if self._watch.all_watched or late:
            self._watch.learn()
        surprised = late and not self._watch.surprised
        self._watch.surprised = self._watch.surprised or surprised
        if self._planner.advance(world.group, world.transport):
            world.buckets.expire()
        return surprised

    def _report(self, step: int, world: World) -> None:
        """Log once which parameters lack a gradient, and on which ranks."""
        self._reported = True
        count = len(self._trained.params)
        with reduction_errors("the report of parameters without a gradient"):
            lacked = gather([int(index in self.lacked) for index in range(count)], world.group, self._planner.device)
        if world.rank == 0:
            log.warning("in step %d %s", step, describe_lacking(self._trained.names, lacked))

    def _compare(self, agreement: Agreement, world: World, now: bool) -> None:
        """Compare the replicas: all of them if it is time ``now``, else some parameters if a gradual check is under way."""
        if now:
            self._gradual = None
            self.check_replicas(world)
        elif self._gradual is not None:
            self._gradual.go_on(max(agreement.seconds), world.group, self._planner.device)
            if self._gradual.done:
                self._gradual = None

    def begin_gradual_check(self, ranks: int) -> None:
        """Compare the replicas in the next steps, some parameters in each. Every rank calls it at the same point."""
        self._gradual = GradualCheck(self._trained.names, self._trained.params) if ranks > 1 else None

    def check_replicas(self, world: World) -> None:
        """Raise Diverged, on every rank alike, if the ranks' parameters are not the same; all call it at the same point."""
        parts = [*self._planner.buckets, *((index,) for index in self._planner.sparse)]
        names = [[self._trained.names[index] for index in part] for part in parts]
        verify_replicas(names, [[self._trained.params[index] for index in part] for part in parts], world.group, self._planner.device)
