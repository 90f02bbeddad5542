"""Reduces gradients during a backward: gradients fill buckets, and full buckets are reduced while the backward goes on.

    backward_starts   the gradient of an output is computed, so the outermost backward has begun; the engine is asked to call
                      ``_graph_done`` when the backward is over
    gradient_ready    the gradient of a watched parameter is accumulated. When every watched parameter of a portion has fired as often
                      as expected, the portion's gradients are copied into the bucket, and ``grad`` becomes None
    launch_full       all portions of a bucket are copied. Buckets are launched in the order of the plan. What has come since the copy is
                      added; what has not come is zero
    _finalize         the engine is done: launch the remaining buckets, wait for all, and set every ``grad`` to its view of a bucket

To copy early is a guess about the order in which gradients come, but the result never depends on the guess. Because ``grad`` is None
while a bucket travels, a gradient that comes late (another use, a recomputation that was not seen before) lies in a tensor of its own
at the end. The control words tell every rank, and all ranks reduce these late gradients once more.

See docs/ddp.md.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastirun.progress import progress
from elastirun.train import autograd_engine
from elastirun.train.errors import OutsideForward, ReductionFailed, TrainError
from elastirun.train.groups.collectives import gather
from elastirun.train.reduction.backward import BROKEN, DONE, DRAINING, EMPTY, STARTED, BackwardTrigger, ReduceSchedule
from elastirun.train.reduction.buckets.bucket_set import BucketSet
from elastirun.train.reduction.buckets.planner import MeasuredPlan, Planner
from elastirun.train.reduction.comm_hooks import Hook
from elastirun.train.reduction.conclusion import Conclusion
from elastirun.train.reduction.control_words import FAILED, LocalReport
from elastirun.train.reduction.grad_hooks import GradHooks, Unannounced
from elastirun.train.reduction.reduction import Options, ReducerParts, Reduction, StepResult
from elastirun.train.reduction.running_stats import LayerBuffer, RunningStatistics
from elastirun.train.reduction.step_times import StepTimes, step_report
from elastirun.train.reduction.trainable_params import Trained
from elastirun.train.reduction.transports.base import Transport, advice, reduction_errors
from elastirun.train.reduction.user_hooks import Extensions, OptimizerStep
from elastirun.train.reduction.world import World
from elastirun.train.sharded import placed_as

_numbers = itertools.count()


@dataclass
class CarriedOver:
    """The part of a reducer that stays between two worlds."""

    number: int
    step: int
    schedule: ReduceSchedule
    local_report: LocalReport
    plan: MeasuredPlan | None

    def close(self) -> None:
        """Do nothing: the hooks are removed."""


class Reducer:
    """Reduces the gradients of those of the ``named`` parameters that ``needs`` says are trained over ``group``; one backward at a time."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        needs: Sequence[bool],
        sparse: Collection[str],
        process_group: dist.ProcessGroup,
        group: dist.ProcessGroup,
        transport: Transport,
        options: Options,
        statistics: Sequence[LayerBuffer],
    ) -> None:
        self.number = next(_numbers)  # modules are made in the same order on every rank, and wait for their reductions in this order
        trained = Trained(named, needs)
        self.params = trained.params
        planner = Planner(self.params, [at for at, name in enumerate(trained.names) if name in sparse], options.bucket_cap_mb)
        hooks = GradHooks(self.params, planner.sparse, options.mean_over_users)
        self.parts = ReducerParts(trained, planner, hooks, Extensions(planner.device), options)
        self.running_stats = RunningStatistics(statistics)
        self.world = self._make_world(process_group, group, transport, in_use=True)
        self.step = 0  # reductions so far
        self.schedule = ReduceSchedule()
        self.local_report = LocalReport(trained=trained.digest)
        self.times = StepTimes()  # since the last reduction
        self.last: StepResult | None = None  # of the last reduction
        self.conclusion = Conclusion(self.parts)
        self.unannounced = Unannounced()
        self._reduction: Reduction | None = None  # the one under way
        self._broken: ReductionFailed | None = None  # why the module cannot be used until set_group()
        self.completed = 0  # reductions whose gradients could be used
        self.drops_failed_steps = False  # a failed reduction ends its backward without gradients, and raises nothing: see ``elastic``
        self.expected_samples = float(self.world.size)  # of all ranks, for which gradients are scaled: those of the last step
        self._install_hooks()

    # -- between the backwards --------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make the buckets of the planner's present plan and watch their parameters. Every rank calls it at the same point.

        Until then there are no buckets, and the next reduction begins with it: so whoever changes the plan in a forward, which need not
        run on every rank, has only to say that it is outdated.
        """
        self.world.buckets.install(self.parts.extensions.words_apart)
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Put hooks on the parameters that are to be watched from now on."""
        self.parts.hooks.install(self.world.buckets.buckets, self.parts.planner.learning, self)

    def set_hook(self, hook: Hook | None, state: Any) -> None:
        """Let ``hook`` reduce the buckets, beginning with the next reduction."""
        self.parts.extensions.set_hook(hook, state)
        self.world.buckets.outdated = True

    def set_optimizer(self, step: OptimizerStep) -> None:
        """Call ``step`` with the parameters of each bucket as the bucket arrives."""
        if self.parts.extensions.optimizer_step is None:
            self.world.buckets.outdated = True
        self.parts.extensions.optimizer_step = step

    def drop_failed_steps(self) -> None:
        """Let a failed reduction end its backward without gradients. Every rank calls it: from then on, gradients are used after the words
        of their step were read."""
        self.drops_failed_steps = True
        self.conclusion.always_reads = True

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        self.parts.hooks.remove()

    def before_forward(self) -> None:
        """Raise what made the module unusable; finish what an exception interrupted."""
        if not dist.is_initialized():
            raise ReductionFailed("the process group has been destroyed: make one, and give it to the module with set_group()")
        settle()
        if self._broken is not None and not self.drops_failed_steps:
            raise self._broken

    def drop_step(self, why: ReductionFailed) -> None:
        """Let the backwards that follow end without gradients until ``set_group``: a peer was lost in a forward."""
        self._broken = why

    def find_frozen(self) -> bool:
        """Find the parameters that are trained now, and report them in the next reduction. Return whether there is any."""
        trains = self.parts.trained.find_now()
        self.local_report.trained = self.parts.trained.digest
        return trains

    def announce(self, outputs: Sequence[Tensor]) -> None:
        """Expect a backward from one of ``outputs``, or from a parameter if the engine takes that first.

        If no output has a graph (the outputs hide in some object), all backwards begin at parameters, at any of them.
        """
        if not self.expect(outputs) and not self.parts.hooks.begins_anywhere:
            self.parts.hooks.begins_anywhere = True
            self._install_hooks()

    def expect(self, outputs: Sequence[Tensor]) -> bool:
        """Expect a backward from ``outputs``. Return False if none of them has a graph: the backward begins at any parameter."""
        self.unannounced.announced = True
        return autograd_engine.before_backward(outputs, self)

    def promise(self) -> None:
        """Expect a gradient by a backward before the next forward outside of ``no_sync()``."""
        self.unannounced.promise(self.schedule.sync)

    def refuse_unreduced(self) -> None:
        """Raise OutsideForward if gradients have come without a backward: nothing has reduced them."""
        if self.world.size > 1 and self.unannounced.without_backward(self.world.buckets.buckets, self.schedule.sync):
            raise OutsideForward(
                "gradients have come without a backward, as in pipeline schedules that compute those of "
                "inputs and of weights apart (zero bubble), so they are not reduced: run the step within "
                "no_sync(), and call reduce() before that of the optimizer"
            )

    def leave(self) -> CarriedOver:
        """Return what the reducer of the next world takes over, and let go of what keeps the process groups."""
        self._broken = self._reduction = None  # the traceback of the failure leads to them
        return CarriedOver(self.number, self.step, self.schedule, self.local_report, self.parts.planner.measured(self.world.transport))

    def begin_where_others_are(self, left: CarriedOver | None) -> None:
        """Count steps from the highest number of any rank, and take the plan of the first rank whose planning is furthest.

        ``left``: of this rank's reducer in the last world. Every rank calls it before ``install``.
        """
        planner, plan = self.parts.planner, left.plan if left is not None else None
        if plan is not None and not planner.can_use(plan, self.world.transport):
            plan = None
        mine = [left.step if left is not None else 0, plan.position[0] if plan is not None else 0]
        steps, epochs = zip(*gather(mine, self.world.group, planner.device), strict=True)
        self.step = max(steps)
        if any(epochs):
            planner.continue_from(plan, self.world.group, epochs.index(max(epochs)))

    def keep_requests(self, old: Reducer | CarriedOver) -> None:
        """Do what the user has asked of ``old``, in its place."""
        self.number = old.number
        self.schedule.keep_requests(old.schedule)
        self.local_report = replace(old.local_report, status=0, trained=self.local_report.trained)

    def continue_from(self, old: Reducer) -> None:
        """Take the place of ``old``, which reduced other parameters of the same module."""
        self.keep_requests(old)
        self.schedule.backwards, self.parts.planner.held = old.schedule.backwards, old.parts.planner.held
        self.step, self.expected_samples, self.last = old.step, old.expected_samples, old.last
        self.completed = old.completed
        self.conclusion.continue_from(old.conclusion)
        self.parts.extensions.continue_from(old.parts.extensions)
        self.running_stats.continue_from(old.running_stats)

    def _make_world(self, process_group: dist.ProcessGroup, group: dist.ProcessGroup, transport: Transport, in_use: bool) -> World:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        buckets = BucketSet(self.params, self.parts.planner, transport, self.running_stats, rank, size, in_use)
        return World(process_group, group, transport, buckets, rank, size)

    def prepare_world(self, process_group: dist.ProcessGroup, group: dist.ProcessGroup, transport: Transport) -> World:
        """Return another world, with rank 0's plan and its memory. Every rank of ``group`` calls it, in any thread."""
        self.parts.planner.take_first_plan(group)
        world = self._make_world(process_group, group, transport, in_use=False)
        world.buckets.prepare(self.parts.extensions.words_apart)
        return world

    def enter_world(self, world: World) -> None:
        """Reduce in another world from now on. Every rank calls it between the same two steps."""
        self.world = world
        world.buckets.use()
        self._install_hooks()

    @property
    def position(self) -> list[float]:
        """Numbers that a new rank must know to reduce with the others from the next step on."""
        return [self.step, self.expected_samples, *self.conclusion.position, *self.parts.planner.position]

    @position.setter
    def position(self, position: Sequence[float]) -> None:
        self.step, self.expected_samples = int(position[0]), position[1]
        self.parts.extensions.compared = True  # the other ranks have done so before this one came
        numbers = [int(number) for number in position[2:]]
        self.conclusion.position, self.parts.planner.position = numbers[:2], numbers[2:]
        self._install_hooks()

    def check_replicas(self, gradually: bool) -> None:
        """Raise Diverged, on every rank alike, if the ranks' parameters are not the same; all call it at the same point.

        ``gradually``: compare some parameters in each of the next steps, not all of them now.
        """
        if gradually:
            self.conclusion.begin_gradual_check(self.world.size)
        else:
            self.conclusion.check_replicas(self.world)

    def report(self) -> dict[str, Any]:
        """Return the figures of the last step; see ``DistributedDataParallel.stats``."""
        times, told = (self.last.times, self.last.words.agreement) if self.last else (StepTimes(), None)
        return step_report(self.step, times, told, self.world.buckets.buckets, self.parts.trained.names, self.parts.planner)

    # -- during a backward ------------------------------------------------------------------------------------------

    def backward_starts(self) -> None:
        """Begin a backward, unless this is an inner one."""
        if self._broken is not None and self.drops_failed_steps:
            self._begin_dropped()
            return
        if self._reduction is not None:
            if self._reduction.phase is not STARTED or self.is_in(autograd_engine.task()):
                return
            self.end(BackwardTrigger.INTERRUPTED)  # an ``autograd.grad`` that has failed, with no forward since
        progress()  # before this rank waits for the others: a rank that never comes has made fewer steps
        self._conclude()
        reduction = self._begin(self.schedule.count(), self.local_report.weight)
        self._end_with_graph(reduction)
        if self.parts.hooks.executes_any() or autograd_engine.accumulates():
            self._accumulate(reduction)
        else:
            reduction.remember(self.params)

    def _begin(self, reduces: bool, samples: float, zero_samples: float = 0.0) -> Reduction:
        report, expected = self.local_report, self.expected_samples
        self._reduction = Reduction(self.parts, self.world, report, expected, self.times, reduces, samples, zero_samples)
        return self._reduction

    def _begin_dropped(self) -> None:
        """Begin a backward whose gradients are dropped at its end, unless this is an inner one."""
        if self._reduction is None or self._reduction.task != autograd_engine.task():
            dropped = self._begin(reduces=False, samples=0.0)
            dropped.advance(BackwardTrigger.FAILED)
            self._end_with_graph(dropped)

    def _end_with_graph(self, reduction: Reduction) -> None:
        _active.add(self)
        autograd_engine.at_the_end(partial(self._graph_done, reduction.task))

    def _accumulate(self, reduction: Reduction) -> None:
        """Be certain that this backward accumulates gradients; ``autograd.grad`` does not."""
        reduction.accumulate()
        self.unannounced.by_backward()

    def gradient_ready(self, index: int) -> None:
        """Take note of the gradient of parameter ``index``, which the engine has accumulated. It runs for each watched parameter."""
        reduction = self._reduction
        if reduction is None or reduction.phase is STARTED:
            reduction = self._first_gradient(index)
            if reduction is None:
                return
        if reduction.take_gradient(index):
            with self._broken_by_exceptions(self.step + 1):
                reduction.launch_full()

    def _first_gradient(self, index: int) -> Reduction | None:
        """Return the backward whose first gradient is that of parameter ``index``. None: a backward outside of the module's forward."""
        if self._reduction is None:
            if not (self.parts.hooks.begins_anywhere or self.unannounced.announced or index in self.parts.hooks.unused):
                self._check_unannounced(index)
                return None
            self.backward_starts()
        assert self._reduction is not None
        if self._reduction.phase is STARTED:
            self._accumulate(self._reduction)
        return self._reduction

    def _check_unannounced(self, index: int) -> None:
        """Raise OutsideForward if the gradients of parameter ``index`` come only from backwards without a forward, over and over.

        Such a backward may be that of a penalty, which is the same on every rank. Twice in a row is a penalty after a step and one
        before the next.
        """
        self.unannounced.accept()
        elsewhere = any(one.parts.trained.holds(self.params[index]) for one in _in_task(autograd_engine.task()))
        grad = self.params[index].grad
        if not self.schedule.sync or elsewhere or grad is None:
            return
        if self.unannounced.zeroed(index, grad) == 2:
            raise OutsideForward(
                f"for the third time a gradient of {self.parts.trained.names[index]} comes only from a backward that did not begin "
                "at an output of the module's forward, so it is not reduced: call the wrapped module, not .module; or run the backward "
                "within no_sync() if the gradient is meant to stay local"
            )

    # -- the end of a backward --------------------------------------------------------------------------------------

    def _graph_done(self, task: int) -> None:
        """End all backwards of the engine's run ``task``. The engine calls it at the end of the run, and holds this reducer until then.

        In which order the modules of one run began depends on the graph, which may differ between ranks.
        """
        for reducer in _in_task(task):
            reducer.end(BackwardTrigger.GRAPH_DONE)

    def end(self, trigger: BackwardTrigger) -> None:
        """End the backward that the engine has left; reduce what it has accumulated, if it reduces."""
        reduction = self._reduction
        assert reduction is not None
        _active.discard(self)
        if trigger is BackwardTrigger.GRAPH_DONE:
            reduction.stop()
        if reduction.phase is BROKEN and self._broken is not None:
            if self.drops_failed_steps:
                self.parts.trained.drop_gradients()  # those that have come since
                self._reduction = None
                return
            raise self._broken
        # Not after an exception: the script may have changed the gradients by now, such as by zero_grad().
        may_tell = reduction.phase is STARTED and trigger is BackwardTrigger.GRAPH_DONE
        if may_tell and reduction.has_accumulated(self.params):
            self._accumulate(reduction)
        phase = reduction.advance(trigger)
        if phase is EMPTY:
            self.schedule.backwards -= 1  # this one has accumulated nothing
        if phase is EMPTY or phase is DONE:
            self._reduction = None
            return
        if phase is DRAINING:
            self.local_report.status |= FAILED
            reduction.samples = 0.0  # takes part without data
        self._finalize(reduction)

    def skip(self, zero_samples: float = 0.0) -> None:
        """Take part in a reduction without gradients. ``zero_samples``: the number of samples that count as gradients of zero."""
        self._reduce_now(0.0, zero_samples)

    def reduce(self) -> None:
        """Reduce the gradients that are there."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.parts.hooks.seen.add(index)
                param.grad = placed_as(param, param.grad)
        self._reduce_now(self.local_report.weight)

    def _reduce_now(self, samples: float, zero_samples: float = 0.0) -> None:
        """Reduce without a backward."""
        if self._broken is not None and self.drops_failed_steps:
            self.parts.trained.drop_gradients()
            return
        self._conclude()
        reduction = self._begin(True, samples, zero_samples)
        reduction.advance(BackwardTrigger.NO_BACKWARD)
        self._finalize(reduction)

    def _finalize(self, reduction: Reduction) -> None:
        """Reduce what is not reduced yet and wait for all of it; the gradients are there when this returns."""
        begun, drained = time.perf_counter(), reduction.phase is DRAINING
        # Whether the ranks tell each other that their reductions are whole, because NCCL does not say so.
        confirms = self.drops_failed_steps and self.parts.planner.device.type == "cuda"
        with self._broken_by_exceptions(self.step + 1):
            self._install_new_plan()
            with torch.no_grad():
                self.last, outcome = reduction.reduce(self.step + 1, self.conclusion.defers, confirms)
                self.step += 1
                if self.parts.hooks.note_unused(outcome.unused):
                    self._install_hooks()
                reduction.set_gradients(outcome, confirms)
            self.expected_samples = outcome.samples
            self.times.exposed = time.perf_counter() - begun
            self.times = StepTimes()
            self.local_report.clear()
            self.unannounced.clear()
            reduction.finish()
            self._reduction = None
        if self._broken is not None:
            self._reduction = None  # further backwards of a dropped step begin anew
        elif not self.conclusion.defers:
            self._conclude(drained)
        self.completed += self._broken is None

    def _install_new_plan(self) -> None:
        """Install the new plan, if there is one. All ranks call this before the first bucket of the same reduction."""
        self.parts.extensions.verify_same(self.world.group)
        if self.world.buckets.outdated:
            with reduction_errors("the memory of a new plan"):
                self.install()

    @contextmanager
    def _broken_by_exceptions(self, step: int, raised_by_all: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Mark the module broken until set_group() if an exception ends the block: this rank has missed a part of what the others do.

        An error in ``raised_by_all`` ends the block at the same point on every rank and breaks nothing, unless a peer is gone. With
        ``drops_failed_steps`` a ReductionFailed is not raised.
        """
        try:
            yield
        except BaseException as what:
            if isinstance(what, ReductionFailed):
                self._broken = what
            elif not isinstance(what, raised_by_all):
                self._broken = ReductionFailed(f"the reduction of step {step} was interrupted by {type(what).__name__}. {advice()}")
            if self._reduction is not None:
                self._reduction.advance(BackwardTrigger.FAILED)
            if not (self.drops_failed_steps and isinstance(what, ReductionFailed)):
                raise
            self.parts.trained.drop_gradients()

    def _conclude(self, drained: bool = False) -> None:
        """Act upon the control words of the last reduction, once for each; on a GPU a step later. ``drained``: see ``Conclusion``."""
        if self.last is None:
            return
        with self._broken_by_exceptions(self.last.words.step, raised_by_all=(TrainError,)):
            if self.conclusion.conclude(self.last, self.world, self.expected_samples, drained):
                self._install_hooks()

    # -- a backward that an exception has ended ---------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether an exception has ended a backward of which the others wait for a part."""
        return self._reduction is not None and not autograd_engine.running()

    @property
    def broken(self) -> bool:
        """Whether the module cannot be used until set_group()."""
        return self._broken is not None

    def is_in(self, task: int) -> bool:
        """Return whether the backward under way is a part of the engine's run ``task``."""
        return self._reduction is not None and self._reduction.task == task


_active: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those whose backward has begun and not ended


def _in_task(task: int) -> list[Reducer]:
    """Return the reducers whose backward is a part of the engine's run ``task``, in the order in which they end on every rank."""
    return sorted((reducer for reducer in _active if reducer.is_in(task)), key=lambda one: one.number)


def settle() -> None:
    """Finish the backwards of all modules that an exception interrupted.

    It comes before anything else that all ranks do: the other ranks wait for it, or will. Where it fails, the module raises the error
    when it is used again.
    """
    if _active:
        for reducer in sorted((one for one in _active if one.interrupted and not one.broken), key=lambda one: one.number):
            with suppress(ReductionFailed):
                reducer.end(BackwardTrigger.INTERRUPTED)
