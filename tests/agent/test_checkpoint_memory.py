"""Checkpoints in memory outlive the workers that made them, within limits, whatever processes of the same user send to the socket."""

from __future__ import annotations

import array
import math
import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from elastirun.agent.host import memory
from elastirun.agent.observe.events import CheckpointsHeld, Event
from elastirun.agent.workers import checkpoint_memory
from elastirun.agent.workers.checkpoint_memory import MAX_HELD, CheckpointMemory
from elastirun.agent.workers.local_socket import MAX_CLIENTS, LocalSocket
from elastirun.checkpoint import memory_tier
from tests.support.cluster import PATIENCE, Cluster, Worker, dies
from tests.support.descriptors import descriptors
from tests.support.images import SEALS, memfd
from tests.support.until import poll

MIB = 1 << 20
SOON = 3.0  # seconds; a thread does it within a millisecond


class Agent:
    """The agent's end, served by a thread. ``folder/agent`` leads to its socket."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.events: list[Event] = []
        self.said: list[str] = []
        self.selector = selectors.PollSelector()
        self.socket = LocalSocket(self.selector)
        self._link = folder / "agent"
        self._link.symlink_to(self.socket.path)
        self.memory = CheckpointMemory(self.socket, self.events.append, self.said.append, limit)
        self._wake, self._stop = os.pipe()
        self.selector.register(self._wake, selectors.EVENT_READ, lambda mask: None)
        self.slowest = 0.0  # seconds of one turn
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, mask in self.selector.select():
                if key.fd == self._wake:
                    return
                began = time.monotonic()
                key.data(mask)
                self.slowest = max(self.slowest, time.monotonic() - began)

    def pause(self) -> None:
        """From now on the test calls ``turn``."""
        os.write(self._stop, b"x")
        self._thread.join()
        self.selector.unregister(self._wake)

    def turn(self) -> None:
        for key, mask in self.selector.select(0):
            key.data(mask)

    def close(self) -> None:
        if self._thread.is_alive():
            self.pause()
        self.memory.close()
        self.socket.close()
        self._link.unlink()
        self.selector.close()
        os.close(self._wake)
        os.close(self._stop)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("ELASTIRUN_SOCKET", f"{tmp_path}/agent")
    before = descriptors()
    made = Agent(tmp_path, 10 * MIB)
    yield made
    made.close()
    assert changed(before) == []


def changed(before: list[str]) -> list[str]:
    """Return the difference between the open descriptors and ``before``. A thread closes those that were refused: it gets some time."""
    poll(lambda: descriptors() == before, SOON)
    return sorted({*descriptors()} ^ {*before})


def put(name: str, content: bytes = b"x", seals: int = SEALS, size: int = 0) -> str:
    fd = memfd(content, seals, size)
    try:
        return memory_tier.put(name, fd)
    finally:
        os.close(fd)


def contents(prefix: str = "") -> dict[str, bytes]:
    found = {}
    for name, fd in memory_tier.found(prefix).items():
        found[name] = os.pread(fd, 100, 0)
        os.close(fd)
    return found


def test_what_is_put_is_found_again_under_its_name(agent: Agent) -> None:
    assert contents() == {}
    assert (put("d.0.0", b"one"), put("d.0.1", b"two"), put("e.0.0", b"three")) == ("", "", "")
    assert contents() == {"d.0.0": b"one", "d.0.1": b"two", "e.0.0": b"three"}
    assert put("d.0.0", b"new") == ""
    assert contents("d.") == {"d.0.0": b"new", "d.0.1": b"two"}
    assert send(b"list\n") == b'{"d.0.1": 3, "e.0.0": 5, "d.0.0": 3}\n'
    assert memory_tier.drop("d.0.0") and not memory_tier.drop("d.0.0")
    assert contents() == {"d.0.1": b"two", "e.0.0": b"three"}


def test_it_is_the_same_memory_and_not_a_copy(agent: Agent) -> None:
    fd = memfd(b"before")
    assert memory_tier.put("d", fd) == ""
    os.pwrite(fd, b"after!", 0)
    os.close(fd)
    assert contents() == {"d": b"after!"}


def test_memory_is_held_up_to_the_limit_and_a_replaced_image_does_not_count(agent: Agent) -> None:
    assert put("a", size=6 * MIB) == put("b", size=4 * MIB) == ""
    why = put("c", b"xx")
    assert "0.0 GiB beside 0.0 GiB exceed 0.0 GiB, half of the memory that was available when the agent started" in why
    assert put("d", b"xx") and len(agent.said) == 1, "people are told once"
    assert why in agent.said[0]
    assert put("a", size=7 * MIB) and put("a", size=5 * MIB) == "" and put("c", size=MIB) == ""
    assert memory_tier.drop("b") and put("d", size=4 * MIB) == ""
    assert agent.memory.size == 10 * MIB


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("name", "seals", "why"),
    [
        ("", SEALS, "a name has"),
        ("x" * 65, SEALS, "a name has"),
        ("a b", SEALS, "a name has"),
        ("é", SEALS, "a name has"),
        ("../a", SEALS, "a name has"),
        ("x" * 1000, SEALS, "a name has"),
        ("x" * 2000, SEALS, "the agent"),
        ("a", 2, "of a fixed size"),
        ("a", 4, "of a fixed size"),
        ("a", 0, "of a fixed size"),
    ],
)
def test_what_is_refused_is_refused_with_a_reason(agent: Agent, name: str, seals: int, why: str) -> None:
    assert why in put(name, seals=seals)
    assert contents() == {}


def test_what_is_no_memory_is_refused(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for fd in (os.open(tmp_path / "file", os.O_RDWR), os.open("/dev/shm", os.O_RDONLY), os.open("/proc/self/maps", os.O_RDONLY)):
        assert "of a fixed size" in memory_tier.put("a", fd)
        os.close(fd)
    assert contents() == {}


def test_the_number_of_images_is_limited(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.memory, "_most", 3)
    assert [put(str(i)) for i in range(5)] == ["", "", "", *["3 images are held already"] * 2]
    assert put("0", b"new") == "" and len(contents()) == 3


def test_the_names_of_all_images_fit_into_an_answer(agent: Agent) -> None:
    fd = memfd()
    for i in range(MAX_HELD):
        agent.memory._held[f"{i:0>64}"] = os.dup(fd)
    held = memory_tier.found(f"{511:0>64}")
    assert len(held) == 1
    for each in (fd, *held.values()):
        os.close(each)


def send(data: bytes, fds: list[int] | None = None) -> bytes:
    """What the agent answers to raw bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(os.environ["ELASTIRUN_SOCKET"])
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        connection.sendmsg([data], along)
        try:
            return connection.recv(1000)
        except ConnectionResetError:
            return b""


def test_strangers_neither_hang_nor_fill_the_agent(agent: Agent) -> None:
    fd = memfd()
    for data in (b"\xff\xfe\n", b"\n", b"put\n", b"get\n", b"get x\n", b"drop x\n", b"list x y\n", b"hello\n"):
        assert send(data).count(b"\n") == 1
    for data in (b"x" * 5000, b"put a\nput b\n"):
        send(data, [fd])
    assert send(b"put a\n").startswith(b"no one descriptor comes along")
    assert send(b"put a\n", [fd] * 250).startswith(b"no one descriptor comes along")
    assert send(b"list\n", [fd]) == b"{}\n"
    assert send(b"hello\n", [fd]).startswith(b"no such request")
    silent = []
    for _ in range(3 * MAX_CLIENTS):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].connect(os.environ["ELASTIRUN_SOCKET"])
        silent[-1].sendmsg([b"put a"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    assert put("a") == ""
    for connection in silent:
        connection.close()
    os.close(fd)
    assert set(contents()) == {"a"}
    assert agent.slowest < 1.0


def test_what_a_client_brings_is_closed_with_it(agent: Agent) -> None:
    fd = memfd()
    before = descriptors()
    for line in (b"list\n", b"put a b\n", b"x" * 5000, b"put a"):
        send(line, [fd]) if line.endswith(b"\n") else hang_up(line, fd)
    put("a", seals=0)
    assert changed(before) == []
    os.close(fd)


def hang_up(line: bytes, fd: int) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["ELASTIRUN_SOCKET"])
        connection.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def test_a_descriptor_that_takes_for_ever_to_close_does_not_hold_the_agent_up(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    close, closes, may_close = os.close, threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        if threading.current_thread().daemon:
            closes.set()
            may_close.wait()
        close(fd)

    monkeypatch.setattr(os, "close", slow)
    with open("/dev/null") as file:
        assert "of a fixed size" in memory_tier.put("a", file.fileno())
    assert closes.wait(SOON)
    assert put("b") == ""
    may_close.set()


def test_no_descriptor_is_left_for_an_image(agent: Agent) -> None:
    agent.pause()
    fd, taken = memfd(), []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["ELASTIRUN_SOCKET"])
        agent.turn()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 8, hard))
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            connection.sendmsg([b"put a\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            agent.turn()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in (fd, *taken):
                os.close(each)
        assert connection.recv(100) == b"no one descriptor comes along, and the agent must have a free one for it\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(agent: Agent) -> None:
    """The folder lets nobody else in. The socket does not rely on that, so here the stranger comes from a process that is in already."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        stranger = os.fork()
        if not stranger:
            code = 1
            with suppress(OSError):
                os.chdir(os.path.dirname(os.path.realpath(os.environ["ELASTIRUN_SOCKET"])))
                os.chmod(".", 0o711)
                os.chmod("agent", 0o777)
                os.setresuid(65534, 65534, 65534)
                connection.connect("agent")
                code = 2
                connection.sendall(b"list\n")
                code = 3 if connection.recv(100) else 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1]) in (0, 2), "the agent hung up before or after the question"
    assert send(b"list\n") == b"{}\n"


def test_without_an_agent_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIRUN_SOCKET", raising=False)
    assert "not started by an agent" in put("a") and memory_tier.found() == {} and not memory_tier.drop("a")
    monkeypatch.setenv("ELASTIRUN_SOCKET", f"{tmp_path}/agent")
    assert "No such file" in put("a") and memory_tier.found() == {}


def test_an_agent_that_does_not_answer_costs_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIRUN_SOCKET", f"{tmp_path}/agent")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/agent")
        listening.listen()
        assert memory_tier.found("", 0.05) == {}
        fd = memfd()
        assert "timed out" in memory_tier.put("a", fd, 0.05)
        os.close(fd)


def test_events_tell_the_amount_when_it_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(checkpoint_memory.clock, "now", lambda: now)
    monkeypatch.setenv("ELASTIRUN_SOCKET", f"{tmp_path}/agent")
    agent = Agent(tmp_path, 10 * MIB)
    held = agent.memory
    try:
        assert held.tick(now) == math.inf
        put("a", size=MIB)
        put("b", size=2 * MIB)
        assert held.tick(now) == 101.0 and agent.events == []
        assert held.tick(101.0) == math.inf and agent.events == [CheckpointsHeld(2, 3 * MIB, 10 * MIB)]
        put("a", size=MIB + 4096)
        assert held.tick(101.0) == math.inf and len(agent.events) == 1, "not for a change that nobody needs to know"
        memory_tier.drop("a")
        memory_tier.drop("b")
        assert held.tick(101.0) == math.inf and agent.events[1:] == [CheckpointsHeld(0, 0, 10 * MIB)]
    finally:
        agent.close()


# --- how much may be held

MEMINFO = "MemTotal: 8000 kB\nMemAvailable: 5000 kB\n"
GROUP = {"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
MOUNT_1 = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
GROUP_1 = {"/proc/self/cgroup": "4:memory:/a\n", "/proc/self/mountinfo": MOUNT_1}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0),
        ({"/proc/meminfo": MEMINFO}, 5000 << 10),
        (GROUP | {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/a/b/memory.max": "max", "/sys/fs/cgroup/a/b/memory.current": "7"}, 5000 << 10),
        (GROUP | {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/a/memory.max": "1000", "/sys/fs/cgroup/a/memory.current": "300"}, 700),
        (
            GROUP
            | {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/a/memory.max": "1000",
                "/sys/fs/cgroup/a/memory.current": "900",
                "/sys/fs/cgroup/a/memory.stat": "file 500\ninactive_file 400\n",
            },
            500,
        ),
        (
            GROUP_1
            | {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000",
                "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "900",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
                "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 7\ntotal_inactive_file 50\n",
            },
            150,
        ),
        (GROUP | {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/a/memory.max": "1000", "/sys/fs/cgroup/a/memory.current": "1300"}, 0),
    ],
)
def test_available_memory_is_the_machines_within_the_limits_of_the_control_groups(files: dict[str, str], expected: int) -> None:
    def read(path: str) -> str:
        try:
            return files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    assert memory.available(read) == expected


def test_this_machine_says_how_much_is_available() -> None:
    assert memory.available() > 1 << 20


# --- real agents

SCRIPT = """
import fcntl, json, os, socket
from elastirun.checkpoint import memory_tier

local, round = os.environ["LOCAL_RANK"], os.environ["ELASTIRUN_ROUND"]
found = {}
for name, fd in memory_tier.found(f"dir.{local}.").items():
    found[name] = os.pread(fd, 100, 0).decode()
    os.close(fd)
fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.truncate(fd, 1 << 20)
fcntl.fcntl(fd, 1033, 6)
os.pwrite(fd, f"round {round}, rank {local} ".encode() + b"x" * (1 << 19), 0)
why = memory_tier.put(f"dir.{local}.0", fd)
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid(), "found": found, "why": why}).encode() + b"\\n")
raise SystemExit(int(s.makefile().readline()))
"""


def test_the_image_of_a_killed_worker_is_there_in_the_next_round_and_thirty_rounds_cost_the_agent_nothing(nodes: Cluster) -> None:
    nodes.script.write_text(SCRIPT)
    agent = nodes.agent(1, "--max-restarts=1000", "--set=restart-pause=0", nnodes="1", nproc=2)
    sizes = {}
    for number in range(1, 31):
        workers = nodes.round(2, after=number - 1)
        for worker in workers:
            expected = {f"dir.{worker.rank}.0": f"round {number - 1}, rank {worker.rank} "} if number > 1 else {}
            assert (worker.env["why"], {name: text.rstrip("x") for name, text in found_by(worker).items()}) == ("", expected)
        if number in (3, 30):
            sizes[number] = (len(os.listdir(f"/proc/{agent.pid}/fd")), resident(agent.pid))
        os.kill(workers[number % 2].pid, signal.SIGKILL)
        for worker in workers:
            assert dies(worker.pid)
    assert sizes[30][0] <= sizes[3][0] + 2 and sizes[30][1] < sizes[3][1] + 4 * MIB, sizes
    agent.terminate()
    assert nodes.ends(agent) == 143


def found_by(worker: Worker) -> dict[str, str]:
    return cast(dict[str, str], worker.env["found"])


def resident(pid: int) -> int:
    """Bytes of private memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
