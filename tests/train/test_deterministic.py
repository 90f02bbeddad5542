"""Deterministic mode: the same bits at any number of ranks, resized or not, with dropout and random augmentations."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastirun.train import DeterministicShards, DistributedDataParallel, Drain, ElasticDataLoader, ModelMismatch, TrainError
from elastirun.train.data.shard_tree import add_up, subtrees
from elastirun.train.data.shares import share
from tests.support.worlds import run

# -- the tree -----------------------------------------------------------------------------------------------------------


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 13, 16, 64])
def test_every_world_adds_up_in_the_same_order(shards: int) -> None:
    leaves = {(at, at + 1): str(at) for at in range(shards)}
    alone = add_up((0, shards), leaves, join)
    for world in range(1, 65):
        spans = [subtrees(share(shards, rank, world), (0, shards)) for rank in range(world)]
        assert [at for part in spans for start, stop in part for at in range(start, stop)] == list(range(shards))
        known = {span: add_up(span, leaves, join) for part in spans for span in part}
        assert add_up((0, shards), known, join) == alone
        if world in (1, 2, 4) and world <= shards:
            assert all(len(part) == 1 for part in spans)  # a rank sends one sum


# -- training -----------------------------------------------------------------------------------------------------------


class Noisy(Dataset[Tensor]):
    """Points with a random augmentation."""

    def __init__(self, n: int = 45) -> None:
        self.points = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] * (1 + 0.1 * random.random()) + 0.1 * torch.randn(6)


class Network(nn.Module):
    """Layers with dropout, a tied weight, a frozen and an unused parameter, and one of another type, which only some samples use."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm, self.drop = nn.Linear(6, 40), nn.Linear(40, 6), nn.GroupNorm(4, 40), nn.Dropout(p)
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(6), requires_grad=False)
        self.seldom = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.drop(torch.tanh(self.norm(self.first(x)))))
        out = nn.functional.linear(nn.functional.linear(out, self.first.weight), self.first.weight.t())
        return out * self.seldom if self.drop.p and x[0, 0] > 0.5 else out * self.frozen


def train(
    rank: int, world: int, path: str = "", until: int = 3, kind: str = "exact", halt: int = 0, p: float = 0.3
) -> tuple[str, list[float], Any]:
    """Train until epoch ``until``, or ``halt`` steps; continue from ``path`` and save there. Return a digest, the values, a gradient."""
    torch.set_num_threads(1 + rank % 2)  # as a launcher that has given each node's workers another number
    module = Network(p)
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=0.01)
    loader = ElasticDataLoader(Noisy(), 16, seed=5, keyed_rng=None if kind == "exact" else True)
    if Path(path).is_file():
        saved = torch.load(path, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
    model: Any = DeterministicShards(module, shards=6) if kind == "exact" else DistributedDataParallel(module)
    steps = 0
    while loader.epoch < until and (not halt or steps < halt):
        for step in loader.steps(model):
            optimizer.zero_grad()
            for batch in step:
                model(batch).pow(2).mean().backward()
            optimizer.step()
            steps += 1
            torch.rand(rank)  # what a rank draws between steps changes nothing
            if steps == halt:
                break
    assert kind != "exact" or torch.get_num_threads() == 1
    if path and rank == 0:
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}, path)
    values = [value for _, param in sorted(module.state_dict().items()) for value in param.flatten().tolist()]
    return hashlib.sha256(repr(values).encode()).hexdigest(), values, module.unused.grad


def test_the_same_bits_at_any_number_of_ranks() -> None:
    [(alone, _, unused)] = run(1, train)
    assert unused is None
    for world in (2, 3, 4, 7):
        assert [found[0] for found in run(world, train)] == [alone] * world


def test_the_same_bits_through_resizes(tmp_path: Path) -> None:
    [(alone, _, _)] = run(1, train)
    for schedule in ([3, 2, 1], [1, 3, 2]):
        path = str(tmp_path / f"{schedule}.pt")
        for world in schedule[:-1]:
            run(world, train, path, 3, "exact", 2)  # in the middle of an epoch of three steps, then in that of the next
        assert {found[0] for found in run(schedule[-1], train, path)} == {alone}


def test_the_fast_mode_ends_close_to_it() -> None:
    """Without dropout, whose random numbers belong to a process there."""
    (_, exact, _), (_, fast, _) = (run(2, train, "", 3, kind, 0, 0.0)[0] for kind in ("exact", "fast"))
    assert fast == pytest.approx(exact, abs=1e-4) and fast != exact


def gradient(rank: int, world: int, samples: int) -> list[float]:
    torch.manual_seed(0)
    module, points = nn.Linear(6, 2), torch.randn(samples, 6)
    model = DeterministicShards(module, shards=4)
    loader = ElasticDataLoader(points, 11, shuffle=False)  # type: ignore[arg-type]  # a tensor has a length and samples by index
    for step in loader.steps(model):
        for batch in step:
            model(batch).pow(2).mean().backward()
    found = [value for param in module.parameters() for value in param.grad.flatten().tolist()]
    module.zero_grad()
    tail = samples % 11 or 11
    module(points[-tail:]).pow(2).mean().backward()
    expected = [value for param in module.parameters() for value in param.grad.flatten().tolist()]
    assert found == pytest.approx(expected, abs=1e-6)
    return found


@pytest.mark.parametrize("samples", [22, 13, 20])
def test_a_step_has_the_mean_over_the_global_batch(samples: int) -> None:
    """Also where a shard has no sample: two are left for the last step of thirteen."""
    (alone,) = run(1, gradient, samples)
    assert run(3, gradient, samples) == [alone] * 3


class Numbered(Noisy):
    def __getitem__(self, index: int) -> tuple[int, Tensor]:  # type: ignore[override]
        return index, super().__getitem__(index)


def killed(rank: int, world: int, path: str, who: int, when: int) -> None:
    """Train two epochs, with a checkpoint in every second step that lists the samples seen. Rank ``who`` dies within step ``when``."""
    module = Network(0.3)
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=0.01)
    loader, model, seen = ElasticDataLoader(Numbered(), 16), DeterministicShards(module, shards=6), torch.zeros(2, 45)
    if Path(path).is_file():
        saved = torch.load(path, weights_only=True)
        seen = saved["seen"] if rank == 0 else seen
        for part, name in ((module, "module"), (optimizer, "optimizer"), (loader, "data")):
            part.load_state_dict(saved[name])
    while loader.epoch < 2:
        for step in loader.steps(model):
            optimizer.zero_grad()
            for ids, batch in step:
                model(batch).pow(2).mean().backward()
                seen[loader.epoch, ids] += 1
                if (model.step, rank) == (when, who):
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if model.step % 2 == 0 or loader.state_dict()["epoch"] == 2:
                torch.distributed.all_reduce(seen)
                if rank == 0:
                    parts = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict(), "seen": seen}
                    torch.save(parts, f"{path}.new")
                    os.replace(f"{path}.new", path)
                else:
                    seen.zero_()


@pytest.mark.parametrize("seed", range(5))
def test_kills_and_resizes_change_neither_the_samples_nor_the_bits(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "killed.pt"
    run(1, killed, str(tmp_path / "alone.pt"), -1, -1)
    for _ in range(3):
        world = rng.randint(1, 4)
        with suppress(AssertionError):  # the others lose a peer
            run(world, killed, str(path), rng.randrange(world), rng.randrange(4), died=True)
    run(2, killed, str(path), -1, -1)
    found, alone = (torch.load(file, weights_only=True) for file in (path, tmp_path / "alone.pt"))
    assert found["seen"].eq(1).all() and found["data"] == alone["data"]
    assert all(torch.equal(found["module"][name], value) for name, value in alone["module"].items())


def drains(rank: int, world: int, signalled: int) -> list[Any]:
    model = DeterministicShards(nn.Linear(6, 2), shards=2)
    drain = Drain(model)
    loader = ElasticDataLoader(Noisy(), 5)
    found: list[Any] = []
    for step in loader.steps(model):
        if (model.step, rank) == (2, signalled):
            os.kill(os.getpid(), signal.SIGTERM)
        if (model.step, rank) == (0, 0):
            model.request("checkpoint")
        for batch in step:
            model(batch).sum().backward()
        found.append(sorted(model.requests))
        if drain.now:
            break
    drain.close()
    return [*found, model.drained, loader.consumed]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(world: int) -> None:
    """Also a signal to the one of three ranks that has none of the two shards."""
    for signalled in range(world):
        assert run(world, drains, signalled) == [[["checkpoint"], [], ["drain"], 3, 15]] * world


# -- errors -------------------------------------------------------------------------------------------------------------


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def step_of(module: nn.Module, state: dict[str, Any] | None = None, batch: int = 16, **options: Any) -> ElasticDataLoader:
    loader = ElasticDataLoader(Noisy(), batch, **options)
    loader.load_state_dict(state or loader.state_dict())
    model = DeterministicShards(module)
    for shard in next(loader.steps(model)):
        model(shard).sum().backward()
    return loader


def frozen_statistics() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    module[1].eval()
    return module


def wrong_uses(rank: int, world: int) -> list[tuple[str, str]]:
    module = nn.Linear(6, 2)
    state = step_of(frozen_statistics()).state_dict()
    assert step_of(module, state).state_dict() == {**state, "consumed": 32}
    uses: list[tuple[Callable[[], Any], str]] = [
        (lambda: step_of(module, {**state, "deterministic": {"threads": 2}}), "threads = 2, now it is 1"),
        (lambda: step_of(module, {**state, "deterministic": {"torch": "2.1"}}), "torch = 2.1, now"),
        (lambda: step_of(module, state, 8), "global_batch_size = 16, now it is 8"),
        (lambda: step_of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), "1 is a BatchNorm1d in training mode.*use GroupNorm"),
        (lambda: step_of(Counting()), "buffer calls"),
        (lambda: step_of(nn.Embedding(3, 3, sparse=True)), "weight is sparse"),
        (lambda: step_of(DistributedDataParallel(module)), "takes the module itself"),
        (lambda: step_of(module, micro_batch_size=3), "whose shards are the micro-batches"),
        (lambda: step_of(module, rank=1, world_size=3), "rank 1 of 3"),
        (lambda: DeterministicShards(module, shards=0), "shards must be a whole number, 1 or more, not 0"),
        (lambda: DeterministicShards(module).request("rest"), "no request 'rest'"),
        (lambda: DeterministicShards(module, threads=0), "threads must be a whole number, 1 or more, not 0"),
    ]
    uses.append((lambda: step_of(module.requires_grad_(False)), "nothing to reduce"))
    found = []
    for use, said in uses:
        try:
            use()
        except TrainError as error:
            found.append((said, str(error)))
    return found


def test_what_would_depend_on_the_number_of_ranks_is_refused() -> None:
    (found,) = run(1, wrong_uses)
    assert len(found) == 13
    for said, text in found:
        assert re.search(said, text), text


def unlike(rank: int, world: int) -> str:
    with pytest.raises(ModelMismatch) as error:
        DeterministicShards(nn.Linear(2, 2), threads=1 + rank)
    return str(error.value)


def test_ranks_with_different_numbers_of_threads_are_refused() -> None:
    assert all("threads=1 on rank 0; threads=2 on rank 1" in text for text in run(2, unlike))
