"""Measures how much of the time that one slow rank of four costs ``ElasticDataLoader(balance=True)`` wins back.

    python -m benchmarks.balance [--rounds 5] [--steps 200] [--sample 0.0005] [--factor 2]

Four ranks train over gloo; the computation is a sleep for each sample, which takes ``--factor`` times as long on one rank. Three kinds take
turns: no rank is slow; one is, with an even split; one is, with ``balance=True``, which begins with an even split, too. Lost is the time of
the second over that of the first; won back is the part of it that the third does not take. With a factor of 2 at most 86 % can be won back,
since the slow rank computes less than the others.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.lab import machine, table
from elastirun.train import DistributedDataParallel, ElasticDataLoader
from tests.support.worlds import run

RANKS, SLOW, GLOBAL = 4, 3, 128


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(index))


def train(rank: int, world: int, steps: int, sample: float, factor: float, balance: bool) -> tuple[float, int]:
    """Return the seconds of ``steps`` steps, and the samples of the last one. Rank ``SLOW`` takes ``factor`` times as long for a sample."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    ddp = DistributedDataParallel(model)
    loader = ElasticDataLoader(Samples(), GLOBAL, balance=balance)
    pace = sample * (factor if rank == SLOW else 1)
    model.register_forward_pre_hook(lambda module, inputs: time.sleep(pace * len(inputs[0])))
    begun = time.monotonic()
    for number, step in enumerate(loader.steps(ddp), 1):
        for batch in step:
            ddp(batch).mean().backward()
        if number == steps:
            break
    return time.monotonic() - begun, step.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sample", type=float, default=0.0005, help="seconds for a sample on a rank that is not slow (0.0005)")
    parser.add_argument("--factor", type=float, default=2.0, help="how many times as long the slow rank takes (2)")
    options = parser.parse_args()
    print(machine(), flush=True)
    kinds = {"no rank is slow": (1.0, False), "even": (options.factor, False), "balance=True": (options.factor, True)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.rounds):
        for name in list(kinds)[:: 1 if turn % 2 else -1]:
            ranks = run(RANKS, train, options.steps, options.sample, *kinds[name])
            found[name].append(ranks[0][0])
            print(
                f"{turn + 1}/{options.rounds} {name}: {found[name][-1]:.2f} s, samples at the end {[own for _, own in ranks]}", flush=True
            )
    alike, even, balanced = found.values()
    won = [(slow - better) / (slow - base) for base, slow, better in zip(alike, even, balanced, strict=True)]
    rows = [["", f"{options.steps} steps, s: min / median / max"]]
    rows += [[name, " / ".join(f"{value:.2f}" for value in (min(own), median(own), max(own)))] for name, own in found.items()]
    rows.append(["won back of the lost time", " / ".join(f"{value:.0%}" for value in (min(won), median(won), max(won)))])
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
