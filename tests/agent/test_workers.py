"""The workers: real processes, watched by a real selector; the clock is made up wherever a deadline is tried."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastirun import linux
from elastirun.agent.host import net
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import WorkerExit
from elastirun.agent.processes import process, spawn
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.store.worker_store import WorkerStore
from elastirun.agent.workers.workers import GIVE_UP, Workers
from elastirun.config import LogPolicy
from elastirun.errors import StartError
from tests.support.cluster import PATIENCE
from tests.support.descriptors import descriptors

ROOT = Path(__file__).resolve().parents[2]
FOREVER = "import signal\nwhile True: signal.pause()"
# A handler and pause() would race: a signal just before pause() is not seen. A blocked signal waits for sigwait.
BLOCKS_TERM = "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nfd = os.open(FIFO, os.O_WRONLY)\nos.write(fd, b'.')\n"


def spec(code: str, local_rank: int = 0, **env: str) -> WorkerSpec:
    """A worker that runs ``code`` in an interpreter that starts fast."""
    return WorkerSpec(local_rank, local_rank, (sys.executable, "-I", "-S", "-c", code), {**os.environ, **env})


class Loop:
    """What the agent's loop does with the selector, and the agent's side of a set of workers."""

    def __init__(self, policy: LogPolicy | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.selector = selectors.PollSelector()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self._fds = [self.out, out, self.err, err]
        self.console = Console(self.selector, out, err)
        self.logs = RunLogs(policy or LogPolicy(), "job", "host", self.console, self.selector)
        self.exits: list[WorkerExit] = []
        self.idle = 0
        self.stuck: list[str] = []
        self.then: Callable[[], None] = lambda: None  # called at each exit
        self.attempt = 0
        self.workers = Workers(self.selector, on_exit=self.on_exit, on_idle=self.on_idle, on_stuck=self.stuck.append, clock=clock)
        self.clock = clock

    def on_exit(self, end: WorkerExit) -> None:
        self.exits.append(end)
        self.then()

    def on_idle(self) -> None:
        self.idle += 1

    def start(self, *specs: WorkerSpec) -> None:
        self.workers.start(specs, self.logs.open_round(self.attempt, specs))
        self.attempt += 1

    @property
    def watched(self) -> int:
        """Descriptors that the selector watches, but for the one by which the disk's thread wakes the loop."""
        return len(self.selector.get_map()) - 1

    def once(self, timeout: float) -> int:
        """One turn of the loop; the number of events."""
        events = self.selector.select(timeout)
        for key, mask in events:
            key.data(mask)
        return len(events)

    def run(self, until: Callable[[], Any], timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < end, "it did not come"
            deadline = self.workers.deadline
            self.once(0.05 if deadline is None else min(0.05, max(0.0, deadline - self.clock())))
            if deadline is not None and self.clock() >= deadline:
                self.workers.tick(self.clock())
            self.logs.disk.tick()

    def run_all(self, *specs: WorkerSpec) -> list[WorkerExit]:
        """Start these, wait for all; their exits by local rank."""
        self.exits.clear()
        self.start(*specs)
        self.run(lambda: not self.workers.running)
        self.logs.disk.drain(60)  # the files are complete
        return sorted(self.exits, key=lambda end: end.local_rank)

    def close(self) -> None:
        try:
            self.workers.stop(0)
            self.run(lambda: not self.workers.running)
        finally:
            self.logs.close()
        self.console.close()
        for fd in self._fds:
            os.close(fd)
        assert not self.selector.get_map()
        self.selector.close()


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def slow(clock: FakeClock) -> Iterator[Loop]:
    """A loop whose time stands still."""
    made = Loop(clock=clock)
    yield made
    made.close()


class Fifo:
    """A named pipe that tests read and workers open by path: says what they wrote, and when the last of them is gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, count: int) -> str:
        got = b""
        while len(got) < count:
            data = self._wait()
            assert data, f"the writers ended after {got!r}"
            got += data
        return got.decode()

    def wait_end(self) -> str:
        """Wait until no process has it open any more; what was still in it."""
        return "".join(data.decode() for data in iter(self._wait, b""))

    def _wait(self) -> bytes:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        assert poller.poll(60_000), "nothing came"
        return os.read(self._fd, 4096)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    made = Fifo(tmp_path / "fifo")
    yield made
    made.close()


def with_fifo(code: str, fifo: Fifo) -> str:
    return f"FIFO = {fifo.path!r}\n{code}"


def wait_ended(pid: int) -> None:
    """Wait until the process, a child of ours or not, has ended; it is not reaped."""
    try:
        fd = linux.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(60_000), f"{pid} did not end"
    os.close(fd)


def pids(loop: Loop) -> list[int]:
    return [worker.pid for worker in loop.workers._alive.values()]


def test_a_worker_that_has_to_wait_first_fails_as_soon_after_its_start_as_without(slow: Loop, clock: FakeClock) -> None:
    slow.start(replace(spec("raise SystemExit(3)"), pause=0.05), spec("raise SystemExit(3)", 1))
    clock.now += 7.0
    slow.run(lambda: len(slow.exits) == 2)
    assert {end.local_rank: round(end.after, 2) for end in slow.exits} == {0: 6.95, 1: 7.0}


def test_an_exit_arrives_as_an_event_and_nothing_wakes_the_loop_before(loop: Loop, fifo: Fifo) -> None:
    os.mkfifo(fifo.path + "2")
    loop.start(spec(with_fifo("import sys\nopen(FIFO, 'w').write('.')\nopen(FIFO + '2').read()\nsys.exit(3)", fifo)))
    fifo.read(1)
    assert loop.workers.alive == (0,) and loop.workers.running and loop.workers.deadline is None
    assert loop.once(0.3) == 0
    open(fifo.path + "2", "w").close()
    turns = 0
    while not loop.exits:
        turns += loop.once(60)
    (end,) = loop.exits
    assert turns <= 3  # the pidfd, and the ends of its pipes
    assert (end.code, end.rank, end.killed_by_us) == (3, 0, False) and end.after >= 0.3
    assert loop.workers.alive == ()
    loop.run(lambda: loop.idle)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(200)", 200),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_codes(loop: Loop, code: str, expected: int) -> None:
    loop.start(spec(f"import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{code}"))
    loop.run(lambda: loop.idle)
    assert [(end.code, end.killed_by_us) for end in loop.exits] == [(expected, False)]


def test_a_command_that_cannot_be_run(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    commands = [("no-such-command", "x"), (str(tmp_path / "plain"),)]
    ends = loop.run_all(*(WorkerSpec(i, i, command, os.environ) for i, command in enumerate(commands)))
    assert [end.code for end in ends] == [127, 126]
    assert loop.logs.last_lines(0) == ("elastirun: cannot run no-such-command: No such file or directory",)
    assert loop.logs.last_lines(1) == (f"elastirun: cannot run {tmp_path}/plain: Permission denied",)


def test_the_environment_is_exactly_the_one_given_and_the_command_is_found_in_its_path(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "show").write_text("#!/bin/sh\nexec /usr/bin/env >&2\n")
    (tmp_path / "show").chmod(0o755)
    env = {"PATH": str(tmp_path), "LC_ALL": "C.UTF-8", "BYTES": os.fsdecode(b"\xff=1"), "RANK": "7"}
    assert loop.run_all(WorkerSpec(0, 7, ("show",), env))[0].code == 0
    lines = {line for line in loop.logs.last_lines(0) if not line.startswith(("PWD=", "SHLVL=", "_=", "OLDPWD="))}
    assert lines == {f"PATH={tmp_path}", "LC_ALL=C.UTF-8", "BYTES=\\xff=1", "RANK=7"}


def test_signal_dispositions_are_those_of_a_fresh_process_and_nohup_stays(loop: Loop) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        loop.run_all(WorkerSpec(0, 0, ("sh", "-c", "exec grep Sig /proc/self/status >&2"), {"PATH": os.environ["PATH"]}))
    finally:
        signal.signal(signal.SIGHUP, before)
    masks = {name: int(value, 16) for name, value in (line.split(":") for line in loop.logs.last_lines(0)) if name != "SigQ"}
    assert masks["SigIgn"] & ((1 << 31) - 1) == 1 << (signal.SIGHUP - 1)
    assert masks["SigBlk"] == 0


def test_what_is_left_of_its_group_dies_with_a_worker_that_ends_by_itself(loop: Loop, fifo: Fifo) -> None:
    code = """
import os, signal
fd = os.open(FIFO, os.O_WRONLY)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fd, b'child')
    signal.pause()
os.waitid(os.P_ALL, 0, os.WEXITED) if os.fork() else os.write(fd, b'.')
"""
    loop.start(spec(with_fifo(code, fifo)), spec(FOREVER, 1))
    fifo.read(6)
    loop.run(lambda: loop.exits)
    assert fifo.wait_end() == ""
    assert loop.workers.alive == (1,) and loop.exits[0].code == 0


def test_sigterm_reaches_the_leader_alone_and_the_group_dies_at_the_deadline(slow: Loop, clock: FakeClock, fifo: Fifo) -> None:
    code = """
import os, signal, socket
ours, theirs = socket.socketpair()
fd = os.open(FIFO, os.O_WRONLY)
if os.fork() == 0:
    ours.close()
    theirs.send(b'r')
    theirs.send(theirs.recv(1))
    while True: signal.pause()
theirs.close()
ours.recv(1)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.write(fd, b'ready')
signal.sigwait({signal.SIGTERM})
ours.send(b'?')
os.write(fd, b'alive' if ours.recv(1) == b'?' else b'gone!')
while True: signal.pause()
"""
    slow.start(spec(with_fifo(code, fifo)))
    assert fifo.read(5) == "ready"
    slow.workers.stop(grace=30)
    assert fifo.read(5) == "alive"
    clock.now += 29.9
    slow.workers.tick(clock.now)
    assert slow.once(0) == 0 and slow.workers.alive == (0,)
    clock.now += 0.1
    slow.workers.tick(clock.now)
    assert fifo.wait_end() == ""
    slow.run(lambda: slow.idle)
    assert [(end.code, end.killed_by_us, end.after) for end in slow.exits] == [(-9, True, 30.0)]


def test_one_deadline_for_the_set_that_only_comes_nearer_and_one_signal(slow: Loop, clock: FakeClock, fifo: Fifo) -> None:
    code = BLOCKS_TERM + "while True:\n    signal.sigwait({15})\n    os.write(fd, b'T')"
    slow.start(*(spec(with_fifo(code, fifo), i) for i in range(2)))
    assert fifo.read(2) == ".."
    slow.workers.stop(grace=30)
    assert slow.workers.deadline == 130 and fifo.read(2) == "TT"
    clock.now = 105
    slow.workers.stop(grace=10)
    assert slow.workers.deadline == 115
    clock.now = 106
    slow.workers.stop(grace=60)
    assert slow.workers.deadline == 115 and slow.workers.alive == (0, 1)
    slow.workers.stop(grace=0)
    slow.run(lambda: slow.idle)
    assert fifo.wait_end() == ""  # no second SIGTERM
    assert [end.code for end in slow.exits] == [-9, -9]


def test_a_stopped_set_reports_codes_of_its_own_and_a_new_one_can_start(loop: Loop, fifo: Fifo) -> None:
    loop.start(spec(with_fifo(BLOCKS_TERM + "signal.sigwait({15})\nraise SystemExit(7)", fifo)), spec(FOREVER, 1))
    fifo.read(1)
    loop.workers.stop(grace=60)
    loop.run(lambda: loop.idle)
    assert sorted((end.local_rank, end.code, end.killed_by_us) for end in loop.exits) == [(0, 7, True), (1, -15, True)]
    assert loop.workers.deadline is None
    assert [end.code for end in loop.run_all(spec("pass"))] == [0]
    assert loop.idle == 2


def test_all_that_a_worker_wrote_is_known_when_its_exit_is_reported(loop: Loop) -> None:
    seen: list[tuple[str, ...]] = []
    loop.then = lambda: seen.append(loop.logs.last_lines(0))
    loop.start(spec("import os; os.write(2, b'last\\nwords'); raise SystemExit(1)"))
    (worker,) = loop.workers._alive.values()
    wait_ended(worker.pid)
    worker._ready()  # its pidfd is served before its pipe
    assert seen == [("last", "words")]
    loop.run(lambda: loop.idle)


def test_a_worker_that_had_died_before_we_signalled_is_not_ours(loop: Loop) -> None:
    loop.then = lambda: loop.workers.stop(60)
    loop.start(spec("raise SystemExit(1)"), spec("raise SystemExit(2)", 1), spec(FOREVER, 2))
    for pid in pids(loop)[:2]:
        wait_ended(pid)
    loop.run(lambda: loop.idle)
    assert sorted((end.code, end.killed_by_us) for end in loop.exits) == [(-15, True), (1, False), (2, False)]


def test_a_worker_dies_with_its_agent(tmp_path: Path) -> None:
    agent = """
import selectors, signal, sys
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import WorkerSpec
code = "import os, signal; os.write(1, b'%d ' % os.getpid()); signal.pause()"
Process(WorkerSpec(0, 0, (sys.executable, "-c", code), {}), selectors.PollSelector(), print)
signal.pause()
"""
    subreaper(True)  # so that we can reap the orphan
    parent = subprocess.Popen([sys.executable, "-c", agent], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        worker = int(os.read(parent.stdout.fileno(), 100))
        fd = linux.pidfd_open(worker)
        parent.kill()
        parent.wait()
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(10_000), "it lives on"
        assert os.waitid(linux.P_PIDFD, fd, os.WEXITED).si_status == signal.SIGKILL  # type: ignore[union-attr]
        os.close(fd)
        parent.stdout.close()
    finally:
        subreaper(False)


def subreaper(on: bool) -> None:
    PR_SET_CHILD_SUBREAPER = 36
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0


def test_a_worker_whose_agent_died_before_it_was_armed_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", spawn._EXEC_WORKER, str(os.getppid()), "-", "-", "-", "0", "echo", "started"]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def children() -> list[str]:
    """The processes that this one has started and not reaped."""
    return sorted(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_when_one_cannot_be_started_none_is_left(loop: Loop, monkeypatch: pytest.MonkeyPatch, fifo: Fifo) -> None:
    popen, count = subprocess.Popen, iter(range(9))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if next(count) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*args, **kwargs)

    specs = [spec(FOREVER, i) for i in range(4)]
    fds, others = descriptors(), children()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(OSError, match="local rank 2 of 4 workers: Resource temporarily unavailable") as caught:
            loop.start(*specs)
        count = iter([2])
        with pytest.raises(OSError, match="local rank 0 of 1 worker: "):
            loop.start(specs[0])
    assert caught.value.errno == errno.EAGAIN
    assert not loop.workers.running and loop.watched == 0 and loop.exits == []
    loop.logs.disk.drain(PATIENCE)  # it removes the folder of the first try, and opens it for that
    assert descriptors() == fds
    assert children() == others
    assert [end.code for end in loop.run_all(spec("pass"))] == [0]


def test_a_worker_that_survives_sigkill_is_reported_and_given_up(
    slow: Loop, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, fifo: Fifo
) -> None:
    slow.start(spec(with_fifo(BLOCKS_TERM + FOREVER, fifo)), spec(FOREVER, 1), spec(with_fifo(BLOCKS_TERM + FOREVER, fifo), 2))
    fifo.read(2)
    pid, _, other = pids(slow)
    with monkeypatch.context() as patch:
        patch.setattr(Process, "kill_group", lambda self: None)
        slow.workers.stop(grace=5)
        slow.run(lambda: slow.exits)
        clock.now += 5
        slow.workers.tick(clock.now)
        assert slow.workers.deadline == clock.now + GIVE_UP
        clock.now += GIVE_UP
        slow.then = lambda: slow.workers.stop(0)  # which is no reason to report one twice
        slow.workers.tick(clock.now)
    assert [(end.local_rank, end.code) for end in slow.exits] == [(1, -15), (0, -9), (2, -9)]
    assert len(slow.stuck) == 2 and slow.stuck[0].startswith(f"rank 0 (local rank 0, pid {pid}) has not died of SIGKILL in 10 s")
    clock.now += 1
    slow.workers.tick(clock.now)
    assert slow.idle == 1
    for survivor in (pid, other):  # a survivor that dies later is reaped, and causes no event
        os.kill(survivor, signal.SIGKILL)
    slow.run(lambda: not slow.watched)
    assert len(slow.exits) == 3 and slow.idle == 1


def test_a_foreign_process_that_holds_a_pipe_delays_the_end_by_half_a_second(slow: Loop, clock: FakeClock, fifo: Fifo) -> None:
    code = """
import os, signal
fd = os.open(FIFO, os.O_WRONLY)
if os.fork() == 0:
    os.setsid()
    os.write(fd, b'%8d' % os.getpid())
    signal.pause()
os.write(2, b'last words')
while True: signal.pause()
"""
    slow.start(spec(with_fifo(code, fifo)))
    stranger = int(fifo.read(8))
    slow.run(lambda: slow.logs.last_lines(0))
    os.kill(pids(slow)[0], signal.SIGKILL)
    slow.run(lambda: slow.exits)
    while slow.once(0):
        pass
    assert slow.workers.running and slow.workers.deadline == clock.now + 0.5
    clock.now += 0.5
    slow.workers.tick(clock.now)
    assert slow.idle == 1 and slow.logs.last_lines(0) == ("last words",)
    os.kill(stranger, signal.SIGKILL)
    fifo.wait_end()


def test_nothing_grows_with_the_rounds(loop: Loop) -> None:
    specs = [spec("import os; os.write(2, b'hello')", i) for i in range(2)]
    loop.run_all(*specs)
    fds = descriptors()
    for _ in range(15):
        assert [end.code for end in loop.run_all(*specs)] == [0, 0]
        assert loop.console.flush(5)
        os.read(loop.err, 4096)
    loop.logs.disk.drain(PATIENCE)
    assert descriptors() == fds
    assert loop.idle == 16


def test_an_environment_entry_without_a_name_hinders_nobody(loop: Loop) -> None:
    """Some shells and module systems export one; Python's own execvpe refuses it."""
    (end,) = loop.run_all(WorkerSpec(0, 0, ("grep", "-qzx", "=value", "/proc/self/environ"), {**os.environ, "": "value"}))
    assert end.code == 0


def test_an_exit_is_reported_before_the_set_is_idle_also_when_its_last_pipe_ends_with_it(loop: Loop) -> None:
    seen: list[int] = []
    loop.then = lambda: seen.append(loop.idle)
    loop.start(spec("raise SystemExit(1)"))
    (worker,) = loop.workers._alive.values()
    wait_ended(worker.pid)
    worker._ready()  # its pidfd is served before its pipe, which is at its end
    assert seen == [0] and len(loop.exits) == 1
    loop.run(lambda: loop.idle)


@pytest.mark.parametrize("what", [(os, "pidfd_open"), (os, "waitid"), (signal, "pidfd_send_signal")], ids=lambda what: what[1])
def test_a_machine_without_pidfds_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch, what: tuple[object, str]) -> None:
    def refused(*args: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    process.require_pidfds()
    monkeypatch.setattr(*what, refused)
    with pytest.raises(StartError, match="elastirun needs Linux 5.4 or newer"):
        process.require_pidfds()


def test_there_the_agent_ends_with_that_line() -> None:
    refuse = "import os\ndef refuse(pid): raise OSError(38, 'Function not implemented')\nos.pidfd_open = refuse\n"
    code = refuse + "from elastirun.cli.main import main; main(['--no-python', 'true'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 202 and done.stderr.startswith("elastirun: processes cannot be watched here"), done.stderr
    assert done.stderr.count("\n") == 1


def test_no_thread_for_the_workers_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    store = WorkerStore("127.0.0.1", print)
    monkeypatch.setattr("threading.Thread.start", refused)
    with pytest.raises(StartError, match="no thread can be started"):
        store.serve()
    store._listening.close()


def test_the_workers_store_leaves_the_endpoints_port_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be free on this node now, and the host of the next rendezvous store needs it."""
    listen_on, endpoint = net.listen_on, net.listen_on("127.0.0.1")
    given = [endpoint]
    monkeypatch.setattr(net, "listen_on", lambda address, ports: given.pop() if given else listen_on(address))
    port = endpoint.getsockname()[1]
    store = WorkerStore("127.0.0.1", print, avoid=port)
    assert store.port != port and endpoint.fileno() == -1
    store._listening.close()
