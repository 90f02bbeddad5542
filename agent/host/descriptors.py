"""The limit of open descriptors (RLIMIT_NOFILE): the agent raises its own, its workers get back the one it was started with."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST = 65_536  # more than the connections of any job that was tried; a container's hard limit may be a billion


def raise_limit() -> int:
    """Raise this process's soft limit to its hard limit, at most to ``MOST``. Return the soft limit before.

    Each connection to a store that the agent serves takes one descriptor, so the usual 1024 end a job of 1,000 workers.
    The workers keep the usual limit: select() does not work with descriptors beyond 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft
