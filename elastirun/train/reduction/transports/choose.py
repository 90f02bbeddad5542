"""Chooses the transport of the gradients: shared memory on one host, or the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastirun.train.errors import ReductionFailed, TrainError, WrongUse
from elastirun.train.reduction.transports.base import Transport
from elastirun.train.reduction.transports.group import GroupTransport
from elastirun.train.reduction.transports.shared_memory import SharedMemory


def choose(group: dist.ProcessGroup, device: torch.device, wanted: str = "auto") -> Transport:
    """Return the transport for parameters on ``device``. All ranks call it at the same point and get the same.

    ``wanted``: "auto" takes shared memory where that is possible and the process group elsewhere; "shared memory" raises TrainError where
    that is impossible; "group" takes the process group.
    """
    if wanted not in ("auto", "group", "shared memory"):
        raise WrongUse(f"there is no transport {wanted!r}: auto, group or shared memory")

    try:
        if device.type != "cpu" or dist.get_world_size(group) == 1:
            raise TrainError(f"not for {dist.get_world_size(group)} ranks with parameters on {device}")
        return SharedMemory(group, willing=wanted != "group", strict=wanted == "shared memory")
    except TrainError as error:
        if wanted == "shared memory" or isinstance(error, ReductionFailed):
            raise
    return GroupTransport(group)
