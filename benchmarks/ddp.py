"""Compares elastirun's data-parallel module with torch's DistributedDataParallel: time, CPU and memory of a step.

    python -m benchmarks.ddp [--quick] [--what steps cpu memory adamw] [--cases a b c] [--rounds 12]

steps    forward, backward, reduction of the gradients and zero_grad(set_to_none=True), no optimizer; two ranks with one thread each
cpu      CPU time per parameter above plain autograd: (a) in a world of one
memory   steady peak above the model, as multiples of the parameters' bytes; every variant in a fresh world
adamw    steps with AdamW

On a GPU: tests/gpu/steps.py.

The variants take turns within one run, round by round and in another order each time. A turn is one step that is not counted, which fills
the caches with this variant's data, and ``--repeats`` counted steps, each after a barrier. A step takes as long as on the slowest rank, and
a round's value is the median of its turn. Every counted step is used. "of torch" is the ratio of the medians, "paired" the median of the
rounds' ratios. Where the two differ, the machine was busy with other work.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.ddp_variants import (
    CASES,
    COMPUTE,
    GLOO,
    NO_OVERLAP,
    ONLY_GLOO,
    ONLY_SHARED,
    OPTIMIZED,
    SHARED,
    STEPS,
    TORCH,
    TORCH_FUSED,
    TORCH_VIEW,
    Case,
    Step,
    make_optimized,
    make_step,
)
from benchmarks.lab import machine, table
from tests.support import worlds

WARM_UP = 6  # steps; torch's buckets are final after two, ours after four
LIMIT = 3600.0  # seconds for a world: only a hang takes longer
WHAT = ("steps", "adamw", "cpu", "memory")
MIB = 1 << 20


# -- on a rank --------------------------------------------------------------------------------------------------------


def take_turns(steps: dict[str, Step], rounds: int, repeats: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Return (seconds, CPU seconds) of each counted step, by variant and round."""
    names = list(steps)
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for number in range(rounds):
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            turn = []
            for count in range(1 + repeats):
                dist.barrier()
                begun, cpu = time.perf_counter(), time.process_time()
                steps[name]()
                if count:
                    turn.append((time.perf_counter() - begun, time.process_time() - cpu))
            found[name].append(turn)
    return found


def time_rank(rank: int, world: int, key: str, variants: Sequence[str], rounds: int, repeats: int) -> dict[str, Any]:
    make = make_optimized if TORCH_FUSED in variants else make_step
    made = {name: make(name, CASES[key]) for name in variants}
    for step, _ in made.values():
        for _ in range(WARM_UP):
            step()
    gc.collect()
    found = take_turns({name: step for name, (step, _) in made.items()}, rounds, repeats)
    return {"times": found, "plans": {name: plan_of(module) for name, (_, module) in made.items()}}


def plan_of(module: Any) -> str:
    """Return the sizes of elastirun's buckets in words; empty for other modules."""
    if not hasattr(module, "stats"):
        return ""
    sizes = [f"{bucket['bytes'] / MIB:.1f}" for bucket in module.stats()["buckets"]]
    return f"{len(sizes)} buckets: {' '.join(sizes)} MiB"


def status(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def memory_rank(rank: int, world: int, key: str, variant: str) -> tuple[int, int]:
    """Return (steady peak, highest since the start) above the model, in bytes of this rank.

    Shared memory is resident in every rank, so only a rank's share of it counts. Pages of files do not count: they are code that is used
    for the first time. The steady peak is the kernel's high-water mark of resident memory over three steps (VmHWM; writing 5 to clear_refs
    resets it). The highest value is sampled, because the share changes with the plan; the true one may be higher.
    """
    case = CASES[key]
    model, batch = case.build(), case.batch()
    gc.collect()
    model_only = Case(case.label, lambda: model, lambda: batch)
    before, samples, over = status("RssAnon"), [0], threading.Event()

    def sample() -> None:
        while not over.wait(0.002):
            samples.append(status("RssAnon") + status("RssShmem") // world)

    watch = threading.Thread(target=sample)
    watch.start()
    step, _ = make_step(variant, model_only)
    for _ in range(WARM_UP):
        step()
    over.set()
    watch.join()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    others = status("RssShmem") // world * (world - 1)
    return status("VmHWM") - status("RssFile") - others - before, max(samples) - before


# -- tables -----------------------------------------------------------------------------------------------------------


def by_round(ranks: Sequence[dict[str, Any]], name: str, which: int) -> list[float]:
    """Return a value for each round: the median of its steps, each on the slowest rank. ``which``: 0 time, 1 CPU time."""
    everyones = [rank["times"][name] for rank in ranks]
    return [median(max(step[which] for step in steps) for steps in zip(*turns, strict=True)) for turns in zip(*everyones, strict=True)]


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> str:
    paired = median(m / t for m, t in zip(mine, theirs, strict=True))
    return f"{median(mine) / median(theirs):.2f} (paired {paired:.2f})"


def ms(values: Sequence[float]) -> str:
    return f"{min(values) * 1e3:.1f} / {median(values) * 1e3:.1f} / {max(values) * 1e3:.1f}"


def efficiency(times: dict[str, list[float]], name: str, ideal: str) -> str:
    """Return the part of the communication that was hidden behind the backward, of what could have been hidden."""
    if name in (COMPUTE, NO_OVERLAP, ONLY_GLOO, ONLY_SHARED):
        return ""
    slow, best = median(times[NO_OVERLAP]), max(median(times[COMPUTE]), median(times[ideal]))
    return f"{(slow - median(times[name])) / (slow - best):.0%}"


def show_steps(key: str, rounds: int, repeats: int) -> None:
    ranks = worlds.run(2, time_rank, key, STEPS, rounds, repeats, timeout=LIMIT)
    times = {name: by_round(ranks, name, 0) for name in STEPS}
    rows = [["step, ms: min / median / max", "of torch", "of torch, views", "CPU, ms", "hidden"]]
    rows[0].insert(0, CASES[key].label)
    for name in STEPS:
        hidden = efficiency(times, name, ONLY_SHARED if name == SHARED else ONLY_GLOO)
        cpu = f"{median(by_round(ranks, name, 1)) * 1e3:.1f}"
        rows.append([name, ms(times[name]), ratios(times[name], times[TORCH]), ratios(times[name], times[TORCH_VIEW]), cpu, hidden])
    print("\n" + table(rows), flush=True)
    for name, plan in ranks[0]["plans"].items():
        if plan:
            print(f"{name}: {plan}", flush=True)


def show_optimized(key: str, rounds: int, repeats: int) -> None:
    ranks = worlds.run(2, time_rank, key, OPTIMIZED, rounds, repeats, timeout=LIMIT)
    times = {name: by_round(ranks, name, 0) for name in OPTIMIZED}
    rows = [[CASES[key].label + ", with AdamW", "step, ms: min / median / max", "of torch, views + fused", "CPU, ms"]]
    for name in OPTIMIZED:
        cpu = f"{median(by_round(ranks, name, 1)) * 1e3:.1f}"
        rows.append([name, ms(times[name]), ratios(times[name], times[TORCH_FUSED]), cpu])
    print("\n" + table(rows), flush=True)


def show_cpu(key: str, rounds: int, repeats: int) -> None:
    variants = (COMPUTE, TORCH, TORCH_VIEW, GLOO)
    ranks = worlds.run(1, time_rank, key, variants, rounds, repeats, timeout=LIMIT)
    count = len(list(CASES[key].build().parameters()))
    cpu = {name: by_round(ranks, name, 1) for name in variants}
    rows = [[f"{count:,} parameters, one process", "CPU, ms: min / median / max", "µs per parameter above plain autograd", "paired"]]
    for name in variants:
        above = (median(cpu[name]) - median(cpu[COMPUTE])) / count * 1e6
        paired = median(m - t for m, t in zip(cpu[name], cpu[COMPUTE], strict=True)) / count * 1e6
        rows.append([name, ms(cpu[name]), f"{above:.2f}", f"{paired:.2f}"])
    print("\n" + table(rows), flush=True)


def show_memory(key: str, times: int) -> None:
    size = sum(param.nbytes for param in CASES[key].build().parameters())
    rows = [[CASES[key].label, "steady peak above the model, x parameters", "highest, while buckets change"]]
    for name in (COMPUTE, TORCH, TORCH_VIEW, GLOO, SHARED):
        peaks = [peak for _ in range(times) for peak in worlds.run(2, memory_rank, key, name, timeout=LIMIT)]
        steady = [peak / size for peak, _ in peaks]
        rows.append([name, f"{min(steady):.2f} / {median(steady):.2f} / {max(steady):.2f}", f"{median(h for _, h in peaks) / size:.2f}"])
    print("\n" + table(rows), flush=True)


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2, help="counted steps in a turn")
    parser.add_argument("--quick", action="store_true", help="three rounds, and memory once: to check that it runs")
    chosen = parser.parse_args()
    rounds, repeats = (3, 1) if chosen.quick else (chosen.rounds, chosen.repeats)
    print(machine(), flush=True)
    for key in chosen.cases:
        if "steps" in chosen.what:
            show_steps(key, rounds, repeats)
        if "adamw" in chosen.what and key != "c":
            show_optimized(key, rounds, repeats)
    if "cpu" in chosen.what:
        show_cpu("a", 2 * rounds, repeats)
    if "memory" in chosen.what:
        show_memory("b", 1 if chosen.quick else 3)


if __name__ == "__main__":
    main()
