"""The failures of this node's workers in the running round: which of them count, and when they are reported to the other nodes.

The first to end is often not the culprit. A worker that fails because it lost its peers may be dead some milliseconds
before the traceback of the one it lost; were all workers stopped at once, nothing would ever show who that was. So the
failure of a victim is held back for a moment, in which nothing happens and the culprit, here or on another node, can
fail by itself.

The failure of a worker that a signal may have ended is held back longer. systemd, Slurm and ``docker stop`` signal every
process of a node, the workers often some milliseconds before the agent: when the agent is signalled as well, its workers have
not failed, the node leaves. Any other failure is reported at once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

from elastirun import clock
from elastirun.agent.failures import oom
from elastirun.agent.failures.report import (
    STDOUT_CLOSED,
    VICTIM,
    explain,
    full_disk,
    has_failed,
    lost_its_stdout,
    make_record,
    may_be_asked_for,
    nobody_reads,
    read_error_file,
    shorten,
)
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.processes.workers import WorkerExit
from elastirun.rendezvous.formation import root_cause
from elastirun.rendezvous.records import ExitRecord

HOLD = 0.3  # seconds that the failure of a victim is held back
SIGNAL_HOLD = 1.0  # seconds that an end is held back which a signal may have brought about; the agent is signalled within milliseconds
MAX_TOLD = 8  # failures of one node and round that are reported to the other nodes


class Blame:
    """``tell_at``: when ``worst`` is to be told, on ``elastirun.clock``; ``began``: when the set was started, seconds since the epoch."""

    def __init__(self, node: str, logs: RunLogs) -> None:
        self._node, self._logs = node, logs
        self.began: float | None = None
        self.begin(-1, False)

    def begin(self, attempt: int, alone: bool) -> None:
        """A new set is about to start. ``attempt``: its round - 1; ``alone``: its only worker has no peers to lose."""
        self._attempt, self._alone = attempt, alone
        self._records: list[ExitRecord] = []
        self._held: list[ExitRecord] = []  # those of ``_records`` that do not count once the agent is signalled
        self._leaving = False  # the agent was signalled: this node leaves
        self._suspects: dict[int, tuple[str, ...]] = {}  # what local ranks that were failing when we stopped them had said by then
        self._oom_kills = oom.oom_kills()
        self.stopped = False
        self.tell_at = math.inf
        if attempt >= 0:
            self.began = time.time()

    @property
    def worst(self) -> tuple[ExitRecord, ...]:
        """The failures so far, the root cause first and whole, the others with their last lines."""
        first, others = root_cause(self._records)[:1], root_cause(self._records)[1:MAX_TOLD]
        return (*first, *map(shorten, others))

    def add(self, record: ExitRecord, hold: float = 0.0) -> None:
        """Record a failure, which is reported to the machine after ``hold`` seconds."""
        if hold == SIGNAL_HOLD or (hold and self._held):  # the victims of a worker that was told to leave have not failed either
            if self._leaving:
                return
            self._held.append(record)
            hold = SIGNAL_HOLD
        self._records.append(record)
        if not self.stopped:
            self.tell_at = min(self.tell_at, clock.now() + hold)

    def ended(self, end: WorkerExit) -> None:
        """A worker has ended."""
        if end.killed_by_us:
            if end.code and end.local_rank in self._suspects:
                self.add(make_record(self._node, end, self._suspects[end.local_rank], alone=self._alone))
        elif end.code:
            lines, error = self._logs.last_lines(end.local_rank), self._error(end.local_rank)
            unread = self._logs.own_stdout(end.local_rank) and lost_its_stdout(end.code, error or lines) and nobody_reads(1)
            note = "; ".join(filter(None, (self._out_of_memory(end, lines), self._full_disk(end), STDOUT_CLOSED if unread else "")))
            record = make_record(self._node, end, lines, error, note, self._alone or unread)
            asked = may_be_asked_for(end, error or lines)
            self.add(record, SIGNAL_HOLD if asked else HOLD if record.blame == VICTIM else 0.0)

    def _out_of_memory(self, end: WorkerExit, lines: Sequence[str]) -> str:
        killed = oom.explain(self._oom_kills)
        note = explain(end.code, lines, killed)
        if killed and killed in note:
            self._oom_kills = (self._oom_kills or 0) + 1  # that explains this end and no other
        return note

    def _full_disk(self, end: WorkerExit) -> str:
        path = self._logs.error_file(self._attempt, end.local_rank)
        return self._logs.in_time(partial(full_disk, os.path.dirname(path)), "") if path else ""

    def leave(self) -> None:
        """The agent was signalled. Workers that a signal ended a moment ago, or ends from now on, have left: they did not fail."""
        self._leaving = True
        self._records = [record for record in self._records if record not in self._held]
        self._held.clear()
        if not self._records:
            self.tell_at = math.inf

    def tell(self) -> tuple[ExitRecord, ...]:
        """Return ``worst``, to be reported to the machine when ``tell_at`` has come. All recorded failures count from now on."""
        self.tell_at = math.inf
        self._held.clear()
        return self.worst

    def stop(self, alive: Iterable[int]) -> None:
        """The local ranks ``alive`` are about to be signalled.

        What they say from now on may come of that signal, and is not held against them. What they have said before is.
        """
        self.stopped, self.tell_at = True, math.inf
        shown = {local_rank: (self._logs.last_lines(local_rank), self._error(local_rank)) for local_rank in alive}
        self._suspects = {i: error or lines for i, (lines, error) in shown.items() if has_failed(lines, error)}

    def _error(self, local_rank: int) -> tuple[str, ...] | None:
        path = self._logs.error_file(self._attempt, local_rank)
        return self._logs.in_time(partial(read_error_file, path), None) if path else None
