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
from torch.utils.checkpoint import checkpoint

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import flat
from tests.train.worlds import run

WIDTH, STEPS = 4, 8
WAYS = ("plain", "plain", "reentrant", "nonreentrant", "nested")


class Net(nn.Module):
    """Layers that a program applies: a list of (layer, way)."""

    def __init__(self, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=at % 2 == 0) for at in range(layers))
        if layers > 3:
            self.layers[1].weight = self.layers[2].weight  # shared between two modules

    def forward(self, x: Tensor, program: list[tuple[int, str]]) -> Tensor:
        for number, way in program:
            layer = self.layers[number]
            if way == "plain":
                x = layer(x).tanh()
            elif way == "nested":
                x = checkpoint(lambda y, one=layer: checkpoint(lambda z: one(z).tanh(), one(y), use_reentrant=True), x, use_reentrant=True)
            else:
                x = checkpoint(lambda y, one=layer: one(y).tanh() + y, x, use_reentrant=way == "reentrant")
        return x


def program(seed: int, step: int, rank: int, layers: int, stable: bool) -> list[tuple[int, str]]:
    """What a rank does in a step: in ``stable`` runs nearly always the same."""
    rng = random.Random(f"{seed}/{step if not stable or step == 5 else 0}/{rank if not stable or step == 6 else 0}")
    return [(rng.randrange(layers), rng.choice(WAYS)) for _ in range(rng.randint(1, 6))]


def batch(seed: int, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10_000 + step * 100 + micro * 10 + rank)
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()


def trial(rank: int, world: int, seed: int) -> list[str]:
    rng = random.Random(seed)  # the same on all ranks
    flat.PORTION = (1, 64, 1 << 20)[seed % 3]
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


def backward(output: Tensor) -> None:
    output.pow(2).mean().backward()


def same(param: nn.Parameter, expected: Tensor | None, zero: bool) -> bool:
    if param.grad is None or expected is None:
        return param.grad is expected or (param.grad is not None and not param.grad.any() and not (zero and expected is not None))
    return torch.allclose(param.grad, expected, atol=1e-6)


def trials(rank: int, world: int, first: int, last: int) -> list[Any]:
    logging.getLogger("elastirun.train").setLevel(logging.ERROR)  # each trial would name its unused parameters
    return [(seed, wrong) for seed in range(first, last) if (wrong := trial(rank, world, seed))]


@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 1000)])
def test_any_graph_on_any_rank(world: int, first: int) -> None:
    assert run(world, trials, first, first + 25) == [[]] * world


if __name__ == "__main__":
    for number in (2, 3):
        print(number, "ranks:", run(number, trials, int(sys.argv[1]), int(sys.argv[2]), timeout=3600.0)[0] or "all as one process has them")
