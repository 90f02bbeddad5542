"""Scripts that work with torch's class give the same numbers with ours; what each is about was once wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from elastirun.train import DistributedDataParallel
from tests.support.worlds import run
from tests.train.beside import Torchs
from tests.train.test_ddp import WIDTH, batch, make

Wrap = Callable[[nn.Module], nn.Module]


def norms(module: nn.Module) -> list[float]:
    return [-1.0 if p.grad is None else p.grad.norm().item() for p in module.parameters()]


def learn(ddp: nn.Module, loss: Callable[[int], Tensor]) -> list[Any]:
    """What the gradients of ``loss(step)`` are in each of seven steps: more than it takes until the plan is made."""
    found = []
    for step in range(7):
        ddp.zero_grad()
        loss(step).backward()
        found += norms(ddp)
    return found


class Returns(nn.Module):
    """A parameter itself is among the outputs, so that its gradient may come before that of any other output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.layer(x), "bias": self.bias}


def returned_parameter(rank: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(Returns())

    def loss(step: int) -> Tensor:
        out = ddp(batch(step, rank))
        value: Tensor = out["out"].pow(2).mean() + (out["bias"] - rank).pow(2)
        return value

    return learn(ddp, loss)


class Auxiliary(nn.Module):
    """A part of the loss does not leave by the forward's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.aside, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        out: Tensor = self.head(x)
        self.loss = self.aside(x).pow(2).mean()
        return out


def loss_aside(rank: int, wrap: Wrap) -> list[Any]:
    module = Auxiliary()
    module.unused.requires_grad_(False)
    ddp = wrap(module)
    return learn(ddp, lambda step: ddp(batch(step, rank)).pow(2).mean() + module.loss)


def decay_in_the_loss(rank: int, wrap: Wrap) -> list[Any]:
    module = Auxiliary()
    ddp = wrap(module)
    return learn(ddp, lambda step: ddp(batch(step, rank)).pow(2).mean() + 0 * module.loss + sum(p.pow(2).sum() for p in ddp.parameters()))


def penalty_alone(rank: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 1, bias=False)))

    def loss(step: int) -> Tensor:
        x = batch(step, rank).requires_grad_()
        (grad,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        return grad.pow(2).mean()

    return learn(ddp, loss)


def two_in_turn(rank: int, wrap: Wrap) -> list[Any]:
    """Two networks, of which one is frozen while the other one learns."""
    plain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    one, two = map(wrap, plain)
    found = []
    for step in range(6):
        for learning in plain:
            for module in plain:
                module.requires_grad_(module is learning)
                module.zero_grad()
            two(one(batch(step, rank))).mean().backward()
            found += norms(learning)
    return found


def hooks_of_the_user(rank: int, wrap: Wrap) -> list[Any]:
    """On parameters, before the wrapper's own and after them."""
    module, seen = make(), []

    def double(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.norm().item())
        param.grad.mul_(2)

    params = list(module.parameters())
    for param in params[::2]:
        param.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
    ddp = wrap(module)
    for param in params[1::2]:
        param.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
    return learn(ddp, lambda step: ddp(batch(step, rank)).pow(2).mean()) + sorted(seen)


def frozen_evaluation(rank: int, wrap: Wrap) -> list[Any]:
    """Parts, then all of it, are frozen for an evaluation on one rank."""
    module = make()
    ddp = wrap(module)
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        if rank == 0:
            for part in (next(module.children()), module):
                part.requires_grad_(False)
                with torch.no_grad():
                    ddp(batch(step, rank))
                part.requires_grad_(True)
    return norms(module)


def statistics_written(rank: int, wrap: Wrap) -> list[Any]:
    """Running statistics that are loaded or computed anew stay as they are."""
    layer = nn.BatchNorm1d(WIDTH)
    ddp, found = wrap(nn.Sequential(layer, nn.Linear(WIDTH, 1))), []
    best = {name: torch.full_like(value, 7) if "running" in name else value.clone() for name, value in ddp.state_dict().items()}

    def loaded_before_a_forward() -> None:
        ddp.load_state_dict(best)
        with torch.no_grad():
            ddp(batch(9, rank))

    ways = (lambda: ddp.load_state_dict(best), lambda: update_bn([batch(9, 0) + 5, batch(10, 0) + 5], ddp), loaded_before_a_forward)
    for way in ways:
        ddp.train()
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step, rank)).pow(2).mean().backward()
        way()
        ddp.eval()
        assert layer.running_mean is not None and layer.running_var is not None
        found += [*layer.running_mean.tolist(), *layer.running_var.tolist()]
    return found


class Odd(nn.Module):
    """Complex numbers after an odd number of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x).abs().sum() + self.second.sum() * x.sum()


def complex_after_real(rank: int, wrap: Wrap) -> list[Any]:
    ddp = wrap(Odd())
    return learn(ddp, lambda step: ddp(batch(step, rank)[0, :3]))


class Node:
    def __init__(self, value: Tensor) -> None:
        self.value, self.torch, self.others = value, torch, [self]


def objects_that_know_each_other(rank: int, wrap: Wrap) -> list[Any]:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Node:
            nodes = [Node(self.inner(x)) for _ in range(50)]
            for node in nodes:
                node.others = nodes
            return nodes[0]

    ddp = wrap(Graph())
    return learn(ddp, lambda step: ddp(batch(step, rank)).value.pow(2).mean())


CASES = [
    *(returned_parameter, loss_aside, decay_in_the_loss, penalty_alone, two_in_turn, hooks_of_the_user),
    *(frozen_evaluation, statistics_written, complex_after_real, objects_that_know_each_other),
]


def both(rank: int, world: int, number: int) -> tuple[list[Any], list[Any]]:
    def ours(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, transport="group")

    def torchs(module: nn.Module) -> nn.Module:
        return Torchs(module, forward_sync_buffers=False)

    found = []
    for wrap in (ours, torchs):
        torch.manual_seed(0)
        found.append(CASES[number](rank, wrap))
    return found[0], found[1]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_the_same_numbers(number: int) -> None:
    for ours, theirs in run(2, both, number):
        assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) > 1
