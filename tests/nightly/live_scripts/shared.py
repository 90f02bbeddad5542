"""What the scripts share: data, a network, a pace for the runner, and what they leave for the comparison."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastirun.train import elastic

faulthandler.register(signal.SIGUSR1)  # for whoever looks at a job that hangs
FOLDER = Path(os.environ["LIVE_FOLDER"])  # for the log, and for what a script leaves
DISTURBED = "ELASTIRUN_ROUND" in os.environ
EPOCHS, BATCHES, BATCH, WIDTH = 5, 40, 12, 8
QUICK, SLOW, SLOWEST = 0.04, 0.3, 1.5  # seconds in each step
# Steps: after PART of them for each disturbance so far a job is slow, and from LAST on slowest, until all is done.
PART, LAST = 25, 160


def samples(count: int = BATCHES * BATCH) -> TensorDataset:
    """Return inputs and targets, the same in each process."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))


def net() -> nn.Sequential:
    """Return a small network, the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the samples, as with ``mse_loss``, for one target each."""
    return (outputs - targets).square().mean()


def pace(run: elastic.Elastic) -> None:
    """Tell the runner of a step, and take some time. A script calls it once in each step.

    One rank takes its time, by turns, and the others wait for it in the next reduction: if it is killed there,
    they make a step that does not count.
    """
    if not DISTURBED:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    line = json.dumps([os.getpid(), rank, size, run.step, run.counts])
    with open(FOLDER / "log", "a") as log:
        log.write(f"{line}\n")
    done = len(list(FOLDER.glob("done.*")))  # the disturbances so far
    is_quick = run.step < PART * (done + 1) or (FOLDER / "done.all").exists()
    seconds = QUICK if is_quick else SLOW if run.step < LAST else SLOWEST
    time.sleep(seconds if run.step % size == rank else seconds / 10)


def end(run: elastic.Elastic, *parts: nn.Module | Tensor) -> None:
    """Leave the number of steps and the values of ``parts`` for the comparison."""
    tensors = [tensor for part in parts for tensor in ([part] if isinstance(part, Tensor) else part.state_dict().values())]
    values = [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]
    (FOLDER / f"ended.{os.getpid()}").write_text(json.dumps({"step": run.step, "values": values}))
    dist.destroy_process_group()
