"""Writes docs/gpu.json and docs/gpu.md from what runs of tests/gpu found: python -m tests.gpu.page [runs/gpu/gpu.json ...]

docs/gpu.json keeps the newest result of each part on a GPU, and the page has a row for each claim. Dry runs do not count, nor parts
that were skipped. The picture of the overlap is taken from beside the results of that part.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.parts import NEVER_TRIED, PARTS, Claim, Part
from tests.gpu.results import NOT_RUN, PASSED, Results, read, write

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "gpu.json", DOCS / "gpu.md"
PICTURE, PICTURED = "gpu-overlap.svg", "overlap"  # and the part that draws it
HEAD = """# GPUs: each claim, and where it was seen

Made by `python -m tests.gpu.page` from [gpu.json](gpu.json), never by hand. `make gpu` checks all that can be checked on one
GPU, within nine minutes. It needs torch and no network ([how](../CONTRIBUTING.md#gpus)); without a GPU it runs dry, on the CPU.

Where a row names several ranks, they shared one GPU. Unless the row says gloo, NCCL connected them: it takes them for ranks of
several hosts (`NCCL_HOSTID`) and uses sockets, and the GPU gives its time to one process after the other. So figures of several
ranks show what holds, and how two programs compare, not how fast several GPUs are. "ours" is the class of `elastirun.train`.
"""
COLUMNS = "| claim | figure | machine | date | commit |\n|---|---|---|---|---|"


def merge(old: Results, new: Results) -> Results:
    """Return the newer result of each part, of those on a GPU that say something."""
    found = dict(old)
    for name, one in new.items():
        if not one["dry"] and one["verdict"] not in NOT_RUN and one["date"] >= found.get(name, one)["date"]:
            found[name] = one
    return {part.name: found[part.name] for part in PARTS if part.name in found}


def row(claim: Claim, part: Part, found: dict[str, Any] | None, machines: list[str]) -> tuple[int, str]:
    """Return how early in the table a claim comes (never tried: 0, missed: 1, else 2), and its row.

    The row names a machine by its place in ``machines``, where it is added if it is not there.
    """
    first = f'<a id="{claim.name}"></a>{claim.text}'
    figure = found["figures"].get(claim.name) if found else None
    if found is None or (figure is None and found["verdict"] == PASSED):  # a claim that is newer than the result
        return 0, f"| {first} | **not tried yet**: `make gpu GPU_PARTS={part.name}` | | | |"
    machine = f"{found['machine']}; {found['versions']}"
    if machine not in machines:
        machines.append(machine)
    where = f"[{1 + machines.index(machine)}](#machines) | {found['date'][:10]} | {found['commit']} |"
    ended = "" if found["verdict"] == PASSED else f" (the part {part.name}: {found['verdict']})"
    if figure is None:
        return 1, f"| {first} | **no figure**{ended} | {where}"
    missed = "" if figure["holds"] else f"**missed**{ended}: "
    text = " ".join(figure["text"].split()).replace("|", "\\|")
    return (1 if missed else 2), f"| {first} | {missed}{text} | {where}"


def page(results: dict[str, Any]) -> str:
    """Return docs/gpu.md."""
    machines: list[str] = []
    rows = [(0, f'| <a id="{claim.name}"></a>{claim.text} | **never tried** | | | |') for claim in NEVER_TRIED]
    rows += [row(claim, part, results.get(part.name), machines) for part in PARTS for claim in part.claims]
    lines = [text for _, text in sorted(rows, key=lambda row: row[0])]
    end = f"\n![A backward of ours above one of torch's]({PICTURE})\n" if PICTURED in results else ""
    numbered = [f"{number}. {machine}" for number, machine in enumerate(machines, 1)]
    return "\n".join([HEAD, COLUMNS, *lines, end, "## Machines", "", *numbered, ""])


def main(arguments: Sequence[str]) -> int:
    try:
        results = read(RESULTS) if RESULTS.exists() else {}
        for path in map(Path, arguments):
            before, results = results, merge(results, read(path))
            if results.get(PICTURED) is not before.get(PICTURED):
                shutil.copyfile(path.with_name(PICTURE), DOCS / PICTURE)
        write(RESULTS, json.dumps({"parts": results}, indent=1) + "\n")
        write(PAGE, page(results))
    except (OSError, ValueError) as error:
        print(f"tests.gpu.page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
