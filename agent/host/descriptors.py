"""The limit of open descriptors (RLIMIT_NOFILE). The agent raises its own; its workers get the limit that the agent was started with."""

from __future__ import annotations

import resource
from contextlib import suppress

MAX_DESCRIPTORS = 65_536  # more than a job of any tested size needs; a container's hard limit may be a billion


def raise_limit() -> int:
    """Raise this process's soft limit to its hard limit, at most to MAX_DESCRIPTORS. Return the previous soft limit.

    Each connection to a store that the agent serves takes one descriptor, so the usual 1024 end a job of 1,000 workers.
    Workers must keep the usual limit: select() does not work with descriptors beyond 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft
