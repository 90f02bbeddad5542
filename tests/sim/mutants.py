"""Find the first random history that notices that a rule is taken out, for every mutant of tests/rendezvous/test_mutants.py.

    python -m tests.sim.mutants --seeds 2000
    python -m tests.sim.mutants --seeds 2000 --only succession quorum --torn          # those of one part of the rendezvous

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

from tests.rendezvous.test_mutants import MUTANTS
from tests.support.mutants import Mutant, copy_to

WORLDS = ("--succession", "--takeovers", "--torn")


def histories(copy: Path, one: Mutant, *options: str) -> str:
    """Return what ``python -m tests.sim`` says about the mutant, in the copy of the package."""
    path = one.path(copy)
    original = path.read_text()
    path.write_text(one.broken(original))
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.sim", "--brief", *options]
    try:
        return subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rules in whose module or test one of these stands")
    for option in WORLDS:
        parser.add_argument(option, action="store_true", help="see python -m tests.sim --help")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th rule, from the K-th on: for several processes")
    arguments = parser.parse_args()
    options = ["--seeds", f"0:{arguments.seeds}", *(option for option in WORLDS if getattr(arguments, option[2:]))]
    first, step = map(int, arguments.part.split("/"))
    chosen = [one for one in MUTANTS if any(text in one.module + " " + one.test for text in arguments.only)][first - 1 :: step]
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for one in chosen:
            said = histories(Path(folder), one, *options)
            found = re.search(r"^seed (\d+): (.*)", said, re.M)
            if found is None and not re.search(r"^[1-9]\d* histories, .* 0 violations", said, re.M):
                sys.exit(f"{one.rule}: no histories were run:\n{said[-2000:]}")
            print(f"{one.rule}: {found[0][:160] if found else 'nobody notices'}", flush=True)
            noticed += found is not None
    print(f"{noticed} of {len(chosen)} noticed within {arguments.seeds} seeds")


if __name__ == "__main__":
    main()
