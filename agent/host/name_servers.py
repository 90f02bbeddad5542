"""Keeps torch's TCPStore from asking name servers.

The server's only thread looks up the name of each client that connects, for a line in a log. While a name server is silent each new
client stops the store for ten seconds, and the nodes take its host for lost. A client looks up the server's name as well. glibc can be
told to ask no name server, for a process as a whole; what Python looks up here is asked for all the same.
"""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

OPTIONS = "RES_OPTIONS"  # resolv.conf(5); glibc reads it at the first look-up of the process
ATTEMPTS = 2  # at each name server, glibc's default


def only_python_asks() -> None:
    """Let look-ups by Python ask name servers, and those by torch none. Before the first look-up of this process.

    Sets a variable that programs started later should not get: they would ask no name server. Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_init") or not hasattr(libc, "__res_state"):
        return
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)  # resolver(3): it begins with the ints ``retrans`` and ``retry``
    os.environ[OPTIONS] = f"{os.environ.get(OPTIONS, '')} attempts:0".lstrip()
    look_up = socket.getaddrinfo

    def asking(*args: Any, **options: Any) -> Any:
        libc.__res_init()  # for this thread; /etc/resolv.conf may be another one by now
        libc.__res_state()[1] = ATTEMPTS
        try:
            return look_up(*args, **options)
        finally:
            libc.__res_state()[1] = 0  # this thread may go on to torch's server, whose own client looks its name up

    socket.getaddrinfo = asking
