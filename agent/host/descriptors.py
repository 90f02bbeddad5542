"""Descriptors: which of them are ready, and how many may be open."""

from __future__ import annotations

import resource
import select
from collections.abc import Iterable
from contextlib import suppress

from elastirun.errors import StartError

MIN_DESCRIPTORS = 64  # an agent with two workers uses 40; each worker, and each node at a store served here, takes a few more
MAX_DESCRIPTORS = 65_536  # more than a job of any tested size needs; a container's hard limit may be a billion


def ready(fds: Iterable[int], seconds: float, events: int = select.POLLIN) -> dict[int, int]:
    """Wait until one of ``fds`` is ready, for ``seconds`` at most. Return those that are, with what they are ready for."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    return dict(poller.poll(1000 * seconds))


def raise_limit() -> int:
    """Raise this process's soft limit of open descriptors (RLIMIT_NOFILE) to its hard limit, at most to MAX_DESCRIPTORS.

    Return the previous soft limit, which the workers get. Raises StartError when the hard limit is below MIN_DESCRIPTORS.

    Each connection to a store that the agent serves takes one descriptor, so the usual 1024 end a job of 1,000 workers.
    Workers must keep the usual limit: select() does not work with descriptors beyond 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        why = f"the limit of open descriptors is {hard}, an agent needs {MIN_DESCRIPTORS} or more"
        raise StartError(f"cannot start here: {why}; raise it (ulimit -Hn, or LimitNOFILE= of a systemd unit)")
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft
