"""Repeats writes that failed for a reason that may pass: a full disk, a quota, a file server that was away."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from elastirun import clock

LIMIT = 30.0  # seconds until a failure is reported: longer than most restarts of a file server, shorter than most intervals of saves
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts; each pause is twice as long as the one before
LASTING = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
LASTING |= {errno.EFBIG, errno.EINVAL}

_T = TypeVar("_T")


def may_pass(error: OSError) -> bool:
    """Return whether the same write may succeed later without anybody's correction of a path or a permission."""
    return error.errno not in LASTING


def repeat(
    attempt: Callable[[], _T], limit: float = LIMIT, now: Callable[[], float] = clock.now, sleep: Callable[[float], None] = time.sleep
) -> _T:
    """Call ``attempt`` until it raises no OSError that may pass; return its result.

    Raises that error as soon as another one cannot pass, or ``limit`` seconds after the first one.
    """
    end, pause = None, FIRST_PAUSE
    while True:
        try:
            return attempt()
        except OSError as error:
            end = now() + limit if end is None else end
            if not may_pass(error) or now() + pause > end:
                raise
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
