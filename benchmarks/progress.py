"""Measures the stamp of a step (``progress()``, for hang detection) on steps of a millisecond: the ratio of step times with and without it.

    python -m benchmarks.progress [--step 0.001] [--steps 20] [--pairs 2000]

A step adds numbers up in Python. Blocks of steps with and without the stamp take turns, in another order each time; a pair's value is the
ratio of its two blocks. Other work on the machine slows single blocks down: the median of the pairs leaves that out. The last row has no
stamp in either block, and shows how far from 1 the measurement itself is.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from statistics import median, quantiles

from benchmarks.lab import machine, table
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.progress import progress
from elastirun.worker.optimizer_steps import on_step
from elastirun.worker.progress_page import VARIABLE

Stamp = Callable[[], None]


def work(numbers: int) -> int:
    total = 0
    for number in range(numbers):
        total += number
    return total


def calibrate(seconds: float) -> int:
    """Return how many numbers take ``seconds`` to add up, at best."""
    numbers = 10_000
    return round(numbers * seconds / min(block(1, numbers, None) for _ in range(200)))


def block(steps: int, numbers: int, stamp: Stamp | None) -> float:
    """Return the seconds of ``steps`` steps, each with a ``stamp``; None: without one, as in a script that has none."""
    begun = time.perf_counter()
    if stamp is None:
        for _ in range(steps):
            work(numbers)
    else:
        for _ in range(steps):
            work(numbers)
            stamp()
    return time.perf_counter() - begun


def ratios(pairs: int, steps: int, numbers: int, stamp: Stamp | None) -> list[float]:
    """Return the ratio of each pair; ``stamp`` None: both blocks of a pair are plain."""
    found = []
    for number in range(pairs):
        with_first = random.Random(number).random() < 0.5
        first, second = (block(steps, numbers, stamp if one == with_first else None) for one in (True, False))
        found.append(first / second if with_first else second / first)
    return found


def row(name: str, values: list[float]) -> list[str]:
    quarters = quantiles(values, n=4)
    return [name, f"{median(values):.5f}", f"{quarters[0]:.4f} to {quarters[2]:.4f}"]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--step", type=float, default=0.001, metavar="SECONDS")
    made.add_argument("--steps", type=int, default=20, help="of a block")
    made.add_argument("--pairs", type=int, default=2000)
    options = made.parse_args()
    pages = ProgressPages()
    (os.environ[VARIABLE],) = pages.renew(1)
    print(machine(), f"load {os.getloadavg()[0]:.1f}", sep="\n")
    numbers = calibrate(options.step)
    rows = [["", "ratio", "half of the pairs"]]
    for name, stamp in (("behind an optimizer", on_step), ("progress()", progress)):  # the second turns the first one off
        stamp()
        rows.append(row(name, ratios(options.pairs, options.steps, numbers, stamp)))
    rows.append(row("the same twice, without a stamp", ratios(options.pairs, options.steps, numbers, None)))
    begun = time.perf_counter()
    for _ in range(1_000_000):
        progress()
    print(table(rows), f"a stamp takes {time.perf_counter() - begun:.3f} us; load {os.getloadavg()[0]:.1f}", sep="\n")
    pages.close()


if __name__ == "__main__":
    main()
