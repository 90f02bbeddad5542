"""The files on the disk stay as they are, byte for byte: this version reads what earlier ones wrote, and they read what it writes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from elastirun.checkpoint.directory import open_directory
from tests.checkpoint.saves import FENCE, claimed, content, save

WRITTEN = {  # each file with the beginning of its SHA-256, as version 0.1 wrote it
    "folder": """
damaged-step-00000008/__0_0.distcp dca27bb6fc911975
damaged-step-00000008/commit.json b15da4fe766d456a
damaged-step-00000008/empty e3b0c44298fc1c14
damaged-step-00000008/tensors.json cd16c35d7bcdb57e
step-00000007/__0_0.distcp da660e6942c2422a
step-00000007/commit.json d4932a119040b42c
step-00000007/empty e3b0c44298fc1c14
step-00000007/tensors.json fae94118762494ce
""",
    "local": """
commits/000000000001.json 86d007f14206d867
commits/000000000002.json 0fa7ead9b8e37b3f
commits/000000000003.json 6e1be3cba5a6f614
damaged/000000000003.json 6e1be3cba5a6f614
step-00000007.store-1-0101010101010101/__0_0.distcp da660e6942c2422a
step-00000007.store-1-0101010101010101/empty e3b0c44298fc1c14
step-00000007.store-1-0101010101010101/tensors.json fae94118762494ce
step-00000008.store-1-0101010101010101/__0_0.distcp dca27bb6fc911975
step-00000008.store-1-0101010101010101/empty e3b0c44298fc1c14
step-00000008.store-1-0101010101010101/tensors.json cd16c35d7bcdb57e
""",
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_bytes_are_those_of_the_versions_before(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\1" * count)
    directory = open_directory(f"local://{tmp_path}" if kind == "local" else str(tmp_path))
    claim = claimed(directory, FENCE.format(1))
    for n in (0, 1):
        save(directory, claim.name, 7 + n, claim.sequence + n)
    directory.backend.set_aside(directory.scan()[0])
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    written = [f"{path.relative_to(tmp_path)} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" for path in files]
    assert written == WRITTEN[kind].split("\n")[1:-1]
    (found,) = directory.scan()
    assert {name: directory.read(found, name) for name in content(7)} == content(7)
