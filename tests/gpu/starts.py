"""Times the first kernel on the GPU: after the command of a job of one worker, and after ``kill -9`` of the worker.

    python -m tests.gpu.starts

elastirun, elastirun with ``--preload=off`` and torchrun take turns, twice, with the same command line: a start, then
two kills of the worker in the first turn and one in the second. A worker has a gloo group of its own, and its step
is a kernel whose result it reads. elastirun has ``--set restart-pause=0``: this measures a restart, not the pause before
it, which grows when rounds fail soon. What all of them read is in the page cache.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from benchmarks.lab import ELASTIRUN, EXECUTED, ROOT, TORCHRUN, WORKER, Bench, Launcher, seconds
from benchmarks.launcher import WARM_UP
from tests.support.gpu import DEVICE, DRY, HERE, NO_GPU, figure

LAUNCHERS = (ELASTIRUN, EXECUTED, TORCHRUN)
NAMES = {ELASTIRUN: "elastirun", EXECUTED: "--preload=off", TORCHRUN: "torchrun"}
KILLS = (2, 1)  # in each turn of a launcher
CAP = 30.0  # seconds after which something counts as never
STEPS = 10  # before a kill: what follows a start has ended by then
COMMAND = ["--standalone", "--nproc-per-node=1", f"--max-restarts={max(KILLS)}", str(WORKER)]
KERNEL = f"import torch; torch.ones(1 << 20, device={DEVICE!r}).sum().item()"  # reads CUDA's libraries


@dataclass
class Times:
    """Seconds to the first kernel under one launcher. ``missing``: how often it did not come."""

    starts: list[float] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    missing: int = 0


def measure(launcher: Launcher, kills: int, times: Times) -> None:
    """Run a job from its command to its last kill, and add the times. What does not come up ends the job."""
    with Bench(launcher) as bench:
        since = time.monotonic()
        bench.agent("1", COMMAND, env={"BENCH_DEVICE": DEVICE, "PET_SET": "restart-pause=0"})
        if (at := bench.first_step(1, since, CAP)) is None:
            return missed(bench, times, "start")
        note(launcher, "start", times.starts, at - since)
        for _ in range(kills):
            if not bench.wait(partial(has_stepped, bench, since), CAP):
                return missed(bench, times, "steps")
            since = time.monotonic()
            bench.kill_workers(lambda _: True)
            if (at := bench.first_step(1, since, CAP)) is None:
                return missed(bench, times, "kill")
            note(launcher, "kill", times.kills, at - since)


def has_stepped(bench: Bench, since: float) -> bool:
    """Return whether a worker that has started since then has made the steps that precede a kill."""
    return bench.world(1, since, STEPS) is not None


def note(launcher: Launcher, what: str, values: list[float], value: float) -> None:
    values.append(value)
    print(f"{what}, {launcher.name}: {value:.2f} s", flush=True)


def missed(bench: Bench, times: Times, what: str) -> None:
    times.missing += 1
    print(f"{what}, {bench.launcher.name}: not within {CAP:g} s\n{bench.tails()}", flush=True)


def tell(claim: str, found: dict[Launcher, list[float]]) -> None:
    """Print the figure: the median of each launcher, and every value behind it."""
    texts = [f"{NAMES[launcher]} {seconds(values)}" for launcher, values in found.items()]
    medians = {launcher.name.split()[-1]: median(values) for launcher, values in found.items() if values}
    count = max(map(len, found.values()))
    figure(
        claim,
        f"{', '.join(texts)} s; medians of {count} (all)",
        **{f"{name}_s": round(value, 3) for name, value in medians.items()},
    )


def holds(times: dict[Launcher, Times]) -> bool:
    """Return whether each start and kill of ours came up, and torchrun has a time of both kinds beside them."""
    ours = times[ELASTIRUN].missing + times[EXECUTED].missing == 0
    return ours and bool(times[TORCHRUN].starts and times[TORCHRUN].kills)


def main() -> int:
    if not HERE and not DRY:
        print(NO_GPU)
        return 1
    subprocess.run([sys.executable, "-c", f"{WARM_UP}\n{KERNEL}"], cwd=ROOT, check=True)
    times = {launcher: Times() for launcher in LAUNCHERS}
    for turn, kills in enumerate(KILLS):
        for launcher in LAUNCHERS if turn % 2 == 0 else LAUNCHERS[::-1]:
            measure(launcher, kills, times[launcher])
        tell("kill-first-kernel", {launcher: one.kills for launcher, one in times.items()})
        tell("start-first-kernel", {launcher: one.starts for launcher, one in times.items()})
    return int(not holds(times))


if __name__ == "__main__":
    sys.exit(main())
