"""torch's TCPStore class, quietly; in the agent's process without the rest of torch.

``import torch`` costs about 1.2 s of CPU and 200 MB, of which the agent needs one C++ class. That class lives in
``torch._C``, which can be imported below an empty stand-in for the package ``torch``: 0.35 s and 150 MB. Nothing else of
torch can be used in that process then, so only the agent's own program asks for it (``store_only``); where it does not
work the whole of torch is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_lock = threading.Lock()  # the store's driver and the workers' store ask at the same time
_store_only = False


def store_only() -> None:
    """From now on this process imports no more of torch than its stores need."""
    global _store_only
    _store_only = True


def tcp_store_class() -> Any:
    """The class ``torch.distributed.TCPStore``. Raises ImportError when there is no torch."""
    with _lock, _quiet():
        if _store_only and "torch" not in sys.modules:
            try:
                return _import_class_alone()
            except Exception:  # another torch than those tried: whatever it lacks, the whole has it
                for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
                    del sys.modules[name]
        if "torch.distributed" not in sys.modules:
            importlib.import_module("torch.distributed")
        return sys.modules["torch._C._distributed_c10d"].TCPStore


def _import_class_alone() -> Any:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("there is no torch")
    folder = Path(found.origin).parent
    for name, place in (("torch", folder), ("torch.distributed", folder / "distributed")):
        stand_in = types.ModuleType(name)
        stand_in.__path__ = [str(place)]
        sys.modules[name] = stand_in
    sys.modules["torch"].distributed = sys.modules["torch.distributed"]  # type: ignore[attr-defined]
    c = importlib.import_module("torch._C")
    if not c._c10d_init():
        raise ImportError("this torch is built without distributed")
    return sys.modules["torch._C._distributed_c10d"].TCPStore


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's C++ prints stack traces for every lost connection unless told not to before it is loaded."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = "FATAL"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
