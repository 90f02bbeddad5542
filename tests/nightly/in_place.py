"""Public frameworks with our data-parallel class in the place of torch's: the same losses, digit for digit.

    python -m tests.nightly.in_place [NAME...]

Each framework trains twice under elastirun, with torch's class and with ours; both times a worker is killed and the job goes on from its
checkpoint. ``make nightly`` makes an environment in which this runs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

from .frameworks import Case, play

LOSS = re.compile(r"LOSS (\d+) (\d+) (\d+) (\S+)")
STEPS, EPOCH = 60, 10
CASES = {
    "accelerate": Case("losses_accelerate.py", "accelerate"),
    "lightning-automatic": Case("losses_lightning.py", "lightning", ("automatic",)),
    "lightning-manual": Case("losses_lightning.py", "lightning", ("manual",)),
    "transformers": Case("losses_transformers.py", "transformers"),
}


def losses(case: Case, ours: bool) -> tuple[dict[tuple[int, int, int], str], str]:
    """The losses by round, rank and step, and what went wrong."""
    os.environ["IN_PLACE"] = "1" if ours else "0"
    with tempfile.TemporaryDirectory() as folder:
        wrong = play(case, folder)
        output = Path(folder, "output").read_text()
    found = {(int(number), int(rank), int(step)): value for number, rank, step, value in LOSS.findall(output)}
    return found, f"{wrong}\n{output[-4000:]}" if wrong else ""


def compare(case: Case) -> str:
    theirs, wrong = losses(case, ours=False)
    if wrong:
        return f"with torch's class: {wrong}"
    mine, wrong = losses(case, ours=True)
    if wrong:
        return f"with ours: {wrong}"
    both = sorted(theirs.keys() & mine.keys())  # the kill may be a step earlier in one than in the other
    first, last = ([step for number, rank, step in both if (number, rank) == (which, 0)] for which in (1, 2))
    if first != [*range(1, len(first) + 1)] or last != [*range(2 * EPOCH + 1, STEPS + 1)]:
        return f"these steps were reported before and after the kill: {first}, {last}"
    differ = [f"{key}: {theirs[key]} with torch's class, {mine[key]} with ours" for key in both if theirs[key] != mine[key]]
    print(f"    {len(both)} losses, {len(differ)} of them differ")
    return "; ".join(differ[:3])


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CASES:
        print(name, flush=True)
        if importlib.util.find_spec(CASES[name].needs) is None:
            print(f"    skipped: {CASES[name].needs} is not installed")
            continue
        wrong = compare(CASES[name])
        failed += bool(wrong)
        print(f"    FAILED: {wrong}" if wrong else "    the same losses", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
