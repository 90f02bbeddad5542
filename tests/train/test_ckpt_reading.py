"""Tensors come back from files at any number of ranks, sharded or not; what does not fit, and files that lie, are named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from elastirun.train import TrainError
from elastirun.train.checkpoints.reading import files_in, fill, tensors_in
from elastirun.train.state import layout
from elastirun.train.state.layout import pieces
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.tree import Flat, flatten
from tests.support.checkpoints import read, write
from tests.support.worlds import run


class Net(nn.Module):
    """Layers whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build(seed: int, kind: str, steps: int) -> dict[str, Any]:
    """Return a state whose values depend on ``seed`` only, sharded by FSDP2 or replicated."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed, "own": PerRank(seed)}


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor, gathered."""
    found = {name: tensor.detach() for name, tensor in flatten(state).tensors.items() if "@" not in name}
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone() for name, tensor in found.items()}


def save_world(rank: int, world: int, folder: str, kind: str, nodes: tuple[int, ...]) -> dict[str, Tensor]:
    layout.FILE, layout.SMALL, layout.LEAST_CUT = 4096, 2048, 64
    state = build(1, kind, 3)
    write(Path(folder), state, nodes)
    return whole(state)


def load_world(rank: int, world: int, folder: str, kind: str, steps: int) -> tuple[dict[str, Tensor], Any]:
    state = build(2, kind, steps)
    assert read(Path(folder), state)["epoch"] == state["epoch"] == 1
    options = state["optimizer"].state_dict()["param_groups"][0]
    return whole(state), (options["lr"], state["own"].value)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp", 2), ("ddp", 1)),
        (("ddp", 2), ("fsdp", 3)),
        (("fsdp", 3), ("fsdp", 2)),
        (("hybrid", 4), ("fsdp", 3)),
        (("fsdp", 3), ("hybrid", 4)),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_world(saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path) -> None:
    kind, world = saved
    before = run(world, save_world, str(tmp_path), kind, tuple(rank // 2 for rank in range(world)))[0]
    kind, world = loaded
    for rank, (after, (lr, own)) in enumerate(run(world, load_world, str(tmp_path), kind, world % 2)):
        assert lr == 0.2 and own == (1 if rank < saved[1] else 2)
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def shard_and_back(rank: int, world: int, folder: str) -> list[Tensor]:
    """Write a tensor in every placement on a 2 x 2 mesh, and read each into every placement; return what was read."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(35.0).view(5, 7)
    placements = [(Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
    made = {str(at): distribute_tensor(tensor, mesh, both) for at, both in enumerate(placements)}
    write(Path(folder), made, (0, 0, 1, 1))
    found = []
    for at in range(5):
        state = {str(other): distribute_tensor(torch.zeros(5, 7), mesh, placements[(other + at) % 5]) for other in range(5)}
        read(Path(folder), state)
        found += [each.full_tensor() for each in state.values()]
    with pytest.raises(TrainError, match=r"x is a DTensor with a partial placement"):
        pieces(Flat({"x": DTensor.from_local(tensor, mesh, (Partial(), Replicate()))}, {}))
    return found


def shard_both_ways(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Layers that are divided by tensor parallelism first, then by FSDP2; written, and read with new values."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    model, other = made(0), made(1)
    write(Path(folder), {"m": model}, (0, 0, 1, 1))
    read(Path(folder), {"m": other})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(mine, DTensor) and isinstance(theirs, DTensor) and torch.equal(mine.to_local(), theirs.to_local())
    return {name: tensor.full_tensor().detach() for name, tensor in other.state_dict().items()}


def test_tensor_parallel_layers_within_fsdp_come_back(tmp_path: Path) -> None:
    (first, *_) = run(4, shard_both_ways, str(tmp_path))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    alone = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    read(tmp_path, {"m": alone})
    for name, tensor in expected.state_dict().items():
        assert torch.equal(first[name], tensor) and torch.equal(alone.state_dict()[name], tensor)


def test_every_placement_comes_back_in_every_other(tmp_path: Path) -> None:
    found = run(4, shard_and_back, str(tmp_path))
    assert [len(each) for each in found] == [25] * 4
    assert all(torch.equal(tensor, torch.arange(35.0).view(5, 7)) for each in found for tensor in each)


# -- what does not fit ----------------------------------------------------------------------------------------------------


def saved_in(folder: Path, **tensors: Tensor) -> Any:
    write(folder, tensors)
    return tensors_in((folder / "tensors.json").read_bytes())


def test_floats_are_converted_and_nothing_else_is(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, a=torch.tensor([1.5, 2.0]), b=torch.tensor([3]), c=torch.ones(2, 3))
    half = torch.zeros(2, dtype=torch.bfloat16)
    fill(saved, files_in(tmp_path), {"a": half, "x": (left := torch.zeros(1))}, strict=False)
    assert (half.tolist(), left.tolist()) == ([1.5, 2.0], [0.0])
    for name, target, text in (
        ("b", torch.zeros(1), r"b is torch\.int64 in the checkpoint, and torch\.float32 here"),
        ("a", torch.zeros(2, dtype=torch.int64), r"a is torch\.float32 in the checkpoint"),
        ("c", torch.zeros(3, 2), r"c has the shape \[2, 3\] in the checkpoint, and \[3, 2\] here"),
        ("c", torch.zeros(6), r"c has the shape \[2, 3\] in the checkpoint, and \[6\] here"),
        ("d", torch.zeros(1), r"the checkpoint has no tensor d$"),
    ):
        other = torch.zeros(2)
        with pytest.raises(TrainError, match=text):
            fill(saved, files_in(tmp_path), {"a": other, name: target})
        assert not other.any()  # nothing was changed


def test_memory_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, a=torch.arange(5))

    def sent(file_name: str) -> memoryview:
        return memoryview((tmp_path / file_name).read_bytes())

    target = torch.zeros(5, dtype=torch.int64)
    fill(saved, sent, {"a": target})
    assert target.tolist() == [0, 1, 2, 3, 4]


def test_files_of_other_folders_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", str(tmp_path / "secret"), "", ".", "a/../../secret", "commit.json"):
        with pytest.raises(TrainError, match=r"is not the name of a file"):
            files_in(tmp_path / "inner")(name)


def change(*path: Any, to: Any) -> Callable[[Any], None]:
    def apply(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = to

    return apply


CHUNK = ("a", "chunks", 0)


def test_data_at_any_byte_are_read(tmp_path: Path) -> None:
    data = torch.arange(6.0).view(2, 3)
    (tmp_path / "file").write_bytes(b"abc" + bytes(data.numpy()))
    chunk = {"offsets": [0, 0], "sizes": [2, 3], "file": "file", "at": 3, "nbytes": 24}
    saved = tensors_in(json.dumps({"a": {"dtype": "float32", "shape": [2, 3], "chunks": [chunk]}}).encode())
    target = torch.zeros(2, 3)
    fill(saved, files_in(tmp_path), {"a": target})
    assert torch.equal(target, data)


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 30, 1 << 30]], ids=range(2))
def test_tensors_that_cannot_exist_are_refused(shape: list[int]) -> None:
    nbytes = 1 if len(shape) > 2 else 1 << 56
    chunk = {"offsets": [0] * len(shape), "sizes": shape, "file": "file", "at": 0, "nbytes": nbytes}
    with pytest.raises(TrainError, match=r"it is too large"):
        tensors_in(json.dumps({"a": {"dtype": "uint8", "shape": shape, "chunks": [chunk]}}).encode())


@pytest.mark.parametrize(
    "lie",
    [
        *(change("a", to=value) for value in (None, [], 3, "x", {})),
        *(change("a", "dtype", to=value) for value in ("float", "load", None, [], "complex64")),
        *(
            change("a", "shape", to=value)
            for value in ([4, 3], [12], [-3, -4], [3, 4.0], [3, True], 12, [1 << 60, 4], [1] * 99 + [3, 4], [2**400])
        ),
        *(change("a", "chunks", to=value) for value in ([], None, {}, "x", [None], [[1]])),
        *(change(*CHUNK, "offsets", to=value) for value in ([1, 0], [-1, 0], [0], [0, 0, 0], [0, 1 << 63], None, "00")),
        *(change(*CHUNK, "sizes", to=value) for value in ([4, 4], [2, 4], [3, 0], [-3, -4], [0, 0])),
        *(change(*CHUNK, "file", to=value) for value in ("../x", "/etc/passwd", "", None, 3, "a/b", "none")),
        *(change(*CHUNK, "at", to=value) for value in (-1, 1 << 40, 1 << 70, 1.5, None, 10**6)),
        *(change(*CHUNK, "nbytes", to=value) for value in (0, 47, 49, -48, 1 << 40, None)),
        lambda plain: plain["a"]["chunks"].append(plain["a"]["chunks"][0]),
        lambda plain: plain["a"].update(chunks=[{**plain["a"]["chunks"][0], "sizes": [2, 3], "nbytes": 24}] * 2),
    ],
)
def test_a_description_that_lies_is_refused(lie: Callable[[Any], None], tmp_path: Path) -> None:
    saved_in(tmp_path, a=torch.ones(3, 4))
    plain = json.loads((tmp_path / "tensors.json").read_bytes())
    lie(plain)
    target = torch.zeros(3, 4)
    with pytest.raises((TrainError, FileNotFoundError)):
        fill(tensors_in(json.dumps(plain).encode()), files_in(tmp_path), {"a": target})
    assert not target.any()


def test_random_bytes_are_refused_or_read(tmp_path: Path) -> None:
    saved_in(tmp_path, a=torch.ones(3, 4), b=torch.zeros(2, dtype=torch.int8), c=torch.tensor(1.0))
    data = (tmp_path / "tensors.json").read_bytes()
    rng = random.Random(0)
    for _ in range(500):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.choice(b'0123456789-.[]{}",:ex\xff')
        target = torch.zeros(3, 4)
        try:
            fill(tensors_in(bytes(broken)), files_in(tmp_path), {"a": target})
        except (TrainError, OSError):
            assert not target.any()


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, a=torch.ones(300, 400))
    file = tmp_path / saved["a"].chunks[0].file
    whole_file = file.read_bytes()
    for size in (0, 100, 4096, saved["a"].chunks[0].at + saved["a"].chunks[0].nbytes - 1):
        file.write_bytes(whole_file[:size])
        with pytest.raises(TrainError, match=rf"{file.name} has {size} bytes, and a tensor's data should end at"):
            fill(saved, files_in(tmp_path), {"a": torch.zeros(300, 400)})
