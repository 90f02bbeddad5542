"""Which seed notices that a rule is taken out: every mutant of tests/test_mutants.py, under histories.

    python -m tests.sim.mutants --seeds 2000

A mutant that no seed notices means an invariant or a fault that is missing here, or a rule that only the tests named with it can see.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_mutants import MUTANTS, Mutant, copy_to, source


def histories(copy: Path, one: Mutant, seeds: str) -> str:
    """What ``python -m tests.sim`` says about the mutant, in the copy of the package."""
    path = source(copy, one)
    original = path.read_text()
    path.write_text(original.replace(one.old, one.new))
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.sim", "--brief", "--seeds", seeds]
    try:
        return subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    seeds = parser.parse_args().seeds
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for one in MUTANTS:
            said = histories(Path(folder), one, f"0:{seeds}")
            found = re.search(r"^seed (\d+): (.*)", said, re.M)
            print(f"{one.rule}: {found[0][:160] if found else 'nobody notices'}", flush=True)
            killed += found is not None
    print(f"{killed} of {len(MUTANTS)} noticed within {seeds} seeds")


if __name__ == "__main__":
    main()
