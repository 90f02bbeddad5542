"""Lose the node that hosts the rendezvous store at a random moment of a running round: the job goes on without it, and never in two places.

    python -m tests.system.host_losses --how kill|cut|split [--nodes 3] [--tries 20] [--expire 5] [--seed 1]

Each try is a job of real agents with ``--store-succession=majority`` (docs/decisions/0020) and one worker a node. The workers step
together: a step is done when every rank has taken part in it over the network. In every other try a worker fails when it loses a peer,
else it hangs.

``--how kill``: the host's agent is killed with SIGKILL. The others' new workers come up long before the host counts as silent, and nothing
of the killed node is left. Measured: seconds until the last of the new workers has started.

``--how cut``: each node is a network namespace, and the cable of the host is pulled. The other nodes step in a new round within twice
``--expire`` and 3 s; the host steps in no new round, and in the old one not after that. When its cable is back all nodes are in one round.
Two nodes are no majority without the host: it goes on alone, and the other node ends with 201 after ``--store-grace``. Measured: seconds
until the last worker of the new round has made a step. Needs root and iproute2.

``--how split``: the cables of all nodes are pulled, and are back after 10 to 50 s. All nodes are in one round again. Measured: seconds from
then until the last worker of that round has made a step.

In the end all workers are told to end, and all agents exit with 0. No round makes a step after a later one has made its first. What went
wrong is printed with the agents' output, and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from elastirun.agent.processes import proc
from tests.support import hosts
from tests.support.cluster import PATIENCE, free_port
from tests.support.left_behind import own_files
from tests.support.tries import parser, unless
from tests.support.until import poll
from tests.system.preload_kills import TAG, command_line, everything

LATEST = (0.3, 2.0)  # seconds from the first line of a worker to the loss: one of these times a random number up to 1
SPLIT = (10.0, 50.0)  # seconds for which all cables are pulled, at least and at most
GRACE = 3.0  # of ``expire``: --store-grace where a node is to end with 201
WORKER = """
import itertools, json, os, signal, socket, sys, time
e = os.environ
run, number = e["ELASTIRUN_FENCE"].split(":")
rank, world = int(e["RANK"]), int(e["WORLD_SIZE"])
file = open(os.path.join(e["TEST_OUT"], f"{number}-{rank}-{os.getpid()}.steps"), "a", buffering=1)
file.write(json.dumps([run, int(number), rank, world, int(e["TEST_NODE"])]) + "\\n")
file.write(f"0 {time.monotonic()}\\n")
meeting = os.path.join(e["TEST_OUT"], run + "-" + number)

def hear(peer):
    try:
        if word := peer.recv(1):
            return word
    except OSError:
        pass
    while e["TEST_PEERS"] == "hang":
        signal.pause()
    sys.exit("lost a peer")

if rank == 0:
    server = socket.create_server((e["MASTER_ADDR"], 0))
    with open(meeting + ".new", "w") as said:
        json.dump(server.getsockname(), said)
    os.replace(meeting + ".new", meeting)
    peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while not os.path.exists(meeting):
        time.sleep(0.01)
    with open(meeting) as said:
        peers = [socket.create_connection(json.load(said))]
for step in itertools.count(1):
    if rank == 0:
        for peer in peers:
            hear(peer)
        word = b"e" if os.path.exists(os.path.join(e["TEST_OUT"], "end")) else b"s"
    for peer in peers:
        try:
            peer.sendall(word if rank == 0 else b"s")
        except OSError:
            hear(peer)
    if rank > 0:
        word = hear(peers[0])
    file.write(f"{step} {time.monotonic()}\\n")
    if word == b"e":
        break
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Ran:
    """One worker, and when it began and made each step."""

    run: str
    round: int
    rank: int
    world: int
    node: int
    times: tuple[float, ...]  # of its start, its first step, ...

    @classmethod
    def read(cls, path: Path, count: int | None = None) -> Ran | None:
        """Return what the worker of this file has written, with no more than ``count`` times; None: not yet who it is."""
        lines = path.read_text().rpartition("\n")[0].splitlines()
        return cls(*json.loads(lines[0]), times=tuple(float(line.split()[1]) for line in lines[1:][:count])) if lines else None


@dataclass(frozen=True)
class Result:
    """What became of one loss."""

    text: str  # one line for people
    took: float | None  # seconds; None: the job has not gone on
    wrong: list[str]  # empty: all is as it should be


class Job:
    """A job of ``nodes`` nodes; node 0 hosts the store. ``network``: the hosts they run on, else they share the loopback interface."""

    def __init__(self, folder: Path, nodes: int, expire: float, grace: float, peers: str, network: hosts.Hosts | None) -> None:
        self.folder, self.network, self.out = folder, network, folder / "out"
        self.out.mkdir()
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.port, self.tags = free_port(), [uuid.uuid4().hex for _ in range(nodes)]
        common = [f"--nnodes=1:{nodes}", "--rdzv-id=test", "--max-restarts=0", "--last-call=1", "--store-succession=majority"]
        common += [f"--expire={expire:g}", f"--store-grace={grace:g}"]
        self.agents = [self._start(node, common, peers) for node in range(nodes)]

    def _start(self, node: int, common: list[str], peers: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "elastirun", *common]
        if self.network is None:
            line += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr=127.0.0.{node + 1}"]
        else:
            line = self.network[node].inside(*line, "--rdzv-endpoint=h0:29400")
        temporary = self.folder / f"tmp{node}"
        temporary.mkdir()
        env = {**os.environ, TAG: self.tags[node], "TEST_OUT": str(self.out), "TEST_NODE": str(node), "TEST_PEERS": peers}
        with open(self.folder / f"said{node}", "wb") as said:
            return subprocess.Popen([*line, str(self.script)], env={**env, "TMPDIR": str(temporary)}, stdout=said, stderr=said)

    def ran(self, count: int | None = None) -> list[Ran]:
        return [ran for path in sorted(self.out.glob("*.steps")) if (ran := Ran.read(path, count))]

    def await_round(self, *nodes: int, after: int = 0, steps: int = 1, limit: float = PATIENCE) -> tuple[int, float] | None:
        """Wait until these nodes have made so many steps in one round of them alone. Return that round, and when the last one had.

        None: not within ``limit`` seconds, or all agents have ended without.
        """
        found: list[tuple[int, float]] = []

        def look() -> bool:
            there = [ran for ran in self.ran(steps + 1) if ran.round > after and ran.world == len(nodes) and len(ran.times) > steps]
            for number in {ran.round for ran in there}:
                members = [ran for ran in there if ran.round == number]
                if sorted(ran.node for ran in members) == sorted(nodes):
                    found.append((number, max(ran.times[steps] for ran in members)))
            return bool(found) or all(agent.poll() is not None for agent in self.agents)

        poll(look, limit)
        return min(found, default=None)

    def await_worker(self, world: int) -> int:
        """Wait for the first worker of a round of so many. Return that round, 0: there was none."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [ran.round for ran in self.ran(1) if ran.world == world]
            return bool(found)

        poll(look)
        return max(found, default=0)

    def left(self, node: int) -> list[str]:
        """Wait until no process of this node runs. Return those that still do after a long time, and its temporary files."""
        poll(lambda: not everything(self.tags[node]), PATIENCE / 2)
        processes = [f"{process.pid} {command_line(process.pid)}" for process in everything(self.tags[node])]
        return [*processes, *own_files(self.folder / f"tmp{node}")]

    def ends(self, node: int) -> int | None:
        try:
            return self.agents[node].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return None

    def finish(self, *nodes: int) -> Iterator[str]:
        """Tell the workers to end. Yield what is wrong with the end of these nodes."""
        (self.out / "end").touch()
        codes = [self.ends(node) for node in nodes]
        yield from unless((codes == [0] * len(nodes), f"the agents of nodes {nodes} exited with {codes}"))
        for node in nodes:
            yield from (f"left of node {node}: {process}" for process in self.left(node))
        ran = self.ran()
        yield from unless((len({one.run for one in ran}) == 1, "there were two runs of the job"))
        yield from disorder(ran)

    def close(self) -> str:
        """End what is left. Return what the agents have said."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for tag in self.tags:
            poll(lambda tag=tag: not everything(tag))
            for process in everything(tag):
                proc.kill(process)
        return "\n".join(f"--- node {node}\n{(self.folder / f'said{node}').read_text()}" for node in range(len(self.agents)))


def disorder(ran: list[Ran]) -> Iterator[str]:
    """Yield the rounds that made a step after a later one had made its first, and the ranks that two workers had in one round.

    A step was made when the first of its ranks says so.
    """
    steps: dict[int, dict[int, float]] = {}
    ranks: set[tuple[int, int]] = set()
    for one in ran:
        if (one.round, one.rank) in ranks:
            yield f"two workers were rank {one.rank} of round {one.round}"
        ranks.add((one.round, one.rank))
        mine = steps.setdefault(one.round, {})
        for step, when in list(enumerate(one.times))[1:]:
            mine[step] = min(when, mine.get(step, when))
    first = float("inf")
    for number in sorted(steps, reverse=True):
        if (late := max(steps[number].values(), default=first) - first) > 0:
            yield f"round {number} made a step {late:.2f} s after the first step of a later round"
        first = min((first, *steps[number].values()))


def killed(job: Job, before: int, expire: float) -> tuple[float | None, str, list[str]]:
    """Kill the agent of the host. Return the seconds until all new workers had started, in words what happened, and what was wrong."""
    others, at = range(1, len(job.agents)), time.monotonic()
    job.agents[0].kill()
    job.agents[0].wait()
    began = job.await_round(*others, after=before, steps=0)
    left = job.left(0)
    stepped = job.await_round(*others, after=before, steps=5)
    wrong = unless(
        (began is not None, "the others have not gone on"),
        (not left, f"left of the killed node: {left}"),
        (began is None or stepped is not None, "the new round makes no steps"),
    )
    took = began[1] - at if began else None
    wrong += unless((took is None or took < 1.5 * expire, "the host's guard has told nobody: the others have waited for its silence"))
    return took, "their new workers ran", [*wrong, *job.finish(*others)]


def cut(job: Job, before: int, expire: float) -> tuple[float | None, str, list[str]]:
    """Pull the cable of the host, and plug it in again. Return the same as ``killed``, with the seconds until the new round has stepped."""
    assert job.network is not None
    others, at, limit = range(1, len(job.agents)), time.monotonic(), 2 * expire + 3
    job.network.cut(0)
    new = job.await_round(*others, after=before)
    took = new[1] - at if new else None
    wrong = unless((took is not None and took <= limit, f"the others should have stepped within {limit:g} s: {took}"))
    time.sleep(1.0)  # the host has time for steps that it must not make
    mended = time.monotonic()
    job.network.mend(0)
    alone = [ran for ran in job.ran() if ran.node == 0 and ran.round > before and ran.times[1:] and ran.times[1] < mended]
    whole = job.await_round(0, *others, after=new[0] if new else before, steps=5)
    wrong += unless((not alone, f"the host has stepped in a new round while it was cut off: {[ran.round for ran in alone]}"))
    wrong += unless((whole is not None, "not all nodes came together again"))
    again = f"they stepped without it, and all {whole[1] - mended:.2f} s after the cable was back" if whole else "never again all"
    return took, again, [*wrong, *job.finish(0, *others)]


def cut_in_two(job: Job, before: int, expire: float) -> tuple[float | None, str, list[str]]:
    """Pull the cable of the host of two nodes. Return the same as ``cut``."""
    assert job.network is not None
    at, limit = time.monotonic(), 2 * expire + 3
    job.network.cut(0)
    alone = job.await_round(0, after=before)
    took = alone[1] - at if alone else None
    code = job.ends(1)
    ended, left = time.monotonic() - at, job.left(1)
    new = [ran.round for ran in job.ran(2) if ran.node == 1 and ran.round > before]
    wrong = unless(
        (took is not None and took <= limit, f"the host should have stepped within {limit:g} s: {took}"),
        (code == 201, f"the other node exited with {code}"),
        (ended > 0.8 * GRACE * expire, f"the other node waited for {ended:.2f} s only"),
        (not left, f"left of the other node: {left}"),
        (not new, f"the other node has begun rounds {new}"),
    )
    return took, f"the host stepped alone, and the other node ended after {ended:.2f} s", [*wrong, *job.finish(0)]


def split(job: Job, before: int, lasts: float) -> tuple[float | None, str, list[str]]:
    """Pull all cables for so many seconds. Return the same as ``cut``, with the seconds from then until all nodes step together."""
    assert job.network is not None
    nodes = range(len(job.agents))
    for node in nodes:
        job.network.cut(node)
    time.sleep(lasts)  # what is tried is a split of this length
    mended = time.monotonic()
    for node in nodes:
        job.network.mend(node)
    whole = job.await_round(*nodes, after=before, steps=5)
    wrong = unless((whole is not None, "not all nodes came together again"))
    return whole[1] - mended if whole else None, f"all stepped together, after a split of {lasts:.1f} s", [*wrong, *job.finish(*nodes)]


def one_loss(how: str, nodes: int, expire: float, after: float, peers: str, lasts: float = 0.0) -> Result:
    """Lose the host ``after`` seconds after the first worker of a round of all nodes. ``peers``: what a worker does that loses one.

    ``lasts``: seconds for which all cables are pulled.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="host-losses-")))
        network = stack.enter_context(hosts.made(nodes, folder, debian=True)) if how != "kill" else None
        job = Job(folder, nodes, expire, GRACE * expire if how == "cut" and nodes == 2 else PATIENCE, peers, network)
        try:
            before = job.await_worker(nodes)
            if before == 0:
                took, text, wrong = None, "", ["no round of all nodes"]
            else:
                time.sleep(after)
                lose = killed if how == "kill" else cut_in_two if nodes == 2 else cut
                took, text, wrong = split(job, before, lasts) if how == "split" else lose(job, before, expire)
        finally:
            said = job.close()
    seconds = "never" if took is None else f"after {took:.2f} s"
    told = f"{how} {after:.2f} s after the first worker's start (peers {peers}): {seconds} {text}, load {os.getloadavg()[0]:.1f}"
    return Result(told, took, [*wrong, said] if wrong else [])


def losses(how: str, nodes: int, expire: float, tries: int, seed: int) -> list[Result]:
    """Lose the host so often. Prints each."""
    chance, results = random.Random(seed), []
    for number in range(tries):
        after, peers = chance.choice(LATEST) * chance.random(), ("fail", "hang")[number % 2]
        results.append(one_loss(how, nodes, expire, after, peers, chance.uniform(*SPLIT)))
        print(number, results[-1].text, *results[-1].wrong, sep="\n" if results[-1].wrong else " ", flush=True)
    return results


def main() -> None:
    made = parser(__doc__, 20)
    how = "the host's agent is killed, its cable is pulled, or all are"
    made.add_argument("--how", choices=("kill", "cut", "split"), required=True, help=how)
    made.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes of the job, two or more")
    made.add_argument("--expire", type=float, default=5.0, metavar="SECONDS", help="--expire of the agents")
    options = made.parse_args()
    if options.nodes < 2 or options.tries < 1 or not options.expire > 0:
        made.error("--nodes must be 2 or more, --tries 1 or more, --expire more than 0")
    if options.how != "kill" and (reason := hosts.missing()):
        raise SystemExit(f"no network namespaces here: {reason}")
    results = losses(options.how, options.nodes, options.expire, options.tries, options.seed)
    times = [one.took for one in results if one.took is not None]
    wrong = sum(bool(one.wrong) for one in results)
    print(f"{len(results)} losses of the store's host among {options.nodes} nodes ({options.how}), {wrong} went wrong")
    if times:
        print(f"the job went on after {statistics.median(times):.2f} s (median), {max(times):.2f} s (longest)")
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()
