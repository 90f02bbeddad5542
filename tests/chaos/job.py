"""One job on a network that is broken on purpose: its agents, who restarts them, and what they and their workers have written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.network import Network
from tests.support.etcd_server import alone

ROOT = Path(__file__).resolve().parent.parent.parent
RESTART_AFTER = 0.3  # seconds until the supervisor starts an agent that has ended again
FRESH = 1.0  # seconds; a worker writes every 0.05, and one that has written within this time is alive
# A line every 0.05 s for as long as it lives. Every other rank takes its time to stop, as one that writes a checkpoint.
WORKER = """
import os, signal, sys, time
e = os.environ
rank, until = e["RANK"], [float("inf")]
signal.signal(signal.SIGTERM, lambda *_: until.__setitem__(0, time.monotonic() + 0.4 * (int(rank) % 2)))
name = "_".join([e["ELASTIRUN_FENCE"].replace(":", "_"), rank, e["WORLD_SIZE"], e["CHAOS_AGENT"], str(os.getpid())])
with open(os.path.join(e["CHAOS_TICKS"], name), "a", buffering=1) as file:
    while time.monotonic() < until[0]:
        file.write(f"{e['ELASTIRUN_ROUND']} {rank} {os.getpid()} {time.monotonic()}\\n")
        time.sleep(0.05)
"""
# The same as a live worker: it is parked between rounds, and goes on in the next one.
LIVE_WORKER = """
import os, signal, sys, time
from elastirun.worker.live_connection import LiveConnection
e = os.environ
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
live, number = LiveConnection(), 0
while True:
    number, changed = live.enter(number, 1e6)
    e.update(changed)
    name = "_".join([e["ELASTIRUN_FENCE"].replace(":", "_"), e["RANK"], e["WORLD_SIZE"], e["CHAOS_AGENT"], str(os.getpid())])
    with open(os.path.join(e["CHAOS_TICKS"], name), "a", buffering=1) as file:
        while not live.asked:
            file.write(f"{number} {e['RANK']} {os.getpid()} {time.monotonic()}\\n")
            time.sleep(0.05)
    live.leave(1, number)
"""


@dataclass(frozen=True)
class Terms:
    """What the job is started with; seconds."""

    expire: float = 3.0
    store_grace: float = 15.0
    most: int = 3  # nodes in a round; who is more is a spare
    etcd: bool = False  # they meet at an etcd on a host of its own, to which nothing is done
    succession: str = "off"  # proof, majority: another node takes over the store when its host is gone
    live: bool = False  # workers are parked between rounds, so that newcomers are not held (docs/decisions/0011)


@dataclass
class Agent:
    """One incarnation of the agent of a node."""

    name: str  # h1-0, h1-1, ...
    process: subprocess.Popen[bytes]
    folder: Path
    started: float
    sent: set[int] = field(default_factory=set)  # the signals that were sent to it on purpose
    ended: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    @property
    def node(self) -> int:
        return int(self.name[1:].partition("-")[0])

    def read(self) -> list[dict[str, Any]]:
        """Its events so far."""
        for path in self.folder.glob("*/events.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            self._offset += len(whole) + 1 if whole else 0
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events

    def send(self, signum: signal.Signals) -> None:
        if self.process.poll() is None:
            self.sent.add(signum)
            self.process.send_signal(signum)


@dataclass(frozen=True)
class Ticks:
    """The file of one worker."""

    path: Path
    store: str
    round: int
    rank: int
    world: int
    agent: str

    @classmethod
    def of(cls, path: Path) -> Ticks:
        store, number, rank, world, agent, _ = path.name.rsplit("_", 5)
        return cls(path, store, int(number), int(rank), int(world), agent)

    def times(self) -> list[float]:
        return [float(line.split()[3]) for line in self.path.read_text().splitlines() if line.count(" ") == 3]

    def last(self) -> float:
        with open(self.path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200))
            lines = file.read().splitlines()
        return float(lines[-1].split()[3]) if lines and lines[-1].count(b" ") == 3 else 0.0


class Job:
    """``nodes`` agents, node ``i`` on host ``i``; host 0 has the endpoint, or one more host an etcd. ``folder`` keeps everything."""

    def __init__(self, folder: Path, nodes: int, terms: Terms, seed: int = 0) -> None:
        self.folder, self.terms = folder, terms
        self.ticks, self.temporary = folder / "ticks", folder / "tmp"
        self.ticks.mkdir()
        self.temporary.mkdir()
        self.script = folder / "worker.py"
        self.script.write_text(LIVE_WORKER if terms.live else WORKER)
        self.all: list[Agent] = []  # every incarnation there ever was
        self.stopping = False
        self._files: dict[str, Ticks] = {}
        self._old: set[str] = set()  # those that have not been written to for long
        self.network = Network(nodes + terms.etcd, folder, seed)
        self.where = ["--rdzv-endpoint=" + ",".join(f"h{i}:29400" for i in range(1 if terms.succession == "off" else min(3, nodes)))]
        self.etcd: subprocess.Popen[bytes] | None = None
        if terms.etcd:
            self.where = ["--rdzv-backend=etcd", f"--rdzv-endpoint=h{nodes}:2379"]
            command = self.network[nodes].inside(*alone(folder, "http://0.0.0.0:2379"))
            self.etcd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.agents = [self._launch(i) for i in range(nodes)]

    def tend(self) -> None:
        """What a supervisor does: whoever ended is started again."""
        now = time.monotonic()
        for i, agent in enumerate(self.agents):
            if agent.process.poll() is None:
                continue
            agent.ended = agent.ended or now
            if now >= agent.ended + RESTART_AFTER and not self.stopping:
                self.agents[i] = self._launch(i)

    def alive(self) -> list[tuple[Ticks, float]]:
        """The workers that have just written, and when."""
        now = time.monotonic()
        for path in self.ticks.iterdir():
            if path.name not in self._files and path.name not in self._old:
                self._files[path.name] = Ticks.of(path)
        last = [(ticks, ticks.last()) for ticks in self._files.values()]
        for ticks, when in last:
            if when and when < now - 60:
                self._old.add(ticks.path.name)
                del self._files[ticks.path.name]
        return [(ticks, when) for ticks, when in last if when > now - FRESH]

    def unsettled(self, since: float) -> str:
        """Why not every node that is up takes part in one newest round, or knows of it as a spare; empty when all do.

        ``since``: only what workers wrote after that time counts.
        """
        alive = self.alive()
        rounds = sorted({(t.store, t.round) for t, _ in alive})
        if len(rounds) != 1:
            return f"workers of {[number for _, number in rounds]} run"
        if old := [t.rank for t, when in alive if when < since]:
            return f"nothing new of ranks {old}"
        wanted = min(self.terms.most, len(self.agents))
        ranks = sorted(t.rank for t, _ in alive)
        if ranks != list(range(wanted)) or any(t.world != wanted for t, _ in alive):
            return f"ranks {ranks} of {[t.world for t, _ in alive]} run"
        up = {a.name for a in self.agents if a.process.poll() is None}
        if len(up) < len(self.agents) or not {t.agent for t, _ in alive} <= up:
            return "an agent has just ended"
        number = rounds[0][1]
        for agent in self.agents:
            told = [e for e in agent.read() if e["event"] in ("formed", "broken", "closed")]
            if not told or told[-1]["event"] != "formed" or told[-1]["round"] != number:
                return f"{agent.name} does not know of round {number}: {told[-1:]}"
        return ""

    def hold(self, since: Mapping[str, int] | None = None) -> float:
        """Return the seconds that newcomers have to wait after many early losses, as agents have said last.

        See docs/decisions/0011. ``since``: an earlier ``written()``; what agents have said before does not count.
        They repeat it every 10 s.
        """
        texts = [self.output(agent)[(since or {}).get(agent.name, 0) :] for agent in self.agents]
        said = [re.findall(r"newcomers are taken in after (\d+) s", text) for text in texts]
        return max((float(seconds[-1]) for seconds in said if seconds), default=0.0)

    def written(self) -> dict[str, int]:
        """Return how many characters each agent has written so far."""
        return {agent.name: len(self.output(agent)) for agent in self.agents}

    def stop_etcd(self) -> None:
        if self.etcd is not None:
            self.etcd.kill()
            self.etcd.wait()

    def close(self) -> None:
        self.stop_etcd()
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait()
        self.network.close()

    def output(self, agent: Agent) -> str:
        return (self.folder / f"{agent.name}.out").read_text(errors="replace")

    def _launch(self, i: int) -> Agent:
        name = f"h{i}-{sum(agent.node == i for agent in self.all)}"
        logs = self.folder / f"{name}.logs"
        terms = self.terms
        options = [f"--nnodes=1:{terms.most}", *self.where, "--rdzv-id=chaos", "--max-restarts=100000", "--set=restart-pause=0"]
        options += [f"--expire={terms.expire:g}", f"--store-grace={terms.store_grace:g}", "--last-call=1", f"--log-dir={logs}"]
        options += [f"--store-succession={terms.succession}"]
        command = self.network[i].inside(sys.executable, "-m", "elastirun", *options, str(self.script))
        env = {**os.environ, "CHAOS_AGENT": name, "CHAOS_TICKS": str(self.ticks), "TMPDIR": str(self.temporary)}
        with open(self.folder / f"{name}.out", "ab") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT)
        agent = Agent(name, process, logs, time.monotonic())
        self.all.append(agent)
        return agent
