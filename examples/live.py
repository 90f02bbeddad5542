"""Train a small network on handwritten digits; workers that are left when others are lost, come or leave keep their processes.

    python examples/live.py                                       one process, no launcher
    elastirun --standalone --nproc-per-node=2 --max-restarts=100 examples/live.py
                                                                  kill one of the workers: the other one goes on with the next step
    elastirun --nnodes=1:3 --rdzv-id=live --rdzv-endpoint=HOST:29400 examples/live.py
                                                                  the same on each of one to three nodes; kill agents, start others

docs/elastic.md says what a script must do for that. The data are those of train.py.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState, elastic


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images")
    parser.add_argument("--checkpoint", default="runs/live", help="directory that all nodes share: where to save and resume")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="sleep so many seconds in each step, for demonstrations")
    args = parser.parse_args()

    elastic.init_process_group()
    found = load_digits()
    data = TensorDataset(torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16.0, torch.tensor(found.target))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = ElasticDataLoader(data, global_batch_size=64)
    state = TrainState(model=model, optimizer=optimizer, data=loader)

    def changed(rank: int, world_size: int) -> None:
        print(f"process {os.getpid()} is rank {rank} of {world_size} after step {state.step}", flush=True)

    run = elastic.Elastic(state, lambda: Checkpointer(args.checkpoint, every=50), changed)
    while loader.epoch < args.epochs:
        epoch, loss = loader.epoch + 1, torch.zeros(())
        for images, labels in run.batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            time.sleep(args.pause)
        if dist.get_rank() == 0:
            print(f"epoch {epoch:3d}/{args.epochs}  loss {loss:.4f}  world size {dist.get_world_size()}", flush=True)
    run.save()  # the last steps, since the newest checkpoint


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
