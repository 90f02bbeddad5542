"""Reduces gradients during a backward: they fill buckets, full buckets are reduced while the backward goes on.

    begin     an output's gradient is computed: the outermost backward has begun; ask the engine to call ``_end`` when it is over
    fired     a watched parameter's gradient is accumulated; when all that a portion of a bucket watches have fired as often as they are
              known to, the portion takes its gradients: copies them into the bucket and sets ``grad`` to None
    launch    when all portions are taken, in plan order; what has come since is added, what has not come is zero
    finish    launch what is left, wait for all, set every ``grad`` to its view

Taking early is a guess about the order in which gradients come; that the result is right never depends on it. Because ``grad`` is None
while a bucket travels, a gradient that comes after all (another use, a recomputation nobody had seen before) lies in a tensor of its own
at the end. Every rank is told by the control words, and all reduce these late ones once more.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from . import autograd_engine
from .bucket_memory import Bucket, Portion, Storage, reduce_sparse
from .collectives import gather, ranks, verify_same
from .comm_hooks import GradBucket, Hook, HookWork
from .control_words import FAILED, NOT_FINITE, Agreement, ControlWords, Reading, Said
from .errors import OutsideForward, ReductionFailed, TrainError
from .planner import Planner
from .replica_check import check
from .running_stats import Place, RunningStatistics
from .step_times import StepTimes, lacking
from .trained import Trained
from .transports.base import AGAIN, Arena, Transport, reduction

log = logging.getLogger("elastirun.train")

UNKNOWN = 1 << 60  # how often a parameter fires, before the first backward

_numbers = itertools.count()
_under_way: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those whose backward has begun


@dataclass(frozen=True)
class Options:
    """How gradients are reduced; the same on every rank. See ``DistributedDataParallel``."""

    bucket_cap_mb: float | None = None
    mean_over_users: bool = False
    check_finite: bool = False
    check_replicas_every: int = 1000


class Reducer:
    """Reduces the gradients of those of the ``named`` parameters that ``needs`` says are trained over ``group``; one backward at a time."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        needs: Sequence[bool],
        sparse: Collection[str],
        group: dist.ProcessGroup,
        transport: Transport,
        options: Options,
        statistics: Sequence[Place] = (),
        step: int = 0,
    ) -> None:
        self.number = next(_numbers)  # modules are made in the same order on every rank, and so wait for their reductions in it
        self.trained = Trained(named, needs)
        self.names, self.params = [name for name, _ in self.trained.pairs], [param for _, param in self.trained.pairs]
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.sync, self.every = True, 1  # reduce at all; in every n-th backward
        self.said = Said(trained=self.trained.digest)
        self.reading: Reading | None = None  # of the last reduction's control words
        self.times, self.last_times = StepTimes(), StepTimes()
        self._optimizer_step: Callable[[Sequence[nn.Parameter]], None] | None = None
        self._group, self._transport, self._options = group, transport, options
        self._hook: tuple[Hook, Any] | None = None
        self._broken: ReductionFailed | None = None
        self.running = RunningStatistics(statistics, self.rank == 0)
        self._nodes = [autograd_engine.accumulator(param) for param in self.params]
        self._sparse = sorted(index for index, name in enumerate(self.names) if name in sparse)
        self._handles: dict[int, Any] = {}  # by parameter: the hooks that tell of its gradient
        self._samples = 1.0  # of this rank, in the reduction under way
        self._zeros = 0.0  # beside these: samples whose gradients are zero (``skip``)
        self._total = float(self.world)  # samples of all ranks that gradients are scaled for: those of the last step
        self.step, self.backwards = step, 0
        self.lazy = self.params[0].is_cuda
        self.looks = False  # reads the words in each step all the same; the same on every rank
        self._unread = False  # the last step was used before its words were read
        self._compared = False  # the ranks' hooks and optimizers, before the first reduction
        self._concluded = 0
        self._reported = False
        self._lacked: set[int] = set()  # parameters without a gradient in the last reduction
        self._unused: set[int] = set()  # parameters without a gradient on any rank in the last reduction
        self._noticed: set[int] = set()  # … in any so far
        self._extra: set[int] = set()  # watched for that alone
        self._outside: dict[int, tuple[int, int]] = {}  # gradients without a forward since the last reduction: version, how often zeroed
        self._expects = False  # there was a forward since the last reduction
        self._anywhere = self._begun = self._reducing = self._certain = self._draining = self._outdated = False
        self._versions: list[Any] | None = None
        self._seen: set[int] = set()  # parameters that have fired since the last reduction, where all are watched
        self._expected = [UNKNOWN] * len(self.params)
        self._left = self._expected.copy()  # ... it is still to fire in this backward
        self._fired = [0] * len(self.params)  # how often it did in the last reduction
        self.buckets: list[Bucket] = []
        self._arena: Arena | None = None  # where they lie
        self.planner = Planner(self.params, self._sparse, options.bucket_cap_mb, group, transport)
        self._outdated = True
        self._let_go()
        self._watch()
        self._rewind()

    # -- the plan in memory ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make the buckets of the planner's present plan and watch their parameters. Every rank calls it at the same point.

        Until then there are no buckets, and the next reduction begins with it: so whoever changes the plan in a forward, which need not
        run on every rank, has only to say that it is outdated.
        """
        plan = self.planner.buckets
        words = ControlWords(self.rank, self.world, len(plan), len(self.params))
        grads = self.planner.gradients
        storages = [Storage(sum(grads[i].numel for i in bucket), grads[bucket[0]].dtype, grads[bucket[0]].device) for bucket in plan]
        # The words need float32 and may not be compressed; where they must be known before the last gradients, they travel alone, too.
        self._apart = self._hook is not None or self._optimizer_step is not None or not plan or storages[-1].dtype != torch.float32
        extra = words.size + self.running.numel
        if self._apart:
            sizes = [*storages, Storage(extra, torch.float32, self.planner.device)]
        else:
            sizes = [*storages[:-1], Storage(storages[-1].numel + extra, torch.float32, storages[-1].device)]
        self._let_go()
        self._arena = self._transport.allocate(sizes)
        self._words, self._tail = words, self._arena.buffers[-1][-extra:]
        self.running.lay(self._tail[words.size :])
        self.buckets = [
            Bucket(f"elastirun: bucket {at}", plan[at], [self.params[i] for i in plan[at]], self._arena.buffers[at][: storage.numel])
            for at, storage in enumerate(storages)
        ]
        self._home = {index: (bucket, part) for bucket in self.buckets for part in bucket.portions for index in part.indices}
        self._outdated = False
        self._watch()
        self._rewind()

    def _let_go(self) -> None:
        """Give up the memory of the present plan; what gradients lie in it is theirs as long as they live."""
        self.buckets, self._home, self._arena = [], {}, None
        self._tail = torch.empty(0, device="cpu")
        self.running.lay(torch.empty(self.running.numel, device="cpu"))

    def _make_room(self) -> None:
        """Free the memory of the old plan in a reducing backward that follows a new plan: most of its gradients are gone by then.

        Nothing is launched before its end, where the new plan is installed: all ranks have to come there, and within a backward other
        modules may be in the way.
        """
        if self._outdated and self.buckets:
            self._let_go()

    def _renew(self) -> None:
        """Install the new plan, if there is one. Every rank comes here before the first bucket of the same reduction."""
        if not self._compared:
            self._compare()
        if self._outdated:
            left = self._left
            with reduction("the memory of a new plan"):
                self.install()
            self._left = left

    def _compare(self) -> None:
        """Raise ModelMismatch, on every rank alike, unless all have a communication hook or none, and all step in the backward or none:
        it decides what travels where. Once, in the first reduction: who registers one later has to do so on every rank."""
        lines = [
            f"{'no' if self._hook is None else 'a'} communication hook",
            f"{'no' if self._optimizer_step is None else 'an'} optimizer that steps in the backward",
        ]
        with reduction("comparing hooks and optimizers"):
            verify_same(lines, "extensions", self._group, self.planner.device)
        self._compared = True

    def _watch(self) -> None:
        """A hook on every parameter while the order is learnt; later, on the last of each portion: a hook costs a microsecond."""
        self._all_watched = self.planner.learning or self._options.mean_over_users or self.planner.surprised or self._anywhere
        wanted = set(self._sparse if self.buckets else range(len(self.params)))
        for bucket in self.buckets:
            for portion in bucket.portions:
                watched = portion.indices if self._all_watched else portion.indices[-1:]
                portion.watched = len(watched)
                wanted.update(watched)
        self._extra = self._noticed - wanted
        wanted |= self._extra
        for index in self._handles.keys() - wanted:
            self._handles.pop(index).remove()
        for index in wanted - self._handles.keys():
            self._handles[index] = autograd_engine.after_accumulation(self._nodes[index], self, index)

    def _reset(self) -> None:
        """Ready for the next backward."""
        self._begun = self._reducing = False
        _under_way.discard(self)
        self._rewind()

    def _rewind(self) -> None:
        """Nothing of this backward has come yet."""
        self._next = 0
        self._left = self._expected.copy()
        for bucket in self.buckets:
            bucket.reset()

    def set_hook(self, hook: Hook | None, state: Any) -> None:
        self._hook = None if hook is None else (hook, state)
        self._outdated = True

    def set_optimizer(self, step: Callable[[Sequence[nn.Parameter]], None]) -> None:
        self._outdated = self._outdated or self._optimizer_step is None
        self._optimizer_step = step

    def close(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    # -- during the backward --------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Raise what made the module unusable; finish what an exception interrupted."""
        if not dist.is_initialized():
            raise ReductionFailed("the process group has been destroyed: make one, and give it to the module with set_group()")
        settle()
        if self._broken is not None:
            raise self._broken

    def look_at_frozen(self) -> bool:
        """Say in the next reduction which parameters are trained now; return whether any is."""
        trains = self.trained.look()
        self.said.trained = self.trained.digest
        return trains

    def announce(self, outputs: Sequence[Tensor]) -> None:
        """A backward may begin: at one of ``outputs``, or, if the engine takes it first, at a parameter. If there is no output with a graph
        (they hide in some object), all backwards begin at parameters, at any of them."""
        self._expects = True
        if not autograd_engine.before_backward(outputs, self) and not self._anywhere:
            self._anywhere = True
            self._watch()
            self._rewind()

    def expect(self, outputs: Sequence[Tensor]) -> None:
        """A backward will begin at ``outputs``; if there are none, at any parameter."""
        self._expects = True
        autograd_engine.before_backward(outputs, self)

    @property
    def interrupted(self) -> bool:
        """Has an exception ended a backward of which the others wait for a part?"""
        return self._begun and not autograd_engine.running()

    def will_reduce(self) -> bool:
        """Does the next backward reduce?"""
        return self.sync and (self.backwards + 1) % self.every == 0

    def begin(self) -> None:
        """The outermost backward has begun."""
        if self._begun:
            return
        self.conclude()
        self._begun = True
        self._task = autograd_engine.task()
        _under_way.add(self)
        autograd_engine.at_the_end(self._end)
        self._certain = any(map(autograd_engine.executes, self._nodes)) or autograd_engine.accumulates()
        self._versions = None if self._certain else [param.grad is not None and param.grad._version for param in self.params]
        self.backwards += 1
        self._reducing = self.sync and self.backwards % self.every == 0
        self._samples = self.said.samples
        if self._reducing and self._certain:
            self._make_room()
        self.times.begin()

    def fired(self, index: int) -> None:
        """The gradient of parameter ``index`` has been accumulated."""
        if not self._begun:
            if not (self._anywhere or self._expects or index in self._unused):
                self._unannounced(index)
                return
            self.begin()
            self._certain = True
        self._seen.add(index)
        if not self._reducing or index in self._extra:
            return
        self._make_room()
        self._left[index] -= 1
        if self.planner.learning:
            self.planner.note(index, time.perf_counter() - self.times.begun)
        if self._left[index] == 0 and index in self._home:
            bucket, portion = self._home[index]
            portion.pending -= 1
            if portion.pending == 0:
                self._take(bucket, portion)

    def _take(self, bucket: Bucket, portion: Portion) -> None:
        if self._samples:
            with torch.no_grad():
                portion.take(self._scale(self._averages))
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch_full()

    def _unannounced(self, index: int) -> None:
        """A gradient came from a backward without a forward: one of a penalty, which is the same on every rank; unless there is nothing
        else, over and over. Twice in a row is a penalty after a step and one before the next."""
        elsewhere = any(one.trained.holds(self.params[index]) for one in _under_way if one._task == autograd_engine.task())
        grad = self.params[index].grad
        if not self.sync or elsewhere or grad is None:
            return
        before, zeroed = self._outside.get(index, (grad._version - 1, 0))
        zeroed += grad._version != before + 1
        self._outside[index] = grad._version, zeroed
        if zeroed == 2:
            raise OutsideForward(
                f"for the third time a gradient of {self.names[index]} comes only from a backward that did not begin at an output of the "
                "module's forward, so it is not reduced: call the wrapped module, not .module; or run the backward within no_sync() if the "
                "gradient is meant to stay local"
            )

    def _launch_full(self) -> None:
        """Launch the buckets that are full, in order; the last waits for the end of the backward, it carries the control words."""
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].pending == 0 and not self._one_by_one:
            with self._or_broken(self.step + 1):
                self._launch(self._next)

    @property
    def _one_by_one(self) -> bool:
        """Is a bucket launched only when the backward is over and the one before has arrived?

        A hook of several collectives starts the second when the first is done. On CPUs that happens in threads, so that those of two
        buckets, or of a bucket and something else in the hook's group, would begin in another order on each rank.
        """
        return self._hook is not None and self.planner.device.type == "cpu"

    def _launch(self, index: int, late: Sequence[int] = ()) -> None:
        bucket, last = self.buckets[index], index == len(self.buckets) - 1
        self._next = index + 1
        with torch.no_grad(), record_function(bucket.label):
            bucket.take(self._scale(self._averages))
            if self._options.check_finite and not bool(torch.isfinite(bucket.flat).all()):
                self.said.status |= NOT_FINITE
            if last and not self._apart:
                self._write(late)
            if self._hook is None:
                assert self._arena is not None
                bucket.work = self._arena.all_reduce(index)
            else:
                hook, state = self._hook
                future = hook(state, GradBucket(index, bucket.flat, bucket.views, bucket.params, last))
                bucket.work = HookWork(future, bucket.flat, f"the communication hook of bucket {index}")
        self.times.launched()

    @property
    def _averages(self) -> bool:
        """Does what a bucket is given to, the transport or a hook, make the mean and not the sum?"""
        return self._transport.averages or self._hook is not None

    def _scale(self, mean: bool) -> float:
        """What gradients are multiplied with before they are added up (``mean``: averaged) over the ranks."""
        return self._samples * (self.world if mean else 1) / self._total

    def _write(self, late: Sequence[int]) -> None:
        sparse = [grad for index in self._sparse if (grad := self.params[index].grad) is not None and self._samples]
        if self._options.check_finite and not all(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all() for g in sparse):
            self.said.status |= NOT_FINITE
        lacking = [bucket.indices[at] for bucket in self.buckets for at in bucket.lacking]
        if self._all_watched and self._options.mean_over_users:
            lacking = [index for index in range(len(self.params)) if index not in self._seen]
        lacking += [index for index in self._sparse if self.params[index].grad is None]
        self._lacked = set(lacking) if self._samples else set()
        self._words.write(self._tail[: self._words.size], self.said, self._samples, self.times.busy, late, sorted(set(lacking)))
        if self._zeros:
            self._tail[0] += self._zeros
        self.running.write()

    # -- its end --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The engine's callback at the end of the outermost backward: finish all reductions in it, in the same order on every rank.

        In which order the modules of one backward began depends on the graph, which may differ between ranks.
        """
        for reducer in sorted((one for one in _under_way if one._task == self._task), key=lambda one: one.number):
            reducer._end_of_own()

    def _end_of_own(self) -> None:
        _under_way.discard(self)
        self.times.backward += time.perf_counter() - self.times.begun
        touched = self._touched()
        if self._reducing and touched:
            self.finish()
        else:
            self.backwards -= not touched
            self._reset()

    def _touched(self) -> bool:
        """Was a gradient accumulated at all? (Not by ``autograd.grad``, whose backward begins at the outputs just as well.)"""
        if self._certain or self._versions is None or self._left != self._expected:
            return True
        return self._versions != [param.grad is not None and param.grad._version for param in self.params]

    def skip(self, weight: float = 0.0) -> None:
        """Take part in a reduction without gradients of one's own; ``weight`` is the number of samples that count as gradients of zero."""
        self.conclude()
        self._samples, self._zeros = 0.0, weight
        self.times.begin()
        try:
            self.finish()
        finally:
            self._zeros = 0.0

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for all of it; the gradients are there when this returns."""
        begun = time.perf_counter()
        with self._or_broken(self.step + 1):
            self._renew()
            with torch.no_grad():
                late = [index for index in range(self._next) if self.buckets[index].has_late()]
                for index in range(self._next, len(self.buckets)):
                    self._launch(index, late)
                    if self._one_by_one:
                        self._wait(self.buckets[index])
                self._arrive(late)
            self.times.exposed = time.perf_counter() - begun
            self.last_times, self.times = self.times, StepTimes()
            self.said.requests, self.said.status = set(), 0
            self._expects = False
            self._outside.clear()
            if self._all_watched or late:
                self._fired = [expected - left for expected, left in zip(self._expected, self._left, strict=True)]
            self._seen.clear()
            self._reset()
        if not self._lazy:
            self.conclude()

    @contextmanager
    def _or_broken(self, step: int, raised_by_all: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Mark the module broken until set_group() if an exception ends the block: this rank has missed a part of what the others do.

        An error in ``raised_by_all`` ends the block at the same point on every rank and breaks nothing, unless a peer is gone.
        """
        try:
            yield
        except BaseException as what:
            if isinstance(what, ReductionFailed):
                self._broken = what
            elif not isinstance(what, raised_by_all):
                self._broken = ReductionFailed(f"the reduction of step {step} was interrupted by {type(what).__name__}. {AGAIN}")
            raise

    def _arrive(self, late: Sequence[int]) -> None:
        """Wait for the buckets and set the gradients."""
        if self._apart:
            assert self._arena is not None
            self._write(late)
            self._arena.all_reduce(len(self.buckets)).wait()
        else:
            for bucket in self.buckets:
                self._wait(bucket)
        self.step += 1
        self.reading = Reading(
            self._words, self._tail[: self._words.size], self.step, float(self.world) if self._transport.averages else 1.0
        )
        lacking = any(bucket.lacking for bucket in self.buckets)
        self._unread = self._lazy
        agreed = None if self._unread and not (lacking or self.said.looks) else self.reading.agreement
        # Not what this rank alone has read decides what all ranks do, nor a factor that has to be the same on all.
        common = agreed if agreed and self._is_common(agreed) else None
        late = common.late if common else ()
        correction = self._total / common.samples if common and common.samples else 1.0
        users = agreed.users or (None if agreed.with_data else [0] * len(self.params)) if agreed else None
        self._notice([index for index, count in enumerate(agreed.users) if not count] if agreed and agreed.with_data else ())
        for index, bucket in enumerate(self.buckets):
            self._wait(bucket)
            if index in late:
                self._add_late(bucket)
            if correction != 1.0:
                bucket.flat.mul_(correction)
            bucket.land(users)
            if agreed and users and self._options.mean_over_users:
                bucket.spread(users, agreed.with_data)
            self._optimize(bucket.params, agreed)
        self._arrive_sparse(agreed, users if common else None, correction)
        if agreed and (newcomers := self.trained.newcomers(agreed.trained)):
            self._reduce_newcomers(newcomers, agreed, correction)
        if common and common.samples:
            self._total = common.samples
        self.running.arrive(float(self.world) if self._transport.averages else 1.0)

    def _notice(self, unused: Collection[int]) -> None:
        """Where nobody had a gradient, another backward may still bring some: one of a loss that the forward left aside."""
        self._unused = set(unused)
        if not self._unused <= self._noticed:
            self._noticed |= self._unused
            self._watch()

    def _is_common(self, agreed: Agreement) -> bool:
        """Has every rank read these words by now?"""
        return (not self._unread or agreed.looking == self.world) and len(set(agreed.trained)) == 1

    def _arrive_sparse(self, agreed: Agreement | None, users: Sequence[int] | None, correction: float) -> None:
        for index in self._sparse:
            if users is None or users[index]:
                share = agreed.with_data / users[index] if agreed and users and self._options.mean_over_users else 1.0
                with reduction("the reduction of a sparse gradient"):
                    reduce_sparse(self.params[index], self._scale(False) * correction * share, self._group)
            self._optimize([self.params[index]], agreed)

    def _reduce_newcomers(self, found: Sequence[nn.Parameter], agreed: Agreement, correction: float) -> None:
        """Parameters that are trained since this step have no place in a bucket yet: each travels by itself, once."""
        with reduction("the reduction of parameters that are trained from now on"):
            had = torch.tensor([param.grad is not None and self._samples > 0 for param in found], dtype=torch.float32, device="cpu")
            users = had.to(self.planner.device)
            dist.all_reduce(users, group=self._group)
            for param, mine, theirs in zip(found, had.tolist(), users.tolist(), strict=True):
                share = agreed.with_data / theirs if theirs and self._options.mean_over_users else 1.0
                grad = param.grad if mine else None
                total = torch.zeros_like(param) if grad is None else (grad.to_dense() if grad.is_sparse else grad) * self._scale(False)
                dist.all_reduce(total, group=self._group)
                param.grad = total.mul_(correction * share) if theirs else None
        self._optimize(found, agreed)

    def obey_as(self, old: Reducer) -> None:
        """Do what the user has asked of ``old``, in its place."""
        self.number = old.number
        self.sync, self.every = old.sync, old.every
        self.said = replace(old.said, status=0, trained=self.said.trained)

    def go_on_from(self, old: Reducer) -> None:
        """Take the place of ``old``, which reduced other parameters of the same module."""
        self.obey_as(old)
        self.step, self.backwards, self._total = old.step, old.backwards, old._total
        self.reading, self._concluded, self.last_times = old.reading, old._concluded, old.last_times
        self.looks, self._compared = old.looks, old._compared
        self.running.go_on_from(old.running)

    def _optimize(self, params: Sequence[nn.Parameter], agreed: Agreement | None) -> None:
        if self._optimizer_step is not None and not (agreed and agreed.failed):
            self._optimizer_step(params)

    def conclude(self) -> None:
        """After a reduction, on every rank alike: learn from it, and say what has to be said. Once for each; on a GPU a step later."""
        if self.reading is None or self.reading.step == self._concluded:
            return
        self._concluded = self.reading.step
        with self._or_broken(self.reading.step, raised_by_all=(TrainError,)):
            self._conclude(self.reading.agreement)

    def _conclude(self, agreement: Agreement) -> None:
        if len(set(agreement.trained)) > 1:
            self.trained.drop_gradients()
            self.trained.refuse(self._group, self.planner.device, all_have_looked=not self.lazy)
        self.trained.learn(agreement.trained)
        # Another order of adding up the samples, in a ring or a tree, may give another last bit.
        same = agreement.looking == self.world or math.isclose(agreement.samples, self._total, rel_tol=1e-5) and not agreement.late
        if self._unread and (agreement.failed or not same):
            self.looks = True
            raise TrainError(
                f"the gradients of step {agreement.step} were not whole and have been used: on some rank the graph or the number of "
                "samples was not what it had been, or a backward failed. Load the last checkpoint; from now on each step is looked at "
                "before it is used"
            )
        if agreement.lacking and not self._reported:
            self._report()
        self.looks = self.looks or agreement.lacking > 0 or agreement.looking > 0
        if agreement.failed:
            self._refuse(agreement)
            return
        if agreement.users:
            self.planner.lacked(agreement.users, agreement.with_data)
        with reduction("what follows a reduction"):
            self._learn(bool(agreement.late))
            if self._compares and agreement.step % self._options.check_replicas_every == 0:
                self.check_replicas()

    @property
    def _compares(self) -> bool:
        """Are the replicas compared now and then? Not where the user's hook reduces: it may let them differ on purpose, or for a while."""
        return self._options.check_replicas_every > 0 and self._hook is None

    def check_replicas(self) -> None:
        """Raise Diverged, on every rank alike, if the ranks' parameters are not the same; all call it at the same point."""
        parts = [*self.planner.buckets, *((index,) for index in self._sparse)]
        names = [[self.names[index] for index in part] for part in parts]
        check(names, [[self.params[index] for index in part] for part in parts], self._group, self.planner.device)

    @property
    def _lazy(self) -> bool:
        """Is a step used before its words are read, so that the host need not wait for the GPU? Only while nothing unusual was seen.

        The same on every rank, because the collectives that follow the reading come earlier or later with it.
        """
        settled = not self.planner.learning and not self._options.mean_over_users and self._optimizer_step is None
        return self.lazy and settled and not self.looks and not self.trained.differs

    def _report(self) -> None:
        """Say once which parameters lack a gradient, and where."""
        self._reported = True
        with reduction("the report of parameters without a gradient"):
            lacked = gather([int(index in self._lacked) for index in range(len(self.params))], self._group, self.planner.device)
        if self.rank == 0:
            log.warning("in step %d %s", self.step, lacking(self.names, lacked))

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            with record_function("elastirun: wait"):
                bucket.work.wait()
            bucket.work = None
            self.times.arrived()

    def _add_late(self, bucket: Bucket) -> None:
        extra = bucket.take_late(self._scale(False))
        with reduction("the reduction of late gradients"):
            dist.all_reduce(extra, group=self._group)
        bucket.flat.add_(extra)

    def _learn(self, late: bool) -> None:
        """How often each parameter fires, and whether there is a new plan."""
        if self._all_watched or late:
            for index, (expected, fired) in enumerate(zip(self._expected, self._fired, strict=True)):
                self._expected[index] = max(fired, 1 if expected == UNKNOWN else expected)
        surprised = late and not self.planner.surprised
        self.planner.surprised = self.planner.surprised or surprised
        self._outdated = self.planner.advance() or self._outdated
        if surprised:
            self._watch()
        self._reset()

    def _refuse(self, agreement: Agreement) -> None:
        """A rank's backward ended with an exception: the gradients of this step are of no use to anyone."""
        self.trained.drop_gradients()
        if not self._draining:
            raise TrainError(
                f"the backward of {ranks(agreement.failed)} ended with an exception, so this step has no gradients on any rank (grad is "
                "None); go on with the next batch, or stop"
            )

    def _drain(self) -> None:
        """An exception ended the last backward here: take part in what the others wait for, and have the step dropped on all ranks."""
        touched = self._touched()  # ``autograd.grad`` reduces nothing, on no rank
        self.backwards -= not touched
        if self._reducing and touched:
            self.said.status |= FAILED
            self._samples = 0.0
            self._draining = True
            try:
                self.finish()
            finally:
                self._draining = False
        self._reset()


def settle() -> None:
    """Finish what an exception interrupted, of all modules in the same order on every rank. Before anything else that all ranks do:
    the others wait for it, or will. Where that fails, the module itself says so when it is used again."""
    if _under_way:
        for reducer in sorted((one for one in _under_way if one.interrupted and one._broken is None), key=lambda one: one.number):
            with suppress(ReductionFailed):
                reducer._drain()
