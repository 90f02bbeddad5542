"""Train for minutes while workers are killed and nodes come and go: the share of time in steps that count (ETTR), and the loss.

    python -m tests.system.live_ettr --minutes 10 [--every 10] [--step 0.05] [--seed 0] [--preload torch]

One to three agents with one to four workers in all; every 10 seconds a worker is killed, an agent is killed with its workers, or an agent
comes, as a random number says. The agent that hosts the store stays, and so does one of its workers. See tests/support/live_time.py for
what counts as lost. The loss of each step is compared with that of a run in one process that nothing disturbs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import live_log, live_time
from tests.system.live_kills import BATCH, SAMPLES, WORKER, Job, children, is_worker, job, kill_agent_and_workers

SEED = "1"  # of the first parameters
NODES, FIRST = 3, 2  # agents at most; workers of the first one. The others have one each


def events(running: Job, rng: random.Random, seconds: float, every: float) -> Counter[str]:
    """Disturb the job each ``every`` seconds, for ``seconds``. Return how often what was done."""
    done: Counter[str] = Counter()
    end, due = time.monotonic() + seconds, time.monotonic() + every
    while due < end:
        time.sleep(max(0.0, due - time.monotonic()))
        due += every
        done[event(running, rng)] += 1
    time.sleep(max(0.0, end - time.monotonic()))
    return done


def event(running: Job, rng: random.Random) -> str:
    """Kill a worker or an agent, or start an agent. Return which."""
    absent = [node for node in range(2, NODES + 1) if node not in running.agents]
    others = [node for node in running.agents if node != 1]
    what = rng.choice(["worker", *["join"] * bool(absent), *["agent"] * bool(others)])
    if what == "join":
        running.start(rng.choice(absent))
    elif what == "agent":
        kill_agent_and_workers(running, rng.choice(others))
    else:
        spared = min(workers(running, 1))
        os.kill(rng.choice([pid for node in running.agents for pid in workers(running, node) if pid != spared]), signal.SIGKILL)
    return what


def workers(running: Job, node: int) -> list[int]:
    """Return the workers of a node, by age."""
    return sorted(pid for pid in children(running.agents[node].pid) if is_worker(pid))


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Train in one process, without a launcher, for so many steps. Return the loss of each."""
    given = {"TEST_LOG": str(folder / "alone"), "TEST_SAMPLES": str(SAMPLES), "TEST_BATCH": str(BATCH), "TEST_EPOCHS": "1000000"}
    env = {**os.environ, **given, "TEST_SEED": SEED, "ELASTIRUN_ROUND": "1", "ELASTIRUN_WORLD": "0"}
    lines: list[live_log.Line] = []
    at = 0
    with subprocess.Popen([sys.executable, str(WORKER)], env=env) as process:
        while process.poll() is None and (not lines or lines[-1].get("step", 0) <= steps):
            more, at = live_log.read(folder / "alone", at)
            lines += more
            time.sleep(0.1)
        process.kill()
    return live_time.losses(lines, BATCH)


@contextmanager
def several(folder: Path, *options: str, **env: str) -> Iterator[Job]:
    """A job of ``NODES`` agents, of which the first one has ``FIRST`` workers."""
    with job(folder, NODES, 1, *options, slots={1: FIRST}, **env) as running:
        running.world(NODES - 1 + FIRST)
        yield running


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one event to the next")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step that its ranks sleep")
    parser.add_argument("--preload", default="torch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = [f"--preload={args.preload}"] * bool(args.preload)
    with tempfile.TemporaryDirectory(prefix="live-ettr-") as folder:
        with several(Path(folder), *options, TEST_PAUSE=str(args.step), TEST_SEED=SEED) as running:
            begun, load = time.monotonic(), os.getloadavg()[0]
            done = events(running, random.Random(args.seed), 60 * args.minutes, args.every)
            ended = time.monotonic()
        lines, _ = live_log.read(Path(folder, "log"))
        here = live_time.losses(lines, BATCH)
        alone = undisturbed(Path(folder), max(here))
    wrong = live_log.violations(lines, SAMPLES)
    print(f"{ended - begun:.0f} s, {dict(done)}, {len(live_log.steps(lines))} steps, {len(wrong)} violations", end="")
    print(f"; load {load:.1f} to {os.getloadavg()[0]:.1f}")
    print(live_time.report(lines, begun, ended))
    differs = [abs(loss - alone[step]) for step, loss in sorted(here.items())]
    print(f"  loss {here[max(here)]:.6f} at the end, {differs[-1]:.1e} from that of an undisturbed run; {max(differs):.1e} at most")
    for line in wrong[:20]:
        print(f"  {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
