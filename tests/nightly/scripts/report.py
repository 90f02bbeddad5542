"""What each script tells the runner: one line a step, one at its end. The runner kills rank 1 of round 1 after some steps."""

from __future__ import annotations

import os
import sys
import time

RANK, ROUND = os.environ.get("RANK", "0"), os.environ.get("ELASTIRUN_ROUND", "0")
STEPS, PAUSE = 60, 0.02  # optimizer steps in all, and seconds added to each
FAIL_AT = int(os.environ.get("FAIL_AT", "1000"))  # the step at which rank 1 raises an error


def say(line: str) -> None:
    """Write ``line`` at once: the other ranks write to the same place."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def step(number: int) -> None:
    say(f"STEP {RANK} {ROUND} {os.getpid()} {number}")
    time.sleep(PAUSE)
    if RANK == "1" and number >= FAIL_AT:
        raise ValueError(f"step {number}")


def done() -> None:
    say(f"DONE {RANK} {ROUND}")


def started() -> str:
    """Return how the agent has started this worker."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
    return "forked" if frame.f_code.co_filename.endswith("preload/forkserver.py") else "executed"


say(f"STARTED {started()}")
