"""Single files of a checkpoint: written so that they are durable, checked against their size and checksum."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from elastirun.checkpoint.image import PAGE
from elastirun.checkpoint.record import MISSING, WRONG_SUM, Damage, FileSum, Look, matches
from elastirun.errors import CheckpointError

CHUNK = 8 << 20  # bytes hashed and written at a time: few system calls, and room in the processor's cache for most of it
BLOCK = 256 << 10  # bytes read and hashed at a time
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
    if wanted != flags:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
            return direct
        return False
    return direct


def write_small(path: str, data: bytes) -> None:
    """Write a file of a few kilobytes, and wait until the disk has it. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with _closing(fd, path):
        at = 0
        while at < len(data):
            at += os.write(fd, data[at:])
        os.fsync(fd)


def read_small(path: str, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError, and ``CheckpointError`` when it is longer than ``limit`` or no regular file."""
    fd = _open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointError(f"it has {size} bytes, of {limit} at most")
        data = b""
        while more := os.read(fd, limit + 1 - len(data)):
            data += more
        return data
    finally:
        os.close(fd)


def map_file(path: str) -> memoryview:
    """Return the content of a regular file, mapped into memory. Raises OSError, and ``CheckpointError`` when it is no regular file."""
    fd = _open_regular(path)
    with _closing(fd, path):
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


def check_file(path: str, name: str, expected: FileSum, look: Look) -> Damage | None:
    """Return what is wrong with the file ``path``, or None when it is as ``expected`` in size and in the checksum ``look``."""
    try:
        fd = _open_regular(path)
    except CheckpointError as error:
        return Damage(name, str(error))
    except OSError as error:
        return Damage(name, MISSING) if error.errno in GONE else Damage(name, f"cannot be read: {error.strerror}", lasting=False)
    try:
        size = os.fstat(fd).st_size
        if size != expected.size:
            return Damage(name, f"has {size} bytes instead of {expected.size}")
        return None if look == "size" or matches(_blocks(fd), expected, look) else Damage(name, WRONG_SUM)
    except OSError as error:
        return Damage(name, f"cannot be read: {error.strerror}", lasting=False)
    finally:
        os.close(fd)


def _blocks(fd: int) -> Iterator[memoryview]:
    """Yield the rest of a file in blocks that stay in the processor's cache. Each is valid until the next."""
    block = bytearray(BLOCK)
    with memoryview(block) as view:
        while count := os.readv(fd, [block]):
            yield view[:count]


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


def _open_regular(path: str) -> int:
    """Open a regular file for reading; a pipe of that name would block for ever. Raises OSError and ``CheckpointError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError("is not a regular file")
    return fd
