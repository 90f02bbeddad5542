"""The first process group of a worker that may be live, and its connection to the agent."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from elastirun.train.errors import TrainError
from elastirun.train.groups.collectives import backends_of
from elastirun.train.groups.process_groups import init_default_group
from elastirun.worker.live_connection import LiveConnection
from elastirun.worker.live_messages import VARIABLE

LAUNCHED = "RANK"  # in the environment of a worker of any launcher
NCCL = "cpu:gloo,cuda:nccl"  # the backend of live workers on GPUs
LIVE = ("gloo", NCCL)  # backends of worlds that can change
# Environment of NCCL in a live worker: torch must neither end the process when a peer is lost, nor write a dump for a minute.
OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class Given:
    """What the script has given to ``init_process_group``, for the groups of later worlds."""

    backend = "gloo"
    timeout: timedelta | None = None
    connection: LiveConnection | None = None  # to the agent; None: the world of this process never changes


def init_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Make the default process group, in place of ``torch.distributed.init_process_group``.

    With gloo it is a group of this process alone: what comes next (the model, its first compilation) waits for nobody. ``Elastic`` makes
    the group of all workers that the launcher has started. So it is with "cpu:gloo,cuda:nccl", for a model on a GPU, which is
    experimental. With another backend it is that group at once. ``timeout``: for a collective; None: torch's default, 30 minutes for
    gloo. Raises TrainError if there is an agent of elastirun that cannot be reached.
    """
    Given.backend = backend = NCCL if ":" in backend and backends_of(backend) == backends_of(NCCL) else backend
    Given.timeout = timeout
    if backend in LIVE:
        Given.connection = _connect()
        if backend == NCCL and Given.connection is not None:
            os.environ.update(OF_NCCL)  # read when a group is made
        init_alone()
    else:
        dist.init_process_group(backend, timeout=timeout)


def init_alone() -> None:
    """Make a default group of this process alone."""
    init_default_group(Given.backend, dist.HashStore(), 0, 1, None)  # type: ignore[attr-defined]


def _connect() -> LiveConnection | None:
    """Connect to the agent; None if there is none. Raises TrainError if it cannot be reached."""
    if not os.environ.get(VARIABLE):
        return None
    try:
        return LiveConnection()
    except OSError as error:
        raise TrainError(f"the agent cannot be reached at the socket {os.environ[VARIABLE]}: {error.strerror}") from None
