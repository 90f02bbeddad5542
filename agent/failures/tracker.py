"""Failures of this node's workers in the running round: which of them count, and when to report them to the other nodes.

The first worker to end is often not the culprit. A worker that lost its peers may end some milliseconds before the
traceback of the peer is written. If all workers were stopped at once, nothing would show which worker failed first. So
the failure of a victim is held back for VICTIM_HOLD seconds, in which the culprit, on this node or another, can fail by itself.

A failure that a signal may have caused is held back for SIGNAL_HOLD seconds. systemd, Slurm and ``docker stop`` signal every
process of a node, the workers often some milliseconds before the agent. If the agent is signalled too, its workers have
not failed: the node leaves. Every other failure is reported at once (see docs/decisions/0001).
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elastirun import clock
from elastirun.agent.failures import classify, oom
from elastirun.agent.failures.consequences import Consequences
from elastirun.agent.failures.report import read_error_file
from elastirun.agent.hangs.causes import Observed, describe, traceback
from elastirun.agent.host.descriptors import ready
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import NodeRound, Part, WorkerExit
from elastirun.rendezvous.failures import root_cause
from elastirun.rendezvous.wire.records import Blame, ExitRecord

VICTIM_HOLD = 0.3  # seconds; enough for the culprit to write its traceback and end, which takes tens of milliseconds
SIGNAL_HOLD = 1.0  # seconds; enough for a supervisor to signal the agent too, which takes milliseconds
LOST_PEERS = "lost peers of which no agent has seen a failure; its process goes on"
MAX_REPORTED = 8  # failures per node and round that the node's row carries; more would not fit
MAX_MISSED = 3  # of those, the last ones: the workers that the others have missed are among them, up to so many


class FailureTracker(Part):
    """Collects the failures of one round after the other. All methods are called in the loop's thread.

    ``report_at``: when to report ``failures`` to the machine, on ``elastirun.clock``; infinity when there is nothing to report.
    ``began``: when the current round's workers were started, in seconds since the epoch; None before the first round.
    ``stopped``: whether the agent has told the round's workers to stop.
    """

    def __init__(
        self, node: str, logs: RunLogs, warn: Callable[[str], None], missing_module: Callable[[Sequence[str]], str] = lambda lines: ""
    ) -> None:
        """``missing_module`` returns the note on a worker with these last words that lacks a module; empty: it lacks none."""
        self._node, self._logs, self._missing_module = node, logs, missing_module
        self._consequences = Consequences(logs, warn)
        self.began: float | None = None
        self._records: list[ExitRecord] = []
        self._victims_reported = False  # nobody else had failed when the other nodes were told, or nobody had said anything
        self.start_round(-1, False)

    def start_round(self, attempt: int, alone: bool) -> None:
        """Forget the last round. ``attempt``: the new round's number - 1. ``alone``: its only worker has no peers to lose."""
        self.tell_victims()
        self._attempt, self._alone = attempt, alone
        self._idle = False  # no worker of the round runs any more
        self._records = []
        self._held: list[ExitRecord] = []  # those of ``_records`` that do not count if the agent is signalled
        self._leaving = False  # the agent was signalled, so this node leaves
        self._shown: dict[int, tuple[str, ...]] = {}  # by local rank: the output of workers that were failing when the agent stopped them
        self._expected: dict[int, str] = {}  # by local rank: why the worker is about to end by a signal of this agent
        self.hung: set[int] = set()  # local ranks of workers that hang, which are their failures
        self._ended_well: list[WorkerExit] = []
        self._victims_reported = False
        self._noted = False  # the workers that peers have missed are among ``_records``
        self._oom_kills = oom.oom_kills()
        self.stopped = False
        self.report_at = math.inf
        if attempt >= 0:
            self.began = time.time()

    def round_starts(self, round: NodeRound) -> None:
        self.start_round(round.number - 1, alone=round.record.world_size == 1)

    @property
    def failures(self) -> tuple[ExitRecord, ...]:
        """The failures so far: the root cause first and whole, the others with their last lines only."""
        first, *others = root_cause(self._records) or (None,)
        if len(others) >= MAX_REPORTED:
            others = [*others[: MAX_REPORTED - 1 - MAX_MISSED], *others[-MAX_MISSED:]]  # those that were missed come last
        return () if first is None else (first, *map(classify.shorten, others))

    @property
    def victims(self) -> tuple[tuple[int, int], ...]:
        """Ranks and local ranks of the workers that have failed, if all of them probably for having lost their peers."""
        lost = all(record.blame == Blame.VICTIM for record in self._records if record.blame != Blame.KILLED_BY_US)
        return tuple((record.rank, record.local_rank) for record in self._records if record.blame == Blame.VICTIM) if lost else ()

    def note_missed(self, elsewhere: Iterable[Observed]) -> None:
        """Note, once, the workers that the failed peers probably waited for: those ``elsewhere``, and those that ended with 0."""
        if self._noted:
            return
        self._noted = True
        after = time.time() - (self.began or time.time())
        for worker in elsewhere:
            note = f"was not where the others waited: {describe(worker)}"
            killed = WorkerExit(worker.local_rank, worker.rank, worker.pid, -signal.SIGKILL, after, killed_by_us=True)
            self._records.append(classify.record_of(self._node, killed, Blame.KILLED_BY_US, traceback(worker)[1:], note))
        for end in self._ended_well:
            note = f"had ended with 0, {end.after:.1f} s after the start, while others went on"
            self._records.append(classify.record_of(self._node, end, Blame.KILLED_BY_US, (), note))

    def add(self, record: ExitRecord, hold: float = 0.0) -> None:
        """Record a failure that is to be reported to the machine in ``hold`` seconds."""
        # While one failure is held back for a signal, failures of its peers may be its consequence: hold them back as long.
        if hold == SIGNAL_HOLD or (hold and self._held):
            if self._leaving:
                return
            self._held.append(record)
            hold = SIGNAL_HOLD
        self._records.append(record)
        if not self.stopped:
            self.report_at = min(self.report_at, clock.now() + hold)

    def worker_hung(self, end: WorkerExit, blame: Blame, note: str, stack: Sequence[str], seconds: float) -> None:
        """Record the failure of a worker that hangs and is about to be killed. Its end adds nothing, nor does it delay the report.

        It failed when it stopped making steps, ``seconds`` ago: before any peer that its end makes fail.
        """
        self.hung.add(end.local_rank)
        stopped = replace(end, after=max(0.0, end.after - seconds))
        self.add(classify.record_of(self._node, stopped, blame, stack, note))

    def expect_end(self, local_rank: int, why: str) -> None:
        """Note that this agent sends the worker a signal that is to end it: the end counts as a failure, with ``why`` as its note."""
        self._expected[local_rank] = why

    def lost_peers(self, end: WorkerExit) -> None:
        """Record as a failure that a worker has lost its peers, although it runs on. ``end``: the end that a kill would give it now.

        The code is 1, as if the worker had ended with the error.
        """
        self.add(classify.record_of(self._node, replace(end, code=1), Blame.VICTIM, (), LOST_PEERS), VICTIM_HOLD)

    def record_end(self, end: WorkerExit) -> None:
        """Record the end of a worker as a failure if it is one. Called when the parts have heard of it: the log has its last lines then."""
        said: Sequence[str] = ()  # by a worker that has only lost its peers
        if end.local_rank in self.hung:
            pass
        elif end.killed_by_us:
            if end.code and end.local_rank in self._shown:
                self.add(classify.make_record(self._node, end, self._shown[end.local_rank], alone=self._alone))
            elif end.code and classify.shows_lost_peers(lines := self._logs.last_lines(end.local_rank)):
                said = lines
        elif not end.code:
            self._ended_well.append(end)
        else:
            said = self._record_failure(end)
        if said:
            self._consequences.add(end, said)
        else:
            self._consequences.show(end.local_rank)

    def idle(self) -> None:
        self._idle = True
        if self.stopped:  # else the cause may still be told, or is not known when this node reports
            self.tell_victims()

    def tell_victims(self) -> None:
        """Tell of the workers that have only lost their peers."""
        self._consequences.tell(cause_is_unknown=self._victims_reported and (bool(self.victims) or self._cause_is_mute()))

    def _cause_is_mute(self) -> bool:
        """Return whether the workers that failed by themselves have said nothing. A signal explains itself."""
        causes = [record for record in self._records if record.blame in (Blame.FINAL, Blame.OWN_FAULT)]
        return bool(causes) and all(record.code > 0 and not any(record.lines) for record in causes)

    def _record_failure(self, end: WorkerExit) -> Sequence[str]:
        """Record the failure of a worker that ended by itself. Returns what it said if it has only lost its peers; else nothing."""
        lines, error = self._logs.last_lines(end.local_rank), self._error(end.local_rank)
        unread = self._logs.inherits_stdout(end.local_rank) and classify.lost_its_stdout(end.code, error or lines) and has_no_reader(1)
        missing = self._missing_module(error or lines) if end.code > 0 else ""
        expected = self._expected.get(end.local_rank, "")
        notes = (expected or self._signal_note(end, lines), self._full_disk(end), classify.STDOUT_CLOSED if unread else "", missing)
        note = "; ".join(filter(None, notes))
        record = classify.make_record(self._node, end, lines, error, note, self._alone or unread)
        from_outside = not expected and classify.may_be_stopped_from_outside(end, error or lines)
        self.add(record, SIGNAL_HOLD if from_outside else VICTIM_HOLD if record.blame == Blame.VICTIM else 0.0)
        return (error or lines) if record.blame == Blame.VICTIM else ()

    def _signal_note(self, end: WorkerExit, lines: Sequence[str]) -> str:
        killed = oom.explain(self._oom_kills)
        note = classify.explain_signal(end.code, lines, killed)
        if killed and killed in note:
            self._oom_kills = (self._oom_kills or 0) + 1  # each kill that the kernel counts explains one end only
        return note

    def _full_disk(self, end: WorkerExit) -> str:
        path = self._logs.error_file(self._attempt, end.local_rank)
        return self._logs.in_time(partial(full_disk, os.path.dirname(path)), "") if path else ""

    def agent_signalled(self) -> None:
        """Drop the failures that are held back for a signal, and ignore later ones: those workers have left, they did not fail."""
        self._leaving = True
        self._records = [record for record in self._records if record not in self._held]
        self._held.clear()
        if not self._records:
            self.report_at = math.inf

    def take_report(self) -> tuple[ExitRecord, ...]:
        """Return ``failures`` for the machine. All of them count from now on, even if the agent is signalled later."""
        self.report_at = math.inf
        self._held.clear()
        self._victims_reported = bool(self.victims) or self._cause_is_mute()
        if self._idle:
            self.tell_victims()
        return self.failures

    def before_stop(self, alive: Iterable[int]) -> None:
        """Note what the workers with the local ranks ``alive`` have written, before the agent signals them.

        What they write later may be due to the signal, and does not count.
        """
        self.stopped, self.report_at = True, math.inf
        shown = {local_rank: (self._logs.last_lines(local_rank), self._error(local_rank)) for local_rank in alive}
        self._shown = {i: error or lines for i, (lines, error) in shown.items() if classify.shows_own_failure(lines, error)}

    def _error(self, local_rank: int) -> tuple[str, ...] | None:
        path = self._logs.error_file(self._attempt, local_rank)
        return self._logs.in_time(partial(read_error_file, path), None) if path else None


def has_no_reader(fd: int) -> bool:
    """Return whether ``fd`` is a pipe or a socket that nobody reads from any more."""
    return bool(ready([fd], 0, select.POLLOUT).get(fd, 0) & (select.POLLERR | select.POLLHUP))


def full_disk(folder: str) -> str:
    """Return a note that the file system of ``folder`` is full, which may hide why a worker failed; empty when it is not full."""
    with suppress(OSError):
        found = os.statvfs(folder)
        if resource := "space" if found.f_blocks and not found.f_bavail else "inode" if found.f_files and not found.f_favail else "":
            return f"the file system of its logs has no {resource} left ({folder})"
    return ""
