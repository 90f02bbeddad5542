"""How plans come about in a living module: when they are taken over, what memory they need, what overlaps."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import ReductionFailed
from elastirun.train.ddp.nested_tensors import find_tensors
from elastirun.train.ddp.world_switch import OTHERS_TRAINED, WorldSwitch
from elastirun.train.groups.collectives import broadcast
from elastirun.train.reduction.buckets.planner import PROBES
from elastirun.train.reduction.transports.base import Storage
from tests.support.until import PATIENCE
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, alone, batch, close, grads, make


def probed(rank: int, world: int) -> bool:
    """Rank 0 asks for gradients of its own after each step, also where the next backward is to begin with a new plan."""
    ddp = DDP(make(), transport="group")
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        if rank == 0:
            before = ddp._reducer.world.buckets.buckets
            torch.autograd.grad(ddp(batch(step, rank)).sum(), list(ddp.parameters()))
            assert ddp._reducer.world.buckets.buckets is before
    return close(grads(ddp.module), alone(ddp.module, [(1, batch(5, r)) for r in range(world)]))


def test_a_new_plan_waits_for_a_backward_that_every_rank_has() -> None:
    assert all(run(2, probed))


class Answer:
    """What the module cannot see into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def opaque(rank: int, world: int) -> list[int]:
    """How often the last step's parameters were seen to fire."""

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Answer:
            return Answer(self.inner(x))

    ddp = DDP(Opaque())
    learn_from = [ddp(batch(step, rank)).value.pow(2).mean().backward() for step in range(6)]
    assert len(learn_from) == 6
    return ddp._reducer.parts.hooks.expected


def test_a_parameter_counts_once_where_its_own_hook_brings_a_new_plan() -> None:
    assert run(2, opaque) == [[1] * 6] * 2


def memory(rank: int, world: int, transport: str) -> list[int]:
    """How many former buckets are still there when memory for new ones is asked for."""
    ddp, found = DDP(make(), transport=transport), []
    reducer, allocate = ddp._reducer, ddp._reducer.world.transport.allocate
    former: list[StorageWeakRef] = []

    def look(storages: Sequence[Storage]) -> Any:
        if storages[0].numel < PROBES[0]:  # it is not the link that is measured
            until = time.monotonic() + 2.0  # a thread of gloo lets go of a bucket a moment after its reduction
            while (left := sum(not ref.expired() for ref in former)) and time.monotonic() < until:
                time.sleep(0.01)
            found.append(left)
        return allocate(storages)

    ddp._reducer.world.transport.allocate = look  # type: ignore[method-assign]
    for step in range(6):
        former += [StorageWeakRef(bucket.flat.untyped_storage()) for bucket in reducer.world.buckets.buckets]
        loss = ddp(batch(step, rank)).pow(2).mean()
        ddp.zero_grad()
        loss.backward()
    return found


@pytest.mark.parametrize("transport", ["group", "shared memory"])
def test_the_memory_of_a_plan_is_given_up_before_there_is_more(transport: str) -> None:
    for found in run(2, memory, transport):
        assert len(found) > 1 and not any(found), found


def recomputed(rank: int, world: int) -> list[float]:
    """Every layer is computed again in the backward, one at a time."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    ddp = DDP(Again(), bucket_cap_mb=0.00001)
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank).requires_grad_()).pow(2).mean().backward()
    stats = ddp.stats()
    return [sum(bucket["launched"] < stats["backward"] for bucket in stats["buckets"]), len(stats["buckets"])]


def test_overlap_is_kept_under_reentrant_recomputation() -> None:
    for early, buckets in run(2, recomputed):
        assert early == buckets - 1 > 4


class Many(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(parameters))

    def forward(self) -> Tensor:
        return torch.stack([param.sum() for param in self.all]).sum()


def calls(rank: int, world: int, parameters: int) -> int:
    """Function calls in construction and the first backwards."""
    module = Many(parameters)
    profile = cProfile.Profile()
    ddp = profile.runcall(DDP, module)
    for _ in range(5):
        profile.runcall(ddp().backward)
        ddp.zero_grad()
    counted: Any = pstats.Stats(profile)
    return int(counted.total_calls)


def test_the_work_of_planning_grows_with_the_number_of_parameters_and_not_with_its_square() -> None:
    (few,), (many,) = run(1, calls, 500), run(1, calls, 4000)
    assert many < 12 * few


class Leads(nn.Module):
    """Its output has a reference to something large."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": self.inner(x), "config": self.config}

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = make(), Answer(torch.zeros(1))
        self.config.__dict__["more"] = [Answer(torch.zeros(1, requires_grad=True)) for _ in range(100)]


def test_other_objects_in_an_output_are_not_looked_into() -> None:
    module = Leads()
    found = find_tensors(module(batch(0, 0)))
    assert len(found) == 1 and found[0].grad_fn is not None


class Sometimes(nn.Module):
    """Its second layer is left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if whole else x


def train(ddp: DDP, rank: int, steps: int) -> list[list[int]]:
    """Train a ``Sometimes``. Return how far planning was after each step."""
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(step, rank), whole=step % 3 == 0).pow(2).mean().backward()
        found.append(ddp._reducer.parts.planner.position)
    return found


def kept(rank: int, world: int, transport: str) -> tuple[list[Any], list[list[int]], bool]:
    """Ranks 1 and 2 train until their plan is measured; then rank 0 comes. The plans and positions, and whether the gradients are right."""
    two = dist.new_group([1, 2])

    torch.manual_seed(0)
    module = Sometimes()
    if rank == 0:
        ddp = DDP(module, transport=transport)
        before = ddp._reducer.parts.planner.buckets
    else:
        ddp = DDP(module, transport=transport, process_group=two)
        train(ddp, rank, 8)
        before = ddp._reducer.parts.planner.buckets
        assert not WorldSwitch(ddp).plans
        ddp.set_group()
    planner = ddp._reducer.parts.planner
    assert not WorldSwitch(ddp).plans, "a plan is there: it is not measured again"
    positions = [planner.position, *train(ddp, rank, 4)]  # with the tenth reduction, after which there may be a new plan
    ddp.zero_grad()
    ddp(batch(9, rank), whole=True).pow(2).mean().backward()
    want = torch.stack([_whole_grad(module, batch(9, r)) for r in range(world)]).mean(0)
    assert module.sometimes.weight.grad is not None
    return [before, positions[0]], positions, bool(torch.allclose(module.sometimes.weight.grad, want, atol=1e-6))


def _whole_grad(module: Sometimes, x: Tensor) -> Tensor:
    return torch.autograd.grad(module(x, whole=True).pow(2).mean(), module.sometimes.weight)[0]


@pytest.mark.parametrize("transport", ["group", "shared memory"])
def test_a_measured_plan_stays_in_the_next_world_and_new_ranks_take_it_over(transport: str) -> None:
    told = run(3, kept, transport)
    assert all(right for _, _, right in told)
    assert [plan for plan, _, _ in told] == [told[1][0]] * 3
    assert [positions for _, positions, _ in told] == [told[0][1]] * 3 and any(told[0][1][0][3:]), "all ranks plan at the same step"


def another_transport(rank: int, world: int) -> bool:
    """Whether the plan is measured again."""
    ddp = DDP(make(), transport="shared memory")
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
    assert not WorldSwitch(ddp).plans
    ddp._options = replace(ddp._options, transport="group")
    ddp.set_group()
    return WorldSwitch(ddp).plans


def test_a_plan_for_another_transport_is_made_anew() -> None:
    assert run(2, another_transport) == [True, True]


def joined(rank: int, world: int) -> list[list[int]]:
    """Rank 1 comes to rank 0 between two steps. How far planning is after each step, the tenth reduction among them."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    ddp = DDP(Sometimes(), process_group=alone)
    train(ddp, rank, 8 if rank == 0 else 1)
    WorldSwitch(ddp).hold_plan(True)
    group = dist.group.WORLD
    assert group is not None
    WorldSwitch(ddp).enter(WorldSwitch(ddp).prepare(group))
    position = broadcast([*map(int, WorldSwitch(ddp).reducer.position)], group, torch.device("cpu"))
    if rank == 1:
        WorldSwitch(ddp).reducer.position = position
    WorldSwitch(ddp).hold_plan(False)
    return train(ddp, rank, 6)


def joined_unfrozen(rank: int, world: int) -> list[float]:
    """Rank 1 comes when the others have begun to train a parameter that its script still has frozen, and froze another one."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].weight.requires_grad_(False)
    ddp = DDP(net, process_group=alone)
    for step in range(2):
        if rank == 0 and step == 1:
            net[0].weight.requires_grad_(True)
            net[1].bias.requires_grad_(False)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
    WorldSwitch(ddp).hold_plan(True)
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        dist.destroy_process_group(alone)  # as the group of a rank that was alone ends when it is to join
    WorldSwitch(ddp).enter(WorldSwitch(ddp).prepare(group, new=rank == 1))
    position = broadcast([*map(int, WorldSwitch(ddp).reducer.position)], group, torch.device("cpu"))
    if rank == 1:
        WorldSwitch(ddp).reducer.position = position
    assert ddp._reducer.parts.planner.held
    WorldSwitch(ddp).hold_plan(False)
    ddp.zero_grad()
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    return [0.0 if p.grad is None else float(p.grad.sum()) for p in net.parameters()]


def test_a_rank_that_joins_trains_the_parameters_that_the_others_train() -> None:
    first, second = run(2, joined_unfrozen, timeout=PATIENCE)
    assert first == second and [value != 0.0 for value in first] == [True, True, True, False]


def frozen_meanwhile(rank: int, world: int, backwards: int) -> str:
    """A parameter is frozen when another world was prepared."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    ddp = DDP(net)
    ddp(torch.ones(1, 2)).sum().backward()
    group = dist.group.WORLD
    assert group is not None
    following = WorldSwitch(ddp).prepare(group)
    net[0].weight.requires_grad_(False)
    for _ in range(backwards):
        ddp(torch.ones(1, 2)).sum().backward()
    try:
        WorldSwitch(ddp).enter(following)
    except ReductionFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_world_that_was_prepared_for_other_parameters_is_not_entered(backwards: int) -> None:
    """All know of it after the first backward, and make their buckets anew in the second."""
    assert run(2, frozen_meanwhile, backwards, timeout=PATIENCE) == [OTHERS_TRAINED] * 2


def frozen_between(rank: int, world: int) -> str:
    """A parameter is frozen while another world is being prepared: rank 0 has come to its next forward, rank 1 has not."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    ddp = DDP(net)
    net[0].weight.requires_grad_(False)
    ddp(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        ddp(torch.ones(1, 2))
    group = dist.group.WORLD
    assert group is not None
    try:
        WorldSwitch(ddp).prepare(group)
    except ReductionFailed as error:
        return str(error)
    return ""


def test_no_world_is_prepared_by_ranks_that_train_different_parameters() -> None:
    assert run(2, frozen_between, timeout=PATIENCE) == [OTHERS_TRAINED] * 2


def test_a_rank_that_joins_makes_the_next_plan_with_the_others() -> None:
    first, second = run(2, joined, timeout=PATIENCE)
    assert first == second and any(first[0][3:])
