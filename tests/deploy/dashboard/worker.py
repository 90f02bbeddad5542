"""A worker of the job that the dashboard shows: trains a small model, and fails, hangs or is slow when the job says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from elastirun.train import Checkpointer, DistributedDataParallel, Drain, TrainState

STEP, SLOW_STEP = 0.05, 0.15  # seconds of computing
FOLDER, NODE = Path(os.environ["TEST_FOLDER"]), os.environ["TEST_NODE"]
WORKER = f"{NODE}-{os.environ['LOCAL_RANK']}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, batch: Tensor) -> Tensor:
        time.sleep(SLOW_STEP if (FOLDER / f"slow-{NODE}").exists() else STEP)
        result: Tensor = self.linear(batch)
        return result


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    module = Model()
    model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.01)
    run = TrainState(model=module, optimizer=optimizer)
    checkpoints, drain = Checkpointer(str(FOLDER / "checkpoints"), every=100), Drain(model)
    checkpoints.restore(run)
    (FOLDER / f"{WORKER}.pid").write_text(str(os.getpid()))
    order = FOLDER / f"raise-{WORKER}"
    while True:  # until a signal ends the job
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        run.step += 1
        checkpoints.save(run.step, run, now=drain.now)
        if drain.now:
            checkpoints.close(0.8 * drain.seconds_left)
            drain.leave()
        if order.exists():
            order.unlink()
            raise ValueError("no data in shard 7")


if __name__ == "__main__":
    main()
