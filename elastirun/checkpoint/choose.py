"""Finds the kind of storage that a directory of checkpoints is on."""

from __future__ import annotations

from elastirun.checkpoint.directory import Directory
from elastirun.checkpoint.objects import ObjectDirectory


def open_directory(url: str) -> Directory:
    """Return the directory at a path or at a URL of fsspec ("s3://bucket/run1"); nothing is made or asked yet."""
    path = url.removeprefix("file://")
    return ObjectDirectory(path) if "://" in path else Directory(path)
