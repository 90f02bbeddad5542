"""Hybrid parallelism on four ranks that share one GPU over NCCL, beside the same training in one process.

The optimizer is SGD with momentum: AdamW divides a gradient by its size, so a gradient of the wrong scale
would pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss

from elastirun.train import Checkpointer, TrainState
from elastirun.train import DistributedDataParallel as DDP
from elastirun.train.state.tree import flatten
from tests.support.differences import highest, relative
from tests.support.gpu import BOTH, DEVICE, figure, needs_gpu
from tests.support.worlds import run
from tests.train.test_ckpt_dcp import ordered
from tests.train.test_ckpt_tree import same

pytestmark = needs_gpu

WIDTH, BLOCKS, STAGES = 64, 4, 2
BATCH, MICRO = 16, 4  # samples of a step, over all replicas; micro-batches of a replica's step in a pipeline
STEPS = 6  # a collective on a shared GPU takes tens of milliseconds, because the processes take turns
TOLERANCE = 1e-5  # relative; other kernels, and another order of sums, are about 1e-6 off after some steps
LIMIT = 75.0  # seconds for a world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(gelu(self.up(self.ln(x))))
        return out


class Net(nn.Module):
    """Four blocks, or one stage of them, under the names of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleDict({str(at): Block() for at in range(BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.embed, *self.blocks.values(), self.head):
            x = x if module is None else module(x)
        return x

    def stage(self, number: int) -> Net:
        """Keep only the modules of stage ``number``."""
        for at in range(BLOCKS):
            if at * STAGES // BLOCKS != number:
                del self.blocks[str(at)]
        if number == 0:
            self.head = None
        else:
            self.embed = None
        return self


def make(seed: int = 0) -> Net:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(seed)
    return Net().to(DEVICE)


def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


def batch(step: int, number: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of share ``number`` of ``of`` of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 3, generator=generator)
    mine = slice(number * BATCH // of, (number + 1) * BATCH // of)
    return x[mine].to(DEVICE), target[mine].to(DEVICE)


def sgd(module: nn.Module) -> torch.optim.SGD:
    # foreach=False: its kernels take no list of both tensors and DTensors, or of DTensors of several meshes.
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)


def learn(model: nn.Module, number: int = 0, of: int = 1) -> Tensor:
    """Train with share ``number`` of ``of`` of each batch, and return the loss of each step."""
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        x, target = batch(step, number, of)
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def learn_in_a_pipeline(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Train one stage of a replica in the schedule 1F1B, and return the losses; the first stage has none."""
    number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    device = next(model.parameters()).device
    stage = PipelineStage(model, number, STAGES, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=mse_loss)
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        x, target = batch(step, replica, mesh["dp"].size())
        optimizer.zero_grad()
        parts: list[Tensor] = []
        schedule.step(x) if number == 0 else schedule.step(target=target, losses=parts)
        optimizer.step()
        losses += [torch.stack(parts).detach().mean()] if parts else []
    return torch.stack(losses) if losses else torch.empty(0, device=device)


def off(module: nn.Module, losses: Tensor, replicas: DeviceMesh | None = None) -> float:
    """Return the largest relative difference from one process: of the losses, and of weights of this stage.

    ``replicas``: the dimension of the mesh over which each rank has another share of the batch.
    """
    reference = make()
    expected = learn(reference)
    if replicas is not None and len(losses):  # the same ranks have losses: those of the last stage
        dist.all_reduce(losses, group=replicas.get_group())
        losses /= replicas.size()
    found = [relative(losses, expected)] if len(losses) else []
    for name, weight in reference.named_parameters():
        try:
            mine = module.get_parameter(name)
        except AttributeError:
            continue  # another stage's
        found.append(relative(whole(mine), weight))
    return highest(found)


def whole(tensor: Any) -> Tensor:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # it warns of each step of a gathering
    detached = tensor.detach()
    full: Tensor = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return full


def shard(module: Net, mesh: DeviceMesh) -> Net:
    for block in module.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)  # type: ignore[return-value]


def split(module: Net, mesh: DeviceMesh) -> Net:
    """Split the two matrices of each block over the ranks of ``mesh``."""
    for block in module.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


# -- ways to be parallel ---------------------------------------------------------------------------------


def fsdp2(rank: int, world: int) -> float:
    mesh = mesh_of(world, names=("dp",))
    module = shard(make(), mesh)
    return off(module, learn(module, rank, world), mesh)


def hsdp(rank: int, world: int) -> float:
    mesh = mesh_of(2, 2, names=("copies", "shards"))
    module = shard(make(), mesh)
    losses = learn(module, rank, world)  # each rank has a share of its own
    dist.all_reduce(losses)
    return off(module, losses / world)


def tp_fsdp2(rank: int, world: int) -> float:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    module = shard(split(make(), mesh["tp"]), mesh["dp"])
    return off(module, learn(module, mesh["dp"].get_local_rank(), 2), mesh["dp"])


def tp_ddp(rank: int, world: int) -> float:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    ddp = DDP(split(make(), mesh["tp"]), device_mesh=mesh["dp"])
    losses = learn(ddp, mesh["dp"].get_local_rank(), 2)
    ddp.check_replicas()
    return off(ddp.module, losses, mesh["dp"])


def pp_ddp(rank: int, world: int) -> float:
    mesh = mesh_of(2, STAGES, names=("dp", "pp"))
    ddp = DDP(make().stage(mesh["pp"].get_local_rank()), process_group=mesh["dp"].get_group())
    losses = learn_in_a_pipeline(ddp, mesh)
    ddp.check_replicas()
    assert ddp.stats()["steps"] == STEPS  # one reduction a step
    return off(ddp.module, losses, mesh["dp"])


def pp_fsdp2(rank: int, world: int) -> float:
    mesh = mesh_of(2, STAGES, names=("dp", "pp"))
    module = shard(make().stage(mesh["pp"].get_local_rank()), mesh["dp"])
    return off(module, learn_in_a_pipeline(module, mesh), mesh["dp"])


def compare(claim: str, way: Callable[[int, int], float]) -> None:
    most = highest(run(4, way, backend=BOTH, timeout=LIMIT))
    figure(claim, f"{most:.1e} off one process, relative, after {STEPS} steps of SGD with momentum", off=most)
    assert most < TOLERANCE


def test_fsdp2_equals_one_process() -> None:
    compare("mesh-fsdp2", fsdp2)


def test_hsdp_equals_one_process() -> None:
    compare("mesh-hsdp", hsdp)


def test_tp_fsdp2_equals_one_process() -> None:
    compare("mesh-tp-fsdp2", tp_fsdp2)


def test_pp_ddp_equals_one_process() -> None:
    """Check our module as a stage: a backward for each micro-batch, and one reduction a step."""
    compare("mesh-pp-ddp", pp_ddp)


def test_pp_fsdp2_equals_one_process() -> None:
    compare("mesh-pp-fsdp2", pp_fsdp2)


def test_tp_ddp_equals_one_process() -> None:
    compare("mesh-tp-ddp", tp_ddp)


# -- checkpoints -----------------------------------------------------------------------------------------


def trained(module: Net, seed: int, steps: int, replicas: DeviceMesh) -> TrainState:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01 * (seed + 1), foreach=False)
    for step in range(steps):
        x, target = batch(step, replicas.get_local_rank(), replicas.size())
        optimizer.zero_grad()
        mse_loss(module(x), target).backward()
        optimizer.step()
    return TrainState(model=module, optimizer=optimizer)


def content(state: TrainState) -> dict[str, Tensor]:
    """Return every tensor that is the same on all ranks, gathered."""
    return {name: whole(tensor).cpu() for name, tensor in flatten(state).tensors.items() if "@" not in name}


def saves(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Save a state of FSDP2 and tensor parallelism, 2 x 2."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    state = trained(shard(split(make(), mesh["tp"]), mesh["dp"]), 0, 3, mesh["dp"])
    before = content(state)
    checkpoints = Checkpointer(folder)
    checkpoints.restore(state)
    state.step = 3
    checkpoints.save(3, state)
    checkpoints.close()
    return before


def loads(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """Restore on half of the ranks: split and sharded, 1 x 2; sharded alone; and whole on each rank."""
    mesh, flat, found = mesh_of(1, 2, names=("dp", "tp")), mesh_of(2, names=("dp",)), []
    for module in (shard(split(make(1), mesh["tp"]), mesh["dp"]), shard(make(1), flat), make(1)):
        state = trained(module, 1, 0, flat)
        checkpoints = Checkpointer(folder)
        assert checkpoints.restore(state) == 3
        checkpoints.close()
        assert state["optimizer"].param_groups[0]["lr"] == 0.01
        found.append(content(state))
    return found


def test_checkpoint_of_four_ranks_comes_back_on_two(tmp_path: Path) -> None:
    before, *others = run(4, saves, str(tmp_path / "c"), backend=BOTH, timeout=LIMIT)
    assert len(before) > 3 * len(list(make().parameters())) - 1 and all(same(ordered(other), ordered(before)) for other in others)
    for found in run(2, loads, str(tmp_path / "c"), backend=BOTH, timeout=LIMIT):
        assert all(same(ordered(after), ordered(before)) for after in found)
    figure(
        "mesh-checkpoint",
        f"{len(before)} tensors of 2 x 2 ranks bit-equal on two, in three layouts",
        tensors=len(before),
    )
