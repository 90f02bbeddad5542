"""Chooses the backend for a path or a URL. A new backend is one file beside this one, and one line in ``backend_at``."""

from __future__ import annotations

from elastirun.checkpoint.backends.backend import Backend
from elastirun.checkpoint.backends.folder import Folder
from elastirun.checkpoint.backends.objects import ObjectStore


def backend_at(url: str) -> Backend:
    """Return the backend at a path or at a URL of fsspec ("s3://bucket/run1"); nothing is made or asked yet."""
    path = url.removeprefix("file://")
    return ObjectStore(path) if "://" in path else Folder(path)
