"""Minimal signal handlers, installed before slow imports. Nothing has been started yet, so they exit with 128 + n.

The agent replaces them with its own handlers. Process 1 of a container needs them most: the kernel drops every signal for which process 1
has no handler. A signal that arrives while Python itself starts, before these lines, is lost all the same.
``_signal`` is imported in place of ``signal``, which would cost 8 ms more.
"""

from __future__ import annotations

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

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from collections.abc import Callable

EARLY = {"SIGTERM": SIGTERM, "SIGINT": SIGINT, "SIGHUP": SIGHUP, "SIGQUIT": SIGQUIT}  # the default of --signals-to-handle

_before_exit: Callable[[int], object] | None = None


def install() -> None:
    """Let the ``EARLY`` signals end this process with 128 + n, and unblock them: the parent may have started us with them blocked.

    SIGHUP that was ignored at start (nohup) stays ignored.
    """
    for signum in EARLY.values():
        if signum != SIGHUP or getsignal(signum) != SIG_IGN:
            signal(signum, _exit)
    pthread_sigmask(SIG_UNBLOCK, EARLY.values())


def restrict_to(names: tuple[str, ...]) -> None:
    """Keep the handlers of the signals in ``names``. The others get Python's defaults: KeyboardInterrupt for SIGINT, else the kernel's."""
    for name, signum in EARLY.items():
        if name not in names and getsignal(signum) is _exit:
            signal(signum, default_int_handler if signum == SIGINT else SIG_DFL)


def call_before_exit(function: Callable[[int], object]) -> None:
    """Call ``function`` with the number of the signal before one ends this process. It must return soon, whatever was interrupted."""
    global _before_exit
    _before_exit = function


def _exit(signum: int, frame: object) -> None:
    global _before_exit
    function, _before_exit = _before_exit, None
    try:
        if function is not None:
            function(signum)
    finally:
        os._exit(128 + signum)
