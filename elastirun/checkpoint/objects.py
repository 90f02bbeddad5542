"""Checkpoints in an object store, at any URL of fsspec. There is no rename there; what counts is decided by a log of numbered objects.

    URL/commits/000000000012.json    one entry of the log: a claim, or the record of a checkpoint
    URL/step-00000100.CLAIM/         the files of a checkpoint
    URL/damaged/000000000012.json    the record of a checkpoint with wrong bytes, which does not count any more

The fence. An entry is put only where no object of that number exists (a conditional put), under the number after the last. A claim is an
entry, too. So once a later round has claimed the directory, the number that a frozen process was about to use is taken for ever: claims are
never deleted. What it had published before has a lower number, and was seen by the claim.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from elastirun.checkpoint.claims import Found, claim_name, is_claim, is_newer, is_step_name, newest_first, outdated, step_name
from elastirun.checkpoint.directory import Claim, Directory, check_current
from elastirun.checkpoint.files import CHUNK
from elastirun.checkpoint.record import (
    COMMIT,
    FORMAT,
    MAX_BYTES,
    MISSING,
    WRONG_SUM,
    Commit,
    Damage,
    FileSum,
    Look,
    clip,
    decode,
    encode,
    matches,
    parse,
)
from elastirun.errors import CheckpointError, ClaimLost
from elastirun.worker.current_round import is_current

_ENTRY = re.compile(r"([0-9]{12})\.json")


class ObjectDirectory(Directory):
    """The checkpoints below a URL of fsspec. ``path`` is the URL."""

    def __init__(self, url: str) -> None:
        self.path = url.rstrip("/")

    @cached_property
    def _store(self) -> tuple[Any, str]:
        """The file system, and the directory's name there. Raises ``CheckpointError``."""
        try:
            fs, root = _fsspec().core.url_to_fs(self.path)
        except Exception as error:  # an unknown protocol, a library that is missing, options that are wrong
            raise CheckpointError(f"{clip(self.path)} cannot be used as a directory of checkpoints: {clip(str(error), 200)}") from None
        return fs, root.rstrip("/")

    def scan(self) -> list[Found]:
        return self._counting(self._found_in(self._entries()))

    def claim(self, fence: str, current: Callable[[], bool] = is_current) -> Claim:
        name = claim_name(fence, os.urandom(8).hex())
        while True:
            entries = self._entries()
            holder = _claims(entries).get(max(entries, default=0), "")
            if is_newer(holder, name):
                raise ClaimLost(f"{self.path}: a later round has claimed this directory ({holder})")
            check_current(current, self.path)
            sequence = max(entries, default=0) + 1
            if self._put(sequence, json.dumps({"format": FORMAT, "claim": name}).encode()):
                break
        return Claim(name, sequence + 1, self._counting(self._found_in(entries)))

    def file(self, found: Found, name: str) -> str:
        return f"{self.path}/{found.name}/{name}"

    def read(self, found: Found, name: str, limit: int = MAX_BYTES) -> bytes:
        fs, root = self._store
        path = f"{root}/{found.name}/{name}"
        try:
            size = fs.size(path)
            if size is not None and size > limit:
                raise CheckpointError(f"{self.file(found, name)}: it has {size} bytes, of {limit} at most")
            return bytes(fs.cat_file(path))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.file(found, name)} cannot be read: {_what(error)}") from None

    def content(self, found: Found, name: str) -> memoryview:
        return memoryview(self.read(found, name, sys.maxsize))

    def set_aside(self, found: Found) -> str:
        _, root = self._store
        number = found.commit.sequence if found.commit else int(_ENTRY.findall(found.name)[-1])
        name = f"damaged/{number:012d}.json"
        with _as_oserror():
            self._pipe(f"{root}/{name}", encode(found.commit) if found.commit else b"{}")
        return name

    def write(self, claim: str, step: int, name: str, data: memoryview) -> FileSum:
        with _as_oserror():
            self._pipe(f"{self._staged(claim, step)}/{name}", bytes(data))
        return FileSum(len(data), hashlib.sha256(data).hexdigest(), zlib.crc32(data))

    def sync(self, claim: str, step: int) -> None:
        """Do nothing: what the store has answered for is durable."""

    def publish(self, claim: str, commit: Commit, current: Callable[[], bool] = is_current) -> str:
        """Publish as the base class does, but under the next number of the log, whatever ``commit.sequence`` is."""
        entries, name = self._entries(), f"{step_name(commit.step)}.{claim}"
        last = max(entries, default=0)
        if entries.get(last) == encode(replace(commit, sequence=last)):  # the put has succeeded; only its answer was lost
            return name
        self._check_holder(claim, entries)
        self._check_sizes(claim, commit)
        check_current(current, f"{self.path}: step {commit.step} is not published")
        if not self._put(last + 1, encode(replace(commit, sequence=last + 1))):
            raise ClaimLost(f"{self.path}: another round or job has claimed this directory; nothing was published")
        return name

    def prune(self, claim: str, keep: int) -> list[str]:
        fs, _ = self._store
        entries, names = self._entries(), []
        self._check_holder(claim, entries)
        for one in outdated(self._counting(self._found_in(entries)), keep):
            assert one.commit
            with _as_oserror():
                fs.rm_file(self._entry(one.commit.sequence))
            self._remove(one.name)
            names.append(one.name)
        return names

    def discard(self, claim: str, step: int, names: Collection[str] | None = None) -> None:
        fs, _ = self._store
        if names is None:
            self._remove(f"{step_name(step)}.{claim}")
            return
        for name in names:
            with suppress(Exception):
                fs.rm_file(f"{self._staged(claim, step)}/{name}")

    def clean(self, claim: str) -> None:
        entries = self._entries()
        self._check_holder(claim, entries)  # else a later round's files might be among them
        older, published = {*_claims(entries).values()} - {claim}, {one.name for one in self._found_in(entries)}
        for name in self._list(""):
            if is_step_name(name) and name not in published and name.partition(".")[2] in older:
                self._remove(name)

    def exists(self) -> bool:
        fs, root = self._store
        return bool(fs.exists(root))

    def _check(self, found: Found, name: str, expected: FileSum, look: Look) -> Damage | None:
        fs, root = self._store
        path = f"{root}/{found.name}/{name}"
        try:
            size = fs.size(path)
            if size != expected.size:
                return Damage(name, f"has {size} bytes instead of {expected.size}")
            if look == "size":
                return None
            with fs.open(path, "rb") as file:
                whole = matches(iter(lambda: file.read(CHUNK), b""), expected, look)
        except FileNotFoundError:
            return Damage(name, MISSING)
        except Exception as error:
            return Damage(name, f"cannot be read: {_what(error)}", lasting=False)
        return None if whole else Damage(name, WRONG_SUM)

    def _entry(self, sequence: int) -> str:
        return f"{self._store[1]}/commits/{sequence:012d}.json"

    def _staged(self, claim: str, step: int) -> str:
        return f"{self._store[1]}/{step_name(step)}.{claim}"

    def _list(self, folder: str) -> dict[str, Any]:
        """Return what the store says of each entry of a folder, by its name; none if there is no such folder. Raises OSError."""
        fs, root = self._store
        path = f"{root}/{folder}".rstrip("/")
        with _as_oserror():
            fs.invalidate_cache()
            try:
                listed = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        return {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in listed}

    def _entries(self) -> dict[int, bytes]:
        """Return the log by number, without the checkpoints that were set aside. Raises OSError."""
        numbers = [int(match[1]) for name in self._list("commits") if (match := _ENTRY.fullmatch(name))]
        if not numbers:
            return {}
        fs, _ = self._store
        with _as_oserror():
            read: Mapping[str, Any] = fs.cat([self._entry(number) for number in numbers], on_error="return")
        found = {int(_ENTRY.findall(path)[-1]): data for path, data in read.items()} if isinstance(read, Mapping) else {}
        failed = [error for error in found.values() if isinstance(error, Exception) and not isinstance(error, FileNotFoundError)]
        if failed:
            raise OSError(errno.EIO, f"{self.path}/commits cannot be read: {_what(failed[0])}")
        return {number: bytes(data) for number, data in found.items() if not isinstance(data, Exception)}

    def _found_in(self, entries: Mapping[int, bytes]) -> list[Found]:
        """Return all checkpoints of the log, the newest first."""
        claims, found = _claims(entries), []
        for number, data in entries.items():
            if _claim_in(data):
                continue
            try:
                commit = decode(data)
                found.append(Found(f"{step_name(commit.step)}.{claims[number]}", commit))
            except CheckpointError as error:
                found.append(Found(f"commits/{number:012d}.json", None, Damage(COMMIT, str(error))))
        return newest_first(found)

    def _counting(self, found: list[Found]) -> list[Found]:
        """Return those of ``found`` that were not set aside."""
        aside = {int(match[1]) for name in self._list("damaged") if (match := _ENTRY.fullmatch(name))}
        return [one for one in found if (one.commit.sequence if one.commit else int(_ENTRY.findall(one.name)[-1])) not in aside]

    def _check_holder(self, claim: str, entries: Mapping[int, bytes]) -> None:
        if _claims(entries).get(max(entries, default=0)) != claim:
            raise ClaimLost(f"{self.path}: another round or job has claimed this directory; nothing was published")

    def _check_sizes(self, claim: str, commit: Commit) -> None:
        there = self._list(f"{step_name(commit.step)}.{claim}")
        for name, expected in commit.files.items():
            if name not in there:
                raise CheckpointError(f"{self._staged(claim, commit.step)}/{name} is missing: is the URL the same one on every node?")
            if there[name].get("size") != expected.size:
                size = there[name].get("size")
                raise CheckpointError(f"{self._staged(claim, commit.step)}/{name} has {size} bytes, its rank has written {expected.size}")
        self.discard(claim, commit.step, there.keys() - commit.files.keys())

    def _put(self, sequence: int, data: bytes) -> bool:
        """Put an entry of the log if no other has this number. Return whether the entry there is ``data`` now. Raises OSError."""
        fs, _ = self._store
        path = self._entry(sequence)
        try:
            self._pipe(path, data, "create")
            return True
        except Exception as error:  # also where the store has put the entry and the answer was lost
            fs.invalidate_cache()
            try:
                return bool(fs.cat_file(path) == data)
            except Exception:
                raise OSError(errno.EIO, f"{self.path}/commits cannot be written: {_what(error)}") from None

    def _pipe(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        fs, _ = self._store
        try:
            fs.pipe_file(path, data, mode=mode)
        except FileNotFoundError:  # a store with real folders
            fs.makedirs(os.path.dirname(path), exist_ok=True)
            fs.pipe_file(path, data, mode=mode)

    def _remove(self, name: str) -> None:
        fs, root = self._store
        with suppress(Exception):
            fs.rm(f"{root}/{name}", recursive=True)


def _claims(entries: Mapping[int, bytes]) -> dict[int, str]:
    """Return, for each number of the log, the claim that held the directory then."""
    held, claims = "", {}
    for number in sorted(entries):
        held = claims[number] = _claim_in(entries[number]) or held
    return claims


def _claim_in(data: bytes) -> str:
    """Return the name of the claim if this entry of the log is a claim, else an empty text."""
    try:
        name = parse(data, MAX_BYTES).get("claim")
    except CheckpointError:
        return ""
    return name if isinstance(name, str) and is_claim(name) else ""


def _what(error: BaseException) -> str:
    return clip(f"{type(error).__name__}: {error}", 200)


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Turn the exceptions of a storage library, whatever their class, into OSError, so that the request is repeated."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, _what(error)) from None


def _fsspec() -> Any:
    """Import fsspec. The writer process has started without the folders of installed packages, so they are added now."""
    if sys.flags.no_site and "fsspec" not in sys.modules:
        import site

        site.main()
        sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    import fsspec

    return fsspec


def open_directory(url: str) -> Directory:
    """Return the directory at a path or at a URL of fsspec ("s3://bucket/run1"); nothing is made or asked yet."""
    path = url.removeprefix("file://")
    return ObjectDirectory(path) if "://" in path else Directory(path)
