"""Times of the parts of a step, measured on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from elastirun.train.groups.collectives import ranks
from elastirun.train.reduction.buckets.memory import Bucket
from elastirun.train.reduction.buckets.planner import Planner
from elastirun.train.reduction.control_words import Agreement
from elastirun.worker.usual_time import usual_time

STRAGGLES = 1.2  # a rank that computes for longer than so many times the median is a straggler


@dataclass
class StepTimes:
    """The times of the step under way, in seconds; this rank reports ``busy`` to the others."""

    forward: float = 0.0  # sum over the forwards since the last reduction
    backward: float = 0.0  # sum over the backwards, without the wait at the end
    exposed: float = 0.0  # the wait at the end: communication that no computation covered
    launches: list[float] = field(default_factory=list)  # by bucket, since the backward began
    ready: list[float] = field(default_factory=list)  # by bucket: when this rank had its result

    @property
    def busy(self) -> float:
        return self.forward + self.backward


def stragglers(seconds: Sequence[float], work: Sequence[float]) -> dict[int, float]:
    """Return the ranks that computed much longer for their ``work`` than the median rank does, and how many times as long."""
    usual = usual_seconds(seconds, work)
    return {rank: s / u for rank, (s, u) in enumerate(zip(seconds, usual, strict=True)) if u > 0 and s > STRAGGLES * u}


def usual_seconds(seconds: Sequence[float], work: Sequence[float]) -> list[float]:
    """Return, by rank, how long the median rank would have computed for the ``work`` of that rank; 0 for a rank without data."""
    paces = [s / w for s, w in zip(seconds, work, strict=True) if w > 0]
    if not paces:
        return [0.0] * len(work)
    # With an even number of ranks the quicker one of the middle pair is the usual one.
    pace, usual_work = median_low(paces), median_low([w for w in work if w > 0])
    return [usual_time(pace, usual_work, w) if w > 0 else 0.0 for w in work]


def describe_lacking(names: Sequence[str], lacked: Sequence[Sequence[int]]) -> str:
    """Return a sentence on the parameters without a gradient; ``lacked[rank][i]``: whether ``names[i]`` had none on this rank."""
    where = {name: [rank for rank, theirs in enumerate(lacked) if theirs[index]] for index, name in enumerate(names)}
    found = [f"{name} ({ranks(who)})" for name, who in where.items() if who]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return (
        f"these parameters had no gradient, which counts as zero where other ranks had one: {', '.join(found[:8])}{more}. Nothing needs to "
        "be done if that is meant; it is said once"
    )


def step_report(
    steps: int, times: StepTimes, told: Agreement | None, buckets: Sequence[Bucket], names: Sequence[str], planner: Planner
) -> dict[str, Any]:
    """Return the figures of the last of ``steps``, fit for JSON; see ``DistributedDataParallel.stats``.

    ``told``: by the ranks in that step; None before the first one. ``names``: of the parameters.
    """
    moments = zip(buckets, times.launches, times.ready, strict=False)
    return {
        "steps": steps,
        "forward": times.forward,
        "backward": times.backward,
        "exposed": times.exposed,
        "bytes": sum(bucket.flat.nbytes for bucket in buckets),
        "buckets": [
            {
                "parameters": [names[index] for index in bucket.indices],
                "bytes": bucket.flat.nbytes,
                "launched": launched,
                "ready": ready,
            }
            for bucket, launched, ready in moments
        ],
        "plan": planner.epoch,
        "link": planner.link and {"latency": planner.link.latency, "bytes_per_second": 1 / max(planner.link.per_byte, 1e-15)},
        "seconds_by_rank": told.seconds if told else (),
        "stragglers": stragglers(told.seconds, told.work) if told else {},
    }
