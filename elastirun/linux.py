"""System calls and constants of Linux that Python offers only where it was built with recent headers.

conda's Python, and that of uv until July 2026, were built for glibc 2.17 and have none of them, although kernel and C library do.
Each function is Python's own where there is one. Errors: OSError. Imports little, because the guard imports this module.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import socket
import stat
import struct
import time
from typing import BinaryIO

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434  # numbers of the calls, the same on each architecture that torch runs on
P_PIDFD = 3  # for os.waitid, from <linux/wait.h>
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2  # from <linux/memfd.h>
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # for fcntl.fcntl, from <linux/fcntl.h>
TFD_TIMER_ABSTIME = 1  # from <sys/timerfd.h>
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


class Descriptor(int):
    """A descriptor that a ``with`` closes."""

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file to read. Raises OSError for anything else, also for a pipe, whose open could wait for ever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a file", path)


def pidfd_open(pid: int) -> int:
    """Return a descriptor for the process ``pid``. Programs that this one executes do not have it."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("syscall", PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Send a signal to the process of ``pidfd``; 0: only check that it is there."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
    else:
        _call("syscall", PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Return a descriptor of an empty file in memory. Programs that this one executes do not have it with the default ``flags``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call("memfd_create", name.encode(), flags)


def timerfd_create() -> int:
    """Return the descriptor of a timer on the clock of ``elastirun.clock``, which runs also while the machine is suspended.

    The timer is readable, without blocking, from the moment on that ``timerfd_settime`` has set. Programs that this one executes do not
    have it.
    """
    return _call("timerfd_create", time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)


def timerfd_settime(timer: int, moment: float) -> None:
    """Let the timer go off at ``moment``, in seconds of ``elastirun.clock``; 0: never. That it went off before is forgotten."""
    seconds, nanoseconds = divmod(int(moment * 1e9), 10**9)
    _call("timerfd_settime", timer, TFD_TIMER_ABSTIME, struct.pack("4l", 0, 0, seconds, nanoseconds), 0)


def _call(function: str, *arguments: int | bytes) -> int:
    """Call a function of the C library. Return its result, or raise the OSError that errno names."""
    import ctypes

    result: int = getattr(_libc(), function)(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@functools.cache
def _libc() -> object:
    """Return the C library. An idle agent sets its guard's timer twice a second, and to load it anew takes longer than all else in that."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end by the kernel's word; -1 where the kernel does not know."""
    try:
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return -1, -1
    return pid, uid


def recv_fds(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int]:
    """Return what has come, at most ``most`` descriptors that came along, and the flags. Programs that are executed do not have them.

    ``socket.recv_fds`` of Python 3.11 does not pass its flags on, so a program that is executed meanwhile would get copies.
    """
    import array

    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, fds.tolist(), flags
