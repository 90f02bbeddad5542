"""The names of torch's data-parallel class, which frameworks, torch's compiler and torch's checkpoints use.

``TorchNames`` is a subclass of ``torch.nn.parallel.DistributedDataParallel``, because the users check the type. Nothing runs that belongs
to torch's reducer: neither the constructor nor a forward. Methods for buffers, names and groups are inherited; the others are written in
terms of our reducer, or raise a TrainError. docs/ddp.md has the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

from elastirun.train.arguments import shown, verify_module, verify_type
from elastirun.train.ddp.joining import NOT_JOINING, JoinedRank, announce
from elastirun.train.ddp.nested_tensors import find_tensors
from elastirun.train.errors import ReductionFailed, TrainError, WrongUse
from elastirun.train.groups.collectives import copy_from
from elastirun.train.reduction.buckets.plan import CAP, FIRST_CAP, MIB
from elastirun.train.reduction.running_stats import find_statistics
from elastirun.train.reduction.transports.base import reduction_errors

if TYPE_CHECKING:
    from torch.nn.parallel.distributed import DistributedDataParallel as Original

    from elastirun.train.reduction.reducer import Reducer
    from elastirun.train.reduction.reduction import Options
else:  # torch's own class, even where a script has put ours in its place
    Original = next(c for c in nn.parallel.DistributedDataParallel.__mro__ if c.__module__ == "torch.nn.parallel.distributed")

INTERNAL = (  # methods that only torch's own class calls, for torch's reducer
    *("_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_ddp_init_helper", "_delayed_all_reduce_hook", "_lazy_init"),
    *("_fire_reducer_autograd_hook", "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce", "_module_wait_for_copy_hook"),
    *("_register_accum_grad_hook", "_register_delay_all_reduce_hook", "_root_copy_hook", "_set_sparse_metadata"),
    *("_setup_in_backward_optimizers", "_check_global_requires_backward_grad_sync", "_clear_grad_buffer"),
)


torchs: Any = Original


def verify_arguments(
    module: Any,
    ids: Sequence[int | torch.device] | None,
    output: int | torch.device | None,
    cap: float | None,
    mean_over: str,
    late: tuple[object, object],
    mixed_precision: object,
) -> None:
    """Raise WrongUse for arguments of the constructor that cannot be followed. ``cap``: of a bucket, in MiB."""
    verify_module(module, "DistributedDataParallel")
    verify_type(ids, Sequence | None, "device_ids", "None or a list of one device")
    if ids is not None and len(ids) > 1:
        raise WrongUse(f"device_ids must be None or name one device, not {len(ids)}: start one process per device")
    if output is not None and (not ids or torch.device(output) != torch.device(ids[0])):
        raise WrongUse(f"output_device must be None or the device of device_ids, not {output}: outputs stay where they are")
    if mean_over not in ("world", "users"):
        raise WrongUse(f'mean_over must be "world" or "users", not {mean_over!r}')
    if (late[0] is None) != (late[1] is None):
        raise WrongUse("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if mixed_precision is not None:
        raise WrongUse("mixed_precision= is not supported: use torch.autocast, and register_comm_hook() for gradients of half size")
    if cap is not None and not (isinstance(cap, int | float) and cap > 0):
        raise WrongUse(f"bucket_cap_mb must be a number above 0, not {shown(cap)}")


def torch_attributes(
    module: nn.Module, ids: Sequence[int | torch.device] | None, cap: float | None, caps: Sequence[float] | None
) -> dict[str, Any]:
    """Return the attributes that torch's constructor makes of ``module``, ``device_ids`` and the sizes of buckets (MiB)."""
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    index = _get_device_index(ids[0], True) if ids and torch.device(ids[0]).type != "cpu" else None
    return {
        "parameters_to_ignore": set(getattr(module, "_ddp_params_and_buffers_to_ignore", ())),
        "device": device,
        "device_type": device.type,
        "is_multi_device_module": len({param.device for param in parameters}) > 1,
        "device_ids": None if index is None else [index],
        "output_device": index,
        "bucket_bytes_cap": max(int((cap or CAP / MIB) * MIB), FIRST_CAP),  # torch.compile splits graphs by it
        "bucket_bytes_cap_list": [int(each * MIB) for each in caps or ()],
        "bucket_bytes_cap_default": cap is None,
    }


class TorchNames(Original):
    """The attributes and methods of torch's class, beside those that ``DistributedDataParallel`` defines itself."""

    _options: Options
    set_group: Callable[..., None]
    _prepare: Callable[[], bool]
    step_in_backward: Callable[..., None]
    register_comm_hook: Callable[..., None]

    # The attributes of torch's instances that are the same in every module, or begin so.
    _join_config: Any = NOT_JOINING
    logger: Any = None
    mixed_precision: Any = None
    require_forward_param_sync = True
    broadcast_bucket_size = 250 * MIB
    use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
    _use_python_reducer, _lazy_init_ran, _ddp_sink_clone = False, True, True

    @property
    def _reducer(self) -> Reducer:
        raise NotImplementedError  # the subclass has it

    # -- whether and when gradients are reduced -------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards reduce their gradients; False within ``no_sync()``."""
        return self._reducer.schedule.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.schedule.set_sync(value)

    @property
    def reducer(self) -> TorchReducer:  # type: ignore[override]
        """Return an object with the methods of torch's reducer that frameworks call."""
        return TorchReducer(self._reducer)

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._reducer.parts.planner.epoch > 0

    @property
    def broadcast_buffers(self) -> bool:
        """Return ``forward_sync_buffers`` by its name before torch 2.13, under which the older base classes read it."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """Set the attribute; graphs of any kind are handled without it."""
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing: ``stats()`` always has the figures of the last step."""

    def _remove_autograd_hooks(self) -> None:
        self._reducer.close()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Call ``set_group()`` without copying; a rank that is not in the group does nothing."""
        if isinstance(new_process_group, dist.ProcessGroup) and dist.get_rank(new_process_group) >= 0:
            self.set_group(new_process_group, init_sync=False)

    # -- buffers and uneven inputs --------------------------------------------------------------------------------------

    def _assign_modules_buffers(self) -> None:
        """List the buffers that are copied in each forward: those that do not travel with the gradients, or all if the user wants it."""
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        if self._buffers_wanted is None:
            travelling = {id(getattr(layer, name)) for layer, name in find_statistics(self.module, self.parameters_to_ignore)}
            found = {name: buffer for name, buffer in self.named_module_buffers.items() if id(buffer) not in travelling}
            self.named_module_buffers, self.modules_buffers = found, list(found.values())

    def _sync_buffers(self) -> None:
        """Copy the buffers. With ``drop_failed_steps``, a peer that is lost meanwhile makes the step under way one that failed."""
        if self._drops_failed_steps and self._reducer.broken:
            return
        try:
            with reduction_errors("copying the buffers"):
                super()._sync_buffers()  # type: ignore[no-untyped-call]
        except ReductionFailed as error:
            if not self._drops_failed_steps:
                raise
            self._reducer.drop_step(error)

    def _distributed_broadcast_coalesced(self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0) -> None:
        if tensors:
            made = "_made" in self.__dict__  # a copy has no group of its own before its first backward
            copy_from(authoritative_rank, tensors, self._reducer.world.group if made else self.process_group)

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], *location: Any, **more: Any) -> None:
        super()._register_buffer_comm_hook(state, hook, *location, **more)
        self._buffers_wanted = self.forward_sync_buffers = True
        self._assign_modules_buffers()
        if "_made" in self.__dict__:  # a copy makes its reducer later, then without statistics
            self._reducer.running_stats.stop()

    _buffers_wanted: bool | None  # forward_sync_buffers as the user gave it
    _drops_failed_steps = False  # see ``Reducer``
    _has_joined = False  # the user has called join()

    def _before_forward(self, trained: bool) -> None:
        """Announce this forward to ranks without inputs, within join(); copy the buffers. ``trained``: a backward may follow."""
        copies = self._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call]
        if self._join_config.enable and (trained or copies):
            work = Join.notify_join_context(self)  # a RuntimeError, if throw_on_early_termination was given and a rank has ended
            if work is not None:
                work.wait()
            schedule = self._reducer.schedule
            announce(self, copies, trained and schedule.will_reduce(), torch.is_grad_enabled() and schedule.sync)
        if copies:
            self._sync_buffers()

    def join_hook(self, **kwargs: Any) -> JoinedRank:
        """Return the hook for ``torch.distributed.algorithms.join.Join``; ``divide_by_initial_world_size`` is True by default."""
        self._has_joined = True
        self._reducer.local_report.reads_first = True
        return JoinedRank(self, kwargs.get("divide_by_initial_world_size", True) and not self._options.mean_over_users)

    # -- hooks and optimizers -------------------------------------------------------------------------------------------

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register torch's hook in Python for FP16_COMPRESS. Nothing is needed for ALLREDUCE."""
        if comm_hook_type == torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS:
            self.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def _register_fused_optim(self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Call ``step_in_backward`` with a new optimizer."""
        self.step_in_backward(optim(list(optim_params or self.module.parameters()), *args, **kwargs))

    # -- figures --------------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return those of torch's figures that have a meaning here; see ``stats()``. ``can_set_static_graph`` is 0: no gain."""
        stats, reducer = self._reducer.report(), self._reducer
        return {
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "bucket_sizes": ", ".join(str(bucket["bytes"]) for bucket in stats["buckets"]),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in reducer.params})),
            "world_size": reducer.world.size,
            "rank": reducer.world.rank,
            "iteration": stats["steps"],
            "total_parameter_size_bytes": sum(param.nbytes for param in reducer.params),
            "num_parameter_tensors": len(reducer.params),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": 0,
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "join_uneven_inputs": int(self._has_joined),
            "is_multi_device_module": int(self.is_multi_device_module),
            "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules())),
        }


class TorchReducer:
    """The methods of ``torch.nn.parallel.DistributedDataParallel.reducer`` that frameworks call."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def prepare_for_forward(self) -> None:
        """Do nothing: nothing has to be prepared."""

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Expect a backward from ``outputs``; from any parameter if there are none. Lightning calls it within the module's forward."""
        self._reducer.expect(find_tensors(list(outputs)))
        self._reducer.promise()

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are planned anew in backwards."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: it is a part of rebuilding."""

    def _set_static_graph(self) -> None:
        """Do nothing: graphs of any kind are handled."""

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Wait for the ``futures`` of a buffer hook."""
        for future in futures:
            future.wait()

    def _remove_autograd_hooks(self) -> None:
        self._reducer.close()

    def _check_reducer_finalized(self) -> None:
        """Raise TrainError if a backward has not come to its end."""
        if self._reducer.interrupted:
            raise TrainError("a backward did not come to its end; the next forward takes part in what the others wait for")


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise TrainError(f"{name}() is a part of torch's reducer, which this module does without")

    return refuse


for _name in INTERNAL:
    setattr(TorchNames, _name, _refused(_name))
