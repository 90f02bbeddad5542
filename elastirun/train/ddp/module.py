"""Data parallelism: a module whose gradients are the mean over all ranks after each backward. How a step runs: docs/ddp.md."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from elastirun.train import autograd_engine
from elastirun.train.arguments import verify_callable, whole
from elastirun.train.ddp.at_exit import release_at_exit
from elastirun.train.ddp.deepcopy_support import TIED, FirstBackward
from elastirun.train.ddp.nested_tensors import find_tensors, to_device
from elastirun.train.ddp.optimizer import BucketSteps, applied, step_each, take_over
from elastirun.train.ddp.replica_description import check_reducible, describe, sparse_names
from elastirun.train.ddp.state_dicts import take_both_forms
from elastirun.train.ddp.torch_names import TorchNames, torch_attributes, torchs, verify_arguments
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import copy_from, verify_same
from elastirun.train.groups.process_groups import end_own_group, find_group, group_of, make_own_group
from elastirun.train.reduction.buckets.planner import gradients_of
from elastirun.train.reduction.comm_hooks import Hook
from elastirun.train.reduction.control_words import REQUESTS, Agreement
from elastirun.train.reduction.reducer import CarriedOver, Reducer, settle
from elastirun.train.reduction.reduction import Options
from elastirun.train.reduction.running_stats import find_statistics
from elastirun.train.reduction.transports.base import Transport, reduction_errors
from elastirun.train.reduction.transports.choose import choose

T = TypeVar("T")


class DistributedDataParallel(TorchNames):
    """Wraps ``module``; after a backward every parameter's ``grad`` holds the mean of all ranks' gradients.

    The ranks of ``process_group`` (default: the default group) each hold a replica. At construction the replicas are compared (a
    difference is a ModelMismatch that names the parameter) and rank 0's parameters and buffers are copied to the others. It is a subclass
    of ``torch.nn.parallel.DistributedDataParallel``, takes its place in scripts and frameworks, and has its arguments:

    device_ids            None, or the one device that tensors among the inputs are moved to; outputs stay there (``output_device``)
    device_mesh           in place of ``process_group``: a mesh of one dimension
    bucket_cap_mb         MiB per bucket; None (default): boundaries are planned from measured times and the measured link. Of
                          ``bucket_cap_mb_list`` the largest counts
    forward_sync_buffers  copy rank 0's buffers to the others before the forwards in which torch's class does so. By default all but the
                          running statistics of normalizing layers (BatchNorm): these travel with the gradients, so that all ranks have
                          rank 0's after each reduction, and again in ``eval()``, in ``state_dict()`` and in forwards of layers in
                          evaluation. True: running statistics are copied in forwards, too. False: each rank has its own buffers from
                          construction on, until ``sync_buffers()``
    broadcast_buffers     the former name of ``forward_sync_buffers``; False keeps the ranks' own buffers at construction, too
    init_sync             compare and copy at construction; default True
    find_unused_parameters, static_graph, gradient_as_bucket_view, batched_grad_copy, skip_all_reduce_unused_params, check_reduction, dim
                          accepted and not needed: unused parameters, any number of uses or recomputations of a parameter, and
                          graphs that change are handled always, and gradients are views of the buckets always
    delay_all_reduce_named_params, param_to_hook_all_reduce
                          accepted; these parameters are reduced with the others
    mixed_precision       a TrainError: use autocast or a communication hook

    and these, which torch's class does not have:

    transport             "auto" (default), "group", "shared memory": see ``transports.choose``
    mean_over             "world" (default, as torch): a rank that did not use a parameter counts as a gradient of zero;
                          "users": the mean is over the ranks that used it (zero the gradients before: kept gradients would be scaled, too)
    check_finite          list in ``agreement.not_finite`` the ranks that had an infinite or undefined gradient; costs a pass over all
    check_replicas_every  compare the replicas' parameters every so many reductions (default 1000; 0: never); see ``check_replicas``.
                          Not with a communication hook, which may let them differ on purpose

    Gradients are views of the module's memory: copy a gradient that you need after the next backward.
    A parameter that no rank used in a step has no gradient (None), as without data parallelism. Copies (``copy.deepcopy``, pickles) belong
    to the default group; a copy begins to reduce in its own first backward, which every rank has to run (of several
    copies in the same order).

    Raises TrainError (no process group, nothing to train, wrong arguments) and ModelMismatch. In a backward: ReductionFailed or PeerLost;
    the module can then be used again after ``set_group``.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str = "auto",
        mean_over: str = "world",
        check_finite: bool = False,
        check_replicas_every: int = 1000,
    ) -> None:
        cap = max(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        late = delay_all_reduce_named_params, param_to_hook_all_reduce
        verify_arguments(module, device_ids, output_device, cap, mean_over, late, mixed_precision)
        nn.Module.__init__(self)
        self.module = module
        self.__dict__.update(torch_attributes(module, device_ids, cap, bucket_cap_mb_list), dim=dim, static_graph=static_graph)
        self.__dict__.update(find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=gradient_as_bucket_view)
        self.__dict__.update(skip_all_reduce_unused_params=skip_all_reduce_unused_params, batched_grad_copy=batched_grad_copy)
        self._inputs_to = torch.device(device_ids[0]) if device_ids else None
        self._options = Options(cap, mean_over == "users", check_finite, whole("check_replicas_every", check_replicas_every, 0), transport)
        self._take_buffers(broadcast_buffers, forward_sync_buffers)
        self._begin(process_group, device_mesh, init_sync)

    def _take_buffers(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> None:
        """Decide which buffers are copied at construction, and which before forwards."""
        self._buffers_wanted = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = self._buffers_wanted is not False
        self._assign_modules_buffers()
        self._copies_buffers = broadcast_buffers is not False or forward_sync_buffers is not None  # at construction

    def _begin(self, group: dist.ProcessGroup | None, device_mesh: Any, init_sync: bool) -> None:
        """Do what needs the other ranks, and what has to be done at the end."""
        self._hook: tuple[Hook | None, Any] = (None, None)
        self._optimizer: torch.optim.Optimizer | None = None
        self.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
        take_both_forms(self)
        settle()
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._join(group_of(group, device_mesh), init_sync)
        release_at_exit(self, _release)

    # -- the world --------------------------------------------------------------------------------------------------

    def _join(self, group: dist.ProcessGroup | None, init_sync: bool, left: CarriedOver | None = None) -> None:
        """Compare the replicas in ``group``, copy rank 0's, and make transport and reducer. Every rank calls it at the same point.

        ``left``: of this rank's reducer in the last world.
        """
        self.process_group = find_group(group)
        self._list_parameters()
        copied = self._list_copied()
        needs = [param.requires_grad for _, param in self._named]
        devices = [param.device for _, param in self._named if param.requires_grad]
        if not devices:
            raise TrainError("no parameter of the module requires a gradient: there is nothing to reduce")
        with reduction_errors("comparing and copying the replicas"):
            verify_same(self._describe(copied, init_sync, trained=True), "parameters, buffers and options", self.process_group, devices[0])
            group = make_own_group(self.process_group, devices[0])
            self._keep_own_group(group, devices[0])
            if init_sync:
                copy_from(0, [tensor.detach() for _, tensor in copied], group)
        self._make_reducer(needs, group, self._choose_transport(group, devices[0]))
        with reduction_errors("agreeing on the plan"):
            self._reducer.begin_where_others_are(left)
        self._reducer.install()
        if self.find_unused_parameters:  # graphs change from step to step
            self._reducer.conclusion.always_reads = True

    def _choose_transport(self, group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport for the gradients in ``group``. Every rank calls it at once. ``device``: of the first parameter."""
        others = {param.device for _, param in self._named if param.requires_grad} - {device}
        if others and self._options.transport == "shared memory":
            raise TrainError(f"shared memory is for parameters on one device, not on {', '.join(sorted(map(str, {device, *others})))}")
        return choose(group, device, "group" if others and self._options.transport == "auto" else self._options.transport)

    def _keep_own_group(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Keep ``group``, of this module alone, until it is left. On the CPU it ends with the module, too."""
        assert self.process_group is not None
        self._end_own_group: Callable[[], object] = partial(end_own_group, group, self.process_group)
        if device.type == "cpu":  # on a GPU the last reduction may still be under way when the module is gone
            self._end_own_group = weakref.finalize(self, end_own_group, group, self.process_group)  # keeps no group once called
            self._end_own_group.atexit = False  # see ``at_exit``

    def _describe(self, copied: Iterable[tuple[str, Tensor]], init_sync: bool, trained: bool) -> list[str]:
        """Describe what has to be the same on every rank. ``trained``: also which parameters are trained."""
        options = {
            **vars(self._options),
            "broadcast_buffers": self._buffers_wanted,
            "init_sync": init_sync,
            "find_unused_parameters": self.find_unused_parameters,
        }
        return describe(copied, sparse_names(self.module), options, trained)

    def _list_parameters(self) -> None:
        """List the names and parameters that are not to be ignored."""
        self._named = [(name, param) for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore]
        assert self.process_group is not None
        check_reducible(self._named, self.process_group)

    def _list_copied(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors that are compared and copied at construction."""
        return [*self._named, *(self._list_buffers() if self._copies_buffers else ())]

    def _list_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the names and buffers that are not to be ignored."""
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def _make_reducer(self, needs: Sequence[bool], group: dist.ProcessGroup, transport: Transport) -> None:
        """Make the reducer of the parameters that ``needs`` says are trained, with the user's hook and optimizer."""
        assert self.process_group is not None
        sparse = sparse_names(self.module)
        statistics = find_statistics(self.module, self.parameters_to_ignore) if self._buffers_wanted is None else ()
        self.__dict__["_made"] = Reducer(self._named, needs, sparse, self.process_group, group, transport, self._options, statistics)
        if self._drops_failed_steps:
            self._reducer.drop_failed_steps()
        self._applied = (-1, -1)  # the parameters have not been searched for optimizers yet
        if self._hook[0] is not None:
            self._reducer.set_hook(*self._hook)
        if self._optimizer is not None:
            self.step_in_backward(self._optimizer)

    def set_group(self, process_group: dist.ProcessGroup | None = None, init_sync: bool = True) -> None:
        """Continue in another world. Every rank of ``process_group`` calls it; new ranks construct the module instead.

        With ``init_sync`` rank 0's parameters and buffers are copied to all, so rank 0 must be one that has them. Gradients that no
        optimizer has used are dropped; the caller copies the state of the optimizer. Works after a ReductionFailed, too. This rank's
        settings (``accumulate``, ``set_samples``, requests) stay, and steps are counted from the highest number of any rank. A plan of the
        buckets that was made from measured times stays, too; new ranks take it over.
        """
        self._leave_group()
        left = self._reducer
        assert isinstance(left, CarriedOver)
        self._join(process_group, init_sync, left)
        self._reducer.keep_requests(left)

    def _leave_group(self) -> None:
        """Let go of the process groups, if that is not done yet."""
        if isinstance(self._reducer, CarriedOver):
            return
        _adopt(self)  # rank 0 may be another one later
        settle()
        self._reducer.close()
        self._reducer.world.transport.close()
        self._end_own_group()
        self._end_own_group = _nothing  # the other one keeps the groups
        for _, param in self._named:
            param.grad = None
        self.__dict__["_made"] = self._reducer.leave()
        self.process_group = None  # type: ignore[assignment]

    @property
    def failed(self) -> bool:
        """Return whether a reduction has failed since the last ``set_group``."""
        return self._reducer.broken

    def _adapt(self, group: dist.ProcessGroup | None = None) -> None:
        """Make the reducer anew, because other parameters are frozen now, on every rank alike.

        There is no collective here, because the forward that calls this may be an evaluation on one rank. The next reduction makes the
        memory. ``group``: in place of this rank's.
        """
        old = self._reducer
        old.close()
        self._make_reducer(old.parts.trained.now, group or old.world.group, old.world.transport)
        self._reducer.continue_from(old)

    # -- forward and backward -----------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():  # first: here the compiler gives up this function, and compiles the ones it calls
            begun = time.perf_counter()
            inputs, kwargs = _uncompiled(type(self)._pre_forward)(self, *inputs, **kwargs)
            output = _uncompiled(type(self)._post_forward)(self, self.module(*inputs, **kwargs))
            if self._trained and not self._without_reducer:
                self._reducer.times.forward += time.perf_counter() - begun
            return output

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._trained = self._prepare()
        if not self._without_reducer:
            # Within join() rank 0 may have no inputs any more; its statistics are out of date then.
            self._reducer.running_stats.before_forward(at_once=not self._join_config.enable)
            if self._trained:
                self._reducer.refuse_unreduced()
                refuse_capture(self._named[0][1])
        self._before_forward(self._trained)
        return to_device(inputs, self._inputs_to), to_device(kwargs, self._inputs_to)

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()
        # the same value as in torch's class
        self.require_forward_param_sync = torch.is_grad_enabled() and (self._without_reducer or self._reducer.schedule.sync)
        if not self._without_reducer:
            self._reducer.running_stats.after_forward()
        if self._trained:
            tensors = find_tensors(output)
            if not (self._without_reducer and autograd_engine.before_backward(tensors, self._first_backward)):
                self._reducer.announce(tensors)
        return output

    def _prepare(self) -> bool:
        """Prepare a forward; return whether a backward that accumulates gradients may follow."""
        if self._without_reducer:
            self._follow_default_group()
            return torch.is_grad_enabled() and any(param.requires_grad for _, param in self._named)
        self._reducer.before_forward()
        if self._reducer.parts.trained.changed:
            self._adapt()
        seldom = self._reducer.step < 3 or self._reducer.step % 100 == 0  # to check all parameters takes time
        if seldom or self._applied != applied():
            self._look_at_parameters()
        return torch.is_grad_enabled() and self._reducer.find_frozen()

    def _look_at_parameters(self) -> None:
        """Raise TrainError for other parameters, or other types, than at construction; take over optimizers that parameters have."""
        known = {id(param) for _, param in self._named}
        for name, param in self.module.named_parameters():
            ours = id(param) in known or name in self.parameters_to_ignore or not isinstance(param, nn.Parameter)  # functional_call()
            if param.requires_grad and not ours:
                raise TrainError(
                    f"the parameter {name} was put in place after the module had been wrapped, so its gradient would stay local: wrap the "
                    "module afterwards, or call set_group()"
                )
        if torch.is_grad_enabled() and self._reducer.parts.planner.gradients != gradients_of(self._reducer.params):
            raise TrainError("the module was converted to another type or device after it was wrapped: do it before, or call set_group()")
        if take_over(self._reducer.params):
            self._reducer.set_optimizer(step_each)
        self._applied = applied()

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Let torch.compile split graphs where buckets end, as it does within torch's class (DDPOptimizer).

        The compiler asks torch's class for the active module, or this class where a script has put it in the place of torch's.
        """
        if "torch._dynamo" not in sys.modules:
            yield
            return
        outer = torchs._active_ddp_module, DistributedDataParallel._active_ddp_module
        torchs._active_ddp_module = DistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            torchs._active_ddp_module, DistributedDataParallel._active_ddp_module = outer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards within this context local; the next backward outside reduces the accumulated gradients.

        The place of the backward counts, not that of the forward.
        """
        before = self._reducer.schedule.set_sync(False)
        try:
            yield
        finally:
            self._reducer.schedule.set_sync(before)
            self._reducer.unannounced.accept()

    def reduce(self) -> None:
        """Reduce the gradients that are there, as a backward does at its end.

        Every rank calls it, before the step of the optimizer. It is for gradients that no backward brings:
        those of ``torch.autograd.grad``, and of pipeline schedules that compute the gradients of inputs and
        of weights apart (zero bubble, DualPipeV):

            with ddp.no_sync():     # of each stage of this rank
                schedule.step(x)
            ddp.reduce()

        Without it, the next forward, ``state_dict()`` or ``check_replicas()`` raises OutsideForward.
        Gradients within ``no_sync()`` may stay local, but for those of a schedule.
        """
        self._prepare()
        self._reducer.reduce()

    def accumulate(self, n: int) -> None:
        """Reduce only in each ``n``-th backward from now on (1: in each one). Micro-batches of a pipeline need no no_sync() then.

        Gradients of backwards that are left over when the data end stay local: choose ``n`` so that it divides their number.
        """
        schedule = self._reducer.schedule
        schedule.every, schedule.backwards = whole("n of accumulate()", n), 0

    def set_samples(self, samples: float, backwards: float = 1, work: float | None = None) -> None:
        """Set the number of samples that this rank's gradients stand for, until the next call; default 1 on each rank.

        The result is the mean over samples: the sum over ranks of samples times gradient (a gradient of the mean loss of these samples),
        divided by the sum of samples. ``backwards``: the gradients are a sum over so many backwards, each of the mean loss of a
        micro-batch, so no loss has to be divided (``ElasticDataLoader.steps()`` sees to micro-batches of different sizes). Where a rank's
        share changes, the gradients take one more pass. On a GPU the host waits for each reduction from now on, on every rank: in the
        first step with a call, either every rank calls it or this rank's number stays as it was (call it before the first step).
        Otherwise the next backward raises a TrainError on every rank. ``work``: how much there was to compute for them, such as tokens in
        batches of varying length, by which a rank is judged to be a straggler; default: ``samples``.
        """
        if not (hasattr(samples, "__float__") and 0 <= samples < float("inf")):
            raise TrainError(f"set_samples() takes a number that is not negative, not {samples!r}")
        if not (hasattr(backwards, "__float__") and 0 < backwards < float("inf")):
            raise TrainError(f"set_samples() takes a positive number of backwards, not {backwards!r}")
        if work is not None and not (hasattr(work, "__float__") and 0 <= work < float("inf")):
            raise TrainError(f"set_samples() takes a work that is a number, 0 or more, not {work!r}")
        self._reducer.local_report.weigh(float(samples), float(backwards), None if work is None else float(work))

    def skip(self) -> None:
        """Take part in a reduction without data; the gradients are the mean over the other ranks."""
        self._prepare()
        # the others copy them before or after their forward
        if self._check_sync_bufs_pre_fwd() or self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()
        self.require_forward_param_sync = True
        self._reducer.skip()

    def batches(self, data: Iterable[T], samples: Callable[[T], float] | None = None) -> Iterator[T | None]:
        """Yield this rank's batches, then None as long as another rank has some, so that no rank hangs when inputs are uneven.

        Each batch that is not None needs one reducing backward (a batch without one is reported as no data). Where None comes, the
        gradients of the others are there already: step the optimizer as always. ``samples(batch)`` weights the batch; default 1 each.
        """
        if hasattr(data, "steps"):
            raise WrongUse(f"batches() reads one batch ahead, which {type(data).__name__} would count as consumed: use its steps(ddp)")
        end, source = object(), iter(data)
        self._reducer.local_report.reads_first = True
        batch: Any = next(source, end)
        try:
            while True:
                following = end if batch is end else next(source, end)
                weight = 1.0 if samples is None or batch is end else float(samples(batch))
                self._reducer.local_report.announce_batch(weight, more=following is not end)
                step = self._reducer.step
                if batch is not end:
                    yield batch
                if self._reducer.step == step and (batch is end or self._reducer.schedule.always_reduces):
                    self.skip()
                    if self.agreement.with_data == 0:
                        return
                    if batch is end:
                        yield None
                if not self.agreement.more:
                    return
                batch = following
        finally:
            self._reducer.local_report.announce_batch(1.0, more=False)

    # -- what all ranks agree on --------------------------------------------------------------------------------------

    @property
    def agreement(self) -> Agreement:
        """Return what all ranks know since the last reduction. Raises TrainError before the first reduction."""
        if (last := self._reducer.last) is None:
            raise TrainError("there has been no reduction yet")
        return last.words.agreement

    def request(self, name: str) -> None:
        """Request "checkpoint" or "drain": after the next reduction, ``name in ddp.agreement.requests`` on every rank, for one step."""
        if name not in REQUESTS:
            raise TrainError(f'there is no request {name!r}: give "checkpoint" or "drain"')
        self._reducer.local_report.requests.add(name)

    @property
    def drained(self) -> int | None:
        """Return the first reduction in which a rank requested "drain", as all ranks know after the same one; None while none has."""
        return None if self._without_reducer else self._reducer.conclusion.drained

    def stats(self) -> dict[str, Any]:
        """Return the times of the last reducing step, in seconds of the host's clock (on a GPU: of launching), as a dict fit for JSON.

        ``steps`` so far; ``forward``, ``backward``, ``exposed`` (waiting at its end); ``bytes`` of gradients; ``buckets`` in the order of
        launching, each with its ``parameters``, ``bytes`` and when it was ``launched`` and ``ready`` after the backward began; ``plan``,
        its number; ``link``, its ``latency`` and ``bytes_per_second``, None while not measured; ``seconds_by_rank`` of computing;
        ``stragglers``, the ranks that took more than 1.2 times as long for their samples or work as the median rank, and how many times.
        """
        return self._reducer.report()

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set the mode, as in any module.

        Before an evaluation every rank takes over rank 0's running statistics of the last reduction, whatever forwards have changed since.
        That needs no communication, so one rank may do it alone.
        """
        if not mode:
            _adopt(self)
        super().train(mode)  # type: ignore[no-untyped-call]
        return self

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all; every rank calls it.

        Needed on ranks other than 0 before a checkpoint, for buffers that the last forward changed. Not for the running statistics of
        normalizing layers, which come from rank 0 with each reduction.
        """
        settle()
        buffers = [buffer.detach() for _, buffer in self._list_buffers()]
        with autograd_engine.versions_kept(buffers):
            copy_from(0, buffers, self._reducer.world.group)
        self._reducer.running_stats.forget()

    def check_replicas(self, gradually: bool = False) -> None:
        """Compare all ranks' trained parameters, whether or not there is a communication hook; every rank calls it.

        ``gradually``: compare some parameters in each of the next steps, so that no step takes much longer; the error comes in the
        backward of one of them. Nothing is compared with a communication hook or ``check_replicas_every=0`` then.
        Raises Diverged with the name of the first parameter that differs, and TrainError for a parameter that was put in place after the
        module had been wrapped.
        """
        self._look_at_parameters()
        self._reducer.refuse_unreduced()
        settle()
        self._reducer.check_replicas(gradually)

    # -- extensions -----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets, as in torch: the hook returns a future of the result, and divides by itself.

            def mean(group, bucket):
                flat = bucket.buffer().div_(dist.get_world_size(group))
                return dist.all_reduce(flat, group=group, async_op=True).get_future()  # a torch.futures.Future

        Raises WrongType for what is not callable with two arguments, and in a backward for a hook that returns no future.

        Every rank calls it between the same two steps. Before the first reduction, a rank that has not is a ModelMismatch on all of them;
        later, the reductions no longer fit together and end in a ReductionFailed or an abort.
        """
        verify_callable(hook, 2, "a communication hook", "a function, hook(state, bucket) -> torch.futures.Future")
        if self._hook[0] is not None:
            raise WrongUse("there is a communication hook already; a module takes one")
        self._hook = (hook, state)
        self._reducer.set_hook(hook, state)

    def step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Step ``optimizer`` for each bucket as its reduction is done, so that ``backward()`` includes the step. The result is the same.

        For optimizers that treat each parameter by itself (SGD, Adam and their kind), which may not hold other parameters than the
        module's. Neither for gradient clipping by the norm of all nor for GradScaler: both look at all gradients before a step. Every rank
        calls it between the same two steps, as ``register_comm_hook``.
        """
        self._reducer.set_optimizer(BucketSteps(optimizer, [param for _, param in self._named]))
        self._optimizer = optimizer

    # -- copies ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ``copy.deepcopy`` and pickles; only for a module of the default group, as in torch."""
        if self._without_reducer:
            self._follow_default_group()
        self._check_default_group()  # type: ignore[no-untyped-call]
        return {name: value for name, value in self.__dict__.items() if name not in TIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = find_group(None)
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._hook, self._optimizer = (None, None), None
        self._first_backward = FirstBackward(weakref.WeakMethod(self._begin_first))
        self._list_parameters()
        release_at_exit(self, _release)

    def _begin_first(self) -> None:
        """Make the reducer of this copy, unless it has one, and let it begin the backward under way."""
        if self._without_reducer and autograd_engine.accumulates():
            self._reducer.backward_starts()

    def _follow_default_group(self) -> None:
        """Belong to the default group of now: the one that this copy was made in may have ended, as in a live job."""
        if dist.is_initialized() and self.process_group not in c10d._world.pg_map:
            self.process_group = find_group(None)

    @property
    def _without_reducer(self) -> bool:
        """Whether this is a copy that has not reduced anything yet. All ranks together make a reducer; a copy is made by one rank alone."""
        return "_made" not in self.__dict__

    @property
    def _reducer(self) -> Reducer:
        if self._without_reducer:
            self._join(self.process_group, init_sync=False)
        made: Reducer = self.__dict__["_made"]
        return made


def _release(ddp: DistributedDataParallel) -> None:
    """Let the reducer and the process groups go, at the end of the process."""
    if not ddp._without_reducer:
        ddp._reducer.close()
        ddp._end_own_group()
        del ddp.__dict__["_made"], ddp._end_own_group
    del ddp.process_group


def refuse_capture(param: Tensor) -> None:
    """Raise WrongUse while a CUDA graph is captured: its replay would leave out what the host does in each step."""
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise WrongUse("a CUDA graph cannot contain a step of this module, in which the host takes part: use torch's class for graphs")


def _uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` so that torch.compile does not look into it. Its guards would fail in each step."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@functools.cache
def _disabled(function: Callable[..., T]) -> Callable[..., T]:
    made: Callable[..., T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return made


def _adopt(ddp: DistributedDataParallel, *_: Any) -> None:
    """Take over rank 0's running statistics."""
    if not ddp._without_reducer:
        ddp._reducer.running_stats.adopt()


def _before_state_dict(ddp: DistributedDataParallel, *_: Any) -> None:
    """Take over rank 0's running statistics; raise OutsideForward if nothing has reduced the gradients."""
    _adopt(ddp)
    if not ddp._without_reducer:
        ddp._reducer.refuse_unreduced()


def _nothing() -> None:
    """Do nothing."""
