"""How much of a live job's time went into steps that count (ETTR), by its log (tests/support/live_worker.py), and the loss of its steps.

A step is done when all ranks of the world in which it counts have made it. The time from one step to the next is lost as far as it is
longer than the median in that world. ``strict`` counts that of all steps, other work on the machine included; the other figure counts the
first step of each world alone: the change of the world, and what was trained in vain before it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support import live_log


@dataclass(frozen=True)
class Gap:
    """The time from the step before to this one. ``lost``: the part of it beyond the median of the world."""

    step: int
    seconds: float
    lost: float
    changes: bool  # the first step of a world


def done(lines: Sequence[live_log.Line]) -> dict[int, tuple[float, int]]:
    """Return for each step that counts when its last rank had made it, and in which world."""
    worlds, found = live_log.steps(lines), dict[int, tuple[float, int]]()
    for line in live_log.of(lines, "made"):
        if line["round"] == worlds[line["step"]]:
            at, _ = found.get(line["step"], (line["at"], 0))
            found[line["step"]] = max(at, line["at"]), line["round"]
    return found


def gaps(lines: Sequence[live_log.Line], begun: float, ended: float) -> list[Gap]:
    """Return the gaps between the steps that were done from ``begun`` to ``ended``, moments of the monotonic clock."""
    made = [(step, at, world) for step, (at, world) in sorted(done(lines).items()) if begun <= at <= ended]
    pairs = list(zip(made, made[1:], strict=False))
    by_world: dict[int, list[float]] = defaultdict(list)
    for (_, before, old), (_, at, world) in pairs:
        if old == world:
            by_world[world].append(at - before)
    usual = statistics.median([at - before for (_, before, old), (_, at, world) in pairs if old == world])
    medians = {world: statistics.median(seconds) for world, seconds in by_world.items()}
    found = []
    for (_, before, old), (step, at, world) in pairs:
        found.append(Gap(step, at - before, max(0.0, at - before - medians.get(world, usual)), old != world))
    return found


def ettr(found: Sequence[Gap], seconds: float, strict: bool = False) -> float:
    """Return the share of ``seconds`` that was not lost."""
    return 1 - sum(gap.lost for gap in found if gap.changes or strict) / seconds


def report(lines: Sequence[live_log.Line], begun: float, ended: float) -> str:
    """Return the figures as text."""
    found = gaps(lines, begun, ended)
    stops = sorted(gap.lost for gap in found if gap.changes)
    text = f"  ETTR {ettr(found, ended - begun):.2%}, with all that slows a step {ettr(found, ended - begun, strict=True):.2%}"
    if stops:
        text += f"; {len(stops)} changes of the world, ms lost: median {statistics.median(stops) * 1e3:.0f}, longest {stops[-1] * 1e3:.0f}"
    return text


def losses(lines: Sequence[live_log.Line], batch: int) -> dict[int, float]:
    """Return the loss of each step over its whole global batch of ``batch`` samples, as far as all ranks have logged their part."""
    worlds = live_log.steps(lines)
    parts: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for line in live_log.of(lines, "made"):
        if line["round"] == worlds[line["step"]] and line["samples"]:
            parts[line["step"]].append((line["samples"], line["loss"]))
    return {
        step: sum(count * loss for count, loss in theirs) / batch
        for step, theirs in parts.items()
        if sum(count for count, _ in theirs) == batch
    }
