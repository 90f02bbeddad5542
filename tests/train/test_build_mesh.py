"""The mesh in a worker: built from what the launcher says, gradients clipped over it, data and random numbers by coordinate."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastirun.train import (
    DeterministicShards,
    DistributedDataParallel,
    Drain,
    ElasticDataLoader,
    ElasticShards,
    TrainError,
    build_mesh,
    clip_grad_norm_,
    keyed_rng,
)
from tests.support.worlds import run


def shapes(rank: int, world: int) -> list[Any]:
    """Build meshes from the launcher's words, and from the script's."""
    os.environ.pop("ELASTIRUN_MESH", None)
    found: list[Any] = []
    for text, otherwise in (
        ("", "dp=auto,tp=2"),
        ("pp=2,dp=2", "pp=2,dp=auto"),
        ("pp=2,dp=2", "dp=auto,tp=2"),
        ("dp=x,tp=2", None),
        ("", None),
        ("", "tp"),
        ("", "dp=auto,tp=3"),
        ("dp=2,tp=4", None),
    ):
        os.environ["ELASTIRUN_MESH"] = text
        try:
            mesh = build_mesh(otherwise)
            found.append([mesh.mesh_dim_names, mesh.shape, list(mesh.get_coordinate() or ())])
        except TrainError as error:
            found.append(str(error))
    return found


def test_the_mesh_is_that_of_the_launcher_or_else_of_the_script() -> None:
    for rank, (otherwise, told, *errors) in enumerate(run(4, shapes)):
        at = [rank // 2, rank % 2]
        assert otherwise == [("dp", "tp"), (2, 2), at] and told == [("pp", "dp"), (2, 2), at]
        assert errors == [
            "the launcher has the mesh pp=2,dp=2, and the script wants dp=auto,tp=2: give both the same dimensions",
            "ELASTIRUN_MESH=dp=x,tp=2 is no mesh such as dp=2,tp=2; the launcher sets it (--mesh): leave it alone, or unset it",
            "the launcher was told of no mesh: start with elastirun --mesh=dp=auto,tp=2, or give one, build_mesh('dp=auto,tp=2')",
            "build_mesh('tp'): 'tp' is no dimension of a mesh; write it as in dp=auto,pp=2,tp=4",
            "a world of 4 ranks is no multiple of 3, the ranks of one replica of dp=auto,tp=3: start a multiple",
            "the mesh dp=2,tp=4 has 8 ranks, and the world 4: start as many workers as it has",
        ]


def refused(rank: int, world: int) -> list[str]:
    """Leave out the dimension in a job with a mesh. Return the errors, and which samples this rank loads with it."""
    os.environ["ELASTIRUN_MESH"] = "dp=2,tp=2"
    mesh = build_mesh()
    points = [torch.tensor([float(at)]) for at in range(8)]
    shards = [[point] for point in points]
    told: list[Any] = []
    for make in (
        lambda: DistributedDataParallel(nn.Linear(1, 1)),
        lambda: DeterministicShards(nn.Linear(1, 1)),
        lambda: ElasticDataLoader(points, 4),  # type: ignore[arg-type]
        lambda: ElasticShards(shards, iter, 4),
        lambda: Drain(DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh["dp"])),
    ):
        try:
            make()
        except TrainError as error:
            told.append(str(error))
    DistributedDataParallel(nn.Linear(1, 1), process_group=dist.group.WORLD)
    loader = ElasticDataLoader(points, 8, shuffle=False, device_mesh=mesh["dp"])  # type: ignore[arg-type]
    both = ElasticDataLoader(points, 8, device_mesh=mesh)  # type: ignore[arg-type]
    exact = DeterministicShards(nn.Linear(1, 1), device_mesh=mesh["dp"])
    streams = ElasticShards(shards, iter, 4, device_mesh=mesh["dp"])
    return [*told, torch.cat(next(iter(loader)).unbind()).tolist(), both.rank, exact.world_size, streams.rank]


def test_a_job_with_a_mesh_has_to_say_which_ranks_share_data() -> None:
    for rank, (module, exact, loader, shards, drain, samples, *places) in enumerate(run(4, refused)):
        said = 'this job has the mesh dp=2,tp=2, so ranks may share a replica: give device_mesh=build_mesh()["dp"], or '
        assert module == exact == shards == said + "process_group=torch.distributed.group.WORLD"
        assert loader == said + "rank= and world_size="
        assert drain == "the module reduces over 2 of 4 ranks, so the others would not know of a stop: give Drain the optimizer"
        assert samples == ([0.0, 1.0, 2.0, 3.0] if rank < 2 else [4.0, 5.0, 6.0, 7.0])
        assert places == [rank, 2, rank // 2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def clipped(rank: int, world: int, most: float, kind: float) -> list[Any]:
    """Clip a model of two stages, each split over two ranks. Return the norm and the gradients, of all and of the whole model."""
    mesh = build_mesh("dp=auto,pp=2,tp=2")
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    whole = blocks()
    whole(x).square().sum().backward()
    stage = mesh["pp"].get_local_rank()
    part = blocks()[stage]
    parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if stage == 0:
        middle = part(x)
        grad = torch.autograd.grad(blocks()[1](leaf := middle.detach().requires_grad_()).square().sum(), leaf)
        middle.backward(grad[0])
    else:
        part(blocks()[0](x).detach()).square().sum().backward()
    total = clip_grad_norm_(part.parameters(), most, kind, across=mesh["pp"])
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), most, kind)
    pairs = zip(part.parameters(), whole[stage].parameters(), strict=True)
    off = [float((getattr(a.grad, "full_tensor", lambda a=a: a.grad)() - b.grad).abs().max()) for a, b in pairs]  # type: ignore[misc, operator]
    return [float(total), float(expected), max(off)]


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("most", [0.5, 1e6])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(most: float, kind: float) -> None:
    for total, expected, off in run(4, clipped, most, kind):
        assert total == pytest.approx(expected, rel=1e-5) and off < 1e-5


def without_gradients(rank: int, world: int) -> list[float]:
    mesh = build_mesh("dp=auto,pp=2")
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    if rank == 1:
        param.grad = torch.full((2,), 3.0, dtype=torch.bfloat16)
    total = clip_grad_norm_(param, 1.0, across=mesh["pp"])
    return [float(total), *([] if param.grad is None else param.grad.tolist())]


def test_a_stage_without_gradients_takes_part() -> None:
    first, second = run(2, without_gradients)
    assert first == [pytest.approx(18**0.5, rel=0.01)] and second == pytest.approx([18**0.5, 0.5**0.5, 0.5**0.5], rel=0.01)


def odd_clips(rank: int, world: int) -> list[Any]:
    """Clip a DTensor of which one rank has nothing, and by a dimension that its parts are on."""
    mesh = build_mesh("dp=auto,tp=2")
    param = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh["tp"], [Shard(0)]))
    param.grad = distribute_tensor(torch.full((1, 4), 2.0), mesh["tp"], [Shard(0)])
    told = [float(clip_grad_norm_([param], 1e6, kind)) for kind in (2.0, float("inf"))]
    for wrong in (mesh["tp"], mesh, "pp"):
        with pytest.raises(TrainError) as error:
            clip_grad_norm_([param], 1.0, across=wrong)  # type: ignore[arg-type]
        told.append(str(error.value))  # type: ignore[arg-type]
    return told


def test_parts_count_once_and_may_be_empty() -> None:
    for two, most, twice, *wrong in run(2, odd_clips):
        assert (two, most) == (4.0, 2.0) and twice.startswith("gradients are DTensors on the dimension across, whose parts count already")
        assert wrong == ["across has to be one dimension of a DeviceMesh, such as build_mesh()['pp']"] * 2


def drawn(rank: int, world: int) -> list[float]:
    mesh = build_mesh("dp=auto,pp=2,tp=2")
    with keyed_rng(7, 3, *mesh["dp", "pp"].get_coordinate()):  # type: ignore[misc]
        return torch.rand(2).tolist()


def test_ranks_of_one_tensor_parallel_group_draw_the_same_numbers() -> None:
    """Check the rule of docs/parallelism.md."""
    found = run(8, drawn)
    assert found[0::2] == found[1::2] and len({tuple(each) for each in found}) == 4
