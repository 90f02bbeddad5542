"""Single files in a folder, written so that they are durable."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from elastirun.checkpoint.image import PAGE
from elastirun.checkpoint.record import FileSum
from elastirun.errors import CheckpointError

CHUNK = 8 << 20  # bytes hashed and written at a time: few system calls, and room in the processor's cache for most of it
GONE = (errno.ENOENT, errno.ENOTDIR)


def write_file(path: str, data: memoryview) -> FileSum:
    """Write ``data`` as the file ``path``, wait until the disk has it, and return its size and checksums. Raises OSError.

    Whole pages bypass the page cache (O_DIRECT) where ``data`` begins at a page and the file system takes that: a quarter of the
    processor time, and memory that the training needs is not filled with a copy.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with _closing(fd, path):
        digest, crc32 = hashlib.sha256(), 0
        whole = len(data) // PAGE * PAGE
        direct = whole > 0 and _set_direct(fd, True)
        at = 0
        while at < len(data):
            end = min(at + CHUNK, whole if direct and at < whole else len(data))
            digest.update(data[at:end])
            crc32 = zlib.crc32(data[at:end], crc32)
            direct = _write(fd, data, at, end, direct and end <= whole)
            at = end
        os.fsync(fd)
        return FileSum(len(data), digest.hexdigest(), crc32)


def _write(fd: int, data: memoryview, at: int, end: int, direct: bool) -> bool:
    """Write ``data[at:end]`` at ``at``. Return whether the next part can bypass the page cache as well."""
    if not direct:
        _set_direct(fd, False)
    while at < end:
        if direct and at % PAGE:  # a short write; what follows it is not aligned any more
            direct = _set_direct(fd, False)
        try:
            at += os.pwrite(fd, data[at:end], at)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _set_direct(fd, False)  # the file system wants another alignment
    return direct


def _set_direct(fd: int, direct: bool) -> bool:
    """Switch O_DIRECT on or off, if the file system can. Return whether it is on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    with suppress(OSError):
        if wanted != flags:
            fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
        return direct
    return False


def sync_folder(path: str) -> None:
    """Wait until the disk has the names in the folder ``path``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with _closing(fd, path):
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot sync folders has nothing to wait for
                raise


@contextmanager
def _closing(fd: int, path: str) -> Iterator[None]:
    """Close ``fd`` at the end. An error on the way, which has only the descriptor, names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise
    finally:
        os.close(fd)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; a pipe of that name would block for ever. Raises OSError and ``CheckpointError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError("is not a regular file")
    return os.fdopen(fd, "rb")
