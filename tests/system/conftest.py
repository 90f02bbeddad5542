"""On some days these tests run with another ``--preload`` than the default: how a worker is started must not matter to them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.daily import today

# By the day. Most scripts here have no torch, so their workers are executed by default; with json, which takes no time, they are forks.
PRELOADS = (None, "off", "json")


@pytest.fixture(autouse=True, scope="module")
def preload_of_the_day() -> Iterator[None]:
    """Set the variable for --preload, which the tests hand on to their agents."""
    day = today()
    preload = PRELOADS[day % len(PRELOADS)] if day is not None else None
    with pytest.MonkeyPatch.context() as patch:
        if preload and "PET_PRELOAD" not in os.environ:
            patch.setenv("PET_PRELOAD", preload)
        yield
