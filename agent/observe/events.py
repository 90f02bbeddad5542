"""events.jsonl: what happened on this node, one JSON object a line, for programs. docs/events.md describes every event and field."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from elastirun import clock
from elastirun.agent import part
from elastirun.agent.observe import account
from elastirun.agent.observe.node_states import NodeState
from elastirun.agent.observe.round_ends import cause_of, ended_rounds, lost_after_all
from elastirun.agent.output.log_files import LogFile
from elastirun.agent.part import NodeRound, Part
from elastirun.rendezvous.wire import actions, records
from elastirun.rendezvous.wire.records import Blame, Cause, ExitRecord, RoundRecord

FORMAT = 1  # raised when a field changes its meaning
OF_WORKERS = ("worker_exit", "failure")  # events whose source is a worker, in torchrun's words


class Event:
    """An event. ``kind`` is its name in the file."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind


@dataclass(frozen=True)
class Start(Event, kind="start"):
    """The agent has started. The first event in its file."""

    job: str  # --rdzv-id
    command: str  # of the workers, in one line, without secrets
    version: str  # of elastirun
    python: str  # version
    torch: str  # version; empty: none is installed where the agent runs


@dataclass(frozen=True)
class State(Event, kind="state"):
    """This node has changed its state, now or some time ago: when a round began and ended to train is known late."""

    state: NodeState
    ago: float  # seconds from the change to this event; it replaces what earlier events told of this time
    round: int  # the round whose workers run here, or ran last; 0: none yet
    cause: str  # of the early end of ``round``, or while that runs, of the one before; empty: that did not end early


@dataclass(frozen=True)
class Formed(Event, kind="formed"):
    """A round was formed, with or without this node."""

    round: int
    reason: str
    nodes: Sequence[str]  # host names in rank order
    joined: Sequence[str]  # since the round before
    gone: Sequence[str]  # since the round before
    world_size: int
    restarts: int


@dataclass(frozen=True)
class Round(Event, kind="round"):
    """The workers of this node are started."""

    round: int
    fence: str  # names the round and its store: equal on all nodes of the round, and in no other job
    reason: str
    nodes: int
    world_size: int
    node_rank: int
    ranks: Sequence[int]
    formed_after: float | None  # seconds since this node knew that the last round was over; None: this is its first
    kept: Sequence[int] = ()  # those of ``ranks`` whose workers are live and go on in the processes of the last round


@dataclass(frozen=True)
class WorkerExit(Event, kind="worker_exit"):
    """A worker ended."""

    rank: int
    local_rank: int
    pid: int
    code: int  # exit status, or minus the number of the signal that ended it
    after: float  # seconds since the start of the round


@dataclass(frozen=True)
class Failure(Event, kind="failure"):
    """A failure of a worker of this node is reported to the other nodes."""

    round: int
    rank: int
    local_rank: int
    pid: int
    code: int  # as in ``WorkerExit``
    blame: str  # a name of ``Blame``, lower case
    note: str
    lines: Sequence[str]  # its traceback, or the last lines of its stderr

    @staticmethod
    def of(number: int, record: ExitRecord) -> Failure:
        """Return the event for a failure in round ``number``."""
        blame = Blame(record.blame).name.lower()
        return Failure(number, record.rank, record.local_rank, record.pid, record.code, blame, record.note, record.lines)


@dataclass(frozen=True)
class Broken(Event, kind="broken"):
    """The running round is over before its work is done."""

    round: int
    cause: str
    reason: str
    by: str  # host name of the node that noticed, or of the one whose guard told of the death of its agent
    lost: Sequence[str]  # host names of the nodes that fell silent, or whose agents died


@dataclass(frozen=True)
class BrokenByLoss(Broken, kind="broken"):
    """``Broken``, on the node that noticed the loss."""

    detected_after: float  # seconds since the last keep-alive of the lost node


@dataclass(frozen=True)
class Stop(Event, kind="stop"):
    """The workers of this node get the stop signal."""

    round: int
    planned: bool
    reason: str
    grace: float  # seconds until SIGKILL


@dataclass(frozen=True)
class Stopped(Event, kind="stopped"):
    """The last worker of this node has ended."""

    round: int
    after: float  # seconds since ``Stop``


@dataclass(frozen=True)
class Signal(Event, kind="signal"):
    """This agent got a signal."""

    signal: str
    count: int  # of the signals so far, this one included


@dataclass(frozen=True)
class StoodStill(Event, kind="stood_still"):
    """This agent did not run for a while."""

    seconds: float
    workers_ended: bool


@dataclass(frozen=True)
class Hang(Event, kind="hang"):
    """No worker of this node makes steps any more."""

    seconds: float  # since the last step
    limit: float  # seconds that it may take
    ranks: Sequence[int]  # that are the cause, as far as this node can tell by itself
    workers: Sequence[Mapping[str, object]]  # rank, pid, steps and stack of each


@dataclass(frozen=True)
class Straggler(Event, kind="straggler"):
    """A worker has computed for much longer than the median rank of the job, for a minute."""

    rank: int
    local_rank: int
    device: str
    times_median: float
    seconds: float  # of computing, per step
    median: float  # the same of the median rank


@dataclass(frozen=True)
class SitsOut(Event, kind="sits_out"):
    """This node begins to sit out: it takes no part in the next rounds."""

    round: int  # the last one in which it took part
    strikes: Sequence[str]  # why it has had each, the oldest first
    cooldown: float  # seconds after which it joins again at the latest


@dataclass(frozen=True)
class SatOut(Event, kind="sat_out"):
    """This node joins again."""

    seconds: float  # for which it has sat out
    reason: str


@dataclass(frozen=True)
class CheckpointsHeld(Event, kind="checkpoints_held"):
    """This agent keeps another amount of checkpoints in memory than before."""

    images: int
    bytes: int
    limit: int  # bytes


@dataclass(frozen=True)
class Steps(Event, kind="steps"):
    """The workers of this node have made steps. Written while they run, at intervals, and when they have ended."""

    round: int
    steps: int  # of the worker here that has made most, in this round
    step: int | None  # the number of its last step in the whole training; None: it has not said
    steps_per_second: float | None  # since the last such event, or since the first step of the round; None: not known


@dataclass(frozen=True)
class RoundSpent(account.RoundSpent, Event, kind="round_spent"):
    """The last worker of this node has ended: what its round was spent on."""

    round: int


@dataclass(frozen=True)
class Account(account.Totals, Event, kind="account"):
    """The agent is about to end: its whole account."""


@dataclass(frozen=True)
class Closed(Event, kind="closed"):
    """The job is decided."""

    round: int
    verdict: str
    reason: str
    by: str  # host name


@dataclass(frozen=True)
class End(Event, kind="end"):
    """The agent ends. Always the last event in its file."""

    outcome: str
    reason: str
    code: int


@dataclass(eq=False)
class EventLog:
    """Appends to ``file`` (None: no file), hands each event to ``also`` and to ``spans``.

    ``also`` (the console, when asked for) gets the event as a line in torchrun's form; ``spans`` gets the event and its time in
    seconds since the epoch.
    """

    node: str
    name: str
    file: LogFile | None = None
    also: Callable[[str], None] | None = None
    spans: Callable[[Event, float], None] | None = None

    def write(self, event: Event) -> None:
        """Write one line. A disk that is full or hangs loses the line and does not stop the job."""
        now = time.time()
        when = {"v": FORMAT, "time": now, "mono": time.monotonic()}
        named = {"node": self.node, "name": self.name, **vars(event)}
        line = json.dumps({**when, "event": event.kind, **named})
        if self.file is not None:
            self.file.write(line.encode() + b"\n")
        if self.also is not None:
            self.also(torchrun_line(event.kind, now, named))
        if self.spans is not None:
            self.spans(event, now)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def torchrun_line(kind: str, now: float, metadata: Mapping[str, object]) -> str:
    """Return an event in the form of torchrun's, which ``Event.deserialize`` of torch reads. ``now``: in seconds since the epoch."""
    source = "WORKER" if kind in OF_WORKERS else "AGENT"
    return json.dumps({"name": kind, "source": source, "timestamp": int(now * 1000), "metadata": metadata})


class RoundEvents(Part):
    """Writes the events of rounds and workers to ``log``, and remembers when the last round ended: their durations count from that moment.

    ``ended``: how many rounds have ended before their work was done, by cause; a failure counts once it is judged. ``started_at``: when
    this node's workers were started last. ``node``: the id of this one. ``silent_for``: node id to seconds without a keep-alive.
    """

    def __init__(self, log: EventLog, node: str, silent_for: Callable[[str], float]) -> None:
        self.ended: Counter[str] = Counter()
        self.started_at: float | None = None
        self._log = log
        self._node, self._silent_for = node, silent_for
        self._seen: RoundRecord | None = None  # the record whose changes are written
        self._number = 0  # of the round whose workers run here, or ran last
        self._over_since: float | None = None  # when this node knew that the last round is over, until the next one starts

    def see(self, record: RoundRecord | None, now: float) -> None:
        """Write what has changed since the last ``record``."""
        if record is None or record is self._seen:
            return
        for event in changes(self._seen, record):
            if isinstance(event, Broken):
                self._over_since = self._over_since or now
                if record.broken and record.broken.by == self._node and record.broken.died:
                    event = BrokenByLoss(**vars(event), detected_after=round(self._silent_for(record.broken.died[0]), 3))
            self._log.write(event)
        self.ended.update(ended_rounds(self._seen, record))
        self._seen = record

    def round_starts(self, round: NodeRound) -> None:
        record, now = round.record, clock.now()
        after = self._since_over(now)
        nodes, workers = len(record.members), record.world_size
        self._log.write(
            Round(record.round, record.fence, record.reason, nodes, workers, round.node_rank, [*round.ranks], after, round.kept)
        )
        self._number, self._over_since, self.started_at = record.round, None, now

    def worker_ended(self, end: part.WorkerExit) -> None:
        self._log.write(WorkerExit(end.rank, end.local_rank, end.pid, end.code, end.after))

    def round_stops(self, stop: actions.Stop, grace: float) -> None:
        self._over_since = clock.now()
        self._log.write(Stop(self._number, stop.planned, stop.reason, grace))

    def idle(self) -> None:
        """Write nothing where the round itself was not over before."""
        if (after := self._since_over(clock.now())) is not None:
            self._log.write(Stopped(self._number, after))

    def _since_over(self, now: float) -> float | None:
        return None if self._over_since is None else round(now - self._over_since, 3)


def changes(old: RoundRecord | None, new: RoundRecord) -> list[Event]:
    """Return what happened between two reads of the round record. Pure."""
    found: list[Event] = []
    names = {m.id: m.name for m in (*(old.members if old else ()), *new.members)}
    before = {m.id for m in old.members} if old else set()
    now = {m.id for m in new.members}
    same_round = old is not None and old.round == new.round
    if new.round and not same_round:
        if old is not None and old.broken is not None and lost_after_all(old, new):
            lost = [names[i] for i in names if i in before - now]
            reason, by = _after_loss(lost, old.broken.reason), names.get(old.broken.by, old.broken.by)
            found.append(Broken(old.round, Cause.LOST.value, reason, by, lost))
        joined, gone = ([names[i] for i in sorted(ids, key=lambda i: names[i])] for ids in (now - before, before - now))
        found.append(Formed(new.round, new.reason, [m.name for m in new.members], joined, gone, new.world_size, new.failures))
    broken, closed, cause = new.broken, new.closed, cause_of(new)
    if broken is not None and cause is not None and not (same_round and old and cause_of(old) is cause):
        found.append(_end_of(new, broken, cause, names))
    if closed is not None and not (old and old.closed):
        found.append(Closed(new.round, closed.verdict.value, closed.reason, names.get(closed.by, closed.by)))
    return found


def _end_of(record: RoundRecord, broken: records.Broken, cause: Cause, names: Mapping[str, str]) -> Broken:
    """Return the event for ``broken``, the end of the round of ``record``. ``names``: of the nodes, by id."""
    # A node that leaves the store of a lost host for another one does not know yet whom the record there names.
    ids = broken.died or ((record.host,) if cause is Cause.LOST else ())
    lost = [names.get(i, i) for i in ids]
    reason = broken.reason if cause is broken.cause else _after_loss(lost, broken.reason)
    return Broken(record.round, cause.value, reason, names.get(broken.by, broken.by), lost)


def _after_loss(lost: Sequence[str], reason: str) -> str:
    """Return why a round ended in which a worker failed for the loss of nodes. ``reason``: what was said of the failure."""
    return f"{', '.join(lost)} was lost; {reason}"
