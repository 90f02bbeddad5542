"""Secrets in files: read the token of ``--token-file``, and advise where others can read this or another secret."""

from __future__ import annotations

import os
import select
import stat
from dataclasses import dataclass
from pathlib import Path

from elastirun import clock

PIPE_WAIT = 10.0  # seconds for whoever writes the secret into a pipe, as in --token-file=<(vault read ...)


@dataclass(frozen=True)
class SecretFile:
    """The content of a file, cut to the size that was asked for, and advice when others can read it."""

    content: bytes
    advice: str  # "others on this machine can read it; chmod 600 it"; empty: nobody else can


def read_secret_file(path: str, most: int) -> SecretFile:
    """Read at most ``most`` bytes. A pipe is read until its writer closes it, for ``PIPE_WAIT`` seconds; it cannot be read twice.

    Raises OSError (``strerror`` says why, also when nobody writes into the pipe) and ValueError when ``path`` is no path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # a pipe without a writer must not block the open
    try:
        mode = os.fstat(fd).st_mode
        content = _read(fd, most)
    finally:
        os.close(fd)
    return SecretFile(content, _advice(path, mode) if stat.S_ISREG(mode) else "")


def advice(path: str) -> str:
    """What to do when others can read the file ``path``, which is not opened; empty: nobody else can, or it is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return _advice(path, mode) if stat.S_ISREG(mode) else ""


def _read(fd: int, most: int) -> bytes:
    regular = stat.S_ISREG(os.fstat(fd).st_mode)  # poll() knows nothing of regular files
    end = clock.now() + PIPE_WAIT
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    content = b""
    while len(content) < most:
        if not regular and not poller.poll(max(0.0, end - clock.now()) * 1000):
            raise TimeoutError(0, f"nothing more was written to it within {PIPE_WAIT:g} s, and it was not closed")
        try:
            data = os.read(fd, most - len(content))
        except BlockingIOError:
            continue
        if not data:
            break
        content += data
    return content


def _advice(path: str, mode: int) -> str:
    """Kubernetes mounts each Secret as a link into a folder named ``..DATE``, read-only, and gives the group of ``fsGroup`` access."""
    in_kubernetes = any(part.startswith("..") for part in Path(os.path.realpath(path)).parts)
    if in_kubernetes:
        return "others in this container can read it; set defaultMode: 0400 for the Secret's volume" if mode & 0o007 else ""
    return "others on this machine can read it; chmod 600 it" if mode & 0o077 else ""
