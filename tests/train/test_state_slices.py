"""The state of a run in slices: which elements come together, and that a new rank has the same bits in the end, though all train on."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState
from elastirun.train.ddp.world_switch import WorldSwitch
from elastirun.train.errors import ModelMismatch
from elastirun.train.live import state_slices
from elastirun.train.live.slice_memory import SliceMemory, accept, offer
from elastirun.train.live.state_slices import Receiver, Sender, belonging, cut
from elastirun.train.state.tree import flatten
from tests.support.worlds import run


def test_a_slice_has_the_same_elements_of_what_belongs_together() -> None:
    sizes = {"w": (10, 4), "w.sum": (10, 8), "b": (3, 4)}
    assert cut(sizes, [["w", "w.sum"], ["b"]], 60) == [
        [("w", 0, 5), ("w.sum", 0, 5)],
        [("w", 5, 10), ("w.sum", 5, 10)],
        [("b", 0, 3)],
    ]


def test_neighbours_share_a_slice_and_one_element_is_never_too_large() -> None:
    assert cut({"a": (2, 4), "b": (3, 4)}, [["a"], ["b"]], 20) == [[("a", 0, 2), ("b", 0, 3)]]
    assert cut({"a": (2, 8)}, [["a"]], 1) == [[("a", 0, 1)], [("a", 1, 2)]]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 4000)


def made(seed: int, optimizer: str) -> tuple[TrainState, DistributedDataParallel]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model = DistributedDataParallel(net, init_sync=False, check_replicas_every=1)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    loader = ElasticDataLoader(Numbers(), global_batch_size=16)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    return TrainState(model=model, optimizer=made, scheduler=scheduler, data=loader), model


def make_step(state: TrainState, model: DistributedDataParallel, batch: torch.Tensor) -> None:
    def loss() -> torch.Tensor:
        state["optimizer"].zero_grad()
        found: torch.Tensor = model(batch).square().mean()
        found.backward()
        return found

    state["optimizer"].step(loss)
    state["scheduler"].step()
    state.step += 1


def values(state: TrainState) -> tuple[Any, ...]:
    flat = flatten({name: part for name, part in state.items() if name != "rng"})
    return {name: tensor.tolist() for name, tensor in flat.tensors.items()}, flat.tree


def transfers(
    rank: int, world: int, optimizer: str, unit: int = 64, pieces: int = 1000, near: bool = True, seconds: float = 0.0, slow: int = -1
) -> tuple[int, tuple[Any, ...]]:
    """Rank 1 is new: it makes the steps of rank 0 without data of its own, and gets rank 0's state meanwhile.

    ``near``: through memory that both map; ``seconds``: that a slice may take; ``slow``: a rank that copies slowly.
    """
    state_slices.UNIT, state_slices.SECONDS = unit, seconds
    if slow == rank:
        state_slices._bytes = slowly  # type: ignore[assignment]
    state, model = made(rank, optimizer)
    group = dist.group.WORLD
    assert group is not None
    with model.no_sync():
        for batch in islice(state["data"], 3 if rank == 0 else 1):  # each by itself; rank 1 rehearses
            make_step(state, model, batch)
    model.set_samples(1 - rank)
    WorldSwitch(model).hold_plan(True)
    if rank == 0:
        memory, has_it = offer([1], group, 1 << 20, 1000) if near else (SliceMemory(1 << 20), [])
        assert has_it == [1] * near
        work: Sender | Receiver = Sender(state, [1], group, [0.5], 0.0, pieces, memory, has_it)
    else:
        work = Receiver(state, 0, group, accept(0, group, 1000) if near else None)
    steps = 0
    for batch in state["data"]:
        work.go_on()
        if work.done:
            break
        make_step(state, model, batch)
        steps += 1
    if isinstance(work, Sender):
        work.finish()
    else:
        assert work.more == [0.5]
    return steps, values(state)


whole_bytes = state_slices._bytes


def slowly(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
    time.sleep(0.02)
    return whole_bytes(tensor, start, stop)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_new_rank_has_the_same_state_although_all_train_meanwhile(optimizer: str, near: bool) -> None:
    (steps, first), second = run(2, transfers, optimizer, 64, 1000, near)
    assert second == (steps, first) and steps > 1


def test_a_slice_in_memory_has_as_much_as_can_be_copied_in_its_time() -> None:
    (steps, first), second = run(2, transfers, "Adam", 64, 1000, True, 1e9)
    assert second == (steps, first) and steps == 1  # before the rest, which comes by itself
    (steps, first), second = run(2, transfers, "Adam", 64, 1000, True, 0.05, 0)  # the sender takes longer for a unit
    assert second == (steps, first) and steps > 1


def test_a_slice_through_a_connection_is_as_large_as_the_one_before_was_fast() -> None:
    (steps, first), second = run(2, transfers, "Adam", 64, 1000, False, 1e9)
    assert second == (steps, first) and steps == 2  # the first slice has one unit
    (most, first), second = run(2, transfers, "Adam", 64, 1000, False, 0.0)
    (steps, first), second = run(2, transfers, "Adam", 64, 1000, False, 0.02, 1)  # the new rank takes longer for a unit
    assert second == (steps, first) and steps == most > 2


def test_what_is_left_comes_with_the_last_slice_unless_it_is_more_than_a_slice() -> None:
    (steps, first), second = run(2, transfers, "SGD", 64)  # 48 bytes of the BatchNorm are in no slice
    assert second == (steps, first)
    (more, first), second = run(2, transfers, "SGD", 47)
    assert second == (more, first) and (steps, more) == (2, 5)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_state_comes_in_as_few_pieces_as_an_epoch_has_steps_left(pieces: int) -> None:
    (steps, first), second = run(2, transfers, "Adam", 47, pieces)
    assert second == (steps, first) and steps == pieces - 1  # the first one comes before a step


class Experts(nn.Module):
    """Of four linear layers one is used in each step, so the optimizer's state of the others comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.used = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.used += 1
        found: torch.Tensor = self.experts[min(3, self.used // 3)](inputs)
        return found


def transfers_experts(rank: int, world: int) -> tuple[int, tuple[Any, ...]]:
    def experts(seed: int, optimizer: str) -> tuple[TrainState, DistributedDataParallel]:
        torch.manual_seed(seed)
        model = DistributedDataParallel(Experts(), init_sync=False, check_replicas_every=0, find_unused_parameters=True)
        model.module.used = 0 if rank == 0 else 2  # rank 1 makes two steps less before
        adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        return TrainState(
            model=model,
            optimizer=adam,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(adam, 0.9),
            data=ElasticDataLoader(Numbers(), global_batch_size=16),
        ), model

    global made
    made = experts
    return transfers(rank, world, "Adam", 64)


def test_what_an_optimizer_keeps_only_later_comes_with_the_rest() -> None:
    (steps, first), second = run(2, transfers_experts)
    assert second == (steps, first) and steps > 6


def transfers_flags(rank: int, world: int) -> tuple[int, tuple[Any, ...]]:
    def with_flags(seed: int, optimizer: str) -> tuple[TrainState, DistributedDataParallel]:
        torch.manual_seed(seed)
        net = nn.Linear(4, 2)
        net.register_buffer("flags", torch.tensor([True, seed == 0, False]))
        model = DistributedDataParallel(net, init_sync=False, check_replicas_every=0)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = ElasticDataLoader(Numbers(), global_batch_size=16)
        return TrainState(model=model, optimizer=adam, scheduler=torch.optim.lr_scheduler.ExponentialLR(adam, 0.9), data=loader), model

    global made
    made = with_flags
    return transfers(rank, world, "Adam", 1000)


def test_tensors_of_any_size_come_together() -> None:
    (steps, first), second = run(2, transfers_flags)
    assert second == (steps, first) and steps == 0


def test_a_state_that_has_more_than_the_script_makes_is_a_mismatch() -> None:
    assert run(2, grown) == ["", "ModelMismatch"]


def grown(rank: int, world: int) -> str:
    """Rank 0 has given its optimizer more parameters since."""
    net, group = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), dist.group.WORLD
    adam = torch.optim.Adam(net[0].parameters())
    state = TrainState(model=net, optimizer=adam)
    assert group is not None
    if rank == 0:
        adam.add_param_group({"params": net[1].parameters()})
        net(torch.ones(1, 4)).sum().backward()
        adam.step()
        Sender(state, [1], group, [], 0.0, 100, SliceMemory(1000), []).finish()
        return ""
    try:
        Receiver(state, 0, group, None)
    except ModelMismatch as error:
        return type(error).__name__
    return "none"


def test_a_view_of_a_parameter_does_not_stand_for_it() -> None:
    param = nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([param])
    param.grad = torch.ones(4)
    adam.step()
    kept = {f"kept.{name}": tensor for name, tensor in adam.state[param].items() if tensor.numel() > 1}
    together = belonging({"optimizer": adam}, {"weight": param.detach(), **kept, "view": param.detach()[:2]})
    assert together == [["weight", "kept.exp_avg", "kept.exp_avg_sq"]]


def without_room(rank: int, world: int) -> tuple[int, tuple[Any, ...]]:
    state_slices.LARGEST = 0
    return transfers(rank, world, "Adam", 47, 2)


def test_a_state_that_is_too_large_for_slices_that_are_copied_comes_at_once() -> None:
    (steps, first), second = run(2, without_room)
    assert second == (steps, first) and steps == 0


def test_what_needs_more_than_single_elements_comes_at_once() -> None:
    (steps, first), second = run(2, transfers, "LBFGS")
    assert second == (steps, first) and steps == 0


def test_an_optimizer_of_another_package_comes_at_once() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(3, 3)
    state = {"model": model, "optimizer": Own(model.parameters(), lr=0.1)}
    assert belonging(state, dict(model.named_parameters())) == []
    state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    assert belonging(state, dict(model.named_parameters())) == [["weight"], ["bias"]]
