"""Buffers are on every rank what torch's class makes of them: compared with it in the same test, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastirun.train import DistributedDataParallel
from tests.train.beside import Case, Torchs, Wrap, check
from tests.train.test_ddp import WIDTH, batch
from tests.train.worlds import run


class Codebook(nn.Module):
    """Learns without a gradient, in the forward: vector quantization, much simplified."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.replaces = nn.Linear(WIDTH, WIDTH), replaces
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.codes: Tensor
        self.register_buffer("uses", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.codes
        if self.training:
            news = self.codes * 0.5 + x.detach().mean(0)
            if self.replaces:
                self.codes = news
            else:
                self.codes.copy_(news)
            self.uses += 1
        return out


class Normed(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.dtype = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), dtype
        self.norm.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x).to(self.dtype)).float()
        return out


def step(ddp: Any, number: int, rank: int, found: list[Any]) -> None:
    ddp.zero_grad()
    out = ddp(batch(number, rank))
    out.pow(2).mean().backward()
    found += [out.tolist(), [p.grad.norm().item() for p in ddp.parameters()]]


def codebook(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(Codebook()), []
    for number in range(6):
        step(ddp, number, rank, found)
    return [*found, ddp(batch(9, 0)).tolist(), ddp.module.codes.tolist()]


def replaced(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(Codebook(replaces=True)), []
    for number in range(6):
        step(ddp, number, rank, found)
    return [*found, ddp(batch(9, 0)).tolist()]


def replaced_from_outside(rank: int, wrap: Wrap) -> list[Any]:
    """torch's test_ddp_broadcast_buffer."""
    ddp, found = wrap(Codebook()), []
    for number in range(4):
        ddp.module.codes = torch.full((WIDTH,), float(rank + number))
        step(ddp, number, rank, found)
    return found


def accumulated(rank: int, wrap: Wrap) -> list[Any]:
    ddp, found = wrap(Codebook()), []
    for number in range(6):
        if number % 3 < 2:
            with ddp.no_sync():
                found.append(ddp(batch(number, rank)).tolist())
                ddp(batch(number, rank)).sum().backward()
        else:
            step(ddp, number, rank, found)
    return found


def frozen_norm(rank: int, wrap: Wrap) -> list[Any]:
    """Warmed up, then in evaluation while the rest is trained."""
    ddp, found = wrap(Normed()), []
    for number in range(7):
        if number == 3:
            ddp.module.norm.eval()
        step(ddp, number, rank, found)
    return found


def evaluated(rank: int, wrap: Wrap, dtype: torch.dtype = torch.float32) -> list[Any]:
    ddp, found = wrap(Normed(dtype)), []
    for number in range(6):
        step(ddp, number, rank, found)
    if wrap is Torchs:  # copies in the next forward
        dist.broadcast(ddp.module.norm.num_batches_tracked, 0)
        for buffer in (ddp.module.norm.running_mean, ddp.module.norm.running_var):
            dist.broadcast(buffer, 0)
    ddp.eval()
    with torch.no_grad():
        found.append(ddp.module(batch(9, 0)).tolist())
    return [*found, ddp.module.norm.running_var.tolist(), int(ddp.module.norm.num_batches_tracked)]


def evaluated_in_bfloat16(rank: int, wrap: Wrap) -> list[Any]:
    return evaluated(rank, wrap, torch.bfloat16)


def norm_put_in_place_later(rank: int, wrap: Wrap) -> list[Any]:
    """Statistics that are other tensors than at construction."""
    module = Normed()
    ddp, found = wrap(module), []
    step(ddp, 0, rank, found)
    module.norm.running_mean, module.norm.running_var = torch.zeros(WIDTH), torch.ones(WIDTH)
    for number in range(1, 5):
        step(ddp, number, rank, found)
    if wrap is Torchs:
        for buffer in (module.norm.running_mean, module.norm.running_var):
            dist.broadcast(buffer, 0)
    ddp.eval()
    return [*found, module.norm.running_mean.tolist(), module.norm.running_var.tolist()]


CASES = [
    codebook,
    replaced,
    replaced_from_outside,
    accumulated,
    frozen_norm,
    evaluated,
    evaluated_in_bfloat16,
    norm_put_in_place_later,
]


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_buffers_are_what_they_are_under_torchs_class(case: Case, transport: str) -> None:
    check(case, 1e-5, transport=transport)


def counted(rank: int, world: int, wrapped: bool) -> int:
    """How many broadcasts the forwards of a module with a BatchNorm need."""
    ddp = DistributedDataParallel(nn.Sequential(Normed(), Codebook()) if wrapped else Normed())
    calls = 0
    broadcast = dist._broadcast_coalesced  # type: ignore[attr-defined]

    def count(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        broadcast(*arguments)

    dist._broadcast_coalesced = count  # type: ignore[attr-defined]
    try:
        for number in range(4):
            step(ddp, number, rank, [])
    finally:
        dist._broadcast_coalesced = broadcast  # type: ignore[attr-defined]
    return calls


@pytest.mark.parametrize(("wrapped", "calls"), [(False, 0), (True, 4)])
def test_what_travels_with_the_gradients_costs_no_broadcast(wrapped: bool, calls: int) -> None:
    assert run(2, counted, wrapped) == [calls] * 2


def switched(rank: int, world: int) -> list[Any]:
    """Rank 0 leaves; what the next rank 0 goes on with is what a checkpoint had."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2])]
    ddp = DistributedDataParallel(Normed(), process_group=groups[0])
    ddp.accumulate(2)
    ddp.set_samples(3.0)
    for number in range(6):
        ddp(batch(number, rank)).pow(2).mean().backward()
    saved = ddp.module.norm.running_mean.clone()
    first = saved.tolist()
    dist.broadcast(saved, 0)
    if rank == 0:
        return [saved.tolist(), first]
    ddp.request("checkpoint")
    ddp.set_group(groups[1])
    after = ddp.module.norm.running_mean.tolist()
    counts = []
    for number in range(2):
        ddp(batch(number, rank)).pow(2).mean().backward()
        counts.append(ddp.agreement.step if ddp._reducer.reading else None)
    return [saved.tolist(), after, counts, ddp.agreement.samples, sorted(ddp.agreement.requests)]


def test_a_new_group_goes_on_from_what_a_checkpoint_has_and_from_what_was_asked() -> None:
    first, *others = run(3, switched)
    assert first[0] == first[1]
    for saved, after, counts, samples, requests in others:
        assert after == saved == first[0] and counts == [None, 4] and samples == 6.0 and requests == ["checkpoint"]
