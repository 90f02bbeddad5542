"""The connections that process groups of this process have opened, and their cut, which ends waits for peers at once.

gloo's own ``abort`` does nothing, and a wait for a peer that hangs ends with the timeout of the group. ``shutdown`` (2) of a connection
wakes the waiting thread within a millisecond, but for those in waits.py. A listening socket must stay as it is: gloo ends the
process when ``accept`` fails.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from contextlib import suppress

INTERNET = (socket.AF_INET, socket.AF_INET6)
LOOK = 0.05  # seconds between two looks whether the connections were cut, in a wait that no connection ends


class GroupConnections:
    """The connections that were opened between ``begin`` and ``end``; between the two calls: since ``begin``.

    Other threads of the program should open none meanwhile: they would be cut with the group's. ``cut`` may be called in any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[int] | None = None  # inodes of the sockets that are not the groups'; None: there are no groups
        self._groups: set[int] | None = None  # inodes of those that are; None: groups are being made
        self._cut_at: float | None = None  # when they were cut first

    @property
    def made(self) -> bool:
        """Whether there are groups whose connections may be cut."""
        return self._before is not None

    @property
    def is_cut(self) -> bool:
        """Whether the connections of the present groups were cut."""
        return self._cut_at is not None

    def check(self, what: str) -> None:
        """Raise RuntimeError if the connections of the present groups were cut. ``what``: what is under way, for people."""
        if self.is_cut:
            raise RuntimeError(f"a peer is lost, or the agent ends this round, while {what}")

    def wait_unless_cut(self, event: threading.Event, what: str, timeout: float = math.inf) -> bool:
        """Return whether ``event`` is set within ``timeout`` seconds. Raises RuntimeError if the connections are cut before."""
        end = time.monotonic() + timeout
        while not event.wait(min(LOOK, max(0.0, end - time.monotonic()))):
            self.check(what)
            if time.monotonic() >= end:
                return False
        return True

    def cut_for(self) -> float:
        """Return the seconds since the connections of the present groups were cut first; 0: they are not."""
        since = self._cut_at
        return 0.0 if since is None else time.monotonic() - since

    def begin(self) -> None:
        """Process groups are made from now on. What is left of the last ones, such as the connection to their store, is theirs, too.

        If those are cut these are, too, until ``forget``.
        """
        with self._lock:
            self._before, self._groups = set(_sockets()) - (self._groups or set()), None

    def end(self) -> None:
        """The process groups are made."""
        with self._lock:
            assert self._before is not None
            self._groups = set(_sockets()) - self._before

    def forget(self) -> None:
        """There are no groups any more."""
        with self._lock:
            self._before = self._groups = self._cut_at = None

    def cut(self) -> None:
        """End the connections: whoever waits at them gets an error, here and at the other end."""
        with self._lock:
            if self._before is None:
                return
            if self._cut_at is None:
                self._cut_at = time.monotonic()
            found = _sockets()
            for inode in (set(found) - self._before) if self._groups is None else set(found) & self._groups:
                _shut_down(found[inode], inode)


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:["):
                found[int(link[len("socket:[") : -1])] = int(fd)
    return found


def _shut_down(fd: int, inode: int) -> None:
    """Shut a connection down, if ``fd`` is still this one: other threads open and close descriptors meanwhile."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode and connection.family in INTERNET:
            connection.getpeername()  # a socket that listens raises here
            connection.shutdown(socket.SHUT_RDWR)


live_sockets = GroupConnections()  # those of this process's groups in a live job
