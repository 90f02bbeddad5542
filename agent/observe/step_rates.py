"""Speed of workers in steps per second, from their progress pages as they are whenever somebody asks. Pure. See docs/health.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.worker.progress_page import NS, Page

WINDOW = 60.0  # seconds over which steps are counted: long enough for a mean of slow steps, and two scrapes of Prometheus lie in it
APART = 1.0  # seconds between two samples that are kept: however many ask, there are few samples


@dataclass(frozen=True)
class WorkerSteps:
    """The steps of one worker in this round. The fields are those of ``steps`` in /status."""

    rank: int
    local_rank: int
    steps: int
    seconds_since_step: float
    steps_per_second: float | None  # None: no two steps are known
    times_median: float | None = None  # of a straggler: for how many times as long it computes as the median rank; None: it is none


class StepRates:
    """Remembers some of the pages that it was shown. A step's time is its stamp, so that it does not matter when somebody asks."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, Page]]] = {}  # by local rank, the oldest first, with the agent's time

    def look(self, now: float, monotonic: int, pages: Mapping[int, Page], ranks: Mapping[int, int]) -> tuple[WorkerSteps, ...]:
        """Return the steps of the workers that have made one. ``pages`` and ``ranks``: of the living workers, by local rank.

        ``now``: the time on ``elastirun.clock``; ``monotonic``: in nanoseconds of CLOCK_MONOTONIC, as the stamps are.
        """
        pages = {local_rank: page for local_rank, page in sorted(pages.items()) if page.steps}
        self._samples = {local_rank: self._samples.get(local_rank, deque()) for local_rank in pages}
        found = []
        for local_rank, page in pages.items():
            samples = self._samples[local_rank]
            if samples and not _same_round(samples[-1][1], page):
                samples.clear()
            while len(samples) > 1 and samples[1][0] <= now - WINDOW:
                samples.popleft()  # the oldest that stays is at least a window old, where there is such a one
            rate = _rate(*samples[0], now, page) if samples else None
            if not samples or now - samples[-1][0] >= APART:
                samples.append((now, page))
            age = max(0, monotonic - page.stamped) / NS
            found.append(WorkerSteps(ranks[local_rank], local_rank, page.steps, round(age, 3), rate))
        return tuple(found)


def _same_round(before: Page, page: Page) -> bool:
    """Return whether both pages are of one worker in one round. A live worker keeps its process, and counts from 0 in each round."""
    return before.pid == page.pid and before.first == page.first and before.steps <= page.steps


def _rate(since: float, before: Page, now: float, page: Page) -> float | None:
    """Return the steps per second between two pages, the first one seen at ``since``. 0: none was made in the whole window."""
    if page.steps == before.steps:
        return 0.0 if now - since >= WINDOW else None
    elapsed = page.stamped - before.stamped
    return round((page.steps - before.steps) * NS / elapsed, 3) if elapsed > 0 else None
