"""Pipelines and tensor parallelism beside data parallelism, on four ranks, each compared with the same training in one process.

The optimizer is SGD with momentum: AdamW divides a gradient by its size, so a gradient of the wrong scale would pass.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss

from elastirun.train import Checkpointer, ElasticDataLoader, OutsideForward, PerRank, TrainError, TrainState
from elastirun.train import DistributedDataParallel as DDP
from tests.support.worlds import Died, run

WIDTH, BLOCKS = 8, 4
BATCH, MICRO = 16, 4  # samples of a step over all replicas; micro-batches of one replica's step in a pipeline
STEPS = 10
TOLERANCE = 1e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(gelu(self.up(self.ln(x))))
        return out


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch(step: int, replica: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of share ``replica`` of ``of`` of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x.chunk(of)[replica], target.chunk(of)[replica]


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def reference() -> nn.Sequential:
    """Return the module after the same steps in one process."""
    module = make()
    optimizer = sgd(module)
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        mse_loss(module(x), target).backward()
        optimizer.step()
    return module


def whole(tensor: Any) -> Tensor:
    detached = tensor.detach()
    full: Tensor = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return full


def off(mine: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference between the parameters of two modules."""
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)


# -- pipelines -----------------------------------------------------------------------------------------------------------


def stages_of(name: str, position: int) -> list[int]:
    """Return the numbers of the stages of a rank, of two in a pipeline."""
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        return [position]
    return [position, 3 - position] if "ZBV" in name or "DualPipeV" in name else [position, position + 2]


def pipeline(rank: int, world: int, name: str, by_hand: bool) -> list[float]:
    """Train two replicas in a pipeline of two stages or four. Return how far each stage is off, and the number of its reductions a step.

    On eight ranks each stage is split over two of them.
    """
    mesh = init_device_mesh("cpu", (2, 2, world // 4), mesh_dim_names=("dp", "pp", "tp"))
    replica, numbers = mesh["dp"].get_local_rank(), stages_of(name, mesh["pp"].get_local_rank())
    count = 2 * len(numbers)
    parts = [make()[number * BLOCKS // count : (number + 1) * BLOCKS // count] for number in numbers]
    if world > 4:
        parts = [split(part, mesh["tp"]) for part in parts]
    ddps = [DDP(part, process_group=mesh["dp"].get_group()) for part in parts]
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    stages = [PipelineStage(ddp, number, count, device, group=group) for ddp, number in zip(ddps, numbers, strict=True)]
    schedule = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
    pipe = schedule(stages[0] if len(stages) == 1 else stages, MICRO, loss_fn=mse_loss)
    optimizer = sgd(nn.ModuleList(ddps))
    first, last = 0 in numbers, count - 1 in numbers
    for step in range(STEPS):
        x, target = batch(step, replica, 2)
        optimizer.zero_grad()
        with nullcontext() if not by_hand else ddps[0].no_sync(), ddps[-1].no_sync() if by_hand else nullcontext():
            pipe.step(*([x] if first else []), **({"target": target} if last else {}))
        for ddp in ddps if by_hand else ():
            ddp.reduce()
        optimizer.step()
    alone = reference()
    for ddp in ddps:
        ddp.check_replicas()
    found = [off(part, alone[n * BLOCKS // count : (n + 1) * BLOCKS // count]) for part, n in zip(parts, numbers, strict=True)]
    return [*found, *(ddp.stats()["steps"] / STEPS for ddp in ddps)]


HOOKS = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@pytest.mark.parametrize(("name", "by_hand"), [*((name, False) for name in HOOKS), *((name, True) for name in HOOKS + SPLIT)])
def test_a_pipeline_trains_as_one_process(name: str, by_hand: bool, world: int = 4) -> None:
    for found in run(world, pipeline, name, by_hand):
        half = len(found) // 2
        assert max(found[:half]) < TOLERANCE, found
        assert found[half:] == [1.0] * half


@pytest.mark.parametrize(("name", "by_hand"), [("Schedule1F1B", False), ("ScheduleZBVZeroBubble", True)])
def test_a_pipeline_whose_stages_are_split_trains_as_one_process(name: str, by_hand: bool) -> None:
    test_a_pipeline_trains_as_one_process(name, by_hand, world=8)


def unreduced(rank: int, world: int, name: str, folder: str) -> str:
    """Train in a pipeline of two ranks, two replicas, without ``reduce()``. End with status 3 when that is refused."""
    logging.disable()  # torch logs the whole schedule
    try:
        pipeline(rank, world, name, by_hand=False)
    except RuntimeError as error:
        refused = error.__cause__ or error  # torch's, of a forward within the schedule, or ours
        if isinstance(refused, OutsideForward):
            Path(folder, str(rank)).write_text(str(refused))
            os._exit(3)
        return "the other rank of the pipeline has ended"
    return "trained"


@pytest.mark.parametrize("name", SPLIT)
def test_a_pipeline_whose_gradients_nothing_reduces_is_refused(name: str, tmp_path: Path) -> None:
    """Check that each replica is refused in its second step, by the ranks that have a stage whose gradients come without hooks."""
    ends = run(4, unreduced, name, str(tmp_path), died=True)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert told and all("run the step within no_sync(), and call reduce()" in said for said in told)
    assert ends.count(Died(3)) == len(told) and "trained" not in ends


def by_hand(rank: int, world: int, after: str) -> list[Any]:
    """Set gradients by hand, and go on. Return whether that is refused, and whether ``reduce`` makes them the mean."""
    ddp = DDP(make())
    params = list(ddp.parameters())
    for step in range(5):  # the second one measures the plan
        mse_loss(ddp(batch(step, rank, 2)[0]), batch(step, rank, 2)[1]).backward()
        ddp.zero_grad()
    loss = mse_loss(ddp(batch(9, rank, 2)[0]), batch(9, rank, 2)[1])
    with ddp.no_sync() if after == "no_sync" else nullcontext():
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
    refused = False
    try:
        {"state": ddp.state_dict, "check": ddp.check_replicas}.get(after, lambda: ddp(batch(0)[0]))()
    except OutsideForward:
        refused = True
    ddp.reduce()
    ddp(batch(0)[0])
    alone = make()
    mse_loss(alone(batch(9)[0]), batch(9)[1]).backward()
    return [refused, max(float((a.grad - b.grad).abs().max()) for a, b in zip(params, alone.parameters(), strict=True)) < 1e-6]


@pytest.mark.parametrize("after", ["forward", "state", "check", "no_sync"])
def test_gradients_that_are_set_by_hand_are_refused_until_they_are_reduced(after: str) -> None:
    assert run(2, by_hand, after) == [[after != "no_sync", True]] * 2


# -- tensor parallelism --------------------------------------------------------------------------------------------------


def split(module: nn.Sequential, mesh: DeviceMesh, norms: bool = False) -> nn.Sequential:
    """Split the matrices of each block over the ranks of ``mesh``. ``norms``: also the samples of the normalizing layers, so that the
    gradients of these layers are sums over the ranks of ``mesh``, which are still to be made."""
    for block in module:
        up = ColwiseParallel()
        if norms:
            parallelize_module(block.ln, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)))  # type: ignore[arg-type]
            parallelize_module(block.ln, mesh, SequenceParallel(sequence_dim=0))  # type: ignore[arg-type]
            up = ColwiseParallel(input_layouts=Shard(0))
        parallelize_module(block, mesh, {"up": up, "down": RowwiseParallel()})
    return module


def tensor_parallel(rank: int, world: int, norms: bool, group: bool, folder: str) -> list[Any]:
    """Train two replicas that are split over two ranks each. Return how far the parameters are off, and what the state has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = split(make(), mesh["tp"], norms)
    optimizer = sgd(module)  # made before: the parameters stay the same objects
    ddp = DDP(module, process_group=mesh["dp"].get_group()) if group else DDP(module, device_mesh=mesh["dp"])
    for step in range(STEPS):
        x, target = batch(step, mesh["dp"].get_local_rank(), 2)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        mse_loss(ddp(x), target).backward()
        optimizer.step()
    ddp.check_replicas()
    checkpoints = Checkpointer(folder)
    checkpoints.save(STEPS, {"model": ddp, "optimizer": optimizer})
    checkpoints.close()
    parts = sum(isinstance(tensor, DTensor) for tensor in ddp.state_dict().values())
    return [off(module, reference()), set(ddp.state_dict()) == {f"module.{name}" for name in make().state_dict()}, parts, ddp.stats()["steps"]]


@pytest.mark.parametrize(("norms", "group"), [(False, False), (False, True), (True, False)])
def test_a_module_that_is_split_trains_as_one_process_and_keeps_its_parameters(norms: bool, group: bool, tmp_path: Path) -> None:
    for most, kept, parts, steps in run(4, tensor_parallel, norms, group, str(tmp_path / "c")):
        assert most < TOLERANCE
        assert kept and parts == BLOCKS * (6 if norms else 4) and steps == STEPS
    [alone] = run(1, restored, str(tmp_path / "c"))
    assert alone < TOLERANCE


def restored(rank: int, world: int, folder: str) -> float:
    """Restore in one process, whole; return how far the parameters are off."""
    module = make()
    nn.init.zeros_(module[0].up.weight)
    checkpoints = Checkpointer(folder)
    checkpoints.restore({"model": module, "optimizer": sgd(module)})
    checkpoints.close()
    return off(module, reference())
