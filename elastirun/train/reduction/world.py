"""The ranks that a module reduces over, with what it has for them alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from elastirun.train.reduction.buckets.bucket_set import BucketSet
from elastirun.train.reduction.transports.base import Transport


@dataclass(frozen=True)
class World:
    """The ranks that reduce together. A module that goes on in another world replaces the whole value.

    ``process_group`` is the user's; ``group`` has the same ranks, for the module alone. ``buckets`` lie in memory of
    ``transport``.
    """

    process_group: dist.ProcessGroup
    group: dist.ProcessGroup
    transport: Transport
    buckets: BucketSet
    rank: int
    size: int
