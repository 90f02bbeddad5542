"""A directory of checkpoints on a file system: claimed by a round, written aside, published by one rename, verified.

    DIR/step-00000100/              a published checkpoint: its files and ``commit.json``
    DIR/.staging-CLAIM/step-…/      being written
    DIR/.staging-CLAIM/dead-…/      being deleted
    DIR/.dead-…/                    the staging folder of an earlier round, being deleted
    DIR/damaged-step-…/             set aside by a reader that found wrong bytes
    DIR/.lock                       locked by the process that writes here, where no agent orders the rounds

The fence. A claim renames the staging folders of earlier rounds away, makes its own, and only then looks at what is published. A folder
becomes a checkpoint, or is deleted, by a rename out of or into the staging folder of the claim, and nothing makes that folder again. So the
rename of a process that was frozen before it fails once a later round has claimed the directory, and whatever it published
earlier was seen by that claim.

See docs/checkpoints-on-disk.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from elastirun.checkpoint.claims import (
    DAMAGED,
    DEAD,
    STAGING,
    Found,
    claim_name,
    is_claim,
    is_newer,
    is_step_name,
    newest_first,
    next_sequence,
    outdated,
    step_name,
)
from elastirun.checkpoint.files import GONE, check_file, map_file, read_small, sync_folder, write_file, write_small
from elastirun.checkpoint.record import COMMIT, MAX_BYTES, MISSING, Commit, Damage, FileSum, Look, clip, decode, encode
from elastirun.errors import CheckpointError, ClaimLost, RoundUnknown
from elastirun.worker.current_round import is_current

LOCK = ".lock"
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # rename: the new name is in use
MAX_SUFFIX = 1000  # checkpoints of one step


@dataclass
class Claim:
    """The right to publish in a directory, until a later round claims it."""

    name: str  # goes to every rank, which writes below it
    sequence: int  # of the first commit under this claim; those after it count on
    found: list[Found] = field(default_factory=list)  # what was published at the claim, newest first
    lock: int | None = None  # descriptor, where no agent orders the rounds

    def release(self) -> None:
        """Unlock the directory. Without an agent the lock is held until this, or until the process ends."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def check_current(current: Callable[[], bool], what: str) -> None:
    """Raise ``ClaimLost`` when the round is over, ``CheckpointError`` when nobody knows; ``what`` cannot be done then."""
    try:
        still = current()
    except RoundUnknown as error:
        raise CheckpointError(f"{what}: {error}") from None
    if not still:
        raise ClaimLost(f"{what}: another round has taken the place of this one")


class Directory:
    """The checkpoints in the folder ``path``. Makes no folder before the claim."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def scan(self) -> list[Found]:
        """Return all published checkpoints, the newest first; at the end those whose record is missing or damaged.

        A directory that does not exist has none. Raises OSError when it cannot be listed.
        """
        return newest_first(self.found(name) for name in self._names() if is_step_name(name))

    def claim(self, fence: str, current: Callable[[], bool] = is_current) -> Claim:
        """Take the directory over for the round with the token ``fence`` (empty: no agent), and return what is published.

        Raises ``ClaimLost`` when a later round has done so, ``CheckpointError`` when another process without an agent writes here, and
        OSError when the directory cannot be written.
        """
        os.makedirs(self.path, exist_ok=True)
        lock = None if fence else self._lock()
        try:
            check_current(current, self.path)
            name = claim_name(fence, os.urandom(8).hex())
            self._sweep(name)
            os.mkdir(self._staging(name))
            while (claims := self._sweep(name)) != [name]:  # another claim came between; its maker looks again as well
                if name not in claims:
                    raise ClaimLost(f"{self.path}: another job claims this directory at the same time")
            sync_folder(self.path)
            found = self.scan()
            set_aside = [self.found(entry) for entry in self.damaged()]
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        return Claim(name, next_sequence([*found, *set_aside]), found, lock)

    def release(self, claim: Claim) -> None:
        """Give a claim up, in the end. Others may claim at any time, whether or not this was called.

        With an agent the empty staging folder stays: an earlier round that was frozen must find that a later one has claimed.
        """
        if claim.lock is not None:
            with suppress(OSError):
                os.rmdir(self._staging(claim.name))  # not if something is left in it: the next claim deletes that
        claim.release()

    def file(self, found: Found, name: str) -> str:
        """Return the path of one file of a checkpoint."""
        return os.path.join(self.path, found.name, name)

    def read(self, found: Found, name: str, limit: int = MAX_BYTES) -> bytes:
        """Return a small file of a checkpoint. Raises ``CheckpointError``, also when the file cannot be read."""
        path = self.file(found, name)
        try:
            return read_small(path, limit)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    def content(self, found: Found, name: str) -> memoryview:
        """Return the bytes of a file of any size, read-only; nothing is read before it is used. Raises ``CheckpointError``."""
        path = self.file(found, name)
        try:
            return map_file(path)
        except (CheckpointError, OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path} cannot be read: {what}") from None

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def verify(self, found: Found, names: Collection[str] | None = None, look: Look = "crc32") -> Iterator[Damage]:
        """Compare the files of a checkpoint, or those in ``names``, with its record; yield what is wrong.

        ``look``: compare the sizes only, or one of the checksums as well, for which every byte is read.
        """
        if found.commit is None:
            yield found.damage or Damage(COMMIT, MISSING)
            return
        for name, expected in found.commit.files.items():
            if (names is None or name in names) and (damage := self._check(found, name, expected, look)):
                yield damage

    def damaged(self) -> list[str]:
        """Return the names of the checkpoints that were set aside."""
        return [name for name in self._names() if name.startswith(DAMAGED)]

    def set_aside(self, found: Found) -> str:
        """Rename a damaged checkpoint, so that it never counts again; return its new name. Nothing is deleted. Raises OSError."""
        name = self._rename(found.name, f"{DAMAGED}{found.name}")
        sync_folder(self.path)
        return name

    def write(self, claim: str, step: int, name: str, data: memoryview) -> FileSum:
        """Write one file of a checkpoint aside, durably. Raises ``ClaimLost`` and OSError."""
        with self._claimed(claim):
            folder = self._staged(claim, step)
            with suppress(FileExistsError):
                os.mkdir(folder)
            return write_file(os.path.join(folder, name), data)

    def sync(self, claim: str, step: int) -> None:
        """Wait until the disk has the names of the files that were written. Raises ``ClaimLost`` and OSError."""
        with self._claimed(claim):
            sync_folder(self._staged(claim, step))

    def publish(self, claim: str, commit: Commit, current: Callable[[], bool] = is_current) -> str:
        """Make the checkpoint that was written aside the newest one; return its folder's name. It can be called again after an OSError.

        Raises ``ClaimLost`` when the round is over, ``CheckpointError`` when a file is missing, and OSError.
        """
        record, staged = encode(commit), self._staged(claim, commit.step)
        if published := self._published(commit):  # by a rename whose answer was lost
            sync_folder(self.path)
            return published
        with self._claimed(claim):
            self._check_sizes(claim, commit)
            write_small(os.path.join(staged, COMMIT), record)
            sync_folder(staged)
            check_current(current, f"{self.path}: step {commit.step} is not published")
            name = self._rename(staged, step_name(commit.step))
        sync_folder(self.path)
        return name

    def prune(self, claim: str, keep: int) -> list[str]:
        """Delete all but the newest ``keep`` checkpoints, and return their names. Raises ``ClaimLost`` and OSError."""
        staging, names = self._staging(claim), []
        for one in outdated(self.scan(), keep):
            with self._claimed(claim):  # the fence also keeps a frozen process from deleting what later rounds may need
                self._rename(one.name, os.path.join(staging, f"dead-{one.name}"))
            names.append(one.name)
        with self._claimed(claim):
            for name in os.listdir(staging):
                if name.startswith("dead-"):  # including what an earlier deletion left
                    shutil.rmtree(os.path.join(staging, name), ignore_errors=True)
        return names

    def discard(self, claim: str, step: int, names: Collection[str] | None = None) -> None:
        """Delete the files ``names`` (None: all) that were written aside for ``step``, as far as possible."""
        if names is None:
            shutil.rmtree(self._staged(claim, step), ignore_errors=True)
            return
        for name in names:
            with suppress(OSError):
                os.unlink(os.path.join(self._staged(claim, step), name))

    def _check(self, found: Found, name: str, expected: FileSum, look: Look) -> Damage | None:
        return check_file(self.file(found, name), name, expected, look)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def found(self, name: str) -> Found:
        """Return the checkpoint in the folder ``name``, with its record or what is wrong with that."""
        try:
            return Found(name, decode(read_small(os.path.join(self.path, name, COMMIT), MAX_BYTES)))
        except CheckpointError as error:
            return Found(name, None, Damage(COMMIT, str(error)))
        except OSError as error:
            lasting = error.errno in GONE
            return Found(name, None, Damage(COMMIT, MISSING if lasting else f"cannot be read: {error.strerror}", lasting))

    def _staging(self, claim: str) -> str:
        return os.path.join(self.path, STAGING + claim)

    def _staged(self, claim: str, step: int) -> str:
        return os.path.join(self._staging(claim), step_name(step))

    @contextmanager
    def _claimed(self, claim: str) -> Iterator[None]:
        """Raise ``ClaimLost`` for a missing file when the reason is that another round has swept the staging folder away."""
        try:
            yield
        except OSError as error:
            if error.errno in GONE and not os.path.isdir(self._staging(claim)):
                what = "another round or job has claimed this directory, it was removed meanwhile, or it is not the same one on every node"
                raise ClaimLost(f"{self.path}: {what}; nothing was published") from None
            raise

    def _sweep(self, mine: str) -> list[str]:
        """Rename the staging folders of all other claims away. Return the claims that there were, ``mine`` perhaps among them.

        Raises ``ClaimLost`` when a later round is among them.
        """
        claims = [name.removeprefix(STAGING) for name in self._names() if name.startswith(STAGING) and is_claim(name[len(STAGING) :])]
        if later := [other for other in claims if is_newer(other, mine)]:
            with suppress(OSError):
                os.rmdir(self._staging(mine))
            raise ClaimLost(f"{self.path}: a later round has claimed this directory ({later[0]})")
        for other in claims:
            if other != mine:
                self._rename_away(other)
        return claims

    def _rename_away(self, claim: str) -> None:
        """Rename a staging folder, and each folder in it: a client of a network file system may still know the former by its old name."""
        dead = os.path.join(self.path, DEAD + claim)
        with suppress(FileNotFoundError):  # another claim was faster
            os.rename(self._staging(claim), dead)
            for name in os.listdir(dead):
                os.rename(os.path.join(dead, name), os.path.join(dead, f"dead-{name}"))

    def clean(self, claim: str) -> None:
        """Delete what earlier rounds have written and not published. It may be much, so ``claim`` leaves it to the writer."""
        for name in self._names():
            if name.startswith(DEAD) and is_claim(name.removeprefix(DEAD)):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def _published(self, commit: Commit) -> str:
        """Return the folder's name if exactly this commit is published already, else an empty text."""
        same_step = [name for name in self._names() if is_step_name(name) and name.startswith(step_name(commit.step))]
        return next((name for name in same_step if self.found(name).commit == commit), "")

    def _check_sizes(self, claim: str, commit: Commit) -> None:
        """Raise ``CheckpointError`` when a file of the commit is not there as its rank reported it. Delete files that no rank reported."""
        staged = self._staged(claim, commit.step)
        for name, expected in commit.files.items():
            path = os.path.join(staged, name)
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                if not os.path.isdir(self._staging(claim)):
                    raise
                raise CheckpointError(f"{path} is missing: is the directory the same one on every node?") from None
            if size != expected.size:
                raise CheckpointError(f"{path} has {size} bytes, its rank has written {expected.size}")
        for name in set(os.listdir(staged)) - {*commit.files, COMMIT}:
            with suppress(OSError):
                os.unlink(os.path.join(staged, name))

    def _rename(self, old: str, name: str) -> str:
        """Rename the folder ``old`` to ``name``, or to ``name.2`` and so on where that is in use; return the new name. Raises OSError."""
        for number in range(1, MAX_SUFFIX):
            free = name if number == 1 else f"{name}.{number}"
            try:
                os.rename(os.path.join(self.path, old), os.path.join(self.path, free))
                return free
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
        raise CheckpointError(f"{self.path} has {MAX_SUFFIX} folders called {name}; delete some of them")

    def _lock(self) -> int:
        """Lock the directory for this process; return the descriptor that holds the lock.

        The lock is one of fcntl(2): processes forked by this one do not inherit it and cannot hold it when this one has died.
        """
        fd = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = clip(os.pread(fd, 200, 0).decode(errors="replace").strip()) or "another process"
                os.close(fd)
                raise CheckpointError(f"{self.path} is being written by {holder}; stop that process, or use another directory") from None
            # a file system without locks; the claim still decides who can publish
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        return fd
