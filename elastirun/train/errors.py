"""Errors of a worker's training core.

    TrainError (a RuntimeError)
    ├── WrongUse           an argument is refused: each restart would meet that again, so the job ends at once
    │   └── WrongType      … for its type; a TypeError, too, as where torch refuses the same
    ├── ModelMismatch      the ranks do not hold the same parameters: which one, and what each rank has
    ├── OutsideForward     a gradient came from a backward that did not begin from an output of the module's
    │                      forward, or from no backward at all
    ├── Diverged           the replicas' parameters are no longer the same: the first difference, and the ranks
    ├── RoundUnknown       nobody could tell whether this worker's round is still the current one (``is_current``)
    ├── CheckpointError    a checkpoint cannot be written, or is not whole: which file, and what to do
    │   └── ClaimLost      another round or job has taken the directory over; nothing was published
    └── ReductionFailed    the ranks could not add up their gradients; the module needs a new process group (``set_group``)
        └── PeerLost       … because a process is gone: which rank

Those that are raised without torch, too, are defined in ``elastirun.errors``, beside the launcher's own.
"""

from __future__ import annotations

from elastirun.errors import CheckpointError, ClaimLost, RoundUnknown, TrainError

__all__ = [
    "CheckpointError",
    "ClaimLost",
    "Diverged",
    "ModelMismatch",
    "OutsideForward",
    "PeerLost",
    "ReductionFailed",
    "RoundUnknown",
    "TrainError",
    "WrongType",
    "WrongUse",
]


class WrongUse(TrainError):
    """A refusal that depends on nothing but the script. ``agent/failures/classify.py`` knows it by its name."""


class WrongType(WrongUse, TypeError):
    """An argument is of another type than the one that is needed."""


class ModelMismatch(TrainError):
    """The ranks were built with different parameters."""


class OutsideForward(TrainError):
    """A gradient arrived that the module did not expect."""


class Diverged(TrainError):
    """Replicas that must be equal are not."""


class ReductionFailed(TrainError):
    """A gradient reduction ended without a result. The module can be used again after ``set_group``."""


class PeerLost(ReductionFailed):
    """The process of ``rank`` (in the group; -1 when it is not known which) ended while others waited for it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank
