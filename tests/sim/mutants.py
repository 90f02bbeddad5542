"""Which seed notices that a rule is taken out: every mutant of tests/test_mutants.py, under histories.

    python -m tests.sim.mutants --seeds 2000        look for them, and write tests/sim/killed.txt

A mutant that no seed notices means an invariant or a fault that is missing here, or a rule that only the tests named with it can see.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_mutants import MUTANTS, ROOT, Mutant

KILLED = Path(__file__).with_name("killed.txt")


def copy_package(to: Path) -> None:
    for folder in ("elastirun", "tests"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))


def histories(copy: Path, one: Mutant, seeds: str) -> str:
    """What ``python -m tests.sim`` says about the mutant, in the copy of the package."""
    path = copy / "elastirun" / "rendezvous" / f"{one.module}.py"
    original = path.read_text()
    path.write_text(original.replace(one.old, one.new))
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.sim", "--brief", "--seeds", seeds]
    try:
        return subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    finally:
        path.write_text(original)


def known() -> dict[str, int]:
    """Rule -> the seed that notices its absence."""
    lines = KILLED.read_text().splitlines() if KILLED.exists() else []
    return {rule: int(seed) for seed, _, rule in (line.partition(" ") for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    seeds = parser.parse_args().seeds
    killed = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_package(Path(folder))
        for one in MUTANTS:
            said = histories(Path(folder), one, f"0:{seeds}")
            found = re.search(r"^seed (\d+): (.*)", said, re.M)
            print(f"{one.rule}: {found[0][:160] if found else 'nobody notices'}", flush=True)
            if found:
                killed[one.rule] = int(found[1])
    KILLED.write_text("".join(f"{seed} {rule}\n" for rule, seed in killed.items()))
    print(f"{len(killed)} of {len(MUTANTS)} noticed within {seeds} seeds")


if __name__ == "__main__":
    main()
