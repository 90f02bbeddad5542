"""A backend in the memory of one process: the smallest that keeps what ``Backend`` promises."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Collection
from typing import IO

from elastirun.checkpoint.backends.backend import Check
from elastirun.checkpoint.claims import Published, is_newer, step_name
from elastirun.checkpoint.record import MISSING, Commit, Damage, FileSum
from elastirun.errors import ClaimLost


class InMemory:
    """Checkpoints in a dict."""

    path = "in-memory"

    def __init__(self) -> None:
        self.claim = ""  # the last one
        self.published: list[Published] = []
        self.files: dict[tuple[str, str], bytes] = {}  # by the names of the checkpoint and the file

    def take(self, claim: str, alone: bool) -> Callable[[], None]:
        if is_newer(self.claim, claim):
            raise ClaimLost(f"a later round has claimed this directory ({self.claim})")
        self.claim = claim
        return lambda: None

    def checkpoints(self) -> list[Published]:
        if not self.claim:
            raise FileNotFoundError(2, "there is no directory")
        return list(self.published)

    def open(self, checkpoint: str, file: str) -> IO[bytes]:
        if (checkpoint, file) not in self.files:
            raise FileNotFoundError(2, f"there is no file {file}")
        return io.BytesIO(self.files[checkpoint, file])

    def set_aside(self, found: Published) -> str:
        self.published.remove(found)
        self.published.append(Published(found.name, found.commit, found.damage or Damage("", MISSING), set_aside=True))
        return found.name

    def write(self, claim: str, step: int, file: str, data: memoryview) -> FileSum:
        self.check_claim(claim)
        self.files[self.name(claim, step), file] = bytes(data)
        return FileSum(len(data), hashlib.sha256(data).hexdigest(), zlib.crc32(data))

    def sync(self, claim: str, step: int) -> None:
        """Do nothing: memory is as durable as it gets."""

    def discard(self, claim: str, step: int, files: Collection[str] | None = None) -> None:
        self.remove(lambda name, file: name == self.name(claim, step) and (files is None or file in files))

    def publish(self, claim: str, commit: Commit, check: Check) -> str:
        name = self.name(claim, commit.step)
        if any(one.commit == commit for one in self.published):
            return name
        self.check_claim(claim)
        check(name, {file: len(data) for (at, file), data in self.files.items() if at == name})
        self.check_claim(claim)  # another one may have come meanwhile
        self.published.append(Published(name, commit))
        return name

    def delete(self, claim: str, found: Collection[Published]) -> None:
        self.check_claim(claim)
        self.published = [one for one in self.published if one not in found]
        names = {one.name for one in found} - {one.name for one in self.published}
        self.remove(lambda name, file: name in names)

    def clean(self, claim: str) -> None:
        self.check_claim(claim)
        kept = {one.name for one in self.published}
        self.remove(lambda name, file: name not in kept and not name.endswith(claim))

    def name(self, claim: str, step: int) -> str:
        return f"{step_name(step)}.{claim}"

    def check_claim(self, claim: str) -> None:
        if claim != self.claim:
            raise ClaimLost("another round or job has claimed this directory")

    def remove(self, which: Callable[[str, str], bool]) -> None:
        self.files = {key: data for key, data in self.files.items() if not which(*key)}
