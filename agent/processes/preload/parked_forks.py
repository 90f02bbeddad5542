"""Workers that need not import: the agent's end of the fork server (``forkserver.py``, see docs/decisions/0018)."""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from elastirun import clock, linux
from elastirun.agent.host.descriptors import ready
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.processes import proc
from elastirun.agent.processes.preload import forkserver
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.spawn import STARTUP, Spawned, WorkerSpec, spawn

NEARLY_WITHIN = 5.0  # seconds; where the modules but the last took longer, so may the last one
LOAD_LIMIT = 60.0  # seconds that a node waits for its fork server before it joins the job; a cold disk is slow
FORK_LIMIT = 2.0  # seconds for the forks of a round to answer; the loop waits meanwhile, and workers are executed afterwards
KILL_LIMIT = 1.0  # seconds for killed forks to end
RESTART_AFTER = 10.0  # seconds; a server that lived for less is not started again before the next round
LEARN_LIMIT = 300.0  # seconds for the server to try modules; it makes no forks meanwhile
LEARN_AFTER = 5.0  # seconds without a new module of a worker, after which those that it told of are tried: it has begun to train
TOLD = re.compile(r"\+([A-Za-z_][\w.]{0,99}) ([0-9]{1,10})", re.ASCII)  # what a worker tells of one module
AUTO = "auto"  # in place of a module's name: what the workers import
REPORT_LIMIT = 1 << 20  # bytes of the server's report and of a fork's reason


@dataclass
class _Server:
    """A fork server that runs. It is the leader of the session and the process group that its forks stay in until they get work."""

    pid: int
    pidfd: int
    control: socket.socket
    env: Mapping[str, str]  # without the round's own names
    began: float
    patience: float  # seconds for which forks may yet be waited for in this round
    loaded: bool = False
    nearly_loaded: bool = False  # it imports the last module, and came to it soon
    learning: bool = False  # tries modules, and answers nothing meanwhile
    limit: float = math.inf  # when it must have answered, if it is learning
    taught: int = 0  # number of the learnt modules that it knows
    report: bytes = b""

    def take_in(self, data: bytes) -> None:
        """Take in a part of the report, or the word before it that the last module is being imported."""
        if data.startswith(forkserver.NEARLY_LOADED):
            self.nearly_loaded = clock.now() < self.began + NEARLY_WITHIN
        self.report += data.lstrip(forkserver.NEARLY_LOADED)


class ParkedForks(Part):
    """Starts workers: from forks of a process that has imported ``modules``, else by executing them. Without modules: only so.

    With ``AUTO`` among the modules the workers tell which ones they import, and the fork server tries these when they have done so.

    ``like``: a worker as the rounds will have them; its environment without the round's own names is the server's. ``count``: forks
    kept ready. ``say`` gets lines for people. All calls and callbacks happen in the loop's thread.

    The forks of the server are in its session until they get work. The agent leaves this session alone when it ends what workers have
    left behind; the guard does not know it, and ends the server with all its forks when the agent has died.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        like: WorkerSpec,
        count: int,
        selector: selectors.BaseSelector,
        tree: ProcessTree,
        say: Callable[[str], None],
    ) -> None:
        self._modules = tuple(name for name in modules if name != AUTO)
        self._learns = AUTO in modules
        self._learnt: dict[str, str] = {}  # modules that the workers have imported, in this order, with the digest of the environment then
        self._learn_at = math.inf  # when the fork server is to be told what was learnt; infinity: nothing new
        self._like = like
        self._count = count
        self._selector = selector
        self._tree = tree
        self._say = say
        self._env = _without_round(like.env)
        self._server: _Server | None = None
        self._parked: deque[socket.socket] = deque()  # forks that were asked for and have no work
        self._asked: set[socket.socket] = set()  # forks that got work and may yet say why they were executed
        self._said: set[str] = set()
        if modules and os.stat(sys.executable).st_mode & (stat.S_ISUID | stat.S_ISGID):
            self._give_up(f"{sys.executable} runs as another user")
        self._start()

    @property
    def loading(self) -> bool:
        """Return whether the server imports its modules, and not for too long."""
        return self._server is not None and not self._server.loaded and clock.now() < self._server.began + LOAD_LIMIT

    @property
    def nearly_loaded(self) -> bool:
        """Return whether the server has imported its modules but the last, soon, so that this one does not take long either."""
        return self._server is not None and self._server.nearly_loaded

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
        if self._server and self._server.learning:
            self._tell("modules that the workers import are still being tried; workers are executed until that is done")
        return spawn(spec, stdout, stderr)

    def workers_started(self, round: NodeRound) -> None:
        self.refill()

    def refill(self) -> None:
        """Ask for as many forks as have got work. Call it when a round's workers are started: a fork takes the server some milliseconds."""
        if self._server and self._server.env != self._env:
            self._learnt.clear()
            self._drop()
        if self._server is None:
            self._start()
        elif self._server.loaded and not self._server.learning:
            self._server.patience = FORK_LIMIT
            self._park()

    def tick(self, now: float) -> float:
        """Tell the server of modules that the workers have imported when it is time. Returns when to call it next."""
        server = self._server
        if server and server.learning:
            if now < server.limit:
                return server.limit
            self._learn_no_more(f"a trial takes more than {LEARN_LIMIT:g} s")
        if now < self._learn_at:
            return self._learn_at
        self._learn_at = math.inf
        if server and server.loaded and not server.learning and server.taught < len(self._learnt):
            names = [f"{name}:{digest}" for name, digest in self._learnt.items()][server.taught :]
            try:
                server.control.sendall(" ".join(names).encode() + b"\n")
            except OSError:  # it has ended
                return math.inf
            server.taught, server.learning, server.report = len(self._learnt), True, b""
            server.limit = now + LEARN_LIMIT
            self._selector.register(server.control, selectors.EVENT_READ, partial(self._on_report, server))
            return server.limit
        return math.inf

    def drop(self) -> None:
        """End the server and its forks; the next ``refill`` starts a server. Call it when the guard may be about to kill them."""
        if self._server:
            self._drop()

    def close(self) -> None:
        """End the server and its forks."""
        self._modules, self._learns = (), False
        self.drop()
        for job in tuple(self._asked):
            self._forget(job)

    # -- the server -------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._modules and not self._learns:
            return
        try:
            ours, started = self._launch()
        except OSError as error:
            self._tell(f"the fork server cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        server = self._server = _Server(started.pid, started.pidfd, ours, self._env, clock.now(), FORK_LIMIT)
        self._tree.spare(started.pid)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_report, server))
        self._selector.register(started.pidfd, selectors.EVENT_READ, partial(self._on_end, server))

    def _launch(self) -> tuple[socket.socket, Spawned]:
        """Return the agent's end of the control socket, and the server's process. Raises OSError."""
        ours, theirs = socket.socketpair()
        program = (sys.executable, "-u", forkserver.__file__, str(os.getpid()), str(theirs.fileno()), self._like.group or "-")
        argv = (*program, ",".join(self._modules), *self._like.argv[2:])
        try:
            with theirs:  # not in the workers' control group, which is killed after each round
                return ours, spawn(replace(self._like, argv=argv, env=self._env, group=""), 2, 2, (theirs.fileno(),))
        except OSError:
            ours.close()
            raise

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
            learnt, left_out = list(report.get("learnt", ())), dict(report.get("left_out", {}))
        except (ValueError, KeyError, TypeError):
            return  # it has ended, or is about to
        for module, why in failed.items():
            self._tell(f"{module} cannot be imported: {why}")
        if server.learning:
            self._on_learnt(server, learnt, left_out, bool(failed or reads or obstacle))
        elif obstacle:
            self._give_up(f"{obstacle}, which forks cannot share")
        elif reads:
            for module, names in reads.items():
                self._tell(f"{module} is not imported: importing it reads {', '.join(names)}, which differs between workers")
            self._modules = tuple(name for name in self._modules if not {name, *forkserver.ALSO.get(name, ())} & reads.keys())
            self._drop()
            self._start()
        else:
            server.loaded = True
            self._learn_at = clock.now() + LEARN_AFTER if self._learnt else math.inf
            self._park()

    def _on_learnt(self, server: _Server, learnt: list[str], left_out: Mapping[str, str], spoilt: bool) -> None:
        """Replace the parked forks by those of a server that has learnt modules. ``spoilt``: it is of no use with them."""
        for module, why in left_out.items():
            self._tell(f"{module} is not imported: {why}")
        if spoilt:
            self._learn_no_more(f"importing {learnt[-1]} went otherwise than on trial")
            return
        server.learning = False
        if server.taught < len(self._learnt):
            self._learn_at = clock.now() + LEARN_AFTER
        if learnt:
            self._say(f"--preload: workers of the next rounds need not import {', '.join(learnt)}")
            for job in self._parked:
                job.close()  # the fork ends
            self._parked.clear()
        self._park()

    def _learn_no_more(self, why: str) -> None:
        self._learns, self._learn_at = False, math.inf
        self._learnt.clear()  # the next server would come to the same end
        self._tell(f"{why}; modules that the workers import are not tried any more")
        self._drop()
        self._start()

    def _on_end(self, server: _Server, mask: int) -> None:
        if server is not self._server:
            return
        if server.learning:
            self._learn_no_more("importing a module has ended the fork server, as it had not done on trial")
            return
        lived = clock.now() - server.began
        self._drop()
        if not server.loaded:
            self._tell("the fork server has ended while it imported modules; workers are executed until the next round has begun")
        elif lived >= RESTART_AFTER:
            self._tell("the fork server has ended; another one is started")
            self._start()

    def _drop(self) -> None:
        """Kill the server and its forks without work."""
        server, self._server = self._server, None
        assert server is not None
        for fileobj in (server.control, server.pidfd):
            with suppress(KeyError):  # the control socket, once the report has come
                self._selector.unregister(fileobj)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)  # the server is not reaped, so the group has its number
        end = clock.now() + KILL_LIMIT
        for job in self._parked:
            _await_end(job, end)
        self._parked.clear()
        ready([server.pidfd], max(0.0, end - clock.now()))
        with suppress(ChildProcessError):
            os.waitid(linux.P_PIDFD, server.pidfd, os.WEXITED | os.WNOHANG)
        os.close(server.pidfd)
        server.control.close()
        self._tree.spare_no_longer(server.pid)

    def _give_up(self, why: str) -> None:
        self._modules, self._learns = (), False
        if self._server:
            self._drop()
        self._tell(f"{why}; workers are executed")

    def _tell(self, text: str) -> None:
        """Say it once."""
        if text not in self._said:
            self._said.add(text)
            self._say(f"--preload: {text}")

    # -- its forks --------------------------------------------------------------------------------------------------------------

    def _park(self) -> None:
        assert self._server is not None
        try:
            while len(self._parked) < self._count:
                ours, theirs = socket.socketpair()
                with theirs:
                    self._parked.append(ours)
                    socket.send_fds(self._server.control, [b"\n"], [theirs.fileno()])
        except OSError:  # it has ended, or does not read: workers are executed for want of forks
            pass

    def _serves(self, spec: WorkerSpec) -> bool:
        """Return whether a fork of the server would be as the worker that is executed."""
        server = self._server
        if server is None:
            return False
        if not server.loaded:
            self._tell("the modules are still being imported; workers are executed until they are")
            return False
        like_python = spec.argv[:2] == (sys.executable, "-u") and (spec.argv[2] == "-m" or not spec.argv[2].startswith("-"))
        if not like_python or spec.cpus is not None:
            return False
        self._env = _without_round(spec.env)
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
            work = {"argv": spec.argv, "own": own, "executed": executed, "pause": spec.pause, "tells": self._learns}
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
                self._drop()
            return None
        server.patience -= clock.now() - began
        self._asked.add(job)
        self._selector.register(job, selectors.EVENT_READ, partial(self._on_reason, job))
        return Spawned(pid, pidfd)

    def _on_reason(self, job: socket.socket, mask: int) -> None:
        """Hear why a fork has executed its script, if it has, or which modules it imports."""
        try:
            text = job.recv(1 << 16).decode(errors="replace")
        except OSError:
            text = ""
        if text.startswith("+"):
            if self._learns:
                self._hear_of(text.splitlines())
            return
        self._forget(job)
        if text:
            self._tell(f"{text}; workers are executed")

    def _hear_of(self, lines: Iterable[str]) -> None:
        """Note modules that a worker imports."""
        for line in lines:
            if (found := TOLD.fullmatch(line)) and found[1] not in self._learnt and len(self._learnt) < forkserver.MOST_NAMES:
                self._learnt[found[1]] = found[2]
                self._learn_at = clock.now() + LEARN_AFTER

    def _forget(self, job: socket.socket) -> None:
        self._asked.discard(job)
        self._selector.unregister(job)
        job.close()


def _without_round(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in forkserver.ROUND_NAMES}


def _await_end(job: socket.socket, end: float) -> None:
    """Wait until the killed fork at the other end of the socket is gone."""
    with job, suppress(OSError):
        job.settimeout(max(0.01, end - clock.now()))
        while job.recv(32):
            pass


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        linux.pidfd_send_signal(pidfd, signal.SIGKILL)
    ready([pidfd], KILL_LIMIT)
    with suppress(ChildProcessError):
        os.waitid(linux.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)
