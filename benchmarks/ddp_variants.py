"""Models and variants that benchmarks/ddp.py compares: three models, and the ways to reduce their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastirun.train import DistributedDataParallel
from elastirun.train.reduction.transports.base import Storage
from elastirun.train.reduction.transports.choose import choose

CPU = torch.device("cpu")
PIECE = 25 << 20  # bytes that "communication only" reduces at a time: the size of torch's buckets
SHM = "shared memory"
Step = Callable[[], None]


class Small(nn.Module):
    """A model of 2,000 tensors with 1,024 elements, whose cost is all per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(1024)) for _ in range(2000)])

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x


class Transformer(nn.Module):
    """A model of 54.7 million parameters, 219 MB, in 146 tensors. The embedding has 67 MB, and its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32768, 512)
        self.position = nn.Parameter(torch.zeros(256, 512))
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.layers(self.embedding(tokens) + self.position[: tokens.shape[1]])
        return output


@dataclass(frozen=True)
class Case:
    label: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


CASES = {
    "a": Case("(a) 2,000 tensors x 1,024 (8 MB)", Small, lambda: torch.randn(1024)),
    "b": Case("(b) transformer, 54.7 M parameters (219 MB)", Transformer, lambda: torch.randint(0, 32768, (4, 32))),
    "c": Case("(c) one 5120 x 5120 layer (105 MB)", lambda: nn.Linear(5120, 5120, bias=False), lambda: torch.randn(64, 5120)),
}

COMPUTE, NO_OVERLAP, TORCH, TORCH_VIEW = "compute only", "no overlap", "torch", "torch, views"
GLOO, SHARED = "elastirun, gloo", "elastirun, shared memory"
ONLY_GLOO, ONLY_SHARED = "communication only, gloo", "communication only, shared memory"
STEPS = (COMPUTE, ONLY_GLOO, ONLY_SHARED, NO_OVERLAP, TORCH, TORCH_VIEW, GLOO, SHARED)


def wrap(variant: str, model: nn.Module, **options: Any) -> nn.Module:
    """Return ``model`` wrapped as the variant trains it, or the plain model where the variant wraps nothing."""
    if variant.startswith(TORCH):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=variant == TORCH_VIEW, **options)
    if variant in (GLOO, SHARED):
        return DistributedDataParallel(model, transport="group" if variant == GLOO else SHM, **options)
    return model


def backward(module: nn.Module, batch: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(batch).sum().backward()


def reduce_flat(params: Sequence[nn.Parameter]) -> None:
    """Reduce as without a reducer: copy all gradients into one tensor, all-reduce it, and copy them back."""
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def communication(variant: str, case: Case) -> Step:
    """Return a step of reductions alone: of as many bytes as the model has, ``PIECE`` at a time."""
    left = sum(param.nbytes for param in case.build().parameters())
    storages = []
    while left > 0:
        storages.append(Storage(min(left, PIECE) // 4, torch.float32, CPU))
        left -= PIECE
    transport = choose(dist.distributed_c10d._get_default_group(), CPU, "group" if variant == ONLY_GLOO else SHM)
    arena = transport.allocate(storages)

    def step() -> None:
        for work in [arena.all_reduce(at) for at in range(len(storages))]:
            work.wait()

    return step


def make_step(variant: str, case: Case) -> tuple[Step, nn.Module | None]:
    """Return a step of ``variant`` (forward, backward, reduction of the gradients), and its module."""
    if variant in (ONLY_GLOO, ONLY_SHARED):
        return communication(variant, case), None
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    module, params = wrap(variant, model), list(model.parameters())

    def step() -> None:
        backward(module, batch)
        if variant == NO_OVERLAP:
            reduce_flat(params)

    return step, module


TORCH_FUSED, TORCH_FOREACH = "torch, views + AdamW(fused)", "torch, views + AdamW"
OURS_FUSED, OURS_WITHIN = "elastirun, shared memory + AdamW(fused)", "elastirun, shared memory, step_in_backward"
OPTIMIZED = (COMPUTE, TORCH_FOREACH, TORCH_FUSED, OURS_FUSED, OURS_WITHIN)


def make_optimized(variant: str, case: Case) -> tuple[Step, nn.Module | None]:
    """Return a step with AdamW, and its module. The learning rate is so small that the parameters stay near their values."""
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    if variant == COMPUTE:
        return lambda: backward(model, batch), model
    module = wrap(TORCH_VIEW if variant.startswith(TORCH) else SHARED, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=variant != TORCH_FOREACH)
    if variant == OURS_WITHIN:
        assert isinstance(module, DistributedDataParallel)
        module.step_in_backward(optimizer)
        return lambda: backward(module, batch), module

    def step() -> None:
        backward(module, batch)
        optimizer.step()

    return step, module
