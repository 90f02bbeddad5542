"""Let new workers join a live job with a large state, and see how long the others wait for them.

    python -m tests.system.live_joins --joins 20 [--width 4096] [--nproc 3] [--preload torch] [--transport group] [--device cuda]

A worker of the only node is killed, and a new one takes its place: the others train on, and the new one gets the state meanwhile.
Parameters and Adam's state have 12 bytes for each of ``width`` squared numbers (4096: 201 MB). Prints, in milliseconds, how much longer
than the median the longest step of the others took from the first step without the killed worker to some steps with the new one; the same
of the steps before the kill, which nothing disturbs; and from the start of the new process to its first step that counts.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support import live_log
from tests.support.figures import figure
from tests.system.live_kills import SAMPLES, Job, job

AFTER = 20  # steps with the new worker, whose times count, too
BEFORE = 40  # steps before the kill, about as many as a join takes


@dataclass(frozen=True)
class Join:
    """One join, in seconds."""

    median: float  # step of the others
    longest: float
    undisturbed: float  # the longest of the steps before, beyond their median
    contributes: float  # from the first word of the new process to its first step that counts
    steps: int  # of the others from the kill on, until then


def join(running: Job, rng: random.Random) -> Join:
    """Kill a worker, and wait until a new one has its place and trains."""
    before = running.world(running.nproc)
    undisturbed = longest_undisturbed(running, [line["pid"] for line in before])
    victim = rng.choice(before)["pid"]
    os.kill(victim, signal.SIGKILL)
    after = running.world(running.nproc, before[0]["round"])
    survivors = {line["pid"] for line in before} - {victim}
    assert survivors < {line["pid"] for line in after}, f"{survivors} did not all go on: {after}\n{running.said()}"
    [new] = {line["pid"] for line in after} - survivors
    first = next(line["at"] for line in live_log.of(after, "world") if line["pid"] == new)

    def enough(lines: Sequence[live_log.Line]) -> bool:
        return len([line for line in lines[-2000:] if line["what"] == "made" and line["pid"] in survivors and line["at"] > first]) > AFTER

    lines = running.wait(enough)
    begun = next(line["at"] for line in live_log.of(lines, "begun") if line["pid"] == new)
    gaps = [gap for pid in survivors for gap in gaps_of(lines, pid, before[0]["round"])]
    steps = len({line["step"] for line in live_log.of(lines, "made") if before[0]["round"] < line["round"] and line["at"] < first})
    return Join(statistics.median(gaps), max(gaps), undisturbed, first - begun, steps)


def longest_undisturbed(running: Job, pids: Sequence[int]) -> float:
    """Return how much longer than the median the longest of the next steps takes, while nothing happens to the job."""
    begun = time.monotonic()

    def recent(lines: Sequence[live_log.Line]) -> list[live_log.Line]:
        return [line for line in lines[-2000:] if line["at"] > begun]

    made = recent(running.wait(lambda lines: len(live_log.of(recent(lines), "made")) > BEFORE * len(pids)))
    gaps = [gap for pid in pids for gap in gaps_of(made, pid, 0)]
    return max(gaps) - statistics.median(gaps)


def gaps_of(lines: Sequence[live_log.Line], pid: int, after: int) -> list[float]:
    """Return the times between two steps of a worker, from its first step after round ``after`` on."""
    made = [line["at"] for line in live_log.of(lines, "made") if line["pid"] == pid and line["round"] > after]
    return [later - earlier for earlier, later in pairwise(made)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--preload", default="torch")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--device", default="cpu", help="cuda: all share one GPU")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step that its ranks sleep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--claim", help="print the figure for this claim of tests/gpu/parts.py, too")
    args = parser.parse_args()
    rng, options = random.Random(args.seed), [f"--preload={args.preload}"] * bool(args.preload)
    given = {"TEST_WIDTH": str(args.width), "TEST_DIGESTS": "0", "TEST_BATCH": "6"}
    given |= {"TEST_PAUSE": str(args.pause), "TEST_TRANSPORT": args.transport, "TEST_DEVICE": args.device}
    with tempfile.TemporaryDirectory(prefix="live-joins-") as folder:
        with job(Path(folder), 1, args.nproc, *options, **given) as running:
            joins = []
            for _ in range(args.joins):
                joins.append(join(running, rng))
                print(joins[-1], flush=True)
        lines, _ = live_log.read(Path(folder, "log"))
    wrong = live_log.violations(lines, SAMPLES)
    longer = sorted(1e3 * (one.longest - one.median) for one in joins)
    print(f"{len(joins)} joins, {len(wrong)} violations; load {os.getloadavg()[0]:.1f}")
    print(f"  longest step beyond the median: best {longer[0]:.0f}, median {statistics.median(longer):.0f}, worst {longer[-1]:.0f} ms")
    undisturbed = 1e3 * statistics.median(one.undisturbed for one in joins)
    print(f"  the same before the kill, with nothing to disturb them: median {undisturbed:.0f} ms")
    step, first = (statistics.median(values) for values in zip(*((one.median, one.contributes) for one in joins), strict=True))
    print(f"  median step {1e3 * step:.0f} ms; a new worker's first step after {first:.2f} s of its own script")
    if args.claim:
        text = f"{statistics.median(longer):.0f} ms ({longer[0]:.0f} to {longer[-1]:.0f}, {len(joins)} joins; "
        text += f"undisturbed {undisturbed:.0f}) "
        text += f"beside steps of {1e3 * step:.0f} ms; the new worker's first step after {first:.1f} s; "
        text += f"{len(wrong)} steps or samples lost or doubled"
        figure(args.claim, text, longer_ms=statistics.median(longer), undisturbed_ms=undisturbed, first_step_s=first, violations=len(wrong))
    for line in wrong[:20]:
        print(f"  {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
