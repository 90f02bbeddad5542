"""Mutants, and tests that are marked ``daily``, take turns: ``make test`` sets TEST_DAY, the number of the day, and runs a part of them.

Without TEST_DAY all of them run, as in ``make test-all``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")


def today() -> int | None:
    """Return the number of the day; None: everything runs."""
    day = os.environ.get("TEST_DAY")
    if day is not None and not day.isdecimal():
        raise pytest.UsageError(f"TEST_DAY={day} is no number of a day; leave it out, or take $(( $(date +%s) / 86400 ))")
    return None if day is None else int(day)


def due(all: Sequence[T], share: int) -> Sequence[T]:
    """Return those that run today: one of ``share``, others each day."""
    day = today()
    return all if day is None else all[day % share :: share]


def resting(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that another day's run has: of the cases of a test that is marked ``daily(n)``, all but one of ``n``."""
    day, seen, found = today(), Counter[str](), []
    for item in items if day is not None else ():
        marker = item.get_closest_marker("daily")
        if marker is None:
            continue
        share, *group = marker.args
        name = group[0] if group else item.nodeid.partition("[")[0]
        turn = crc32(name.encode()) + (0 if group else seen[name])  # so that not all begin on the same day
        seen[name] += 1
        if (turn + day) % share:
            found.append(item)
    return found
