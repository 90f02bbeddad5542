"""Loads the largest of torch's libraries in a thread, beside the slow imports of an agent whose fork server is ready.

That is most of the time that the import of the workers' store takes (rendezvous/stores/torch_class.py), and needs nothing of Python. What
else the linker loads has to wait for it, so the agent's modules in C are imported before. Any other agent has the time while its fork
server imports.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path

from elastirun.agent.processes.preload import warm_server
from elastirun.threads import start_thread

IN_C = (
    "_bisect _blake2 _bz2 _ctypes _datetime _decimal _hashlib _heapq _json _lzma _opcode _posixsubprocess _queue _random _sha2 _sha512 "
    "_socket _statistics _struct _typing _uuid array binascii fcntl math psutil._psutil_linux resource select zlib"
).split()  # modules that the command and the agent import; those that this Python does not have, it has built in


def load_if_warm() -> None:
    """Begin to load the library if a warm server has given this process a fork server."""
    if warm_server.VARIABLE in os.environ:
        load()


def load() -> None:
    """Begin to load the library, in a thread. Whoever needs it waits for the linker, and hears there what went wrong."""
    for name in IN_C:
        with suppress(ImportError):
            importlib.import_module(name)
    import ctypes

    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
        start_thread("load of torch", ctypes.CDLL(None).dlopen, os.fsencode(library), os.RTLD_NOW)
