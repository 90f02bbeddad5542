"""A fork server that stays when its job has ended, for the next command with the same interpreter, packages and environment.

    python -u forkserver.py warm FOLDER NAME READY SECONDS MODULE,... TRIED,... ROOM

See ``keep_warm.py`` for the other end, and docs/decisions/0033. ``forkserver.py`` executes this file, which like that one imports nothing
of ours. FOLDER: descriptor of the folder in which the server listens, as NAME. READY: descriptor of a stream socket, which gets a line once
the modules are imported: empty, or the reason why this server ends. SECONDS: how long it stays without a job. ROOM: room for the command
lines of forks. ``ELASTIRUN_WARM``, the first variable in its environment, is room for variables that differ between jobs.

A command connects, gets ``HELLO``, and sends one packet: SECONDS, and descriptors: of its standard streams, its working directory, and a
file with its command and environment. Below the server these processes come into being:

- the *waiter*, which sends the agent's pid to the command, and its exit status at the end;
- the *agent*, child of the waiter: it is executed with the command and the environment. When the command dies, however it does, the
  kernel kills the agent, because the connection is closed;
- the job's own fork server, child of the agent, forked before the agent is executed. It gets its environment from the agent.

The server itself never sees a job, and keeps no value of the environment: what may not differ between jobs is in the digest that is NAME.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from socket import socket
    from typing import Any

VARIABLE = "ELASTIRUN_WARM"  # tells an agent of the fork server that it has got: its control socket and its pid
LOCK_FILE = "key"
OF_JOB = frozenset(
    "ROLE_NAME TORCHELASTIC_RUN_ID TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_SIGNALS_TO_HANDLE ELASTIRUN_AGENT "
    "ELASTIRUN_DEADLINE".split()
)  # variables that are the same in all rounds of a job
OF_SHELL = frozenset(
    "_ OLDPWD PWD SHLVL COLUMNS LINES WINDOWID TERM_SESSION_ID SSH_CLIENT SSH_CONNECTION SSH_TTY XDG_SESSION_ID TMUX_PANE".split()
)  # variables that are others in the next terminal, or in another folder
PACKET_LIMIT = 4096  # bytes of a command's packet
FILE_LIMIT = 16 << 20  # bytes of a command and its environment; the kernel allows 6 MiB
STREAMS = 3
RECEIVE_LIMIT = 1.0  # seconds for a command that has connected to send its packet
REPORT_LIMIT = 5.0  # seconds for a command to take note of the exit status
BACKLOG = 64
LONGEST_POLL = 3600.0  # seconds; poll() takes at most 24 days
HELLO = b"h"  # to a command that has connected: now its packet is read
STALE = b"s"  # from a waiter to its server: a file that was imported has changed


def main(server: Any) -> Callable[[], object]:
    """Import the modules, and serve commands until none has come for long enough. Returns in each fork that got work."""
    import socket

    if os.fork():
        os._exit(0)  # the command need not wait for this process
    os.setsid()
    folder, name, fd, seconds = int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    modules, tried = (list(filter(None, text.split(","))) for text in sys.argv[6:8])
    sys.argv[:] = [""]  # modules must not see those of one job
    server.set_title(["elastirun-warm", *modules])
    os.environ.pop(VARIABLE, None)
    environment = Environment(server._ENVIRON)
    server.watched_names |= OF_JOB | OF_SHELL
    with socket.socket(fileno=fd) as ready:
        before, why = load(server, modules, tried, environment)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not why:
            listener.bind(f"/proc/self/fd/{folder}/{name}")
            listener.listen(BACKLOG)
        try:
            ready.sendall(why.encode(errors="replace") + b"\n")
        except OSError:  # the command has been ended: this server is for the next one
            pass
    if why:
        os._exit(0)
    environment.wipe()
    files = imported_files()
    connection, fds, alive = next_command(listener, folder, name, seconds)
    server.ignore_signals({})
    if any(stamp(path) != found for path, found in files.items()):
        connection.sendall(b'{"stale": true}')
        os.write(alive, STALE)
        os._exit(0)
    return begin_job(server, connection, fds, alive, environment, before)


def load(server: Any, modules: list[str], tried: list[str], environment: Environment) -> tuple[dict[Any, Any], str]:
    """Import the modules. Return the handlers of signals for the forks, and why no job could use them; empty: each could."""
    before = server.ignore_signals({})
    muted = server.mute()
    trouble = server.load([each for name in modules for each in (name, *server.ALSO.get(name, ()))])
    if not any(trouble.values()):
        server.try_out(tried, environment.wipe)
    wrote = server.unmute(muted)
    why = [f"{name} cannot be imported" for name in trouble["failed"]]
    why += [f"importing {name} reads {', '.join(names)}" for name, names in trouble["reads"].items()]
    why += [trouble["obstacle"]] if trouble["obstacle"] else ["importing the modules writes text"] if wrote else []
    return server.ignore_signals(before), "; ".join(why)


def imported_files() -> dict[str, tuple[int, ...]]:
    """Return the files of all that was imported, libraries included, each with its ``stamp``."""
    paths = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths |= {fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    return {path: found for path in paths if path.startswith("/") and (found := stamp(path))}


def stamp(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; empty: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


class Environment:
    """The environment in which the modules were imported: where each variable stood for ps and the guard, and what modules have set.

    ``first``: a dict for the variables as Python finds them, empty so far.
    """

    def __init__(self, first: dict[str, str]) -> None:
        self._first = first
        self._path = os.environ.get("PYTHONPATH")  # without the folder of our sitecustomize, which has taken that out again
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self._start, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc(5)
        self._size = end - self._start
        self._changed: dict[str, str | None] = {}  # what modules have set at their import; None: removed
        self._places = json.loads(in_other_process(self._find_places))

    def _find_places(self) -> bytes:
        """Return the offset and the length of each variable by its name. This leaves values in the memory."""
        from ctypes import string_at

        places, offset = dict[str, tuple[int, int]](), 0
        for entry in string_at(self._start, self._size).split(b"\0"):
            name = os.fsdecode(entry.partition(b"=")[0])
            if name:
                places.setdefault(name, (offset, len(entry)))
            offset += len(entry) + 1
        return json.dumps(places).encode()

    def _differences(self) -> bytes:
        """Return the names of the variables that are not as they were when this process was executed."""
        from ctypes import string_at

        now, first = os.environ._data, dict[bytes, bytes]()  # type: ignore[attr-defined]
        for entry in string_at(self._start, self._size).split(b"\0"):
            name, _, value = entry.partition(b"=")
            first.setdefault(name, value)
        names = [os.fsdecode(name) for name in now.keys() | first.keys() if name and now.get(name) != first.get(name)]
        return json.dumps(names).encode()

    def wipe(self) -> None:
        """Forget the values, but for those that the modules have set, and the working directory."""
        from ctypes import memset

        self._changed = {name: os.environ.get(name) for name in json.loads(in_other_process(self._differences))}
        for name, value in list(os.environ._data.items()):  # type: ignore[attr-defined]
            if len(value) > 1:  # a shorter one is shared by all of Python
                memset(id(value) + bytes.__basicsize__ - 1, 0, len(value))
            del os.environ[os.fsdecode(name)]  # which does not decode the value, as clear() would
        memset(self._start, 0, self._size)
        os.chdir("/")

    def set(self, variables: Mapping[str, str]) -> None:
        """Set the variables of a job, also where other processes see them. Those that differ between jobs get the room of ``VARIABLE``."""
        from ctypes import memmove

        os.environ.update(variables)
        os.environ.pop("PYTHONPATH", None)
        if self._path is not None:
            os.environ["PYTHONPATH"] = self._path
        self._first.update(os.environ)
        for name, value in self._changed.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        offset, room = self._places[VARIABLE]
        for name, value in variables.items():
            entry = os.fsencode(f"{name}={value}")
            place, length = self._places.get(name, (0, -1))
            if length == len(entry):
                memmove(self._start + place, entry, length)
            elif len(entry) < room:
                memmove(self._start + offset, entry + b"\0", len(entry) + 1)
                offset, room = offset + len(entry) + 1, room - len(entry) - 1


def in_other_process(function: Callable[[], bytes]) -> bytes:
    """Call the function in a child, so that nothing of what it does stays in the memory of this process. Return its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(write, "wb") as file:
            file.write(function())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        result = file.read()
    os.waitpid(child, 0)
    return result


# -- commands


def next_command(listener: socket, folder: int, name: str, seconds: float) -> tuple[socket, list[int], int]:
    """Return in a new process for each command: its connection, its descriptors, and a pipe that tells the server of the job's end.

    Ends the server ``seconds`` after its last job.
    """
    from select import POLLIN, poll
    from signal import SIG_IGN, SIGCHLD, SIGTERM, signal
    from time import monotonic

    signal(SIGTERM, lambda *_: end_server(folder, name))
    handler = signal(SIGCHLD, SIG_IGN)  # the kernel reaps the waiters
    poller, jobs, end = poll(), set[int](), monotonic() + seconds
    poller.register(listener, POLLIN)
    while True:
        for fd, _ in poller.poll(None if jobs else min(LONGEST_POLL, max(0.0, end - monotonic())) * 1000):
            if fd in jobs:
                jobs.remove(fd)
                poller.unregister(fd)
                take_notice_of_end(fd)
                end = monotonic() + seconds
            elif command := receive(listener):
                connection, fds, seconds = command
                os.utime(name, dir_fd=folder)  # shows when it was used
                read, alive = os.pipe()
                if fork() == 0:
                    signal(SIGCHLD, handler)
                    listener.close()
                    for each in (folder, read, *jobs):
                        os.close(each)
                    return connection, fds, alive
                connection.close()
                for each in (alive, *fds):
                    os.close(each)
                jobs.add(read)
                poller.register(read, POLLIN)
        if not jobs and monotonic() >= end:
            if nobody_comes(folder, name):
                end_server(folder, name)
            end = monotonic() + 1.0


def end_server(folder: int, name: str) -> None:
    """End this process, so that no command finds it."""
    try:
        os.unlink(name, dir_fd=folder)
    finally:
        os._exit(0)


def take_notice_of_end(job: int) -> None:
    """Take notice of the end of a job, of which ``job`` is the pipe. Ends the server if what it has imported has changed."""
    stale = os.read(job, 1) == STALE
    os.close(job)
    if stale:
        os._exit(0)


def fork() -> int:
    """Fork. Return -1 where no process can be made: the command sees the end of the connection, and does without this server."""
    try:
        return os.fork()
    except OSError:
        return -1


def receive(listener: socket) -> tuple[socket, list[int], float] | None:
    """Return the connection of a command, its descriptors, and for how long to stay after its job; None if it sends something else."""
    import socket

    connection, _ = listener.accept()
    fds: list[int] = []
    try:
        connection.settimeout(RECEIVE_LIMIT)
        if not peer_is_ours(connection):
            raise PermissionError
        connection.sendall(HELLO)
        data, fds, _, _ = socket.recv_fds(connection, PACKET_LIMIT, STREAMS + 2)
        connection.settimeout(None)
        if len(fds) == STREAMS + 2 and (seconds := float(json.loads(data)["seconds"])) >= 0:
            return connection, fds, seconds
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    for fd in fds:
        os.close(fd)
    connection.close()
    return None


def peer_is_ours(connection: socket) -> bool:
    """Return whether a process of this user is at the other end. The folder lets nobody else in; this does not rely on it."""
    import struct
    from socket import SO_PEERCRED, SOL_SOCKET

    uid: int = struct.unpack("3i", connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12))[1]
    return uid == os.geteuid()


def nobody_comes(folder: int, name: str) -> bool:
    """Return whether no command is about to connect. Then none is until this process ends."""
    import fcntl

    lock = os.open(LOCK_FILE, os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place_of_lock(name))
    except OSError:
        os.close(lock)
        return False
    return True


def place_of_lock(name: str) -> int:
    """Return which byte of the file is locked while a command connects to the server of this name, or starts it."""
    return int(name[:8], 16)


# -- a job


def begin_job(
    server: Any, connection: socket, fds: list[int], alive: int, environment: Environment, before: dict[Any, Any]
) -> Callable[[], object]:
    """Start the agent, and tell the command of its end. Returns in each fork that got work."""
    import socket

    os.setsid()
    *places, file = fds
    command = json.loads(read(file))
    ours, theirs = socket.socketpair()
    waiter, agent = os.getpid(), os.fork()
    if agent == 0:
        server.die_with_parent()  # the command, which hears of its end from the waiter, would end without it
        if os.getppid() != waiter:
            os._exit(1)
        os.close(alive)
        return be_agent(server, command, places, connection, ours, theirs, environment, before)
    for each in (ours, theirs):
        each.close()
    for fd in places:
        os.close(fd)
    connection.sendall(json.dumps({"agent": agent}).encode())
    _, status = os.waitpid(agent, 0)
    os.close(alive)
    try:
        connection.sendall(json.dumps({"status": status}).encode())
        connection.settimeout(REPORT_LIMIT)
        connection.recv(1)
    except OSError:  # the command has died
        pass
    os._exit(0)


def read(fd: int) -> bytes:
    """Return the content of a file."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read(FILE_LIMIT)


def be_agent(
    server: Any,
    command: dict[str, Any],
    places: list[int],
    connection: socket,
    ours: socket,
    theirs: socket,
    environment: Environment,
    before: dict[Any, Any],
) -> Callable[[], object]:
    """Fork the fork server of this job, then execute the agent. Returns in each fork that got work."""
    from signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal

    *streams, folder = places
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    os.fchdir(folder)
    os.close(folder)
    agent = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        ours.close()
        return be_fork_server(server, agent, theirs, environment, before)
    die_with(connection)
    for signum, handler in {**before, SIGPIPE: SIG_DFL, SIGXFSZ: SIG_DFL}.items():
        signal(signum, handler)
    for each in (ours, connection):
        each.set_inheritable(True)
    variables = {**command["environment"], VARIABLE: f"{ours.fileno()},{child}"}
    os.execve(command["argv"][0], command["argv"], variables)


def die_with(connection: socket) -> None:
    """Let the kernel kill this process when the other end of the connection is closed, also after ``execve``."""
    import fcntl
    from select import POLLHUP, poll
    from signal import SIGKILL

    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    poller = poll()
    poller.register(connection, POLLHUP)
    if poller.poll(0):  # it was closed before
        os._exit(1)


def be_fork_server(server: Any, agent: int, control: socket, environment: Environment, before: dict[Any, Any]) -> Callable[[], object]:
    """Serve the agent, once it has said for which environment. Returns in each fork that got work."""
    import importlib

    server.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    os.dup2(2, 1)
    control.set_inheritable(False)
    with control.makefile("rb") as lines:
        message = json.loads(lines.readline(server.LINE_LIMIT) or b"null")
    if message is None:  # the agent has ended, or does without
        os._exit(0)
    server.set_title([sys.executable, "-u", server.__file__, "warm", *message["argv"]])
    environment.set(message["environment"])
    importlib.invalidate_caches()
    server.report(control, {"failed": {}, "reads": {}, "obstacle": ""})
    run: Callable[[], object] = server.make_forks(agent, control, before)
    return run
