"""Workers that need not import: the agent's end of the fork server (``forkserver.py``, see docs/decisions/0018)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from enum import Enum, auto
from functools import partial

from elastirun import clock, linux
from elastirun.agent.host.descriptors import ready
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.processes import proc
from elastirun.agent.processes.preload import forkserver
from elastirun.agent.processes.preload.server_start import StartedServer, runs_as_another_user, start, without_round
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.spawn import STARTUP, Spawned, WorkerSpec, spawn
from elastirun.config import Preload

NEARLY_WITHIN = 5.0  # seconds; where the modules but the last took longer, so may the last one
LOAD_LIMIT = 60.0  # seconds that a node waits for its fork server before it joins the job; a cold disk is slow
FORK_LIMIT = 2.0  # seconds for the forks of a round to answer; the loop waits meanwhile, and workers are executed afterwards
KILL_LIMIT = 1.0  # seconds for killed forks to end
RESTART_AFTER = 10.0  # seconds; a server that lived for less is not started again before the next round
REPORT_LIMIT = 1 << 20  # bytes of the server's report and of a fork's reason


class ServerStage(Enum):
    """Stage of a fork server."""

    STARTING = auto()  # it imports modules
    NEARLY = auto()  # it imports the last one, and came to it soon, so that this one does not take long either
    READY = auto()  # it makes forks
    GONE = auto()


@dataclass
class _Server:
    """A fork server. It is the leader of the session and the process group that its forks stay in until they get work."""

    pid: int
    pidfd: int
    control: socket.socket
    env: Mapping[str, str]  # without the round's own names
    began: float
    patience: float  # seconds for which forks may yet be waited for in this round
    phase: ServerStage = ServerStage.STARTING
    report: bytes = b""

    def take_in(self, data: bytes) -> None:
        """Take in a part of the report, or the word before it that the last module is being imported."""
        if data.startswith(forkserver.NEARLY_LOADED) and clock.now() < self.began + NEARLY_WITHIN:
            self.phase = ServerStage.NEARLY
        self.report += data.lstrip(forkserver.NEARLY_LOADED)


@dataclass(eq=False)
class ParkedForks(Part):
    """Starts workers: from forks of a process that has imported the modules of ``preload``, else by executing them.

    ``like``: a worker as the rounds will have them; its environment without the round's own names is the server's. ``count``: forks
    kept ready. ``say`` gets lines for people. ``given``: a server that was started before.

    All calls and callbacks happen in the loop's thread.

    The forks of the server are in its session until they get work. The agent leaves this session alone when it ends what workers have
    left behind; the guard does not know it, and ends the server with all its forks when the agent has died.
    """

    _preload: Preload
    _like: WorkerSpec
    _count: int
    _selector: selectors.BaseSelector
    _tree: ProcessTree
    _say: Callable[[str], None]
    given: InitVar[StartedServer | None] = None

    def __post_init__(self, given: StartedServer | None) -> None:
        self._env = without_round(self._like.env)
        self._server: _Server | None = None
        self._parked: deque[socket.socket] = deque()  # forks that were asked for and have no work
        self._asked: set[socket.socket] = set()  # forks that got work and may yet say why they were executed
        self._said: set[str] = set()
        if self._preload.modules and runs_as_another_user():
            self._give_up(f"{sys.executable} runs as another user")
        self._start(given)

    @property
    def phase(self) -> ServerStage:
        """Stage of the server; GONE: there is none."""
        return self._server.phase if self._server else ServerStage.GONE

    @property
    def loading(self) -> bool:
        """Return whether the server imports its modules, and not for too long."""
        server = self._server
        return server is not None and server.phase is not ServerStage.READY and clock.now() < server.began + LOAD_LIMIT

    @property
    def nearly_loaded(self) -> bool:
        """Return whether all modules are imported but the last one, which does not take long."""
        return self.phase is ServerStage.NEARLY

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of children that only this class may reap."""
        return (self._server.pid,) if self._server else ()

    @property
    def parked(self) -> int:
        """Number of forks that wait for work."""
        return len(self._parked)

    def spawn(self, spec: WorkerSpec, stdout: int | None = None, stderr: int | None = None) -> Spawned:
        """Start a worker, see ``spawn.spawn``."""
        while self._serves(spec) and self._parked:
            if started := self._employ(self._parked.popleft(), spec, stdout, stderr):
                return started
        return spawn(spec, stdout, stderr)

    def workers_started(self, round: NodeRound) -> None:
        self.refill()

    def refill(self) -> None:
        """Ask for as many forks as have got work. Call it when a round's workers are started: a fork takes the server some milliseconds."""
        if self._server and self._server.env != self._env:
            self.drop()
        if self._server is None:
            self._start()
        elif self._server.phase is ServerStage.READY:
            self._server.patience = FORK_LIMIT
            self._park()

    def close(self) -> None:
        """End the server and its forks."""
        self._preload = Preload()
        self.drop()
        for job in tuple(self._asked):
            self._forget(job)

    # -- the server -------------------------------------------------------------------------------------------------------------

    def _start(self, given: StartedServer | None = None) -> None:
        if not self._preload.modules:
            if given:  # the script has changed since it was read: it needs no server now
                os.close(given.control)
            return
        try:
            ours, started = self._take_over(given) if given else start(self._preload, replace(self._like, env=self._env))
        except OSError as error:
            self._tell(f"the fork server cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        env = given.env if given and given.env is not None else self._env
        server = self._server = _Server(started.pid, started.pidfd, ours, env, clock.now(), FORK_LIMIT)
        self._tree.spare(started.pid)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_report, server))
        self._selector.register(started.pidfd, selectors.EVENT_READ, partial(self._on_end, server))

    def _take_over(self, given: StartedServer) -> tuple[socket.socket, Spawned]:
        """Return the agent's end of the control socket of a server that runs already, and its process. Raises OSError.

        A server of an earlier job is told the environment of this one.
        """
        ours = socket.socket(fileno=given.control)
        ours.set_inheritable(False)
        ours.settimeout(FORK_LIMIT)
        if given.env is None:
            job = {"environment": self._env, "argv": self._like.argv[2:]}
            with suppress(OSError):  # it has ended, which its pidfd tells
                ours.sendall(json.dumps(job).encode() + b"\n")
        return ours, Spawned(given.pid, linux.pidfd_open(given.pid))

    def _on_report(self, server: _Server, mask: int) -> None:
        if server is not self._server:  # it was dropped after the selector had found it ready
            return
        try:
            data = server.control.recv(1 << 16)
        except OSError:
            data = b""
        server.take_in(data)
        if data and not data.endswith(b"\n") and len(server.report) < REPORT_LIMIT:
            return
        self._selector.unregister(server.control)
        try:
            report = json.loads(server.report)
            failed, reads, obstacle = dict(report["failed"]), dict(report["reads"]), str(report["obstacle"])
        except (ValueError, KeyError, TypeError):
            return  # it has ended, or is about to
        for module, why in failed.items():
            self._tell(f"{module} cannot be imported: {why}")
        if obstacle:
            self._give_up(f"{obstacle}, which forks cannot share")
        elif reads:
            for module, names in reads.items():
                self._tell(f"{module} is not imported: importing it reads {', '.join(names)}, which differs between workers")
            left = (name for name in self._preload.modules if not {name, *forkserver.ALSO.get(name, ())} & reads.keys())
            self._preload = replace(self._preload, modules=tuple(left))
            self.drop()
            self._start()
        else:
            server.phase = ServerStage.READY
            self._park()

    def _on_end(self, server: _Server, mask: int) -> None:
        if server is not self._server:
            return
        lived, was_ready = clock.now() - server.began, server.phase is ServerStage.READY
        self.drop()
        if not was_ready:
            self._tell("the fork server has ended while it imported modules; workers are executed until the next round has begun")
        elif lived >= RESTART_AFTER:
            self._tell("the fork server has ended; another one is started")
            self._start()
        else:
            self._tell("the fork server has ended soon after its start; workers are executed until the next round has begun")

    def drop(self) -> None:
        """Kill the server and its forks without work. The next ``refill`` starts a server.

        Call it when the guard may be about to kill them.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.phase = ServerStage.GONE
        for fileobj in (server.control, server.pidfd):
            with suppress(KeyError):  # the control socket, once the report has come
                self._selector.unregister(fileobj)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)  # the server is not reaped, so the group has its number
        end = clock.now() + KILL_LIMIT
        for job in self._parked:
            _await_end(job, end)
        self._parked.clear()
        _reap(server.pidfd, max(0.0, end - clock.now()))
        server.control.close()
        self._tree.spare_no_longer(server.pid)

    def _give_up(self, why: str) -> None:
        self._preload = Preload()
        self.drop()
        self._tell(f"{why}; workers are executed")

    def _tell(self, text: str) -> None:
        """Say it once."""
        if text not in self._said:
            self._said.add(text)
            self._say(f"--preload: {text}")

    # -- its forks --------------------------------------------------------------------------------------------------------------

    def _park(self) -> None:
        assert self._server is not None
        with suppress(OSError):  # it has ended, or does not read: workers are executed for want of forks
            while len(self._parked) < self._count:
                ours, theirs = socket.socketpair()
                with theirs:
                    self._parked.append(ours)
                    socket.send_fds(self._server.control, [b"\n"], [theirs.fileno()])

    def _serves(self, spec: WorkerSpec) -> bool:
        """Return whether a fork of the server would be as the worker that is executed."""
        server = self._server
        if server is None:
            return False
        if server.phase is not ServerStage.READY:
            self._tell("the modules are still being imported; workers are executed until they are")
            return False
        like_python = spec.argv[:2] == (sys.executable, "-u") and (spec.argv[2] == "-m" or not spec.argv[2].startswith("-"))
        if not like_python or spec.cpus is not None:
            return False
        self._env = without_round(spec.env)
        if self._env != server.env:
            names = sorted(name for name, _ in self._env.items() ^ server.env.items())
            self._tell(f"the environment of the workers has changed ({', '.join(dict.fromkeys(names))}); they are executed this time")
        return self._env == server.env

    def _employ(self, job: socket.socket, spec: WorkerSpec, stdout: int | None, stderr: int | None) -> Spawned | None:
        """Make a worker of a parked fork; None if that fork has ended, or does not answer: then it is killed."""
        server, began = self._server, clock.now()
        assert server is not None
        job.settimeout(max(0.01, server.patience))
        pidfd = None
        try:
            pid = int(job.recv(32))
            pidfd = linux.pidfd_open(pid)
            found = proc.look(pid)
            if found is None or (found.parent, found.session) != (os.getpid(), server.pid):
                os.close(pidfd)
                pidfd = None  # the fork was killed and reaped, and its number is another process's now, which is none of ours to kill
                raise OSError
            own = {name: value for name, value in spec.env.items() if name in forkserver.ROUND_NAMES}
            executed = {"PYTHONPATH": path} if (path := spec.env.get("PYTHONPATH", "")).startswith(STARTUP) else {}
            work = {"argv": spec.argv, "own": own, "executed": executed, "pause": spec.pause, "group": spec.group}
            message = json.dumps(work).encode() + b"\n"
            sent = socket.send_fds(job, [message], [1 if stdout is None else stdout, 2 if stderr is None else stderr])
            job.sendall(message[sent:])
            if job.recv(1) != b"\n":
                raise OSError
            job.sendall(b"\n")  # only now it runs the script, which must not run twice
        except (OSError, ValueError) as error:
            job.close()
            if pidfd is not None:
                _kill(pidfd)
            if isinstance(error, TimeoutError):
                self._tell("a fork has not answered in time; workers are executed, and another fork server is started")
                self.drop()
            else:
                self._tell("a fork has ended before it got work; its worker is executed")
            return None
        server.patience -= clock.now() - began
        self._asked.add(job)
        self._selector.register(job, selectors.EVENT_READ, partial(self._on_reason, job))
        return Spawned(pid, pidfd)

    def _on_reason(self, job: socket.socket, mask: int) -> None:
        """Hear why a fork has executed its script, if it has."""
        try:
            text = job.recv(1 << 16).decode(errors="replace")
        except OSError:
            text = ""
        self._forget(job)
        if text:
            self._tell(f"{text}; workers are executed")

    def _forget(self, job: socket.socket) -> None:
        self._asked.discard(job)
        self._selector.unregister(job)
        job.close()


def _await_end(job: socket.socket, end: float) -> None:
    """Wait until the killed fork at the other end of the socket is gone."""
    with job, suppress(OSError):
        job.settimeout(max(0.01, end - clock.now()))
        while job.recv(32):
            pass


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
    _reap(pidfd, KILL_LIMIT)


def _reap(pidfd: int, limit: float) -> None:
    """Wait for the end of a killed child, for ``limit`` seconds at most, and reap it."""
    ready([pidfd], limit)
    with suppress(ChildProcessError):
        os.waitid(linux.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)
