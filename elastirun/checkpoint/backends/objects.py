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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import IO, Any, cast

from elastirun.checkpoint.backends.backend import Check
from elastirun.checkpoint.claims import Published, is_claim, is_newer, is_step_name, step_name
from elastirun.checkpoint.record import COMMIT, FORMAT, MAX_BYTES, Commit, Damage, FileSum, clip, decode, encode, parse
from elastirun.errors import CheckpointError, ClaimLost

_ENTRY = re.compile(r"([0-9]{12})\.json")


class ObjectStore:
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

    def take(self, claim: str, alone: bool) -> Callable[[], None]:
        """Put the claim into the log. It stays there for ever, so there is nothing to give up."""
        while True:
            last, _, holder = self._end()
            if is_newer(holder, claim):
                raise ClaimLost(f"{self.path}: a later round has claimed this directory ({holder})")
            if self._put(last + 1, json.dumps({"format": FORMAT, "claim": claim}).encode()):
                return lambda: None

    def checkpoints(self) -> list[Published]:
        fs, root = self._store
        if not (entries := self._entries(self._numbers("commits"))) and not fs.exists(root):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        aside = self._numbers("damaged")
        # One that was set aside goes by its entry in the log: without that entry it is forgotten.
        return [replace(one, name=_name(at), set_aside=True) if at in aside else one for at, one in _records(entries).items()]

    def open(self, checkpoint: str, file: str) -> IO[bytes]:
        fs, root = self._store
        try:
            return cast("IO[bytes]", fs.open(f"{root}/{checkpoint}/{file}", "rb"))
        except Exception as error:
            raise OSError(errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO, _what(error)) from None

    def set_aside(self, found: Published) -> str:
        number = found.commit.sequence if found.commit else int(_ENTRY.findall(found.name)[-1])
        name = f"damaged/{number:012d}.json"
        with _as_oserror():
            self._pipe(f"{self._store[1]}/{name}", encode(found.commit) if found.commit else b"{}")
        return name

    def write(self, claim: str, step: int, file: str, data: memoryview) -> FileSum:
        with _as_oserror():
            self._pipe(f"{self._staged(claim, step)}/{file}", bytes(data))
        return FileSum(len(data), hashlib.sha256(data).hexdigest(), zlib.crc32(data))

    def sync(self, claim: str, step: int) -> None:
        """Do nothing: what the store has answered for is durable."""

    def discard(self, claim: str, step: int, files: Collection[str] | None = None) -> None:
        fs, _ = self._store
        if files is None:
            self._remove(f"{step_name(step)}.{claim}")
        for name in files or ():
            with suppress(Exception):
                fs.rm_file(f"{self._staged(claim, step)}/{name}")

    def publish(self, claim: str, commit: Commit, check: Check) -> str:
        """Publish under the next number of the log, whatever ``commit.sequence`` is."""
        name, (last, entry, holder) = f"{step_name(commit.step)}.{claim}", self._end()
        if entry == encode(replace(commit, sequence=last)):  # the put has succeeded; only its answer was lost
            return name
        self._check_holder(claim, holder)
        check(self._staged(claim, commit.step), {file: info.get("size") for file, info in self._list(name).items()})
        if not self._put(last + 1, encode(replace(commit, sequence=last + 1))):
            self._check_holder(claim, "")
        return name

    def delete(self, claim: str, found: Collection[Published]) -> None:
        self._check_holder(claim, self._end()[2])
        for one in found:
            assert one.commit
            with _as_oserror():
                self._store[0].rm_file(self._entry(one.commit.sequence))
        # A step that was saved twice under one claim has two records of the same files.
        kept = {one.name for one in _records(self._entries(self._numbers("commits"))).values()} if found else set()
        for name in {one.name for one in found} - kept:
            self._remove(name)

    def clean(self, claim: str) -> None:
        entries = self._entries(self._numbers("commits"))
        claims = _claims(entries)
        self._check_holder(claim, claims.get(max(entries, default=0), ""))  # else a later round's files might be among them
        older, published = {*claims.values()} - {claim}, {one.name for one in _records(entries).values()}
        for name in self._list(""):
            if is_step_name(name) and name not in published and name.partition(".")[2] in older:
                self._remove(name)

    def _entry(self, sequence: int) -> str:
        return f"{self._store[1]}/{_name(sequence)}"

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

    def _numbers(self, folder: str) -> list[int]:
        """Return the numbers of the entries in a folder, the last one first. Raises OSError."""
        return sorted((int(match[1]) for name in self._list(folder) if (match := _ENTRY.fullmatch(name))), reverse=True)

    def _end(self) -> tuple[int, bytes, str]:
        """Return the last number of the log, its entry, and the claim that holds the directory. Raises OSError."""
        numbers, entry = self._numbers("commits"), b""
        for number in numbers:
            data = self._entries([number]).get(number, b"")
            entry = data if number == numbers[0] else entry
            if holder := _claim_in(data):
                return numbers[0], entry, holder
        return max(numbers, default=0), entry, ""

    def _entries(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Return these entries of the log, without those that are gone. Raises OSError."""
        paths = [self._entry(number) for number in numbers]
        with _as_oserror():
            read: Mapping[str, Any] = self._store[0].cat(paths, on_error="return") if paths else {}
        found = {int(_ENTRY.findall(path)[-1]): data for path, data in read.items()}
        failed = [error for error in found.values() if isinstance(error, Exception) and not isinstance(error, FileNotFoundError)]
        if failed:
            raise OSError(errno.EIO, f"{self.path}/commits cannot be read: {_what(failed[0])}")
        return {number: bytes(data) for number, data in found.items() if not isinstance(data, Exception)}

    def _check_holder(self, claim: str, holder: str) -> None:
        if holder != claim:
            raise ClaimLost(f"{self.path}: another round or job has claimed this directory; nothing was published")

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


def _records(entries: Mapping[int, bytes]) -> dict[int, Published]:
    """Return the checkpoints in the log by number."""
    claims, records = _claims(entries), {}
    for number, data in entries.items():
        if not _claim_in(data):
            try:
                commit = decode(data)
                records[number] = Published(f"{step_name(commit.step)}.{claims[number]}", commit)
            except CheckpointError as error:
                records[number] = Published(_name(number), None, Damage(COMMIT, str(error)))
    return records


def _name(number: int) -> str:
    """Return the name of an entry of the log."""
    return f"commits/{number:012d}.json"


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
