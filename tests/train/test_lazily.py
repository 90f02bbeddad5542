"""On a GPU a step is used before its control words are read. Here that is simulated on CPUs: ``may_defer`` is set by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import TrainError
from tests.support.worlds import run
from tests.train.beside import Torchs, Wrap, check
from tests.train.test_buffers import Codebook
from tests.train.test_ddp import WIDTH, Twice, alone, batch, close, grads, make
from tests.train.test_order import mean_of

both_transports = pytest.mark.parametrize("transport", ["shared memory", "group"])
worlds = pytest.mark.parametrize("world", [2, 3])
CAP = 1e-5  # MiB: each parameter has a bucket of its own, and the plan is made after the first step


def said_by_one(rank: int, wrap: Wrap) -> list[Any]:
    """One rank alone says that it has as many samples as always. Buffers are copied in each forward, replicas are compared now and then."""
    ddp, found = wrap(Codebook()), []
    ours = not isinstance(ddp, Torchs) or isinstance(ddp, DDP)
    if ours:
        ddp._reducer.conclusion.may_defer = True
    lazy = []
    for step in range(9):
        if step == 3 and rank == 0 and ours:
            ddp.set_samples(1.0)
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        found.append([p.grad.flatten().tolist() for p in ddp.parameters()])
        lazy.append(ours and ddp._reducer.conclusion.defers)
    assert not ours or lazy == [True] * 4 + [False] * 5, "from the same step on, all look"
    return found


@both_transports
def test_one_rank_says_how_many_samples_it_has(transport: str) -> None:
    check(said_by_one, 1e-6, transport=transport, bucket_cap_mb=1, check_replicas_every=4)


def said_by_all(rank: int, world: int, transport: str) -> list[bool]:
    """For the first time after many steps."""
    ddp, found = DDP(make(), transport=transport, bucket_cap_mb=CAP), []
    ddp._reducer.conclusion.may_defer = True
    for step in range(8):
        sizes = [1 + (r + step) % 3 if step >= 4 else 2 for r in range(world)]
        if step >= 4:
            ddp.set_samples(sizes[rank])
        ddp.zero_grad()
        ddp(batch(step, rank, sizes[rank])).pow(2).mean().backward()
        found.append(close(grads(ddp.module), alone(ddp.module, [(n, batch(step, r, n)) for r, n in enumerate(sizes)])))
    return found


@both_transports
@worlds
def test_all_ranks_say_how_many_samples_they_have(world: int, transport: str) -> None:
    assert run(world, said_by_all, transport) == [[True] * 8] * world


def one_has_more(rank: int, world: int, transport: str) -> list[str]:
    """One rank alone has more samples than before: an error. From then on it may have as many as it likes, and graphs may change."""
    ddp, told = DDP(Twice(), transport=transport, bucket_cap_mb=CAP), []
    ddp._reducer.conclusion.may_defer = True
    for step in range(8):
        if step >= 3 and rank == 1:
            ddp.set_samples(3 if step in (3, 6) else 1)
        ddp.zero_grad()
        try:
            ddp(batch(step, rank).requires_grad_(), rank == 0 and step == 6).pow(2).mean().backward()
        except TrainError as error:
            told.append(str(error)[:38])
            continue
        exact = Twice()
        for r in range(world):
            loss = exact(batch(step, r).requires_grad_(), r == 0 and step == 6).pow(2).mean()
            (loss * (3 if r == 1 and step == 6 else 1) / (world + 2 * (step == 6))).backward()
        whole = close(grads(ddp.module), [p.grad for p in exact.parameters() if p.grad is not None])
        told.append("whole" if whole else "")
    return told


@both_transports
@worlds
def test_one_rank_that_has_more_samples_of_a_sudden_is_an_error_on_every_rank(world: int, transport: str) -> None:
    told = [*["whole"] * 3, "", "the gradients of step 4 were not whole", *["whole"] * 3]
    assert run(world, one_has_more, transport) == [told] * world


class Parts(nn.Module):
    """Any of its parts may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 2, sparse=True)
        self.one, self.two = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, two: bool, table: bool) -> Tensor:
        out: Tensor = self.one(x)
        out = out + self.two(x) if two else out
        return out + self.table(torch.tensor([1])) if table else out


def alone_with_the_words(rank: int, world: int, transport: str) -> list[Any]:
    """One rank lacks a gradient, and no rank uses the sparse parameter; the sum of samples has another last bit than before."""
    ddp = DDP(Parts(), transport=transport, bucket_cap_mb=CAP)
    ddp._reducer.conclusion.may_defer = True
    for step in range(4):
        ddp._reducer.expected_samples = world * (1 + 1e-6 * (step == 3))
        ddp.zero_grad()
        ddp(batch(step, rank), step != 3 or rank != 1, step != 3).pow(2).mean().backward()
    exact = Parts()
    for other in range(world):
        (exact(batch(3, other), other != 1, False).pow(2).mean() / world).backward()
    mine, theirs = ([p.grad for p in (*module.one.parameters(), *module.two.parameters())] for module in (ddp.module, exact))
    right = [torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True)]
    found = [grad.flatten().tolist() for grad in mine]
    ddp(batch(4, rank), True, True).sum().backward()  # the words are read: nothing was wrong with them
    return [right, found]


@both_transports
@worlds
def test_who_reads_the_words_alone_does_as_the_others(world: int, transport: str) -> None:
    first, *others = run(world, alone_with_the_words, transport)
    assert first[0] == [True] * 4 and all(other == first for other in others), "bit by bit"


def changing(rank: int, world: int, transport: str) -> list[bool]:
    """A gradient comes late on one rank."""
    ddp, found = DDP(Twice(), transport=transport, bucket_cap_mb=CAP, find_unused_parameters=True), []
    ddp._reducer.conclusion.may_defer = True
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(step, rank).requires_grad_(), rank == 1 and step == 4).pow(2).mean().backward()
        exact = Twice()
        for r in range(world):
            (exact(batch(step, r).requires_grad_(), r == 1 and step == 4).pow(2).mean() / world).backward()
        found.append(close(grads(ddp.module), [p.grad for p in exact.parameters() if p.grad is not None]))
    return found


@both_transports
@worlds
def test_with_find_unused_parameters_graphs_may_change(world: int, transport: str) -> None:
    assert run(world, changing, transport) == [[True] * 6] * world


def unfrozen(rank: int, world: int, transport: str) -> list[bool]:
    model = make()
    model[0].requires_grad_(False)  # type: ignore[index]
    ddp, found = DDP(model, transport=transport, bucket_cap_mb=CAP), []
    for step in range(9):
        ddp._reducer.conclusion.may_defer = True
        model[0].requires_grad_(step >= 4)  # type: ignore[index]
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        exact = mean_of(world, step)
        found.append(close([p.grad for p in model.parameters() if p.grad is not None], exact[2:] if step < 4 else exact))
    return found


@both_transports
@worlds
def test_what_is_unfrozen_is_reduced_from_the_first_step_on(world: int, transport: str) -> None:
    assert run(world, unfrozen, transport) == [[True] * 9] * world
