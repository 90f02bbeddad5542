"""Change the world of a live job a thousand times, and watch what the processes that stay hold: memory, descriptors, threads.

    python -m tests.system.live_switches --switches 1000 [--every 100] [--nproc 3] [--preload torch] [--transport group]

One worker of the only node is killed again and again, and a new one is taken in: two changes of the world for each kill. The other workers
and the agent stay. Prints what each of them holds after so many changes, and by how much it grew from the first time to the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

from tests.support import live_log
from tests.system.live_kills import SAMPLES, Job, job


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    kib: int  # resident memory of its own: not that of files
    shared_kib: int  # resident shared memory
    descriptors: int
    threads: int
    mappings: int

    def __sub__(self, other: Held) -> Held:
        return Held(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))


def held(pid: int) -> Held:
    """Return what process ``pid`` holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous, shared = (int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    mappings = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    return Held(anonymous, shared, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), mappings)


def switch(running: Job, rng: random.Random, kept: set[int]) -> set[int]:
    """Kill a worker that is not among ``kept``, and wait until a new one has been taken in. Return the pids of the workers that stay."""
    before = running.world(running.nproc)
    kept = kept or {line["pid"] for line in before[: running.nproc - 1]}
    os.kill(rng.choice([line["pid"] for line in before if line["pid"] not in kept]), signal.SIGKILL)
    after = {line["pid"] for line in running.world(running.nproc, before[0]["round"])}
    assert kept < after, f"{kept} did not all go on: {after}\n{running.said()}"
    return kept


def changes(running: Job, pid: int) -> int:
    """Return how many worlds process ``pid`` has been in, after its first."""
    return sum(line["pid"] == pid for line in live_log.of(running.lines(), "world")) - 1


def watch(running: Job, rng: random.Random, switches: int, every: int) -> list[tuple[int, dict[str, Held]]]:
    """Change the world until ``switches`` is reached. Return what the processes held after each ``every`` changes, by their names."""
    kept: set[int] = set()
    seen: list[tuple[int, dict[str, Held]]] = []
    while not seen or seen[-1][0] < switches:
        kept = switch(running, rng, kept)
        first, *_ = sorted(kept)
        if (count := changes(running, first)) >= (len(seen) + 1) * every or count >= switches:
            named = {"agent": running.agents[1].pid, **{f"worker {at}": pid for at, pid in enumerate(sorted(kept))}}
            seen.append((count, {name: held(pid) for name, pid in named.items()}))
            print(f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}", *seen[-1], flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--switches", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="changes of the world from one line to the next")
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--preload", default="torch")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = [f"--preload={args.preload}"] * bool(args.preload)
    with tempfile.TemporaryDirectory(prefix="live-switches-") as folder:
        with job(Path(folder), 1, args.nproc, *options, TEST_PAUSE="0.005", TEST_TRANSPORT=args.transport) as running:
            seen = watch(running, random.Random(args.seed), args.switches, args.every)
        lines, _ = live_log.read(Path(folder, "log"))
    wrong = live_log.violations(lines, SAMPLES)
    (first, before), (last, after) = seen[0], seen[-1]
    print(f"{last} changes of the world, {len(wrong)} violations; grown since change {first}:")
    for name in after:
        print(f"  {name}: {after[name] - before[name]}")
    for line in wrong[:20]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
