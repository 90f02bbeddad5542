"""The training core: what a worker may use to train on changing worlds. It needs torch, and knows nothing of the launcher."""

from . import torch_private

torch_private.check()  # before the modules below, which look the names up

# ruff: noqa: E402
from elastirun.current_round import is_current
from elastirun.progress import progress

from .checkpoints.checkpointer import Checkpointer
from .checkpoints.per_rank import PerRank
from .checkpoints.restoring import load_checkpoint
from .control_words import Agreement
from .data import ElasticDataLoader
from .ddp import DistributedDataParallel
from .deterministic import DeterministicShards
from .drain import Drain
from .errors import CheckpointError, Diverged, ModelMismatch, OutsideForward, PeerLost, ReductionFailed, RoundUnknown, TrainError
from .keyed_rng import keyed_rng
from .sharded_data import ElasticShards
from .train_state import TrainState

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
    "TrainError",
    "TrainState",
    "is_current",
    "keyed_rng",
    "load_checkpoint",
    "progress",
]
