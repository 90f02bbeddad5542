"""Errors of a worker's training core.

    TrainError (a RuntimeError)
    ├── ModelMismatch      the ranks do not hold the same parameters: which one, and what each rank has
    ├── OutsideForward     a gradient came from a backward that did not begin from an output of the module's forward
    ├── Diverged           the replicas' parameters are no longer the same: the first difference, and the ranks
    ├── RoundUnknown       nobody could tell whether this worker's round is still the current one (``is_current``)
    └── ReductionFailed    the ranks could not add up their gradients; the module needs a new process group (``set_group``)
        └── PeerLost       … because a process is gone: which rank

The launcher's own errors are in ``elastirun.errors``; the training core runs in the worker and knows nothing of them.
"""

from __future__ import annotations


class TrainError(RuntimeError):
    """The root of the tree; raised itself for wrong use without a class of its own."""


class ModelMismatch(TrainError):
    """The ranks were built with different parameters."""


class OutsideForward(TrainError):
    """A gradient arrived that the module did not expect."""


class Diverged(TrainError):
    """Replicas that must be equal are not."""


class RoundUnknown(TrainError):
    """The agent, or the rendezvous store behind it, did not answer in time: the round may be current or not."""


class ReductionFailed(TrainError):
    """A gradient reduction ended without a result. The module can be used again after ``set_group``."""


class PeerLost(ReductionFailed):
    """The process of ``rank`` (in the group; -1 when it is not known which) ended while others waited for it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank
