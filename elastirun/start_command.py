"""The command that starts elastirun in another process, from wherever this package was imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that contains the package elastirun
# "-m elastirun" would put the working folder into sys.path, where a user's module could replace one that the launcher imports.
_START = f"import sys; sys.path[:] = [*filter(None, sys.path), {_FOLDER!r}]; from elastirun.__main__ import main; main()"
# The kernel sends SIGTERM to the launcher when the thread that started it dies. That thread may have died before prctl is called.
_TIE = "import ctypes, os; ctypes.CDLL(None).prctl(1, 15); os.getppid() == {pid} or os._exit(143); "  # PR_SET_PDEATHSIG, SIGTERM


def start_command(line: Sequence[str], tied: bool = False) -> list[str]:
    """Return the command for ``elastirun`` with the arguments ``line``. ``tied``: it gets SIGTERM when the calling thread dies."""
    return [sys.executable, "-c", (_TIE.format(pid=os.getpid()) if tied else "") + _START, *line]
