"""Lets a Python worker write its stacks at a signal from its start on, and debug at a terminal. Python runs this file before the script.

The agent puts this folder at the beginning of ``PYTHONPATH``. The folder is taken out again, from ``sys.path`` and from the environment, so
neither the script nor its children see it, and a ``sitecustomize`` of the user is run as if this one were not there. This file runs in
whatever interpreter a worker has: it imports nothing of ours, and next to nothing of Python. Forks of the fork server run it, too.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pdb import Pdb
    from typing import Any

VARIABLE, MAGIC, HEADER, SIGNAL, SHOWS = "ELASTIRUN_PROGRESS", b"elastpg1", 4096, 2, 15  # as in elastirun/worker/progress_page.py
TERMINAL = "ELASTIRUN_TERMINAL"  # set by the agent of several workers: the path of its terminal
FIRST_FD = 50  # the lowest number for the page: a script finds the usual numbers free, and `ulimit -n 64` has room

debuggers: "list[Pdb]" = []  # of this process, once it was at a breakpoint


def show_stacks() -> None:
    """Let a signal write all Python stacks behind the progress page, and say so there. Another process of this worker may be first."""
    import faulthandler
    from _signal import SIG_DFL, SIG_IGN, SIGRTMAX, SIGRTMIN, getsignal, signal  # type: ignore[import-not-found,unused-ignore]
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    page = os.open(os.environ[VARIABLE], os.O_RDWR | os.O_CLOEXEC)
    fd = fcntl(page, F_DUPFD_CLOEXEC, FIRST_FD)
    os.close(page)
    number = next((n for n in range(SIGRTMAX - 4, SIGRTMIN + 8, -1) if getsignal(n) == SIG_DFL), 0)
    if not number or os.pread(fd, 8, 0) != MAGIC or any(os.pread(fd, 8, 8 * SHOWS)):
        os.close(fd)
        return
    os.lseek(fd, HEADER, os.SEEK_SET)
    signal(number, SIG_IGN)  # for the time after the interpreter has taken its handlers away
    faulthandler.register(number, fd, True)
    os.pwrite(fd, number.to_bytes(8, "little"), 8 * SIGNAL)
    os.pwrite(fd, os.getpid().to_bytes(8, "little"), 8 * SHOWS)


def debug_at_terminal(*args: object, **kwargs: object) -> object:
    """Take the place of ``sys.breakpointhook``: debug at the agent's terminal, one worker at a time. Most workers have no other stdin."""
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **kwargs)
    if not debuggers:
        debuggers.append(make_debugger())
    debuggers[0].set_trace(sys._getframe(1))
    return None


def make_debugger() -> "Pdb":
    """Return a debugger that has the terminal from a stop until the script goes on. Raises OSError where the terminal is gone."""
    import fcntl
    import io
    import pdb

    terminal = os.open(os.environ[TERMINAL], os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)  # else its Ctrl-C would be for this worker alone
    reads, writes = (io.TextIOWrapper(io.FileIO(terminal, mode, closefd=False), write_through=True) for mode in "rw")

    class Debugger(pdb.Pdb):
        stands = False  # at a stop

        def interaction(self, *args: "Any") -> None:  # its parameters differ between versions of Python
            if not self.stands:
                fcntl.flock(terminal, fcntl.LOCK_EX)  # until another worker has gone on
                self.stands = True
                writes.write(f"--- rank {os.environ.get('RANK', '?')} (pid {os.getpid()}) is at a breakpoint\n")
            super().interaction(*args)

        def set_continue(self) -> None:
            super().set_continue()
            self.goes_on()

        def set_quit(self) -> None:
            super().set_quit()
            self.goes_on()

        def goes_on(self) -> None:
            self.stands = False
            fcntl.flock(terminal, fcntl.LOCK_UN)

    return Debugger(stdin=reads, stdout=writes)


def leave() -> None:
    """Take this folder out of the paths of this process and its children, and run the ``sitecustomize`` that Python would have run."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    os.environ.pop("PYTHONPATH", None)
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    sys.path[:] = [path for path in sys.path if path != here]
    sys.path_importer_cache.pop(here, None)
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # another one; without any an ImportError, which Python expects


if os.environ.get(VARIABLE):
    try:
        show_stacks()
    except Exception:  # of another user, in another pid namespace, an old Python: the worker goes on without
        pass
if os.environ.get(TERMINAL):
    sys.breakpointhook = debug_at_terminal
if __name__ == "sitecustomize":
    leave()
