"""Buffers are on every rank what torch's class makes of them: compared with it in the same test, step by step."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from elastirun.train import DistributedDataParallel, ReductionFailed
from elastirun.train.ddp import torch_names
from elastirun.train.reduction.running_stats import RunningStatistics, find_statistics
from tests.support.worlds import Died, run
from tests.train.beside import Case, Wrap, check
from tests.train.test_ddp import WIDTH, batch


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


def evaluated(rank: int, wrap: Wrap, dtype: torch.dtype = torch.float32, below: bool = False, **how: Any) -> list[Any]:
    """torch's copies the buffers in the first forward of the evaluation."""
    ddp, found = wrap(Normed(dtype), **how), []
    for number in range(6):
        step(ddp, number, rank, found)
    (ddp.module if below else ddp).eval()
    with torch.no_grad():
        found.append(ddp(batch(9, rank)).tolist())
    found += [ddp.module.norm.running_mean.tolist(), ddp.module.norm.running_var.tolist(), int(ddp.module.norm.num_batches_tracked)]
    ddp.train()
    for number in range(2):
        step(ddp, number, rank, found)
    return found


def evaluated_in_bfloat16(rank: int, wrap: Wrap) -> list[Any]:
    return evaluated(rank, wrap, torch.bfloat16)


def evaluated_below(rank: int, wrap: Wrap) -> list[Any]:
    """``eval()`` of the module and not of the wrapper, as some training loops have it."""
    return evaluated(rank, wrap, below=True)


def evaluated_with_all_copied(rank: int, wrap: Wrap) -> list[Any]:
    return evaluated(rank, wrap, forward_sync_buffers=True)


def evaluated_with_ones_own(rank: int, wrap: Wrap) -> list[Any]:
    return evaluated(rank, wrap, forward_sync_buffers=False)


def codebook_evaluated(rank: int, wrap: Wrap) -> list[Any]:
    """The first forward of an evaluation copies, the others do not, and neither does the forward in training that follows."""
    ddp, found = wrap(Codebook()), []
    for number in range(4):
        step(ddp, number, rank, found)
    ddp.eval()
    for number in range(2):
        with torch.no_grad():
            ddp(batch(number, rank))
        found.append(ddp.module.codes.tolist())
        ddp.module.codes.add_(rank)
    ddp.train()
    for number in range(2):
        step(ddp, number, rank, found)
        found.append(ddp.module.codes.tolist())
    return found


def codebook_without_gradients(rank: int, wrap: Wrap) -> list[Any]:
    """Forwards in training without a backward: the codebook is warmed up, or measured."""
    ddp, found = wrap(Codebook()), []
    for number in range(4):
        step(ddp, number, rank, found)
        with torch.no_grad():
            ddp(batch(number + 5, rank))
        found.append(ddp.module.codes.tolist())
    return found


def sums_of_buffers(rank: int, wrap: Wrap) -> list[Any]:
    """The user's hook takes care of all buffers, running statistics among them."""

    def hook(group: Any, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer, group=group)

    ddp, found = wrap(Normed()), []
    ddp._register_buffer_comm_hook(ddp.process_group, hook, _BufferCommHookLocation.PRE_FORWARD)
    for number in range(5):
        step(ddp, number, rank, found)
        found.append(ddp.module.norm.running_mean.tolist())
    return found


def a_forward_kept_over_a_reduction(rank: int, wrap: Wrap) -> list[Any]:
    """A frozen layer's statistics are saved for its backward, which comes after rank 0's have arrived once more."""
    ddp, found = wrap(Normed()), []
    for number in range(3):
        step(ddp, number, rank, found)
    ddp.module.norm.eval()
    for number in range(3):
        with ddp.no_sync():
            kept = ddp(batch(number + 5, rank))
        step(ddp, number, rank, found)
        with ddp.no_sync():
            kept.pow(2).mean().backward()
        found.append([p.grad.norm().item() for p in ddp.parameters()])
    return found


def norm_put_in_place_later(rank: int, wrap: Wrap) -> list[Any]:
    """Statistics that are other tensors than at construction."""
    module = Normed()
    ddp, found = wrap(module), []
    step(ddp, 0, rank, found)
    module.norm.running_mean, module.norm.running_var = torch.zeros(WIDTH), torch.ones(WIDTH)
    for number in range(1, 5):
        step(ddp, number, rank, found)
    ddp.eval()
    with torch.no_grad():
        ddp(batch(9, 0))
    return [*found, module.norm.running_mean.tolist(), module.norm.running_var.tolist()]


CASES = [
    codebook,
    replaced,
    replaced_from_outside,
    accumulated,
    frozen_norm,
    evaluated,
    evaluated_in_bfloat16,
    evaluated_below,
    evaluated_with_all_copied,
    evaluated_with_ones_own,
    codebook_evaluated,
    codebook_without_gradients,
    sums_of_buffers,
    a_forward_kept_over_a_reduction,
    norm_put_in_place_later,
]


@pytest.mark.daily(3)
@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_buffers_are_what_they_are_under_torchs_class(case: Case, transport: str) -> None:
    check(case, 1e-5, transport=transport)


@pytest.mark.parametrize("case", [evaluated, evaluated_below, codebook_evaluated], ids=lambda case: case.__name__)
def test_on_three_ranks_too(case: Case) -> None:
    check(case, 1e-5, world=3, transport="shared memory")


def left(rank: int, world: int, transport: str, how: str) -> tuple[list[Any], list[Any]]:
    """The statistics after a last reduction, and where they are used after forwards that nobody reduces."""
    ddp = DistributedDataParallel(Normed(), transport=transport)
    norm = ddp.module.norm
    for number in range(5):
        step(ddp, number, rank, [])
    reduced = [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]
    if how == "no_sync":
        with ddp.no_sync():
            ddp(batch(7, rank)).sum().backward()
    elif how != "nothing":
        for number in range(2):
            with torch.no_grad():
                ddp(batch(number, rank))
    assert rank == 0 or how == "nothing" or norm.running_mean.tolist() != reduced[0]
    if how == "state":
        ddp.state_dict()
    elif how == "frozen":
        norm.eval()
        ddp(batch(8, rank))
    elif how == "inference":
        ddp.module.eval()
        with torch.inference_mode():
            ddp(batch(8, rank))
    elif how != "nothing":
        ddp.train()
        ddp.eval()
    return reduced, [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("how", ["nothing", "no_sync", "no_grad", "state", "frozen", "inference"])
def test_the_statistics_of_the_last_reduction_are_used_whatever_forwards_came_after_it(how: str, transport: str) -> None:
    """torch's ranks have rank 0's of some forward, each with a batch of its own added."""
    (first, _), *others = run(3 if how == "no_grad" else 2, left, transport, how)
    for reduced, used in others:
        assert reduced == used == first


def made_the_same(rank: int, world: int) -> list[float]:
    """``sync_buffers()`` is newer than the last reduction."""
    ddp = DistributedDataParallel(Normed())
    for number in range(4):
        step(ddp, number, rank, [])
    with torch.no_grad():
        ddp(batch(5, rank))
    ddp.sync_buffers()
    ddp.eval()
    mean: list[float] = ddp.module.norm.running_mean.tolist()
    return mean


def test_an_evaluation_keeps_what_sync_buffers_has_copied() -> None:
    first, second = run(2, made_the_same)
    assert first == second


def lost(rank: int, world: int, transport: str, how: str) -> tuple[Any, Any]:
    """Rank 0 is killed before a reduction; the others go on, or save a checkpoint."""
    # A survivor of a lost rank may wait in gloo for another survivor, which has given up: the default limit is half an hour.
    group, rest = dist.new_group(timeout=timedelta(seconds=20)), dist.new_group([1, 2])
    ddp = DistributedDataParallel(Normed(), process_group=group, transport=transport)
    norm = ddp.module.norm
    for number in range(6):
        if number == 4 and how == "new group":
            norm.eval()
        if number == 5 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        before = [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]
        try:
            step(ddp, number, rank, [])
        except ReductionFailed:
            ddp.set_group(rest) if how == "new group" else ddp.state_dict() if how == "checkpoint" else ddp.eval()
            return before, [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]
    return None, None


@pytest.mark.parametrize("transport", ["shared memory", "group"])
@pytest.mark.parametrize("how", ["new group", "checkpoint", "evaluation"])
def test_a_reduction_that_fails_leaves_the_statistics_alone(how: str, transport: str) -> None:
    died, *others = run(3, lost, transport, how, died=True)
    assert isinstance(died, Died)
    for before, after in others:
        assert before == after == others[0][0] and after[2] == (4 if how == "new group" else 5)


def uneven(rank: int, world: int, evaluates: bool) -> list[Any]:
    """Within join(), rank 0 with the fewest inputs; ``evaluates``: forwards without gradients, which copy the codebook, too."""
    module = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), *([Codebook()] if evaluates else []))
    ddp, means = DistributedDataParallel(module), []
    with ddp.join():
        for number in range((2, 5)[rank]):
            step(ddp, number, rank, [])
            means.append(module[0].running_mean.tolist())  # type: ignore[operator, union-attr]
            if evaluates:
                with torch.no_grad():
                    ddp(batch(number, rank))
    found = [means[-1], *(buffer.tolist() for buffer in module.buffers())]
    for number in range(2):  # a rank that copied buffers here while the other does not would wait for it
        step(ddp, number, rank, found)
    return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_rank_0_without_inputs_does_not_stop_the_statistics_of_the_others(evaluates: bool) -> None:
    first, second = run(2, uneven, evaluates)
    assert first[1:4] == second[1:4] and first[0] != first[1] and int(first[3]) == (10 if evaluates else 5)


def test_counts_that_travel_as_a_mean_are_whole_numbers_again() -> None:
    layer = nn.BatchNorm1d(WIDTH)
    arriving = RunningStatistics(find_statistics(layer))
    for count in range(1, 200):
        tail = torch.full((arriving.numel,), float(count)) / 41
        arriving.use_memory(tail)
        arriving.receive(1, 41.0)
        assert int(layer.num_batches_tracked or 0) == count


def counted(rank: int, world: int, wrapped: bool) -> int:
    """How many broadcasts the forwards of a module with a BatchNorm need."""
    ddp = DistributedDataParallel(nn.Sequential(Normed(), Codebook()) if wrapped else Normed())
    calls = 0
    copy_from = torch_names.copy_from

    def count(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        copy_from(*arguments)

    torch_names.copy_from = count
    try:
        for number in range(4):
            step(ddp, number, rank, [])
    finally:
        torch_names.copy_from = copy_from
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
    with torch.no_grad():
        ddp(batch(7, rank))
    ddp.request("checkpoint")
    ddp.set_group(groups[1])
    after = ddp.module.norm.running_mean.tolist()
    counts = []
    for number in range(2):
        ddp(batch(number, rank)).pow(2).mean().backward()
        counts.append(ddp.agreement.step if ddp._reducer.last else None)
    return [saved.tolist(), after, counts, ddp.agreement.samples, sorted(ddp.agreement.requests)]


def test_a_new_group_goes_on_from_what_a_checkpoint_has_and_from_what_was_asked() -> None:
    first, *others = run(3, switched)
    assert first[0] == first[1]
    for saved, after, counts, samples, requests in others:
        assert after == saved == first[0] and counts == [None, 4] and samples == 6.0 and requests == ["checkpoint"]
