"""Turns the events of all agents into what the page shows: lanes of states, rounds, faults with their costs, failures. Pure.

The lane of an agent has the states that it has recorded, without gaps, so they add up to its life, as in the account (docs/account.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastirun.agent.observe.node_states import WORDS, NodeState
from elastirun.report.clocks import AgentEvents, Timed
from elastirun.report.reader import EventLine

OTHER_LOSSES = {  # seconds without training that no fault has caused
    NodeState.JOINING: "waiting for nodes",
    NodeState.STARTING: "first start",
    NodeState.SAVING: "saving checkpoints",
    NodeState.SITTING_OUT: "nodes that sat out for their strikes",
    NodeState.FINISHING: "finishing",
}
COSTS = (NodeState.STOPPING, NodeState.RESTARTING, NodeState.STARTING, NodeState.REPEATED)  # of the end of a round
RECORDED = {state.value: state for state, words in WORDS.items() if words.color}
CAUSES = {
    "failure": "a worker failed",
    "lost": "a node was lost",
    "leave": "a node left",
    "join": "a node joined",
    "unknown": "a cause that no event tells",
}
MOST_LINES = 400  # lines of one stack or traceback

FaultKey = tuple[int, int]  # number of the job, and of the round that ended early


@dataclass(frozen=True)
class Segment:
    """A time in which an agent was in one state. ``fault``: what has caused it; None: none has."""

    state: NodeState
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
    segments: list[Segment]
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
    cost: dict[NodeState, float] = field(default_factory=dict)  # seconds
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
    spent: dict[NodeState, float]  # seconds of all lanes
    losses: list[Loss]  # the largest first
    begin: float
    end: float
    outcome: str  # how the job ended, for people
    recorded: bool  # the agents have recorded their states: all of them
    steps_known: bool
    repeats_known: bool

    @property
    def total(self) -> float:
        """Seconds of all nodes together."""
        return sum(lane.end - lane.begin for lane in self.lanes)

    @property
    def goodput(self) -> float:
        return self.spent.get(NodeState.RUNNING, 0.0) / self.total if self.total > 0 else 0.0


def tell(agents: Sequence[AgentEvents]) -> Story:
    """Return the story of the agents. There is at least one."""
    lost = _losses_of_nodes(agents)
    lanes = [_lane(agent, lost) for agent in agents]
    _number(lanes)
    faults = _faults(agents)
    for lane in lanes:
        _charge(lane, faults)
    spent = defaultdict[NodeState, float](float)
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
        recorded=all(any(one.event.kind == "state" for one in agent.events) for agent in agents),
        steps_known=any(event.kind == "steps" for event in every),
        repeats_known=any(event.kind == "steps" and event.number("step") is not None for event in every),
    )


# -- lanes ---------------------------------------------------------------------------------------------------------------------


def _lane(agent: AgentEvents, lost: dict[FaultKey, float]) -> Lane:
    steps = [one for one in agent.events if one.event.kind == "steps"]
    segments = _recorded(agent, {one.event.whole("round") for one in steps})
    lane = Lane(agent.node, agent.name, agent.job, agent.shifted, segments[0].begin, segments[-1].end, segments)
    lane.rates = [(one.at, rate) for one in steps if (rate := one.event.number("steps_per_second")) is not None]
    lane.outcome = next((one.event.text("outcome") or "ended" for one in agent.events if one.event.kind == "end"), "")
    noticed = lost.get((agent.job, segments[-1].round), 0.0)
    if not lane.outcome and noticed > lane.end:  # its death is what the others noticed
        segments.append(Segment(NodeState.UNKNOWN, lane.end, noticed, segments[-1].round))
        lane.end = noticed
    lane.segments = [one for one in segments if one.seconds > 0]
    return lane


def _recorded(agent: AgentEvents, stepped: set[int]) -> list[Segment]:
    """Return the states that the agent has recorded, until its last event. ``stepped``: rounds in which its workers made steps.

    Of one time that was told twice the later word counts.
    """
    begin = agent.events[0].at
    found = [Segment(NodeState.UNKNOWN, begin, begin, 0)]
    for one in agent.events:
        if one.event.kind == "state":
            at = max(0.0, one.at - one.event.seconds("ago"))
            while found and found[-1].begin >= at:
                found.pop()
            segment = _segment(agent.job, one.event, at, stepped)
            if not found or replace(found[-1], begin=at, end=at) != segment:  # else the same was told again
                found.append(segment)
    ends = [*(one.begin for one in found[1:]), agent.events[-1].at]
    return [replace(one, end=end) for one, end in zip(found, ends, strict=True)]


def _segment(job: int, event: EventLine, at: float, stepped: set[int]) -> Segment:
    """Return what a state event says, without its end."""
    state, number = RECORDED.get(event.text("state"), NodeState.UNKNOWN), event.whole("round")
    if state is NodeState.RUNNING and stepped and number not in stepped:  # the round ended before its first step, see Account
        state = NodeState.STARTING
    ended = number if state in (NodeState.STOPPING, NodeState.RESTARTING) else number - 1
    return Segment(state, at, at, number, (job, ended) if event.text("cause") and state in COSTS else None)


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


def _failure(event: EventLine) -> tuple[str, tuple[str, ...]]:
    code = event.fields.get("code")
    how = f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
    blame, note = event.text("blame").replace("_", " "), event.text("note")
    title = f"round {event.whole('round')}: rank {event.whole('rank')} failed: {how}{f', {note}' if note else ''} ({blame})"
    return title, event.texts("lines")


def _hang(event: EventLine) -> tuple[str, tuple[str, ...]]:
    return f"no step for {event.seconds('seconds'):.0f} s; where the workers were:", _stacks(event)


def _straggler(event: EventLine) -> tuple[str, tuple[str, ...]]:
    times, device = event.seconds("times_median"), event.text("device") or "a device"
    own, median = event.seconds("seconds"), event.seconds("median")
    line = f"It computes for {own:.3g} s per step, the median rank of the job for {median:.3g} s."
    return f"rank {event.whole('rank')} on {device} is {times:.3g} times as slow as the median rank", (line,)


def _sits_out(event: EventLine) -> tuple[str, tuple[str, ...]]:
    found = event.texts("strikes")
    return f"the node sits out for {event.seconds('cooldown'):.0f} s at most, for {len(found)} strike{'s' * (len(found) > 1)}:", found


def _stacks(event: EventLine) -> tuple[str, ...]:
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
