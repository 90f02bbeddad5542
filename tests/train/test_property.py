"""Random modules, used, shared, skipped and recomputed in ways that differ by rank and step: never a hang, always one process's gradients.

More of them, from other seeds: python -m tests.train.test_property FIRST LAST
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import TrainError
from elastirun.train.reduction.buckets import memory as bucket_memory
from tests.support.worlds import run

WIDTH, STEPS = 4, 8
Program = list[tuple[int, str]]
WAYS = ("plain", "plain", "reentrant", "nonreentrant", "nested")


class Net(nn.Module):
    """Layers that a program applies: a list of (layer, way)."""

    def __init__(self, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=at % 2 == 0) for at in range(layers))
        if layers > 3:
            self.layers[1].weight = self.layers[2].weight  # shared between two modules

    def forward(self, x: Tensor, program: Program) -> Tensor:
        for number, way in program:
            layer = self.layers[number]
            if way == "plain":
                x = layer(x).tanh()
            elif way == "nested":
                x = checkpoint(lambda y, one=layer: checkpoint(lambda z: one(z).tanh(), one(y), use_reentrant=True), x, use_reentrant=True)
            else:
                x = checkpoint(lambda y, one=layer: one(y).tanh() + y, x, use_reentrant=way == "reentrant")
        return x


def program(seed: int, step: int, rank: int, layers: int, stable: bool) -> Program:
    """What a rank does in a step: in ``stable`` runs nearly always the same."""
    rng = random.Random(f"{seed}/{step if not stable or step == 5 else 0}/{rank if not stable or step == 6 else 0}")
    return [(rng.randrange(layers), rng.choice(WAYS)) for _ in range(rng.randint(1, 6))]


def batch(seed: int, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10_000 + step * 100 + micro * 10 + rank)
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()


def trial(rank: int, world: int, seed: int) -> list[str]:
    rng = random.Random(seed)  # the same on all ranks
    bucket_memory.PORTION = (1, 64, 1 << 20)[seed % 3]
    layers, stable = rng.randint(1, 6), rng.random() < 0.5
    net = Net(layers, seed)
    ddp = DDP(net, bucket_cap_mb=rng.choice([None, 1e-5, 2e-4]), transport=rng.choice(["auto", "group"]))
    wrong: list[str] = []
    for step in range(STEPS):
        zero, micros, frozen = rng.random() < 0.8, rng.choice([1, 1, 2]), rng.random() < 0.1
        samples = [rng.choice([1, 1, 1, 3, 0 if r else 1]) for r in range(world)]
        programs = [program(seed, step, r, layers, stable) for r in range(world)]
        net.layers[0].requires_grad_(not frozen or layers == 1)
        net.zero_grad(set_to_none=zero)
        total: dict[str, Tensor] = {}
        for r in range(world):
            alone = copy.deepcopy(net)
            alone.zero_grad()
            for micro in range(micros):
                backward(alone(batch(seed, step, micro, r), programs[r]))
            for name, p in alone.named_parameters():
                if p.grad is not None and samples[r]:
                    total[name] = total.get(name, torch.zeros_like(p)) + p.grad * samples[r] / sum(samples)
        ddp.set_samples(samples[rank])
        for micro in range(micros):
            if micro < micros - 1:
                with ddp.no_sync():
                    backward(ddp(batch(seed, step, micro, rank), programs[rank]))
            elif samples[rank]:
                backward(ddp(batch(seed, step, micro, rank), programs[rank]))
            else:
                ddp.skip()
        wrong += [f"{name} in step {step}" for name, p in net.named_parameters() if not same(p, total.get(name), zero)]
    return wrong


def duet(rank: int, world: int, seed: int) -> list[str]:
    """Two modules in one backward, in an order of each rank's own, with hooks, freezing, failures, penalties, forwards
    without a backward, and new groups between the steps."""
    rng = random.Random(f"duet {seed}")  # the same on all ranks
    bucket_memory.PORTION = (1, 64, 1 << 20)[seed % 3]
    nets = [Net(rng.randint(1, 4), seed + number) for number in range(2)]
    ddps = [DDP(net, bucket_cap_mb=rng.choice([None, 1e-5, 2e-4]), transport=("shared memory", "group")[seed % 2]) for net in nets]
    for ddp in ddps:
        if rng.random() < 0.3:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    wrong: list[str] = []
    failed = False
    for step in range(STEPS):
        if rng.random() < 0.08:
            for ddp in ddps:
                ddp.set_group()
        for net in nets:
            net.layers[0].requires_grad_(rng.random() > 0.15 or len(net.layers) == 1)
            net.zero_grad()
        fails = rng.randrange(world) if rng.random() < 0.1 and step < STEPS - 1 else -1  # who fails has to take part in the next step
        everyone = range(world)
        programs = [[program(seed + at, step, r, len(net.layers), seed % 4 < 2) for at, net in enumerate(nets)] for r in everyone]
        order = ddps if rng.random() < 0.5 or rank else ddps[::-1]
        penal = rng.choice(["", "", "", "first", "after"])
        if fails >= 0 or (penal == "first" and failed):  # a forward comes first then
            penal = ""
        failed = fails >= 0
        if penal == "first":
            penalty(nets).backward()
        if rng.random() < 0.1 and rank == 0:
            ddps[0](batch(seed, step, 1, rank), programs[rank][0])  # without a backward
        together(order, nets, batch(seed, step, 0, rank), programs[rank], fails == rank)
        if penal == "after":
            penalty(nets).backward()
        if fails >= 0:
            continue  # there are no gradients for this step
        for at, net in enumerate(nets):
            expected = one_process(net, [batch(seed, step, 0, r) for r in everyone], [of[at] for of in programs])
            if penal:
                for name, p in net.named_parameters():
                    if p.requires_grad:
                        expected[name] = expected.get(name, torch.zeros_like(p)) + 2 * p.detach()
            wrong += [f"{at}.{name} in step {step}" for name, p in net.named_parameters() if not same(p, expected.get(name), True)]
    return wrong


def penalty(nets: list[Net]) -> Tensor:
    return sum((p.pow(2).sum() for net in nets for p in net.parameters() if p.requires_grad), torch.zeros(()))


def together(ddps: list[DDP], nets: list[Net], x: Tensor, programs: list[Program], fails: bool) -> None:
    """One backward through all ``ddps``, in their order; with ``fails`` an exception ends it here, when all have begun, and the others
    are told."""
    outputs = [ddp(x, programs[nets.index(ddp.module)]) for ddp in ddps]
    loss = torch.stack([output.pow(2).mean() for output in outputs]).sum()
    if fails:
        x.register_hook(_fail)
    try:
        loss.backward()
    except (Fails, TrainError):
        pass


def one_process(net: Net, batches: list[Tensor], programs: list[Program]) -> dict[str, Tensor]:
    """The mean of all ranks' gradients."""
    alone = copy.deepcopy(net)
    alone.zero_grad()
    for x, what in zip(batches, programs, strict=True):
        (alone(x, what).pow(2).mean() / len(batches)).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


class Fails(Exception):
    """On purpose."""


def _fail(_: Tensor) -> None:
    raise Fails


def backward(output: Tensor) -> None:
    output.pow(2).mean().backward()


def same(param: nn.Parameter, expected: Tensor | None, zero: bool) -> bool:
    if param.grad is None or expected is None:
        return param.grad is expected or (param.grad is not None and not param.grad.any() and not (zero and expected is not None))
    return torch.allclose(param.grad, expected, atol=1e-6)


def trials(rank: int, world: int, kind: str, first: int, last: int) -> list[Any]:
    logging.getLogger("elastirun.train").setLevel(logging.CRITICAL)  # each trial would name its unused parameters
    one = {"trial": trial, "duet": duet}[kind]
    return [(seed, wrong) for seed in range(first, last) if (wrong := one(rank, world, seed))]


@pytest.mark.daily(4)
@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 1000)])
def test_any_graph_on_any_rank(world: int, first: int) -> None:
    assert run(world, trials, "trial", first, first + 12) == [[]] * world


@pytest.mark.daily(4)
@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 1000)])
def test_two_modules_in_any_order_on_any_rank(world: int, first: int) -> None:
    assert run(world, trials, "duet", first, first + 10) == [[]] * world


if __name__ == "__main__":
    for number in (2, 3):
        for kind in ("trial", "duet"):
            wrong = run(number, trials, kind, int(sys.argv[1]), int(sys.argv[2]), timeout=3600.0)[0]
            print(f"{number} ranks, {kind}:", wrong or "all as one process has them", flush=True)
