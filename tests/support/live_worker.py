"""A worker of a live job that logs what it trains on and where it gets to. For tests/support/live_log.py, which judges the log.

Environment: TEST_LOG, a file to append to; TEST_EPOCHS, TEST_SAMPLES, TEST_BATCH, TEST_WIDTH (of the network), TEST_PAUSE (seconds in each
step), TEST_DIGESTS (0: none is computed), TEST_EVALUATES (all ranks meet after each epoch), TEST_TRANSPORT, TEST_BUFFERS (the module has a
buffer), TEST_SEED (of the first parameters; none: each process has its own), TEST_CHECKPOINTS (a directory; none: no checkpoints),
TEST_EVERY (steps from one checkpoint to the next), TEST_DEVICE (cpu or cuda; several workers share a GPU, over NCCL), TEST_HOLD (a fifo: a
worker that begins in a later round than the first waits until somebody opens it to write), TEST_TRAPS (a folder, see
tests/support/live_traps.py), TEST_SLICE (with traps: bytes of a slice of the state), TEST_CUTS (a worker of the first round shuts its
connection to the store of a later round down once, in a step), TEST_EXITS (a worker ends by os._exit).
"""

import faulthandler
import hashlib
import importlib
import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState, elastic

EPOCHS, SAMPLES, BATCH = (int(os.environ[f"TEST_{name}"]) for name in ("EPOCHS", "SAMPLES", "BATCH"))
WIDTH, PAUSE = int(os.environ.get("TEST_WIDTH", "16")), float(os.environ.get("TEST_PAUSE", "0"))
DIGESTS = os.environ.get("TEST_DIGESTS", "1") != "0"
EVALUATES = "TEST_EVALUATES" in os.environ
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
LOG = os.open(os.environ["TEST_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Numbers(torch.utils.data.Dataset):
    """Sample ``i`` is its number and a random vector."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def write(what: str, **more: object) -> None:
    """Append a line; what it says holds when the call returns, whoever is killed then."""
    world = 1000 * int(os.environ["ELASTIRUN_ROUND"]) + int(os.environ.get("ELASTIRUN_WORLD", "0"))  # a round has one world after the other
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "round": world, **more}
    os.write(LOG, json.dumps(line).encode() + b"\n")


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters and of the optimizer's state; an empty text where none is wanted."""
    if not DIGESTS:
        return ""
    found = hashlib.sha256()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in [*model.parameters(), *states]:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def cut_store() -> None:
    """Shut down this process's connection to the store of its round."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.getpeername()[1] == int(os.environ["MASTER_PORT"]):
                        connection.shutdown(socket.SHUT_RDWR)
                        write("cut")


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # for whoever looks at a job that hangs
    torch.set_num_threads(1)
    write("begun")
    if traps := os.environ.get("TEST_TRAPS"):
        importlib.import_module("live_traps").install(Path(traps), write, int(os.environ["TEST_SLICE"]))  # beside this script
    if (hold := os.environ.get("TEST_HOLD")) and os.environ["ELASTIRUN_ROUND"] != "1":
        with open(f"{hold}.{os.getpid()}", "w"):  # a new worker of a later round says that it is here, and waits
            open(hold).close()
    if DEVICE == "cuda":  # NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts
        os.environ.update({"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo"})
    elastic.init_process_group(*["cpu:gloo,cuda:nccl"] * (DEVICE == "cuda"))
    torch.manual_seed(int(os.environ.get("TEST_SEED", os.getpid())))  # replicas begin differently; rank 0's state counts
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(DEVICE)
    if "TEST_BUFFERS" in os.environ:
        net.register_buffer("mask", torch.ones(WIDTH, device=DEVICE))  # copied in each forward
    model = DistributedDataParallel(net, transport=os.environ.get("TEST_TRANSPORT", "auto"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = ElasticDataLoader(Numbers(), global_batch_size=BATCH)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    folder, every = os.environ.get("TEST_CHECKPOINTS"), int(os.environ.get("TEST_EVERY", "1"))
    checkpoints = (lambda: Checkpointer(folder, every=every)) if folder else None
    begun = {"step": -1}

    def changed(rank: int, world_size: int) -> None:
        begun["step"] = state.step
        write("world", rank=rank, world=world_size, step=state.step, digest=digest(model, optimizer))

    cuts = "TEST_CUTS" in os.environ and os.environ["ELASTIRUN_ROUND"] == "1"
    run = elastic.Elastic(state, checkpoints, changed)
    while loader.epoch < EPOCHS:
        for batch in run.batches():
            optimizer.zero_grad()
            loss, count = torch.zeros(()), 0
            if batch is None:
                model.skip()
            else:
                numbers, data = batch
                if run.counts:
                    write("offered", step=run.step + 1, epoch=loader.epoch, samples=numbers.tolist())
                data = data.to(DEVICE)
                count, loss = len(data), (model(data) - torch.sin(3 * data[:, :1])).square().mean()
                loss.backward()
            optimizer.step()
            scheduler.step()
            if run.counts:
                rate = scheduler.get_last_lr()[0]
                write("made", step=run.step + 1, digest=digest(model, optimizer), rate=rate, loss=loss.item(), samples=count)
            if cuts and os.environ["ELASTIRUN_ROUND"] != "1":
                cut_store()
                cuts = False
            time.sleep(PAUSE)
        if EVALUATES:
            with suppress(RuntimeError):  # a peer is lost just then
                dist.all_reduce(torch.zeros(1))
                write("evaluated", step=run.step)
    write("over", step=run.step)
    if "TEST_EXITS" in os.environ:
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
