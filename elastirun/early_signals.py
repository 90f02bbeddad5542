"""Signals are obeyed from the first moment, before anything slow is imported; until the agent takes them over nothing has been started.

Process 1 of a container needs this most: there the kernel drops every signal that has no handler, and nobody can help in the
time before these lines, while Python itself starts. ``_signal`` because ``signal`` would cost 8 ms more.
"""

import os
from _signal import (  # type: ignore[import-not-found,unused-ignore]
    SIG_DFL,
    SIG_IGN,
    SIG_UNBLOCK,
    SIGHUP,
    SIGINT,
    SIGQUIT,
    SIGTERM,
    default_int_handler,
    getsignal,
    pthread_sigmask,
    signal,
)

EARLY = {"SIGTERM": SIGTERM, "SIGINT": SIGINT, "SIGHUP": SIGHUP, "SIGQUIT": SIGQUIT}  # the default of --signals-to-handle


def leave(signum: int, frame: object) -> None:
    os._exit(128 + signum)


def obey() -> None:
    """From now on these signals end this process with 128 + n, also where whoever started it had blocked them.

    SIGHUP that was ignored at start (nohup) stays ignored.
    """
    for signum in EARLY.values():
        if signum != SIGHUP or getsignal(signum) != SIG_IGN:
            signal(signum, leave)
    pthread_sigmask(SIG_UNBLOCK, EARLY.values())


def keep(names: tuple[str, ...]) -> None:
    """Only those of ``names`` go on being obeyed, the others do what they do in any Python program."""
    for name, signum in EARLY.items():
        if name not in names and getsignal(signum) is leave:
            signal(signum, default_int_handler if signum == SIGINT else SIG_DFL)
