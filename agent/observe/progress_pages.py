"""The agent's end of the pages that workers stamp with their progress (``elastirun/worker/progress_page.py``)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable

from elastirun import linux
from elastirun.worker.progress_page import FARTHEST, HEADER, MAGIC, SIZE, Page

_FIXED_SIZE = linux.F_SEAL_SEAL | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW


class ProgressPages:
    """The progress pages of a round's workers: memory without a file, which workers open through this process's descriptors."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # by local rank

    def renew(self, count: int, farthest: int = 0) -> list[str]:
        """Make the pages of a new round. Return their paths by local rank; none where such memory cannot be had.

        ``farthest``: as in ``Page``.
        """
        self.close()
        try:
            for local_rank in range(count):
                fd = self._fds[local_rank] = linux.memfd_create("elastirun-progress", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
                os.ftruncate(fd, SIZE)
                os.pwrite(fd, MAGIC, 0)
                os.pwrite(fd, farthest.to_bytes(8, "little"), 8 * FARTHEST)
                fcntl.fcntl(fd, linux.F_ADD_SEALS, _FIXED_SIZE)
        except OSError:
            self.close()
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds.values()]

    def read(self, local_rank: int) -> Page | None:
        """Return the page of a worker that stamps it; None if it does not."""
        page = self.look(local_rank)
        return page if page and page.pid else None

    def look(self, local_rank: int) -> Page | None:
        """Return the page of a worker, also of one that stamps none; None where there is no page."""
        fd = self._fds.get(local_rank)
        return Page.parse(os.pread(fd, HEADER, 0)) if fd is not None else None

    def of(self, local_ranks: Iterable[int]) -> dict[int, Page]:
        """Return the pages of those of these workers that stamp theirs, by local rank."""
        return {local_rank: page for local_rank in local_ranks if (page := self.read(local_rank))}

    def read_all(self) -> list[Page]:
        """Return the pages of all workers of the round that stamp theirs, also of those that have ended."""
        return [page for local_rank in self._fds if (page := self.read(local_rank))]

    def stacks(self, local_rank: int) -> str:
        """Return what the worker has written behind its page."""
        fd = self._fds.get(local_rank)
        data = os.pread(fd, SIZE - HEADER, HEADER) if fd is not None else b""
        return data.lstrip(b"\0").partition(b"\0")[0].decode(errors="backslashreplace")

    def clear_stacks(self, local_rank: int) -> None:
        """Make room for new stacks: those of an earlier hang must not be taken for them."""
        os.pwrite(self._fds[local_rank], bytes(SIZE - HEADER), HEADER)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
