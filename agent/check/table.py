"""The text and the JSON of a check. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from elastirun.agent.check.records import Facts, Finding, NodeReport, Result

FORMAT = 1  # of the JSON; raised when a field changes its meaning
MOST_SHOWN = 40  # findings in a text
HEAD = ("node", "verdict", "address", "python", "torch", "GPUs", "loop", "/dev/shm", "files", "round trip", "MB/s", "clock")


def text_of(result: Result, seconds: float) -> str:
    """Return the table, one line for each node, and each finding with what to do. ``seconds``: how long the check has taken."""
    rows = [HEAD, *map(_row, result.nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *finding_lines(result.findings), summary(result, seconds)])


def summary(result: Result, seconds: float) -> str:
    """Return one line on the outcome."""
    count, bad = len(result.nodes), [one.name for one in result.nodes if one.verdict == "bad"]
    found = f"{len(result.findings)} finding{'s' * (len(result.findings) != 1)}" if result.findings else "nothing wrong"
    out = f"; {', '.join(bad[:8])}{f' and {len(bad) - 8} more' if len(bad) > 8 else ''} should not take part" if bad else ""
    return f"{count} node{'s' * (count != 1)} checked in {seconds:.1f} s: {found}{out}"


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each finding."""
    more = len(findings) - MOST_SHOWN
    lines = [f"{' - '.join(one.nodes) or 'all'}: {one.text}; {one.advice}" for one in findings[:MOST_SHOWN]]
    return [*lines, *([f"and {more} more findings; --json shows all"] if more > 0 else [])]


def json_of(job: str, result: Result, seconds: float) -> str:
    """Return the result as one JSON object. Round trips are in milliseconds, offsets in seconds, rates in MB/s."""
    return json.dumps({"v": FORMAT, "job": job, "seconds": round(seconds, 3), **asdict(result)})


def _row(one: NodeReport) -> tuple[str, ...]:
    facts: Facts = one.facts
    gpus = f"{len(facts.gpus)}, {min(gpu.free for gpu in facts.gpus) / 1024:.0f} GiB free" if facts.gpus else "0"
    files = "unlimited" if facts.descriptors < 0 else str(facts.descriptors)
    network = (f"{one.round_trip:.3g} ms", f"{one.rate:.0f}") if one.round_trip else ("-", "-")
    clock, torch = f"{round(one.offset, 3) + 0.0:+.3f} s", facts.torch or "-"
    host = f"{facts.loop:.3g} ms", f"{facts.shm / (1 << 30):.3g} GiB", files
    return one.name, one.verdict, one.address, facts.python, torch, gpus, *host, *network, clock
