"""Places the events of all agents on one time axis. Pure.

Within an agent the monotonic clock counts. Between agents the machines' clocks count, unless they differ by more than ``DELAY`` at a
moment that the agents share: the start of a round, which has the same fence token on all of its nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastirun.report.reader import LATEST_TIME, EventLine

DELAY = 2.0  # seconds; nodes of a round start its workers within a second, so clocks that differ by less cannot be told from that


@dataclass(frozen=True)
class Timed:
    """An event and its place on the time axis, in seconds since the epoch."""

    at: float
    event: EventLine


@dataclass(frozen=True)
class AgentEvents:
    """The events of one agent, in order. ``job``: agents that had a round in common have the same number."""

    node: str
    name: str
    job: int
    shifted: float  # seconds that were added, because its machine's clock differs
    events: tuple[Timed, ...]


def align(events: Sequence[EventLine]) -> list[AgentEvents]:
    """Return the events by agent, those of the first agent to begin first."""
    by_agent = defaultdict[str, list[EventLine]](list)
    for event in events:
        by_agent[event.node].append(event)
    timed = {node: _on_own_clock(own) for node, own in by_agent.items()}
    starts = {node: _starts(own) for node, own in timed.items()}
    by_fence = defaultdict[str, list[str]](list)
    for node, own_starts in starts.items():
        for fence in own_starts:
            by_fence[fence].append(node)
    shifts: dict[str, float] = {}
    jobs: dict[str, int] = {}
    by_rounds = sorted(timed, key=lambda node: (-len(starts[node]), timed[node][0].at))
    for first in by_rounds:
        if first not in jobs:
            jobs[first], shifts[first] = len({*jobs.values()}), 0.0
            _place_others(first, starts, by_fence, jobs, shifts)
    found = [AgentEvents(node, own[0].event.name, jobs[node], shifts[node], _shifted(own, shifts[node])) for node, own in timed.items()]
    return sorted(found, key=lambda agent: agent.events[0].at)


def _shifted(events: Sequence[Timed], seconds: float) -> tuple[Timed, ...]:
    return tuple(Timed(min(max(0.0, one.at + seconds), LATEST_TIME), one.event) for one in events)


def _on_own_clock(events: Sequence[EventLine]) -> list[Timed]:
    """Place the events by the monotonic clock, from the time of the first on. No event is before the one before it."""
    begin, at, found = events[0], events[0].time, []
    for event in events:
        at = min(max(at, begin.time + event.mono - begin.mono), LATEST_TIME)
        found.append(Timed(at, event))
    return found


def _starts(events: Sequence[Timed]) -> dict[str, float]:
    """Return when this agent started the workers of each round, by the fence token."""
    return {fence: one.at for one in reversed(events) if one.event.kind == "round" and (fence := one.event.text("fence"))}


def _place_others(
    first: str,
    starts: Mapping[str, Mapping[str, float]],
    by_fence: Mapping[str, Sequence[str]],
    jobs: dict[str, int],
    shifts: dict[str, float],
) -> None:
    """Place all agents that had a round in common with ``first``, or with one of those."""
    pending = [first]
    while pending:
        reference = pending.pop(0)
        for other in dict.fromkeys(node for fence in starts[reference] for node in by_fence[fence]):
            if other in jobs:
                continue
            shared = starts[reference].keys() & starts[other].keys()
            differences = sorted(starts[reference][fence] - starts[other][fence] for fence in shared)
            shift = shifts[reference] + differences[len(differences) // 2]
            jobs[other], shifts[other] = jobs[first], shift if abs(shift) > DELAY else 0.0
            pending.append(other)
