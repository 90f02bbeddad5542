"""Turns the events of all agents into what the page shows: lanes of states, rounds, faults with their costs, failures. Pure.

The lane of an agent is divided without gaps, so its states add up to its life, as in the account (docs/account.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastirun.report.clocks import AgentEvents, Timed
from elastirun.report.reader import Event

JOINING, STARTING, RUNNING, REPEATED, SAVING = "joining", "starting", "running", "done again", "saving"
STOPPING, RESTARTING, SITTING_OUT = "stopping", "restarting", "sitting out"
FINISHING, UNACCOUNTED = "finishing", "not accounted"
STATES = (JOINING, STARTING, RUNNING, REPEATED, SAVING, STOPPING, RESTARTING, SITTING_OUT, FINISHING, UNACCOUNTED)
OTHER_LOSSES = {  # seconds without training that no fault has caused
    JOINING: "waiting for nodes, from the start of an agent on",
    STARTING: "first start",
    SAVING: "saving checkpoints",
    SITTING_OUT: "nodes that sat out for their strikes",
    FINISHING: "finishing",
}
CAUSES = {
    "failure": "a worker failed",
    "lost": "a node was lost",
    "leave": "a node left",
    "join": "a node joined",
    "unknown": "a cause that no event tells",
}
GAVE_UP = ("timeout", "store lost")  # outcomes of an agent that waited for a next round
MOST_LINES = 400  # lines of one stack or traceback

FaultKey = tuple[int, int]  # number of the job, and of the round that ended early


@dataclass(frozen=True)
class Segment:
    """A time in which an agent was in one state. ``fault``: what has caused it; None: none has."""

    state: str
    begin: float
    end: float
    round: int
    fault: FaultKey | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Lane:
    """The life of one agent."""

    node: str
    name: str
    job: int
    shifted: float
    begin: float
    end: float
    segments: list[Segment] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)  # time, steps per second
    outcome: str = ""  # of its ``end`` event; empty: it has none, so the agent was killed or still runs
    number: int = 0  # of the lane among those with the same name


@dataclass
class Fault:
    """The end of a round before its work was done. Seconds are those of all nodes together."""

    job: int
    round: int
    at: float
    cause: str
    reason: str
    by: str
    cost: dict[str, float] = field(default_factory=dict)  # seconds by state
    nodes: int = 0  # that it has cost something

    @property
    def seconds(self) -> float:
        return sum(self.cost.values())


@dataclass(frozen=True)
class Round:
    """A round from the start of its workers to its end."""

    job: int
    number: int
    begin: float
    end: float
    world_size: int
    nodes: int
    reason: str


@dataclass(frozen=True)
class Failure:
    """The failure of a worker, a hang of workers, a straggler, or a node that sits out; ``lines``: stacks, or the last lines of stderr."""

    at: float
    name: str
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Loss:
    """A row of the table of lost time. ``count``: faults; None: it is none."""

    what: str
    seconds: float
    count: int | None = None
    longest: Fault | None = None


@dataclass
class Story:
    """All that the page shows."""

    lanes: list[Lane]
    faults: list[Fault]
    rounds: list[Round]
    failures: list[Failure]
    spent: dict[str, float]  # seconds of all lanes by state
    losses: list[Loss]  # the largest first
    begin: float
    end: float
    outcome: str  # how the job ended, for people
    steps_known: bool
    repeats_known: bool

    @property
    def total(self) -> float:
        """Seconds of all nodes together."""
        return sum(lane.end - lane.begin for lane in self.lanes)

    @property
    def goodput(self) -> float:
        return self.spent.get(RUNNING, 0.0) / self.total if self.total > 0 else 0.0


def tell(agents: Sequence[AgentEvents]) -> Story:
    """Return the story of the agents. There is at least one."""
    lost = _losses_of_nodes(agents)
    lanes = [_lane(agent, lost) for agent in agents]
    _number(lanes)
    faults = _faults(agents)
    for lane in lanes:
        _charge(lane, faults)
    spent: defaultdict[str, float] = defaultdict(float)
    for segment in (segment for lane in lanes for segment in lane.segments):
        spent[segment.state] += segment.seconds
    every = [one.event for agent in agents for one in agent.events]
    ordered = sorted(faults.values(), key=lambda fault: fault.at)
    return Story(
        lanes=lanes,
        faults=ordered,
        rounds=_rounds(agents),
        failures=_failures(agents),
        spent=dict(spent),
        losses=_losses(lanes, ordered),
        begin=min(lane.begin for lane in lanes),
        end=max(lane.end for lane in lanes),
        outcome=_outcome(agents),
        steps_known=any(event.kind == "steps" for event in every),
        repeats_known=any(event.kind == "steps" and event.number("step") is not None for event in every),
    )


# -- lanes ---------------------------------------------------------------------------------------------------------------------


class _Walk:
    """Walks through the events of one agent and divides its life. ``at``: until when it is divided."""

    def __init__(self, job: int, begin: float, stepped: set[int] | None) -> None:
        """``stepped``: the rounds in which steps were stamped; None: they never are."""
        self._stepped = stepped
        self.segments: list[Segment] = []
        self._job, self.at = job, begin
        self.state, self.round = JOINING, 0
        self.fault: FaultKey | None = None
        self._started: float | None = None  # when the workers of the running round were started
        self._stopping: float | None = None  # when they got the stop signal
        self._wait_since = 0  # index of the first segment after the last round

    @property
    def running(self) -> bool:
        return self._started is not None

    def see(self, one: Timed) -> None:
        """Take the next event."""
        event = one.event
        if event.kind == "round":
            self.start(event.whole("round"), one.at)
        elif event.kind == "round_spent":
            self.spend(event, one.at)
        elif event.kind == "stop":
            self.stop(one.at)
        elif event.kind == "broken":
            self.broken(event.whole("round"), one.at)
        elif event.kind in ("sits_out", "sat_out") and not self.running:
            self.become(SITTING_OUT if event.kind == "sits_out" else JOINING, one.at)
            self.fault, self.round = None, 0

    def become(self, state: str, at: float) -> None:
        """Close the present state."""
        self.put(self.state, at)
        self.state = state

    def put(self, state: str, until: float) -> None:
        if until > self.at:
            self.segments.append(Segment(state, self.at, until, self.round, self.fault))
            self.at = until

    def start(self, number: int, at: float) -> None:
        if self.running:  # its end is missing in the file
            self.end_unseen(at)
        self.become(STARTING, at)
        self.round, self._started, self._stopping = number, at, None

    def stop(self, at: float) -> None:
        self._stopping = at if self._stopping is None else self._stopping

    def spend(self, event: Event, at: float) -> None:
        """Divide the round by what its agent has counted."""
        if not self.running:
            return
        for name, state in (("starting", STARTING), ("repeated", REPEATED)):
            self.put(state, min(at, self.at + event.seconds(name)))
        if self._stepped is not None and self.round not in self._stepped:  # it ended before its first step, see Account
            self.put(STARTING, min(at, self.at + event.seconds("training")))
        self.fault = None
        for name, state in (("saving", SAVING), ("training", RUNNING)):
            self.put(state, min(at, self.at + event.seconds(name)))
        self.fault, self._started = (self._job, self.round), None
        self._wait_since = len(self.segments)
        self.put(STOPPING, at)
        self.state = RESTARTING

    def end_unseen(self, at: float) -> None:
        """Close a round whose account is missing."""
        self.fault = None
        if self._stopping is not None:
            self.put(UNACCOUNTED, min(at, self._stopping))
        self.put(UNACCOUNTED if self._stopping is None else STOPPING, at)
        self._started, self.state = None, RESTARTING
        self.fault, self._wait_since = (self._job, self.round), len(self.segments)

    def broken(self, number: int, at: float) -> None:
        """Charge another fault from now on: a round has ended early before this node's workers were started."""
        if self.state == RESTARTING and not self.running and number > self.round:
            self.put(RESTARTING, at)
            self.fault = (self._job, number)

    def finish(self, at: float, gave_up: bool) -> list[Segment]:
        """Return the segments. What follows the last round is no restart, because none came, unless the agent gave up waiting."""
        if self.running:
            self.end_unseen(at)
        else:
            self.put(self.state, at)
        after = [Segment(FINISHING, one.begin, one.end, one.round) for one in self.segments[self._wait_since :]]
        return self.segments if self.state in (JOINING, SITTING_OUT) or gave_up else self.segments[: self._wait_since] + after


def _lane(agent: AgentEvents, lost: dict[FaultKey, float]) -> Lane:
    first, last = agent.events[0], agent.events[-1]
    begin = first.at
    for one in agent.events:
        if one.event.kind == "account":  # its seconds begin with the agent, before the first event
            begin = max(0.0, min(begin, one.at - one.event.seconds("total")))
    stepped = {one.event.whole("round") for one in agent.events if one.event.kind == "steps"}
    walk = _Walk(agent.job, begin, stepped or None)
    lane = Lane(agent.node, agent.name, agent.job, agent.shifted, begin, last.at)
    for one in agent.events:
        walk.see(one)
        rate = one.event.number("steps_per_second")
        if one.event.kind == "steps" and rate is not None:
            lane.rates.append((one.at, rate))
        elif one.event.kind == "end":
            lane.outcome = one.event.text("outcome") or "ended"
    if not lane.outcome and walk.running:  # its death is what the others have noticed
        lane.end = max(lane.end, lost.get((agent.job, walk.round), lane.end))
    lane.segments = walk.finish(lane.end, lane.outcome in GAVE_UP)
    return lane


def _losses_of_nodes(agents: Sequence[AgentEvents]) -> dict[FaultKey, float]:
    """Return when the loss of a node in a round was first noticed."""
    found: dict[FaultKey, float] = {}
    for job, one in _each(agents, "broken"):
        if one.event.text("cause") == "lost":
            key = (job, one.event.whole("round"))
            found[key] = min(one.at, found.get(key, one.at))
    return found


def _number(lanes: Iterable[Lane]) -> None:
    """Number the lanes with the same name, each with the lowest that is free: an agent that was started again goes on in its lane."""
    ends: dict[str, list[float]] = {}
    for lane in sorted(lanes, key=lambda lane: lane.begin):
        of_name = ends.setdefault(lane.name, [])
        lane.number = next((i for i, end in enumerate(of_name) if end <= lane.begin), len(of_name))
        of_name[lane.number : lane.number + 1] = [lane.end]


# -- faults --------------------------------------------------------------------------------------------------------------------


def _each(agents: Sequence[AgentEvents], *kinds: str) -> Iterable[tuple[int, Timed]]:
    return ((agent.job, one) for agent in agents for one in agent.events if one.event.kind in kinds)


def _faults(agents: Sequence[AgentEvents]) -> dict[FaultKey, Fault]:
    """Return the rounds that ended early, as the first event tells of each."""
    found: dict[FaultKey, Fault] = {}
    for job, one in sorted(_each(agents, "broken"), key=lambda item: item[1].at):
        key = (job, one.event.whole("round"))
        if key not in found:
            cause, reason, by = (one.event.text(name) for name in ("cause", "reason", "by"))
            found[key] = Fault(job, key[1], one.at, cause if cause in CAUSES else "unknown", reason, by)
    return found


def _charge(lane: Lane, faults: dict[FaultKey, Fault]) -> None:
    """Add what the faults have cost this lane."""
    charged = set()
    for one in lane.segments:
        if one.fault is None:
            continue
        if one.fault not in faults:
            faults[one.fault] = Fault(*one.fault, one.begin, "unknown", "no event tells why", "")
        cost = faults[one.fault].cost
        cost[one.state] = cost.get(one.state, 0.0) + one.seconds
        charged.add(one.fault)
    for key in charged:
        faults[key].nodes += 1


def _losses(lanes: Sequence[Lane], faults: Sequence[Fault]) -> list[Loss]:
    """Return what time was lost to, the largest first."""
    found = []
    for cause, words in CAUSES.items():
        own = [fault for fault in faults if fault.cause == cause]
        if own:
            longest = max(own, key=lambda fault: fault.seconds)
            found.append(Loss(words, sum(fault.seconds for fault in own), len(own), longest))
    for state, words in OTHER_LOSSES.items():
        seconds = sum(one.seconds for lane in lanes for one in lane.segments if one.state == state and one.fault is None)
        if seconds > 0:
            found.append(Loss(words, seconds))
    return sorted(found, key=lambda loss: -loss.seconds)


# -- rounds, failures, the end -------------------------------------------------------------------------------------------------


def _rounds(agents: Sequence[AgentEvents]) -> list[Round]:
    """Return the rounds whose workers were started, in order."""
    starts: dict[FaultKey, Timed] = {}
    ends: dict[FaultKey, float] = {}
    for job, one in _each(agents, "round", "broken", "closed", "round_spent"):
        key = (job, one.event.whole("round"))
        if one.event.kind == "round":
            if key not in starts or one.at < starts[key].at:
                starts[key] = one
        elif one.event.kind == "round_spent":
            ends.setdefault(key, one.at)
        else:
            ends[key] = min(one.at, ends.get(key, one.at))
    last = max(one.at for agent in agents for one in agent.events)
    found = []
    for (job, number), one in starts.items():
        end, event = max(one.at, ends.get((job, number), last)), one.event
        found.append(Round(job, number, one.at, end, event.whole("world_size"), event.whole("nodes"), event.text("reason")))
    return sorted(found, key=lambda one: one.begin)


def _failures(agents: Sequence[AgentEvents]) -> list[Failure]:
    """Return the failures of workers, the hangs, the stragglers and the nodes that sat out, in order."""
    describe = {"failure": _failure, "hang": _hang, "straggler": _straggler, "sits_out": _sits_out}
    found = []
    for _, one in _each(agents, *describe):
        title, lines = describe[one.event.kind](one.event)
        found.append(Failure(one.at, one.event.name, title, lines[:MOST_LINES]))
    return sorted(found, key=lambda one: one.at)


def _failure(event: Event) -> tuple[str, tuple[str, ...]]:
    code = event.fields.get("code")
    how = f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
    blame, note = event.text("blame").replace("_", " "), event.text("note")
    title = f"round {event.whole('round')}: rank {event.whole('rank')} failed: {how}{f', {note}' if note else ''} ({blame})"
    return title, event.texts("lines")


def _hang(event: Event) -> tuple[str, tuple[str, ...]]:
    return f"no step for {event.seconds('seconds'):.0f} s; where the workers were:", _stacks(event)


def _straggler(event: Event) -> tuple[str, tuple[str, ...]]:
    times, device = event.seconds("times_median"), event.text("device") or "a device"
    own, median = event.seconds("seconds"), event.seconds("median")
    line = f"It computes for {own:.3g} s per step, the median rank of the job for {median:.3g} s."
    return f"rank {event.whole('rank')} on {device} is {times:.3g} times as slow as the median rank", (line,)


def _sits_out(event: Event) -> tuple[str, tuple[str, ...]]:
    found = event.texts("strikes")
    return f"the node sits out for {event.seconds('cooldown'):.0f} s at most, for {len(found)} strike{'s' * (len(found) > 1)}:", found


def _stacks(event: Event) -> tuple[str, ...]:
    """Return the stacks of all workers in a hang, one after the other."""
    lines: list[str] = []
    for worker in event.items("workers"):
        lines += [f"rank {worker.whole('rank')}, {worker.whole('steps')} steps:", *worker.texts("stack"), ""]
    return tuple(lines)


def _outcome(agents: Sequence[AgentEvents]) -> str:
    """Return how the job ended."""
    closed = [one for _, one in _each(agents, "closed")]
    if closed:
        last = max(closed, key=lambda one: one.at)
        verdict, reason = last.event.text("verdict"), last.event.text("reason")
        return f"The job {verdict}" + (f": {reason}" if reason and verdict != "succeeded" else "")
    return "No event tells how the job ended"
