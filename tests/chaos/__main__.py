"""Break the network and the processes under a real job, again and again, and check that its promises hold.

    python -m tests.chaos --faults 60 --seed 1
    python -m tests.chaos --calm 600                no fault at all, for so many seconds: nobody may be called lost
    python -m tests.chaos --plan --seed 1           what would be done

Needs root, network namespaces and /dev/net/tun. What everybody wrote is kept in a folder when something does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos import faults
from tests.chaos.job import Terms
from tests.chaos.network import missing
from tests.chaos.play import Play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, metavar="N", help="3 or 4, by the seed, when not given")
    parser.add_argument("--expire", type=float, default=Terms.expire, metavar="SECONDS")
    parser.add_argument("--etcd", action="store_true", help="the nodes meet at an etcd on a host of its own")
    parser.add_argument("--succession", choices=["off", "proof", "majority"], default="off", help="the agents' --store-succession")
    parser.add_argument("--live", action="store_true", help="live workers, which are parked between rounds")
    parser.add_argument("--calm", type=float, metavar="SECONDS", help="do nothing for so long")
    parser.add_argument("--plan", action="store_true", help="show the faults and do nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folder in any case")
    arguments = parser.parse_args()
    terms = Terms(expire=arguments.expire, etcd=arguments.etcd, succession=arguments.succession, live=arguments.live)
    nodes = arguments.nodes or 3 + arguments.seed % 2
    steps = [] if arguments.calm else faults.draw(arguments.seed, arguments.faults, nodes, terms)
    if arguments.plan:
        print("\n".join(", ".join(map(str, step)) for step in steps))
        return 0
    if reason := missing():
        print(f"cannot cut anything here: {reason}", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is ended
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    play = Play(folder, nodes, terms, arguments.seed, say=lambda text: print(text, flush=True))
    violations = play.run(steps, arguments.calm or 0.0)
    print(play.report())
    for violation in violations:
        print(f"BROKEN: {violation}")
    if violations or arguments.keep:
        print(f"seed {arguments.seed}; everything is in {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
