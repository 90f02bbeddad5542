"""``Drain(optimizer)``: planned stops under torch's DistributedDataParallel and FSDP2, whose reductions carry no words of ours."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastirun.train import Checkpointer, Drain, ReductionFailed, TrainError, TrainState
from tests.support.worlds import Died, run

STEPS = 2000  # far more than are needed
WIDTH = 6
END = 24  # steps of a training that comes to its end
ROWS = 12  # of each global batch, which 1, 2, 3 or 4 ranks share


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH) if rows is None else rows).square().mean().backward()
    optimizer.step()


# --- the agreement


def signalled_at_random(rank: int, world: int, kind: str, tries: int) -> list[int | None]:
    found = []
    for number in range(tries):
        model, optimizer = make(kind)
        drain = Drain(optimizer)
        assert not drain.now and not drain.requested and drain.deadline is None
        step(model, optimizer)
        if rank == number % world:
            threading.Timer(0.001 * number, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for _ in range(STEPS):
            step(model, optimizer)
            if drain.now:
                break
        assert drain.requested and 20.0 < drain.seconds_left <= 30.0
        found.append(drain.step)
        drain.close()
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 3), ("fsdp", 2)])
def test_all_ranks_stop_after_the_same_step_whenever_the_signal_comes(kind: str, world: int) -> None:
    first, *others = run(world, signalled_at_random, kind, 8)
    assert None not in first and others == [first] * (world - 1)


def signalled_once(rank: int, world: int, seldom: bool) -> list[Any]:
    """Rank 1 is signalled before its third step. ``seldom``: all look at the end alone."""
    model, optimizer = make("ddp")
    drain, told = Drain(optimizer), []
    for number in range(1, 6):
        if number == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        step(model, optimizer)
        if not seldom:
            told.append(drain.now)
    return [*told, drain.now, drain.step]


@pytest.mark.parametrize("seldom", [False, True])
def test_all_know_a_step_after_the_first_that_follows_the_signal(seldom: bool) -> None:
    expected = [] if seldom else [False, False, False, True, True]
    assert run(2, signalled_once, seldom) == [[*expected, True, 4]] * 2


def one_after_the_other(rank: int, world: int) -> list[int]:
    module = nn.Linear(WIDTH, 3)  # whose ranks have nothing else to tell each other
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    drain, word = Drain(optimizer), torch.zeros(1)
    for number in range(3):
        if rank:
            dist.recv(word, 0)
        step(module, optimizer)
        if not rank:
            dist.send(word + number, 1)
    drain.close()
    return [int(word)]


def test_no_step_waits_for_the_words_of_the_same_step() -> None:
    assert run(2, one_after_the_other) == [[0], [2]]


def alone(rank: int, world: int) -> list[Any]:
    model, optimizer = make("ddp")
    drain = Drain(optimizer)
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGTERM)
    told = [drain.now]
    for _ in range(2):
        step(model, optimizer)
        told.append(drain.now)
    return [*told, drain.step]


def test_a_world_of_one_stops_as_others_do() -> None:
    assert run(1, alone) == [[False, False, True, 3]]


def loses_a_peer(rank: int, world: int) -> str:
    module = nn.Linear(WIDTH, 3)  # whose ranks have nothing else to tell each other
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    drain = Drain(optimizer)
    step(module, optimizer)
    if rank:
        os._exit(3)
    with pytest.raises(ReductionFailed, match=r"could not tell each other of stops: .*; a peer may be gone") as raised:
        for _ in range(STEPS):
            step(module, optimizer)
    drain.close()
    return type(raised.value).__name__


def test_a_lost_peer_is_an_error() -> None:
    assert run(2, loses_a_peer, died=True) == ["ReductionFailed", Died(3)]


def refused(rank: int, world: int) -> list[str]:
    said = []
    for kind in ("ddp", "fsdp"):
        with pytest.raises(TrainError) as raised:
            Drain(make(kind)[0])  # type: ignore[arg-type]
        said.append(str(raised.value))
    return said


def test_modules_of_torch_are_refused_with_a_word_on_the_optimizer() -> None:
    names = ("DistributedDataParallel", "FSDPSequential")
    expected = [
        f"torch's {name} does not tell other ranks of stops: give Drain a module of elastirun.train, or the optimizer" for name in names
    ]
    assert run(1, refused) == [expected]


# --- with the Checkpointer


def train(rank: int, world: int, folder: str, kind: str, signum: int, at: int) -> tuple[int, int, list[float]]:
    """Go on with the training in ``folder``. The last rank signals itself in its step number ``at`` of all. Return what this leg did."""
    model, optimizer = make(kind)
    run = TrainState(model=model, optimizer=optimizer)
    checkpoints, drain = Checkpointer(folder, every=4), Drain(optimizer)
    begin = checkpoints.restore(run) or 0
    while run.step < END:
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(run.step))
        step(model, optimizer, rows[rank * ROWS // world : (rank + 1) * ROWS // world])
        run.step += 1
        if (rank, run.step) == (world - 1, at):
            checkpoints.wait()
            os.kill(os.getpid(), signum)
        checkpoints.save(run.step, run, now=drain.now)
        if drain.now:
            break
    if not drain.now:
        checkpoints.save(run.step, run, now=True)
    checkpoints.close()
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return begin, run.step, torch.cat([value.detach().flatten() for value in values]).tolist()


def test_a_training_that_is_stopped_and_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """A planned stop replays no step, also where the next world has other ranks and another way to train."""
    ((_, _, expected),) = run(1, train, str(tmp_path / "whole"), "ddp", 0, 0)
    folder = str(tmp_path / "stopped")
    legs = [(2, "fsdp", signal.SIGTERM, 5), (3, "ddp", signal.SIGTERM, 9), (2, "fsdp", signal.SIGKILL, 15), (2, "fsdp", 0, 0)]
    begun, stopped = [], []
    for world, kind, signum, at in legs:
        killed = signum == signal.SIGKILL
        try:
            results = run(world, train, folder, kind, signum, at, died=killed)
        except AssertionError:  # rank 0 has lost its peer
            assert killed
            continue
        begins, ends, values = zip(*results, strict=True)
        assert len({*begins}) == len({*ends}) == 1, "all ranks stop after the same step"
        begun.append(begins[0])
        stopped.append(ends[0])
    assert begun == [0, stopped[0], 12] and stopped[:2] == [7, 11]
    assert torch.allclose(torch.tensor(values[0]), torch.tensor(expected), atol=1e-5)
