"""The same gradients as one process has that sees all ranks' batches; the same bits as torch's class where it can run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from elastirun.train import DistributedDataParallel
from elastirun.train.reduction.buckets import memory as bucket_memory
from tests.support.worlds import run
from tests.train.beside import Torchs
from tests.train.kinds import KINDS, Kind

STEPS = 8  # the first plans, the last one with a hook per bucket, and some after it
# MiB of a bucket: about a parameter; several; planned. Bytes of a portion: more than a bucket has; a parameter; several
CAPS: tuple[tuple[float | None, int], ...] = ((0.0005, bucket_memory.PORTION), (0.005, 1), (None, 1024))
Grads = dict[str, Tensor | None]


def gradients(module: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.to_dense() for name, p in module.named_parameters() if p.requires_grad}


def reference(kind: Kind, module: nn.Module, step: int, world: int) -> Grads:
    """The mean of what each rank's batch gives; None where none of them gives anything."""
    total: Grads = {name: None for name, p in module.named_parameters() if p.requires_grad}
    for rank in range(world):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        (kind.loss(alone, step, rank) * kind.scale).backward()
        for name, grad in gradients(alone).items():
            if grad is not None:
                before = total[name]
                total[name] = grad / world if before is None else before + grad / world
    return total


def distance(mine: Grads, theirs: Grads) -> float:
    """The largest difference, relative to the size of the gradient; infinite if one side has none."""
    worst = 0.0
    assert mine.keys() == theirs.keys()
    for name, a in mine.items():
        b = theirs[name]
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item())
    return worst


def make(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.make()


def train(rank: int, world: int, number: int, transport: str) -> list[float]:
    kind, found = KINDS[number], []
    for cap, bucket_memory.PORTION in CAPS:
        module = make(kind)
        ddp = DistributedDataParallel(module, bucket_cap_mb=cap, transport=transport)
        model = kind.wrap(ddp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(STEPS):
            kind.before_step(module, step)
            optimizer.zero_grad(set_to_none=step % 3 != 2)
            expected = reference(kind, module, step, world)
            if step % 3 == 2:  # gradients that were zeroed in place stay, even where nothing is added
                expected = {name: torch.zeros_like(p) if g is None and p.grad is not None else g for (name, g), p in pair(expected, module)}
            (kind.loss(model, step, rank) * kind.scale).backward()
            found.append(distance(gradients(module), expected))
            for param in module.parameters():
                if param.grad is not None:
                    param.grad.div_(kind.scale)
            optimizer.step()
    return found


def pair(grads: Grads, module: nn.Module) -> list[tuple[tuple[str, Tensor | None], nn.Parameter]]:
    params = dict(module.named_parameters())
    return [((name, grad), params[name]) for name, grad in grads.items()]


def worlds(kind: Kind) -> tuple[int, ...]:
    """Return the numbers of ranks that a kind is tried with: fewer where a step is slow, more where ranks differ most."""
    return {"compiled": (2,), "branches": (1, 2, 3, 4), "mixed": (1, 2, 3, 4)}.get(kind.name, (1, 2, 3))


CASES = [pytest.param(at, world, id=f"{kind.name}-{world}") for at, kind in enumerate(KINDS) for world in worlds(kind)]


@pytest.mark.daily(4)
@pytest.mark.parametrize(("number", "world"), CASES)
def test_the_gradients_are_those_of_one_process(number: int, world: int) -> None:
    for transport in ("group", "auto") if KINDS[number].name != "compiled" else ("auto",):
        for differences in run(world, train, number, transport):
            assert max(differences) <= KINDS[number].tolerance, [f"{d:.1e}" for d in differences]


def side_by_side(rank: int, world: int, number: int) -> list[str]:
    """Parameters whose gradients are not torch's, bit for bit.

    With two ranks every sum of two is the same in any order. With more, gloo's ring adds up each part of a bucket in another order, so the
    buckets must be equal: not so in the first step, nor the last bucket, which carries the control words, nor what torch never plans anew.
    """
    kind, found = KINDS[number], []
    for cap in (0.0005, 0.005):
        ours, theirs = make(kind), make(kind)
        inner = DistributedDataParallel(ours, bucket_cap_mb=cap, transport="group")
        ddp = kind.wrap(inner)
        peer = kind.wrap(Torchs(theirs, bucket_cap_mb=cap, forward_sync_buffers=False, **(kind.torch or {})))
        for step in range(STEPS):
            for module, model in ((ours, ddp), (theirs, peer)):
                module.zero_grad()
                (kind.loss(model, step, rank) * kind.scale).backward()
            mine, other = gradients(ours), gradients(theirs)
            names = inner.stats()["buckets"][-1]["parameters"] if world > 2 else []
            for name, a in mine.items():
                b = other[name]
                if (world == 2 or (step and name not in names)) and (
                    (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))
                ):
                    found.append(f"{name} in step {step}, cap {cap}")
    return found


RUNNABLE = [number for number, kind in enumerate(KINDS) if kind.torch is not None]


@pytest.mark.daily(4)
@pytest.mark.parametrize("number", RUNNABLE, ids=lambda number: KINDS[number].name)
def test_the_bits_are_those_of_torchs_class(number: int) -> None:
    for world in (2, 3, 4):
        if world == 2 or KINDS[number].name not in ("branches", "sparse", "compiled"):
            assert run(world, side_by_side, number) == [[]] * world
