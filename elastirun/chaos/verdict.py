"""The table of the faults and of what came after each, and the verdict on all of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

HEAD = ("TIME", "FAULT", "TO", "NEXT STEP", "STEPS LOST")


@dataclass(frozen=True)
class FaultOutcome:
    """One row of the table. ``left_out``: why it was not done. ``trouble``: what was wrong after it. Both are empty if all is well."""

    time: str  # of the day
    kind: str
    victim: str
    seconds: float | None = None  # from the signal, or from the end of a freeze, to the next step; None: there was none
    lost: int | None = None  # steps that were made again; None: the workers do not number theirs
    left_out: str = ""
    trouble: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table, without the remark behind them."""
        seconds, lost = "-" if self.seconds is None else f"{self.seconds:.2f} s", "-" if self.lost is None else str(self.lost)
        return self.time, self.kind, self.victim, seconds, lost


def table(outcomes: Sequence[FaultOutcome]) -> str:
    """Return the table, with a remark behind each fault that was left out or went wrong."""
    rows: list[tuple[tuple[str, ...], str]] = [(HEAD, "")]
    rows += [(one.cells, f"left out: {one.left_out}" if one.left_out else one.trouble) for one in outcomes]
    widths = [max(len(cells[i]) for cells, _ in rows) for i in range(len(HEAD))]
    lines = ["  ".join((*map(str.ljust, cells, widths), remark)).rstrip() for cells, remark in rows]
    return "\n".join(lines)


def judge(outcomes: Sequence[FaultOutcome], planned: int, stopped: str = "") -> tuple[bool, str]:
    """Return whether the job has held, and a line on that. ``stopped``: why fewer faults were tried than ``planned``; empty: all were."""
    done = [one for one in outcomes if not one.left_out]
    if wrong := next((one for one in done if one.trouble), None):
        return False, f"not held: {wrong.trouble}, after the fault {wrong.kind} ({wrong.victim}) at {wrong.time}"
    if stopped:
        return False, f"not proven: {stopped}; {len(done)} of {planned} faults were done, and the job went on after each"
    if not done:
        return False, f"not proven: each of the {planned} faults was left out"
    seconds = [one.seconds or 0.0 for one in done]
    left_out = f", {len(outcomes) - len(done)} left out" if len(done) < len(outcomes) else ""
    lost = [one.lost for one in done if one.lost is not None]
    steps = f"; steps lost: {sum(lost)}, at most {max(lost)} by one fault" if len(lost) == len(done) else ""
    times = f"next step after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)"
    return True, f"held: {len(done)} of {planned} faults{left_out}; {times}{steps}"
