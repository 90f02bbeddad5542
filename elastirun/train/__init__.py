"""The training core: what a worker may use to train on changing worlds. It needs torch, and knows nothing of the launcher."""

from elastirun.train import torch_private

torch_private.check()  # before the modules below, which look the names up

# ruff: noqa: E402
from importlib import import_module
from typing import Any

from elastirun.progress import progress
from elastirun.train.checkpoints.checkpointer import Checkpointer
from elastirun.train.checkpoints.restoring import load_checkpoint
from elastirun.train.data.deterministic import DeterministicShards
from elastirun.train.data.keyed_rng import keyed_rng
from elastirun.train.data.loader import ElasticDataLoader
from elastirun.train.data.sharded_data import ElasticShards
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import (
    CheckpointError,
    Diverged,
    ModelMismatch,
    OutsideForward,
    PeerLost,
    ReductionFailed,
    RoundUnknown,
    TrainError,
)
from elastirun.train.mesh import build_mesh, clip_grad_norm_
from elastirun.train.reduction.control_words import Agreement
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.stages import Stages
from elastirun.train.state.train_state import TrainState
from elastirun.train.stopping.drain import Drain
from elastirun.train.zero.sharded_optimizer import ShardedOptimizer
from elastirun.worker.current_round import is_current

__all__ = [
    "Agreement",
    "CheckpointError",
    "Checkpointer",
    "DeterministicShards",
    "DistributedDataParallel",
    "Diverged",
    "Drain",
    "ElasticDataLoader",
    "ElasticShards",
    "ModelMismatch",
    "OutsideForward",
    "PeerLost",
    "PerRank",
    "ReductionFailed",
    "RoundUnknown",
    "ShardedOptimizer",
    "Stages",
    "TrainError",
    "TrainState",
    "build_mesh",
    "clip_grad_norm_",
    "is_current",
    "keyed_rng",
    "load_checkpoint",
    "progress",
]


def __getattr__(name: str) -> Any:
    """Import ``elastic`` when it is used: few workers are live, and the others start without it."""
    if name == "elastic":
        return import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
