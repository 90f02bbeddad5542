"""The start of a worker that may be live: its first group, its connection to the agent, and checks of what its script has given.

What a change of the world could not bring along is refused at once.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from elastirun.train.arguments import named, shown, verify_type
from elastirun.train.data.loader import ElasticDataLoader
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.ddp.world_switch import WorldSwitch, reducing
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import backends_of
from elastirun.train.groups.process_groups import init_default_group
from elastirun.train.state.loading import ShardedState
from elastirun.train.state.train_state import TrainState
from elastirun.worker.live_connection import LiveConnection
from elastirun.worker.live_messages import VARIABLE

T = TypeVar("T")
LAUNCHED = "RANK"  # in the environment of a worker of any launcher
NCCL = "cpu:gloo,cuda:nccl"  # the backend of live workers on GPUs
LIVE = ("gloo", NCCL)  # backends of worlds that can change
# Environment of NCCL in a live worker: torch must neither end the process when a peer is lost, nor write a dump for a minute.
OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class Given:
    """Options that the script has given to ``init_process_group``, for the groups of later worlds."""

    backend = "gloo"
    timeout: timedelta | None = None
    connection: LiveConnection | None = None  # to the agent; None: the world of this process never changes


def init_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Make the default process group, in place of ``torch.distributed.init_process_group``.

    With gloo it is a group of this process alone: what comes next (the model, its first compilation) waits for nobody. ``Elastic`` makes
    the group of all workers that the launcher has started. So it is with "cpu:gloo,cuda:nccl", for a model on a GPU, which is
    experimental. With another backend it is that group at once. ``timeout``: for a collective; None: torch's default, 30 minutes for
    gloo. Raises TrainError if there is an agent of elastirun that cannot be reached, and for a backend that torch lacks.
    """
    _verify_given(backend, timeout)
    if backend in LIVE and os.environ.get("ELASTIRUN_MESH"):
        raise WrongUse("a mesh (--mesh) has no live workers yet: use torch.distributed.init_process_group() and no Elastic")
    Given.backend = backend = NCCL if ":" in backend and backends_of(backend) == backends_of(NCCL) else backend
    Given.timeout = timeout
    if backend in LIVE:
        Given.connection = _connect()
        if backend == NCCL and Given.connection is not None:
            os.environ.update(OF_NCCL)  # read when a group is made
        init_alone()
    else:
        dist.init_process_group(backend, timeout=timeout)


def _verify_given(backend: Any, timeout: Any) -> None:
    """Raise WrongUse for what later worlds could not be made of."""
    names = [part.rpartition(":")[2] for part in backend.split(",")] if isinstance(backend, str) else [""]
    if missing := [name for name in names if not dist.is_backend_available(name)]:
        raise WrongUse(f'this torch has no backend {missing[0] or shown(backend)}: give "gloo", or "{NCCL}" for a model on a GPU')
    verify_type(timeout, timedelta | None, "timeout", "a datetime.timedelta, such as timedelta(minutes=5)")


def init_alone() -> None:
    """Make a default group of this process alone."""
    init_default_group(Given.backend, dist.HashStore(), 0, 1, None)  # type: ignore[attr-defined]


def _connect() -> LiveConnection | None:
    """Connect to the agent; None if there is none. Raises TrainError if it cannot be reached."""
    if not os.environ.get(VARIABLE):
        return None
    try:
        return LiveConnection()
    except OSError as error:
        raise TrainError(f"the agent cannot be reached at the socket {os.environ[VARIABLE]}: {error.strerror}") from None


def parts_of(state: TrainState) -> tuple[DistributedDataParallel, ElasticDataLoader]:
    """Return the module that reduces, and the loader. Raises TrainError if the state has none, or several."""
    verify_type(state, TrainState, "state", "TrainState(model=…, optimizer=…, data=…)")
    model = _only_part(state, DistributedDataParallel, "model", "(module)")
    loader = _only_part(state, ElasticDataLoader, "data", "(dataset, global_batch_size)")
    if loader.balance:
        raise WrongUse("Elastic shares the data evenly in each world: leave balance=True out of its ElasticDataLoader")
    for name, part in state.items():
        if isinstance(part, ShardedState):
            raise WrongUse(f"a lost rank takes its part of {name!r}, a ShardedOptimizer, along: give Elastic an optimizer that is whole")
        is_ours = part is loader or isinstance(part, nn.Module)
        if not is_ours and hasattr(part, "state_dict") and hasattr(part, "__iter__"):
            raise WrongUse(
                f"Elastic cannot bring back {name!r}, a loader with a position of its own, to where it was before a "
                "step that does not count: have its samples in the dataset of the ElasticDataLoader, or find them by run.step"
            )
    return model, loader


def _only_part(state: TrainState, kind: type[T], name: str, arguments: str) -> T:
    """Return the only part of ``state`` that is of ``kind``. Raises WrongUse if there is none, or several."""
    found = [part for part in state.values() if isinstance(part, kind)]
    if len(found) > 1:
        raise WrongUse(f"Elastic needs a state with one {kind.__name__}, this one has {len(found)}")
    if not found:
        given = f"whose {name} is {named(state[name])}" if name in state else f"without {name}"
        raise WrongUse(f"Elastic cannot use a state {given}: give {name}=elastirun.train.{kind.__name__}{arguments}")
    return found[0]


def check(model: DistributedDataParallel) -> None:
    """Raise TrainError if the model cannot change worlds."""
    if dist.get_world_size() > 1:
        raise WrongUse("call elastic.init_process_group() in place of torch.distributed.init_process_group()")
    if Given.backend != NCCL and any(param.is_cuda for param in model.parameters()):
        raise WrongUse(f'with parameters on a GPU, Elastic needs elastic.init_process_group("{NCCL}")')
    if (Given.connection is not None or LAUNCHED in os.environ) and reducing() > 1:
        gc.collect()  # the script may have replaced one
        if (number := reducing()) > 1:
            raise WrongUse(
                "Elastic works with one DistributedDataParallel in a process, whose group changes with the world, "
                f"and there are {number}: have the networks in one module, and one backward for each batch"
            )
    if WorldSwitch(model).hook_with_state:
        raise WrongUse("a communication hook with a state, such as PowerSGD's or a process group, does not fit into the next world")
    if WorldSwitch(model).steps_in_backward:
        raise WrongUse("a step that is made in the backward cannot be dropped: Elastic does not work with step_in_backward()")
