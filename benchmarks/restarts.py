"""Kills a worker with SIGKILL again and again, and counts the restarts that come up.

    python -m benchmarks.restarts [--kills 100] [--launcher elastirun] [--delay 4] [--seed 0]

Two agents with two gloo workers each. The workers enter ``init_process_group`` up to ``--delay`` seconds apart, with other delays each
time, as when each worker loads its data first. After a few successful all-reduces one of the four, chosen at random, is killed. A restart
has come up when all four have completed all-reduces again, and "at once" when each node started only one set of workers for it.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from benchmarks.lab import LAUNCHERS, WORKER, Bench, Launcher, Worker, machine, meeting, seconds, shown, table

WORLD = 4
GOOD_STEPS = 3
TIMEOUT = 20.0  # seconds, of the process group: a start that went wrong then ends by itself


@dataclass(frozen=True)
class Restart:
    """The outcome of one kill.

    ``took``: seconds from the kill to the first step of all four; None: never. ``attempts``: most sets of workers that a node started.
    """

    took: float | None
    attempts: int
    at_once: bool


def arguments(node: int, port: int | str, kills: int) -> list[str]:
    return ["--nnodes=2", "--nproc-per-node=2", f"--max-restarts={kills}", *meeting(node, port), str(WORKER)]


def begin(bench: Bench, kills: int, delay: float, seed: int) -> list[Worker]:
    """Start both agents and wait for ``GOOD_STEPS`` of all four workers. Raises SystemExit when they do not come."""
    env = {"BENCH_DELAY": str(delay), "BENCH_SEED": str(seed), "BENCH_TIMEOUT": str(TIMEOUT), "PET_SET": "restart-pause=0"}
    for node in (1, 2):
        bench.agent(str(node), arguments(node, bench.port, kills), env=env)
    if not bench.wait(lambda: bench.world(WORLD, steps=GOOD_STEPS) is not None, 180.0):
        raise SystemExit(f"{bench.launcher.name}: the first start did not come up\n{bench.tails()}")
    return bench.world(WORLD, steps=GOOD_STEPS) or []


def kill_one(bench: Bench, victim: Worker, cap: float) -> Restart:
    """Kill the worker, and wait for ``GOOD_STEPS`` of all four new ones."""
    since = time.monotonic()
    bench.kill_workers(lambda w: w is victim)
    came = bench.wait(lambda: bench.world(WORLD, since, GOOD_STEPS) is not None, cap)
    sets = {node: sum(w.started > since and w.node == node for w in bench.workers) / 2 for node in ("1", "2")}
    up = bench.world(WORLD, since, GOOD_STEPS) if came else None
    took = max(w.first_step or 0.0 for w in up) - since if up else None
    return Restart(took, round(max(sets.values()) + 0.4), up is not None and set(sets.values()) == {1.0})


def kill_in_a_row(launcher: Launcher, kills: int, delay: float, seed: int, cap: float, tell: bool = False) -> list[Restart]:
    """Return the outcome of each kill. A job that did not come back within ``cap`` seconds is started anew for the next kill."""
    chance = random.Random(seed)
    restarts: list[Restart] = []
    while len(restarts) < kills:
        with Bench(launcher) as bench:
            begin(bench, kills, delay, seed + len(restarts))
            while len(restarts) < kills:
                restart = kill_one(bench, chance.choice(bench.world(WORLD) or []), cap)
                restarts.append(restart)
                if tell:
                    took = f"not within {cap:g} s" if restart.took is None else f"{restart.took:.2f} s"
                    print(f"kill {len(restarts)}: {took}, sets of workers {restart.attempts}, at once: {restart.at_once}", flush=True)
                if restart.took is None:
                    if tell:
                        print(bench.tails(), flush=True)
                    break
    return restarts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="elastirun")
    parser.add_argument("--delay", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=90.0, help="seconds after which a restart counts as failed for good")
    chosen = parser.parse_args()
    launcher = LAUNCHERS[chosen.launcher]
    print(machine(), flush=True)
    print("    " + shown(launcher, arguments(1, "PORT", chosen.kills)) + "\n", flush=True)
    found = kill_in_a_row(launcher, chosen.kills, chosen.delay, chosen.seed, chosen.cap, tell=True)
    took = [r.took for r in found if r.took is not None]
    head = ["launcher", "kills", "came up at once", "came up at all", "seconds to the first step: median", "slowest"]
    counts = [str(len(found)), str(sum(r.at_once for r in found)), str(len(took))]
    print("\n" + table([head, [launcher.name, *counts, seconds(took).split(" ")[0], f"{max(took):.2f}" if took else "-"]]))


if __name__ == "__main__":
    main()
