"""Imports torch's TCPStore class; in the agent's process without the rest of torch.

``import torch`` costs about 1.2 s of CPU and 200 MB, and the agent needs one C++ class of it. That class is in ``torch._C``, which can be
imported under an empty stand-in for the package ``torch``: 0.2 s and 135 MB. Nothing else of torch works in that process then, so only
the agent's own program asks for it (``store_only``). The whole of torch is imported where the stand-in does not work.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastirun.rendezvous.stores.environment import variable
from elastirun.threads import start_thread

LISTS_KEYS = (2, 10)  # the first version of torch whose TCPStore can list its keys
_MOST_VERSION = 4096  # bytes of torch's file that are read
_VERSION = re.compile(r"^__version__ *= *['\"]([^'\"\n]{1,40})['\"]", re.MULTILINE)
_lock = threading.Lock()  # the store thread and the workers' store import the class at the same time
_store_only = False


def store_only() -> None:
    """Make this process import no more of torch than its stores need."""
    global _store_only
    _store_only = True


def import_ahead() -> None:
    """Import the class in a thread, before it is needed. Who needs it hears what went wrong."""

    def ahead() -> None:
        with suppress(Exception):  # what torch may raise: anything
            tcp_store_class()

    start_thread("import of torch", ahead)


def tcp_store_class() -> Any:
    """Return the class ``torch.distributed.TCPStore``. Raises ImportError when torch is not installed."""
    # FATAL silences torch's C++ while it is loaded. Otherwise it prints a stack trace for every lost connection.
    with _lock, variable("TORCH_CPP_LOG_LEVEL", "FATAL"):
        if _store_only and "torch" not in sys.modules:
            try:
                return _import_class_alone()
            except Exception:  # a torch release that the stand-in does not fit
                for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
                    del sys.modules[name]
        if "torch.distributed" not in sys.modules:
            importlib.import_module("torch.distributed")
        return sys.modules["torch._C._distributed_c10d"].TCPStore


def torch_version() -> str:
    """Return the version of the torch that this Python would import, without importing it; empty: there is none."""
    try:
        found = sys.modules.get("torch") or importlib.util.find_spec("torch")  # the stand-in has no spec
        places = None if found is None else getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None)
        if not places:
            return ""
        with (Path(next(iter(places))) / "version.py").open(errors="replace") as file:
            version = _VERSION.search(file.read(_MOST_VERSION))
        return version[1] if version else ""
    except (OSError, ValueError, ImportError):
        return ""


def lists_keys(version: str) -> bool:
    """Return whether the TCPStore of this version of torch can list its keys, and so can be cleared; True if it is unknown."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is None or (int(found[1]), int(found[2])) >= LISTS_KEYS


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Make the package one that cannot be imported, unless it is there: ``torch._C`` imports numpy if it can, in 0.1 s and 14 MB."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _import_class_alone() -> Any:
    """Import ``torch._C`` under stand-ins for the packages above it, and return the class."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("there is no torch")
    folder = Path(found.origin).parent
    for name, place in (("torch", folder), ("torch.distributed", folder / "distributed")):
        stand_in = types.ModuleType(name)
        stand_in.__path__ = [str(place)]
        sys.modules[name] = stand_in
    sys.modules["torch"].distributed = sys.modules["torch.distributed"]  # type: ignore[attr-defined]
    with _without("numpy"):
        c = importlib.import_module("torch._C")
    if not c._c10d_init():
        raise ImportError("this torch is built without distributed")
    return sys.modules["torch._C._distributed_c10d"].TCPStore
