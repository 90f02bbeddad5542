"""Asks the workers of this node for their Python stacks. Nothing blocks but ``wait``, for a part of a second."""

from __future__ import annotations

import time
from collections.abc import Collection

from elastirun import clock
from elastirun.agent.hangs import causes, stuck
from elastirun.agent.hangs.causes import Observed
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.processes.process import Process
from elastirun.agent.workers.workers import Workers

WAIT_LIMIT = 0.3  # seconds for the workers to write their stacks, which takes milliseconds; the round's end waits for that
GLANCE = 0.02  # seconds between two looks; stacks that have not changed meanwhile are whole


class Stacks:
    """The stacks of the workers of the running round. ``pages``: behind which they are written."""

    def __init__(self, workers: Workers, pages: ProgressPages) -> None:
        self._workers, self._pages = workers, pages
        self._asked: set[int] = set()  # local ranks of workers that were asked last

    def ask(self) -> None:
        """Ask the workers that run for their stacks. What they have written before is dropped."""
        self._asked.clear()
        for local_rank, process in self._workers.processes.items():
            page = self._pages.look(local_rank)
            # The numbers are the worker's. A signal without a handler would end it.
            if page and process.pid in (page.pid, page.shows) and 0 < page.signal <= 64 and process.catches(page.signal):
                self._pages.clear_stacks(local_rank)
                process.signal(page.signal)
                self._asked.add(local_rank)

    def wait(self) -> None:
        """Wait until those that were asked have written, for ``WAIT_LIMIT`` at most."""
        until, before = clock.now() + WAIT_LIMIT, [""]
        while clock.now() < until:
            texts = [self._pages.stacks(local_rank) for local_rank in self._asked]
            if all(texts) and texts == before:
                return
            before = texts
            time.sleep(GLANCE)

    def steps(self, local_rank: int) -> int:
        """Return how many steps a worker has stamped in this round."""
        page = self._pages.read(local_rank)
        return page.steps if page else 0

    def observe(self, local_rank: int, process: Process) -> Observed:
        """Return where a worker is, as far as it has written that."""
        state = stuck.state(process.pid)
        stack = causes.main_stack(self._pages.stacks(local_rank))
        return Observed(local_rank, process.spec.rank, process.pid, self.steps(local_rank), state.stopped, stack, state.waits_in)

    def elsewhere(self, victims: Collection[tuple[int, int]]) -> list[Observed]:
        """Return the workers that are not where their peers waited which have failed. ``victims``: their ranks and local ranks."""
        lost = [(rank, self.steps(local_rank)) for rank, local_rank in victims]
        running = [self.observe(local_rank, process) for local_rank, process in self._workers.processes.items()]
        return causes.elsewhere(running, lost)
