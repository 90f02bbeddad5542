"""The image of a checkpoint's files in shared memory: what one rank has to write, complete or not, readable by every process that has it.

    page 0     magic, whether the image is complete, and where its description stands
    page 1 …   the files, as the description says
    the end    the description: JSON

The memory belongs to a descriptor (memfd), not to a process, so that it outlives the trainer where another process holds it as well.

See docs/decisions/0015.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from elastirun import linux
from elastirun.checkpoint.record import MAX_BYTES, MAX_FILES, MAX_WORLD, is_file_name, number, parse, text
from elastirun.errors import CheckpointError

PAGE = 4096  # bytes; O_DIRECT takes multiples of it everywhere
MAGIC = b"elastirun image1"
_COMPLETE = struct.Struct("=Q")  # 8 aligned bytes, which the processor stores at once
_PLACE = struct.Struct("=QQ32s")  # offset, length and SHA-256 of the description
_AT_COMPLETE = len(MAGIC)
_AT_PLACE = _AT_COMPLETE + _COMPLETE.size
_SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW  # memory that another process could cut off would end its readers with SIGBUS


@dataclass(frozen=True)
class Description:
    """The content of a complete image."""

    save: int  # number of the save that filled it
    step: int
    fence: str  # token of the round that saved; empty without an agent
    round: int  # 0 without an agent
    rank: int
    world_size: int
    files: Mapping[str, tuple[int, int]]  # name -> (offset in the image, size)
    write: tuple[str, ...]  # the files that this rank writes to the directory


def round_up(size: int) -> int:
    """Return ``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Image:
    """One image. ``memory`` is the whole of it, writable; ``fd`` the descriptor to pass on. Use ``create`` or ``of``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.memory = mmap.mmap(fd, self.size)

    @classmethod
    def create(cls, size: int, name: str = "elastirun-checkpoint") -> Image:
        """Make an empty image of ``size`` bytes, rounded up to pages. Its pages are allocated when they are first written."""
        fd = linux.memfd_create(name, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(round_up(size), 2 * PAGE))
            fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
            image = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        image.memory[: len(MAGIC)] = MAGIC
        return image

    @classmethod
    def of(cls, fd: int) -> Image:
        """Map the image in ``fd``, which then belongs to the result. Raises ``CheckpointError`` for memory whose size could change."""
        try:
            sealed = fcntl.fcntl(fd, linux.F_GET_SEALS) & _SEALS == _SEALS
            size = os.fstat(fd).st_size
        except OSError:
            sealed, size = False, 0
        if not sealed or size < 2 * PAGE or size % PAGE:
            raise CheckpointError(f"descriptor {fd} is not an image: it is not memory of a fixed size")
        return cls(fd)

    def begin(self) -> None:
        """Declare the image incomplete, before its files change."""
        _COMPLETE.pack_into(self.memory, _AT_COMPLETE, 0)

    def finish(self, description: Description) -> None:
        """Declare the image complete, after its files have been written. Raises ``CheckpointError`` when the description has no room."""
        data, at = _encode(description), _end_of(description)
        if at + len(data) > self.size:
            raise CheckpointError(f"an image of {self.size} bytes has no room for {at + len(data)}")
        self.begin()
        self.memory[at : at + len(data)] = data
        _PLACE.pack_into(self.memory, _AT_PLACE, at, len(data), hashlib.sha256(data).digest())
        _COMPLETE.pack_into(self.memory, _AT_COMPLETE, 1)

    def description(self) -> Description | None:
        """Return the description if the image is complete and its description is whole; else None."""
        if self.memory[: len(MAGIC)] != MAGIC or _COMPLETE.unpack_from(self.memory, _AT_COMPLETE) != (1,):
            return None
        at, length, digest = _PLACE.unpack_from(self.memory, _AT_PLACE)
        if not (PAGE <= at < self.size and 0 < length <= min(MAX_BYTES, self.size - at)):
            return None
        data = self.memory[at : at + length]
        if hashlib.sha256(data).digest() != digest:
            return None
        with suppress(CheckpointError, KeyError):
            return _decode(data, self.size)
        return None

    def close(self) -> None:
        """Close the descriptor and unmap the memory. Where views of ``memory`` exist, it is unmapped when the last one goes."""
        with suppress(BufferError):
            self.memory.close()
        os.close(self.fd)


def _end_of(description: Description) -> int:
    """Return where the description begins: after the last file, at a multiple of eight."""
    return -(-max([PAGE, *(at + size for at, size in description.files.values())]) // 8) * 8


def _encode(description: Description) -> bytes:
    return json.dumps(asdict(description), separators=(",", ":"), allow_nan=False).encode("ascii")


def _decode(data: bytes, size: int) -> Description:
    """Return the description in ``data``, of an image of ``size`` bytes. Raises ``CheckpointError`` or KeyError."""
    plain = parse(data, MAX_BYTES)
    files, write = _files(plain["files"], size), plain["write"]
    if not isinstance(write, list) or not all(isinstance(name, str) and name in files for name in write) or len({*write}) < len(write):
        raise CheckpointError("it does not hold the files that it should write")
    return Description(
        save=number(plain["save"]),
        step=number(plain["step"]),
        fence=text(plain["fence"]),
        round=number(plain["round"]),
        rank=number(plain["rank"], MAX_WORLD),
        world_size=number(plain["world_size"], MAX_WORLD, 1),
        files=files,
        write=tuple(write),
    )


def _files(plain: Any, size: int) -> dict[str, tuple[int, int]]:
    if not isinstance(plain, dict) or len(plain) > MAX_FILES:
        raise CheckpointError("it has no files, or too many")
    files = {}
    for name, place in plain.items():
        if not is_file_name(name) or not isinstance(place, list) or len(place) != 2:
            raise CheckpointError("a file has no name or no place")
        at = number(place[0], size, PAGE)
        files[name] = (at, number(place[1], size - at))
    return files
