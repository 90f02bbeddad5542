"""A worker that trains live, with elastirun or torchft, and writes a line for each step that counts: time, pid, workers that took part.

Variables: ``BENCH_PEER`` (elastirun, torchft), ``BENCH_STEPS`` (the file), ``BENCH_WIDTH`` (of the network), for torchft also
``BENCH_REPLICA``, the number of the replica, and ``TORCHFT_LIGHTHOUSE``.
"""

import os
import time
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, BATCH, PAUSE = int(os.environ["BENCH_WIDTH"]), 8, 0.05  # seconds between two steps
steps = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def wrote(workers: int) -> None:
    os.write(steps, f"{time.monotonic():.4f} {os.getpid()} {workers}\n".encode())
    time.sleep(PAUSE)


def with_elastirun() -> None:
    from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic

    elastic.init_process_group()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    loader = ElasticDataLoader(TensorDataset(torch.randn(1_000_000, 1)), global_batch_size=3 * BATCH)
    run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
    while True:
        for batch in run.batches():
            optimizer.zero_grad()
            if batch is None:
                model.skip()
            else:
                model(batch[0].expand(-1, WIDTH)).square().mean().backward()
            optimizer.step()
            if run.counts and not model.failed:
                wrote(torch.distributed.get_world_size())


def with_torchft() -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    adam = torch.optim.Adam(net.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{os.environ['BENCH_REPLICA']}",
        timeout=timedelta(seconds=10),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, adam)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        model(torch.randn(BATCH, 1).expand(-1, WIDTH)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            wrote(manager.num_participants())


if __name__ == "__main__":
    {"elastirun": with_elastirun, "torchft": with_torchft}[os.environ["BENCH_PEER"]]()
