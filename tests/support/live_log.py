"""Judges the log of a live job (tests/support/live_worker.py): no step and no sample is lost or doubled, all replicas are the same."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: Path, at: int = 0) -> tuple[list[Line], int]:
    """Return the lines of the log from byte ``at`` on, and where they end. The last line may be half written, and is left."""
    if not path.exists():
        return [], at
    with path.open("rb") as file:
        file.seek(at)
        data, newline, _ = file.read().rpartition(b"\n")
    return [json.loads(line) for line in data.split(b"\n") if line], at + len(data + newline)


def newest_round(lines: Sequence[Line]) -> tuple[list[Line], set[int]]:
    """Return the lines with which the workers of the newest round began, and the pids of those that have made a step in it."""
    recent = lines[-20_000:]
    last = max((line["round"] for line in recent if line["what"] == "world"), default=0)
    of_round = [line for line in recent if line["round"] == last]
    return of(of_round, "world"), {line["pid"] for line in of(of_round, "made")}


def of(lines: Sequence[Line], what: str) -> list[Line]:
    return [line for line in lines if line["what"] == what]


def steps(lines: Sequence[Line]) -> dict[int, int]:
    """Return in which round each step was made that counts: the last one. A rank that alone had made a step may have been killed then."""
    found: dict[int, int] = {}
    for line in of(lines, "made"):
        found[line["step"]] = max(found.get(line["step"], 0), line["round"])
    return found


def violations(lines: Sequence[Line], samples: int, rate: float = 1e-3, decay: float = 0.9999) -> list[str]:
    """Return what is wrong. ``samples``: the size of the dataset."""
    rounds, wrong = steps(lines), []
    if sorted(rounds) != list(range(1, len(rounds) + 1)):
        wrong.append(f"steps are missing: {sorted(rounds)[:3]} … {sorted(rounds)[-3:]}, {len(rounds)} of them")
    if [rounds[step] for step in sorted(rounds)] != sorted(rounds.values()):
        wrong.append("a later step counts in an earlier round")
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for line in of(lines, "made"):
        digests[line["round"], line["step"]].add(line["digest"])
        if abs(line["rate"] / (rate * decay ** line["step"]) - 1) > 1e-9:
            wrong.append(f"step {line['step']} of round {line['round']} has the learning rate {line['rate']}")
    wrong += [f"replicas differ after step {step} of round {round}" for (round, step), found in digests.items() if len(found) > 1]
    for round in {line["round"] for line in of(lines, "world")}:
        begun = {(line["step"], line["digest"]) for line in of(lines, "world") if line["round"] == round}
        if len(begun) > 1:
            wrong.append(f"replicas differ at the beginning of round {round}: {begun}")
        (step, found), *_ = begun
        if step in rounds and rounds[step] < round and not {found, ""} & digests[rounds[step], step]:
            wrong.append(f"round {round} begins with another state than that after step {step}")
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for line in of(lines, "offered"):
        if rounds.get(line["step"]) == line["round"]:
            seen[line["epoch"]].update(line["samples"])
    last = max(seen, default=0)
    over = bool(of(lines, "over"))
    for epoch, counts in seen.items():
        doubled = [sample for sample, count in counts.items() if count > 1]
        if doubled:
            wrong.append(f"{len(doubled)} samples of epoch {epoch} are doubled: {doubled[:5]}")
        if len(counts) < samples and (epoch < last or over):
            wrong.append(f"{samples - len(counts)} samples of epoch {epoch} are lost")
    return wrong
