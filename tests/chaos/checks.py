"""What must hold, read from what the agents and the workers wrote: the promises of docs/rendezvous.md. Each returns what does not hold."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.job import Agent, Job, Ticks

GAP = 1.0  # seconds; a worker that wrote nothing for so long did not run meanwhile
HOST = "which hosted the rendezvous store"  # in the reason of a round whose store has moved
AWAY = "the rendezvous store was away"  # the reason of an agent that gives up after --store-grace begins so
BACK = 6.0  # seconds after a fault until an agent finds the store: attempts are 2 s apart, and each takes 3 s
AFTERMATH = 8.0  # seconds beyond ``expire`` for which a fault that is over is felt: TCP waits longer and longer before it tries again
SIGKILL, SIGTERM, SIGSTOP = 9, 15, 19
Span = tuple[float, float]
Still = tuple[int, float, float]  # a node that stood still, from when, to when


@dataclass
class Done:
    """A fault as it was carried out."""

    words: str
    kind: str
    node: int
    touched: set[int]
    begin: float
    end: float = float("inf")


def broken(job: Job, faults: list[Done], ending: float) -> list[str]:
    """Everything that does not hold. ``ending``: when the job was told to end."""
    files = [Ticks.of(path) for path in sorted(job.ticks.iterdir())]
    stores: dict[str, set[str]] = defaultdict(set)
    for ticks in files:
        stores[ticks.agent].add(ticks.store)
    found = [f"{agent} took part in the rounds of two stores" for agent, names in stores.items() if len(names) > 1]
    found += _side_by_side(files)
    found += _tables(job.all, {agent: min(names) for agent, names in stores.items()})
    found += _expulsions(job, faults, ending)
    found += _codes(job, faults)
    found += [f"a traceback in {agent.name}.out" for agent in job.all if "Traceback" in job.output(agent)]
    return found


def complete(files: list[Ticks]) -> dict[tuple[str, int], list[Span]]:
    """By round: when all its workers were alive."""
    rounds: dict[tuple[str, int], dict[int, list[Span]]] = defaultdict(dict)
    worlds = {}
    for ticks in files:
        rounds[ticks.store, ticks.round].setdefault(ticks.rank, []).extend(_spans(ticks.times()))
        worlds[ticks.store, ticks.round] = ticks.world
    spans = {}
    for which, by_rank in rounds.items():
        if len(by_rank) == worlds[which]:
            first, *rest = by_rank.values()
            for more in rest:
                first = [(max(a, c), min(b, d)) for a, b in first for c, d in more if max(a, c) < min(b, d)]
            spans[which] = first
    return spans


def _spans(times: list[float]) -> list[Span]:
    spans: list[Span] = []
    for time in times:
        if spans and time - spans[-1][1] < GAP:
            spans[-1] = (spans[-1][0], time)
        else:
            spans.append((time, time))
    return spans


def overlaps(files: list[Ticks]) -> Iterator[tuple[tuple[str, int], tuple[str, int], float]]:
    """Two rounds that were both complete at once, and for how many seconds."""
    for (one, ours), (other, theirs) in itertools.combinations(sorted(complete(files).items()), 2):
        both = [(max(a, c), min(b, d)) for a, b in ours for c, d in theirs if max(a, c) < min(b, d)]
        if both:
            yield one, other, sum(b - a for a, b in both)


def _side_by_side(files: list[Ticks]) -> Iterator[str]:
    """P1. Two stores know nothing of each other: that is counted, not judged (see ``Report``)."""
    for one, other, seconds in overlaps(files):
        if one[0] == other[0]:
            yield f"rounds {one[1]} and {other[1]} were both complete for {seconds:.2f} s"
    started: dict[tuple[str, int, int], str] = {}
    for ticks in files:
        earlier = started.setdefault((ticks.store, ticks.round, ticks.rank), ticks.path.name)
        if earlier != ticks.path.name:
            yield f"rank {ticks.rank} of round {ticks.round} ran twice: {earlier}, {ticks.path.name}"
    first = {which: spans[0][0] for which, spans in complete(files).items() if spans}
    for (one, at), (other, then) in itertools.pairwise(sorted(first.items())):
        if one[0] == other[0] and then < at:
            yield f"round {other[1]} was complete before round {one[1]}"


def _tables(agents: list[Agent], stores: dict[str, str]) -> Iterator[str]:
    """P2, P3: rounds grow, and each has one table of members and ranks 0 .. n-1."""
    tables: dict[tuple[str, int], Any] = {}
    for agent in agents:
        rounds = _in_one_store([e for e in agent.read() if e["event"] in ("formed", "round")])
        formed, began = ([e for e in rounds if e["event"] == kind] for kind in ("formed", "round"))
        for events in (formed, began):
            numbers = [e["round"] for e in events]
            if any(b <= a for a, b in itertools.pairwise(numbers)):
                yield f"the rounds of {agent.name} do not grow: {numbers}"
        mine = {}
        for e in formed:
            mine[e["round"]] = e["nodes"]
            if e["world_size"] != len(e["nodes"]) or len(set(e["nodes"])) != len(e["nodes"]):
                yield f"{agent.name}: round {e['round']} with {e['nodes']} has {e['world_size']} workers"
            if agent.name in stores:
                known = tables.setdefault((stores[agent.name], e["round"]), e["nodes"])
                if known != e["nodes"]:
                    yield f"round {e['round']} has two tables: {known}, and {e['nodes']} for {agent.name}"
        for e in began:
            nodes = mine.get(e["round"], [])
            if e["node_rank"] >= len(nodes) or nodes[e["node_rank"]] != e["name"] or e["ranks"] != [e["node_rank"]]:
                yield f"{agent.name} is rank {e['ranks']} of round {e['round']}, whose nodes are {nodes}"


def _in_one_store(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds since the agent has joined the store of its own ones. Before, it may have waited beside those of another store."""
    begin = last = 0
    for at, event in enumerate(rounds):
        if event["event"] == "round":
            break
        begin, last = at if event["round"] <= last else begin, event["round"]
    return rounds[begin:]


def lost(agents: list[Agent]) -> list[tuple[float, str, dict[str, Any]]]:
    """Who was called lost, by whoever noticed or by the guard of the lost one: when, who, and that event."""
    events = [e for agent in agents for e in agent.read() if e["event"] == "broken" and e["by"] in (e["name"], *e["lost"])]
    once = {(e["round"], e["by"]): e for e in sorted(events, key=lambda e: -e["mono"])}  # every survivor has the word of a guard
    return [(e["mono"], name, e) for e in once.values() for name in e["lost"]]


def _stood_still(agent: Agent) -> list[Span]:
    """When it did not run: from, to."""
    return [(e["mono"] - e["seconds"], e["mono"]) for e in agent.read() if e["event"] == "stood_still"]


def excused(job: Job, faults: list[Done], ending: float) -> list[str]:
    """What ``broken`` does not count, because agents say that the machine did not let them run just then."""
    strict = [*_expulsions(job, faults, ending, strict=True), *_codes(job, faults, strict=True)]
    lenient = [*_expulsions(job, faults, ending), *_codes(job, faults)]
    return [what for what in strict if what not in lenient]


def starved(agents: list[Agent]) -> int:
    """How many were not stopped and stood still all the same: the machine had no time for them."""
    return sum(bool(_stood_still(agent)) for agent in agents if SIGSTOP not in agent.sent)


def _expulsions(job: Job, faults: list[Done], ending: float, strict: bool = False) -> Iterator[str]:
    """P5, P9: nobody is called lost who was not cut off, stopped or killed, or says itself that the machine did not let it run."""
    expire = job.terms.expire
    still = [(agent.node, a, b) for agent in job.all for a, b in _stood_still(agent) if b - a > expire - 1.5]  # a beat, and an exchange
    for when, name, event in lost(job.all):
        node = int(name[1:]) if name[1:].isdecimal() else -1
        host = HOST in event.get("reason", "")  # a node that missed the leave of the host reads of it in a standby store
        told = [f for f in faults if node in f.touched or (host and f.kind == "term" and f.node == node)]
        done = any(f.begin <= when <= f.end + expire + AFTERMATH for f in told)
        did_not_run = any(n == node and a <= when <= b + AFTERMATH for n, a, b in still)
        if when < ending and not done and (strict or not did_not_run):
            yield f"{name} was called lost at {when:.2f} and nothing was done to it: {event}"


def gave_up(agents: list[Agent], began: float) -> list[str]:
    """Return a line for each agent that ended by itself: its code, when, counted from ``began``, and why."""
    ends = [(agent.name, e) for agent in agents for e in agent.read() if e["event"] == "end"]
    ends = [(name, e) for name, e in ends if e["outcome"] != "left"]
    ends.sort(key=lambda end: end[1]["mono"])
    return [f"{name} ended with {e['code']} at {e['mono'] - began:.1f} s: {e['reason']}" for name, e in ends]


def _codes(job: Job, faults: list[Done], strict: bool = False) -> Iterator[str]:
    """201 is right where the store was out of reach, or replaced by another one; else only what the signals sent explain.

    A machine that did not let the agent or the store's host run is no fault of theirs: they say in their events that they stood still.
    """
    still = [(agent.node, a, b) for agent in job.all for a, b in _stood_still(agent) if b - a > 2.0]
    for agent in job.all:
        code = agent.process.poll()
        young = code == -SIGTERM and SIGTERM in agent.sent and not agent.read()  # Python had not even begun to run it
        killed, told = code == -SIGKILL and SIGKILL in agent.sent, code == 128 + SIGTERM and SIGTERM in agent.sent
        reason = next((e["reason"] for e in agent.read() if e["event"] == "end"), "")
        explained = code == 201 and _explains_201(job, faults, [] if strict else still, agent, reason)
        if not (killed or told or young or explained):
            yield f"{agent.name} ended with {code}: {job.output(agent)[-300:]}"


def _explains_201(job: Job, faults: list[Done], still: list[Still], agent: Agent, reason: str) -> bool:
    """Return whether what was done explains that ``agent`` gave up for ``reason``.

    Where only the first node can host the store, its agent has ended before, or faults and standstills have kept
    the two apart for ``store_grace``, but for the time until an agent finds the store again. Elsewhere something
    was done to one of the two.
    """
    after = job.terms.store_grace + 2 * AFTERMATH
    if job.terms.etcd or job.terms.succession != "off":
        told = [(f.begin, f.end) for f in faults if agent.node in f.touched or f.node == 0]
        told += [(b, b) for node, _, b in still if node in (0, agent.node)]
        return any(a <= agent.ended <= b + after for a, b in told)
    hosts = [other for other in job.all if other.node == 0 and other is not agent]
    gone = [host.ended for host in hosts if 0 < host.ended <= agent.ended]
    if not reason.startswith(AWAY):
        return any(agent.ended - after <= ended for ended in gone)
    since = agent.ended - job.terms.store_grace - BACK
    spans = [(f.begin, f.end) for f in faults if agent.node in f.touched or 0 in f.touched]
    spans += [(ended, ended + BACK) for ended in gone]
    spans += [(a, b) for node, a, b in still if node in (0, agent.node)]
    return _covered(spans, since, agent.ended) >= job.terms.store_grace - BACK


def _covered(spans: list[Span], since: float, until: float) -> float:
    """Return the seconds between ``since`` and ``until`` in which at least one of the spans lasted."""
    seconds, end = 0.0, since
    for a, b in sorted(spans):
        seconds += max(0.0, min(b, until) - max(a, end))
        end = max(end, b)
    return seconds
