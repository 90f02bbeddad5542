"""What a module needs in another world: made while the present one is used, and then taken into use at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from .bucket_set import BucketSet
from .transports.base import Transport


@dataclass(frozen=True)
class NextWorld:
    """``process_group`` has the ranks of the world, ``group`` the same ones for the module alone. ``buckets`` have their memory."""

    process_group: dist.ProcessGroup
    group: dist.ProcessGroup
    transport: Transport
    buckets: BucketSet
