"""The file of an annotation in a pod, written as the kubelet does: all links point to a folder that is replaced as a whole."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path


class Annotation:
    """A volume of the downward API in the empty ``folder``, with one file for one annotation."""

    def __init__(self, folder: Path, text: str = "", name: str = "nodes") -> None:
        self._folder, self._versions = folder, itertools.count(1)
        self.path = folder / name
        self.path.symlink_to(f"..data/{name}")
        self.set(text)

    def set(self, text: str) -> None:
        """Replace the text, which is empty for an annotation that is not set."""
        version = next(self._versions)
        (self._folder / f"..{version}").mkdir()
        (self._folder / f"..{version}" / self.path.name).write_text(text)
        (self._folder / "..data_tmp").symlink_to(f"..{version}")
        (self._folder / "..data_tmp").rename(self._folder / "..data")
        shutil.rmtree(self._folder / f"..{version - 1}", ignore_errors=True)
