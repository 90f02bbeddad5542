"""Shares what each node sees of a hang, so that its cause is judged for the whole job. See docs/decisions/0022.

Each node writes a report into the rendezvous store. The agent of node rank 0 reads them, judges when all are there, and writes its
verdict, which the others read. While a hang lasts, a thread does this over a connection of its own. The rendezvous takes no part: its
records do not change, and without the verdict each node acts by what it sees itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from elastirun.agent.hangs.causes import WorkerState, judge
from elastirun.agent.store.node_reports import Meeting, NodeReports
from elastirun.errors import StoreError
from elastirun.rendezvous.wire.codec import MAX_INT, clip
from elastirun.threads import start_thread

PAUSE = 0.25  # seconds between two reads of the store
LONGEST_PLACE = 200  # characters
TOPIC, VERDICT = "hang", "verdict"  # names of keys, see ``NodeReports``


@dataclass(frozen=True)
class Report:
    """One node's view of a hang. ``id``: random, because a round may have several hangs; ``workers``: none when the hang is over."""

    fence: str
    id: str
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True)
class SharedVerdict:
    """A ``HangVerdict`` on the workers of all nodes. ``reports``: ids of the reports that it follows from."""

    reports: tuple[str, ...]
    ranks: tuple[int, ...]
    how: int


def decide(reports: Sequence[Report]) -> SharedVerdict:
    """Return the verdict on the reports of all nodes."""
    verdict = judge([worker for report in reports for worker in report.workers])
    return SharedVerdict(tuple(report.id for report in reports), verdict.ranks, verdict.how)


class HangReports:
    """This node's part in the judgement of one hang, from when it exists until ``close``. ``workers``: at least one.

    ``verdict``: None until it is known, which may be never.
    """

    def __init__(self, meeting: Meeting, workers: Sequence[WorkerState]) -> None:
        self.verdict: SharedVerdict | None = None
        self._meeting = meeting
        short = (replace(one, steps=min(one.steps, MAX_INT), place=clip(one.place, LONGEST_PLACE)) for one in workers)
        self._own = Report(meeting.fence, secrets.token_hex(8), tuple(short))
        self._closed = threading.Event()
        start_thread("hang-reports", self._run)

    def close(self) -> None:
        """The hang is over, or its round."""
        self._closed.set()

    def _run(self) -> None:
        """Write this node's report, learn the verdict, and take the report back when the hang is over."""
        with suppress(StoreError), closing(NodeReports(self._meeting, TOPIC)) as reports:
            reports.write(self._meeting.node_rank, self._own)
            while self.verdict is None and not self._closed.wait(PAUSE):
                if self._meeting.node_rank == 0:
                    self._judge(reports)
                else:
                    found = reports.read(VERDICT, SharedVerdict)
                    self.verdict = found if found and self._own.id in found.reports else None
            self._closed.wait()
            reports.write(self._meeting.node_rank, replace(self._own, workers=()))

    def _judge(self, reports: NodeReports) -> None:
        """Judge, if the reports of all nodes are there."""
        found = reports.read_all(Report)
        there = [report for report in found if report and report.workers and report.fence == self._own.fence]
        if len(there) == len(found):
            verdict = decide(there)
            reports.write(VERDICT, verdict)
            self.verdict = verdict
