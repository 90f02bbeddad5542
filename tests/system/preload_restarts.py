"""Restart a job with ``--preload`` again and again in one run: each round comes up, and neither the agent nor its fork server grows.

Usage:

    python -m tests.system.preload_restarts --restarts 1000 [--modules torch]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from elastirun.agent.processes import proc
from tests.support.cluster import PATIENCE, Cluster, cluster
from tests.support.tries import unless
from tests.support.until import poll
from tests.system.preload_kills import TAG, everything, role

# Fails at once or after 20 ms, on one rank or both. In each round that is a multiple of TEST_EVERY it waits until the test has looked.
SCRIPT = """
import os, random, sys, time
number, rank = int(os.environ["ELASTIRUN_ROUND"]), int(os.environ["RANK"])
drawn = [random.random()]
if "torch" in sys.modules:
    import numpy, torch
    drawn += [torch.rand(1, dtype=torch.float64).item(), numpy.random.rand()]
outermost = sys._getframe()
while outermost.f_back:
    outermost = outermost.f_back
forked = outermost.f_code.co_filename.endswith("forkserver.py")
line = f"{number} {rank} {forked} {' '.join(map(str, drawn))}\\n"
with open(os.environ["TEST_OUT"], "ab", buffering=0) as out:
    out.write(line.encode())
if number % int(os.environ["TEST_EVERY"]) == 0:
    exec(open(os.environ["TEST_WAIT"]).read())
if number % 3 or rank:
    time.sleep(0.02 * (number % 2))
    sys.exit(1)
time.sleep(1000)
"""
PARTS = ("agent", "guard", "server", "parked fork", "worker")
WORKERS = 2
SLACK = 4 << 10  # KiB of memory that a process may have more at the end: Python's allocator keeps what it has got


@dataclass(frozen=True)
class Sample:
    """The processes of the job while the workers of a round wait."""

    round: int
    processes: dict[str, int]  # how many there are of each kind
    descriptors: dict[str, int]  # of the agent, the guard and the fork server
    threads: int  # of the agent
    memory: dict[str, int]  # KiB that each of the three shares with no file

    @property
    def counts(self) -> tuple[dict[str, int], dict[str, int], int]:
        """What must be the same in each sample."""
        return self.processes, self.descriptors, self.threads


def status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def look(number: int, tag: str, agent: int) -> Sample:
    """Wait until all forks are parked, then look."""

    def kinds() -> Counter[str]:
        return Counter(role(process, agent) for process in everything(tag))

    def parked() -> bool:
        forking = any(proc.children(process.pid) for process in everything(tag) if role(process, agent) == "server")
        return not forking and kinds() == {**dict.fromkeys(PARTS, 1), "worker": WORKERS, "parked fork": WORKERS}

    poll(parked)
    pids = {role(process, agent): process.pid for process in everything(tag)}
    three = {name: pids[name] for name in ("agent", "guard", "server") if name in pids}
    return Sample(
        number,
        dict(sorted(kinds().items())),
        {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in three.items()},
        status(agent, "Threads"),
        {name: status(pid, "RssAnon") for name, pid in three.items()},
    )


def restart(nodes: Cluster, restarts: int, modules: str, every: int) -> tuple[list[str], list[Sample]]:
    """Run a job that restarts so often. Returns what was wrong, and the samples."""
    tag, out, waits = uuid.uuid4().hex, nodes.tmp_path / "rounds", nodes.tmp_path / "waits.py"
    waits.write_text(nodes.script.read_text())  # reports to the test, and does what it says
    nodes.script = nodes.tmp_path / "script.py"
    nodes.script.write_text(SCRIPT)
    nodes.env |= {TAG: tag, "TEST_OUT": str(out), "TEST_EVERY": str(every), "TEST_WAIT": str(waits), "PET_SET": "restart-pause=0"}
    agent = nodes.launch(1, f"--preload={modules}", f"--nproc-per-node={WORKERS}", f"--max-restarts={restarts}", str(nodes.script))
    samples = []
    for number in range(every, restarts + 2, every):
        began = time.monotonic()
        workers = nodes.round(WORKERS, after=number - 1, timeout=PATIENCE + every)  # a second for each round
        samples.append(look(number, tag, agent.pid))
        print(f"{time.monotonic() - began:.1f} s {samples[-1]}", flush=True)
        for worker in workers:
            worker.tell("go on")
    code = nodes.ends(agent)
    lines = [line.split() for line in out.read_text().splitlines()]
    rounds = Counter(int(line[0]) for line in lines)  # a worker may be stopped before its first line when another has failed
    missing = {number + 1 for number in range(restarts + 1)} - rounds.keys()
    drawn = [value for line in lines for value in line[3:]]
    executed = sum(line[2] != "True" for line in lines)
    twice = len(drawn) - len(set(drawn))
    print(f"{len(lines)} workers, {executed} of them executed; {len(drawn)} numbers, {twice} drawn twice; exit code {code}")
    settled = samples[1:]  # the agent has its threads and its store from the first rounds on
    growth = {name: settled[-1].memory[name] - settled[0].memory[name] for name in settled[0].memory}
    wrong = unless(
        (not missing, f"rounds without a worker: {sorted(missing)}"),
        (twice == 0, "the same number was drawn twice"),
        (executed == 0, f"{executed} workers were executed"),
        (all(one.counts == settled[0].counts for one in settled), "descriptors, threads or processes differ"),
        (max(growth.values()) < SLACK, f"memory has grown, in KiB: {growth}"),
        (code == 1, f"exit code {code}"),
        (poll(lambda: not everything(tag)), f"left: {everything(tag)}"),
    )
    return wrong, samples


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--restarts", type=int, default=200)
    arguments.add_argument("--modules", default="json")
    arguments.add_argument("--every", type=int, default=0, help="rounds between two looks; default: a tenth of the restarts")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="preload-restarts-") as folder, cluster(Path(folder)) as nodes:
        wrong, _ = restart(nodes, options.restarts, options.modules, options.every or max(1, options.restarts // 10))
        if wrong:
            raise SystemExit("\n".join([*wrong, nodes.everything()]))


if __name__ == "__main__":
    main()
