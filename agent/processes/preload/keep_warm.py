"""Runs a command with a fork server that an earlier command has left (``--keep-warm``). See ``warm_server.py`` and docs/decisions/0033.

A server serves the commands that are as the one that started it: user, interpreter, packages, environment, limits, control group,
namespaces and more (``conditions``). Its name is a digest of all that, with a key of the user's own, so a command finds the right server,
or none, by the name.

The command starts the agent through that server, below it, and stays only to pass signals on and to end as the agent does.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from elastirun import clock, linux
from elastirun.agent.processes import marks, proc
from elastirun.agent.processes.preload import forkserver, warm_server
from elastirun.config import Preload

FOLDER = "elastirun-warm"
MOST_SERVERS = 4  # of one user; a new one takes the place of that which was used longest ago, as each takes 0.2 GB
START_LIMIT = 60.0  # seconds for a new server to import what is asked for
ANSWER_LIMIT = 5.0  # seconds for a server to start an agent
LOCK_POLL = 0.02  # seconds
ROOM = 4096  # bytes for a fork's command line, and for the variables of a job
KEY_SIZE = 32  # bytes
EVERY_USER = ["0", "0", "4294967295"]  # in uid_map of a namespace that maps all users, see user_namespaces(7)
STATUS = "Uid Gid Groups SigBlk CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Cpus_allowed Mems_allowed Umask THP_enabled".split()
FILES = "cgroup personality oom_score_adj coredump_filter loginuid sessionid attr/current"  # in /proc/self, see proc(5)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class NotWarm(Exception):
    """This command has to do without such a server. The message says why."""


@dataclass(frozen=True)
class WarmServer:
    """A server that waits for commands. ``used``: when the last one came, in seconds since 1970."""

    pid: int
    used: float

    @property
    def modules(self) -> str:
        return ", ".join(proc.content(f"/proc/{self.pid}/cmdline").strip("\0").split("\0")[1:])

    @property
    def memory(self) -> int | None:
        """Return the bytes that it takes, its share of what several processes have (PSS); None: unknown."""
        lines = proc.content(f"/proc/{self.pid}/smaps_rollup").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), None)

    def stop(self) -> None:
        """End it. Its jobs go on."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # one that was stopped ends only then


def run(preload: Preload, environment: Mapping[str, str], signals: Collection[str]) -> int:
    """Run this command through a server with ``preload``. Return its exit status. ``environment``: of its workers.

    ``signals``: names of signals to pass on, besides the usual ones. Raises NotWarm.
    """
    if os.environ.get(marks.VARIABLE):
        raise NotWarm("this is a worker of another elastirun, whose agent would wait for the end of the server")
    if any(word.startswith("/dev/fd/") for part in sys.argv for word in part.split("=")):
        raise NotWarm("a descriptor that only this process has is named as a file")
    command = {"argv": [sys.executable, *sys.orig_argv[1:]], "environment": dict(os.environ)}
    agent = StartedAgent({*PASSED_ON, *(signal.Signals[name] for name in signals)})
    try:
        with open_folder(make=True) as folder:
            connection = _start_agent(agent, folder, preload, environment, command)
    except TimeoutError:
        raise NotWarm("the server does not answer; elastirun warm stop ends it") from None
    except OSError as error:
        raise NotWarm(error.strerror or type(error).__name__) from None
    with connection:
        return agent.wait(connection)


# -- the folder


def open_folder(make: bool = False) -> linux.Descriptor:
    """Return a descriptor of the folder of this user's servers; with ``make`` it is made if there is none. Raises NotWarm and OSError."""
    run_time = os.environ.get("XDG_RUNTIME_DIR")
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        raise NotWarm("this process runs as another user than the one who started it")
    if _user_is_unmapped():
        raise NotWarm("the user namespace shows other users as this one")
    if run_time and os.stat(run_time).st_uid != os.geteuid():
        raise NotWarm(f"XDG_RUNTIME_DIR={run_time} belongs to another user; unset it")
    path = f"{run_time}/{FOLDER}" if run_time else f"/tmp/{FOLDER}-{os.geteuid()}"
    if make:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    folder = linux.Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(folder)
        raise NotWarm(f"others may use {path}; remove it")
    return folder


def _user_is_unmapped() -> bool:
    """Return whether the kernel may show files and processes of other users as this user's: those that a user namespace does not map."""
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    return os.geteuid() == overflow and Path("/proc/self/uid_map").read_text().split() != EVERY_USER


def _open_key(folder: int) -> linux.Descriptor:
    """Return a descriptor of the file with the key, which is made if there is none."""
    new = f"{warm_server.LOCK_FILE}.{os.urandom(8).hex()}"
    with suppress(FileNotFoundError):
        return linux.Descriptor(os.open(warm_server.LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
    with linux.Descriptor(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)) as made:
        try:
            os.write(made, os.urandom(KEY_SIZE))
            with suppress(FileExistsError):
                os.link(new, warm_server.LOCK_FILE, src_dir_fd=folder, dst_dir_fd=folder)  # whole, or not at all
        finally:
            os.unlink(new, dir_fd=folder)
    return linux.Descriptor(os.open(warm_server.LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))


# -- the conditions


def conditions(preload: Preload, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return all that a process gets from the one that starts it, and that a worker may notice."""
    ignored = forkserver.ROUND_NAMES | warm_server.OF_JOB | warm_server.OF_SHELL
    python_path = environment.get("PYTHONPATH")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "preload": [preload.modules, preload.tried],
        "programs": [warm_server.stamp(path) for path in (sys.executable, forkserver.__file__, warm_server.__file__)],
        "version": [sys.version, sys.executable, sys.prefix],
        "packages": sorted(_packages()),
        "environment": sorted(item for item in environment.items() if item[0] not in ignored),
        "folder": os.getcwd() if python_path and not all(map(os.path.isabs, python_path.split(os.pathsep))) else "",
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "status": [status.get(name) for name in STATUS],
        "ignored signals": sorted(_ignored_signals()),
        "files": [proc.content(f"/proc/self/{name}") for name in FILES.split()],
        "memory policy": proc.content("/proc/self/numa_maps").partition("\n")[0].split(" ")[1:2],
        "namespaces": sorted(os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")),
        "root": [os.stat("/").st_dev, os.stat("/").st_ino],
        "scheduling": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, os.getpriority(os.PRIO_PROCESS, 0)],
    }


def _packages() -> Iterator[tuple[str, str, int]]:
    """Return what says which packages are installed: folders that describe one, and files that Python reads at its start."""
    own = 0 if getattr(sys.flags, "safe_path", False) else 1  # the first folder is that of this program, or the working directory
    for folder in sys.path[own:]:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            yield from (
                (folder, entry.name, entry.stat().st_mtime_ns)
                for entry in entries
                if entry.name.endswith((".dist-info", ".egg-info", ".pth"))
            )


def _ignored_signals() -> Iterator[int]:
    """Return the signals that were ignored when this process was started. Python itself ignores two."""
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    return (int(one) for one in signal.valid_signals() - pythons if signal.getsignal(one) is signal.SIG_IGN)


def name_of(found: dict[str, Any], key: bytes) -> str:
    """Return the name of the server for these conditions."""
    return blake2b(json.dumps(found).encode(), key=key, digest_size=16).hexdigest()


# -- the command


def _start_agent(
    agent: StartedAgent, folder: int, preload: Preload, environment: Mapping[str, str], command: dict[str, Any]
) -> socket.socket:
    """Let the server start the agent; the server is started if there is none. Return the connection. Raises NotWarm and OSError."""
    with _open_key(folder) as key:
        name = name_of(conditions(preload, environment), os.pread(key, KEY_SIZE, 0))
        _lock(key, name)
        for _ in range(2):  # the first may have imported files that have changed since
            connection = _connect(folder, name)
            if connection is None:
                _make_place(folder)
                _start_server(folder, name, preload, environment)
                connection = _connect(folder, name)
            if connection is not None and agent.begin(_ask(connection, preload.keep_warm, command)):
                return connection
            os.unlink(name, dir_fd=folder)
        raise NotWarm("files of the packages are being changed")


def _lock(key: int, name: str) -> None:
    """Wait until no other command starts this server, and keep it from ending. Raises NotWarm: the other command may be stopped."""
    end = clock.now() + START_LIMIT
    while clock.now() < end:
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(key, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, warm_server.place_of_lock(name))
            return
        time.sleep(LOCK_POLL)
    raise NotWarm("another command is starting the server, and has not come to an end")


def _connect(folder: int, name: str) -> socket.socket | None:
    """Return a connection to the server; None if there is none. What a dead one has left is removed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_LIMIT)
    try:
        with suppress(FileNotFoundError):
            connection.connect(f"/proc/self/fd/{folder}/{name}")
            if linux.peer_of(connection)[1] == os.geteuid():
                return connection
            raise NotWarm("the server there belongs to another user")
    except ConnectionRefusedError:
        os.unlink(name, dir_fd=folder)
    connection.close()
    return None


def _make_place(folder: int) -> None:
    """End the servers that were used longest ago, so that there are not too many with a new one."""
    found = sorted(_servers(folder), key=lambda server: server.used)
    for server in found[: max(0, len(found) - MOST_SERVERS + 1)]:
        server.stop()


def _start_server(folder: int, name: str, preload: Preload, environment: Mapping[str, str]) -> None:
    """Start the server and wait until it has imported everything. Raises NotWarm where no job could use it."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-u", forkserver.__file__, "warm", str(folder), name, str(theirs.fileno()), f"{preload.keep_warm:g}"]
    argv += [",".join(preload.modules), ",".join(preload.tried), "-" * ROOM]
    given = {name: value for name, value in environment.items() if name not in forkserver.ROUND_NAMES | warm_server.OF_JOB}
    with ours:
        with theirs:
            env, quiet = {warm_server.VARIABLE: "-" * ROOM, **given}, subprocess.DEVNULL
            process = subprocess.Popen(argv, env=env, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(folder, theirs.fileno()))
        why, end = b"", clock.now() + START_LIMIT
        try:
            while not why.endswith(b"\n"):
                ours.settimeout(max(0.01, end - clock.now()))
                if not (data := ours.recv(4096)):
                    raise NotWarm("the fork server has ended while it imported modules")
                why += data
        finally:
            process.kill()  # it has made the server and ended, unless something stops it
            process.wait()
    if why.strip():
        raise NotWarm(os.fsdecode(why.strip()))


def _ask(connection: socket.socket, seconds: float, command: dict[str, Any]) -> dict[str, Any]:
    """Ask for an agent. Return the answer.

    A server that does not run gets no streams: whoever reads them would wait for it.
    """
    if not connection.recv(1):
        raise NotWarm("the server has ended")
    here = linux.Descriptor(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    with here, open(linux.memfd_create("elastirun-command"), "wb") as file:
        file.write(json.dumps(command).encode())
        file.flush()
        socket.send_fds(connection, [json.dumps({"seconds": seconds}).encode()], [0, 1, 2, here, file.fileno()])
        return _receive(connection)


def _receive(connection: socket.socket) -> dict[str, Any]:
    data = connection.recv(warm_server.PACKET_LIMIT)
    if not data:
        raise NotWarm("the server has ended")
    found: dict[str, Any] = json.loads(data)
    return found


class StartedAgent:
    """The agent that a server has started for this command. From now on ``signals`` are for it."""

    def __init__(self, signals: Collection[int]) -> None:
        self._pidfd: int | None = None
        self._signals = signals

    def begin(self, answer: dict[str, Any]) -> bool:
        """Take in the first answer of the server. Return whether it has started an agent."""
        if "agent" not in answer:
            return False
        with suppress(ProcessLookupError):  # it has ended already
            self._pidfd = linux.pidfd_open(int(answer["agent"]))
        for one in self._signals:
            if signal.getsignal(one) is not signal.SIG_IGN:
                signal.signal(one, self._pass_on)
        return True

    def wait(self, connection: socket.socket) -> int:
        """Wait for the agent's end. Return its exit status, or end by the signal that ended it."""
        connection.settimeout(None)
        try:
            status = int(_receive(connection)["status"])
        except (NotWarm, OSError):  # the process that would tell it was killed
            self._pass_on(status := signal.SIGKILL)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that of the agent is enough
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return 128 + number  # the first process of a container
        return os.waitstatus_to_exitcode(status)

    def _pass_on(self, signum: int, frame: object = None) -> None:
        with suppress(ProcessLookupError):
            if self._pidfd is not None:
                linux.pidfd_send_signal(self._pidfd, signum)


# -- all servers


def servers() -> list[WarmServer]:
    """Return the servers of this user. Makes no folder. Raises NotWarm and OSError."""
    try:
        folder = open_folder()
    except FileNotFoundError:
        return []
    with folder:
        return list(_servers(folder))


def _servers(folder: int) -> Iterator[WarmServer]:
    for name in sorted(os.listdir(folder)):
        with suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISSOCK(found.st_mode) or (connection := _connect(folder, name)) is None:
                continue
            with connection:
                pid = linux.peer_of(connection)[0]
            if pid > 0:  # else it is in another pid namespace
                yield WarmServer(pid, found.st_mtime)
