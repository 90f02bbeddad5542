"""Find the first seed that notices that a rule is taken out, for every mutant of tests/rendezvous/test_mutants.py.

    python -m tests.sim.mutants --seeds 2000 --write docs/mutants.md
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
HEAD = "| rule taken out | in | the test that misses it | first seed that does |\n|---|---|---|---|\n"


def histories(copy: Path, one: Mutant, *options: str) -> str:
    """Return what ``python -m tests.sim`` says about the mutant, in the copy of the package."""
    path = one.path(copy)
    original = path.read_text()
    path.write_text(original.replace(one.old, one.new))
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.sim", "--brief", *options]
    try:
        return subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--write", type=Path, help="the page with the table, whose rows are written anew; with all rules")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rules in whose module or test one of these stands")
    for option in WORLDS:
        parser.add_argument(option, action="store_true", help="see python -m tests.sim --help")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th rule, from the K-th on: for several processes")
    seeds, page = (arguments := parser.parse_args()).seeds, arguments.write
    options = ["--seeds", f"0:{seeds}", *(option for option in WORLDS if getattr(arguments, option[2:]))]
    first, step = map(int, arguments.part.split("/"))
    chosen = [one for one in MUTANTS if any(text in one.module + " " + one.test for text in arguments.only)][first - 1 :: step]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for one in chosen:
            said = histories(Path(folder), one, *options)
            found = re.search(r"^seed (\d+): (.*)", said, re.M)
            if found is None and not re.search(r"^[1-9]\d* histories, .* 0 violations", said, re.M):
                sys.exit(f"{one.rule}: no histories were run:\n{said[-2000:]}")
            print(f"{one.rule}: {found[0][:160] if found else 'nobody notices'}", flush=True)
            name = one.test.rpartition("::test_")[2].replace("_", " ")
            rows.append(f"| {one.rule} | `{one.module}.py` | {name} | {found[1] if found else '-'} |\n")
    print(f"{sum('| - |' not in row for row in rows)} of {len(chosen)} noticed within {seeds} seeds")
    if page:
        head, _, rest = page.read_text().partition(HEAD)
        page.write_text(head + HEAD + "".join(rows) + rest[len(re.match(r"(\|.*\n)*", rest)[0]) :])  # type: ignore[index]


if __name__ == "__main__":
    main()
