"""Waits for conditions that nothing announces, such as files, ``/proc`` and stores, so that they must be polled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

# Seconds; ten times what most things here take on a quiet machine. Tests of mutants, which are to fail, wait less.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "180"))
PAUSE = 0.02  # seconds between two looks; longer where a look starts a process

T = TypeVar("T")


def poll(condition: Callable[[], T], within: float = PATIENCE, pause: float = PAUSE) -> T:
    """Return the value of ``condition`` as soon as it is true, or its last value after ``within`` seconds."""
    end = time.monotonic() + within
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return found


def until(
    condition: Callable[[], T | None], what: str, within: float = PATIENCE, *, state: Callable[[], object] = str, pause: float = PAUSE
) -> T:
    """Return the value of ``condition`` as soon as it is true. After ``within`` seconds, fail and name ``what`` and the ``state``."""
    found = poll(condition, within, pause)
    assert found, f"waited {within:g} s for {what}\n{state()}".rstrip()
    return found
