"""The names that torch keeps private and that the training core uses, checked once, when ``elastirun.train`` is imported.

Without the check, a version of torch that lacks one of them would fail in the middle of a step, on the one rank that gets there first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch

from elastirun.train.errors import WrongUse

TRIED = ("2.6", "2.14")  # torch: with the oldest version some tests fail (docs/support.md), with the newest all pass

NEEDED = {  # by module: the names that are looked up in it
    "torch": ("Tensor._make_wrapper_subclass", "_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_round_"),
    "torch._C": ("_current_autograd_node", "_current_graph_task_id", "_disabled_torch_function_impl", "_will_engine_execute_node"),
    "torch._C._distributed_c10d": ("BuiltinCommHookType.FP16_COMPRESS",),
    "torch._utils": ("_get_device_index",),
    "torch.autograd": ("Variable._execution_engine.queue_callback", "_unsafe_preserve_version_counter"),
    "torch.autograd.graph": ("get_gradient_edge",),
    "torch.distributed": ("ProcessGroup._get_backend",),
    "torch.distributed.algorithms.join": ("Join.notify_join_context", "_JoinConfig"),
    "torch.distributed.distributed_c10d": (
        *("_abort_process_group", "_get_default_store", "_get_process_group_store", "_new_process_group_helper"),
        *("_unregister_process_group", "_update_default_pg", "_world.group_count", "_world.pg_group_ranks", "_world.pg_map"),
        "default_pg_timeout",
    ),
    "torch.nn": ("BatchNorm1d._load_from_state_dict", "Module._load_from_state_dict"),
    "torch.nn.modules.batchnorm": ("_NormBase",),
    "torch.nn.parallel.distributed": tuple(
        f"DistributedDataParallel.{name}"
        for name in ("_assign_modules_buffers", "_check_sync_bufs_pre_fwd", "_register_buffer_comm_hook", "_sync_buffers")
    ),
    "torch.utils._python_dispatch": ("is_traceable_wrapper_subclass",),
    "torch.utils._pytree": ("tree_map_only",),
    "torch.utils.data._utils": ("worker",),
}


def check() -> None:
    """Raise WrongUse if the installed torch lacks a name in ``NEEDED``. If nothing catches the error, only its sentence is printed."""
    absent = missing()
    if absent:
        raise _without_frames(WrongUse(_sentence(absent)))


def private(module: str, name: str) -> Any:
    """Return a private name of a ``module`` that is imported only where it is used. Raises WrongUse, as ``check`` does."""
    absent = _missing(module, (name,))
    if absent:
        raise WrongUse(_sentence(absent))
    return getattr(sys.modules[module], name)


def missing() -> list[str]:
    """Return the names in ``NEEDED`` that the installed torch lacks."""
    return [name for module, names in NEEDED.items() for name in _missing(module, names)]


def _missing(module: str, names: Iterable[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return [module]
    absent = []
    for name in names:
        try:
            attrgetter(name)(found)
        except AttributeError:
            absent.append(f"{module}.{name}")
    return absent


def _sentence(absent: Iterable[str]) -> str:
    oldest, newest = TRIED
    return f"elastirun.train cannot run on torch {torch.__version__}, which lacks {', '.join(absent)}: install torch {oldest} to {newest}"


def _without_frames(error: WrongUse) -> WrongUse:
    """Return ``error``. If nothing catches it, the interpreter prints its last line alone, without the frames of imports."""
    usual = sys.excepthook

    def say(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        if value is error:
            print(f"{kind.__module__}.{kind.__qualname__}: {value}", file=sys.stderr)
        else:
            usual(kind, value, frames)

    sys.excepthook = say
    return error
