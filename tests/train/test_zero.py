"""The sharded optimizer: the bits of plain data parallelism, a part of its memory, and a state that fits any number of ranks."""

from __future__ import annotations

import copy
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, ShardedOptimizer, TrainError, TrainState
from elastirun.train.live.start import parts_of
from elastirun.train.sharded import TensorPart
from elastirun.train.state.tree import flatten
from elastirun.train.zero import gathering
from elastirun.train.zero.rows import CUT, Rows, Shape, cut
from tests.support.worlds import run

# -- which rank has which rows ------------------------------------------------------------------------------


def test_every_row_belongs_to_one_rank_and_all_have_as_much() -> None:
    for seed in [*range(40), *(random.randrange(1 << 40) for _ in range(100))]:  # other ones each time
        check_cut(random.Random(seed), seed)


def check_cut(rng: random.Random, seed: int) -> None:
    shapes = [
        Shape(rng.choice([0, 1, 3, 64, 100, 1000]), rng.choice([1, 3, 33, 64, 129, 512]), rng.random() < 0.1)
        for _ in range(rng.randint(1, 30))
    ]
    ranks = rng.choice([1, 2, 3, 4, 7, 16])
    pieces = cut(shapes, ranks)
    assert len(pieces) == ranks, seed
    for param, shape in enumerate(shapes):
        own = [rows for piece in pieces for rows in piece if rows.param == param]
        bounds = [rows.start for rows in own] + [shape.rows]
        assert [*bounds[1:]] == [rows.stop for rows in own] and (not own or own[0].start == 0)
        assert all(bound * shape.width % CUT == 0 for bound in bounds[:-1]) and (len(own) <= 1 or not shape.whole)
    sizes = [sum((rows.stop - rows.start) * shapes[rows.param].width for rows in piece) for piece in pieces]
    coarsest = max(shape.unit * shape.width if shape.rows >= shape.unit else shape.rows * shape.width for shape in shapes)
    assert max(sizes) - sum(sizes) / ranks <= 2 * coarsest, seed


def test_a_large_model_is_shared_out_evenly() -> None:
    shapes = [Shape(50_000, 768), *[Shape(768, 3072), Shape(768, 1), Shape(3072, 768), Shape(3072, 1)] * 12, Shape(768, 1)]
    sizes = [sum((rows.stop - rows.start) * shapes[rows.param].width for rows in piece) for piece in cut(shapes, 8)]
    assert max(sizes) < 1.001 * sum(sizes) / 8
    assert cut([Shape(4, 2)], 2) == [[], [Rows(0, 0, 4)]]


# -- bits --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes, one that is never used, one that is used in some steps, and one that is frozen for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.n = nn.Embedding(150, 33), nn.Linear(33, 129), nn.LayerNorm(129)
        self.b, self.unused, self.some, self.c = nn.Linear(129, 77), nn.Linear(5, 5), nn.Linear(77, 77), nn.Linear(77, 3)
        self.scale, self.phase = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones((), dtype=torch.complex64))

    def forward(self, x: Tensor, some: bool) -> Tensor:
        hidden = self.b(torch.relu(self.n(self.a(self.e(x))))).mean(1)
        out: Tensor = self.c(self.some(hidden) if some else hidden) * self.scale * self.phase.abs()
        return out


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "foreach": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 1e-2, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}


def parameters(rank: int, transport: str, name: str, sharded: bool, steps: int) -> Tensor:
    """Train; return all parameters."""
    torch.manual_seed(0)
    net = Net()
    net.phase.requires_grad_(not KINDS[name][1].get("fused"))  # which takes no complex numbers
    ddp = DistributedDataParallel(net, transport=transport, bucket_cap_mb=None if steps % 2 else 0.02)
    kind, options = KINDS[name]
    norms = [param for param_name, param in net.named_parameters() if param_name.startswith("n.")]
    others = [param for param_name, param in net.named_parameters() if not param_name.startswith("n.") and param.requires_grad]
    groups = [{"params": norms, "lr": 2e-2}, {"params": others}]
    optimizer = ShardedOptimizer(ddp, kind, groups, **options) if sharded else kind(groups, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        net.a.requires_grad_(not 10 <= step < 14)  # which makes another plan
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randint(0, 150, (4, 6), generator=generator)
        optimizer.zero_grad()
        ddp(x, step % 3 != 0).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return torch.cat([param.detach().reshape(-1) for param in net.parameters()])


def compare(rank: int, world: int, transport: str, names: list[str], steps: int, chunk: int) -> list[str]:
    """Return the optimizers with which the parameters differ in any bit, on any rank."""
    gathering.CHUNK = chunk
    differing = []
    for name in names:
        plain, sharded = (parameters(rank, transport, name, each, steps) for each in (False, True))
        differs = torch.tensor([float(not torch.equal(plain, sharded))])
        dist.all_reduce(differs)
        if differs.item():
            differing.append(name)
    return differing


@pytest.mark.daily(6)
@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_parameters_have_the_bits_of_plain_data_parallelism(world: int, transport: str) -> None:
    assert run(world, compare, transport, list(KINDS), 25, 8192) == [[]] * world


def test_fifty_steps_and_chunks_of_the_usual_size_change_no_bit() -> None:
    assert run(2, compare, "auto", ["adamw", "adamw-fused"], 50, gathering.CHUNK) == [[]] * 2
    assert run(1, compare, "auto", ["adamw"], 5, gathering.CHUNK) == [[]]


# -- its state -----------------------------------------------------------------------------------------------


def trained(world: int, sharded: bool, rank: int = 0, steps: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.AdamW, lr=0.5) if sharded else torch.optim.AdamW(ddp.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randint(0, 150, (4, 6), generator=torch.Generator().manual_seed(step))  # the same on all ranks
        ddp(x, step > 0).square().mean().backward()
        optimizer.step()
    return ddp, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def save(rank: int, world: int, folder: str) -> int:
    """Save with the sharded optimizer; return the bytes of its state here."""
    ddp, optimizer = trained(world, sharded=True)
    with closing(Checkpointer(folder)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TrainState(ddp, optimizer))
            checkpoints.wait()
    return sum(value.to_local().nbytes for state in optimizer.parts().values() for value in state.values() if isinstance(value, TensorPart))


def restore(rank: int, world: int, folder: str, sharded: bool, began: int) -> list[Any]:
    """Restore after ``began`` steps; return whether all is as after plain training, and how many steps match after it."""
    ddp, optimizer = trained(world, sharded, steps=began)
    with torch.no_grad():
        for param in ddp.parameters():
            param.zero_()
    with closing(Checkpointer(folder)) as checkpoints:
        found = checkpoints.restore(TrainState(ddp, optimizer))
    plain, alone = trained(world, sharded=False)
    state = optimizer.full_state_dict() if sharded else optimizer.state_dict()
    right = same(state, alone.state_dict()) and same(list(ddp.parameters()), list(plain.parameters()))
    for each, its in ((ddp, optimizer), (plain, alone)):
        its.zero_grad()
        each(torch.arange(12).view(2, 6), True).square().mean().backward()
        its.step()
    return [found, right, same(list(ddp.parameters()), list(plain.parameters()))]


def test_the_state_fits_any_number_of_ranks_and_the_optimizer_alone(tmp_path: Path) -> None:
    sizes = run(4, save, str(tmp_path))  # of 3 equal gradients the mean may have other bits
    whole = 2 * 4 * sum(param.numel() for name, param in Net().named_parameters() if not name.startswith("unused"))
    assert sum(sizes) == pytest.approx(whole, rel=0.01) and max(sizes) < whole / 2  # whose matrices have odd widths
    for world, sharded, began in ((2, True, 0), (4, True, 2), (1, True, 0), (2, False, 1)):
        assert run(world, restore, str(tmp_path), sharded, began) == [[2, True, True]] * world, (world, sharded)


def save_plain(rank: int, world: int, folder: str) -> None:
    ddp, optimizer = trained(world, sharded=False)
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(2, TrainState(ddp, optimizer))


def test_the_state_of_the_optimizer_alone_is_shared_out(tmp_path: Path) -> None:
    run(1, save_plain, str(tmp_path))
    assert run(4, restore, str(tmp_path), True, 0) == [[2, True, True]] * 4


def whole_states(rank: int, world: int) -> list[bool]:
    """Take the state in torch's form out, and in. Return what is the same."""
    ddp, optimizer = trained(world, sharded=True)
    alone = trained(world, sharded=False)[1]
    whole = optimizer.full_state_dict()
    found = [same(whole, alone.state_dict())]
    other = ShardedOptimizer(ddp, torch.optim.AdamW, lr=0.1)
    other.load_state_dict(copy.deepcopy(whole))
    found.append(same(other.full_state_dict(), whole) and other.param_groups[0]["lr"] == 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert get_optimizer_state_dict(ddp, optimizer)["state"] and same(other.full_state_dict(), whole), "torch takes no step of its own"
    return [*found, same(other.full_state_dict(), whole)]


def test_the_state_has_the_form_of_torch() -> None:
    assert run(3, whole_states) == [[True] * 3] * 3


# -- with tensor parallelism ---------------------------------------------------------------------------------


def split_model(mesh: Any) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.LayerNorm(64))
    if mesh is not None:
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module


def tensor_parallel(rank: int, world: int, folder: str) -> list[Any]:
    """Train two replicas that are split over two ranks, with and without shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ends = []
    for sharded in (False, True):
        module = split_model(mesh["tp"])
        ddp = DistributedDataParallel(module, device_mesh=mesh["dp"])
        optimizer: Any = ShardedOptimizer(ddp, torch.optim.AdamW) if sharded else torch.optim.AdamW(module.parameters())
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank()))
            mse_loss(ddp(x), x).backward()
            optimizer.step()
        ends.append([param.to_local() if isinstance(param, DTensor) else param for param in map(Tensor.detach, module.parameters())])
        state = optimizer.full_state_dict() if sharded else optimizer.state_dict()
        ends[-1] += [
            value.to_local() if isinstance(value, DTensor) else value for each in state["state"].values() for value in each.values()
        ]
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(3, TrainState(ddp, optimizer))
    names = flatten(TrainState(ddp, optimizer)).tensors
    sharded_states = sum(isinstance(tensor, TensorPart) for tensor in names.values())
    return [same(*ends), sharded_states > 0]


def restored_whole(rank: int, world: int, folder: str) -> list[float]:
    module = split_model(None)
    optimizer = torch.optim.AdamW(module.parameters())
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.restore(TrainState(module, optimizer))
    alone = split_model(None)
    plain = torch.optim.AdamW(alone.parameters())
    for step in range(3):
        plain.zero_grad()
        xs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + replica)) for replica in range(2)]
        mse_loss(alone(torch.cat(xs)), torch.cat(xs)).backward()
        plain.step()
    pairs = [*zip(module.parameters(), alone.parameters(), strict=True)]
    pairs += [(optimizer.state[a]["exp_avg"], plain.state[b]["exp_avg"]) for a, b in pairs]
    return [float((a - b).abs().max()) for a, b in pairs]


def test_shards_of_split_parameters_are_boxes_of_the_whole(tmp_path: Path) -> None:
    assert run(4, tensor_parallel, str(tmp_path)) == [[True, True]] * 4
    assert max(run(1, restored_whole, str(tmp_path))[0]) < 1e-4


# -- what is refused ------------------------------------------------------------------------------------------


def refused(rank: int, world: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)

    def moved() -> None:
        ddp.module.weight.data = torch.ones(8, 8)
        optimizer.step()

    def other_world() -> None:
        ddp.set_group()
        optimizer.step()

    part = TensorPart(torch.ones(1, 8), (8, 8), (7 - rank, 0))
    others = {"state": {0: {"momentum_buffer": part}, 1: {"momentum_buffer": part}}, "param_groups": [{"params": [0, 1], "lr": 1.0}]}
    sparse = DistributedDataParallel(nn.Embedding(8, 8, sparse=True))
    gaps = nn.Linear(8, 8)
    gaps.weight = nn.Parameter(torch.ones(8, 20)[:, :8])
    told = []
    for wrong in (
        lambda: ShardedOptimizer(nn.Linear(1, 1), torch.optim.SGD, lr=0.1),  # type: ignore[arg-type]
        lambda: ShardedOptimizer(ddp, torch.optim.LBFGS),
        lambda: ShardedOptimizer(ddp, lambda params: torch.optim.SGD(params)),
        lambda: ShardedOptimizer(ddp, torch.optim.SGD, [nn.Parameter(torch.ones(1))]),
        lambda: ShardedOptimizer(sparse, torch.optim.SGD),
        lambda: ShardedOptimizer(DistributedDataParallel(gaps), torch.optim.SGD),
        lambda: optimizer.add_param_group({"params": []}),
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}),
        lambda: optimizer.load_state_dict(others),
        lambda: ddp.step_in_backward(optimizer),
        lambda: parts_of(TrainState(ddp, optimizer, data=ElasticDataLoader([0], 1))),  # type: ignore[arg-type]
        lambda: TensorPart(torch.ones(1), (2,), (0,)) + 1,
        moved,
        other_world,
    ):
        try:
            wrong()
            told.append("")
        except TrainError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_sharded_is_refused_in_one_line() -> None:
    for told in run(2, refused):
        assert all(told) and not any("\n" in text for text in told), told
        assert told[1].startswith("LBFGS may need more than single elements of a parameter: ASGD, Adadelta")
        assert told[4] == "a gradient of the module is sparse, of which there are no rows: use sparse=False"
        assert told[8].startswith("this is the state of another rank's part: save full_state_dict()")
        assert told[10].startswith("a lost rank takes its part of 'optimizer', a ShardedOptimizer, along: give Elastic")
        assert told[12].startswith("a parameter has other memory than") and told[13].startswith("the module is in another world than")
