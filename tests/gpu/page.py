"""Writes docs/gpu.json and docs/gpu.md from what runs of tests/gpu found: python -m tests.gpu.page [runs/gpu/gpu.json ...]

docs/gpu.json keeps the newest result of each part on a GPU, and the page has a row for each claim. Dry runs and parts that
were skipped do not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.parts import NEVER_TRIED, PARTS, Claim, Part

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "gpu.json", DOCS / "gpu.md"
HEAD = """# GPUs: each claim, and where it was seen

Made by `python -m tests.gpu.page` from [gpu.json](gpu.json), never by hand. `make gpu` checks all that can be checked on one
GPU, within nine minutes. It needs torch and no network ([how](../CONTRIBUTING.md#gpus)); without a GPU it runs dry, on the CPU.

Where a row names several ranks, they shared one GPU. NCCL takes them for ranks of several hosts (`NCCL_HOSTID`) and connects
them by sockets, and the GPU gives its time to one process after the other. So figures of several ranks show what holds, and how
two programs compare, not how fast several GPUs are. "ours" is the class of `elastirun.train`.
"""
COLUMNS = "| claim | figure | machine | date | commit |\n|---|---|---|---|---|"


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the results by part, those of ``new`` in place of those of ``old`` where a GPU was there."""
    counted = {
        name: found for name, found in new.items() if not found["dry"] and found["verdict"] != "skipped"
    }
    return {part.name: {**old, **counted}[part.name] for part in PARTS if part.name in {**old, **counted}}


def row(claim: Claim, part: Part, found: dict[str, Any] | None, machines: list[str]) -> tuple[int, str]:
    """Return how early in the table a claim comes (never tried: 0, missed: 1, else 2), and its row.

    The row names a machine by its place in ``machines``, where it is added if it is not there.
    """
    first = f'<a id="{claim.name}"></a>{claim.text}'
    if found is None:
        return 0, f"| {first} | **not tried yet**: `make gpu GPU_PARTS={part.name}` | | | |"
    machine = f"{found['machine']}; {found['versions']}"
    if machine not in machines:
        machines.append(machine)
    where = f"[{1 + machines.index(machine)}](#machines) | {found['date']} | {found['commit']} |"
    figure = found["figures"].get(claim.name)
    if figure is None:
        verdict = found["verdict"].replace("late", "was late")
        return 1, f"| {first} | **no figure**: the part {part.name} {verdict} | {where}"
    missed = "" if figure["holds"] else "**missed**: "
    return (1 if missed else 2), f"| {first} | {missed}{figure['text']} | {where}"


def page(results: dict[str, Any]) -> str:
    """Return docs/gpu.md."""
    machines: list[str] = []
    rows = [
        (0, f'| <a id="{claim.name}"></a>{claim.text} | **never tried**: none was at hand | | | |')
        for claim in NEVER_TRIED
    ]
    rows += [row(claim, part, results.get(part.name), machines) for part in PARTS for claim in part.claims]
    lines = [text for _, text in sorted(rows, key=lambda row: row[0])]
    picture = (DOCS / "gpu-overlap.svg").exists()
    end = "\n![A backward of ours above one of torch's](gpu-overlap.svg)\n" if picture else ""
    numbered = [f"{number}. {machine}" for number, machine in enumerate(machines, 1)]
    return "\n".join([HEAD, COLUMNS, *lines, end, "## Machines", "", *numbered, ""])


def main(arguments: Sequence[str]) -> None:
    results = json.loads(RESULTS.read_text())["parts"] if RESULTS.exists() else {}
    for path in arguments:
        results = merge(results, json.loads(Path(path).read_text())["parts"])
    RESULTS.write_text(json.dumps({"parts": results}, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
