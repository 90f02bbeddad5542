"""Gradients with torch.compile, within and around the data-parallel module, beside those without it.

Two ranks share a GPU over NCCL.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

from elastirun.train import DistributedDataParallel as DDP
from tests.support.differences import highest, relative
from tests.support.gpu import BOTH, DEVICE, HERE, figure, needs_gpu
from tests.support.worlds import run

pytestmark = needs_gpu

WIDTH, LAYERS, STEPS = 512, 3, 5  # a layer takes 1 MiB: a bucket of its own below
BACKENDS = ("aot_eager", "inductor")
STAND_IN = "eager"  # for inductor in a dry run
WHERE = ("inside", "outside")  # DDP(torch.compile(model)), torch.compile(DDP(model))
# Largest difference, as a share of the largest gradient of the tensor. bfloat16 keeps 8 bits, and a compiled graph
# rounds to them less often than separate operations do.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
CASES = [(backend, where, kind) for backend in BACKENDS for where in WHERE for kind in TOLERANCE]
LIMIT = 100.0  # seconds for a world

Found = tuple[float, str]  # the largest relative difference, and the traceback of what went wrong


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + gelu(layer(norm(x)))
        return x


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def backward(model: Any, x: Tensor, kind: str) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16) if kind == "bfloat16" else nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()


def expected(net: Net, step: int, world: int, kind: str) -> list[Tensor]:
    """Return the mean of the gradients of all ranks, without compiler and without groups."""
    alone = Net().to(DEVICE)
    alone.load_state_dict(net.state_dict())
    for rank in range(world):
        backward(alone, batch(step, rank), kind)
    return [param.grad / world for param in alone.parameters() if param.grad is not None]


def differ(rank: int, world: int, backend: str, where: str, kind: str) -> float:
    """Train, and return by how much any gradient differs, relative to the largest of its tensor.

    NaN, where either is NaN. Raises where replicas differ in the end.
    """
    compiler = STAND_IN if backend == "inductor" and not HERE else backend
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = Net().to(DEVICE)
    if where == "inside":
        ddp = DDP(torch.compile(net, backend=compiler), bucket_cap_mb=1)
        model: Any = ddp
    else:
        ddp = DDP(net, bucket_cap_mb=1)
        model = torch.compile(ddp, backend=compiler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found: list[float] = []
    for step in range(STEPS):
        without = expected(net, step, world, kind)
        optimizer.zero_grad()
        backward(model, batch(step, rank), kind)
        for param, gradient in zip(net.parameters(), without, strict=True):
            assert param.grad is not None
            found.append(relative(param.grad, gradient))
        optimizer.step()
    ddp.check_replicas()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1  # it was compiled
    return highest(found)


def all_cases(rank: int, world: int, folder: str) -> list[Found]:
    # A rank is a daemonic process, which may have no workers of its own: it compiles by itself. Each has its
    # own cache of compiled code.
    os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{rank}"})
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/{rank}/triton"
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # where the variable was read when torch was imported
    torch.backends.cuda.matmul.allow_tf32 = False
    found: list[Found] = []
    for case in CASES:
        try:
            found.append((differ(rank, world, *case), ""))
        except Exception:
            found.append((float("inf"), traceback.format_exc()))
        dist.barrier()  # the ranks compile at different speeds
    return found


@pytest.fixture(scope="module")
def of_ranks() -> dict[tuple[str, str, str], list[Found]]:
    """The result of every case on each rank, from one world: what takes long is loading the compiler."""
    with tempfile.TemporaryDirectory(prefix="elastirun-compile-") as folder:
        ranks = run(2, all_cases, folder, backend=BOTH, timeout=LIMIT)
    of = {case: [rank[at] for rank in ranks] for at, case in enumerate(CASES)}
    offs: dict[str, list[float]] = {}
    for (backend, _, kind), found in of.items():
        offs.setdefault(f"{backend} {kind}", []).extend(off for off, _ in found)
    most = {what: highest(values) for what, values in offs.items()}
    text = ", ".join(f"{what} {off:.1e}" for what, off in most.items())
    passed = {what.replace(" ", "_"): off for what, off in most.items() if off < float("inf")}
    figure("compile", f"largest difference of a gradient, of the largest of its tensor: {text}", **passed)
    return of


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_compile_gives_the_same_gradients(case: tuple[str, str, str], of_ranks: dict[tuple[str, str, str], list[Found]]) -> None:
    most, errors = highest(off for off, _ in of_ranks[case]), [error for _, error in of_ranks[case] if error]
    assert not errors, errors[0]
    assert most < TOLERANCE[case[2]]
