"""Kill or freeze parts of real jobs at random moments around their saves, and look at what the next round finds.

    python -m tests.system.checkpoint_kills --tries 100 --seed 1              kill -9 of a worker, a writer, an agent
    python -m tests.system.checkpoint_kills --tries 50 --seed 1 --freeze      SIGSTOP of rank 0's writer, or of its whole node

After a kill, the state that is restored must be whole and at most one save old; in the end the directory must have whole checkpoints only,
and no process is left. What a new round finds when it claims the directory must be all that the frozen one ever publishes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastirun.checkpoint.directory import open_directory
from tests.support.children import children
from tests.support.cluster import PATIENCE, Cluster, Worker, cluster
from tests.support.etcd_server import etcd
from tests.support.tries import Try, parser, show, unless
from tests.support.until import poll

# Each step sets the weights to what nobody but this step has, so a restored state says whether it is whole. The optimizer is none of
# torch's, because making one imports the compiler, which takes longer than all else here. Commands come over the socket:
#   train N   N steps, each saved if it is due       wait   until the last save is published, or why it is not
#   run       until all ranks drain, or for ever     fail   raise an exception        end   return from main() without closing anything
SCRIPT = """
import json, logging, os, socket, sys, time
import torch, torch.distributed as dist
from torch import nn
from elastirun.errors import CheckpointError
from elastirun.train import Checkpointer, DistributedDataParallel, Drain, TrainState
from elastirun.train.checkpoints import publishing

directory, options = sys.argv[1], json.loads(sys.argv[2])
publishing.RETRY = options.pop("retry", publishing.RETRY)
width, pause = options.pop("width", 64), options.pop("pause", 0.0)
told = socket.socket(socket.AF_UNIX)
told.connect(os.environ["TEST_SOCKET"])
lines = []

def tell(**what):
    told.sendall(json.dumps(what).encode() + b"\\n")

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

class Optimizer:
    def state_dict(self):
        return {"lr": 0.5}

    def load_state_dict(self, state):
        assert state == self.state_dict()

def weights(step):
    return torch.randn(width, width, generator=torch.Generator().manual_seed(step))

def train(run, ddp, checkpoints, drain=None):
    ddp(torch.ones(2, width)).sum().backward()
    run.step += 1
    with torch.no_grad():
        ddp.module.weight.copy_(weights(run.step))
    stop = drain is not None and drain.now
    begun = time.monotonic()
    checkpoints.save(run.step, run, now=stop)
    tell(step=run.step, took=time.monotonic() - begun)
    if stop:
        checkpoints.close(0.8 * drain.seconds_left)
        tell(stop=run.step)
        drain.leave()
    time.sleep(pause)

def main():
    torch.set_num_threads(1)
    logging.getLogger("elastirun.checkpoints").setLevel(logging.INFO)
    logging.getLogger("elastirun.checkpoints").addHandler(Lines())
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(width, width, bias=False))
    run = TrainState(model=ddp, optimizer=Optimizer())
    checkpoints = Checkpointer(directory, **options)
    drain = Drain(ddp)
    found = checkpoints.restore(run)
    whole = found is None or found == run.step and torch.equal(ddp.module.weight, weights(found))
    tell(**os.environ, pid=os.getpid(), restored=found, whole=bool(whole), lines=lines)
    for line in told.makefile():
        command, _, number = line.strip().partition(" ")
        if command == "train":
            for _ in range(int(number)):
                train(run, ddp, checkpoints)
        elif command == "run":
            while True:
                train(run, ddp, checkpoints, drain)
        elif command == "wait":
            try:
                checkpoints.wait()
                tell(waited="published")
            except CheckpointError as error:
                tell(waited=str(error))
        elif command == "fail":
            raise ValueError("as the test says")
        else:
            return

main()
"""
GRACE = 20.0
TRIES = 3  # freezes in one job


class Job:
    """A job whose workers save what ``SCRIPT`` trains. Agent ``host`` hosts the store."""

    def __init__(self, nodes: Cluster, nproc: int = 1, nnodes: str = "1:3", host: int = 1, expire: float = 5.0, **options: Any) -> None:
        self.nodes, self.host, self.expire = nodes, host, expire
        self.directory = nodes.tmp_path / "checkpoints"
        self.size = (f"--nnodes={nnodes}", f"--nproc-per-node={nproc}")
        self.options = options
        nodes.script.write_text(SCRIPT)

    def start(self, i: int, *more: str, before: tuple[str, ...] = ()) -> Any:
        where = (f"--rdzv-endpoint=127.0.0.{self.host}:{self.nodes.port}", "--rdzv-id=test", f"--rdzv-conf=is_host={int(i == self.host)}")
        if self.nodes.etcd:
            where = ("--rdzv-backend=etcd", f"--rdzv-endpoint={','.join(self.nodes.etcd)}", f"--rdzv-id={self.nodes.tmp_path.name}")
        usual = ("--max-restarts=100000", "--last-call=0.1", "--set=restart-pause=0", f"--grace={GRACE:g}", f"--expire={self.expire:g}")
        script = (str(self.nodes.script), str(self.directory), json.dumps(self.options))
        return self.nodes.launch(i, *self.size, *where, f"--local-addr=127.0.0.{i}", *usual, *more, *script, before=before)

    def steps(self) -> list[int]:
        """The steps of the published checkpoints, the newest first."""
        return [one.commit.step for one in open_directory(str(self.directory)).scan() if one.commit]


class Lines:
    """What one worker tells after its first line; read in a thread, so that no worker waits for the test."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self._told, self._more = worker, list[dict[str, Any]](), threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.worker.connection.settimeout(None)
        with suppress(OSError, ValueError), self.worker.connection.makefile() as lines:
            for line in lines:
                with self._more:
                    self._told.append(json.loads(line))
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def all(self, kind: str) -> list[Any]:
        """Return what was told of ``kind`` until now."""
        with self._more:
            return [line[kind] for line in self._told if kind in line]

    def until(self, kind: str, value: int = 0) -> Any:
        """Wait until something of ``kind`` that is at least ``value`` (a number), or any (a text), was told; return it."""

        def found() -> list[Any]:
            return [line[kind] for line in self._told if kind in line and (isinstance(line[kind], str) or line[kind] >= value)]

        with self._more:
            assert self._more.wait_for(lambda: found() or self._ended, PATIENCE) and found(), (kind, value, self._told[-3:])
            return found()[-1]

    def end(self) -> None:
        """Wait until the worker has ended."""
        with self._more:
            assert self._more.wait_for(lambda: self._ended, PATIENCE), "the worker did not end"


def restored(workers: list[Worker]) -> tuple[int | None, str]:
    """Return the step that all ``workers`` have restored, and from where; check that it is whole on each of them."""
    found = {worker.env["restored"] for worker in workers}
    assert len(found) == 1 and all(worker.env["whole"] for worker in workers), [(worker.rank, worker.env["lines"]) for worker in workers]
    (step,) = found
    lines = [line for line in workers[0].env["lines"] if line.startswith("restored step")]
    return step, lines[0].partition(" from ")[2] if lines else ""  # type: ignore[return-value]


def tell(workers: list[Worker], command: str) -> None:
    for worker in workers:
        worker.tell(command)


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below ``pid``."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def writer_of(pid: int) -> int | None:
    """Return the writer process of a worker, if it has one now."""
    for child in descendants(pid):
        with suppress(OSError):
            if b"writer.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def settled(directory: Path) -> list[str]:
    """Return the names in ``directory`` when the writer of a new round has deleted what earlier rounds left."""
    poll(lambda: not any(name.startswith(".dead-") for name in os.listdir(directory)))
    return os.listdir(directory)


def images_in(pid: int) -> int:
    """Return how many images a process has open. The worker and the mapping have a descriptor each."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if "memfd:elastirun-checkpoint" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    return len(found)


class Story:
    """Two nodes with one worker each, which save each step in memory. The second agent may be killed, the first hosts the store."""

    def __init__(self, nodes: Cluster, seed: int, nnodes: str, host: int, **options: Any) -> None:
        self.nodes, self.random = nodes, random.Random(seed)
        self.job = Job(nodes, nnodes=nnodes, host=host, expire=1.0, width=200, **options)
        self.agents = {i: self.job.start(i, "--last-call=30") for i in (1, 2)}  # last call: the first round has both
        self.step, self.sources = 0, Counter[str]()
        self.begin(nodes.round(2))

    def begin(self, workers: list[Worker]) -> None:
        """Let the workers of a round train."""
        self.workers, self.lines = workers, [Lines(worker) for worker in workers]
        tell(workers, "run")

    def moment(self) -> None:
        """Wait for a random moment of a random save."""
        self.step = self.lines[0].until("step", self.step + self.random.randint(2, 8))
        time.sleep(self.random.random() * 0.03)

    def look(self, workers: list[Worker], told: list[list[int]]) -> Try:
        """Look at what the workers of a new round have found, before they train. ``told``: the steps that those before them have saved."""
        step, source = restored(workers)
        lowest, highest = min(max(steps, default=0) for steps in told), max(max(steps, default=0) for steps in told)
        names = settled(self.job.directory)
        directory = open_directory(str(self.job.directory))
        wrong = unless(
            (step is not None and lowest <= step <= highest + 1, f"{step} is not from {lowest} on; {workers[0].env['lines']}"),
            (sum(name.startswith(".staging-") for name in names) == 1, f"not one staging folder: {names}"),
            (all(name.startswith((".staging-", "step-")) for name in names), f"debris: {names}"),
            (all(images_in(each.pid) <= 3 for each in (*self.agents.values(), *workers)), "a process has more than three images"),
        )
        wrong += [str(damage) for one in directory.scan() for damage in directory.verify(one)]
        where = "memory" if source == "memory" else "disk"
        self.sources[where] += 1
        self.step = step or 0
        return Try(f"step {step} of {lowest} to {highest} from {where}", wrong)

    def end(self) -> list[str]:
        """End the job; return what is wrong then, such as processes that are left of it."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        codes = {self.nodes.ends(agent) for agent in self.agents.values()}
        poll(lambda: not self.left())  # a guard ends after its agent
        return [*unless((codes == {143}, f"exit codes {codes}\n{self.nodes.everything()}")), *self.left()]

    def left(self) -> list[str]:
        """Return the processes of the job that still run."""
        mine = f"TEST_SOCKET={self.nodes.env['TEST_SOCKET']}".encode()
        left = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mine in (path / "environ").read_bytes():
                    left.append(f"left: {(path / 'cmdline').read_bytes()!r}")
        return left


class Kills(Story):
    """Kills workers, writers and the second agent."""

    def __init__(self, nodes: Cluster, seed: int) -> None:
        super().__init__(nodes, seed, "2", 1, every=2, memory_every=1, pause=0.005)

    def once(self, way: str) -> Try:
        """Kill one process; return what follows. ``way``: a method below."""
        self.moment()
        done: Try = getattr(self, way)()
        return replace(done, text=f"{way}: {done.text}")

    def worker(self) -> Try:
        os.kill(self.random.choice(self.workers).pid, signal.SIGKILL)
        return self.next_round()

    def agent(self) -> Try:
        self.agents[2].kill()
        self.agents[2].wait()
        self.agents[2] = self.job.start(2)
        return self.next_round()

    def writer(self) -> Try:
        """Nothing ends but the writer, and a later step is published all the same."""
        pid = writer_of(self.random.choice(self.workers).pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        told = max(self.lines[0].all("step"))
        later = poll(lambda: max(self.job.steps(), default=0) > told + 1)
        return Try(f"a step after {told} is published", unless((later, f"nothing after {told} is\n{self.nodes.everything()}")))

    def next_round(self) -> Try:
        for lines in self.lines:
            lines.end()
        workers = self.nodes.round(2, after=self.workers[0].round)
        found = self.look(workers, [lines.all("step") for lines in self.lines])
        self.begin(workers)
        return found


class Freezes(Story):
    """Stops all processes of the node that has rank 0, until the other one has claimed the directory and saved."""

    def __init__(self, nodes: Cluster, seed: int) -> None:
        super().__init__(nodes, seed, "1:2", 2, every=1, keep=50, pause=0.02)

    def once(self) -> Try:
        stale, fence = self.workers[0], self.workers[0].env["ELASTIRUN_FENCE"]
        agent = next(each for each in self.agents.values() if stale.pid in descendants(each.pid))
        writer = writer_of(stale.pid)
        assert writer is not None
        self.moment()
        node = [writer, agent.pid, *(pid for pid in descendants(agent.pid) if pid != writer)]
        stop(node)
        try:
            (alone,) = self.nodes.round(1, after=stale.round)
            before = self.published(fence)
            first = self.look([alone], [self.lines[1].all("step")])
            self.begin([alone])
            self.lines[0].until("step", self.step + 2)
        finally:
            self.resume(node)
        both = self.nodes.round(2, after=alone.round)
        after = self.published(fence)
        self.lines[0].end()
        stopped = self.lines[0].all("stop") + self.lines[0].all("step")
        then = self.look(both, [stopped])
        self.begin(both)
        late = unless((after <= before, f"published by a round that was over: {after - before}"))
        text = f"round {stale.round} frozen with {len(before)} published: {first.text}, then {then.text}"
        return Try(text, [*first.wrong, *late, *then.wrong])

    def resume(self, node: list[int]) -> None:
        """Continue all processes. In half of the cases the writer goes on 0.2 s before its agent, which cannot end it then."""
        for number, pid in enumerate(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            if number == 0 and self.random.random() < 0.5:
                time.sleep(0.2)

    def published(self, fence: str) -> set[str]:
        return {one.name for one in open_directory(str(self.job.directory)).scan() if one.commit and one.commit.fence == fence}


def stop(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def main() -> int:
    options = parser(__doc__, tries=100)
    options.add_argument("--freeze", action="store_true", help="freeze, instead of killing; needs etcd, because any node may be frozen")
    arguments = options.parse_args()
    begun, tries = time.monotonic(), arguments.tries
    sources = freeze(tries, arguments.seed) if arguments.freeze else kill(tries, arguments.seed)
    what = "freezes: nothing was published after a later claim" if arguments.freeze else "kills: nothing torn, nothing lost, nothing left"
    print(f"{tries} {what}; restored from {dict(sources)}; {time.monotonic() - begun:.0f} s")
    return 0


def kill(tries: int, seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, cluster(Path(folder)) as nodes:
        story = Kills(nodes, seed)
        for number in range(tries):
            show(number + 1, story.once(story.random.choice(("worker", "worker", "writer", "agent"))))
        show(tries, Try("the end", story.end()))
        return story.sources


def freeze(tries: int, seed: int) -> Counter[str]:
    """Freeze nodes in jobs of their own: after the third lost node in a row newcomers wait."""
    sources = Counter[str]()
    with etcd() as servers:
        for first in range(0, tries, TRIES):
            with tempfile.TemporaryDirectory(prefix="freezes-") as folder, cluster(Path(folder)) as nodes:
                nodes.etcd = servers.endpoints
                story = Freezes(nodes, seed + first)
                for number in range(first, min(first + TRIES, tries)):
                    show(number + 1, story.once())
                show(number + 1, Try("the end", story.end()))
                sources += story.sources
    return sources


if __name__ == "__main__":
    sys.exit(main())
