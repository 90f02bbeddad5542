"""Runs real agents on loopback addresses. Their workers report to the test over a socket and carry out its commands.

A worker connects, sends its environment, and waits for a command; its connection ends when it dies. So a test awaits
events and never guesses how long something takes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastirun import linux
from tests.support.agent_lines import without_heads
from tests.support.until import PATIENCE, until

WORKER = """
import json, os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "argv": sys.argv}).encode() + b"\\n")
command, _, rest = s.makefile().readline().strip().partition(" ")
if command == "exit":
    sys.exit(int(rest))
if command == "raise":
    raise ValueError(rest)
if command == "kill":
    os.kill(os.getpid(), int(rest))
"""

GATED = """
import os, sys, time
from elastirun.__main__ import main
import elastirun.agent.agent, elastirun.cli.main
gate = sys.argv.pop(1)
open(f"{gate}.{os.getpid()}", "w").close()
while not os.path.exists(gate):
    time.sleep(0.005)
main()
"""  # an agent that begins when a file appears


@dataclass
class Worker:
    """The connection of one live worker."""

    connection: socket.socket
    env: dict[str, str]

    @property
    def round(self) -> int:
        return int(self.env["ELASTIRUN_ROUND"])

    @property
    def rank(self) -> int:
        return int(self.env["RANK"])

    @property
    def pid(self) -> int:
        return int(self.env["pid"])

    def tell(self, command: str) -> None:
        self.connection.sendall(command.encode() + b"\n")

    def await_death(self) -> None:
        self.connection.settimeout(PATIENCE)
        assert self.connection.recv(1) == b""


class Cluster:
    """Agents of one job. ``agent(i)`` starts the agent of "node" 127.0.0.<i>."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.port = free_port()
        self.etcd: list[str] = []  # endpoints of etcd; empty: the nodes meet at the agent of node ``host``
        self.agents: list[subprocess.Popen[str]] = []
        self.numbers: list[int] = []  # of the node of each of ``agents``
        self.script = tmp_path / "worker.py"
        self.script.write_text(WORKER)
        path = str(tmp_path / "s")
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(64)
        self.env = {**os.environ, "TEST_SOCKET": path, "TMPDIR": str(tmp_path)}
        self.ask_for_messages = False  # the agents write termination messages; see ``message``
        self.pending: list[Worker] = []
        self.connections: list[socket.socket] = []

    def agents_at_once(self, numbers: tuple[int, ...], *options: str, nnodes: str = "1:3", nproc: int = 1) -> list[subprocess.Popen[str]]:
        """Start agents that have all been imported before the first one begins, however busy the machine is."""
        gate = self.tmp_path / f"gate{numbers}"
        agents = [self.agent(i, *options, nnodes=nnodes, nproc=nproc, gate=f"{gate}") for i in numbers]
        until(lambda: all(Path(f"{gate}.{agent.pid}").exists() for agent in agents), "the agents to be imported")
        gate.touch()
        return agents

    def agent(self, i: int, *options: str, nnodes: str = "1:3", nproc: int = 1, host: int = 1, gate: str = "") -> subprocess.Popen[str]:
        """Start an agent; ``out(i)`` returns its output. The store host is named: every loopback address is local to every agent.

        ``gate``: the file for whose appearance it waits before it begins; see ``agents_at_once``.
        """
        if self.etcd:
            where = ["--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(self.etcd)}", f"--rdzv-id={self.tmp_path.name}"]
        else:
            where = [f"--rdzv-endpoint=127.0.0.{host}:{self.port}", "--rdzv-id=test", f"--rdzv-conf=is_host={int(i == host)}"]
        own = f"--local-addr=127.0.0.{i}"
        arguments = (f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", *where, own, *options, str(self.script))
        return self.launch(i, gate, *arguments, program=("-c", GATED)) if gate else self.launch(i, *arguments)

    def launch(
        self, i: int, *arguments: str, before: tuple[str, ...] = (), program: tuple[str, ...] = ("-m", "elastirun")
    ) -> subprocess.Popen[str]:
        command = [*before, sys.executable, *program, *arguments]
        env = {**self.env, "ELASTIRUN_TERMINATION_LOG": str(self.message_path(i))} if self.ask_for_messages else self.env
        with open(self.out_path(i), "a") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out, text=True, cwd=Path(__file__).parents[2])
        self.agents.append(process)
        self.numbers.append(i)
        return process

    def out_path(self, i: int) -> Path:
        return self.tmp_path / f"agent{i}.out"

    def message_path(self, i: int) -> Path:
        return self.tmp_path / f"agent{i}.end"

    def message(self, i: int) -> dict[str, Any]:
        """Return the termination message of agent ``i``."""
        return dict(json.loads(self.message_path(i).read_bytes()))

    def out(self, i: int) -> str:
        """Return the output of agent ``i``, its own lines without level, time and node."""
        return without_heads(self.out_path(i).read_text())

    def says(self, i: int, text: str) -> None:
        """Wait until the agent has written ``text``."""
        until(lambda: text in self.out(i), f"agent {i} to say: {text}", state=self.everything)

    def worker(self, timeout: float = PATIENCE) -> Worker:
        """Return the next worker that reports. One that is stopped between its connection and its report does not count."""
        deadline = time.monotonic() + timeout
        while True:
            self.listening.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = self.listening.accept()
            except TimeoutError:
                raise AssertionError(f"no worker within {timeout} s\n{self.everything()}") from None
            connection.settimeout(PATIENCE)
            self.connections.append(connection)
            with connection.makefile() as lines:
                if line := lines.readline():
                    return Worker(connection, json.loads(line))

    def round(self, size: int, after: int = 0, timeout: float = PATIENCE) -> list[Worker]:
        """Return the workers of the first complete round after round ``after`` that has ``size`` workers, in rank order."""
        deadline = time.monotonic() + timeout
        while True:
            rounds: dict[int, list[Worker]] = {}
            for worker in self.pending:
                rounds.setdefault(worker.round, []).append(worker)
            for number, workers in sorted(rounds.items()):
                if number > after and len(workers) == size and workers[0].env["WORLD_SIZE"] == str(size):
                    self.pending = [w for w in self.pending if w.round > number]
                    return sorted(workers, key=lambda w: w.rank)
            self.pending.append(self.worker(max(0.1, deadline - time.monotonic())))

    def ends(self, agent: subprocess.Popen[str], timeout: float = PATIENCE) -> int:
        try:
            return agent.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent did not end\n{self.everything()}") from None

    def everything(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.tmp_path.glob("agent*.out")))

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
        for agent in self.agents:
            agent.wait()
        self.listening.close()
        for connection in self.connections:
            connection.close()


@contextmanager
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    """Return a port that is free on every loopback address now. It is below the ephemeral range, so that no client takes it by chance."""
    while True:
        port = 10_000 + int.from_bytes(os.urandom(2), "big") % 20_000
        with socket.socket() as s:
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port


def dies(pid: int, timeout: float = PATIENCE) -> bool:
    """Tell whether the process ends within ``timeout`` seconds."""
    try:
        fd = linux.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
