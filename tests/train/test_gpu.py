"""The same rules on a GPU, over NCCL and gloo. Skipped where there is none, but for a dry run (tests/support/gpu.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastirun.train import DistributedDataParallel as DDP
from tests.support.gpu import BOTH, HERE, NCCL, needs_gpu, share
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, batch

pytestmark = needs_gpu
DEVICE_IDS = [0] if HERE else None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.one, self.two = nn.Linear(64, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        out: Tensor = (self.two if second else self.one)(self.layers(x))
        return out


def gpu() -> tuple[torch.device, dist.ProcessGroup]:
    return share(0), dist.new_group([0], backend=NCCL)


def on_gpu(rank: int, world: int, changing: bool) -> list[Any]:
    device, group = gpu()
    plain, wrapped = Net().to(device), Net().to(device)
    if not changing:
        plain.two.requires_grad_(False)
        wrapped.two.requires_grad_(False)
    ddp = DDP(wrapped, device_ids=DEVICE_IDS, process_group=group)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (plain, wrapped)]
    found: list[Any] = []
    for step in range(10):
        x = batch(step, rank, 8)
        for net, optimizer in zip((plain, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            net(x.to(device), changing and step % 2 == 1).pow(2).mean().backward()
        same = [
            a.grad is b.grad is None or torch.allclose(a.grad, b.grad)
            for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True)
        ]
        found.append(all(same))
        for optimizer in optimizers:
            optimizer.step()
    ddp.check_replicas()
    defers = ddp._reducer.conclusion.defers if HERE else not changing  # on a CPU the host never defers
    return [*found, ddp.agreement.with_data == 1, defers is not changing]


@pytest.mark.parametrize("changing", [False, True])
def test_gradients_on_a_gpu(changing: bool) -> None:
    """While nothing changes the host does not wait for the control words; once a parameter lacked a gradient, it does."""
    assert run(1, on_gpu, changing) == [[True] * 12]


def steady(rank: int, world: int) -> int:
    """Return the number of steps in which nothing made the host wait for the GPU, once the plan is made."""
    device, group = gpu()
    ddp = DDP(Net().to(device), device_ids=DEVICE_IDS, process_group=group, find_unused_parameters=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batches = [batch(step, rank, 8).to(device) for step in range(16)]
    done = 0
    for step, x in enumerate(batches):
        if HERE:
            torch.cuda.set_sync_debug_mode("error" if step >= 10 else "default")
        optimizer.zero_grad()
        (ddp(x, False).pow(2).mean() + ddp.module.two.weight.sum() * 0.0).backward()
        optimizer.step()
        done += step >= 10
    if HERE:
        torch.cuda.set_sync_debug_mode("default")
    return done


def test_the_host_does_not_wait_for_the_gpu() -> None:
    assert run(1, steady) == [6]


def shared(rank: int, world: int, backend: str) -> list[bool]:
    """Several ranks on one GPU. NCCL refuses that, unless it takes them for ranks of several hosts."""
    device = share(rank)
    net, found = Net().to(device), []
    ddp = DDP(net, process_group=dist.new_group(backend=backend))
    for step in range(10):
        expected = [torch.zeros_like(param) for param in net.parameters()]
        for other in range(world):
            copied = Net().to(device)
            copied.load_state_dict(net.state_dict())
            copied(batch(step, other, 8).to(device), step % 2 == 1).pow(2).mean().backward()
            for total, param in zip(expected, copied.parameters(), strict=True):
                if param.grad is not None:
                    total += param.grad / world
        net.zero_grad()
        ddp(batch(step, rank, 8).to(device), step % 2 == 1).pow(2).mean().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        found.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, expected, strict=True)))
    return found


@pytest.mark.parametrize(("world", "backend"), [(2, "gloo"), (2, NCCL), (3, NCCL), (2, BOTH)])
def test_ranks_share_a_gpu(world: int, backend: str) -> None:
    assert run(world, shared, backend) == [[True] * 10] * world


def synchronized(rank: int, world: int) -> list[bool]:
    """Compare SyncBatchNorm in our module with batch norm in one process.

    SyncBatchNorm refuses CPUs: in a dry run there is none, and each rank has the whole batch.
    """
    device, group = share(rank), dist.new_group(backend=NCCL)
    alone, net = Net().to(device), Net().to(device)
    ddp = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net, group) if HERE else net, process_group=group)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (alone, ddp)]
    found = []
    for step in range(6):
        whole = batch(step, 0, 8).to(device)
        for module, x, optimizer in ((alone, whole, optimizers[0]), (ddp, whole[rank::world] if HERE else whole, optimizers[1])):
            optimizer.zero_grad()
            module(x, step % 2 == 1).pow(2).mean().backward()
            optimizer.step()
        pairs = zip((*alone.parameters(), *alone.buffers()), (*ddp.module.parameters(), *ddp.module.buffers()), strict=True)
        found.append(all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs))
    ddp.check_replicas()
    return found


def test_synchronized_batch_norm_is_that_of_one_process() -> None:
    assert run(2, synchronized) == [[True] * 6] * 2
