"""Pods of a Job in real containers: evicted, killed, paused, scaled. [--keep FOLDER] [SCENARIO ...]

Without a name all scenarios run. As root, with podman, buildah, runc, netavark, aardvark-dns, mmdebstrap and kubectl. --keep uses FOLDER
again, which saves most of the time of the images; else nothing is left behind.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.deploy.containers import images, scenarios
from tests.deploy.containers.jobs import cluster
from tests.deploy.containers.podman import podman, why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(scenarios.ALL))
    parser.add_argument("--keep", type=Path, help="folder for images that stays")
    parser.add_argument("--verbose", action="store_true", help="what happened, of scenarios that pass, too")
    args = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that containers and images are removed
    failed = []
    with tempfile.TemporaryDirectory(prefix="elastirun-pods-") as scratch:
        with podman((args.keep or Path(scratch)) / "podman", keep=bool(args.keep)) as engine:
            begun = time.monotonic()
            image = images.build(engine, engine.directory / "wheels")
            print(f"image built in {time.monotonic() - begun:.0f} s", flush=True)
            for name in args.scenarios or scenarios.ALL:
                begun = time.monotonic()
                try:
                    with cluster(engine, Path(scratch) / name, image, images.volumes()) as made:
                        job = scenarios.ALL[name](made)
                    print(f"{name}: passed in {time.monotonic() - begun:.0f} s", flush=True)
                    if args.verbose:
                        print(job.story(), flush=True)
                except Exception:
                    traceback.print_exc()
                    failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
