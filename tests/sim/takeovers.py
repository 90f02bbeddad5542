"""Histories of small worlds in which the store moves soon: what random histories of all faults seldom meet.

    python -m tests.sim --takeovers --seeds 0:2000      its host dies; in a third of the time
    python -m tests.sim --torn --seeds 0:2000           mostly the network is torn, for longer than it takes until the host is given up

In half of the take-overs nodes die and come back, and nothing else goes wrong. The job must go on soon then, and nobody may give up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from elastirun.rendezvous.rules import Rules
from tests.sim.history import HOST_KINDS, KINDS, WIDER_KINDS, Fault, Plan
from tests.sim.world import Deaths

ALL_KINDS = HOST_KINDS | WIDER_KINDS | KINDS
BEGIN, TROUBLE = 4.0, 14.0  # seconds: the first fault comes between them
GOES_ON_WITHIN = 12.0  # seconds from the last fault, of nodes that only die
DEATHS = {"kill_host": 6, "crash": 3, "kill_owner": 3, "leave_host": 2, "leave": 1}  # kind -> weight
TORN_FOR = 45.0  # seconds of faults in a torn world
TEARS = {"split": 8, "wall_off_host": 4, "walls": 3, "parts": 2}  # kind -> weight
BESIDE = {"kill_unread": 3, "kill_host": 3, "dark_host": 2, "freeze_host": 2, "stall_host": 2, "kill_owner": 2}
BESIDE |= {"suspend_undecided": 1, "leave_host": 1, "pause_store": 1, "crash": 1, "freeze": 1}
OTHERS = ("freeze", "freeze_node", "cut", "pause_store", "fail")


def draw(seed: int) -> Plan:
    """Return the plan of ``seed``."""
    rng = random.Random(f"takeover {seed}")
    most, only_deaths = rng.randint(2, 4), rng.random() < 0.5
    rules, clocks = _terms(rng, most, [15.0, 30.0], 0.5)
    stop_times = tuple(rng.choice([0.01, 0.1, 1.0] if only_deaths else [0.01, 0.1, 4.9]) for _ in range(64))
    nodes = most + rng.choice([0, 0, 1])
    weights = {kind: weight for kind, (weight, _) in (HOST_KINDS | WIDER_KINDS).items()} | dict.fromkeys(OTHERS, 1.0)
    faults = _faults(rng, DEATHS if only_deaths else weights, nodes)
    plan = Plan(seed, rules, True, nodes, clocks, stop_times, faults, trouble=TROUBLE)
    plan = replace(plan, deaths=Deaths(1.0 if only_deaths or rng.random() < 0.7 else 0.5, ended_within=rng.choice([0.0, 0.3])))
    if only_deaths:
        return replace(plan, goes_on_within=GOES_ON_WITHIN)
    drain = random.Random(f"drain {seed}")  # some workers take long to stop
    return replace(plan, stop_times=tuple(drain.choice([seconds, seconds, 12.0, 29.0]) for seconds in stop_times))


def torn(seed: int) -> Plan:
    """Return the plan of ``seed`` for a world that is torn: mostly a majority may go on without the host, and often two parts would."""
    rng = random.Random(f"torn {seed}")
    nodes = rng.choice([3, 4, 4, 4, 5, 6])
    most = nodes - rng.choice([0, 0, 0, 1])
    rules, clocks = _terms(rng, most, [30.0, 60.0], 0.8)
    stop_times = tuple(rng.choice([0.01, 0.1, 1.0, 4.9]) for _ in range(64))
    weights, when, found = TEARS | BESIDE, rng.uniform(3.0, 8.0), []
    for kind in rng.choices(list(weights), list(weights.values()), k=rng.choice([2, 3, 3, 4, 5])):
        shortest, longest = (0.6, 1.5) if kind in TEARS else (0.0, 1.0)
        lasts = rng.uniform(shortest, longest) * ALL_KINDS[kind][1]
        found.append(Fault(when, kind, rng.randrange(nodes), lasts, rng.random()))
        when = min(TORN_FOR - 10.0, when + rng.expovariate(rng.choice([0.1, 0.3, 1.0, 5.0])))
    plan = Plan(seed, rules, True, nodes, clocks, stop_times, tuple(found), trouble=TORN_FOR)
    return replace(plan, deaths=Deaths(1.0 if rng.random() < 0.7 else 0.5, ended_within=rng.choice([0.0, 0.3])))


def _terms(rng: random.Random, most: int, graces: list[float], majority: float) -> tuple[Rules, tuple[tuple[float, float], ...]]:
    """Return the settings of a job of ``most`` nodes and the nodes' clocks. ``majority``: the share of jobs in which one is enough."""
    rules = Rules(
        min_nodes=rng.choice([1, 1, 1, most - 1]),
        max_nodes=most,
        max_restarts=100,
        last_call=1.0,
        store_grace=rng.choice(graces),
        join_timeout=600.0,
        store_succession="majority" if rng.random() < majority else "proof",
    )
    return rules, tuple((rng.uniform(-1e6, 1e6), rng.uniform(0.9, 1.1)) for _ in range(64))


def _faults(rng: random.Random, weights: Mapping[str, float], nodes: int) -> tuple[Fault, ...]:
    when, found = rng.uniform(BEGIN, TROUBLE), []
    for kind in rng.choices(list(weights), list(weights.values()), k=rng.choice([1, 2, 2, 3, 4])):
        found.append(Fault(when, kind, rng.randrange(nodes), rng.uniform(0, ALL_KINDS[kind][1]), rng.random()))
        when = min(TROUBLE, when + rng.expovariate(rng.choice([0.2, 2.0, 10.0])))
    return tuple(found)
