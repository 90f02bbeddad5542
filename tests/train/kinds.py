"""Kinds of model that a data-parallel module meets: how each is made, what it is fed, and what its loss is on a rank and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 8, 3


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 11, (BATCH, 4), generator=generator)


def square(output: Tensor) -> Tensor:
    return output.abs().pow(2).mean()


@dataclass(frozen=True)
class Kind:
    """``loss(model, step, rank)`` of one rank. ``torch``: arguments with which torch's own class can run it, None where it cannot."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], Tensor]
    tolerance: float = 1e-6
    torch: dict[str, Any] | None = field(default_factory=dict)
    wrap: Callable[[nn.Module], Any] = lambda module: module
    before_step: Callable[[nn.Module, int], None] = lambda module, step: None
    scale: float = 1.0  # what losses are multiplied with before the backward


def plain(model: Any, step: int, rank: int) -> Tensor:
    return square(model(inputs(step, rank)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Written(nn.Module):
    """A class of one's own, which the compiler takes as a whole; it leaves a bare nn.Sequential alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
        self.layers.to(memory_format=torch.channels_last)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(torch.cat([x, x.flip(0), x * 2, x + 1], 1).view(-1, 2, 4, 4)))
        return out


class Tied(nn.Module):
    """A transformer whose output weights are its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.head(self.block(self.embedding(x))), "other": None}


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(4):
            state = self.cell(x, state)
        out: Tensor = self.head(state)
        return out


class Branches(nn.Module):
    """Which of the branches is used depends on the rank and the step; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.branches[which](self.stem(x).relu())
        return out


class Recomputed(nn.Module):
    """Layers that are computed again in the backward, one of them in several segments, one segment within another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.inner = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def again(self, function: Callable[..., Any], x: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.again(lambda y: self.shared(y).relu() + y, x)
        x = self.again(lambda y: self.again(lambda z: self.inner(z).relu(), self.shared(y)) + y, x)
        out: Tensor = self.head(x)
        return out


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.small = nn.Linear(WIDTH, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.wide(self.narrow(x).double())
        return y, self.small(y.bfloat16()) * self.scale


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x).relu()).relu())
        return out


def thaw(module: nn.Module, step: int) -> None:
    module.get_submodule("first").requires_grad_(step >= 4)
    module.get_submodule("second").requires_grad_(step != 6)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x))
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.real(x).to(torch.complex64) @ self.turn


def cnn_loss(model: Any, step: int, rank: int) -> Tensor:
    return square(model(inputs(step, rank)[:, :, None, None].expand(-1, -1, 1, 1).reshape(-1, 2, 2, 2)))


def tied_loss(model: Any, step: int, rank: int) -> Tensor:
    x = tokens(step, rank)
    return F.cross_entropy(model(x)["logits"].flatten(0, 1), x.flatten())


def branch_loss(model: Any, step: int, rank: int) -> Tensor:
    return square(model(inputs(step, rank), (rank + step // 2) % 3))


def recomputed_loss(model: Any, step: int, rank: int) -> Tensor:
    return square(model(inputs(step, rank).requires_grad_()))


def mixed_loss(model: Any, step: int, rank: int) -> Tensor:
    wide, narrow = model(inputs(step, rank))
    return square(wide) + square(narrow.double())


def sparse_loss(model: Any, step: int, rank: int) -> Tensor:
    return square(model(tokens(step, rank)))


def amp_loss(model: Any, step: int, rank: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square(model(inputs(step, rank)).float())


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


KINDS = (
    Kind("mlp", mlp, plain),
    Kind("cnn", Cnn, cnn_loss),
    Kind("tied", Tied, tied_loss),
    Kind("reused", Reused, plain),
    Kind("branches", Branches, branch_loss, torch={"find_unused_parameters": True}),
    Kind("reentrant", lambda: Recomputed(True), recomputed_loss, torch=None),
    Kind("nonreentrant", lambda: Recomputed(False), recomputed_loss),
    Kind("mixed", Mixed, mixed_loss, tolerance=1e-2),  # of bfloat16's precision
    Kind("frozen", Frozen, plain, torch=None, before_step=thaw),
    Kind("sparse", Sparse, sparse_loss),
    Kind("complex", Complex, plain),
    Kind("compiled", Written, plain, wrap=compiled),
    Kind("amp", mlp, amp_loss, scale=1024.0),
)
