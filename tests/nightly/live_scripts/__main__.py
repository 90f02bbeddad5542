"""Small scripts of many kinds as live jobs: two workers are killed and a node joins.

    python -m tests.nightly.live_scripts [NAME...]

A script is right if it ends with the weights of the same script in one process that nothing disturbs. It says
in constants how that is judged:

    TOLERANCE   how far a value may be off; None: the weights depend on the number of workers, so only the replicas
                are compared
    REFUSED     what is in the line of the error with which it has to end, or to begin anew
    WARNED      what is in the line that it has to write
    NEEDS       a package; without it the script is skipped

Exit code 1 if one hangs, or is wrong: other weights, another end or another line.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.cluster import free_port

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 200.0  # seconds for a job, which takes 20 on a quiet machine; one that takes longer hangs
DISTURBANCES = 4  # two kills, each until all train again, of which the second one follows a join
AFTER = 6  # steps before the first kill
TOLERANCE = 1e-4
ERROR = re.compile(r"^(?:\S+ )*?(?:\w+\.)*(\w*(?:Error|WrongUse|Mismatch|Diverged): .*)", re.M)


class Hangs(Exception):
    """The job does not end."""


class Job:
    """One script under two agents, of which the second one comes later."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder, self.port = script, folder, free_port()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.workers: dict[int, int] = {}  # by rank: the pids of those that train
        self.killed: set[int] = set()
        self.until = time.monotonic() + LIMIT

    def start(self, workers: int) -> None:
        """Start the next agent."""
        node = len(self.agents) + 1
        command = [sys.executable, "-m", "elastirun", f"--nproc-per-node={workers}", "--nnodes=1:2"]
        command += ["--preload=torch", "--max-restarts=4", "--last-call=0.5", "--rdzv-id=live"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command += [f"--local-addr=127.0.0.{node}", f"--rdzv-conf=is_host={int(node == 1)}", str(self.script)]
        with open(self.folder / "output", "ab") as out:
            env = {**environment(self.folder), "TMPDIR": str(self.folder), "PET_SET": "restart-pause=0"}
            self.agents.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=self.folder))

    def run(self) -> int:
        """Disturb the job, and return how many of the disturbances there were when it ended."""
        done = 0
        for disturbed in self.disturbances():
            if not disturbed:
                break
            done += 1
            (self.folder / f"done.{done if done < DISTURBANCES else 'all'}").touch()
        first, *others = self.agents
        self.wait(lambda: first.poll() or first.poll() == 0 and all(other.poll() is not None for other in others))
        return done

    def disturbances(self) -> Iterator[bool]:
        """Disturb the job, one time after the other. Yields False if it has ended before."""
        self.start(2)
        yield self.kill(1, 2)
        yield self.trains(2)
        self.start(1)
        yield self.kill(0, 3)
        yield self.trains(3)

    def kill(self, rank: int, size: int) -> bool:
        """Kill the worker of ``rank`` when ``size`` of them train, and the others wait for it."""
        if not self.trains(size):
            return False
        pid = self.workers[rank]
        begun = len(self.lines())

        def waits() -> bool:
            last = [line for line in self.lines()[begun:] if line[0] == pid][-1:]
            return bool(last) and last[0][3] % size == rank or self.has_ended()

        self.wait(waits)
        self.killed.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
        return True

    def trains(self, size: int) -> bool:
        """Wait until ``size`` workers make steps together; return False if the job ends before."""
        begun = len(self.lines())

        def look() -> bool:
            lines = self.lines()[begun:]
            made = [line for line in lines if line[0] not in self.killed and line[2] == size]
            self.workers = {rank: pid for pid, rank, _, step, counts in made if step >= AFTER and counts}
            return len({*self.workers.values()}) == size or self.has_ended()

        self.wait(look)
        return not self.has_ended()

    def has_ended(self) -> bool:
        return self.agents[0].poll() is not None

    def lines(self) -> list[Any]:
        """Return what the workers have written: pid, rank, world size, step, and whether that counts."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "log").read_text().splitlines(True) if line.endswith("\n")]
        return []

    def wait(self, condition: Callable[[], object]) -> None:
        while not condition():
            if time.monotonic() > self.until:
                raise Hangs
            time.sleep(0.01)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "LIVE_FOLDER": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def constants(script: Path) -> dict[str, Any]:
    """Return the script's own constants."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def left(folder: Path) -> list[dict[str, Any]]:
    """Return what the workers have left at their end."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("ended.*"))]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference between two values; infinite at different steps."""
    mine, theirs = one["values"], other["values"]
    if one["step"] != other["step"] or len(mine) != len(theirs):
        return float("inf")
    off = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    return max(off) if all(value == value for value in off) else float("inf")


def judge(script: Path, folder: Path) -> str:
    """Run the script, alone and disturbed; return the outcome."""
    told = constants(script)
    if not importlib.util.find_spec(told.get("NEEDS", "torch")):
        return f"skipped: {told['NEEDS']} is not installed"
    job = Job(script, folder)
    try:
        done = job.run()
    except Hangs:
        return f"HANGS\n{output(folder)}"
    finally:
        job.close()
    said, codes = (folder / "output").read_text(), [agent.returncode for agent in job.agents]
    if told.get("REFUSED"):
        lines = [line for line in ERROR.findall(said) if re.search(told["REFUSED"], line)]
        if not lines:
            return f"WRONG: not refused, exit codes {codes}\n{output(folder)}"
        verdict = "" if any(codes) else compare(script, folder, TOLERANCE)  # a job that began anew was not disturbed again
        return f"refused: {lines[0]}" if verdict.startswith("right") or not verdict else verdict
    if any(codes) or done < DISTURBANCES:
        return f"WRONG: exit codes {codes}, disturbed {done} of {DISTURBANCES} times\n{output(folder)}"
    warned = [line for line in said.splitlines() if told.get("WARNED") and re.search(told["WARNED"], line)]
    if told.get("WARNED") and not warned:
        return f"WRONG: not warned\n{output(folder)}"
    verdict = compare(script, folder, told.get("TOLERANCE", TOLERANCE))
    return f"warned: {warned[0]}" if warned and verdict.startswith("right") else verdict


def compare(script: Path, folder: Path, tolerance: float | None) -> str:
    """Compare what the workers have left with each other, and with the same script undisturbed."""
    (alone := folder / "alone").mkdir()
    ended = left(folder)
    if len(ended) != 3:
        return f"WRONG: {len(ended)} of 3 workers have come to the end\n{output(folder)}"
    replicas = max(difference(one, ended[0]) for one in ended)
    if replicas > 0:
        return f"WRONG: the replicas differ by {replicas:.2g}, steps {[one['step'] for one in ended]}"
    if tolerance is None:
        return "right: the replicas are the same; their weights depend on the number of workers"
    run = subprocess.run(
        [sys.executable, str(script)],
        env=environment(alone),
        cwd=alone,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if run.returncode:
        return f"WRONG: alone it ends with {run.returncode}\n{run.stderr[-2000:]}"
    [undisturbed] = left(alone)
    off = difference(ended[0], undisturbed)
    steps = f"{ended[0]['step']} steps" + ("" if off < float("inf") else f" instead of {undisturbed['step']}")
    return f"{'right' if off <= tolerance else 'WRONG'}: {steps}, the weights are off by {off:.1g}"


def output(folder: Path) -> str:
    return (folder / "output").read_text()[-3000:]


def main(names: list[str]) -> int:
    failed = False
    for script in [SCRIPTS / f"{name}.py" for name in names] or sorted(SCRIPTS.glob("*.py")):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="live-scripts-") as folder:
            outcome = judge(script, Path(folder))
        failed |= outcome.startswith(("WRONG", "HANGS"))
        print(f"{script.stem:28} {time.monotonic() - begun:3.0f} s  {outcome}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
