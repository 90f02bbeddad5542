"""Pipelines and tensor parallelism beside data parallelism, compared with the same training in one process.

The optimizer is SGD with momentum: AdamW divides a gradient by its size, so a gradient of the wrong scale
would pass.
"""

from __future__ import annotations

import logging
import os
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, mse_loss

from elastirun.train import (
    Checkpointer,
    CheckpointError,
    ElasticDataLoader,
    ElasticShards,
    OutsideForward,
    PerRank,
    TrainError,
    TrainState,
)
from elastirun.train import DistributedDataParallel as DDP
from elastirun.train.checkpoints.same_tensors import compare, samples
from elastirun.train.state.tree import Flat
from tests.support.worlds import Died, run

WIDTH, BLOCKS = 8, 4
BATCH, MICRO = 16, 4  # samples of a step over all replicas; micro-batches of one replica's step in a pipeline
STEPS = 10
TOLERANCE = 1e-6
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

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


# -- pipelines ------------------------------------------------------------------------------------------


def stages_of(name: str, position: int) -> list[int]:
    """Return the numbers of the stages of a rank, of two in a pipeline."""
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        return [position]
    return [position, 3 - position] if "ZBV" in name or "DualPipeV" in name else [position, position + 2]


def pipeline(rank: int, world: int, name: str, by_hand: bool) -> list[float]:
    """Train two replicas in a pipeline. Return how far each stage is off, and its reductions a step.

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
        with (
            nullcontext() if not by_hand else ddps[0].no_sync(),
            ddps[-1].no_sync() if by_hand else nullcontext(),
        ):
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


@pytest.fixture(autouse=True)
def v_schedules(request: pytest.FixtureRequest) -> None:
    """Skip schedules in which a rank has neighbouring stages, so that torch sends to itself over gloo."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name", "")
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") and TORCH < (2, 13):
        pytest.skip("before torch 2.13 this schedule does not run over gloo")


@pytest.mark.daily(3)
@pytest.mark.parametrize(("name", "by_hand"), [*((name, False) for name in HOOKS), *((name, True) for name in HOOKS + SPLIT)])
def test_a_pipeline_trains_as_one_process(name: str, by_hand: bool, world: int = 4) -> None:
    for found in run(world, pipeline, name, by_hand):
        half = len(found) // 2
        assert max(found[:half]) < TOLERANCE, found
        assert found[half:] == [1.0] * half


@pytest.mark.daily(2)
@pytest.mark.parametrize(("name", "by_hand"), [("Schedule1F1B", False), ("ScheduleZBVZeroBubble", True)])
def test_a_pipeline_whose_stages_are_split_trains_as_one_process(name: str, by_hand: bool) -> None:
    test_a_pipeline_trains_as_one_process(name, by_hand, world=8)


def unreduced(rank: int, world: int, name: str, folder: str) -> str:
    """Train in a pipeline without ``reduce()``. End with status 3 when that is refused."""
    logging.disable()  # torch logs the whole schedule
    try:
        pipeline(rank, world, name, by_hand=False)
    except RuntimeError as error:
        if isinstance(error.__cause__, OutsideForward):  # in a forward within the schedule
            Path(folder, str(rank)).write_text(str(error.__cause__))
            os._exit(3)
        return "the other rank of the pipeline has ended"
    return "trained"


@pytest.mark.parametrize("name", SPLIT)
def test_a_pipeline_whose_gradients_nothing_reduces_is_refused(name: str, tmp_path: Path) -> None:
    """Check that the second step is refused, by the ranks with a stage whose gradients come without hooks."""
    ends = run(4, unreduced, name, str(tmp_path), died=True)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert told and all("run the step within no_sync(), and call reduce()" in said for said in told)
    assert ends.count(Died(3)) == len(told) and "trained" not in ends


def by_hand(rank: int, world: int, after: str) -> list[Any]:
    """Set gradients by hand. Return whether that is refused, and whether ``reduce`` makes them the mean."""
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
    return [
        refused,
        max(float((a.grad - b.grad).abs().max()) for a, b in zip(params, alone.parameters(), strict=True)) < 1e-6,
    ]


@pytest.mark.parametrize("after", ["forward", "state", "check", "no_sync"])
def test_gradients_that_are_set_by_hand_are_refused_until_they_are_reduced(after: str) -> None:
    assert run(2, by_hand, after) == [[after != "no_sync", True]] * 2


# -- tensor parallelism ---------------------------------------------------------------------------------


def split(module: nn.Sequential, mesh: DeviceMesh, norms: bool = False) -> nn.Sequential:
    """Split the matrices of each block over the ranks of ``mesh``.

    ``norms``: also the samples of the normalizing layers, so that the gradients of these layers are sums over
    the ranks of ``mesh``, which are still to be made.
    """
    for block in module:
        up = ColwiseParallel()
        if norms:
            parallelize_module(block.ln, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)))  # type: ignore[arg-type]
            parallelize_module(block.ln, mesh, SequenceParallel(sequence_dim=0))  # type: ignore[arg-type]
            up = ColwiseParallel(input_layouts=Shard(0))
        parallelize_module(block, mesh, {"up": up, "down": RowwiseParallel()})
    return module


def tensor_parallel(rank: int, world: int, norms: bool, group: bool, folder: str) -> list[Any]:
    """Train two replicas that are split over two ranks each. Return how far they are off, and more."""
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
    kept = set(ddp.state_dict()) == {f"module.{name}" for name in make().state_dict()}
    return [off(module, reference()), kept, parts, ddp.stats()["steps"]]


@pytest.mark.daily(3)
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


# -- checkpoints of ranks that are no copies ------------------------------------------------------------


def save_stages(rank: int, world: int, folder: str) -> str:
    """Save two stages that have the same names. Return the error."""
    stage: nn.Module = nn.Sequential(*make()[2 * rank : 2 * rank + 2])
    for number, param in enumerate(stage.parameters()):
        nn.init.constant_(param, 1 + rank + number)
    with closing(Checkpointer(folder)) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.save(1, {"model": stage})
    return str(error.value)


def test_stages_with_the_same_names_are_not_saved_as_copies_of_one_another(tmp_path: Path) -> None:
    for told in run(2, save_stages, str(tmp_path)):
        assert told.startswith("rank 1: model.0.ln.weight is another tensor than that of rank 0: put what each rank has of its own into")
        assert "\n" not in told and told.endswith("(Stages)")


def save_what_differs(rank: int, world: int, folder: str) -> str:
    """Save a state in which ranks differ as they may, then with one more tensor. Return the error of that."""
    torch.manual_seed(rank)  # of the random numbers
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.5 + 1e-6 * rank)  # rounded elsewhere
    module(torch.randn(8, 4))  # running statistics
    state = TrainState(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters()),
        mine=PerRank(torch.full((3,), float(rank))),
    )
    if rank == 0:
        state["log"] = torch.ones(3)
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        state["seen"] = torch.full((3,), float(rank))
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(2, state)
        return str(error.value)


def test_ranks_may_differ_in_what_is_theirs(tmp_path: Path) -> None:
    for told in run(2, save_what_differs, str(tmp_path / "c")):
        assert told.startswith("rank 1: seen is another tensor than that of rank 0: put what each rank has of its own into")


KINDS = (
    torch.float32,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_type_are_compared(kind: torch.dtype) -> None:
    ones = torch.ones(5, 40).to(kind)
    odd = ones.clone()
    odd[4] = 0
    found = [samples(Flat({"x": tensor}), 0) for tensor in (ones, ones.clone(), odd)]
    compare(found[0], {"x": (0, found[1]["x"])})
    with pytest.raises(CheckpointError, match="x is another tensor than that of rank 3"):
        compare(found[0], {"x": (3, found[2]["x"])})


# -- data -----------------------------------------------------------------------------------------------


def shares_of_replicas(rank: int, world: int) -> list[Any]:
    """Load data where two ranks share a replica. Return errors without the module's ranks, and samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ddp = DDP(nn.Linear(1, 1), device_mesh=mesh["dp"])
    points = [torch.tensor([float(number)]) for number in range(12)]
    files = [[point] for point in points]
    told = []
    for data in (ElasticDataLoader(points, 4), ElasticShards(files, iter, 4)):  # type: ignore[arg-type]
        with pytest.raises(TrainError) as error:
            next(iter(data.steps(ddp)))
        told.append(str(error.value))
    seen = []
    dp = mesh["dp"]
    place = {"rank": dp.get_local_rank(), "world_size": dp.size()}
    mine = ElasticDataLoader(points, 4, **place)  # type: ignore[arg-type]
    for step in mine.steps(ddp):
        for part in step:
            seen += part.flatten().tolist()
            ddp(part).sum().backward()
    return [told, seen]


def test_ranks_that_share_a_replica_are_told_to_load_the_same_samples() -> None:
    found = run(4, shares_of_replicas)
    for rank, (told, _) in enumerate(found):
        said = f"the data are those of rank {rank} of 4, the module is rank {rank // 2} of 2"
        assert [text.startswith(said) for text in told] == [True, True]
    samples_of = [seen for _, seen in found]
    assert samples_of[0] == samples_of[1] and samples_of[2] == samples_of[3]
    assert sorted(samples_of[0] + samples_of[2]) == list(map(float, range(12)))
