"""Stragglers: workers that compute for much longer than the median rank of the job, and keep doing so. Pure. See docs/running.md.

The data-parallel module of ``elastirun.train`` writes both times to the progress page. With every reduction the ranks tell each other how
long they have computed, so the median is that of the whole job. The agents need not tell each other anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.progress_page import NS, Page

FACTOR = 1.5  # times the median
WINDOW = 20.0  # seconds over which times are compared
LEAST_STEPS = 10  # in a window: fewer say nothing
LEAST_SECONDS = 0.001  # that the median rank computes in a step: below, it is the host's other work that is measured
LASTING = 3  # windows in a row: a single one may be a checkpoint, a compilation, or another program on the machine


@dataclass(frozen=True)
class Straggler:
    """A worker that computes for much longer than the median rank."""

    local_rank: int
    factor: float  # times the median
    seconds: float  # of computing, per step
    median: float  # the same of the median rank


class Stragglers:
    """Compares the workers of one round after the other. ``slow``: the stragglers of the last window, by local rank."""

    def __init__(self) -> None:
        self.start_round()

    def start_round(self) -> None:
        """Forget the workers of the last round."""
        self.slow: dict[int, Straggler] = {}
        self._named: set[int] = set()  # local ranks that ``look`` has returned
        self._before: dict[int, Page] = {}
        self._windows: dict[int, int] = {}  # by local rank: windows in a row in which the worker was slow

    def look(self, pages: Mapping[int, Page]) -> list[Straggler]:
        """Take a sample, ``WINDOW`` after the last one. Return the workers that are now found to be stragglers, each once in a round."""
        found = [compare(local_rank, self._before.get(local_rank), page) for local_rank, page in pages.items()]
        self._before = dict(pages)
        self._windows = {one.local_rank: self._windows.get(one.local_rank, 0) + 1 for one in found if one}
        self.slow = {one.local_rank: one for one in found if one and self._windows[one.local_rank] >= LASTING}
        new = [one for local_rank, one in self.slow.items() if local_rank not in self._named]
        self._named.update(self.slow)
        return new


def compare(local_rank: int, before: Page | None, page: Page) -> Straggler | None:
    """Return the worker if it was slow between two samples of its page."""
    if before is None or before.pid != page.pid or page.steps - before.steps < LEAST_STEPS:
        return None
    steps = (page.steps - before.steps) * NS
    seconds, median = (page.busy - before.busy) / steps, (page.median - before.median) / steps
    if median < LEAST_SECONDS or seconds < FACTOR * median:
        return None
    return Straggler(local_rank, round(seconds / median, 2), round(seconds, 6), round(median, 6))
