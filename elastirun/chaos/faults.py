"""Signals for each kind of fault, and the start of an agent that has ended, by the command line that it had."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastirun.agent.processes import proc
from elastirun.agent.processes.preload import warm_server
from elastirun.agent.processes.proc import ProcessStat
from elastirun.chaos.plan import FREEZE, LEAVE, NODE, FaultTarget

STREAMS = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)  # how stdin, stdout and stderr are opened


@dataclass(frozen=True)
class Launch:
    """The command line of an agent, and its surroundings. ``streams``: descriptors of its standard streams, which ``start`` closes."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    streams: Sequence[int]

    @staticmethod
    def of(agent: int) -> Launch:
        """Return how the agent with this pid was started. Errors: OSError."""
        argv = [os.fsdecode(word) for word in Path(f"/proc/{agent}/cmdline").read_bytes().split(b"\0")[:-1]]
        entries = (os.fsdecode(entry).partition("=") for entry in proc.environment(agent).split(b"\0") if b"=" in entry)
        environ, folder = {name: value for name, _, value in entries}, os.readlink(f"/proc/{agent}/cwd")
        environ.pop(warm_server.VARIABLE, None)  # it names descriptors that the new agent does not get
        if not environ:
            raise OSError(errno.EACCES, "its environment is hidden")
        return Launch(argv, environ, folder, [_open(f"/proc/{agent}/fd/{number}", how) for number, how in enumerate(STREAMS)])

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the agent again, in a session of its own: it stays when this command ends. Errors: OSError."""
        stdin, stdout, stderr = self.streams
        try:
            return subprocess.Popen(
                self.argv, env=self.environ, cwd=self.folder, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )
        finally:
            self.close()


def do(kind: str, victim: FaultTarget) -> list[ProcessStat]:
    """Send the signals of the fault. Return the processes that got one; none: the victim has ended by itself."""
    number = {FREEZE: signal.SIGSTOP, LEAVE: signal.SIGTERM}.get(kind, signal.SIGKILL)
    agent = victim.agent.process
    one = agent if victim.pid == agent.pid else proc.look(victim.pid)
    if one is None or not _is_below(one, agent):
        return []
    others = list(proc.descendants(agent.pid).values()) if kind == NODE else []
    return [process for process in (one, *others) if proc.kill(process, number)]


def _is_below(process: ProcessStat, agent: ProcessStat) -> bool:
    """Return whether the process is the agent, or comes from it: a pid may have been given to another process meanwhile."""
    return any((one.pid, one.started) == (agent.pid, agent.started) for one in proc.ancestors(process.pid))


def _open(path: str, how: int) -> int:
    """Return a descriptor of the file, terminal or pipe; of /dev/null where it cannot be opened again, as a socket."""
    try:
        opened = os.open(path, how | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)  # else a pipe without a reader would wait for one
    except OSError:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    return opened
