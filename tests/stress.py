"""Run one of the suites that are started by hand: random histories, kills, faults, scripts. They take minutes to hours.

Usage:

    python -m tests.stress                        what there is
    python -m tests.stress NAME [OPTION ...]      run it; --help has its options
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

SUITES = {  # name -> module; what it does is in the first line of its docstring
    "histories": "tests.sim.__main__",
    "seats": "tests.rendezvous.test_seats",
    "explore": "tests.sim.explore",
    "transcripts": "tests.sim.transcript",
    "unnoticed": "tests.sim.mutants",
    "chaos": "tests.chaos.__main__",
    "chaos-examples": "tests.system.chaos_examples",
    "agent-kills": "tests.system.agent_kills",
    "host-losses": "tests.system.host_losses",
    "falling-hosts": "tests.system.falling_hosts",
    "planned-stops": "tests.system.planned_stops",
    "preload-kills": "tests.system.preload_kills",
    "preload-restarts": "tests.system.preload_restarts",
    "warm-launches": "tests.system.warm_launches",
    "checkpoint-kills": "tests.system.checkpoint_kills",
    "writer-kills": "tests.checkpoint.kills",
    "live-kills": "tests.system.live_kills",
    "live-disturbances": "tests.system.live_disturbances",
    "live-switches": "tests.system.live_switches",
    "live-joins": "tests.system.live_joins",
    "live-ettr": "tests.system.live_ettr",
    "live-scripts": "tests.nightly.live_scripts.__main__",
    "check-cases": "tests.system.check_cases",
    "hang-kinds": "tests.system.hang_kinds",
    "honest-pauses": "tests.system.honest_pauses",
    "ten-faults": "tests.system.ten_faults",
    "schedules": "tests.train.schedules",
    "graphs": "tests.train.test_property",
    "containers": "tests.deploy.containers.__main__",
    "bytes": "tests.fuzz",
}
ROOT = Path(__file__).resolve().parent.parent


def about(module: str) -> str:
    """Return the first line of a module's docstring, without importing it."""
    text = ast.get_docstring(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())) or ""
    return text.partition("\n")[0]


def main(argv: list[str]) -> int:
    """Run the suite that ``argv`` names, or list all of them. Return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print("\n".join(f"  {name:18} {about(module)}" for name, module in SUITES.items()))
        return 0
    if argv[0] not in SUITES:
        print(f"stress: no suite {argv[0]!r}; python -m tests.stress lists them", file=sys.stderr)
        return 2
    module = SUITES[argv[0]].removesuffix(".__main__")
    os.execv(sys.executable, [sys.executable, "-m", module, *argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
