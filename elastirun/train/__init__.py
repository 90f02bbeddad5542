"""The training core: what a worker may use to train on changing worlds. It needs torch, and knows nothing of the launcher."""

from .control_words import Agreement
from .current import is_current
from .data import ElasticDataLoader
from .ddp import DistributedDataParallel
from .errors import Diverged, ModelMismatch, OutsideForward, PeerLost, ReductionFailed, RoundUnknown, TrainError

__all__ = [
    "Agreement",
    "DistributedDataParallel",
    "Diverged",
    "ElasticDataLoader",
    "ModelMismatch",
    "OutsideForward",
    "PeerLost",
    "ReductionFailed",
    "RoundUnknown",
    "TrainError",
    "is_current",
]
