"""Let a random rank of a real job hang, in each of many ways: the hang is noticed, that rank is named, and the next round goes on.

    python -m tests.system.hang_kinds [--tries 10] [--seed 1] [--kinds lock,barrier] [--limit 2]

Each kind is a job of two agents with two workers each. In each of its rounds another rank hangs; in the last one none does, and the job
succeeds. Kinds of plain Python train in a ring of sockets, and call ``progress()``. Those of torch train over gloo with ``--preload=torch``
and call nothing of ours.

Printed for each kind: in how many rounds the right rank was named by the judgement, which stands in the reason of the next round and in a
report; in how many already by the first word of the round's end (``broken``), which a peer may win that fails when the rank is killed; and
how long after the limit (``--limit``) the round was ended. The exit code is 1 if a judgement was not right, or a job did not succeed.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster, cluster
from tests.support.tries import parser, unless
from tests.support.until import PATIENCE

NODES, WORKERS = 2, 2
HANGS_AT = 6  # the step in which a rank hangs

COMMON = """
import json, os, signal, socket, sys, threading, time

kind, folder = sys.argv[1:]
rank, world, number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "ELASTIRUN_ROUND"))
with open(f"{folder}/plan") as file:
    plan = json.load(file)
hanging = number <= len(plan) and plan[number - 1] == rank
steps = 12 if number > len(plan) else 1 << 60

def begin():
    "Say that this rank hangs from now on."
    with open(f"{folder}/hung{number}", "w") as file:
        file.write(str(time.monotonic()))

def lock():
    lock = threading.Lock()
    with lock, lock:
        pass
"""

PLAIN = """
from elastirun.progress import progress

def connect():
    "Return the sockets to the next rank of a ring and from the one before."
    own = socket.socket(socket.AF_UNIX)
    own.bind(f"{folder}/{number}-{rank}")
    own.listen()
    right = socket.socket(socket.AF_UNIX)
    while True:
        try:
            right.connect(f"{folder}/{number}-{(rank + 1) % world}")
            return right, own.accept()[0]
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def loop():
    while True:
        pass

def loop_in_c():
    sum(range(1 << 60))

def pipe():
    os.read(os.pipe()[0], 1)

def connection():
    server = socket.create_server(("127.0.0.1", 0))
    server.accept()

def file():
    os.mkfifo(f"{folder}/fifo{number}")
    open(f"{folder}/fifo{number}")

def kernel():
    "Wait without interruption until a child has opened a file that does not answer: no signal handler runs."
    os.mkfifo(f"{folder}/fifo{number}")
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, f"{folder}/fifo{number}", os.O_RDONLY, 0)])

def left():
    time.sleep(1 << 20)

right, before = connect()
step = 0
while step < steps:
    if hanging and step == HANGS_AT:
        begin()
        globals()[kind]()
    time.sleep(0.01)
    for _ in range(world - 1):
        right.sendall(b"s")
        assert before.recv(1), "lost a peer"
    progress()
    step += 1
"""

TORCH = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

if kind == "start" and hanging:
    begin()
    time.sleep(1 << 20)

def deadlock(*_):
    begin()
    lock()

class Data(Dataset):
    def __len__(self):
        return steps
    def __getitem__(self, index):
        if hanging and kind == "loader" and index == HANGS_AT + 2:
            deadlock()
        time.sleep(0.01)
        return torch.ones(4)

class Sampler(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(steps))

torch.set_num_threads(1)
dist.init_process_group("gloo")
module = torch.nn.Linear(4, 1)
by_hand = kind in ("missed", "skipped")
model = module if by_hand else torch.nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
if by_hand and number <= len(plan):
    steps = 2 * HANGS_AT
data = DataLoader(Data(), batch_size=None, sampler=Sampler(), num_workers=kind == "loader")

def save():
    if hanging:
        begin()
        os.mkfifo(f"{folder}/fifo{number}")
        torch.save(module.state_dict(), f"{folder}/fifo{number}")
    dist.barrier()

for step, batch in enumerate(data):
    now = hanging and step == HANGS_AT
    if now and kind == "hook":
        module.weight.register_hook(deadlock)
    if now and kind == "barrier":
        begin()
        dist.barrier()
    if now and kind == "left":
        break
    loss = model(batch).sum()
    loss.backward()
    if by_hand and not now:
        dist.all_reduce(module.weight.grad)
    if by_hand:
        if now and kind == "skipped":
            begin()
        dist.broadcast(module.bias.grad, 0) if kind == "skipped" else None
    optimizer.step()
    if kind == "checkpoint" and step == HANGS_AT:
        save()
if hanging and kind == "left":
    begin()
    time.sleep(1 << 20)
if hanging:
    begin()
dist.barrier()
os._exit(0)
"""

KINDS = {  # by the name of a function in PLAIN, or of a case in TORCH: what hangs
    "stopped": "a worker is stopped (SIGSTOP)",
    "lock": "a deadlock on a lock in the main thread",
    "loop": "an endless loop in Python",
    "loop_in_c": "an endless loop in C that holds the GIL",
    "pipe": "a read of a pipe that nobody writes to",
    "connection": "a socket without a timeout",
    "file": "an open() of a file that does not answer",
    "kernel": "a call that no signal interrupts (state D)",
    "left": "a rank leaves the loop and sleeps",
    "loader": "a deadlock in a data loader's process",
    "missed": "a rank leaves out an all_reduce, goes on to the next step's",
    "skipped": "a rank leaves out an all_reduce, goes on to a broadcast",
    "barrier": "a rank waits in a barrier that the others never call",
    "hook": "a deadlock in a hook of the backward",
    "checkpoint": "a checkpoint is saved to a file that does not answer",
    "start": "a rank hangs before the first step",
}
OF_TORCH = ("left", "loader", "missed", "skipped", "barrier", "hook", "checkpoint", "start")


@dataclass(frozen=True)
class Round:
    """What became of one hang."""

    culprit: int
    named: int | None  # the rank in the reason of the next round; None: that is no hang
    first: int | None  # the same in the first word of the round's end
    after: float | None  # seconds from the hang to the end of the round
    reason: str  # of the next round

    @property
    def right(self) -> bool:
        return self.named == self.culprit


def run(kind: str, tries: int, limit: float, chance: random.Random) -> tuple[list[Round], list[str]]:
    """Run the job of one kind. Return its rounds, and what else went wrong."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as name, cluster(Path(name)) as nodes:
        folder, world = Path(name), NODES * WORKERS
        plan = [chance.randrange(world) for _ in range(tries)]
        (folder / "plan").write_text(json.dumps(plan))
        nodes.script.write_text((COMMON + (TORCH if kind in OF_TORCH else PLAIN)).replace("HANGS_AT", str(HANGS_AT)))
        agents = [start(nodes, i, kind, limit) for i in range(1, NODES + 1)]
        codes = []
        for agent in agents:
            try:
                codes.append(nodes.ends(agent, PATIENCE * (tries + 1)))
            except AssertionError:
                codes.append(None)
        rounds = [judge(folder, number, culprit, events(folder)) for number, culprit in enumerate(plan, 1)]
        wrong = unless((codes == [0] * NODES, f"exit codes {codes}"))
        wrong += [f"round {number}: rank {one.culprit} hung, but: {one.reason}" for number, one in enumerate(rounds, 1) if not one.right]
        return rounds, [*wrong, nodes.everything()] if wrong else []


def start(nodes: Cluster, i: int, kind: str, limit: float) -> Any:
    options = [f"--hang-timeout={limit:g}", f"--set=first-step-timeout={limit if kind == 'start' else 60:g}"]
    options += ["--max-restarts=1000", "--set=restart-pause=0", "--last-call=0.1", "--log-dir=" + str(nodes.tmp_path / f"logs{i}")]
    options += ["--preload=torch"] if kind in OF_TORCH else []
    where = [f"--rdzv-endpoint=127.0.0.1:{nodes.port}", f"--rdzv-conf=is_host={int(i == 1)}", f"--local-addr=127.0.0.{i}"]
    size = [f"--nnodes={NODES}", f"--nproc-per-node={WORKERS}"]
    return nodes.launch(i, *size, *where, *options, str(nodes.script), kind, str(nodes.tmp_path))


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("logs1/.latest/*/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def judge(folder: Path, number: int, culprit: int, told: list[dict[str, Any]]) -> Round:
    broken = next((event for event in told if event["event"] == "broken" and event["round"] == number), None)
    formed = next((event for event in told if event["event"] == "formed" and event["round"] == number + 1), None)
    if broken is None or formed is None:
        return Round(culprit, None, None, None, "the round was not ended")
    hung = folder / f"hung{number}"
    after = broken["mono"] - float(hung.read_text()) if hung.exists() and hung.read_text() else None
    return Round(culprit, rank_in(formed["reason"]), rank_in(broken["reason"]), after, formed["reason"])


def rank_in(reason: str) -> int | None:
    """Return the rank that hung, by the reason for which a round was ended."""
    found = re.search(r"rank (\d+) on .*hung", reason)
    return int(found[1]) if found else None


def main() -> int:
    made = parser(__doc__, 10)
    made.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas")
    made.add_argument("--limit", type=float, default=2.0, metavar="SECONDS", help="--hang-timeout of the agents")
    options = made.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        made.error(f"no such kinds: {', '.join(unknown)}")
    failed = 0
    for kind in kinds:
        began = time.monotonic()
        rounds, wrong = run(kind, options.tries, options.limit, random.Random(f"{kind} {options.seed}"))
        late = [one.after - options.limit for one in rounds if one.after is not None]
        seconds = f"{statistics.median(late):.1f} s after the limit (median), {max(late):.1f} s (longest)" if late else "never"
        right, at_once = sum(one.right for one in rounds), sum(one.first == one.culprit for one in rounds)
        print(f"{kind:<11} {KINDS[kind]:<61} {right} of {len(rounds)} named rightly, {at_once} at once; ended {seconds}", flush=True)
        print(f"            {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", *wrong, sep="\n" if wrong else "", flush=True)
        failed += bool(wrong)
    print(f"{len(kinds) - failed} of {len(kinds)} kinds: always the right rank")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
