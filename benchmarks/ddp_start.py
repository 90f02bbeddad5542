"""Measures the construction and the first two backwards of a module with many small parameters, beside torch's.

    python -m benchmarks.ddp_start [--parameters 8000] [--rounds 7]

Two ranks with one thread each. In each round every variant wraps a fresh model; the variants take turns, in another order each time. A
value is that of the slowest rank. "of torch" is the ratio of the medians, "paired" the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ddp import ms, ratios
from benchmarks.ddp_variants import GLOO, SHARED, TORCH, backward, wrap
from benchmarks.lab import machine, table
from tests.support import worlds

VARIANTS = (TORCH, GLOO, SHARED)
PARTS = ("construction", "first backward", "second backward")


class Many(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(parameters)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([factor * x for factor in self.factors]).sum()


def start_rank(rank: int, world: int, parameters: int, rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each part, by variant and round."""
    found: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for number in range(1 + rounds):  # the first warms up code and memory, and is not counted
        for at in range(len(VARIANTS)):
            name = VARIANTS[(at + number) % len(VARIANTS)]
            model = Many(parameters)
            gc.collect()
            dist.barrier()
            times = [time.perf_counter()]
            module = wrap(name, model)
            times.append(time.perf_counter())
            for _ in PARTS[1:]:
                backward(module, torch.ones(8))
                times.append(time.perf_counter())
            if number:
                found[name].append([after - before for before, after in zip(times, times[1:], strict=False)])
            del module
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    print(machine(), flush=True)
    ranks = worlds.run(2, start_rank, chosen.parameters, chosen.rounds, timeout=3600.0)
    for at, part in enumerate(PARTS):
        by_round = {name: zip(*(rank[name] for rank in ranks), strict=True) for name in VARIANTS}
        slowest = {name: [max(times[at] for times in turn) for turn in by_round[name]] for name in VARIANTS}
        rows = [[f"{part}, {chosen.parameters:,} parameters", "ms: min / median / max", "of torch"]]
        rows += [[name, ms(slowest[name]), ratios(slowest[name], slowest[TORCH])] for name in VARIANTS]
        print("\n" + table(rows), flush=True)


if __name__ == "__main__":
    main()
