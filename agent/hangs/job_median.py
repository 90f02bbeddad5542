"""Shares how long the workers of all nodes compute, so that stragglers are compared with the whole job (docs/running.md#stragglers).

Once in a window, each node writes the times of its workers into the rendezvous store. The agent of node rank 0 reads those of all nodes and
writes their median, which the others read. Nobody waits for anybody, so a median holds the times of one or two windows ago. A thread does
this, and ends. Without the store, or while node rank 0 has no times, each node goes by its own median.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from elastirun.agent.hangs.stragglers import Median
from elastirun.agent.store.node_reports import Meeting, NodeReports
from elastirun.errors import StartError, StoreError
from elastirun.threads import start_thread

TOPIC, MEDIAN = "steps", "median"  # names of keys, see ``NodeReports``
WORK = "work"  # the topic of times for a unit of work
MOST_WORKERS = 1024  # of one node
LASTS = 3  # windows of this node: what has not changed for so long is of a node without times, or the store is away


@dataclass(frozen=True)
class NodeTimes:
    """For how many seconds each worker of one node computes in a step, or for a unit of work. ``window``: so that records differ."""

    fence: str
    window: int
    seconds: tuple[float, ...]

    @property
    def plausible(self) -> bool:
        return 0 < len(self.seconds) <= MOST_WORKERS and min(self.seconds) >= 0.0


@dataclass(frozen=True)
class SharedMedian:
    """The median of the workers of all nodes that have shared their times. ``window``: as in ``NodeTimes``."""

    fence: str
    window: int
    median: Median

    @property
    def plausible(self) -> bool:
        return self.median.seconds >= 0.0


class JobTimes:
    """This node's part, in one round after the other. The methods are called by the loop's thread, and do not block."""

    def __init__(self, topic: str = TOPIC) -> None:
        self._topic = topic
        self._thread: threading.Thread | None = None  # while it runs, only it changes what follows, but for ``_window``
        self._fence = ""  # of the round that this node has shared times in
        self._window = 0
        self._found: dict[int | str, tuple[Any, int]] = {}  # by name: the newest record, and the window in which it was new here

    def median(self, fence: str) -> Median | None:
        """Return the median of the round; None: not known, or none of late."""
        found = self._recent(MEDIAN) if fence == self._fence else None
        return found.median if found else None

    def share(self, meeting: Meeting, seconds: Sequence[float]) -> None:
        """Share the times of a window, unless the store is so slow that this node still shares those of an earlier one."""
        self._window += 1
        if self._thread is not None and self._thread.is_alive():
            return
        if meeting.fence != self._fence:
            self._fence, self._found = meeting.fence, {}
        own = NodeTimes(meeting.fence, self._window, tuple(float(f"{one:.6g}") for one in seconds if one >= 0.0)[:MOST_WORKERS])
        self._thread = start_thread("step-times", self._run, meeting, own)

    def _run(self, meeting: Meeting, own: NodeTimes) -> None:
        with suppress(StoreError, StartError), closing(NodeReports(meeting, self._topic)) as reports:
            reports.write(meeting.node_rank, own)
            if meeting.node_rank == 0:
                self._judge(reports, own)
            else:
                self._note(MEDIAN, reports.read(MEDIAN, SharedMedian))

    def _judge(self, reports: NodeReports, own: NodeTimes) -> None:
        """Write the median of the times that the nodes have shared of late."""
        seconds: list[float] = []
        for node_rank, found in enumerate(reports.read_all(NodeTimes)):
            self._note(node_rank, found)
            recent = self._recent(node_rank)
            seconds += recent.seconds if recent else ()
        median = SharedMedian(own.fence, own.window, Median.of(seconds))
        reports.write(MEDIAN, median)
        self._note(MEDIAN, median)

    def _note(self, name: int | str, record: Any) -> None:
        """Remember a record if it is new, of this round, and plausible."""
        before, _ = self._found.get(name, (None, 0))
        if record is not None and record != before and record.fence == self._fence and record.plausible:
            self._found[name] = record, self._window

    def _recent(self, name: int | str) -> Any:
        """Return the newest record of that name; None: none has come for ``LASTS`` windows."""
        record, window = self._found.get(name, (None, 0))
        return record if self._window - window < LASTS else None
