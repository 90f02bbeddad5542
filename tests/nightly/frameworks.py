"""Public frameworks under elastirun: each trains with two workers, one is killed, and the job must recover and succeed.

    python -m tests.nightly.frameworks [NAME...]

Run it with an interpreter that has torch, elastirun and the frameworks; ``make nightly`` makes one beside .venv. A framework that is not
installed is reported and skipped. Not part of ``make test``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 300.0  # seconds for one framework
KILL_AT = 22  # the step of the last rank in round 1 at which it is killed; checkpoints are older
STEP, DONE = re.compile(r"STEP (\d+) (\d+) (\d+) (\d+)"), re.compile(r"DONE (\d+) (\d+)")
ELASTIRUN = ("-m", "elastirun", "--standalone", "--max-restarts=1", "--nproc-per-node=2")
ONE_WORKER = (*ELASTIRUN[:-1], "--nproc-per-node=1")
ACCELERATE = ("launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--max_restarts=1")
TAKEN_OVER = ("-m", "elastirun.takeover", "accelerate", *ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no")


@dataclass(frozen=True)
class Case:
    script: str
    needs: str  # the package
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ELASTIRUN
    ranks: int = 2  # that the launcher starts; the last one is killed


@dataclass(frozen=True)
class Recovery:
    """The end of a job whose worker was killed.

    ``wrong``: what went wrong, or empty. ``again``: seconds from the kill to the first step of the next
    round; ``step``: the number of that step.
    """

    wrong: str
    again: float = 0.0
    step: int = 0


CASES = {
    "accelerate": Case("with_accelerate.py", "accelerate", launcher=TAKEN_OVER),
    "lightning": Case("with_lightning.py", "lightning"),
    "transformers": Case("with_transformers.py", "transformers"),
    "dcp": Case("with_dcp.py", "torch"),
    "wandb": Case("with_wandb.py", "wandb"),
    "tensorboard": Case("with_tensorboard.py", "tensorboard"),
    "compile": Case("with_compile.py", "torch"),
    **{f"dataloader-{method}": Case("with_dataloader.py", "torch", (method,)) for method in ("fork", "spawn", "forkserver")},
}


def recover(case: Case, folder: str, limit: float = LIMIT, **environ: str) -> Recovery:
    """Run the case, kill the last rank in round 1, and wait for the end. The output is in ``folder/output``."""
    command = [sys.executable, *case.launcher, str(SCRIPTS / case.script), folder, *case.arguments]
    path = os.pathsep.join([str(SCRIPTS.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    environ = {**os.environ, **fixed, **environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=folder) as process:
        overdue = threading.Timer(limit, process.kill)
        overdue.start()
        killed, again, first, done = 0.0, 0.0, 0, set()
        assert process.stdout is not None
        with open(f"{folder}/output", "w") as output:
            for line in process.stdout:
                output.write(line)
                if found := STEP.search(line):
                    rank, number, pid, step = map(int, found.groups())
                    if not killed and (rank, number) == (case.ranks - 1, 1) and step >= KILL_AT:
                        killed = time.monotonic()
                        os.kill(pid, signal.SIGKILL)
                    if number == 2 and not again:
                        again, first = time.monotonic(), step
                if found := DONE.search(line):
                    done.add(found.groups())
        late = overdue.finished.is_set()
        overdue.cancel()
        code = process.wait()
    end = f"ended after {limit:.0f} s" if late else f"exit code {code}"
    if not killed:
        return Recovery(f"no worker reached step {KILL_AT}; {end}")
    if code or not {(str(rank), "2") for rank in range(case.ranks)} <= done:
        return Recovery(f"{end}, workers that ended well: {sorted(done)}")
    return Recovery("", again - killed, first)


def play(case: Case, folder: str) -> str:
    """Run the case and print the time of its recovery; what went wrong, or empty."""
    recovery = recover(case, folder)
    if not recovery.wrong:
        print(f"    first step after the kill: {recovery.again:.1f} s")
    return recovery.wrong


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CASES:
        case = CASES[name]
        print(name, flush=True)
        if importlib.util.find_spec(case.needs) is None:
            print(f"    skipped: {case.needs} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            wrong = play(case, folder)
            if wrong:
                failed += 1
                print(f"    FAILED: {wrong}\n{Path(folder, 'output').read_text()[-4000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
