"""Kill the agent of one of two nodes at a random moment: nothing of it is left, and the other node goes on when all has ended, not before.

    python -m tests.system.agent_kills --tries 200 [--seed N]

Killed with SIGKILL are the agent, the agent and its workers, or the agent's process group, in turn: while the agent starts, while a round
runs, and while rounds follow each other, because a worker of the other node fails again and again. Each worker of the victim has two
grandchildren in sessions of their own, one of them stopped, and they hold a lock together. Each new worker of the other node in a round
without the victim looks for them at once: what it finds was taken for ended, but still runs.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from elastirun.agent.processes import proc
from tests.support.cluster import free_port
from tests.support.left_behind import DAEMONS, own_files
from tests.support.tries import parser, unless
from tests.support.until import poll
from tests.system.preload_kills import TAG, command_line, everything

TARGETS = ("agent", "agent and workers", "process group")
MOMENTS = ("at the start", "in a round", "between rounds")
LONGEST = {"at the start": 2.5, "in a round": 0.5, "between rounds": 2.5}  # seconds until the kill
EXPIRE = 30.0  # seconds; that a node is silent is found much later than a try takes
VICTIM = f"""
import fcntl, os, signal
file = open(os.environ["TEST_OUT"] + ".lock", "a")
fcntl.flock(file, fcntl.LOCK_SH)
{DAEMONS}while True:
    signal.pause()
"""
SURVIVOR = """
import fcntl, os, random, sys, time
world, out, mark = os.environ["WORLD_SIZE"], os.environ["TEST_OUT"], os.environ["TEST_VICTIM"].encode()
running = []
if world == "1":
    with open(out + ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running.append("who holds the lock")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                names = file.read().split(b"\\0")
        except OSError:
            continue
        if mark in names and any(name.startswith(b"RANK=") for name in names):
            running.append(pid)
with open(out, "a") as file:
    file.write(f"{world}|{os.environ['ELASTIRUN_ROUND_REASON']}|{' '.join(running)}\\n")
if world == "1":
    time.sleep(1000)
time.sleep(random.uniform(0.0, 0.6) if os.environ["TEST_MOMENT"] == "between rounds" else 1000)
sys.exit(1)
"""


@dataclass(frozen=True)
class Result:
    """What became of one kill."""

    text: str  # one line for people
    member: bool = False  # the victim was a member when it was killed
    took: float = 0.0  # seconds until the other node's next worker ran without the victim
    wrong: tuple[str, ...] = ()


class Job:
    """A job of two nodes in ``folder``: the survivor, which serves the store, and the victim."""

    def __init__(self, folder: Path, moment: str) -> None:
        self.tag, self.out, self.folder, self.port = uuid.uuid4().hex, folder / "rounds", folder, free_port()
        self.out.touch()
        self.survivor = self._start(1, 1, SURVIVOR, {"TEST_VICTIM": f"{TAG}={self.tag}", "TEST_MOMENT": moment})
        self.victim = self._start(2, 2, VICTIM, {TAG: self.tag})

    def _start(self, number: int, nproc: int, script: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.folder / f"script{number}.py"
        path.write_text(script)
        line = [sys.executable, "-m", "elastirun", "--nnodes=1:2", f"--nproc-per-node={nproc}", "--rdzv-id=test"]
        line += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=is_host={int(number == 1)}", f"--local-addr=127.0.0.{number}"]
        line += ["--max-restarts=10000", "--set=restart-pause=0", "--last-call=0.3", "--failure-grace=0.2"]
        line += [f"--expire={EXPIRE:g}", str(path)]
        temporary = self.folder / f"tmp{number}"
        temporary.mkdir()
        everywhere = {**os.environ, "TEST_OUT": str(self.out), "TMPDIR": str(temporary)}
        with open(self.folder / f"said{number}", "wb") as said:
            return subprocess.Popen(line, env={**everywhere, **env}, stdout=said, stderr=said, start_new_session=True)

    @property
    def rounds(self) -> list[list[str]]:
        """World size, reason, and what ran of the victim, for each round of the survivor."""
        return [line.split("|") for line in self.out.read_text().splitlines()]

    @property
    def is_member(self) -> bool:
        """Return whether the newest round of the survivor has both nodes."""
        return self.rounds[-1:] != [] and self.rounds[-1][0] == "3"

    def workers(self) -> list[proc.ProcessStat]:
        """Return the victim's workers, with what they started."""
        return [process for process in everything(self.tag) if proc.value_of("RANK", proc.environment(process.pid))]

    def kill(self, target: str) -> None:
        if target == "process group":
            os.killpg(self.victim.pid, signal.SIGKILL)
            return
        processes = [process for process in [proc.look(self.victim.pid)] if process]
        processes += self.workers() if "workers" in target else []
        for process in random.sample(processes, len(processes)):
            proc.kill(process)

    def close(self) -> str:
        """End what is left. Returns what both agents have said."""
        for agent in (self.survivor, self.victim):
            agent.kill()
            agent.wait()
        poll(lambda: not everything(self.tag))
        for process in everything(self.tag):
            proc.kill(process)
        return "\n".join((self.folder / f"said{number}").read_text() for number in (1, 2))


def one_kill(target: str, moment: str, after: float) -> Result:
    """Kill ``target`` when ``after`` seconds are over since the start, or since the first round of both nodes."""
    with tempfile.TemporaryDirectory(prefix="agent-kills-") as folder:
        job = Job(Path(folder), moment)
        try:
            began = moment == "at the start" or poll(lambda: any(world == "3" for world, *_ in job.rounds))
            time.sleep(after)
            member, killed_at = job.is_member, time.monotonic()
            job.kill(target)
            job.victim.wait()
            goes_on = poll(lambda: job.rounds[-1:] != [] and not job.is_member, EXPIRE / 2)
            took = time.monotonic() - killed_at
            empty = poll(lambda: not everything(job.tag), EXPIRE / 2)
            left = [f"{process.pid} {command_line(process.pid)}" for process in everything(job.tag)]
            rounds, folders = job.rounds, own_files(Path(folder, "tmp2"))
        finally:
            said = job.close()
    running = [running for _, _, running in rounds if running]
    wrong = unless(
        (began, "no round of both nodes"),
        (empty, f"orphans: {left}"),
        (goes_on, f"the other node has not gone on without the victim: {rounds[-3:]}"),
        (not running, f"a round without the victim began while its processes ran: {running}"),
        (not folders, f"temporary folders left: {folders}"),
    )
    text = f"{target} killed {moment}, after {after:.2f} s: {f'the other node went on after {took:.2f} s' if member else 'no member'}"
    return Result(text, member, took, (*wrong, said) if wrong else ())


def kills(tries: int, seed: int) -> list[Result]:
    """Kill so often, each target at each moment in turn. Prints each."""
    chance, results = random.Random(seed), []
    for number in range(tries):
        target, moment = TARGETS[number % len(TARGETS)], MOMENTS[number // len(TARGETS) % len(MOMENTS)]
        results.append(one_kill(target, moment, chance.uniform(0.0, LONGEST[moment])))
        print(number, results[-1].text, *results[-1].wrong, sep="\n" if results[-1].wrong else " ", flush=True)
    return results


def main() -> None:
    options = parser(__doc__, 20).parse_args()
    results = kills(options.tries, options.seed)
    times = [one.took for one in results if one.member]
    print(f"{len(results)} kills, {len(times)} of members, {sum(bool(one.wrong) for one in results)} went wrong")
    if times:
        print(f"the other node went on after {statistics.median(times):.2f} s (median), {max(times):.2f} s (longest)")
    raise SystemExit(int(any(one.wrong for one in results)))


if __name__ == "__main__":
    main()
