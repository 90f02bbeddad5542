"""Three nodes train together on this machine; one is killed and replaced, then the one that hosts the rendezvous store is killed.

A table says what happened, and that nothing was lost.

    make failover        or        python examples/failover.py [--epochs N] [--pause SECONDS] [--svg PATH]

A "node" is one elastirun agent with a loopback address of its own (127.0.0.1, 127.0.0.2, ...) and one worker that runs
examples/train.py. All nodes are started with the same command, as on machines of their own. The one exception is is_host, which says
which node hosts the rendezvous store at first: on one machine every address belongs to every node. Because of --store-succession another
node takes the store over when that node is killed, and the node that comes back finds the training there.

Read ``scenario`` first: do something to a node, wait for the reaction of the others, note both. Nothing waits by time: with
``--event-log-handler=console`` each agent writes its events as lines of JSON to stderr, with the time of the clock that
``time.monotonic`` reads, and the workers print the progress of the training.
--max-restarts is not given, so it is 0: only a failure of the script costs a restart, not the loss of a node.

Beside the last round one worker trains alone, undisturbed. At last the final weights of both trainings are compared, see ``prove``. The
exit status is 0 if they have the same bits and no step was computed again at a planned stop.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from failover_svg import draw

ROOT = Path(__file__).resolve().parent.parent
HOST = 1  # the node that hosts the store at first
UNDISTURBED = 95.0  # per cent of the held-out digits; a training without failures ends above this
PLANNED_STOPS = 3  # in the scenario: nodes join
LIMIT = 600.0  # seconds for the whole scenario; far more than it takes on a quiet machine
EPOCH = re.compile(r"epoch +(\d+)/(\d+) .* world size (\d+)")
TRAINING = re.compile(r"(\d+) workers? on \w+: (?:going on after step (\d+))?")
PLANNED_STOP = re.compile(r"all workers stop after step (\d+)")
ACCURACY = re.compile(r"test accuracy ([\d.]+) %")
SHOWN = re.compile(r"[IWE]\d{4} |epoch |\d+ workers? on |all workers |test accuracy ")  # other output of the nodes is not shown


async def scenario(job: "Job") -> None:
    since = await job.start(1)
    job.note("node 1 started", since)
    await see_new_round(job, since, nodes=1)

    since = await job.start(2, 3)
    job.note("nodes 2 and 3 started", since)
    await see_notice(job, since)
    await see_new_round(job, since, nodes=3)

    since = job.kill(3)
    job.note("node 3 killed (kill -9 of its agent)", since)
    await see_notice(job, since)
    await see_new_round(job, since, nodes=2)

    since = await job.start(4)
    job.note("node 4 started in its place", since)
    await see_notice(job, since)
    await see_new_round(job, since, nodes=3)

    since = job.kill(HOST)
    job.note(f"node {HOST} killed, which hosts the rendezvous store", since)
    await see_notice(job, since)
    await see_new_round(job, since, nodes=2)

    since = await job.start(HOST)
    job.note(f"node {HOST} started again", since)
    await see_notice(job, since)
    await see_new_round(job, since, nodes=3)

    job.undisturbed = asyncio.create_task(job.train_undisturbed())
    statuses = await job.all_ended()
    job.note(f"the training ended; test accuracy {job.accuracy} %, exit status of the nodes {statuses}", job.now())
    if any(statuses):
        raise ScenarioFailed("a node ended with an error")
    await prove(job)


async def prove(job: "Job") -> None:
    """Compare the run with an undisturbed one of a single worker: the final weights and the optimizer's state must have the same bits.

    Why equal bits show that each sample counted exactly once, in the same order: one worker takes each sample once per epoch, because it
    goes through one permutation from end to end. In deterministic mode its arithmetic, too, does not depend on the number of workers. The
    weights after a step follow from those before it and from the samples of the step alone. So a sample that is lost, doubled or swapped
    with one of another step gives another gradient, and every later step carries the difference on: into the weights, and into the running
    means of Adam, which have a part of every gradient. That all bits are right by chance after a wrong step is as good as impossible.
    The step counter of Adam, which is compared, too, tells whether there were as many steps. Steps that the kill has undone do not count:
    they are computed again from the last checkpoint.
    """
    stops = job.planned_stops()
    replayed = sum(abs(stopped - begun) for stopped, begun in stops)
    job.note(f"{replayed} steps replayed at {len(stops)} planned stops", job.now())
    if replayed or len(stops) != PLANNED_STOPS:
        raise ScenarioFailed(f"there were {PLANNED_STOPS} planned stops; workers stopped and went on after steps {stops}")
    await (job.undisturbed or job.train_undisturbed())
    job.note("the same training has ended, undisturbed, with one worker", job.now())
    found, expected = [await job.final_tensors(name) for name in ("digits", "undisturbed")]
    if differing := compare(found, expected):
        raise ScenarioFailed(f"not the final weights of the undisturbed training: {differing}")
    job.note(f"  same final weights as undisturbed, bit by bit: {len(found)} tensors of the model and its optimizer", job.now())
    job.note("  0 samples lost or doubled: else some bit would differ", job.now())


async def see_notice(job: "Job", since: float) -> None:
    """Wait until a node stops its workers because of what was done at ``since``."""
    stop = await job.next_event("stop")
    job.note(f"  noticed after {stop.at - since:.1f} s: {stop.event['reason']}", stop.at)


async def see_new_round(job: "Job", since: float, nodes: int) -> None:
    """Wait until a round of so many nodes is formed and has trained for an epoch."""
    formed = await job.next_event("round", nodes=nodes)
    number, workers = formed.event["round"], formed.event["world_size"]
    size = f"{nodes} node{'s' * (nodes > 1)}, {workers} worker{'s' * (workers > 1)}"
    job.note(f"  round {number} formed after {formed.at - since:.1f} s: {size} ({formed.event['reason']})", formed.at)
    begin = await job.next_event("training", world_size=workers)
    job.note(f"  round {number} goes on after step {begin.event['step']}" if begin.event["step"] else f"  round {number} begins", begin.at)
    epoch = await job.next_event("epoch", world_size=workers)
    job.note(f"  round {number} trains after {epoch.at - since:.1f} s: epoch {epoch.event['number']} is done", epoch.at)


PROCESS: dict[str, Any] = {  # how all programs are started
    "cwd": ROOT,
    "env": {**os.environ, "OMP_NUM_THREADS": "1"},  # the nodes share the CPUs of this machine
    "stdin": DEVNULL,
    "stdout": PIPE,
    "stderr": PIPE,
    "start_new_session": True,  # Ctrl-C is for this program, which then ends the others
}


class ScenarioFailed(Exception):
    """The scenario cannot go on; the message says why."""


@dataclass
class Line:
    """One line of output of a node, and the event in it."""

    at: float  # seconds since the scenario began
    node: int
    text: str
    event: dict[str, Any]  # empty: the line is for people

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  node {self.node} | {self.text}"


def event_in(text: str) -> dict[str, Any]:
    """Return the event that a line reports: an agent's event as it is, the begin of training and the end of an epoch as events of ours."""
    if text.startswith("{"):
        event = json.loads(text)
        return {"event": event["name"], **event["metadata"]}
    if found := EPOCH.match(text):
        return {"event": "epoch", "number": f"{found[1]} of {found[2]}", "world_size": int(found[3])}
    if found := TRAINING.match(text):
        return {"event": "training", "world_size": int(found[1]), "step": int(found[2] or 0)}
    if found := PLANNED_STOP.match(text):
        return {"event": "planned_stop", "step": int(found[1])}
    return {}


def compare(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """Return the first difference between two sets of tensors, or nothing."""
    if not expected or found.keys() != expected.keys():
        return f"other tensors: {sorted(found)} instead of {sorted(expected)}"
    return next((f"{name} differs" for name, content in sorted(expected.items()) if found[name] != content), "")


class Job:
    """The nodes, their output, and the table. ``folder`` holds the checkpoint and the logs."""

    def __init__(self, folder: Path, epochs: int, pause: float) -> None:
        self.options = ("--deterministic", f"--epochs={epochs}", "--device=cpu")
        self.train = ("examples/train.py", *self.options, f"--checkpoint={folder}/digits", f"--pause={pause}")
        self.folder = folder
        self.alone: Process | None = None  # what runs without an agent
        self.undisturbed: asyncio.Task[None] | None = None
        self.port = free_port()
        self.began = time.monotonic()
        self.agents: dict[int, Process] = {}
        self.killed: set[Process] = set()
        self.readers: list[asyncio.Task[None]] = []
        self.unread: asyncio.Queue[Line] = asyncio.Queue()
        self.latest: deque[Line] = deque(maxlen=60)  # shown if something goes wrong
        self.accuracy: float | None = None
        self.table: list[tuple[float, str]] = []
        self.events: list[tuple[float, int, dict[str, Any]]] = []  # all of them, for the picture: time, node, event

    def now(self) -> float:
        return time.monotonic() - self.began

    def note(self, text: str, at: float) -> None:
        self.table.append((at, text))

    async def start(self, *nodes: int) -> float:
        """Start the agents of these nodes; return the time."""
        at = self.now()
        for node in nodes:
            self.events.append((at, node, {"event": "start"}))
            options = (  # --last-call=0: the first node begins at once, alone
                *("--nnodes=1:3", "--nproc-per-node=1", "--rdzv-id=failover", f"--rdzv-endpoint=127.0.0.{HOST}:{self.port}"),
                *(f"--rdzv-conf=is_host={int(node == HOST)}", f"--local-addr=127.0.0.{node}", f"--node-name=node-{node}"),
                *("--last-call=0", "--store-succession=majority"),
                *("--event-log-handler=console", f"--log-dir={self.folder / f'node{node}'}"),
            )
            command = (sys.executable, "-m", "elastirun", *options, *self.train)
            self.agents[node] = agent = await asyncio.create_subprocess_exec(*command, **PROCESS)
            assert agent.stdout and agent.stderr
            self.readers += [asyncio.create_task(self.read(node, agent, stream)) for stream in (agent.stdout, agent.stderr)]
        return at

    def kill(self, node: int) -> float:
        """Kill the agent of a node; its worker ends with it, as on a machine that loses power. Return the time."""
        self.killed.add(self.agents[node])
        self.agents[node].kill()
        at = self.now()
        self.events.append((at, node, {"event": "kill"}))
        return at

    async def read(self, node: int, agent: Process, stream: asyncio.StreamReader) -> None:
        """Read the output of a node to its end."""
        while raw := await stream.readline():
            text = raw.decode(errors="replace").rstrip()
            event = event_in(text)
            self.take(Line(event["mono"] - self.began if "mono" in event else self.now(), node, text, event))
        if agent not in self.killed:
            self.take(Line(self.now(), node, "(end of output)", {"event": "ended", "reason": "its output ended"}))

    def take(self, line: Line) -> None:
        """Show the line if it is for people, and keep its event."""
        if SHOWN.match(line.text):
            print(line, flush=True)
        if found := ACCURACY.match(line.text):
            self.accuracy = float(found[1])
        if line.event:
            self.events.append((line.at, line.node, line.event))
        else:
            self.latest.append(line)
        self.unread.put_nowait(line)

    async def next_event(self, name: str, **fields: object) -> Line:
        """Return the next event with this name and these fields, of any node."""
        while True:
            line = await self.unread.get()
            if line.event.items() >= {"event": name, **fields}.items():
                return line
            if line.event.get("event") in ("end", "ended"):
                raise ScenarioFailed(f"node {line.node} ended too early ({line.event['reason']}); if all went well, give more --epochs")

    async def all_ended(self) -> list[int]:
        """Wait for the end of the training; return the exit statuses of the nodes that were not killed."""
        statuses = [await agent.wait() for agent in self.agents.values() if agent not in self.killed]
        await asyncio.gather(*self.readers)
        return statuses

    def planned_stops(self) -> list[tuple[int, int]]:
        """Return of each planned stop the step after which all workers stopped, and the one after which the next round went on."""
        told = [event for _, _, event in self.events if event["event"] in ("planned_stop", "training")]
        return [(event["step"], following["step"]) for event, following in pairwise(told) if event["event"] == "planned_stop"]

    async def train_undisturbed(self) -> None:
        await self.run_to_end("examples/train.py", *self.options, f"--checkpoint={self.folder}/undisturbed")

    async def run_to_end(self, *arguments: str) -> None:
        """Run Python without an agent, and wait for its end."""
        self.alone = await asyncio.create_subprocess_exec(sys.executable, *arguments, **PROCESS)
        output, errors = await self.alone.communicate()
        if self.alone.returncode:
            raise ScenarioFailed(f"{' '.join(arguments)}: {(output + errors).decode(errors='replace')}")

    async def final_tensors(self, name: str) -> dict[str, bytes]:
        """Return the tensors of the model and the optimizer in the newest checkpoint: type, shape and bytes by name."""
        file = self.folder / f"{name}.safetensors"
        await self.run_to_end("-m", "elastirun.checkpoint", "export", f"{self.folder / name}", "--to", f"{file}")
        data = file.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")  # of the tensors; before them stand the length of the header and the header
        header = json.loads(data[8:begin])
        tensors = {}
        for tensor, entry in header.items():
            if tensor.startswith(("model.", "optimizer.")):
                start, end = entry["data_offsets"]
                tensors[tensor] = f"{entry['dtype']} {entry['shape']} ".encode() + data[begin + start : begin + end]
        return tensors

    async def clear(self) -> None:
        """End the agents and with them their workers, whatever happened. Their output ends when the last process has ended."""
        processes = [*self.agents.values(), *([self.alone] if self.alone else [])]
        for process in processes:
            if process.returncode is None:
                process.kill()
        tasks = [*self.readers, *([self.undisturbed] if self.undisturbed else [])]
        await asyncio.gather(*(process.wait() for process in processes), *tasks, return_exceptions=True)


def free_port() -> int:
    """Return a free port below those that the system gives to clients, so that no client takes it before the store does."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                return port


async def perform(folder: Path, epochs: int, pause: float, svg: Path | None) -> bool:
    """Run the scenario, print its table and the result; return whether all went as it should."""
    job, error = Job(folder, epochs, pause), ""
    this = asyncio.current_task()
    assert this
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C arrives at an await, never while a node is being started
        asyncio.get_running_loop().add_signal_handler(signum, this.cancel)
    try:
        await asyncio.wait_for(scenario(job), LIMIT)
    except ScenarioFailed as failed:
        error = str(failed)
    except asyncio.TimeoutError:
        error = f"the scenario was not over after {LIMIT:.0f} s"
    finally:
        await job.clear()
    if not error and (job.accuracy is None or job.accuracy < UNDISTURBED):
        error = f"accuracy {job.accuracy} %, but training without failures reaches {UNDISTURBED:.0f} %"
    if error:
        print("\nThe last lines of the nodes:", *job.latest, sep="\n")
    print("\n    time    what happened", *(f"{at:6.1f} s    {text}" for at, text in job.table), "", sep="\n")
    held = "two nodes were lost, one with the store, and replaced; 0 samples lost or doubled, same weights as undisturbed, bit by bit"
    print(f"FAILED: {error}" if error else f"HELD: {held}")
    if svg and not error:
        svg.write_text(draw(job.events))
    return not error


def main() -> int:
    parser = argparse.ArgumentParser(description="Three nodes train on this machine; two are killed and replaced.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (30)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds to sleep in each step, so that there is time (0.05)")
    parser.add_argument("--svg", type=Path, help="draw what happened into this file")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="elastirun_failover_", ignore_cleanup_errors=True) as folder:
            return 0 if asyncio.run(perform(Path(folder), args.epochs, args.pause, args.svg)) else 1
    except asyncio.CancelledError:
        print("\nstopped; every node was ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
