"""The usual time for an amount of work, by which agents and the training core judge how slow a rank is. Pure."""

from __future__ import annotations

FIXED = 0.25  # of the time of a usual step that does not become shorter with less work: launching, layers without samples, other programs


def usual_time(pace: float, usual_work: float, work: float) -> float:
    """Return for how many seconds the median rank would compute for ``work``.

    ``pace``: its seconds for a unit; ``usual_work``: of the median rank. All of it may be fixed where there is more work than that.
    """
    return pace * max(work, FIXED * usual_work + (1 - FIXED) * work)
