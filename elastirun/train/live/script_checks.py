"""Checks of what a script gives to ``Elastic``: what a change of the world could not bring along is refused at once."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist
from torch import nn

from elastirun.train.data.loader import ElasticDataLoader
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.ddp.world_switch import WorldSwitch, reducing
from elastirun.train.errors import WrongUse
from elastirun.train.live.first_group import LAUNCHED, NCCL, Given
from elastirun.train.state.train_state import TrainState


def parts_of(state: TrainState) -> tuple[DistributedDataParallel, ElasticDataLoader]:
    """Return the module that reduces, and the loader. Raises TrainError if the state has none, or several."""
    models = [part for part in state.values() if isinstance(part, DistributedDataParallel)]
    loaders = [part for part in state.values() if isinstance(part, ElasticDataLoader)]
    if len(models) != 1 or len(loaders) != 1:
        raise WrongUse(
            "Elastic needs a state with one DistributedDataParallel of elastirun.train and one ElasticDataLoader, "
            f"this one has {len(models)} and {len(loaders)}"
        )
    for name, part in state.items():
        is_ours = part is loaders[0] or isinstance(part, nn.Module)
        if not is_ours and hasattr(part, "state_dict") and hasattr(part, "__iter__"):
            raise WrongUse(
                f"Elastic cannot bring back {name!r}, a loader with a position of its own, to where it was before a "
                "step that does not count: have its samples in the dataset of the ElasticDataLoader, or find them by run.step"
            )
    return models[0], loaders[0]


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
