"""Asks py-spy, where that program is installed, for the Python stack of a worker that cannot write its own: no Python code of it runs.

py-spy reads the memory of the other process, without stopping it. It needs the right to trace that process, which many systems give to
root alone. The agent does not depend on it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress

from elastirun import linux

LIMIT = 3.0  # seconds for an answer, which takes tenths of a second
END_LIMIT = 0.2  # seconds for its end after SIGKILL; the agent's loop waits for that
MOST_BYTES = 1 << 20  # of an answer


def program() -> str | None:
    """Return the path of py-spy; None where it is not installed."""
    return shutil.which("py-spy")


class StackQuestion:
    """The question for the stack of the process ``pid``, from when it exists. Errors: ``OSError`` when py-spy cannot be started."""

    def __init__(self, path: str, pid: int) -> None:
        self._pid = pid
        self._answer = linux.memfd_create("elastirun-stack")  # not a pipe, which somebody would have to read meanwhile
        command = [path, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        nobody = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=nobody, stdout=self._answer, stderr=nobody)
        except OSError:
            os.close(self._answer)
            raise

    def end(self) -> tuple[tuple[str, str, str], ...]:
        """Return the frames of the main thread, innermost first; none if there is no answer yet."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT)
        text = os.pread(self._answer, MOST_BYTES, 0)
        os.close(self._answer)
        return parse(text, self._pid)


def parse(text: bytes, pid: int) -> tuple[tuple[str, str, str], ...]:
    """Return the frames of the main thread of ``pid`` in what py-spy has written."""
    with suppress(ValueError, KeyError, TypeError):
        for thread in json.loads(text):
            if thread["os_thread_id"] == pid:
                return tuple((str(frame["filename"]), str(frame["line"]), str(frame["name"])) for frame in thread["frames"])
    return ()
