"""Finds the kind of storage that a directory of checkpoints is on."""

from __future__ import annotations

from elastirun.checkpoint.directory import Directory


def open_directory(url: str) -> Directory:
    """Return the directory at a path or a URL; nothing is made or asked yet."""
    return Directory(url.removeprefix("file://"))
