"""Three nodes train together on this machine; one is killed and replaced. At the end a table says what happened when.

    make failover        or        python examples/failover.py [--epochs N] [--pause SECONDS]

A "node" is one elastirun agent with a loopback address of its own (127.0.0.1, 127.0.0.2, ...) and one worker that runs
examples/train.py. All are started with the same command, as they would be on machines of their own; only who hosts the
rendezvous store is said to each (is_host), because here every address is everyone's.

Read ``play`` first: do something to the nodes, await what the others make of it, write both down. Nothing sleeps: with
``--event-log-handler=console`` each agent tells what happens on its node as lines of JSON on stderr, with the time on the
clock that ``time.monotonic`` reads, and how the training goes on is what the workers print.
There is no --max-restarts among the options: only a script's own failures cost restarts, not those of nodes.
The exit status is 0 when the training ended, and as well as an undisturbed one does.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST = 1  # the node that hosts the store; any other may go
UNDISTURBED = 95.0  # per cent of the held-out digits; training that nobody disturbs ends above this
LIMIT = 300.0  # seconds for the whole play; it takes a quarter of that
EPOCH = re.compile(r"epoch +(\d+)/(\d+) .* world size (\d+)")
ACCURACY = re.compile(r"test accuracy ([\d.]+) %")
SHOWN = re.compile(r"elastirun: (?!\{)|epoch |\d+ workers? on |test accuracy ")  # the rest of what nodes say is left out


async def play(stage: "Stage") -> None:
    since = await stage.start(1)
    stage.write("node 1 started", since)
    await see_new_round(stage, since, nodes=1)

    since = await stage.start(2, 3)
    stage.write("nodes 2 and 3 started", since)
    await see_notice(stage, since)
    await see_new_round(stage, since, nodes=3)

    since = stage.kill(3)
    stage.write("node 3 killed (kill -9 of its agent)", since)
    await see_notice(stage, since)
    await see_new_round(stage, since, nodes=2)

    since = await stage.start(4)
    stage.write("node 4 started in its place", since)
    await see_notice(stage, since)
    await see_new_round(stage, since, nodes=3)

    statuses = await stage.all_ended()
    stage.write(f"the training ended; test accuracy {stage.accuracy} %, exit status of the nodes {statuses}", stage.now())
    if any(statuses):
        raise Mishap("a node did not end well")


async def see_notice(stage: "Stage", since: float) -> None:
    """A node stops its workers because of what was done at ``since``."""
    stop = await stage.hear("stop")
    stage.write(f"  noticed after {stop.at - since:.1f} s: {stop.event['reason']}", stop.at)


async def see_new_round(stage: "Stage", since: float, nodes: int) -> None:
    """A round with so many nodes is formed, and trains."""
    formed = await stage.hear("round", nodes=nodes)
    number, workers = formed.event["round"], formed.event["world_size"]
    size = f"{nodes} node{'s' * (nodes > 1)}, {workers} worker{'s' * (workers > 1)}"
    stage.write(f"  round {number} formed after {formed.at - since:.1f} s: {size} ({formed.event['reason']})", formed.at)
    epoch = await stage.hear("epoch", world_size=workers)
    stage.write(f"  round {number} trains after {epoch.at - since:.1f} s: epoch {epoch.event['number']} is done", epoch.at)


class Mishap(Exception):
    """The play cannot go on; the message says why."""


@dataclass
class Heard:
    """One line that a node said, and what happened according to it."""

    at: float  # seconds since the play began
    node: int
    line: str
    event: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  node {self.node} | {self.line}"


def event_in(line: str) -> dict[str, Any]:
    """What a line tells a program: the agents' events as they are, the end of an epoch as one more."""
    if line.startswith("elastirun: {"):
        return dict(json.loads(line.removeprefix("elastirun: ")))
    if found := EPOCH.match(line):
        return {"event": "epoch", "number": f"{found[1]} of {found[2]}", "world_size": int(found[3])}
    return {}


class Stage:
    """The nodes, what they say, and the table. ``folder`` holds the checkpoint and the logs."""

    def __init__(self, folder: Path, epochs: int, pause: float) -> None:
        self.train = ("examples/train.py", f"--checkpoint={folder}/digits.pt", f"--epochs={epochs}", f"--pause={pause}", "--device=cpu")
        self.folder = folder
        self.port = free_port()
        self.began = time.monotonic()
        self.agents: dict[int, Process] = {}
        self.killed: set[int] = set()
        self.listeners: list[asyncio.Task[None]] = []
        self.heard: asyncio.Queue[Heard] = asyncio.Queue()
        self.latest: deque[Heard] = deque(maxlen=60)  # for when something goes wrong
        self.accuracy: float | None = None
        self.table: list[tuple[float, str]] = []

    def now(self) -> float:
        return time.monotonic() - self.began

    def write(self, text: str, at: float) -> None:
        self.table.append((at, text))

    async def start(self, *nodes: int) -> float:
        """Start the agents of these nodes; when that was."""
        at = self.now()
        for node in nodes:
            options = (  # --last-call=0: the first node begins at once, alone
                *("--nnodes=1:3", "--nproc-per-node=1", "--rdzv-id=failover", f"--rdzv-endpoint=127.0.0.{HOST}:{self.port}"),
                *(f"--rdzv-conf=is_host={int(node == HOST)}", f"--local-addr=127.0.0.{node}"),
                *("--last-call=0", "--event-log-handler=console", f"--log-dir={self.folder / f'node{node}'}"),
            )
            self.agents[node] = agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "elastirun", *options, *self.train),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # the nodes share the CPUs of this machine
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # Ctrl-C is for this program, which then ends the nodes
            )
            assert agent.stdout and agent.stderr
            self.listeners += [asyncio.create_task(self.listen(node, stream)) for stream in (agent.stdout, agent.stderr)]
        return at

    def kill(self, node: int) -> float:
        """Kill the agent of a node; its worker ends with it, as it would on a machine that loses power."""
        self.killed.add(node)
        self.agents[node].kill()
        return self.now()

    async def listen(self, node: int, stream: asyncio.StreamReader) -> None:
        """Take in what is said on a node until nobody is left there."""
        while raw := await stream.readline():
            line = re.sub(rf"{re.escape(socket.gethostname())} 127\.0\.0\.(\d+)", r"node \1", raw.decode(errors="replace").rstrip())
            event = event_in(line)
            self.take_in(Heard(event["mono"] - self.began if "mono" in event else self.now(), node, line, event))
        if node not in self.killed:
            self.take_in(Heard(self.now(), node, "(silence)", {"event": "end", "reason": "its output ended"}))

    def take_in(self, heard: Heard) -> None:
        if SHOWN.match(heard.line):
            print(heard, flush=True)
        if found := ACCURACY.match(heard.line):
            self.accuracy = float(found[1])
        if not heard.event:
            self.latest.append(heard)
        self.heard.put_nowait(heard)

    async def hear(self, name: str, **fields: object) -> Heard:
        """The next event of this name with these fields, of whatever node."""
        while True:
            heard = await self.heard.get()
            if heard.event.items() >= {"event": name, **fields}.items():
                return heard
            if heard.event.get("event") == "end":
                raise Mishap(f"node {heard.node} ended too early ({heard.event['reason']}); if all went well, give more --epochs")

    async def all_ended(self) -> list[int]:
        """Await the end of the training; the exit statuses of the nodes that were not killed."""
        statuses = [await agent.wait() for node, agent in self.agents.items() if node not in self.killed]
        await asyncio.gather(*self.listeners)
        return statuses

    async def clear(self) -> None:
        """Whatever happened: end the agents, and with them their workers. Their output ends when the last of them has."""
        for agent in self.agents.values():
            if agent.returncode is None:
                agent.kill()
        await asyncio.gather(*(agent.wait() for agent in self.agents.values()), *self.listeners, return_exceptions=True)


def free_port() -> int:
    """Below those that the system gives to clients, so that none of them takes it before the store does."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                return port


async def perform(folder: Path, epochs: int, pause: float) -> bool:
    """The whole play with its table and verdict; whether all went as it should."""
    stage, mishap = Stage(folder, epochs, pause), ""
    this = asyncio.current_task()
    assert this
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C comes in at an await, never in the middle of starting a node
        asyncio.get_running_loop().add_signal_handler(signum, this.cancel)
    try:
        await asyncio.wait_for(play(stage), LIMIT)
    except Mishap as error:
        mishap = str(error)
    except asyncio.TimeoutError:
        mishap = f"the play was not over after {LIMIT:.0f} s"
    finally:
        await stage.clear()
    if not mishap and (stage.accuracy is None or stage.accuracy < UNDISTURBED):
        mishap = f"accuracy {stage.accuracy} %, but undisturbed training reaches {UNDISTURBED:.0f} %"
    if mishap:
        print("\nThe last that was heard:", *stage.latest, sep="\n")
    print("\n    time    what happened", *(f"{at:6.1f} s    {text}" for at, text in stage.table), "", sep="\n")
    print(f"FAILED: {mishap}" if mishap else f"HELD: a node was lost and replaced; {stage.accuracy} % is as good as undisturbed training")
    return not mishap


def main() -> int:
    parser = argparse.ArgumentParser(description="Three nodes train on this machine; one is killed and replaced.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (30)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds to sleep in each step, so that there is time (0.05)")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="elastirun_failover_", ignore_cleanup_errors=True) as folder:
            return 0 if asyncio.run(perform(Path(folder), args.epochs, args.pause)) else 1
    except asyncio.CancelledError:
        print("\nstopped; every node was ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
