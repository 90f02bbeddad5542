"""What each script tells the runner: one line a step, one at its end. The runner kills rank 1 of round 1 after some steps."""

from __future__ import annotations

import os
import time

RANK, ROUND = os.environ.get("RANK", "0"), os.environ.get("ELASTIRUN_ROUND", "0")
STEPS, PAUSE = 60, 0.02  # optimizer steps in all, and seconds added to each


def step(number: int) -> None:
    print(f"STEP {RANK} {ROUND} {os.getpid()} {number}", flush=True)
    time.sleep(PAUSE)


def done() -> None:
    print(f"DONE {RANK} {ROUND}", flush=True)
