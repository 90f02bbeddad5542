"""The training core: what a worker may use to train on changing worlds. It needs torch, and knows nothing of the launcher."""

from elastirun.current_round import is_current

from .control_words import Agreement
from .data import ElasticDataLoader
from .ddp import DistributedDataParallel
from .deterministic import DeterministicShards
from .drain import Drain
from .errors import CheckpointError, Diverged, ModelMismatch, OutsideForward, PeerLost, ReductionFailed, RoundUnknown, TrainError
from .keyed_rng import keyed_rng
from .sharded_data import ElasticShards

__all__ = [
    "Agreement",
    "CheckpointError",
    "DeterministicShards",
    "DistributedDataParallel",
    "Diverged",
    "Drain",
    "ElasticDataLoader",
    "ElasticShards",
    "ModelMismatch",
    "OutsideForward",
    "PeerLost",
    "ReductionFailed",
    "RoundUnknown",
    "TrainError",
    "is_current",
    "keyed_rng",
]
