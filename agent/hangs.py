"""Hang detection: from samples of the workers' progress pages to a hang, and from what is seen of the workers to its cause. Pure.

A hang: no worker of this node that has stepped before has made a step for longer than the limit (docs/decisions/0022).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastirun.progress_page import FOREVER, NS, Page

AUTO = 0.0  # in place of seconds: the limit is learned
LEAST_LIMIT = 60.0  # seconds; the shortest learned limit
LEAST_STEPS = 30  # before that many steps of a round nothing is learned well enough: compilers and caches still warm up
STEP_FACTOR, PAUSE_FACTOR = 30, 2  # an evaluation takes as long as twenty steps; one takes up to twice as long as the longest before
LONGEST_INTERVAL = 5.0  # seconds between two samples
STANDSTILL = 2.0  # seconds; a sample that comes so much later than it was due follows a standstill, of the agent or of the machine
KEPT = 1000  # times of steps from which the limit is learned

STOPPED, BEHIND, OUTSIDE, UNCLEAR, WAITING = range(5)  # how well the cause is known, best first; see ``Verdict``
HOLD = (0.0, 1.0, 2.0, 5.0, 10.0)  # seconds until it is acted upon: a node that knows the cause better ends the round first


@dataclass
class _Seen:
    page: Page
    moved_at: float  # when the number of steps was first seen, by the agent's clock


class HangDetector:
    """Judges the workers of one round after the other. ``timeout``: seconds without a step, or ``AUTO``."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.interval = min(LONGEST_INTERVAL, timeout / 4) if timeout else LONGEST_INTERVAL  # seconds between two calls of ``look``
        self._times: deque[float] = deque(maxlen=KEPT)  # seconds per step, of all rounds
        self._longest = 0.0  # seconds; the longest time between two steps, of all rounds
        self.start_round(0.0)

    def start_round(self, now: float) -> None:
        """Forget the workers of the last round, not what was learned from them."""
        self._seen: dict[int, _Seen] = {}
        self._looked_at = now

    @property
    def limit(self) -> float:
        """Seconds without a step that are a hang."""
        if self._timeout:
            return self._timeout
        times = sorted(self._times)
        slow = times[len(times) * 99 // 100] if times else 0.0
        return max(LEAST_LIMIT, STEP_FACTOR * slow, PAUSE_FACTOR * self._longest)

    def look(self, now: float, pages: Mapping[int, Page]) -> float | None:
        """Take a sample: the pages of the living workers, by local rank. Return for how many seconds no step was made; None: no hang."""
        if now - self._looked_at > self.interval + STANDSTILL:
            self.excuse(now)
        self._looked_at = now
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in pages}
        for rank, page in pages.items():
            before = self._seen.get(rank)
            if before is None or before.page.steps != page.steps:
                self._learn(page, before)
                self._seen[rank] = _Seen(page, now)
        if max((page.steps for page in pages.values()), default=0) < (1 if self._timeout else LEAST_STEPS):
            return None
        limit, ages = self.limit, {rank: now - seen.moved_at for rank, seen in self._seen.items()}
        if any(age <= max(limit, _within(pages[rank])) for rank, age in ages.items()):
            return None
        return min(ages.values())

    def excuse(self, now: float) -> None:
        """Do not count the time until now."""
        for seen in self._seen.values():
            seen.moved_at = now

    def _learn(self, page: Page, before: _Seen | None) -> None:
        self._longest = max(self._longest, page.longest / NS)
        if before and before.page.steps and page.steps > before.page.steps:
            self._times.append(max(0, page.stamped - before.page.stamped) / NS / (page.steps - before.page.steps))


def _within(page: Page) -> float:
    return float("inf") if page.within == FOREVER else page.within / NS


# -- the cause -----------------------------------------------------------------------------------------------------------------

_FRAME = re.compile(r'  File "(.{0,1000})", line (\d{1,9}|\?\?\?) in (.{0,200})')
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_WAITS_FOR_PEERS = re.compile(  # files in which a rank waits for others; a backward waits inside the engine, without a frame of its own
    r"/torch/distributed/(distributed_c10d|c10d_logger|rendezvous)\.py|/torch/nn/parallel/|/torch/autograd/(graph|__init__|function)\.py"
    r"|/elastirun/train/|/torch/cuda/(__init__|streams)\.py"
)
INNERMOST, OUTERMOST = 3, 2  # frames of a stack that a line shows
NEAR = 4  # innermost frames that are searched for such a file


@dataclass(frozen=True)
class Observed:
    """One worker during a hang, as its agent sees it."""

    local_rank: int
    rank: int
    pid: int
    steps: int
    stopped: bool  # by a signal, such as SIGSTOP
    stack: tuple[tuple[str, str, str], ...] = ()  # of its main thread: file, line, function, innermost first; empty: unknown
    waits_in: str = ""  # the kernel's function in which it waits; empty: unknown, or in none

    @property
    def waits_for_peers(self) -> bool:
        """Return whether the worker is in a collective, as far as its stack tells."""
        return any(_WAITS_FOR_PEERS.search(file) for file, _, _ in self.stack[:NEAR])


@dataclass(frozen=True)
class Verdict:
    """The workers that are to be ended, and why these.

    ``how``: ``STOPPED`` by a signal; ``BEHIND`` others in steps; ``OUTSIDE`` of collectives while others wait in one; ``UNCLEAR``: none of
    this node's workers is seen in a collective; ``WAITING``: all are, so that the cause is probably on another node.
    """

    local_ranks: tuple[int, ...]
    how: int

    @property
    def hold(self) -> float:
        """Seconds in which another node, which knows the cause better, may end the round."""
        return HOLD[self.how]


def judge(workers: Sequence[Observed]) -> Verdict:
    """Return which of the workers of this node are the cause of a hang. There is at least one."""
    most = max(worker.steps for worker in workers)
    stopped = [worker for worker in workers if worker.stopped]
    behind = [worker for worker in workers if 0 < worker.steps < most and not worker.waits_for_peers]
    outside = [worker for worker in workers if (worker.stack or worker.steps) and not worker.waits_for_peers]
    waiting = [worker for worker in workers if worker.waits_for_peers]
    if stopped:
        return Verdict(_local_ranks(stopped), STOPPED)
    if behind:
        return Verdict(_local_ranks(behind), BEHIND)
    if outside and waiting:
        return Verdict(_local_ranks(outside), OUTSIDE)
    lowest = min(workers, key=lambda worker: (worker.steps or most, worker.rank))
    return Verdict((lowest.local_rank,), WAITING if lowest.waits_for_peers else UNCLEAR)


def _local_ranks(workers: Sequence[Observed]) -> tuple[int, ...]:
    return tuple(worker.local_rank for worker in workers)


def main_stack(text: str) -> tuple[tuple[str, str, str], ...]:
    """Return the frames of the main thread in what Python's faulthandler has written, innermost first."""
    threads: list[list[tuple[str, str, str]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.fullmatch(line)):
            threads[-1].append((found[1], found[2], found[3]))
    return tuple(threads[-1]) if threads else ()  # the main thread is the oldest, and the oldest comes last


def describe(worker: Observed) -> str:
    """Return where the worker is, in one line."""
    if worker.stopped:
        return "stopped by a signal"
    frames = [f"{file.rpartition('/')[2]}:{line} in {function}" for file, line, function in worker.stack]
    if len(frames) > INNERMOST + OUTERMOST:
        frames[INNERMOST:-OUTERMOST] = ["..."]
    return " < ".join(frames) or (f"in the kernel's {worker.waits_in}" if worker.waits_in else "no stack")


def traceback(worker: Observed) -> list[str]:
    """Return the stack as Python writes that of an exception."""
    if not worker.stack:
        return [describe(worker)]
    frames = [f'  File "{file}", line {line}, in {function}' for file, line, function in reversed(worker.stack)]
    return ["Stack of the main thread when it hung (most recent call last):", *frames]
