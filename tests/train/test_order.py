"""Ranks that do things in another order, or freeze something else: torch's results, or one clear error on every rank."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import ModelMismatch, TrainError
from elastirun.train.reduction.transports.shared_memory import SharedMemory
from tests.support.worlds import run
from tests.train.test_ddp import WIDTH, batch, close, make

Torchs = nn.parallel.DistributedDataParallel


def mean_of(world: int, step: int, models: int = 1, seed: int = 0) -> list[Tensor]:
    """The gradients of one process that has every rank's batches."""
    total: list[Tensor] = []
    alone = [make(seed) for _ in range(models)]
    for rank in range(world):
        (sum(model(batch(step, rank)).pow(2).mean() for model in alone) / world).backward()
    for model in alone:
        total += [p.grad for p in model.parameters() if p.grad is not None]
    return total


# -- options and frozen parameters ---------------------------------------------------------------------------------------


def unlike(rank: int, world: int, options: dict[str, Any], other: dict[str, Any], frozen: str) -> str:
    model = nn.Embedding(5, 2, sparse=rank == 1) if frozen == "sparse" else make()
    if rank == 1 and frozen == "0.bias":
        model.get_parameter(frozen).requires_grad_(False)
    try:
        DDP(model, **(other if rank == 1 else options))
    except ModelMismatch as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize(
    ("options", "other", "frozen", "said"),
    [  # the ids are short: tests/train/test_mutants.py names them
        ({}, {}, "0.bias", r"0\.bias \(4,\) torch.float32 on ranks? 0, 2; 0\.bias \(4,\) torch.float32 frozen on rank 1"),
        ({}, {"bucket_cap_mb": 1}, "", "bucket_cap_mb=None on ranks 0, 2; bucket_cap_mb=1 on rank 1"),
        ({}, {"check_replicas_every": 7}, "", "check_replicas_every=1000 on ranks 0, 2; check_replicas_every=7 on rank 1"),
        ({}, {"mean_over": "users"}, "", "mean_over_users=False on ranks 0, 2; mean_over_users=True on rank 1"),
        ({"broadcast_buffers": True}, {}, "", "broadcast_buffers=True on ranks 0, 2; broadcast_buffers=None on rank 1"),
        ({}, {"init_sync": False}, "", "init_sync=True on ranks 0, 2; init_sync=False on rank 1"),
        ({"init_sync": False}, {}, "", "init_sync=False on ranks 0, 2; init_sync=True on rank 1"),
        ({}, {"find_unused_parameters": True}, "", "find_unused_parameters=False on ranks 0, 2; find_unused_parameters=True on rank 1"),
        ({}, {}, "sparse", r"weight \(5, 2\) torch.float32 on ranks 0, 2; weight \(5, 2\) torch.float32 sparse on rank 1"),
    ],
    ids=[
        *("frozen", "bucket_cap_mb", "check_replicas_every", "mean_over", "broadcast_buffers"),
        *("init_sync", "no_init_sync", "find_unused", "sparse"),
    ],
)
def test_ranks_that_are_built_otherwise_are_told(
    transport: str, options: dict[str, Any], other: dict[str, Any], frozen: str, said: str
) -> None:
    options, other = ({**some, "transport": transport} for some in (options, other))
    results = run(3, unlike, options, other, frozen)
    assert len(set(results)) == 1
    assert re.search(said, results[0]), results[0]


def later(rank: int, world: int, transport: str, where: str) -> list[Any]:
    """Steps with all parameters, without the first layer's bias, with it again; ``where``: on which ranks."""
    model = make()
    ddp = DDP(model, transport=transport)
    found: list[Any] = []
    try:
        for step in range(9):
            model[0].bias.requires_grad_(not (3 <= step < 6 and (where == "all" or rank == 1)))
            ddp.zero_grad()
            ddp(batch(step, rank)).pow(2).mean().backward()
            exact = mean_of(world, step)
            if 3 <= step < 6:
                found.append(model[0].bias.grad is None)
                exact = [exact[0], *exact[2:]]
            found.append(close([p.grad for p in model.parameters() if p.grad is not None], exact))
    except ModelMismatch as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("transport", ["shared memory", "group"])
def test_what_is_frozen_and_unfrozen_later_is_reduced_from_the_first_step_on(transport: str) -> None:
    assert run(2, later, transport, "all") == [[True] * 12] * 2


@pytest.mark.parametrize("transport", ["shared memory", "group"])
def test_what_one_rank_freezes_later_is_an_error_on_every_rank(transport: str) -> None:
    said = "the ranks do not have the same parameters to train: the first difference is 0.bias on rank 0; 0.weight on rank 1"
    for found in run(2, later, transport, "one"):
        assert found[:3] == [True] * 3 and len(found) == 4 and "the ranks do not have the same parameters to train" in found[3], said


def toggled(rank: int, world: int, transport: str) -> list[bool]:
    """What is frozen changes with each step, and between the steps the first rank evaluates alone."""
    model = make()
    ddp, found = DDP(model, transport=transport), []
    for step in range(7):
        for param in model[0].parameters():  # type: ignore[index]
            param.requires_grad_(step % 2 == 0)
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        exact = mean_of(world, step)[0 if step % 2 == 0 else 2 :]
        found.append(close([p.grad for p in model.parameters() if p.grad is not None], exact))
        if rank == 0:
            ddp.eval()
            with torch.set_grad_enabled(step > 3):
                ddp(batch(step, 0))
            ddp.train()
        dist.barrier()
    return found


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("world", [2, 3])
def test_an_evaluation_on_one_rank_waits_for_nobody_where_freezing_changes(transport: str, world: int) -> None:
    assert run(world, toggled, transport) == [[True] * 7] * world


def extended(rank: int, world: int, transport: str, what: str) -> list[str]:
    model = make()
    ddp, told = DDP(model, transport=transport), []
    if rank == 1 and what == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif rank == 1:
        ddp.step_in_backward(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        try:
            ddp(batch(step, rank)).pow(2).mean().backward()
        except TrainError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", ["hook", "step"])
def test_what_one_rank_alone_registers_is_an_error_on_every_rank(transport: str, world: int, what: str) -> None:
    said = {"hook": "communication hook", "step": "optimizer that steps in the backward"}[what]
    for told in run(world, extended, transport, what):
        assert re.search(f"^ModelMismatch: .* no {said} on ranks? .*; an? {said} on rank 1", told[0])
        assert re.search(r"^ReductionFailed: .* interrupted by ModelMismatch. Use set_group\(\)", told[1])


# -- others in the same group ----------------------------------------------------------------------------------------------


class Talks(torch.autograd.Function):
    """Has a collective of its own in the default group, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [float(dist.get_world_size())] * 3
        return grad


class Talking(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Talks.apply(layer(x).tanh())
            x.register_hook(lambda _: time.sleep(0.003 * self.rank))  # so that the ranks are never at the same point
        return x


def talking(rank: int, world: int, transport: str, hook: str) -> list[bool]:
    ddp = DDP(Talking(rank), bucket_cap_mb=0.0001, transport=transport)
    theirs = Torchs(Talking(rank))  # in whose backward nothing else talks at the same time
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.01)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
    same = []
    for step in range(14 if hook == "powersgd" else 6):  # many chances for its stages to meet the others' collectives
        for model in (ddp, theirs):
            model.zero_grad()
            model(batch(step, rank)).pow(2).mean().backward()
        tolerance = 0.05 if hook == "powersgd" else 1e-6
        pairs = zip(ddp.parameters(), theirs.parameters(), strict=True)
        same.append(all(torch.allclose(a.grad, b.grad, atol=tolerance) for a, b in pairs))  # type: ignore[arg-type]
    return same


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("hook", ["", "allreduce_hook", "powersgd"])
def test_collectives_of_the_model_in_its_backward_are_not_in_the_way(transport: str, hook: str) -> None:
    for same in run(2, talking, transport, hook):
        assert same and all(same)


def two(rank: int, world: int, transport: str, hook: bool) -> list[bool]:
    """Two modules in one backward, whose order in the graph differs between the ranks."""
    models = [make(seed) for seed in (0, 1)]
    wrapped = [DDP(model, transport=transport, bucket_cap_mb=0.0001) for model in models]
    if hook:
        for ddp in wrapped:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    same = []
    for step in range(8):
        order = wrapped if (rank + step) % 2 else wrapped[::-1]
        for ddp in wrapped:
            ddp.zero_grad()
        losses = [ddp(batch(step, rank)).pow(2).mean() for ddp in order]
        if step % 3 == 2:
            sum(losses).backward()  # type: ignore[union-attr]
        else:
            torch.stack(losses).sum().backward()
        for seed, model in enumerate(models):
            same.append(close([p.grad for p in model.parameters()], mean_of(world, step, seed=seed)))
    return same


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_two_modules_in_one_backward_whose_order_differs_between_ranks(transport: str, hook: bool, world: int) -> None:
    assert run(world, two, transport, hook) == [[True] * 16] * world


# -- memory ---------------------------------------------------------------------------------------------------------------


def poor(rank: int, world: int, when: str) -> list[Any]:
    """Rank 1 cannot have the memory of the buckets, at construction or for the second plan."""
    made = 0  # files in memory: one for the ranks' words, one for each plan

    def full(file: int, offset: int, size: int) -> None:
        nonlocal made
        made += 1
        if made > (1 if when == "first" else 2):
            raise OSError(12, "Cannot allocate memory")
        allocate(file, offset, size)

    allocate = os.posix_fallocate
    if rank == 1:
        os.posix_fallocate = full
    try:
        ddp, same = DDP(make()), []
        for step in range(6):
            ddp.zero_grad()
            ddp(batch(step, rank)).pow(2).mean().backward()
            same.append(close([p.grad for p in ddp.parameters()], mean_of(world, step)))
        assert isinstance(ddp._reducer.world.transport, SharedMemory)
        return same
    except TrainError as error:
        return [str(error)]
    finally:
        os.posix_fallocate = allocate


@pytest.mark.parametrize("when", ["first", "later"])
def test_buckets_go_through_the_group_where_there_is_no_memory_to_share(when: str) -> None:
    assert run(2, poor, when) == [[True] * 6] * 2
