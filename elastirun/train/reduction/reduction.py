"""One backward and the reduction of its gradients: made when the backward begins, thrown away at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.profiler import record_function

from elastirun.train.groups.collectives import all_reduce
from elastirun.train.groups.waits import confirm
from elastirun.train.reduction.backward import COLLECTING, Backward, BackwardTrigger
from elastirun.train.reduction.buckets.memory import Bucket
from elastirun.train.reduction.buckets.planner import Planner
from elastirun.train.reduction.control_words import NOT_FINITE, Agreement, LocalReport, PendingAgreement
from elastirun.train.reduction.grad_hooks import GradHooks
from elastirun.train.reduction.step_times import StepTimes
from elastirun.train.reduction.trainable_params import Trained
from elastirun.train.reduction.transports.base import reduction_errors
from elastirun.train.reduction.user_hooks import Extensions
from elastirun.train.reduction.world import World
from elastirun.train.sharded import local_part, with_part


@dataclass(frozen=True)
class Options:
    """The options of a reduction; the same on every rank. See ``DistributedDataParallel``."""

    bucket_cap_mb: float | None = None
    mean_over_users: bool = False
    check_finite: bool = False
    check_replicas_every: int = 1000
    transport: str = "auto"


@dataclass(frozen=True)
class ReducerParts:
    """The parts of a reducer that all its reductions use."""

    trained: Trained
    planner: Planner
    hooks: GradHooks
    extensions: Extensions
    options: Options


@dataclass(frozen=True)
class StepResult:
    """Results of one reduction. ``deferred``: its gradients are used before its ``words`` are read."""

    words: PendingAgreement
    deferred: bool
    lacked: set[int]  # parameters without a gradient on this rank
    times: StepTimes


@dataclass(frozen=True)
class ReductionOutcome:
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


class Reduction(Backward):
    """A backward, and the reduction of its gradients if it ``reduces``.

    ``samples``: the weight of this rank's gradients; 0 without data. ``zero_samples``: samples of this rank that count as gradients of
    zero. ``expected_samples``: those of all ranks, for which gradients are scaled. ``times``: those since the last reduction.
    """

    def __init__(
        self,
        parts: ReducerParts,
        world: World,
        report: LocalReport,
        expected_samples: float,
        times: StepTimes,
        reduces: bool,
        samples: float,
        zero_samples: float = 0.0,
    ) -> None:
        super().__init__(reduces)
        self._parts, self._world, self._report, self._expected_samples = parts, world, report, expected_samples
        self.samples, self._zero_samples = samples, zero_samples
        self._left = parts.hooks.expected.copy()  # by parameter: how often it is still expected to fire
        self._launched = 0  # buckets
        self._late: list[int] = []  # launched buckets that a gradient came too late for
        self._lacked: set[int] = set()
        self._times, self._begun = times, time.perf_counter()
        if reduces:
            world.buckets.reset()

    # -- during the backward ----------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        super().accumulate()
        if self.reduces:
            self._world.buckets.release_outdated()

    def take_gradient(self, index: int) -> bool:
        """Take the gradient of parameter ``index``, which the engine has accumulated. Return whether a bucket is full now."""
        self._parts.hooks.seen.add(index)
        if self.phase is not COLLECTING or index in self._parts.hooks.start_only:
            return False
        if self._parts.planner.learning:
            self._parts.planner.note(index, time.perf_counter() - self._begun)
        left, home = self._left, self._world.buckets.home
        left[index] -= 1
        if left[index] or index not in home:
            return False
        bucket, portion = home[index]
        portion.pending -= 1
        if portion.pending:
            return False
        if self.samples:
            with torch.no_grad():
                portion.gather(self._scale(self._averages))
        bucket.pending -= 1
        return bucket.pending == 0

    def launch_full(self) -> None:
        """Launch full buckets in their order. The last one waits for the end of the backward, because it carries the control words."""
        buckets = self._world.buckets.buckets
        if not self._parts.extensions.one_by_one:
            while self._launched < len(buckets) - 1 and buckets[self._launched].pending == 0:
                self._launch()

    def _launch(self) -> Bucket:
        """Begin the reduction of the next bucket and return the bucket."""
        index, memory, extensions = self._launched, self._world.buckets, self._parts.extensions
        bucket, last = memory.buckets[index], index == len(memory.buckets) - 1
        self._launched += 1
        with torch.no_grad(), record_function(bucket.label):
            bucket.gather(self._scale(self._averages))
            if self._parts.options.check_finite and not bool(torch.isfinite(bucket.flat).all()):
                self._report.status |= NOT_FINITE
            if last and not memory.words_apart:
                self._write_words()
            bucket.work = extensions.reduce(index, bucket, last) if extensions.hooked else memory.reduce(index)
        self._times.launches.append(time.perf_counter() - self._begun)
        return bucket

    @property
    def _averages(self) -> bool:
        """Whether what reduces a bucket, the transport or a hook, makes the mean and not the sum."""
        return self._world.transport.averages or self._parts.extensions.hooked

    def _scale(self, mean: bool) -> float:
        """Return the factor of gradients before they are added up (``mean``: averaged) over the ranks."""
        return self.samples * (self._world.size if mean else 1) / (self._expected_samples * self._report.backwards)

    def _write_words(self) -> None:
        """Write the control words, when all gradients are gathered."""
        hooks, options, params = self._parts.hooks, self._parts.options, self._parts.trained.params
        sparse = [params[index].grad for index in self._parts.planner.sparse]
        if options.check_finite and self.samples:
            values = [grad.coalesce().values() if grad.is_sparse else grad for grad in sparse if grad is not None]
            if not all(torch.isfinite(value).all() for value in values):
                self._report.status |= NOT_FINITE
        lacking = {bucket.indices[at] for bucket in self._world.buckets.buckets for at in bucket.lacking}
        if hooks.all_watched and options.mean_over_users:
            lacking = set(range(len(params))) - hooks.seen
        lacking.update(index for index, grad in zip(self._parts.planner.sparse, sparse, strict=True) if grad is None)
        self._lacked = lacking if self.samples else set()
        seconds, zeros = self._times.busy, self._zero_samples
        self._world.buckets.write_words(self._report, self.samples, zeros, seconds, self._late, sorted(lacking))

    # -- at its end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Note that the engine is done."""
        self._times.backward += time.perf_counter() - self._begun

    def reduce(self, step: int, defers: bool, confirms: bool) -> tuple[StepResult, ReductionOutcome]:
        """Launch what is not launched yet; return what is known when the words of ``step`` have come.

        ``defers``: the words are read later, unless this rank wants to read them. ``confirms``: the ranks tell each other that their
        reductions are whole, because NCCL does not say so.
        """
        memory = self._world.buckets
        self._late = [index for index in range(self._launched) if memory.buckets[index].has_late()]
        while self._launched < len(memory.buckets):
            bucket = self._launch()
            if self._parts.extensions.one_by_one:
                self._wait(bucket)
        if memory.words_apart:
            self._write_words()
            memory.reduce(len(memory.buckets)).wait()
        if confirms or not memory.words_apart:
            for bucket in memory.buckets:
                self._wait(bucket)
        if confirms:
            self._confirm()
        words = memory.read_words(step)
        wants = self._report.reads_first or any(bucket.lacking for bucket in memory.buckets)
        agreed = None if defers and not wants else words.agreement
        read_by_all = agreed is not None and (not defers or agreed.looking == self._world.size)
        common = agreed if agreed is not None and read_by_all and len(set(agreed.trained)) == 1 else None
        count, over_users = len(self._parts.trained.params), self._parts.options.mean_over_users
        outcome = ReductionOutcome(agreed, common, self._expected_samples, count, over_users)
        return StepResult(words, defers, self._lacked, self._times), outcome

    def set_gradients(self, outcome: ReductionOutcome, confirms: bool) -> None:
        """Wait for the buckets and set the gradients; reduce those that have no bucket."""
        for index, bucket in enumerate(self._world.buckets.buckets):
            self._wait(bucket)
            self._set(bucket, outcome, index in outcome.late)
        self._reduce_sparse(outcome)
        unfrozen = self._parts.trained.unfrozen(outcome.agreed.trained) if outcome.agreed else ()
        if unfrozen:
            self._reduce_unfrozen(unfrozen, outcome)
        if confirms and (unfrozen or outcome.late or self._parts.planner.sparse):
            self._confirm()
        self._world.buckets.receive_statistics()

    def _wait(self, bucket: Bucket) -> None:
        """Wait until ``bucket`` has arrived."""
        if bucket.work is not None:
            with record_function("elastirun: wait"):
                bucket.work.wait()
            bucket.work = None
            self._times.ready.append(time.perf_counter() - self._begun)

    def _confirm(self) -> None:
        """Wait until all ranks have found their reductions whole."""
        with reduction_errors("the confirmation of the step"):
            confirm(self._world.group, self._parts.planner.device)

    def _set(self, bucket: Bucket, outcome: ReductionOutcome, late: bool) -> None:
        """Make the values of ``bucket``, which has arrived, the gradients of its parameters. ``late``: some came after the launch."""
        if late:
            extra = bucket.gather_late(self._scale(mean=False))
            with reduction_errors("the reduction of late gradients"):
                all_reduce(extra, self._world.group)
            bucket.flat.add_(extra)
        if outcome.correction != 1.0:
            bucket.flat.mul_(outcome.correction)
        bucket.set_gradients(outcome.users)
        if outcome.agreed and outcome.users and outcome.mean_over_users:
            bucket.rescale_to_users(outcome.users, outcome.agreed.with_data)
        self._optimize(bucket.params, outcome)

    def _reduce_sparse(self, outcome: ReductionOutcome) -> None:
        """Replace sparse gradients by their means. gloo can add such tensors up."""
        users = outcome.users if outcome.common else None
        for index in self._parts.planner.sparse:
            param = self._parts.trained.params[index]
            if users is None or users[index]:
                factor = outcome.correction if users is None else outcome.factor(users[index])
                self._reduce_one_sparse(param, self._scale(mean=False) * factor)
            self._optimize([param], outcome)

    def _reduce_one_sparse(self, param: nn.Parameter, scale: float) -> None:
        """Replace a sparse gradient by its sum over the ranks, times ``scale``."""
        with reduction_errors("the reduction of a sparse gradient"):
            # 0 * NaN is NaN, so a rank with weight 0 sends zeros instead of its gradient.
            grad = param.grad if param.grad is not None and scale else torch.zeros_like(param).to_sparse(1)
            total = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce() * scale
            all_reduce(total, self._world.group)
            param.grad = total

    def _reduce_unfrozen(self, params: Sequence[nn.Parameter], outcome: ReductionOutcome) -> None:
        """Reduce the gradients of ``params``, which are trained since this step and have no place in a bucket yet."""
        group, scale = self._world.group, self._scale(mean=False)
        with reduction_errors("the reduction of parameters that are trained from now on"):
            had = torch.tensor([param.grad is not None and scale > 0 for param in params], dtype=torch.float32, device="cpu")
            users = had.to(self._parts.planner.device)
            all_reduce(users, group)
            for param, mine, theirs in zip(params, had.tolist(), users.tolist(), strict=True):
                before = param.grad if mine else None
                grad = torch.zeros_like(local_part(param)) if before is None else local_part(before)
                total = (grad.to_dense() if grad.is_sparse else grad).detach() * scale
                all_reduce(total, group)
                param.grad = with_part(param, total.mul_(outcome.factor(theirs))) if theirs else None
        self._optimize(params, outcome)

    def _optimize(self, params: Sequence[nn.Parameter], outcome: ReductionOutcome) -> None:
        """Step the optimizer that steps in the backward, if there is one."""
        if self._parts.extensions.optimizer_step is not None and not outcome.failed:
            self._parts.extensions.optimizer_step(params)

    def finish(self) -> None:
        """Enter the last phase; tell the hooks how often parameters have fired."""
        hooks = self._parts.hooks
        if hooks.all_watched or self._late:
            hooks.count(self._left)
        hooks.seen.clear()
        self.advance(BackwardTrigger.REDUCED)
