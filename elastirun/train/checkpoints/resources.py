"""The things that a ``Checkpointer`` has opened, and their end: by ``close``, when nobody uses it any more, or with the interpreter."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from elastirun.checkpoint.directory import Claim, Directory
from elastirun.errors import CheckpointError
from elastirun.train.checkpoints.publishing import Publisher
from elastirun.train.checkpoints.ranks import Ranks
from elastirun.train.checkpoints.staging import Staging

log = logging.getLogger("elastirun.checkpoints")

END_LIMIT = 300.0  # seconds that the end of the process waits for the last checkpoint to be published


class CheckpointResources:
    """The writer with its thread, the memory, the group of the ranks, and rank 0's claim. Knows nothing of the ``Checkpointer``."""

    def __init__(self, url: str, ranks: Ranks, directory: Directory, staging: Staging) -> None:
        self.pid = os.getpid()
        self.publisher: Publisher | None = None
        self.claim: Claim | None = None
        self._published: int | None = None  # as of the end
        self._url, self._ranks, self._directory, self._staging = url, ranks, directory, staging
        self._ending: threading.Thread | None = None  # of a Checkpointer that was dropped
        _living.add(self)

    @property
    def published(self) -> int | None:
        """Return the step of the newest checkpoint that this rank knows of."""
        return self.publisher.published if self.publisher is not None else self._published

    def claim_directory(self, fence: str) -> Claim:
        """Claim the directory, when dropped Checkpointers of this process have published there. Raises ``CheckpointError``. Rank 0 only."""
        for other in list(_living):
            if other._url == self._url and other._ending is not None:
                other._ending.join(END_LIMIT)
        try:
            self.claim = claim = self._directory.claim(fence)
        except OSError as error:
            raise CheckpointError(f"{self._url} cannot be used for checkpoints: {error.strerror}") from None
        return claim

    def close(self, timeout: float) -> None:
        """End all when what was saved is published, or after ``timeout`` seconds."""
        if self._ending is None:
            self._end(timeout)
            self._ranks.close()
            return
        self._ending.join(timeout)
        if self._ending.is_alive():
            log.warning("%s: what was saved last was not published before the end", self._url)

    def drop(self) -> None:
        """End all as ``close`` does, in a thread: the Checkpointer is gone, and whoever had it goes on."""
        if self not in _living or self.pid != os.getpid():
            return  # a fork has the same writer, which its parent needs
        self._ranks.close()
        self._ending = threading.Thread(target=self._end, args=(END_LIMIT,), name="checkpoints-end", daemon=True)
        self._ending.start()

    def _end(self, timeout: float) -> None:
        if not timeout:
            self._staging.stop()
        if self.publisher is not None:
            self.publisher.close(timeout)
            self._published, self.publisher = self.published, None
        if self.claim is not None:
            self.claim.release()
            self.claim = None
        self._staging.close()
        _living.discard(self)


_living: set[CheckpointResources] = set()  # until they have ended: what a function saved before it returned is published, too


@atexit.register
def _close_all() -> None:
    """Publish what was saved before the interpreter ends; after an exception at once, for the others cannot be waited for."""
    failed = hasattr(sys, "last_value")  # set when the interpreter has printed a traceback
    for opened in list(_living):
        if opened.pid == os.getpid():
            opened.close(0.0 if failed else END_LIMIT)
