"""Stragglers: workers that compute for much longer than the median rank of the job, and keep doing so. Pure. See docs/running.md.

The data-parallel module of ``elastirun.train`` writes both times to the progress page. With every reduction the ranks tell each other how
long they have computed, so the median is that of the whole job. Under torch's own module a worker only knows its own time, in some of its
steps (``elastirun.worker.optimizer_steps``). Then the agents share the times of their workers (``job_median.py``); as long as no median of
the job is known, it is that of the workers on this node. Where batches vary in length, a worker is judged by its time for a unit of work:
the module of ``elastirun.train`` tells the time of the median rank for the work of this one; under torch's own the script tells the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from elastirun.worker.progress_page import NS, PARTS, Page
from elastirun.worker.usual_time import usual_time

FACTOR = 1.5  # times the median
WINDOW = 20.0  # seconds over which times are compared
LEAST_STEPS = 10  # in a window: fewer say nothing
LEAST_SAMPLES = 5  # in a window, of a worker that tells of some steps only
LEAST_SECONDS = 0.001  # that the median rank computes in a step: below, it is the host's other work that is measured
LASTING = 3  # windows in a row: a single one may be a checkpoint, a compilation, or another program on the machine


@dataclass(frozen=True)
class Straggler:
    """A worker that computes for much longer than the median rank."""

    local_rank: int
    factor: float  # times the median
    seconds: float  # of computing, per step
    median: float  # the same of the median rank
    of_job: bool = True  # the median is that of the whole job, and not of the workers on this node


@dataclass(frozen=True)
class Median:
    """The seconds of the median rank, of so many ``ranks``. Of two the quicker one is the median."""

    seconds: float
    ranks: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Median:
        return Median(median_low(seconds) if seconds else 0.0, len(seconds))


class Stragglers:
    """Compares the workers of one round after the other.

    ``slow``: the stragglers of the last window, by local rank. ``alone``: the seconds of the workers that do not know the job's median,
    of each for a step, or for a unit of work (``by_work``), if all of them tell that.
    """

    def __init__(self) -> None:
        self.start_round()

    def start_round(self) -> None:
        """Forget the workers of the last round."""
        self.slow: dict[int, Straggler] = {}
        self.alone: tuple[float, ...] = ()
        self.by_work = False
        self._named: set[int] = set()  # local ranks that ``look`` has returned
        self._before: dict[int, Page] = {}
        self._windows: dict[int, int] = {}  # by local rank: windows in a row in which the worker was slow

    def look(self, pages: Mapping[int, Page], job: Median | None) -> list[Straggler]:
        """Take a sample, ``WINDOW`` after the last one. Return the workers that are now found to be stragglers, each once in a round.

        ``job``: of the ranks of all nodes whose workers do not know it, for a step or for a unit of work as ``alone``; None: not known.
        """
        taken = {local_rank: time for local_rank, page in pages.items() if (time := step_time(self._before.get(local_rank), page))}
        alone = [time for time in taken.values() if time.median is None]
        self.by_work = bool(alone) and all(time.work > 0 for time in alone)
        self.alone = tuple(time.seconds / (time.work if self.by_work else 1) for time in alone)
        here = Median.of(self.alone)
        of_job = job is not None and job.ranks > here.ranks
        usual = job if job is not None and of_job else here
        work = median_low([time.work for time in alone]) if self.by_work else 0.0
        found = []
        for local_rank, time in taken.items():
            seconds = usual_time(usual.seconds, work, time.work) if self.by_work else usual.seconds
            found.append(compare(local_rank, time, seconds, of_job))
        self._before = dict(pages)
        self._windows = {one.local_rank: self._windows.get(one.local_rank, 0) + 1 for one in found if one}
        self.slow = {one.local_rank: one for one in found if one and self._windows[one.local_rank] >= LASTING}
        new = [one for local_rank, one in self.slow.items() if local_rank not in self._named]
        self._named.update(self.slow)
        return new


@dataclass(frozen=True)
class StepTime:
    """Seconds that a worker computes in a step, and the median rank of the job; None: that is not known."""

    seconds: float
    median: float | None
    work: float = 0.0  # units in a step; 0: the worker does not tell


def step_time(before: Page | None, page: Page) -> StepTime | None:
    """Return the mean times between two samples of a worker's page; None: they say nothing."""
    if before is None or before.pid != page.pid:
        return None
    busy, steps, samples = page.busy - before.busy, page.steps - before.steps, page.sampled - before.sampled
    if page.sampled:
        work = max(0, page.work - before.work) / (max(1, steps) * PARTS)
        return StepTime(busy / (samples * NS), None, work) if samples >= LEAST_SAMPLES else None
    return StepTime(busy / (steps * NS), (page.median - before.median) / (steps * NS)) if steps >= LEAST_STEPS else None


def compare(local_rank: int, time: StepTime, usual: float, of_job: bool) -> Straggler | None:
    """Return the worker if it was slow.

    ``usual``: seconds of the median of the workers that do not know it, for as much work; ``of_job``: it is that of all nodes.
    """
    seconds, median = time.seconds, usual if time.median is None else time.median
    if median < LEAST_SECONDS or seconds < FACTOR * median:
        return None
    return Straggler(local_rank, round(seconds / median, 2), round(seconds, 6), round(median, 6), of_job or time.median is not None)
