"""A slow, full or hanging log disk: the loop goes on, workers wait or not, and a line says what is lost."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.output import disk as disk_module
from elastirun.agent.output import log_files
from elastirun.agent.output.disk import QUEUE_LIMIT, DiskThread
from elastirun.agent.output.log_files import close_all, open_all
from elastirun.config import LogPolicy, Std, StdMap
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import NodeRow
from tests.agent.test_workers import Loop, spec
from tests.support.cluster import PATIENCE, Cluster
from tests.support.descriptors import descriptors
from tests.support.until import until

ALL = StdMap(Std.ALL)


class Disk:
    """A disk thread with its loop, and an operation that hangs until ``go`` is set."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()
        self.said: list[str] = []
        self.thread = DiskThread(self.selector, self.said.append)
        self.go, self.hanging = threading.Event(), threading.Event()

    def hang(self) -> None:
        self.thread.submit(self.wait)
        assert self.hanging.wait(PATIENCE)

    def wait(self) -> None:
        self.hanging.set()
        self.go.wait(PATIENCE)

    def loop(self, timeout: float = PATIENCE) -> None:
        for key, mask in self.selector.select(timeout):
            key.data(mask)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(disk_module, "STALL", 0.05)
    made = Disk()
    yield made
    made.go.set()
    made.thread.close(PATIENCE)
    assert not made.selector.get_map()
    made.selector.close()


def stalled(disk: Disk) -> None:
    until(lambda: disk.thread.hangs(0.05), "an operation that hangs")


# ---- the thread


def test_a_call_returns_raises_or_is_given_up(disk: Disk) -> None:
    assert disk.thread.call(lambda: 5, PATIENCE) == 5
    with pytest.raises(FileNotFoundError):
        disk.thread.call(lambda: os.stat("/no/such/file"), PATIENCE)
    undone: list[int] = []

    def late() -> int:
        disk.wait()
        return 7

    with pytest.raises(TimeoutError, match="the disk does not answer"):
        disk.thread.call(late, 0.05, undone.append)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        disk.thread.call(lambda: 5, 0.05)  # raises at once, because the operation before hangs
    assert time.monotonic() - began < PATIENCE
    disk.go.set()
    assert disk.thread.call(lambda: 6, PATIENCE) == 6
    assert undone == [7]


def test_a_slow_disk_holds_writers_back_until_half_is_written(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "STALL", PATIENCE)
    disk.hang()
    written: list[int] = []
    for i in range(4):
        disk.thread.submit(lambda i=i: written.append(i), QUEUE_LIMIT // 4)  # type: ignore[misc]
    assert disk.thread.full
    room: list[bool] = []
    disk.thread.when_room(lambda: room.append(disk.thread.full))
    disk.loop()
    assert room == [] and disk.thread.tick() is not None
    disk.go.set()
    while not room:
        disk.loop()
    disk.thread.drain(PATIENCE)
    assert room == [False] and written == [0, 1, 2, 3] and disk.said == []


def test_a_hanging_disk_holds_nobody_back_and_what_is_dropped_is_said(disk: Disk) -> None:
    disk.hang()
    disk.thread.submit(lambda: None, QUEUE_LIMIT)
    room: list[int] = []
    disk.thread.when_room(lambda: room.append(1))
    due = disk.thread.tick()
    assert due is None or due > 0
    stalled(disk)
    disk.thread.tick()
    assert room == [1] and not disk.thread.full and disk.said == []
    for _ in range(3):
        disk.thread.submit(lambda: pytest.fail("written"), 10)
    assert disk.said == ["the log disk does not answer; output that it cannot take is lost there, training goes on"]
    disk.go.set()
    while len(disk.said) < 2:
        disk.loop()
    assert disk.said[1:] == ["the log disk answers again; 30 bytes of output were lost"]


def test_the_end_waits_for_a_while_and_says_what_is_lost(disk: Disk) -> None:
    disk.hang()
    disk.thread.submit(lambda: None, 1000)
    disk.thread.drain(0.05)
    assert disk.said == ["the log disk did not take everything in time: 1000 bytes of logs are lost"]
    disk.go.set()
    disk.thread.drain(PATIENCE)
    assert len(disk.said) == 1


def test_an_operation_that_raises_is_said_and_the_next_one_runs(disk: Disk) -> None:
    def fails() -> None:
        raise ValueError("what nobody had thought of")

    disk.thread.submit(fails, 1000)
    assert disk.thread.call(lambda: 5, PATIENCE) == 5
    disk.thread.drain(PATIENCE)
    assert disk.said == ["an operation on the log disk has failed: ValueError('what nobody had thought of')"]
    assert not disk.thread.hangs(0.0)


def test_a_close_that_fails_keeps_no_other_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk may report only at the close that it is full."""
    opened = open_all((), [str(tmp_path / name) for name in "abc"])
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        close_all(opened)
    assert not [line for line in descriptors() if str(tmp_path) in line]


def test_where_no_thread_can_be_started_files_fail_and_nothing_else(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="no thread can be started"):
            disk.thread.call(lambda: 5, PATIENCE)
        disk.thread.submit(lambda: None, 10)
    assert disk.thread.call(lambda: 5, PATIENCE) == 5


# ---- a round


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(LogPolicy(log_dir=tmp_path, redirects=StdMap(Std.OUT), tee=StdMap(Std.ERR)))
    yield made
    made.close()


SPEAKS = "import os\nos.write(1, b'out')\nos.write(2, b'err\\n')"


def drained(loop: Loop) -> str:
    assert loop.console.flush(PATIENCE)
    return os.read(loop.err, 1 << 20).decode()


def test_a_round_whose_folders_cannot_be_made_runs_without_files(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    loop.run_all(spec(SPEAKS))
    drained(loop)
    with monkeypatch.context() as patch:
        patch.setattr(log_files, "make_folder", full)
        assert [end.code for end in loop.run_all(spec(SPEAKS))] == [0]
    said = drained(loop).splitlines()
    where = f"{loop.logs.directory}/attempt_1"
    assert said == [
        f"elastirun: cannot make the workers' logs in {where}: No space left on device; "
        "their output is not kept in files, training goes on",
        "host:0> err",
    ]
    assert loop.logs.last_lines(0) == ("err",) and not os.path.exists(where)
    assert loop.logs.error_file(1, 0) == "" and loop.logs.error_file(0, 0) != "", "torch's @record would fail for want of the folder"
    assert [end.code for end in loop.run_all(spec(SPEAKS))] == [0]
    assert Path(f"{loop.logs.directory}/attempt_2/0/stdout.log").read_bytes() == b"out"


def test_a_round_that_begins_while_the_disk_hangs_waits_no_longer_than_its_limit(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    go, make = threading.Event(), log_files.make_folder
    loop.run_all(spec(SPEAKS))

    def hang(path: str, mode: int) -> None:
        go.wait(PATIENCE)
        make(path, mode)

    fds = descriptors()
    loop.logs._limit = 0.05
    monkeypatch.setattr(log_files, "make_folder", hang)
    loop.start(spec(SPEAKS))
    loop.run(lambda: not loop.workers.running)
    assert loop.exits[-1].code == 0 and "the disk does not answer" in drained(loop)
    assert loop.logs.last_lines(0) == ("err",)
    go.set()
    loop.logs.disk.drain(PATIENCE)
    assert descriptors() == fds, "files opened too late are closed"


def test_workers_that_print_go_on_while_the_disk_hangs(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "STALL", 0.2)
    go, write = threading.Event(), os.write

    def hang(fd: int, data: Any) -> int:
        if threading.current_thread().name == "disk":
            go.wait(PATIENCE)
        return write(fd, data)

    monkeypatch.setattr(os, "write", hang)
    loop.logs._policy = LogPolicy(log_dir=loop.logs._policy.log_dir, redirects=ALL, limit=1 << 20)
    size = 2 * QUEUE_LIMIT
    loop.start(spec(f"import os\nfor i in range({size} >> 16): os.write(2, b'x' * 65535 + b'\\n')\nos.write(2, b'the end\\n')"))
    loop.run(lambda: not loop.workers.running)
    assert loop.exits[0].code == 0 and loop.logs.last_lines(0)[-1] == "the end"
    go.set()
    loop.logs.disk.drain(PATIENCE)
    assert "the log disk does not answer; " in drained(loop)


# ---- real agents

# The agent imports this at its start. Writes to logs then hang while the file HANG exists, as on a frozen disk.
HANGING = """
import os, time
write, hang = os.write, os.environ["HANG"]
def hanging(fd, data):
    while os.readlink(f"/proc/self/fd/{fd}").endswith((".log", ".jsonl")) and os.path.exists(hang):
        open(hang + ".seen", "w").close()
        time.sleep(0.05)
    return write(fd, data)
os.write = hanging
"""
TALKS = """
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid()}).encode() + b"\\n")
for line in s.makefile():
    if line == "end\\n":
        break
    print(line, flush=True)
"""


def keep_alives(store: TcpStore) -> dict[str, int]:
    """Return how often each node has written its row, by the row's key."""
    rows = store.under("elastirun/job/test/node/")
    return {key: Codec(None).decode(key, row, NodeRow).seq for key, row in rows.items()}


def test_a_log_disk_that_hangs_for_longer_than_expire_costs_nothing(nodes: Cluster) -> None:
    (nodes.tmp_path / "sitecustomize.py").write_text(HANGING)
    hang = nodes.tmp_path / "hang"
    nodes.env |= {"PYTHONPATH": str(nodes.tmp_path), "HANG": str(hang)}
    nodes.script.write_text(TALKS)
    logs = nodes.tmp_path / "logs"
    agents = [nodes.agent(i, "--expire=3", *([f"--log-dir={logs}", "--tee=3"] if i == 2 else []), nnodes="2") for i in (1, 2)]
    workers = nodes.round(2)
    hang.touch()
    for worker in workers:
        worker.tell("hello")
    until(Path(f"{hang}.seen").exists, "a write that hangs", state=nodes.everything)
    with closing(TcpStore("127.0.0.1", nodes.port)) as store:
        before = keep_alives(store)
        assert len(before) == 2
        until(
            lambda: all(count >= before[key] + 12 for key, count in keep_alives(store).items()),
            "12 keep-alives of both nodes, of which 10 take as long as --expire",
            state=nodes.everything,
        )
    hang.unlink()
    for worker in workers:
        worker.tell("end")
    assert [nodes.ends(agent) for agent in agents] == [0, 0], nodes.everything()
    assert "round 2" not in nodes.everything()
    assert "hello" in next(logs.glob("test_*/attempt_0/0/stdout.log")).read_text()


# Fills the disk of the logs in the first round and fails, like a worker whose own output has filled it.
FILLS = """
import os, sys
if os.environ["ELASTIRUN_ROUND"] == "1":
    for i in range(10**6):
        try:
            open(f"{sys.argv[1]}/{i}", "w")
        except OSError:
            sys.exit(3)
sys.exit(bool(os.environ["TORCHELASTIC_ERROR_FILE"]))  # must be empty, because its folder could not be made and torch's @record would fail
"""


@pytest.mark.parametrize(("inodes", "code"), [(2, 202), (40, 0)])
def test_a_full_log_disk_is_an_error_at_the_very_start_and_later_costs_no_restart(nodes: Cluster, inodes: int, code: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    nodes.script.write_text(FILLS)
    logs = nodes.tmp_path / "logs"
    logs.mkdir()
    mount = f'mount -t tmpfs -o nr_inodes={inodes} tmpfs {logs} && exec "$@"'
    arguments = ("--max-restarts=1", "--redirects=3", f"--log-dir={logs}", str(nodes.script), str(logs))
    agent = nodes.launch(1, *arguments, before=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert nodes.ends(agent) == code, nodes.out(1)
    if code:
        (line,) = nodes.out(1).splitlines()
        assert line.startswith("elastirun: cannot make ") and "No space left on device" in line and line.endswith("; set --log-dir")
    else:
        assert "elastirun: cannot make the workers' logs in " in nodes.out(1) and "Traceback" not in nodes.out(1)


NO_TEMPORARY_FOLDER = """
import sys, tempfile
def none(*args, **kwargs):
    raise FileNotFoundError(2, "No usable temporary directory found")
tempfile.gettempdir = tempfile.mkdtemp = none
from elastirun.cli.main import main
main(sys.argv[1:])
"""


def test_a_job_runs_without_a_folder_for_temporary_files() -> None:
    """A container's file system may be read-only."""
    command = [sys.executable, "-c", NO_TEMPORARY_FOLDER, "--no-python", "true"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "No usable temporary directory found" in done.stderr


def test_an_agent_ends_although_its_log_disk_hangs(nodes: Cluster) -> None:
    (nodes.tmp_path / "sitecustomize.py").write_text(HANGING)
    hang = nodes.tmp_path / "hang"
    nodes.env |= {"PYTHONPATH": str(nodes.tmp_path), "HANG": str(hang)}
    agent = nodes.launch(1, "--tee=3", f"--log-dir={nodes.tmp_path}/logs", str(nodes.script))
    nodes.worker()
    hang.touch()
    agent.send_signal(signal.SIGTERM)
    assert nodes.ends(agent) == 143
    assert "elastirun: the log disk did not take everything in time: " in nodes.out(1)
