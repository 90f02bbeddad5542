"""podman with storage and settings of its own, in a directory that is removed at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("podman", "buildah", "runc", "mmdebstrap")

STORAGE = """[storage]
driver = "overlay"
runroot = "{0}/run"
graphroot = "{0}/graph"
"""
# runc, since crun refuses machines with both versions of control groups. Small limits, since raising them takes a capability.
SETTINGS = """[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[network]
network_backend = "netavark"
network_config_dir = "{0}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


class Podman:
    """Calls podman with the settings in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("storage.conf", STORAGE), ("containers.conf", SETTINGS)):
            (directory / name).write_text(text.format(directory))
        names = {"CONTAINERS_STORAGE_CONF": "storage.conf", "CONTAINERS_CONF": "containers.conf"}
        self.env = os.environ | {key: str(directory / name) for key, name in names.items()}

    def __call__(self, *args: str, check: bool = True, timeout: float = 600) -> str:
        done = subprocess.run(["podman", *args], env=self.env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        if check and done.returncode:
            raise RuntimeError(f"podman {' '.join(args[:4])} …: {(done.stderr or done.stdout).strip()[-1500:]}")
        return done.stdout.strip()

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start podman. Its output, both streams in one, is read from ``stdout``."""
        return subprocess.Popen(
            ["podman", *args],
            env=self.env,
            text=True,
            errors="replace",
            bufsize=1,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def why_not() -> str | None:
    """Return why no containers can run here, None when they can as far as can be seen without trying."""
    if os.geteuid() != 0:
        return "containers with networks of their own need root"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextmanager
def podman(directory: Path, keep: bool = False) -> Iterator[Podman]:
    """Set podman up in ``directory``, and remove all that it stored there afterwards unless ``keep``."""
    made = Podman(directory)
    try:
        yield made
    finally:
        if not keep:
            made("rm", "--all", "--force", "--time", "0", check=False)
            made("network", "prune", "--force", check=False)
            made("rmi", "--all", "--force", check=False)
            unmount(directory)
            shutil.rmtree(directory)


def unmount(directory: Path) -> None:
    """Unmount what podman has mounted below ``directory`` and keeps mounted."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in sorted((point for point in points if point.startswith(f"{directory}/")), reverse=True):
        subprocess.run(["umount", point], capture_output=True, timeout=60)
