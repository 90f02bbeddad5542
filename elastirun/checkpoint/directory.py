"""A directory of checkpoints in any kind of storage: which of them count, whether they are whole, and who may publish.

What depends on the storage is its backend's: see backends/backend.py, and backends/folder.py for the fence in a folder.
See docs/checkpoints-on-disk.md.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from elastirun.checkpoint.backends.backend import Backend
from elastirun.checkpoint.backends.choose import backend_at
from elastirun.checkpoint.claims import Published, claim_name, newest_first, next_sequence, outdated
from elastirun.checkpoint.record import COMMIT, MAX_BYTES, MISSING, WRONG_SUM, CheckBy, Commit, Damage, FileSum, clip, matches
from elastirun.errors import CheckpointError, ClaimLost, RoundUnknown
from elastirun.worker.current_round import is_current

BLOCK = 256 << 10  # bytes read and hashed at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Claim:
    """The right to publish in a directory, until a later round claims it."""

    name: str  # goes to every rank, which writes below it
    sequence: int  # of the first commit under this claim; those after it count on
    found: list[Published]  # what was published at the claim, newest first
    release: Callable[[], None]  # to be called once, in the end; others may claim at any time, whether or not it was


def open_directory(url: str) -> Directory:
    """Return the directory at a path or at a URL of fsspec ("s3://bucket/run1"); nothing is made or asked yet."""
    return Directory(backend_at(url))


class Directory:
    """The checkpoints that ``backend`` keeps, where their files are written aside and deleted."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.path = backend, backend.path

    # -- publishing -----------------------------------------------------------------------------------------------------------

    def claim(self, fence: str, current: Callable[[], bool] = is_current) -> Claim:
        """Take the directory over for the round with the token ``fence`` (empty: no agent), and return what is published.

        Raises ``ClaimLost`` when a later round has done so, ``CheckpointError`` when another process without an agent writes here, and
        OSError when the directory cannot be written.
        """
        check_current(current, self.path)
        name = claim_name(fence, os.urandom(8).hex())
        release = self.backend.take(name, alone=not fence)
        try:
            everything = self._everything()
        except BaseException:
            release()
            raise
        return Claim(name, next_sequence(everything), _counting(everything), release)

    def publish(self, claim: str, commit: Commit, current: Callable[[], bool] = is_current) -> str:
        """Make the checkpoint that was written aside the newest one; return its name. It can be called again after an OSError.

        Raises ``ClaimLost`` when the round is over, ``CheckpointError`` when a file is missing, and OSError.
        """

        def check(where: str, sizes: Mapping[str, int]) -> None:
            self._check_sizes(commit, where, sizes)
            self.backend.discard(claim, commit.step, sizes.keys() - commit.files.keys())  # what no rank has reported
            check_current(current, f"{self.path}: step {commit.step} is not published")

        return self.backend.publish(claim, commit, check)

    def prune(self, claim: str, keep: int) -> list[str]:
        """Delete all but the newest ``keep`` checkpoints, and return their names. Raises ``ClaimLost`` and OSError."""
        old = outdated(self.scan(), keep)
        self.backend.delete(claim, old)
        return [one.name for one in old]

    # -- what is there --------------------------------------------------------------------------------------------------------

    def scan(self) -> list[Published]:
        """Return all published checkpoints, the newest first; at the end those whose record is missing or damaged.

        A directory that does not exist has none. Raises OSError when it cannot be listed.
        """
        return _counting(self._everything())

    def damaged(self) -> list[str]:
        """Return the names of the checkpoints that were set aside."""
        return sorted(one.name for one in self._everything() if one.set_aside)

    def exists(self) -> bool:
        """Return whether there is a directory."""
        with suppress(FileNotFoundError):
            next(iter(self.backend.checkpoints()), None)
            return True
        return False

    def file(self, found: Published, name: str) -> str:
        """Return the path or URL of one file of a checkpoint."""
        return os.path.join(self.path, found.name, name)

    def read(self, found: Published, name: str, limit: int = MAX_BYTES) -> bytes:
        """Return a small file of a checkpoint. Raises ``CheckpointError``, also when the file cannot be read."""
        return bytes(self.content(found, name, limit))

    def content(self, found: Published, name: str, limit: int | None = None) -> memoryview:
        """Return the bytes of a file, read-only; of one on a disk nothing is read before it is used. Raises ``CheckpointError``."""
        path = self.file(found, name)
        try:
            with self.backend.open(found.name, name) as file:
                size = file.seek(0, io.SEEK_END)
                if limit is None or size <= limit:
                    return _content(file, size)
        except Exception as error:  # whatever a storage library raises
            raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from None
        raise CheckpointError(f"{path}: it has {size} bytes, of {limit} at most")

    def verify(self, found: Published, names: Collection[str] | None = None, look: CheckBy = "crc32") -> Iterator[Damage]:
        """Compare the files of a checkpoint, or those in ``names``, with its record; yield what is wrong.

        ``look``: compare the sizes only, or one of the checksums as well, for which every byte is read.
        """
        if found.commit is None:
            yield found.damage or Damage(COMMIT, MISSING)
            return
        for name, expected in found.commit.files.items():
            if (names is None or name in names) and (damage := self._check(found, name, expected, look)):
                yield damage

    def _check(self, found: Published, name: str, expected: FileSum, look: CheckBy) -> Damage | None:
        """Return what is wrong with a file, or None when it is as ``expected`` in size and in the checksum ``look``."""
        try:
            with self.backend.open(found.name, name) as file:
                size = file.seek(0, io.SEEK_END)
                if size != expected.size:
                    return Damage(name, f"has {size} bytes instead of {expected.size}")
                file.seek(0)
                whole = look == "size" or matches(iter(lambda: file.read(BLOCK), b""), expected, look)
                return None if whole else Damage(name, WRONG_SUM)
        except (FileNotFoundError, NotADirectoryError):
            return Damage(name, MISSING)
        except CheckpointError as error:
            return Damage(name, str(error))
        except Exception as error:  # whatever a storage library raises
            return Damage(name, f"cannot be read: {_reason(error)}", lasting=False)

    def _check_sizes(self, commit: Commit, where: str, sizes: Mapping[str, int]) -> None:
        """Raise ``CheckpointError`` when a file of the commit is not there as its rank reported it."""
        for name, expected in commit.files.items():
            if name not in sizes:
                what = "URL" if "://" in self.path else "directory"
                raise CheckpointError(f"{where}/{name} is missing: is the {what} the same one on every node?")
            if sizes[name] != expected.size:
                raise CheckpointError(f"{where}/{name} has {sizes[name]} bytes, its rank has written {expected.size}")

    def _everything(self) -> list[Published]:
        with suppress(FileNotFoundError):
            return list(self.backend.checkpoints())
        return []


def check_current(current: Callable[[], bool], what: str) -> None:
    """Raise ``ClaimLost`` when the round is over, ``CheckpointError`` when nobody knows; ``what`` cannot be done then."""
    try:
        still = current()
    except RoundUnknown as error:
        raise CheckpointError(f"{what}: {error}") from None
    if not still:
        raise ClaimLost(f"{what}: another round has taken the place of this one")


def _counting(everything: list[Published]) -> list[Published]:
    return newest_first(one for one in everything if not one.set_aside)


def _content(file: IO[bytes], size: int) -> memoryview:
    if not size:
        return memoryview(b"")
    try:
        return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    except OSError:  # no file of a file system
        file.seek(0)
        return memoryview(file.read())


def _reason(error: Exception) -> str:
    """Return what an exception says, for a message about a file."""
    if isinstance(error, CheckpointError):
        return str(error)
    return error.strerror if isinstance(error, OSError) and error.strerror else clip(f"{type(error).__name__}: {error}", 200)
