"""The command that starts elastirun in another process, from wherever this package was imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where the package elastirun is
# Unlike "-m elastirun", without the working folder in sys.path: a user's module there must not stand in for one of the launcher's.
_START = f"import sys; sys.path[:] = [*filter(None, sys.path), {_FOLDER!r}]; from elastirun.__main__ import main; main()"
# The kernel signals the launcher when the thread that started it has died; it may have died before that was asked for.
_TIE = "import ctypes, os; ctypes.CDLL(None).prctl(1, 15); os.getppid() == {pid} or os._exit(143); "  # PR_SET_PDEATHSIG, SIGTERM


def start_command(line: Sequence[str], tied: bool = False) -> list[str]:
    """``elastirun`` with the arguments ``line``. ``tied``: it gets SIGTERM when the calling thread dies."""
    return [sys.executable, "-c", (_TIE.format(pid=os.getpid()) if tied else "") + _START, *line]
