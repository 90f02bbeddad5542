"""Checkpoints of a model that is split over tensor-parallel ranks and pipeline stages, restored in another layout."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastirun.train import Checkpointer, CheckpointError, DistributedDataParallel, Stages, TrainState
from elastirun.train.state.tree import flatten
from elastirun.train.state.union import Union, group_options, merged, verify_same_options
from elastirun.train.state.values import decode_values, encode_values
from tests.agent.test_checkpoint_memory import Agent
from tests.support.worlds import run

WIDTH, LAYERS = 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


class Whole(nn.Module):
    """A model whose stages are what is left of it without some of its layers, so that names stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleDict({str(at): Layer() for at in range(LAYERS)})

    def stage(self, number: int, count: int) -> Whole:
        part = deepcopy(self)
        for at in range(LAYERS):
            if at * count // LAYERS != number:
                del part.layers[str(at)]
        if number > 0:
            del part.first
        if number < count - 1:
            del part.last
        return part


def numbers(name: str, like: Tensor) -> Tensor:
    """Return what the tensor ``name`` is to be, whatever rank has it."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    whole = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


Layout = tuple[int, int, int, int]  # replicas, pipeline ranks, tensor-parallel ranks, stages of each pipeline rank


def build(layout: Layout) -> tuple[Any, Any]:
    """Return the part of the model that this rank has, and its optimizer, with all state."""
    dp, pp, tp, stages = layout
    mesh = init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    at, parts = mesh["pp"].get_local_rank(), []
    for number in [at + pp * more for more in range(stages)]:
        part = Whole().stage(number, pp * stages) if pp * stages > 1 else Whole()
        if tp > 1:
            for layer in part.layers.values():
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        parts.append(DistributedDataParallel(part, device_mesh=mesh["dp"], init_sync=False))
    model: nn.Module = Stages(*parts) if stages > 1 else parts[0]
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.5)
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of the state by name."""
    return flatten({"model": model, "optimizer": optimizer}).tensors


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # which makes its state
    with torch.no_grad():
        for name, tensor in tensors(model, optimizer).items():
            tensor.copy_(numbers(name, tensor))


def save(rank: int, world: int, folder: str, layout: Layout) -> list[str]:
    model, optimizer = build(layout)
    fill(model, optimizer)
    with closing(Checkpointer(folder)) as checkpoints:
        for step in (1, 2):  # the second one with the plan of the first
            optimizer.param_groups[0]["lr"] = 0.5 / step
            checkpoints.save(step, TrainState(model, optimizer, note={"saved by": layout}, rng=step == 1))
            checkpoints.wait()
    return list(tensors(model, optimizer))


def load(rank: int, world: int, folders: list[str], layout: Layout) -> list[Any]:
    """Restore each of the checkpoints. Return how many tensors came back, and which are wrong."""
    found = []
    for folder in folders:
        model, optimizer = build(layout)
        run_state = TrainState(model, optimizer, note=None, rng=False)
        with closing(Checkpointer(folder)) as checkpoints:
            step = checkpoints.restore(run_state)
        restored = tensors(model, optimizer)
        wrong = [name for name, tensor in restored.items() if not _equal(tensor, numbers(name, tensor))]
        lr = [group["lr"] for group in optimizer.param_groups]
        found.append([step, len(restored), wrong, lr, sorted(restored)])
    return found


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(*(each.to_local() if isinstance(each, DTensor) else each for each in (one.detach(), other)))


LAYOUTS: list[Layout] = [(1, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 2), (1, 4, 2, 1), (3, 1, 2, 1)]


@pytest.mark.daily(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_mesh_is_restored_on_any_other(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("checkpoints")
    folders = [str(place / "-".join(map(str, each))) for each in LAYOUTS]
    names: set[str] = set()
    for folder, each in zip(folders, LAYOUTS, strict=True):
        for own in run(each[0] * each[1] * each[2], save, folder, each):
            names.update(own)
    dp, pp, tp, _ = layout
    for checkpoint in zip(*run(dp * pp * tp, load, folders, layout), strict=True):
        assert {(step, tuple(wrong), tuple(lr)) for step, _, wrong, lr, _ in checkpoint} == {(2, (), (0.25, 0.5))}
        assert set(itertools.chain(*(restored for *_, restored in checkpoint))) == names


def in_memory(rank: int, world: int, folder: str, agents: list[str], layout: Layout, saves: bool) -> list[Any]:
    """Save for the memory alone, or restore. ``agents``: the sockets of the nodes, each of which has two ranks."""
    os.environ |= {"ELASTIRUN_SOCKET": agents[rank // 2], "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    model, optimizer = build(layout)
    with closing(Checkpointer(folder, every=100, memory_every=1)) as checkpoints:
        if saves:
            fill(model, optimizer)
            for step in (1, 2):
                checkpoints.save(step, TrainState(model, optimizer, rng=False))
            return []
        step = checkpoints.restore(TrainState(model, optimizer, rng=False))
    restored = tensors(model, optimizer)
    return [step, [name for name, tensor in restored.items() if step and not _equal(tensor, numbers(name, tensor))]]


@pytest.mark.parametrize("layout", [(2, 1, 2, 1), (1, 2, 2, 1)])
def test_the_memory_of_a_node_has_the_whole_state_where_it_has_a_replica(layout: Layout, tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
    first, second = (Agent(tmp_path / node, 1 << 30) for node in ("a", "b"))
    folder, sockets = str(tmp_path / "c"), [str(tmp_path / node / "agent") for node in ("a", "b")]
    with closing(second):
        with closing(first):
            run(4, in_memory, folder, sockets, layout, True)
        told = run(2, in_memory, folder, sockets[1:], (1, 2, 1, 1), False)  # the other machine is lost
    assert told == [[2, []] if layout[0] == 2 else [None, []]] * 2


def read_by_torch(rank: int, world: int, folder: str) -> list[str]:
    """Read a checkpoint with torch alone. Return the names of what is wrong."""
    model = Whole()
    nn.init.zeros_(model.first.weight)
    wanted = {"model": model.state_dict()}
    dcp.load(wanted, checkpoint_id=f"{folder}/step-00000002")
    return [name for name, tensor in wanted["model"].items() if not torch.equal(tensor, numbers(f"model.{name}", tensor))]


def test_torch_reads_the_stages_of_a_pipeline_as_one_model(tmp_path: Any) -> None:
    run(4, save, str(tmp_path), (1, 2, 2, 1))
    assert run(1, read_by_torch, str(tmp_path)) == [[]]


def other_options(rank: int, world: int, folder: str) -> list[str]:
    """Save stages whose optimizers differ from the second save on. Return the errors."""
    part = Whole().stage(rank, world)
    optimizer = torch.optim.AdamW(part.parameters())
    told = []
    with closing(Checkpointer(folder)) as checkpoints:
        for step in (1, 2, 3):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank if step == 2 else step)
            try:
                checkpoints.save(step, {"model": part, "optimizer": optimizer})
                told.append("")
            except CheckpointError as error:
                told.append(str(error))
    return told


def test_stages_whose_optimizers_have_other_options_are_refused_when_that_begins(tmp_path: Any) -> None:
    for first, second, third in run(2, other_options, str(tmp_path)):
        assert first == third == ""
        assert second.startswith("optimizer.param_groups.0 has another lr on rank 1 than on rank 0: ranks that have different parts")


def lent_values(rank: int, world: int, folder: str) -> Any:
    """Save a value that only rank 1 has, and that changes. Return what comes back."""
    state: dict[str, Any] = {"model": Whole().stage(rank, world), "mine": {"rank": rank}, "step": 0}
    with closing(Checkpointer(folder)) as checkpoints:
        for step in (1, 2):
            state["step"] = step
            if rank == 1:
                state["late"] = {"seen": step, "of": torch.full((3,), step)}
            checkpoints.save(step, state)
            checkpoints.wait()
        found = {**state, "late": {"seen": -1, "of": torch.zeros(3, dtype=torch.int64)}, "mine": {}}
        checkpoints.restore(found)
    return [found["late"]["seen"], found["late"]["of"].tolist(), found["mine"], found["step"]]


def test_values_that_one_rank_alone_has_are_those_of_each_save(tmp_path: Any) -> None:
    assert run(2, lent_values, str(tmp_path)) == [[2, [2, 2, 2], {"rank": 0}, 2]] * 2


def unused_parts(rank: int, world: int, folder: str) -> list[str]:
    """Restore stages, without a layer that no rank has. Return what is logged."""
    part = Whole().stage(rank, world)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastirun.checkpoints").addHandler(handler)
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, {"model": part})
        checkpoints.wait()
        if rank == 0:
            del part.layers["0"]
        checkpoints.restore({"model": part})
    return [text for text in told if "no place" in text]


def test_what_no_rank_has_a_place_for_is_said_and_other_stages_are_not(tmp_path: Any) -> None:
    first, second = run(2, unused_parts, str(tmp_path))
    assert second == [] and len(first) == 1
    assert "step 1 has what the state has no place for: model.layers.0." in first[0] and first[0].endswith("and 1 more")


def test_stages_with_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two stages have first.bias: let each name its layers"):
        Stages(Whole(), Whole()).state_dict()


def sharded_stages(rank: int, world: int, folder: str, how: str) -> str:
    """Save stages of the same names that are split over two ranks each. Return the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "x"))
    torch.manual_seed(mesh["pp"].get_local_rank())
    part = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    if how == "fsdp":
        fully_shard(part, mesh=mesh["x"])
    else:
        parallelize_module(part, mesh["x"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with closing(Checkpointer(folder)) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.save(1, {"model": part})
    return str(error.value)


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_parts_of_one_box_are_compared(how: str, tmp_path: Path) -> None:
    for told in run(4, sharded_stages, str(tmp_path), how):
        assert told.startswith("rank 2: model.0.weight is another tensor than that of rank 0: ")


def coming_apart(rank: int, world: int, folder: str) -> list[str]:
    """Save stages of the same names that begin alike. Return what is logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastirun.checkpoints").addHandler(handler)
    state = {"weight": torch.ones(4)}
    with closing(Checkpointer(folder)) as checkpoints:
        for step in range(1, 11):
            state["weight"] += rank * (step > 1)
            checkpoints.save(step, state)
    return [text for text in told if "another tensor" in text]


def test_copies_that_come_apart_are_said(tmp_path: Path) -> None:
    first, second = run(2, coming_apart, str(tmp_path))
    assert second == [] and len(first) == 1
    assert first[0].startswith("after a restore all ranks will have the same, and now they have not: rank 1: weight is another tensor")


def removed_values(rank: int, world: int, folder: str) -> Any:
    state: dict[str, Any] = {
        "model": Whole().stage(rank, world),
        "frozen": {"0": True, "1": True},
        "x": {"y": 1},
        "config": {"param_groups": [1]},
    }
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, state)
        del state["frozen"]["1"], state["x"]
        checkpoints.save(2, state)
        checkpoints.wait()
        found = {**state, "frozen": None, "x": "not there"}
        checkpoints.restore(found, strict=False)
    return [found["frozen"], found["x"], found["config"]]


def test_values_that_are_removed_are_gone(tmp_path: Path) -> None:
    assert run(2, removed_values, str(tmp_path)) == [[{"0": True}, "not there", {"param_groups": [1]}]] * 2


def empty_group(rank: int, world: int, folder: str) -> list[Any]:
    """Resume where a group has no parameter on one rank. Return its learning rates, before and after one more save."""
    part = nn.ModuleDict({str(rank): nn.Linear(4, 4, bias=rank == 0)})

    def make() -> Any:
        groups = [[p for p in part.parameters() if p.dim() == dim] for dim in (2, 1)]
        return torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)

    optimizer = make()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, {"model": part, "optimizer": optimizer})
        checkpoints.wait()
        again = make()
        checkpoints.restore({"model": part, "optimizer": again})
        checkpoints.save(2, {"model": part, "optimizer": again})
    return [group["lr"] for group in again.param_groups]


def test_a_group_without_parameters_here_has_its_options_back(tmp_path: Path) -> None:
    assert run(2, empty_group, str(tmp_path)) == [[0.05, 0.05]] * 2


class Migrated(nn.Linear):
    """A layer that changes what an older version of it has saved."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def migrated(rank: int, world: int, folder: str) -> float:
    part = nn.ModuleDict({"only": Migrated(1, 1)})
    nn.init.ones_(part["only"].weight)  # type: ignore[arg-type]
    with closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, {"model": Stages(part)})
        checkpoints.wait()
        checkpoints.restore({"model": Stages(part)})
    return float(part["only"].weight)  # type: ignore[arg-type]


def test_stages_keep_the_versions_of_their_layers(tmp_path: Path) -> None:
    assert run(1, migrated, str(tmp_path)) == [1.0]


def test_stages_are_one_module() -> None:
    whole = Whole()
    parts = Stages(whole.stage(0, 2), whole.stage(1, 2))
    assert set(parts.state_dict()) == set(whole.state_dict())
    other = Whole()
    parts.load_state_dict(other.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in parts.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        parts.load_state_dict({"first.weight": whole.first.weight})


# -- trees, without ranks --------------------------------------------------------------------------------


def tree_of(part: nn.Module, options: dict[str, Any] | None = None, **values: Any) -> Any:
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, **(options or {}))
    for param in part.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return flatten({"model": part, "optimizer": optimizer, **values}).tree


def plain(tree: Any) -> Any:
    return decode_values(encode_values(tree))


def test_the_trees_of_all_stages_are_the_tree_of_the_whole() -> None:
    whole = Whole()
    trees = [tree_of(whole.stage(number, 4)) for number in range(4)]
    expected = plain(tree_of(whole))
    for own in range(4):
        made = plain(Union([*map(plain, trees)], own, trees[own]).completed(trees[own]))
        [group], [theirs] = made["optimizer"].pop("param_groups"), plain(expected)["optimizer"]["param_groups"]
        assert sorted(group.pop("params")) == sorted(theirs.pop("params")) and group == theirs
        rest = plain(expected)
        del rest["optimizer"]["param_groups"]
        assert made == rest


def test_the_trees_of_parameters_without_names_are_refused() -> None:
    whole = Whole()
    trees = [flatten({"optimizer": torch.optim.SGD(whole.stage(number, 4).parameters())}).tree for number in range(2)]
    with pytest.raises(CheckpointError, match="parameters that are in no module of the state"):
        merged(trees[0], trees[1])


def test_values_that_others_have_from_this_rank_are_watched() -> None:
    first, second = ({"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 4, "d": 5}, "e": [6]})
    union = Union([first, second], 1, second)
    assert union.is_for({"a": 8, "b": {"c": 9, "d": 5}, "e": [6]})
    assert not union.is_for({"a": 3, "b": {"c": 4, "d": 7}, "e": [6]}) and not union.is_for({"a": 3, "b": {"c": 4, "d": 5}, "e": [7]})
    assert Union([{**first, "f": 7}, second], 0, {**first, "f": 7}).is_for({"a": 0, "b": {"c": 0}, "f": 7})
    assert not Union([{**first, "f": 7}, second], 0, {**first, "f": 7}).is_for({"a": 1, "b": {"c": 2}, "f": 8})
    assert not Union([first, second], 0, first).is_for({"a": 1, "b": {"c": 2}, "new": 8}), "what is new may be lacked by others"
    assert Union([first, second], 0, first).is_for({"a": 0}) and Union([first, second], None, second).is_for({"e": 7})
    assert union.completed({"a": 8}) == {"a": 8}, "what this rank had and has no more is gone"
    assert Union([first, second], 0, first).completed({"a": 8, "b": {"c": 2}}) == {"a": 8, "b": {"c": 2, "d": 5}, "e": [6]}
    assert Union([first, second], 0, first).completed({"b": {}}) == {"b": {"d": 5}, "e": [6]}


def test_versions_of_layers_are_those_of_all_ranks() -> None:
    one, other = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.Identity(), nn.BatchNorm1d(2))
    trees = [flatten({"m": part}).tree for part in (one, nn.Sequential(nn.Linear(2, 2)), other)]
    made = merged(merged(trees[0], trees[1]), trees[2])
    assert made["m"]["versions"] == {"0": 2, "1": 2} and {"0.weight", "1.running_mean"} <= set(made["m"]["items"])


def test_the_first_difference_of_options_is_named() -> None:
    whole = Whole()
    own = {rank: [*group_options(tree_of(whole.stage(rank, 2), {"weight_decay": rank / 2}))] for rank in range(2)}
    with pytest.raises(CheckpointError, match=r"optimizer.param_groups.0 has another weight_decay on rank 1 than on rank 0"):
        verify_same_options(own)
    verify_same_options({0: own[0], 2: own[0]})
