"""The commit record of a checkpoint, and what can be wrong with its files. Pure.

A checkpoint is published with ``commit.json`` in it, which is written last. It names every file with its size and checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastirun.errors import CheckpointError

COMMIT = "commit.json"  # the record's name within the checkpoint
FORMAT = 1
WRONG_SUM = "its checksum is wrong: bytes have changed"
MISSING = "is missing"  # what is wrong with a file, or a record, that is not there
MAX_BYTES = 32 << 20  # of a record: enough for MAX_FILES files with the longest names that are usual
MAX_FILES = 200_000  # of a checkpoint: 12 TB in files of 64 MiB
MAX_TEXT = 300  # characters of a fence token
MAX_NUMBER = 2**53  # steps and sizes: beyond it JSON numbers are not exact everywhere
MAX_WORLD = 1 << 20  # ranks

_FILE_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SUMS = ("size", "sha256", "crc32")  # of each file
_FIELDS = {"format", "step", "sequence", "fence", "round", "world_size", "time", "files", "sha256"}


CheckBy = Literal["size", "crc32", "sha256"]  # how thoroughly a file is compared with its record


@dataclass(frozen=True)
class FileSum:
    """The size in bytes and the checksums of one file.

    The SHA-256 is for a thorough look. The CRC-32 takes a third of the time and finds what disks and networks do to files: restoring
    should not take longer than reading.
    """

    size: int
    sha256: str
    crc32: int


@dataclass(frozen=True)
class Commit:
    """The record of one published checkpoint. The newest checkpoint is the one with the highest ``sequence``."""

    step: int
    sequence: int
    fence: str  # the token of the round that published it; empty without an agent
    round: int  # 0 without an agent
    world_size: int
    time: float  # seconds since 1970, by the clock of the machine that published it: shown, never compared
    files: Mapping[str, FileSum]


@dataclass(frozen=True)
class Damage:
    """One reason why a checkpoint cannot be used. ``lasting``: the bytes are wrong, and reading them again does not help."""

    file: str
    what: str
    lasting: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def matches(blocks: Iterable[bytes | memoryview], expected: FileSum, look: CheckBy) -> bool:
    """Return whether a file, of the right size, in ``blocks`` has the checksum ``look``."""
    digest, crc32 = hashlib.sha256(), 0
    for block in blocks:
        if look == "sha256":
            digest.update(block)
        else:
            crc32 = zlib.crc32(block, crc32)
    return digest.hexdigest() == expected.sha256 if look == "sha256" else crc32 == expected.crc32


def is_file_name(name: str) -> bool:
    """Return whether a checkpoint may have a file of this name: one part of a path, in letters of any file system."""
    return _FILE_NAME.fullmatch(name) is not None and name != COMMIT


def encode(commit: Commit) -> bytes:
    """Return the record's bytes. Raises ``CheckpointError`` when ``decode`` would not take them."""
    plain = {"format": FORMAT, **vars(commit), "files": {name: vars(file) for name, file in commit.files.items()}}
    _commit_of(plain)
    data = _spell({**plain, "sha256": _sum_of(plain)})
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{COMMIT} would have {len(data)} bytes, of {MAX_BYTES} at most: the checkpoint has too many files")
    return data


def decode(data: bytes) -> Commit:
    """Return the record that ``data`` holds. Raises ``CheckpointError`` with what is wrong, in a few words."""
    plain = parse(data, MAX_BYTES)
    _check(plain.get("format") == FORMAT, f"its format is {clip(repr(plain.get('format')))}, and this version reads {FORMAT}")
    _check(set(plain) == _FIELDS, "it does not have the fields of a commit record")
    written = plain.pop("sha256")
    _check(written == _sum_of(plain), "its checksum is wrong")
    return _commit_of(plain)


def parse(data: bytes, limit: int) -> dict[str, Any]:
    """Return the JSON object that ``data`` holds. Raises ``CheckpointError`` with what is wrong, in a few words."""
    if len(data) > limit:
        raise CheckpointError(f"it has {len(data)} bytes, of {limit} at most")
    try:
        plain = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise CheckpointError("it is not JSON") from None
    if not isinstance(plain, dict):
        raise CheckpointError("it is not a JSON object")
    return plain


def number(value: object, most: int = MAX_NUMBER, least: int = 0) -> int:
    """Return ``value`` if it is a whole number within the limits, else raise ``CheckpointError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise CheckpointError(f"{clip(repr(value))} is not a number from {least} to {most}")
    return value


def text(value: object, most: int = MAX_TEXT) -> str:
    """Return ``value`` if it is a printable text of at most ``most`` characters, else raise ``CheckpointError``."""
    if not isinstance(value, str) or len(value) > most or not (value.isprintable() and value.isascii()):
        raise CheckpointError(f"{clip(repr(value))} is not a text of at most {most} printable characters")
    return value


def sums(files: object) -> dict[str, FileSum]:
    """Return the files by name from ``{name: {"size", "sha256", "crc32"}}``. Raises ``CheckpointError``."""
    return _files(files, lambda file: [file[field] for field in SUMS] if isinstance(file, dict) and len(file) == len(SUMS) else [])


def sums_from_lists(files: object) -> dict[str, FileSum]:
    """Return the files by name from ``{name: [size, sha256, crc32]}``, as the writer reports them. Raises ``CheckpointError``."""
    return _files(files, lambda file: file if isinstance(file, list) else [])


def clip(value: str, limit: int = 100) -> str:
    """Return ``value`` as it may stand in a message: on one line, at most ``limit`` characters."""
    clean = "".join(c if c.isprintable() else " " for c in value)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _commit_of(plain: Mapping[str, Any]) -> Commit:
    seconds = plain["time"]
    _check(isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and math.isfinite(seconds), "its time is not a number")
    return Commit(
        step=number(plain["step"]),
        sequence=number(plain["sequence"]),
        fence=text(plain["fence"]),
        round=number(plain["round"]),
        world_size=number(plain["world_size"], MAX_WORLD, 1),
        time=float(seconds),
        files=sums(plain["files"]),
    )


def _files(files: object, fields: Callable[[Any], list[Any]]) -> dict[str, FileSum]:
    if not isinstance(files, dict) or len(files) > MAX_FILES:
        raise CheckpointError(f"its files are not an object with {MAX_FILES} names at most")
    found = {}
    for name, file in files.items():
        _check(isinstance(name, str) and is_file_name(name), f"{clip(repr(name))} is not the name of a file of a checkpoint")
        try:
            size, sha256, crc32 = fields(file)
        except (KeyError, ValueError):
            size = sha256 = crc32 = None
        _check(isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None, f"{name} has no checksums")
        found[name] = FileSum(number(size), sha256, number(crc32, 2**32 - 1))
    return found


def _sum_of(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(_spell(plain)).hexdigest()


def _spell(plain: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a record cannot hold this: {clip(str(error))}") from None


def _check(good: bool, otherwise: str) -> None:
    if not good:
        raise CheckpointError(otherwise)


def _refuse(name: str) -> float:
    raise ValueError(name)
