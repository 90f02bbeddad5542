"""Checkpoints in a folder of a file system: claimed by a round, written aside, published by one rename.

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
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from elastirun.checkpoint.backends.backend import Check
from elastirun.checkpoint.backends.files import GONE, open_regular, sync_folder, write_file
from elastirun.checkpoint.claims import Published, is_claim, is_newer, is_step_name, step_name
from elastirun.checkpoint.record import COMMIT, MAX_BYTES, MISSING, Commit, Damage, FileSum, clip, decode, encode
from elastirun.errors import CheckpointError, ClaimLost

LOCK = ".lock"
STAGING, DEAD, DAMAGED = ".staging-", ".dead-", "damaged-"  # what the names of folders begin with
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # rename: the new name is in use
MAX_SUFFIX = 1000  # checkpoints of one step


class Folder:
    """The checkpoints in the folder ``path``. Makes no folder before it is taken over."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def take(self, claim: str, alone: bool) -> Callable[[], None]:
        """Take the folder over, as ``Backend`` says. ``alone``: the lock is held until the claim is given up, or the process ends."""
        os.makedirs(self.path, exist_ok=True)
        lock = self._lock() if alone else None
        try:
            self._sweep(claim)
            os.mkdir(self._staging(claim))
            while (claims := self._sweep(claim)) != [claim]:  # another claim came between; its maker looks again as well
                if claim not in claims:
                    raise ClaimLost(f"{self.path}: another job claims this directory at the same time")
            sync_folder(self.path)
        except BaseException:
            self._release(claim, lock)
            raise
        return lambda: self._release(claim, lock)

    def _release(self, claim: str, lock: int | None) -> None:
        """Give a claim up. With an agent the empty staging folder stays: an earlier round that was frozen must find a later claim."""
        if lock is not None:
            with suppress(OSError):
                os.rmdir(self._staging(claim))  # not if something is left in it: the next claim deletes that
            os.close(lock)

    def checkpoints(self) -> Iterator[Published]:
        return (self.checkpoint(name) for name in sorted(os.listdir(self.path)) if is_step_name(name) or name.startswith(DAMAGED))

    def checkpoint(self, name: str) -> Published:
        """Return the checkpoint in the folder ``name``, with its record or what is wrong with that."""
        commit = damage = None
        try:
            with self.open(name, COMMIT) as file:
                commit = decode(file.read(MAX_BYTES + 1))
        except CheckpointError as error:
            damage = Damage(COMMIT, str(error))
        except OSError as error:
            lasting = error.errno in GONE
            damage = Damage(COMMIT, MISSING if lasting else f"cannot be read: {error.strerror}", lasting)
        return Published(name, commit, damage, set_aside=name.startswith(DAMAGED))

    def open(self, checkpoint: str, file: str) -> IO[bytes]:
        return open_regular(os.path.join(self.path, checkpoint, file))

    def set_aside(self, found: Published) -> str:
        name = self._rename(found.name, f"{DAMAGED}{found.name}")
        sync_folder(self.path)
        return name

    def write(self, claim: str, step: int, file: str, data: memoryview) -> FileSum:
        with self._claimed(claim):
            folder = self._staged(claim, step)
            with suppress(FileExistsError):
                os.mkdir(folder)
            return write_file(os.path.join(folder, file), data)

    def sync(self, claim: str, step: int) -> None:
        """Wait until the disk has the names of the files, whose content it has."""
        with self._claimed(claim):
            sync_folder(self._staged(claim, step))

    def discard(self, claim: str, step: int, files: Collection[str] | None = None) -> None:
        if files is None:
            shutil.rmtree(self._staged(claim, step), ignore_errors=True)
        for name in files or ():
            with suppress(OSError):
                os.unlink(os.path.join(self._staged(claim, step), name))

    def publish(self, claim: str, commit: Commit, check: Check) -> str:
        staged = self._staged(claim, commit.step)
        with self._claimed(claim):
            if not (name := self._published(commit)):  # else by a rename whose answer was lost
                write_file(os.path.join(staged, COMMIT), memoryview(encode(commit)))
                sync_folder(staged)
                with os.scandir(staged) as entries:
                    sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name != COMMIT}
                check(staged, sizes)
                name = self._rename(staged, step_name(commit.step))
        sync_folder(self.path)
        return name

    def delete(self, claim: str, found: Collection[Published]) -> None:
        staging = self._staging(claim)
        with self._claimed(claim):  # the fence also keeps a frozen process from deleting what later rounds may need
            for one in found:
                self._rename(one.name, os.path.join(staging, f"dead-{one.name}"))
            for name in os.listdir(staging):
                if name.startswith("dead-"):  # including what an earlier deletion left
                    shutil.rmtree(os.path.join(staging, name), ignore_errors=True)

    def clean(self, claim: str) -> None:
        for other in self._claims(DEAD):
            shutil.rmtree(os.path.join(self.path, DEAD + other), ignore_errors=True)

    def _claims(self, prefix: str) -> list[str]:
        """Return the claims that have a folder whose name begins with ``prefix``."""
        names = [name.removeprefix(prefix) for name in sorted(os.listdir(self.path)) if name.startswith(prefix)]
        return [name for name in names if is_claim(name)]

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
        claims = self._claims(STAGING)
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

    def _published(self, commit: Commit) -> str:
        """Return the folder's name if exactly this commit is published already, else an empty text."""
        same_step = [name for name in os.listdir(self.path) if is_step_name(name) and name.startswith(step_name(commit.step))]
        return next((name for name in same_step if self.checkpoint(name).commit == commit), "")

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
