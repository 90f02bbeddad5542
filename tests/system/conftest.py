"""Which of these tests, which take half of the time of all, run on a day, and with which ``--preload``: it must not matter to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daily import today

# By the day. Most scripts here have no torch, so their workers are executed by default; with json, which takes no time, they are forks.
PRELOADS = (None, "off", "json")

# These files run whole each day: what a launcher does for every job, and what the README shows. A third of the other tests does.
EACH_DAY = [
    f"test_{name}.py" for name in "launcher elastic restarts stopping endings failover checkpoints planned_stops example readme".split()
]
SHARE = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in EACH_DAY and not item.get_closest_marker("daily"):
            item.add_marker(pytest.mark.daily(SHARE))


@pytest.fixture(autouse=True, scope="module")
def preload_of_the_day() -> Iterator[None]:
    """Set the variable for --preload, which the tests hand on to their agents."""
    day = today()
    preload = PRELOADS[day % len(PRELOADS)] if day is not None else None
    with pytest.MonkeyPatch.context() as patch:
        if preload and "PET_PRELOAD" not in os.environ:
            patch.setenv("PET_PRELOAD", preload)
        yield
