"""The same scripts with executed workers and with forked ones (``--preload=torch``): the same output, and the same exit code.

    python -m tests.nightly.preload [NAME...]

The scripts and the interpreter are those of ``tests.nightly.frameworks``. Nothing is killed here; each script runs once to its end, and
once until rank 1 raises an error.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from tests.nightly.frameworks import CASES, LIMIT, SCRIPTS, Case

VARIES = re.compile(r"0x[0-9a-f]+|offline-run-\w+-\w+|[▁-█]+|\d[\d.,:e+-]*")  # addresses, times, pids, what follows from random numbers
STARTED = "STARTED "  # a line of each script says how it was started
FAIL_AT = 9  # the step at which rank 1 fails


@dataclass(frozen=True)
class Played:
    code: int
    lines: list[str]
    seconds: float

    @property
    def forked(self) -> bool:
        return f"{STARTED}forked" in self.lines

    def said(self, failed: bool) -> set[str]:
        """Return the lines without numbers. ``failed``: of the rank that failed; the other may be stopped before it notices."""
        lines = [line for line in self.lines if not line.startswith(STARTED) and (line.startswith("[rank1]") or not failed)]
        return {VARIES.sub("N", line).rstrip() for line in lines}


def play(case: Case, preload: str, fail_at: int | None) -> Played:
    """Run the case to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *case.launcher, str(SCRIPTS / case.script), folder, *case.arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(SCRIPTS.parents[2])}
        environ |= {"PET_PRELOAD": preload} | ({} if fail_at is None else {"FAIL_AT": str(fail_at)})
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=folder, timeout=LIMIT)
        return Played(done.returncode, done.stdout.replace(folder, "FOLDER").splitlines(), time.monotonic() - began)


def compare(case: Case, fail_at: int | None) -> list[str]:
    """Return what differs; nothing if it is as it should be."""
    executed, forked = play(case, "off", fail_at), play(case, "torch", fail_at)
    print(f"    exit code {executed.code}, {forked.code}; {executed.seconds:.1f} s executed, {forked.seconds:.1f} s forked", flush=True)
    said, again = executed.said(fail_at is not None), forked.said(fail_at is not None)
    differs = [f"only executed: {line}" for line in sorted(said - again)] + [f"only forked: {line}" for line in sorted(again - said)]
    differs += [] if executed.code == forked.code == int(fail_at is not None) else ["the exit codes"]
    differs += [] if said else ["nothing was said"]
    return differs + ([] if forked.forked and not executed.forked else ["how workers were started"])


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CASES:
        case = CASES[name]
        print(name, flush=True)
        if importlib.util.find_spec(case.needs) is None:
            print(f"    skipped: {case.needs} is not installed")
            continue
        for fail_at in (None, FAIL_AT):
            if differs := compare(case, fail_at):
                failed += 1
                print("\n".join([f"    DIFFERENT{'' if fail_at is None else ', with an error'}:", *differs]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
