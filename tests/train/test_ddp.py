"""What the data-parallel module promises beside the right gradients: each test is a rule."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastirun.train import DistributedDataParallel as DDP
from elastirun.train import TrainError
from elastirun.train.ddp.module import refuse_capture
from elastirun.train.errors import WrongUse
from elastirun.train.reduction.buckets import memory as bucket_memory
from tests.support.worlds import run

WIDTH = 4


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int, rank: int, size: int = 3) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def alone(module: nn.Module, batches: list[tuple[float, Tensor]]) -> list[Tensor]:
    """The weighted mean of the gradients of ``batches``."""
    copy = make()
    copy.load_state_dict(module.state_dict())
    loss = torch.stack([weight * copy(x).pow(2).mean() for weight, x in batches]).sum() / sum(weight for weight, _ in batches)
    return list(torch.autograd.grad(loss, list(copy.parameters())))


def close(mine: list[Tensor | None], theirs: list[Tensor]) -> bool:
    return all(a is not None and torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))


def learn(ddp: DDP, rank: int, steps: int = 5) -> None:
    """As many steps as it takes until the plan is made and one hook per bucket is left."""
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(1000 + step, rank)).pow(2).mean().backward()
    ddp.zero_grad()


# -- accumulation ------------------------------------------------------------------------------------------------------


def no_sync(rank: int, world: int, learnt: int) -> list[bool]:
    ddp = DDP(make())
    learn(ddp, rank, learnt)
    found = []
    for _ in range(2):
        steps, ddp_steps = [], ddp.stats()["steps"]
        ddp.zero_grad()
        for micro in range(3):
            output = ddp(batch(micro, rank))  # outside: what counts is where the backward runs
            loss = output.pow(2).mean() / 3
            if micro < 2:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
            steps.append(ddp.stats()["steps"] - ddp_steps)
        found += [
            steps == [0, 0, 1],
            close(grads(ddp.module), alone(ddp.module, [(1, batch(m, r)) for m in range(3) for r in range(world)])),
        ]
    return found


@pytest.mark.parametrize("learnt", [0, 5])
def test_micro_batches_within_no_sync_cost_one_reduction(learnt: int) -> None:
    assert all(map(all, run(2, no_sync, learnt)))


def accumulate(rank: int, world: int) -> list[bool]:
    ddp = DDP(make())
    learn(ddp, rank)
    before = ddp.stats()["steps"]
    ddp.accumulate(3)
    for micro in range(3):
        (ddp(batch(micro, rank)).pow(2).mean() / 3).backward()
    expected = alone(ddp.module, [(1, batch(m, r)) for m in range(3) for r in range(world)])
    return [ddp.stats()["steps"] == before + 1, close(grads(ddp.module), expected)]


def test_accumulate_reduces_in_each_nth_backward() -> None:
    assert all(map(all, run(2, accumulate)))


def again_and_again(rank: int, world: int, keep: bool) -> list[bool]:
    """Gradients that are not zeroed add up; two backwards through one forward, too."""
    ddp = DDP(make())
    learn(ddp, rank)
    ddp.zero_grad(set_to_none=not keep)
    for step in range(2):
        loss = ddp(batch(step, rank)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    expected = [4 * g for g in alone(ddp.module, [(1, batch(s, r)) for s in range(2) for r in range(world)])]
    return [close(grads(ddp.module), expected)]


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_add_up_over_backwards(keep: bool) -> None:
    assert all(map(all, run(2, again_and_again, keep)))


def several_forwards(rank: int, world: int) -> list[bool]:
    ddp = DDP(make())
    learn(ddp, rank)
    loss = (ddp(batch(0, rank)).pow(2).mean() + ddp(batch(1, rank)).pow(2).mean()) / 2
    with torch.no_grad():
        ddp(batch(2, rank))
    loss.backward()
    return [close(grads(ddp.module), alone(ddp.module, [(1, batch(s, r)) for s in range(2) for r in range(world)]))]


def test_several_forwards_before_a_backward() -> None:
    assert all(map(all, run(2, several_forwards)))


def foreign(rank: int, world: int) -> list[bool]:
    """Gradients that the user detached, replaced or set to None."""
    ddp = DDP(make())
    learn(ddp, rank)
    found = []
    for step in range(3):
        params = list(ddp.parameters())
        params[0].grad, params[1].grad, params[2].grad = None, torch.zeros_like(params[1]), torch.zeros_like(params[2]).clone().detach()
        for p in params[3:]:
            if p.grad is not None:
                p.grad = p.grad.detach().clone().zero_()
        ddp(batch(step, rank)).pow(2).mean().backward()
        found.append(close(grads(ddp.module), alone(ddp.module, [(1, batch(step, r)) for r in range(world)])))
    return found


def test_gradients_that_were_replaced_are_no_trouble() -> None:
    assert all(map(all, run(2, foreign)))


# -- weights and uneven inputs -----------------------------------------------------------------------------------------


def weighted(rank: int, world: int) -> list[bool]:
    ddp, found = DDP(make()), []
    sizes = [(5, 2), (5, 2), (1, 4), (3, 3), (3, 3)]
    for step, both in enumerate(sizes):
        ddp.zero_grad()
        ddp.set_samples(both[rank])
        ddp(batch(step, rank, both[rank])).pow(2).mean().backward()
        expected = alone(ddp.module, [(n, batch(step, r, n)) for r, n in enumerate(both)])
        found += [close(grads(ddp.module), expected), ddp.agreement.samples == sum(both)]
    return found


def test_the_mean_is_over_samples() -> None:
    assert all(map(all, run(2, weighted)))


def uneven(rank: int, world: int, lengths: tuple[int, ...]) -> list[Any]:
    ddp, steps, right = DDP(make()), 0, []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    mine = [batch(step, rank) for step in range(lengths[rank])]
    for x in ddp.batches(mine):
        optimizer.zero_grad() if x is not None else None
        if x is not None:
            ddp(x).pow(2).mean().backward()
        present = [(1.0, batch(steps, r)) for r in range(world) if lengths[r] > steps]
        right.append(close(grads(ddp.module), alone(ddp.module, present)))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return [steps, all(right), ddp.stats()["steps"] if steps else 0, [p.detach().sum().item() for p in ddp.parameters()]]


@pytest.mark.parametrize("lengths", [(10, 7), (0, 3), (4, 4), (1, 6, 3), (0, 0)])
def test_ranks_without_data_take_part(lengths: tuple[int, ...]) -> None:
    results = run(len(lengths), uneven, lengths)
    assert [r[0] for r in results] == [max(lengths)] * len(lengths) and all(r[1] for r in results)
    assert all(r[3] == results[0][3] for r in results), "the replicas stay the same"
    assert results[0][2] == max(lengths), "nothing is reduced beyond what is needed"


def dropped(rank: int, world: int) -> list[Any]:
    """One rank goes on to its next batch without a backward (its loss was not finite, say)."""
    ddp, seen = DDP(make()), []
    for at, x in enumerate(ddp.batches([batch(step, rank) for step in range(4)])):
        if rank == 1 and at == 2:
            continue
        ddp.zero_grad()
        assert x is not None
        ddp(x).pow(2).mean().backward()
        seen.append(ddp.agreement.with_data)
    return seen


def test_a_batch_without_a_backward_counts_as_no_data() -> None:
    assert run(2, dropped) == [[2, 2, 1, 2], [2, 2, 2]]


# -- graphs that change ------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """``again``: the first layer is computed once more in a reentrant segment, whose gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, again: bool, skip: bool = False) -> Tensor:
        y = self.first(x)
        if again:
            y = checkpoint(lambda z: self.third(z).tanh(), y, use_reentrant=True)
        out: Tensor = y if skip else self.third(self.second(y))
        return out


def late(rank: int, world: int, cap: float, portion: int) -> list[bool]:
    bucket_memory.PORTION = portion
    ddp, found = DDP(Twice(), bucket_cap_mb=cap), []
    for step in range(12):
        again = rank == 1 and step in (6, 9, 10)  # after everything was learnt: the third layer fires once more than known, on one rank
        ddp.zero_grad()
        ddp(batch(step, rank).requires_grad_(), again).pow(2).mean().backward()
        copy = Twice()
        total = torch.zeros(())
        for r in range(world):
            total = total + copy(batch(step, r).requires_grad_(), r == 1 and step in (6, 9, 10)).pow(2).mean() / world
        total.backward()
        found.append(
            all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in zip(ddp.module.parameters(), copy.parameters(), strict=True))
        )  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("cap", "portion"), [(0.00001, bucket_memory.PORTION), (25, 1)], ids=["bucket", "portion"])  # of a parameter each
def test_a_gradient_that_comes_after_it_was_looked_for_is_added(cap: float, portion: int) -> None:
    assert all(map(all, run(2, late, cap, portion)))


def lacking(rank: int, world: int, mean_over: str) -> list[Any]:
    ddp, found = DDP(Twice(), mean_over=mean_over), []
    for step in range(14):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        skip = rank == 1 and step >= 7
        ddp(batch(step, rank), False, skip).pow(2).mean().backward()
        copy = Twice()
        for r in range(world):
            (copy(batch(step, r), False, r == 1 and step >= 7).pow(2).mean() / world).backward()
        if mean_over == "users" and step >= 7:
            for p in (*copy.second.parameters(), *copy.third.parameters()):
                assert p.grad is not None
                p.grad.mul_(world)
        found.append(
            all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in zip(ddp.module.parameters(), copy.parameters(), strict=True))
        )  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("mean_over", ["world", "users"])
def test_a_parameter_that_a_rank_does_not_use(mean_over: str) -> None:
    assert all(map(all, run(2, lacking, mean_over)))


def gradient_penalty(rank: int, world: int) -> list[Any]:
    """autograd.grad begins at the outputs, too, but accumulates nothing: on one rank alone it must not begin a reduction."""
    ddp = DDP(make())
    learn(ddp, rank)
    x = batch(0, rank).requires_grad_()
    before = ddp.stats()["steps"]
    if rank == 0:
        torch.autograd.grad(ddp(x).sum(), x)
    middle = ddp.stats()["steps"]
    energy = ddp(x).pow(2).mean()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    (energy + force.pow(2).mean()).backward()
    copy = make()
    for r in range(world):
        x = batch(0, r).requires_grad_()
        energy = copy(x).pow(2).mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        ((energy + force.pow(2).mean()) / world).backward()
    return [middle == before, ddp.stats()["steps"] == before + 1, close(grads(ddp.module), [p.grad for p in copy.parameters()])]  # type: ignore[misc]


def test_autograd_grad_reduces_nothing() -> None:
    assert all(map(all, run(2, gradient_penalty)))


# -- on a GPU, and while a graph is learnt -----------------------------------------------------------------------------


def lazily(rank: int, world: int, what: str) -> list[str]:
    """As on a GPU: the words of a step are read when the next one begins."""
    ddp, told = DDP(Twice(), bucket_cap_mb=0.00001), []
    ddp._reducer.conclusion.may_defer = True
    for step in range(10):
        ddp.zero_grad()
        odd = rank == 1 and step == 7
        if odd and what == "samples":
            ddp._reducer.local_report.samples = 2.0
        try:
            ddp(batch(step, rank).requires_grad_(), odd and what == "late", odd and what == "lacking").pow(2).mean().backward()
            told.append("lazy" if ddp._reducer.conclusion.defers else "looks")
        except TrainError as error:
            told.append(str(error)[:45])
    return told


def test_on_a_gpu_the_words_are_read_a_step_later() -> None:
    quiet = ["lazy"] * 10
    assert run(2, lazily, "nothing") == [quiet] * 2
    assert run(2, lazily, "lacking") == [["lazy"] * 8 + ["looks"] * 2] * 2, "only who lacks a gradient has to look"
    for what in ("late", "samples"):
        assert run(2, lazily, what) == [["lazy"] * 8 + ["the gradients of step 8 were not whole and ha", "looks"]] * 2


class Sum(torch.autograd.Function):
    """Of all ranks' tensors; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Centred(nn.Module):
    """Layers with the mean over all ranks' samples taken off: collectives in forward and backward, as SyncBatchNorm has them on a GPU."""

    def __init__(self, group: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.group = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)), group

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            mean = x.mean(0)
            x = x - (Sum.apply(mean) / dist.get_world_size() if self.group else mean)
        return x


def centred(rank: int, world: int, transport: str) -> list[bool]:
    ddp, found = DDP(Centred(group=True), bucket_cap_mb=0.0001, transport=transport), []
    for step in range(7):
        ddp.zero_grad()
        ddp(batch(step, rank)).pow(2).mean().backward()
        alone = Centred(group=False)
        alone(torch.cat([batch(step, r) for r in range(world)])).pow(2).mean().backward()
        found.append(close(grads(ddp.module), [p.grad for p in alone.parameters() if p.grad is not None]))
    return found


@pytest.mark.parametrize("transport", ["group", "shared memory"])
def test_a_module_may_have_collectives_of_its_own(transport: str) -> None:
    assert all(map(all, run(2, centred, transport)))


def named(rank: int, world: int) -> list[str]:
    said: list[str] = []
    logging.getLogger("elastirun.train").addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    lacking(rank, world, "world")
    return said


def test_unused_parameters_are_named_once() -> None:
    (text,), nothing = run(2, named)
    assert nothing == [] and "second.weight (rank 1), second.bias (rank 1), third.weight (rank 1)" in text and "first" not in text


def no_nan(rank: int, world: int) -> list[bool]:
    ddp, found = DDP(make()), []
    for _ in range(2):
        ddp.zero_grad()
        if rank == 1:
            with ddp.no_sync():
                (ddp(batch(0, rank)).sum() * float("nan")).backward()
            ddp.skip()
        else:
            ddp(batch(0, rank)).pow(2).mean().backward()
        found.append(close(grads(ddp.module), alone(ddp.module, [(1, batch(0, 0))])))
    return found


def test_a_rank_without_data_brings_no_nan() -> None:
    assert all(map(all, run(2, no_nan)))


def passes(rank: int, world: int) -> list[int]:
    """How many times a bucket is multiplied after its reduction, in steps of 5 and 2 samples."""
    ddp, counts = DDP(make()), []
    for step in range(7):
        ddp.zero_grad()
        ddp.set_samples((5, 2)[rank])
        loss = ddp(batch(step, rank)).pow(2).mean()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        waited = [e.time_range.end for e in profile.events() if e.name == "elastirun: wait"]
        counts.append(sum(e.name == "aten::mul_" and e.time_range.start > max(waited) for e in profile.events()))
    return counts


def test_even_weights_cost_no_second_pass() -> None:
    for counts in run(2, passes):
        assert counts[0] > 0 and counts[1:] == [0] * 6


def test_a_cuda_graph_is_refused_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay would leave out what the host does; on a GPU it ended in "invalid argument"."""
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_capture(nn.Parameter(torch.ones(1)))
    with pytest.raises(WrongUse, match="CUDA graph"):
        refuse_capture(on_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_capture(on_gpu)
