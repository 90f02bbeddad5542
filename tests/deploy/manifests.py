"""The manifests of deploy/kubernetes, rendered."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.until import PATIENCE

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))

needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which renders the manifests, is not installed")

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    """Return the documents that `kubectl apply -k folder` would send."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # such as a warning that a field of kustomize is out of date
    return list(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> list[Manifest]:
    return render(FOLDER / "overlays" / name)


def only(documents: list[Manifest], kind: str) -> Manifest:
    """Return the one document of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found
