"""Memory as workers give it to their agent for the next round."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

import pytest

from elastirun import linux
from elastirun.checkpoint import memory_tier
from tests.support.cluster import Worker

SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW


def memfd(content: bytes = b"x", seals: int = SEALS, size: int = 0, name: str = "test") -> int:
    fd = linux.memfd_create(name, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    os.truncate(fd, max(size, len(content)))
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, linux.F_ADD_SEALS, seals)
    return fd


def hold_memory(worker: Worker) -> str:
    """Let the worker's agent hold some memory. Returns the name by which /proc shows the descriptor."""
    fd = memfd(size=4096, name="held")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ELASTIRUN_SOCKET", worker.env["ELASTIRUN_SOCKET"])
            assert memory_tier.put("name", fd) == ""
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def open_files(pid: int) -> list[str]:
    """The targets of a process' descriptors."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
