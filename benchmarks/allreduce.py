"""Compares all-reduces on one host: torch's gloo and elastirun's shared memory.

    python -m benchmarks.allreduce [--ranks 2] [--sizes 4 1024 4096 65536] [--rounds 40] [--hosts 1]

One bucket of float32 at a time; sizes are in KiB. The two take turns, in another order each round, each after a barrier; a reduction took
as long as on the slowest rank, and its CPU time is the sum over the ranks, gloo's threads included. "in a row" is one of ten without a
barrier between them. Medians over the rounds; in brackets the fastest round, which other work on the machine disturbs least. With
``--hosts``, the ranks of this machine are told that they are on as many hosts.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab import machine, table
from elastirun.train.reduction.transports.base import Storage
from elastirun.train.reduction.transports.group import GroupTransport
from elastirun.train.reduction.transports.shared_memory import SharedMemory
from tests.support import worlds

ROW = 10
KIB = 1024


def measure(rank: int, ranks: int, sizes: list[int], rounds: int, hosts: int) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """Return (seconds, CPU seconds, seconds in a row) of each round on this rank, by size and transport."""
    assert dist.group.WORLD is not None
    transports: dict[str, Any] = {
        "gloo": GroupTransport(dist.group.WORLD),
        "shared": SharedMemory(dist.group.WORLD, host=str(rank * hosts // ranks) if hosts > 1 else None),
    }
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for size in sizes:
        arenas = {name: each.allocate([Storage(size * KIB // 4, torch.float32, torch.device("cpu"))]) for name, each in transports.items()}
        for turn in range(-2, rounds):  # two to warm up
            for name in random.Random(turn).sample(sorted(arenas), len(arenas)):
                sample = one(arenas[name])
                if turn >= 0:
                    found.setdefault((size, name), []).append(sample)
        dist.barrier()
    transports["shared"].close()
    return found


def one(arena: Any) -> tuple[float, float, float]:
    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    arena.all_reduce(0).wait()
    took, spent = time.perf_counter() - begun, time.process_time() - cpu
    arena.buffers[0].zero_()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(ROW):
        arena.all_reduce(0).wait()
    return took, spent, (time.perf_counter() - begun) / ROW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 64, 1024, 4096, 65536], help="KiB")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    print(machine())
    print(f"{options.ranks} ranks, {options.hosts} host(s), {options.rounds} rounds\n")
    everybodys = worlds.run(options.ranks, measure, options.sizes, options.rounds, options.hosts, timeout=3600.0)
    rows = [
        [
            "KiB",
            "gloo, us",
            "shared, us",
            "ratio",
            "gloo, GB/s",
            "shared, GB/s",
            "CPU: gloo, us",
            "shared, us",
            "in a row: gloo, us",
            "shared, us",
        ]
    ]
    for size in options.sizes:
        took, cpu, row = {}, {}, {}
        for name in ("gloo", "shared"):
            samples = list(zip(*(theirs[size, name] for theirs in everybodys), strict=True))
            took[name] = sorted(max(t for t, _, _ in sample) * 1e6 for sample in samples)
            cpu[name] = sorted(sum(c for _, c, _ in sample) * 1e6 for sample in samples)
            row[name] = sorted(max(r for _, _, r in sample) * 1e6 for sample in samples)
        rates = [f"{size * KIB / median(took[name]) / 1e3:.2f}" for name in took]
        times = [f"{median(values):.0f} ({values[0]:.0f})" for values in (*took.values(), *cpu.values(), *row.values())]
        rows.append([str(size), *times[:2], f"{median(took['gloo']) / median(took['shared']):.1f}", *rates, *times[2:]])
    print(table(rows))


if __name__ == "__main__":
    main()
