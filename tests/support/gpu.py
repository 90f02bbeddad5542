"""The GPU that tests and measurements of GPUs use; the CPU and gloo as stand-ins in a dry run, so that the programs are known to work.

``TEST_GPU=dry`` asks for the stand-ins where there is no GPU, ``=required`` refuses them. Several ranks may share one GPU: see ``share``.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.figures import figure

HERE = torch.cuda.is_available()
DRY = not HERE and os.environ.get("TEST_GPU") == "dry"
if not HERE and os.environ.get("TEST_GPU") == "required":
    raise RuntimeError("torch sees no GPU any more")  # or what runs on the CPU would be taken for a result of the GPU
DEVICE = "cuda" if HERE else "cpu"
NCCL = "nccl" if HERE else "gloo"
BOTH = "cpu:gloo,cuda:nccl" if HERE else "gloo"  # for process groups that reduce tensors of both kinds
NO_GPU = "there is no GPU (TEST_GPU=dry: on the CPU instead)"

__all__ = ["BOTH", "DEVICE", "DRY", "HERE", "NCCL", "NO_GPU", "figure", "needs_gpu", "share", "synchronize"]

needs_gpu = pytest.mark.skipif(not HERE and not DRY, reason=NO_GPU)


def share(rank: int) -> torch.device:
    """Return the device for ``rank``; all ranks share it. NCCL refuses two ranks on one GPU, unless they seem to be on two hosts."""
    os.environ.update({"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"})
    if HERE:
        torch.cuda.set_device(0)
    return torch.device(DEVICE, 0) if HERE else torch.device("cpu")


def synchronize() -> None:
    """Wait until the GPU has done all that it was given."""
    if HERE:
        torch.cuda.synchronize()
