"""Hang detection: from samples of the workers' progress pages to a hang. Pure; hangs/causes.py finds the worker that is the cause.

A hang: no worker of this node that has stepped before has made a step for longer than the limit (docs/decisions/0022).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.worker.progress_page import FOREVER, NS, Page

AUTO = 0.0  # in place of seconds: the limit is learned
LEAST_LIMIT = 60.0  # seconds; the shortest learned limit
LEAST_STEPS = 30  # before that many steps of a round nothing is learned well enough: compilers and caches still warm up
STEP_FACTOR, PAUSE_FACTOR = 30, 2  # an evaluation takes as long as twenty steps; one takes up to twice as long as the longest before
LONGEST_INTERVAL = 5.0  # seconds between two samples
STANDSTILL = 2.0  # seconds; a sample that comes so much later than it was due follows a standstill, of the agent or of the machine
KEPT = 1000  # times of steps from which the limit is learned


@dataclass
class _WorkerSeen:
    page: Page
    moved_at: float  # when the number of steps was first seen, by the agent's clock


class HangDetector:
    """Judges the workers of one round after the other. ``timeout``: seconds without a step, or ``AUTO``; None: no limit.

    ``first_step``: seconds until the first step of a round; None: no limit.
    """

    def __init__(self, timeout: float | None, first_step: float | None = None) -> None:
        self._timeout, self._first_step = timeout, first_step
        self.interval = min((LONGEST_INTERVAL, *(limit / 4 for limit in (timeout, first_step) if limit)))  # seconds between two samples
        self._times: deque[float] = deque(maxlen=KEPT)  # seconds per step, of all rounds
        self._longest = 0.0  # seconds; the longest time between two steps, of all rounds
        self.start_round(0.0)

    def start_round(self, now: float) -> None:
        """Forget the workers of the last round, not what was learned from them."""
        self._seen: dict[int, _WorkerSeen] = {}
        self._looked_at = self._began = now
        self._stepped = False

    @property
    def limit(self) -> float:
        """Seconds without a step that are a hang now; infinity: none are."""
        if self._first_step and not self._stepped:
            return self._first_step
        if self._timeout != AUTO:
            return math.inf if self._timeout is None else self._timeout
        times = sorted(self._times)
        slow = times[len(times) * 99 // 100] if times else 0.0
        return max(LEAST_LIMIT, STEP_FACTOR * slow, PAUSE_FACTOR * self._longest)

    def look(self, now: float, pages: Mapping[int, Page]) -> float | None:
        """Take a sample: the pages of the living workers, by local rank. Return for how many seconds no step was made; None: no hang."""
        if now - self._looked_at > self.interval + STANDSTILL:
            self.excuse(now)
        self._looked_at = now
        self._seen = {local_rank: seen for local_rank, seen in self._seen.items() if local_rank in pages}
        for local_rank, page in pages.items():
            before = self._seen.get(local_rank)
            if before is None or before.page.steps != page.steps:
                self._learn(page, before)
                self._seen[local_rank] = _WorkerSeen(page, now)
        most = max((page.steps for page in pages.values()), default=0)
        self._stepped = self._stepped or most > 0
        if not self._stepped:
            if any(page.within for page in pages.values()):  # a worker exits without a step
                return None
            return now - self._began if self._first_step and now - self._began > self._first_step else None
        if self._timeout is None or most < (1 if self._timeout else LEAST_STEPS):
            return None
        limit, ages = self.limit, {local_rank: now - seen.moved_at for local_rank, seen in self._seen.items()}
        if any(age <= max(limit, _within(pages[local_rank])) for local_rank, age in ages.items()):
            return None
        return min(ages.values())

    def excuse(self, now: float) -> None:
        """Do not count the time until now."""
        self._began = now
        for seen in self._seen.values():
            seen.moved_at = now

    def _learn(self, page: Page, before: _WorkerSeen | None) -> None:
        self._longest = max(self._longest, page.longest / NS)
        if before and before.page.steps and page.steps > before.page.steps:
            self._times.append(max(0, page.stamped - before.page.stamped) / NS / (page.steps - before.page.steps))


def _within(page: Page) -> float:
    return float("inf") if page.within == FOREVER else page.within / NS
