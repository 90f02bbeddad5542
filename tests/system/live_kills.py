"""Kill workers of a live job at random moments: the others keep their processes, and no step and no sample is lost or doubled.

    python -m tests.system.live_kills --kills 200 [--nodes 3] [--nproc 1] [--preload torch] [--transport group] [--device cuda]

With several nodes, an agent is killed together with its worker, and another one takes its place later; with one node, one of its workers.
Prints, in milliseconds, how long it took from the kill to the next step that every survivor has made. With ``--storm`` workers of one node
are killed without a wait for the end of the last change, new ones too; all but one, so that the state is not lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastirun.agent.processes import proc
from tests.support import live_log
from tests.support.cluster import PATIENCE, free_port
from tests.support.figures import figure
from tests.support.until import until

WORKER = Path(__file__).parents[1] / "support" / "live_worker.py"
SAMPLES, BATCH = 6000, 60


@dataclass
class Job:
    """A live job on one or several agents of this machine."""

    folder: Path
    nodes: int
    nproc: int
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # workers of a node that has another number than ``nproc``
    hosts: int = 1  # nodes at whose addresses the store is looked for, the first one hosts it
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by node, from 1
    port: int = field(default_factory=free_port)
    known: list[live_log.Line] = field(default_factory=list)  # the lines of the log that were read
    read: int = 0  # bytes of it

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self, node: int) -> None:
        """Start the agent of a node."""
        given = {"TEST_LOG": str(self.log), "TEST_SAMPLES": str(SAMPLES), "TEST_BATCH": str(BATCH), "TEST_EPOCHS": "1000000"}
        env = {**os.environ, "TMPDIR": str(self.folder), "PET_SET": "restart-pause=0", "OMP_NUM_THREADS": "1", **given, **self.env}
        nproc = self.slots.get(node, self.nproc)
        line = [sys.executable, "-m", "elastirun", f"--nproc-per-node={nproc}", "--max-restarts=100000", *self.options]
        if self.nodes > 1:
            endpoint = ",".join(f"127.0.0.{host}:{self.port}" for host in range(1, self.hosts + 1))
            line += [f"--nnodes=1:{self.nodes}", "--rdzv-id=live", f"--rdzv-endpoint={endpoint}", "--last-call=30"]
            line += [f"--local-addr=127.0.0.{node}", f"--rdzv-conf=is_host={int(node == 1)}"]
        with open(self.folder / f"agent{node}.out", "ab") as out:
            command = [*line, str(WORKER)]
            self.agents[node] = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=Path(__file__).parents[2])

    def lines(self) -> list[live_log.Line]:
        """Return the log so far."""
        more, self.read = live_log.read(self.log, self.read)
        self.known += more
        return self.known

    def wait(self, condition: Callable[[list[live_log.Line]], bool], limit: float = 2 * PATIENCE) -> list[live_log.Line]:
        """Wait until the log fulfils ``condition``; return it."""
        until(lambda: condition(self.lines()), "the log", limit, state=lambda: f"its end: {self.known[-5:]}\n{self.said()}", pause=0.01)
        return self.known

    def world(self, size: int, after: int = 0) -> list[live_log.Line]:
        """Wait until a round after round ``after`` with ``size`` workers has made a step; return its workers by rank."""

        def trains(lines: list[live_log.Line]) -> bool:
            here, made = live_log.newest_round(lines)
            return bool(here) and here[0]["round"] > after and len(here) == size and made >= {line["pid"] for line in here}

        here, _ = live_log.newest_round(self.wait(trains))
        return sorted(here, key=lambda line: int(line["rank"]))

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-9000:]}" for path in sorted(self.folder.glob("agent*.out")))

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
        for agent in self.agents.values():
            agent.wait()


@contextmanager
def job(
    folder: Path, nodes: int = 1, nproc: int = 1, *options: str, slots: dict[int, int] | None = None, hosts: int = 1, **env: str
) -> Iterator[Job]:
    made = Job(folder, nodes, nproc, options, env, slots or {}, hosts)
    try:
        for node in range(1, nodes + 1):
            made.start(node)
        yield made
    finally:
        made.close()


def next_step(lines: list[live_log.Line], after: int, survivors: set[int], killed_at: float) -> float:
    """Return the seconds from the kill to the moment at which every survivor had made a step in a round after round ``after``."""
    made = [line for line in live_log.of(lines, "made") if line["round"] > after and line["pid"] in survivors]
    return max(min(line["at"] for line in made if line["pid"] == pid) for pid in survivors) - killed_at


def kill_worker(running: Job, rng: random.Random) -> float:
    """Kill a worker of the only node; the others go on together with a new one. Returns how long that took, in seconds."""
    before = running.world(running.nproc)
    victim = rng.choice(before)["pid"]
    time.sleep(rng.uniform(0.02, 0.3))
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    after = running.world(running.nproc, before[0]["round"])
    survivors = {line["pid"] for line in before} - {victim}
    assert survivors < {line["pid"] for line in after}, f"{survivors} did not all go on: {after}\n{running.said()}"
    return next_step(running.lines(), before[0]["round"], survivors, killed_at)


def kill_agent(running: Job, rng: random.Random) -> float:
    """Kill an agent and its worker; the others go on, then another agent comes. Returns how long the first took, in seconds."""
    before = running.world(running.nodes)
    node = rng.choice([node for node in running.agents if node != 1])  # the store stays where it is
    time.sleep(rng.uniform(0.02, 0.3))
    killed_at = time.monotonic()
    [victim] = kill_agent_and_workers(running, node)
    fewer = running.world(running.nodes - 1, before[0]["round"])
    survivors = {line["pid"] for line in before} - {victim}
    assert survivors == {line["pid"] for line in fewer}, f"{survivors} did not all go on: {fewer}\n{running.said()}"
    took = next_step(running.lines(), before[0]["round"], survivors, killed_at)
    running.start(node)
    again = running.world(running.nodes, fewer[0]["round"])
    assert survivors < {line["pid"] for line in again}, f"{survivors} did not all go on: {again}\n{running.said()}"
    return took


def kill_agent_and_workers(running: Job, node: int) -> list[int]:
    """Kill an agent and its workers, at a moment. Return the workers' pids."""
    workers = [pid for pid in children(running.agents[node].pid) if is_worker(pid)]
    for pid in (running.agents[node].pid, *workers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    running.agents.pop(node).wait()
    return workers


def storm(running: Job, rng: random.Random, kills: int) -> list[float]:
    """Kill workers whatever the others are at. Returns how long it took after the last kill until all trained, in seconds."""
    spared = running.world(running.nproc)[0]["pid"]
    for _ in range(kills):
        time.sleep(rng.choice([rng.uniform(0.0, 0.4), rng.uniform(0.0, 2.0)]))
        others = [pid for pid in children(running.agents[1].pid) if pid != spared and is_worker(pid)]
        if others:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(others), signal.SIGKILL)
    killed_at = time.monotonic()

    def all_train(lines: list[live_log.Line]) -> bool:
        here, _ = live_log.newest_round(lines)
        made = {line["pid"] for line in live_log.of(lines[-1000:], "made") if line["at"] > killed_at + 1.0}
        return len(here) == running.nproc and made >= {line["pid"] for line in here}

    here, _ = live_log.newest_round(running.wait(all_train))
    assert spared in {line["pid"] for line in here}, f"{spared} did not go on: {here}\n{running.said()}"
    return [next_step([line for line in running.lines() if line["at"] > killed_at], 0, {spared}, killed_at)]


def is_worker(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return WORKER.name.encode() in line and b"forkserver" not in line


def children(pid: int) -> set[int]:
    return set(proc.children(pid))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--preload", default="")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--device", default="cpu", help="cuda: all share one GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storm", action="store_true")
    parser.add_argument("--claim", help="print the figure for this claim of tests/gpu/parts.py, too")
    args = parser.parse_args()
    rng, options = random.Random(args.seed), [f"--preload={args.preload}"] * bool(args.preload)
    nproc = args.nproc if args.nodes == 1 else 1
    given = {"TEST_TRANSPORT": args.transport, "TEST_DEVICE": args.device}
    with tempfile.TemporaryDirectory(prefix="live-kills-") as folder:
        with job(Path(folder), args.nodes, nproc, *options, TEST_PAUSE="0.005", **given) as running:
            if args.storm:
                took = storm(running, rng, args.kills)
            else:
                took = [(kill_worker if args.nodes == 1 else kill_agent)(running, rng) for _ in range(args.kills)]
        lines, _ = live_log.read(Path(folder, "log"))
    wrong = live_log.violations(lines, SAMPLES)
    print(f"{args.kills} kills, {len(live_log.steps(lines))} steps, {len(wrong)} violations; ms from the kill to the survivors' next step:")
    best, median, worst = (1e3 * seconds for seconds in (min(took), statistics.median(took), max(took)))
    print(f"  best {best:.0f}  median {median:.0f}  worst {worst:.0f}")
    if args.claim:
        text = f"{median:.0f} ms ({best:.0f} to {worst:.0f}, {args.kills} kills), {len(wrong)} steps or samples lost or doubled"
        figure(args.claim, text, median_ms=median, worst_ms=worst, violations=len(wrong))
    for line in wrong[:20]:
        print(f"  {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
