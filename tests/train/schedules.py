"""Train in worlds of real processes that are killed and resized, with checkpoints between them, and compare with undisturbed training.

Usage:

    python -m tests.train.schedules --tries 20 --seed 0
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastirun.train import Checkpointer, DeterministicShards, DistributedDataParallel, Drain, ElasticDataLoader, TrainState
from tests.support.tries import parser
from tests.support.worlds import run

SAMPLES, BATCH, EPOCHS = 97, 16, 3  # the last batch of an epoch has one sample, for which most ranks have nothing to do
EVERY = 2  # steps from one checkpoint to the next
SETTLED = 4  # steps from one wait for a checkpoint to the next: without, a kill would come before the first one is published
MOMENTS = ("before the exchange", "after the step", "after the save")
CLOSE = 1e-4  # of the fast mode


@dataclass(frozen=True)
class Leg:
    """A world of ``world`` ranks, in which ``rank`` sends ``signum`` to itself in its step number ``step``."""

    world: int
    signum: int = 0  # 0: none, SIGKILL, or SIGTERM, after which all ranks stop as planned
    rank: int = 0
    step: int = 0
    moment: str = MOMENTS[0]

    def signal(self, rank: int, step: int, moment: str) -> None:
        if self.signum and (rank, step, moment) == (self.rank, self.step, self.moment):
            os.kill(os.getpid(), self.signum)

    def __str__(self) -> str:
        size = f"{self.world} rank{'s' * (self.world > 1)}"
        return f"{size}, {signal.Signals(self.signum).name} to {self.rank} in step {self.step} {self.moment}" if self.signum else size


@dataclass
class Result:
    """The end of a training."""

    digest: str  # of all values' bits
    values: list[float]  # the loss, and all parameters
    begins: list[int]  # the number of finished steps with which each leg began
    counts: Counter[tuple[int, int]]  # how often each (epoch, sample) was used, without steps that were undone

    def differs(self, expected: Result, fast: bool) -> str:
        """Return what is not as it is ``expected``."""
        if self.counts != Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)):
            return f"samples are lost or doubled: {self.counts}"
        if not fast:
            return "" if self.digest == expected.digest else "other bits"
        far = max(abs(one - other) for one, other in zip(self.values, expected.values, strict=True))
        return "" if far <= CLOSE else f"{far} away"


class Numbered(Dataset[tuple[int, Tensor, int]]):
    """Points with noise of their own in each epoch, their number and their class."""

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, self.points[index] + 0.1 * torch.randn(6), int(self.points[index].sum() > 0)


def train(rank: int, world: int, folder: str, number: int, leg: Leg, fast: bool, dropout: float) -> tuple[str, list[float]]:
    """Go on with the training in ``folder``. Each rank writes a line for each step: its number, the epoch, and the samples."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 24), nn.GroupNorm(4, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 2))
    model = DistributedDataParallel(module) if fast else DeterministicShards(module, shards=6)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = ElasticDataLoader(Numbered(), BATCH, keyed_rng=True)
    state = TrainState(model=module, optimizer=optimizer, data=loader)
    checkpoints, drain = Checkpointer(f"{folder}/checkpoints", every=EVERY), Drain(model)
    begin = checkpoints.restore(state) or 0
    with open(f"{folder}/{number}-{rank}", "w", buffering=1) as log:
        log.write(f"{begin}\n")
        for epoch in range(loader.epoch, EPOCHS):
            for step in loader.steps(model):
                samples: list[int] = []
                optimizer.zero_grad()
                if step.samples == 0:
                    leg.signal(rank, state.step + 1 - begin, MOMENTS[0])
                for numbers, points, classes in step:
                    samples += numbers.tolist()
                    nn.functional.cross_entropy(model(points), classes).backward()
                    leg.signal(rank, state.step + 1 - begin, MOMENTS[0])
                optimizer.step()
                state.step += 1
                log.write(json.dumps([state.step, epoch, samples]) + "\n")
                leg.signal(rank, state.step - begin, MOMENTS[1])
                checkpoints.save(state.step, state, now=drain.now)
                if state.step % SETTLED == 0:  # before a signal: nobody tells the others that a killed rank will not come
                    checkpoints.wait()
                leg.signal(rank, state.step - begin, MOMENTS[2])
                if drain.now:
                    checkpoints.close()
                    drain.close()
                    return "stopped", []
    checkpoints.save(state.step, state, now=True)
    checkpoints.close()
    module.eval()
    points = Numbered().points
    loss = nn.functional.cross_entropy(module(points), (points.sum(1) > 0).long())
    values = [loss.item(), *(value for param in module.parameters() for value in param.flatten().tolist())]
    return hashlib.sha256(repr(values).encode()).hexdigest(), values


def perform(folder: Path, legs: Iterable[Leg], fast: bool = False, dropout: float = 0.0) -> Result:
    """Train leg by leg; the last one comes to the end. Raises AssertionError where ranks end differently, or fail without a kill."""
    begins, ends, steps = [], [], dict[int, Counter[tuple[int, int]]]()
    for number, leg in enumerate(legs):
        ends = _ends(folder, number, leg, fast, dropout)
        logs = [path.read_text().splitlines() for path in sorted(folder.glob(f"{number}-*"))]
        for begin in {int(lines[0]) for lines in logs}:
            begins.append(begin)
            steps = {step: counts for step, counts in steps.items() if step <= begin}  # the others were undone
        for step, epoch, samples in (json.loads(line) for lines in logs for line in lines[1:]):
            steps.setdefault(step, Counter()).update((epoch, sample) for sample in samples)
    assert all(end == ends[0] for end in ends), "the ranks end with different parameters"
    return Result(*ends[0], begins, sum(steps.values(), Counter()))


def _ends(folder: Path, number: int, leg: Leg, fast: bool, dropout: float) -> list[Any]:
    """Run one leg. Where a rank is killed, the others lose a peer."""
    killed = leg.signum == signal.SIGKILL
    try:
        return run(leg.world, train, str(folder), number, leg, fast, dropout, died=killed)
    except AssertionError:
        if not killed:
            raise
        return []


def schedule(seed: int) -> list[Leg]:
    """Return some worlds of 1 to 4 ranks that are killed or stopped at random, and one that comes to the end."""
    rng, legs = random.Random(seed), []
    for _ in range(rng.randint(3, 5)):
        world, signum = rng.randint(1, 4), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        legs.append(Leg(world, signum, rng.randrange(world), rng.randint(1, 6), rng.choice(MOMENTS)))
    return [*legs, Leg(rng.randint(1, 4))]


def main() -> int:
    arguments = parser(__doc__, tries=20, seed=0).parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="schedules-") as place:
        (whole := Path(place, "whole")).mkdir()
        expected = perform(whole, [Leg(1)])
        for seed in range(arguments.seed, arguments.seed + arguments.tries):
            legs, fast = schedule(seed), seed % 2 == 1
            (folder := Path(place, str(seed))).mkdir()
            result = perform(folder, legs, fast)
            differs = result.differs(expected, fast)
            failed += bool(differs)
            told = differs or f"each sample once per epoch, {'close' if fast else 'the same bits'}"
            print(f"{seed}: {'; '.join(map(str, legs))}; began with steps {result.begins}: {told}", flush=True)
    print(f"{arguments.tries - failed} of {arguments.tries} schedules end as undisturbed training")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
