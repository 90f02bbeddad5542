"""Turns the events of all agents into what the page shows: lanes of states, rounds, faults with their costs, failures. Pure.

The lane of an agent has the states that it has recorded, without gaps, so they add up to its life, as in the account (docs/account.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
HANG = "hang"  # in place of the cause "failure": the workers made no steps, and the agent has ended one of them
RECORDED = {state.value: state for state, words in WORDS.items() if words.spent}
CAUSES = {
    "failure": "a worker failed",
    HANG: "workers hung",
    "lost": "a node was lost",
    "leave": "a node left",
    "join": "a node joined",
    "unknown": "a cause that no event tells",
}
MOST_NAME = 60  # characters of the name of a lane
MOST_LINES = 400  # lines of one stack or traceback
MOST_VALUES = 3  # different commands or versions of the nodes of one job that are named

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
    last: float = 0.0  # when its last event was; ``end`` may be later
    number: int = 0  # of the lane among those with the same name; 0: it is the only one

    @property
    def row(self) -> tuple[str, int]:
        """The name of the node and the number of the lane: agents with the same row ran one after the other, on the same node."""
        return self.name, self.number

    @property
    def title(self) -> str:
        return f"{self.name[:MOST_NAME]} ({self.number})" if self.number else self.name[:MOST_NAME]


@dataclass
class Fault:
    """The end of a round before its work was done. Seconds are those of all nodes together. ``at``: when the first node knew."""

    job: int
    round: int
    at: float
    cause: str
    reason: str
    cost: dict[NodeState, float] = field(default_factory=dict)  # seconds
    nodes: int = 0  # that it has cost something
    until_end: float = 0.0  # seconds of ``cost`` until ``at``: the workers made no steps any more, and their round was not over
    number: int = 0  # 1: the costliest one; the number of its mark and of its row

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


@dataclass(frozen=True)
class Failure:
    """The failure of a worker, a hang of workers, a straggler, or a node that sits out; ``lines``: stacks, or the last lines of stderr."""

    at: float
    name: str
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Longest:
    """The costliest of the times that a loss consists of. ``number``: of the fault; 0: no fault was the cause."""

    at: float
    seconds: float
    why: str  # the reason of the fault, or the node
    number: int = 0


@dataclass(frozen=True)
class Loss:
    """A row of the table of lost time. ``parts``: its seconds by state; ``count``: faults, or times of one node."""

    what: str
    parts: Mapping[NodeState, float]
    count: int
    longest: Longest

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class About:
    """The job as its agents describe it at their start; empty where they are of an earlier version."""

    job: str = ""
    command: str = ""
    versions: tuple[tuple[str, str], ...] = ()  # name and version; several versions where nodes differ


@dataclass
class Story:
    """All that the page shows."""

    about: About
    steps: int | None  # the number of the last step of the training, or if the workers tell none, those of all rounds; None: not known
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
    lanes = sorted((_lane(agent, lost) for agent in agents), key=lambda lane: lane.begin)
    _number(lanes)
    faults = _faults(agents)
    for lane in lanes:
        _charge(lane, faults)
    for number, fault in enumerate(sorted(faults.values(), key=lambda fault: -fault.seconds), 1):
        fault.number = number
    spent = defaultdict[NodeState, float](float)
    for segment in (segment for lane in lanes for segment in lane.segments):
        spent[segment.state] += segment.seconds
    every = [one.event for agent in agents for one in agent.events]
    ordered = sorted(faults.values(), key=lambda fault: fault.at)
    return Story(
        about=_about(every),
        steps=_steps(agents),
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
    lane.last = lane.end
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
    # A round that ended before its first step was told of as training, as long as the account had not seen that steps are stamped.
    if state is NodeState.RUNNING and stepped and number < min(stepped):
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


def _number(lanes: Sequence[Lane]) -> None:
    """Number the lanes, which are in the order of their beginnings, among those with the same name.

    Agents of one name that ran one after the other were one node, so they have one lane.
    Where two of them ever ran at the same time, the name is that of a host with several nodes, and each agent has a lane.
    """
    by_name: dict[str, list[Lane]] = {}
    for lane in lanes:
        by_name.setdefault(lane.name, []).append(lane)
    for own in by_name.values():
        pairs = list(zip(own, own[1:], strict=False))
        if any(after.begin < before.last for before, after in pairs):
            for number, lane in enumerate(own, 1):
                lane.number = number
            continue
        for before, after in pairs:
            if after.begin < before.end:  # the others noticed the death of an agent when the next one ran already
                before.end = after.begin
                before.segments[-1] = replace(before.segments[-1], end=after.begin)


# -- faults --------------------------------------------------------------------------------------------------------------------


def _each(agents: Sequence[AgentEvents], *kinds: str) -> Iterable[tuple[int, Timed]]:
    return ((agent.job, one) for agent in agents for one in agent.events if one.event.kind in kinds)


def _faults(agents: Sequence[AgentEvents]) -> dict[FaultKey, Fault]:
    """Return the rounds that ended early, as the first event tells of each; a later one may tell that a failure came from a lost node."""
    found: dict[FaultKey, Fault] = {}
    for job, one in sorted(_each(agents, "broken"), key=lambda item: item[1].at):
        key = (job, one.event.whole("round"))
        if key not in found:
            cause = one.event.text("cause")
            found[key] = Fault(*key, one.at, cause if cause in CAUSES else "unknown", one.event.text("reason"))
        elif (found[key].cause, one.event.text("cause")) == ("failure", "lost"):
            found[key].cause, found[key].reason = "lost", one.event.text("reason")
    for key in _hung(agents):
        if key in found and found[key].cause == "failure":
            found[key].cause = HANG
    return found


def _hung(agents: Sequence[AgentEvents]) -> set[FaultKey]:
    """Return the rounds in which a node told of a hang."""
    found = set()
    for agent in agents:
        number = 0
        for one in agent.events:
            number = one.event.whole("round") if one.event.kind == "round" else number
            if one.event.kind == "hang":
                found.add((agent.job, number))
    return found


def _charge(lane: Lane, faults: dict[FaultKey, Fault]) -> None:
    """Add what the faults have cost this lane. Draws the time until a hang was over as one."""
    charged, segments = set(), []
    for one in lane.segments:
        if one.fault is None:
            segments.append(one)
            continue
        if one.fault not in faults:
            faults[one.fault] = Fault(*one.fault, one.begin, "unknown", "no event tells why")
        fault, parts = faults[one.fault], [one]
        if one.state is NodeState.STOPPING:
            over = min(max(one.begin, fault.at), one.end)
            fault.until_end += over - one.begin
            if fault.cause == HANG:
                parts = [replace(one, state=NodeState.HANGING, end=over), replace(one, begin=over)]
        for part in parts:
            fault.cost[part.state] = fault.cost.get(part.state, 0.0) + part.seconds
        segments += [part for part in parts if part.seconds > 0]
        charged.add(one.fault)
    lane.segments = segments
    for key in charged:
        faults[key].nodes += 1


def _losses(lanes: Sequence[Lane], faults: Sequence[Fault]) -> list[Loss]:
    """Return what time was lost to, the largest first."""
    found = []
    for cause, words in CAUSES.items():
        own = [fault for fault in faults if fault.cause == cause]
        if own:
            worst, parts = max(own, key=lambda fault: fault.seconds), defaultdict[NodeState, float](float)
            for state, seconds in (item for fault in own for item in fault.cost.items()):
                parts[state] += seconds
            found.append(Loss(words, parts, len(own), Longest(worst.at, worst.seconds, worst.reason, worst.number)))
    for state, words in OTHER_LOSSES.items():
        times = [(one, lane) for lane in lanes for one in lane.segments if one.state == state and one.fault is None]
        if times:
            longest, lane = max(times, key=lambda time: time[0].seconds)
            total = sum(one.seconds for one, _ in times)
            found.append(Loss(words, {state: total}, len(times), Longest(longest.begin, longest.seconds, lane.title)))
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
        found.append(Round(job, number, one.at, end, event.whole("world_size"), event.whole("nodes")))
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
    lines: list[str] = []
    for worker in event.items("workers"):
        lines += [f"rank {worker.whole('rank')}, {worker.whole('steps')} steps:", *worker.texts("stack"), ""]
    title = f"no step for {event.seconds('seconds'):.0f} s, the limit is {event.seconds('limit'):.0f} s; where the workers were:"
    return title, tuple(lines)


def _straggler(event: EventLine) -> tuple[str, tuple[str, ...]]:
    times, device = event.seconds("times_median"), event.text("device") or "a device"
    own, median = event.seconds("seconds"), event.seconds("median")
    line = f"It computes for {own:.3g} s per step, the median rank of the job for {median:.3g} s."
    return f"rank {event.whole('rank')} on {device} is {times:.3g} times as slow as the median rank", (line,)


def _sits_out(event: EventLine) -> tuple[str, tuple[str, ...]]:
    found = event.texts("strikes")
    return f"the node sits out for {event.seconds('cooldown'):.0f} s at most, for {len(found)} strike{'s' * (len(found) > 1)}:", found


def _outcome(agents: Sequence[AgentEvents]) -> str:
    """Return how the job ended."""
    closed = [one for _, one in _each(agents, "closed")]
    if closed:
        last = max(closed, key=lambda one: one.at)
        verdict, reason = last.event.text("verdict"), last.event.text("reason")
        return f"The job {verdict}" + (f": {reason}" if reason and verdict != "succeeded" else "")
    return "No event tells how the job ended; it may still run"


def _about(events: Sequence[EventLine]) -> About:
    """Return what the events ``start`` tell of the job. Where nodes differ, the first values are named."""
    starts = [event for event in events if event.kind == "start"]

    def values(name: str) -> str:
        found = list(dict.fromkeys(filter(None, (event.text(name) for event in starts))))
        return ", ".join(found[:MOST_VALUES]) + (", …" if len(found) > MOST_VALUES else "")

    versions = (("elastirun", values("version")), ("Python", values("python")), ("torch", values("torch")))
    return About(values("job"), values("command"), tuple((name, version) for name, version in versions if version))


def _steps(agents: Sequence[AgentEvents]) -> int | None:
    """Return how many steps the jobs have made, as far as their workers tell."""
    numbered, made = dict[int, int](), dict[FaultKey, int]()
    for job, one in _each(agents, "steps"):
        key = (job, one.event.whole("round"))
        made[key] = max(one.event.whole("steps"), made.get(key, 0))
        if (number := one.event.number("step")) is not None:
            numbered[job] = max(int(number), numbered.get(job, 0))
    return sum(numbered.values()) if numbered else sum(made.values()) if made else None
