"""Code that the benchmarks share: a bench that starts agents of either launcher and collects their workers' reports; medians and tables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import selectors
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastirun import linux
from tests.support.cluster import free_port

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "worker.py"


@dataclass(frozen=True)
class Launcher:
    name: str
    module: str
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", self.module, *self.options, *arguments]


ELASTIRUN = Launcher("elastirun", "elastirun")
EXECUTED = Launcher("elastirun, executed", "elastirun", options=("--preload=off",))
TORCHRUN = Launcher("torchrun", "torch.distributed.run")
UNSHARED = Launcher("torchrun, unshared", "torch.distributed.run", (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),))
WARM = Launcher("elastirun, kept warm", "elastirun", options=("--keep-warm=10m",))
LAUNCHERS = {
    "elastirun-executed": EXECUTED,
    "elastirun": ELASTIRUN,
    "elastirun-warm": WARM,
    "torchrun": TORCHRUN,
    "torchrun-unshared": UNSHARED,
}


@dataclass
class Worker:
    """The reports of one worker. Times are seconds of the monotonic clock."""

    node: str
    pid: int
    rank: int
    world: int
    attempt: str
    started: float
    first_step: float | None = None
    last_step: float | None = None
    steps: int = 0
    ended: float | None = None  # when its process had ended

    @property
    def alive(self) -> bool:
        return self.ended is None


@dataclass
class Agent:
    node: str
    process: subprocess.Popen[bytes]
    ended: float | None = None  # when its process had ended, in seconds of the monotonic clock


@dataclass
class Bench:
    """One job: its agents, and everything that their workers report. ``close`` ends every process and removes every file."""

    launcher: Launcher
    workers: list[Worker] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="elastirun-bench-"))
        if self.launcher is WARM:  # it is for commands with the same environment, so all jobs of a run have one folder, in turn
            self.folder = self.folder.rename(self.folder.parent / f"elastirun-bench-{os.getpid()}")
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{self.folder}/s")
        self._listening.listen(64)
        self._selector.register(self._listening, selectors.EVENT_READ)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- agents -----------------------------------------------------------------------------------------------------

    def agent(self, node: str, arguments: Sequence[str], prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> Agent:
        """Start an agent with ``prefix`` in front of its command. ``output(node)`` returns its output."""
        more = {"BENCH_SOCKET": f"{self.folder}/s", "BENCH_NODE": node, "TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT)}
        with open(self._path(node), "ab") as out:
            process = subprocess.Popen(
                [*prefix, *self.launcher.command(*arguments)],
                env={**os.environ, **more, **dict(self.launcher.env), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
            )
        agent = Agent(node, process)
        self._selector.register(linux.pidfd_open(process.pid), selectors.EVENT_READ, agent)
        self.agents.append(agent)
        return agent

    def kill(self, agent: Agent, workers_too: bool) -> None:
        """Kill the agent with SIGKILL: alone, or with its workers as when the machine dies."""
        agent.process.kill()
        agent.process.wait()
        if workers_too:
            self.kill_workers(lambda w: w.node == agent.node)

    def output(self, node: str) -> str:
        return self._path(node).read_text(errors="replace")

    def tails(self, lines: int = 12) -> str:
        """Return the last lines of every agent's output."""
        nodes = dict.fromkeys(agent.node for agent in self.agents)
        return "\n".join(f"--- node {node}\n" + "\n".join(self.output(node).splitlines()[-lines:]) for node in nodes)

    @property
    def lost(self) -> bool:
        """Whether no agent runs any more."""
        return all(agent.process.poll() is not None for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        self.listen(0.0)
        self.kill_workers(lambda w: True)  # torchrun's workers outlive their agent
        for key in list(self._selector.get_map().values()):
            os.close(key.fileobj) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        while self.folder.exists():
            with suppress(FileNotFoundError):  # the guards of the agents remove their log folders meanwhile
                shutil.rmtree(self.folder)

    def _path(self, node: str) -> Path:
        return self.folder / f"{node}.out"

    def kill_workers(self, which: Callable[[Worker], bool]) -> None:
        for worker in self.workers:
            if worker.alive and which(worker):
                try:
                    os.kill(worker.pid, signal.SIGKILL)  # the worker's connection is open, so the pid still belongs to it
                except ProcessLookupError:
                    pass

    # -- workers ----------------------------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """Tell the workers to end after their next step."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Line):
                key.fileobj.send(b"\n")  # type: ignore[union-attr]

    def listen(self, timeout: float) -> None:
        """Read the workers' reports, waiting up to ``timeout`` seconds for the first."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listening:
                connection, _ = self._listening.accept()
                self._selector.register(connection, selectors.EVENT_READ, _Line())
            elif isinstance(key.data, Agent):
                key.data.ended = time.monotonic()
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
            else:
                self._hear(key.fileobj, key.data)

    def _hear(self, connection: Any, line: _Line) -> None:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            if line.worker is not None:
                line.worker.ended = time.monotonic()
            return
        *whole, line.rest = (line.rest + data).split(b"\n")
        for message in map(json.loads, whole):
            if line.worker is None:
                started = message.pop("at")
                line.worker = Worker(started=started, **message)
                self.workers.append(line.worker)
            else:
                worker = line.worker
                worker.last_step, worker.steps = message["at"], worker.steps + 1
                worker.first_step = worker.first_step or message["at"]

    def wait(self, condition: Callable[[], bool], limit: float) -> bool:
        """Read reports until the condition holds. Return False when it does not within ``limit`` seconds, or no agent is left."""
        deadline = time.monotonic() + limit
        while not condition():
            if self.lost or time.monotonic() >= deadline:
                return False
            self.listen(0.1)
        return True

    def world(self, size: int, since: float = 0.0, steps: int = 1) -> list[Worker] | None:
        """Return the living workers of a world of ``size`` that started after ``since``, in rank order; None until all have stepped."""
        found = [w for w in self.workers if w.alive and w.world == size and w.started > since and w.steps >= steps]
        return sorted(found, key=lambda w: w.rank) if {w.rank for w in found} == set(range(size)) else None

    def first_step(self, size: int, since: float, limit: float) -> float | None:
        """Return when all workers of a world of ``size`` that started after ``since`` had stepped; None: not within ``limit`` seconds."""
        if not self.wait(lambda: self.world(size, since) is not None, limit):
            return None
        return max(w.first_step or 0.0 for w in self.world(size, since) or ())


@dataclass
class _Line:
    """The connection of a worker: the bytes of an incomplete line, and the worker once it is known."""

    rest: bytes = b""
    worker: Worker | None = None


# -- words ------------------------------------------------------------------------------------------------------------


def machine() -> str:
    """Return one line about the machine and the versions."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    python = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, elastirun {commit or '?'}"
    return f"{len(os.sched_getaffinity(0))} x {model}, Linux {platform.release()}, {python}; load before the run {load:.1f}"


def shown(launcher: Launcher, arguments: Sequence[str]) -> str:
    """Return the command as a user types it."""
    name = "elastirun" if launcher.module == ELASTIRUN.module else "torchrun"
    return shlex.join([*(f"{k}={v}" for k, v in launcher.env), name, *launcher.options, *arguments])


def seconds(values: Sequence[float]) -> str:
    """Return the median, and every value behind it."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.2f}" + (f" ({', '.join(f'{v:.2f}' for v in values)})" if len(values) > 1 else "")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def meeting(node: int, port: int | str) -> list[str]:
    """Return the options with which agents on this machine meet: node 1 hosts the store, each node has a loopback address of its own."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"]
    return [*where, f"--rdzv-conf=is_host={int(node == 1)}", f"--local-addr=127.0.0.{node}"]
