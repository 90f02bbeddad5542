"""The machine that a run of tests/gpu is on, and the commit that it checks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"  # the commit of a copy without .git, unless GPU_COMMIT names it
SPECIFICATION = """
import json, platform, torch
cuda = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if cuda else None
print(json.dumps({
    "gpu": f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory >> 30} GiB" if cuda else "",
    "versions": f"Python {platform.python_version()}, torch {torch.__version__}" + (
        f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else ""),
}))
"""


@dataclass(frozen=True)
class Machine:
    """The machine of a run. ``gpu``: empty where there is none, so that parts run dry."""

    gpu: str
    cores: int
    versions: str
    commit: str

    @property
    def name(self) -> str:
        return f"{self.gpu or 'no GPU'}, {self.cores} cores"


def look() -> Machine:
    """Return what is known of this machine. Raises SystemExit where torch cannot say it."""
    asked = subprocess.run([sys.executable, "-c", SPECIFICATION], capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"torch cannot be asked for GPUs:\n{asked.stderr}")
    said = json.loads(asked.stdout.splitlines()[-1])
    return Machine(said["gpu"], len(os.sched_getaffinity(0)), said["versions"], commit())


def commit() -> str:
    """Return the commit of this folder; with a hash of what has changed since, if anything has."""
    if given := os.environ.get("GPU_COMMIT"):
        return given
    if git("rev-parse", "--show-toplevel").strip() != str(ROOT):  # a copy without .git, perhaps in another repository
        return UNKNOWN
    changes = git("status", "--porcelain") and git("diff", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    changed = f"-changed-{hashlib.sha256(changes.encode()).hexdigest()[:6]}" if changes else ""
    return git("rev-parse", "--short", "HEAD").strip() + changed


def git(*arguments: str) -> str:
    """Return what git says; empty where it fails, or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace")
    except OSError:
        return ""
    return "" if done.returncode else done.stdout
