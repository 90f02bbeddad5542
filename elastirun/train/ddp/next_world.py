"""The parts of a module that belong to a world: made for another one while the present one is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from elastirun.train.reduction.buckets.bucket_set import BucketSet
from elastirun.train.reduction.transports.base import Transport


@dataclass(frozen=True)
class NextWorld:
    """``process_group`` has the ranks of the world, ``group`` the same ones for the module alone. ``buckets`` have their memory."""

    process_group: dist.ProcessGroup
    group: dist.ProcessGroup
    transport: Transport
    buckets: BucketSet
