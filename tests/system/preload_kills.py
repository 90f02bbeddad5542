"""Kill one process of a job with ``--preload`` at a random moment: the job goes on or ends as it should, and nothing is left of it.

Usage:

    python -m tests.system.preload_kills --tries 100 [--modules torch]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from elastirun.agent.processes import proc
from tests.support.cluster import PATIENCE
from tests.support.tries import Try, parser, show, unless
from tests.support.until import poll

TARGETS = ("agent", "guard", "server", "parked fork", "worker", "agent and guard")
SCRIPT = "import os, time\nopen(os.environ['TEST_OUT'], 'a').write(f\"{os.environ['ELASTIRUN_ROUND']}\\n\")\ntime.sleep(1000)\n"
TAG = "TEST_TAG"  # a variable that all processes of a try have
NO_GUARD = "cannot start the guard"  # an agent that has never had one does not start
LONGEST = 1.5  # seconds until the kill; the job takes less to start, so that kills fall into every phase


def everything(tag: str) -> list[proc.ProcessStat]:
    """Return the living processes of a try."""
    return [process for process in proc.everything().values() if proc.value_of(TAG, proc.environment(process.pid)) == tag]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def role(process: proc.ProcessStat, agent: int) -> str:
    """Return what the process is to the job."""
    line = command_line(process.pid)
    if process.pid == agent:
        return "agent"
    if "guard.py" in line:
        return "guard"
    if "forkserver.py" in line:
        return "server" if process.session == process.pid else "parked fork"
    ours = "exec_worker" in line or "-m elastirun" in line  # the latter: a child of the agent that executes its program next
    return "worker" if "script.py" in line and not ours else "other"


def one_try(target: str, after: float, modules: str = "json") -> Try:
    """Start a job with two workers, kill ``target`` when ``after`` seconds are over and it is there, and look what is left."""
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="preload-kills-") as folder:
        script, out, said = Path(folder, "script.py"), Path(folder, "rounds"), Path(folder, "said")
        script.write_text(SCRIPT)
        out.touch()
        env = {**os.environ, TAG: tag, "TEST_OUT": str(out), "PET_SET": "restart-pause=0", "TMPDIR": folder}
        line = [sys.executable, "-m", "elastirun", f"--preload={modules}", "--nproc-per-node=2", "--max-restarts=9", str(script)]
        with said.open("w") as file:
            agent = subprocess.Popen(line, env=env, stdout=file, stderr=file)
        time.sleep(after)
        killed: list[proc.ProcessStat] = []

        def hit() -> bool:
            there = [process for process in everything(tag) if role(process, agent.pid) in target.split(" and ")]
            count = len(there) if " and " in target else min(1, len(there))
            killed.extend(process for process in random.sample(there, count) if proc.kill(process))
            return bool(killed)

        found = poll(hit)
        goes_on = True
        if "agent" not in target:
            rounds = ("2",) if target == "worker" else ("1", "2")  # a parked fork may have become a worker when it is killed
            goes_on = poll(lambda: any(out.read_text().split().count(one) == 2 for one in rounds) or NO_GUARD in said.read_text())
            agent.send_signal(signal.SIGTERM)
        agent.wait(PATIENCE)
        empty = poll(lambda: not everything(tag))
        left = [f"{role(process, agent.pid)} {process.pid} {command_line(process.pid)}" for process in everything(tag)]
        for process in everything(tag):
            proc.kill(process)
        text = said.read_text()
    wrong = unless(
        (found, f"no {target} to kill"),
        (goes_on, "the job has not gone on"),
        (empty, f"left: {left}"),
        ("left behind" not in text, "a fork counted as left behind"),
    )
    return Try(f"{target} killed after {after:.2f} s", [*wrong, *([text] if wrong else [])])


def main() -> None:
    arguments = parser(__doc__, 20)
    arguments.add_argument("--modules", default="json")
    options = arguments.parse_args()
    chance = random.Random(options.seed)
    for number in range(options.tries):
        show(number, one_try(TARGETS[number % len(TARGETS)], chance.uniform(0.0, LONGEST), options.modules))


if __name__ == "__main__":
    main()
