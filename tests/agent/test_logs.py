"""Routes of worker output, files, last lines, and a console that stalls without blocking the loop."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import math
import os
import re
import selectors
import signal
import tempfile
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.output.console import BUFFER_LIMIT, Console
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.output.round_logs import Route, route_of
from elastirun.config import LogPolicy, Std, StdMap
from elastirun.errors import StartError, UsageError
from tests.agent.test_workers import Loop, spec
from tests.support.cluster import PATIENCE
from tests.support.descriptors import descriptors

OUT, ERR, ALL = (StdMap(std) for std in (Std.OUT, Std.ERR, Std.ALL))
NOWHERE = Path("/dev/null")


class Reader:
    """Reads the other end of a loop's console pipe, in the loop itself, ``size`` bytes at a time."""

    def __init__(self, loop: Loop, fd: int, size: int = 65536) -> None:
        self.got = bytearray()
        self._size = size
        self._loop, self._fd = loop, fd
        loop.selector.register(fd, selectors.EVENT_READ, self._ready)

    def _ready(self, mask: int) -> None:
        self.got += os.read(self._fd, self._size)

    def stop(self) -> bytes:
        """Read what is left, and stop watching the pipe."""
        while self._loop.console.out.pending or self._loop.console.err.pending or self._loop.once(0):
            self._loop.once(0.01)
        self._loop.selector.unregister(self._fd)
        return bytes(self.got)


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def loop(**policy: Any) -> Loop:
        made.append(Loop(LogPolicy(**policy)))
        return made[-1]

    yield loop
    for each in made:
        each.close()


def run(loop: Loop, *specs: Any) -> tuple[bytes, bytes]:
    """Run these workers to their end, and return the output on the console's two streams."""
    out, err = Reader(loop, loop.out), Reader(loop, loop.err)
    loop.run_all(*specs)
    return out.stop(), err.stop()


def files(base: Path) -> dict[str, bytes]:
    """Return every file of the one run below ``base``."""
    (run_dir,) = (path for path in base.iterdir() if path.name != ".latest")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def says(out: str = "", err: str = "") -> str:
    return f"import os\nos.write(1, {out.encode()!r})\nos.write(2, {err.encode()!r})"


# ---- routes


@pytest.mark.parametrize(
    ("policy", "out", "err"),
    [
        (LogPolicy(), Route.INHERIT, Route.RAW),
        (LogPolicy(redirects=OUT), Route.FILE, Route.RAW),
        (LogPolicy(redirects=ALL), Route.FILE, Route.FILE),
        (LogPolicy(tee=ERR), Route.INHERIT, Route.TEE),
        (LogPolicy(tee=ALL, redirects=ALL), Route.TEE, Route.TEE),
        (LogPolicy(redirects=StdMap(by_rank=((0, Std.ERR),))), Route.INHERIT, Route.RAW),
        (LogPolicy(redirects=StdMap(by_rank=((1, Std.ERR),))), Route.INHERIT, Route.FILE),
        (LogPolicy(local_ranks=frozenset({0})), Route.DEVNULL, Route.QUIET),
        (LogPolicy(local_ranks=frozenset({1}), tee=ALL), Route.TEE, Route.TEE),
        (LogPolicy(local_ranks=frozenset({0}), tee=OUT, redirects=ERR), Route.FILE, Route.FILE),
        (LogPolicy(show=((-1, -1),)), Route.DEVNULL, Route.QUIET),
        (LogPolicy(limit=1 << 20), Route.INHERIT, Route.RAW),
        (LogPolicy(limit=1 << 20, redirects=ERR, tee=OUT), Route.TEE, Route.CAPPED),
        (LogPolicy(limit=1 << 20, local_ranks=frozenset(), tee=ALL), Route.CAPPED, Route.CAPPED),
        (LogPolicy(log_dir=NOWHERE, redirects=ALL), Route.INHERIT, Route.RAW),
        (LogPolicy(log_dir=NOWHERE, tee=ALL), Route.TEE, Route.TEE),
        (LogPolicy(log_dir=NOWHERE, redirects=ALL, local_ranks=frozenset({0})), Route.DEVNULL, Route.QUIET),
    ],
)
def test_the_route_of_local_rank_1(policy: LogPolicy, out: Route, err: Route) -> None:
    shown = policy.shows(1, 5, 8)
    assert (route_of(policy, 1, Std.OUT, shown), route_of(policy, 1, Std.ERR, shown)) == (out, err)


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (LogPolicy(), True),
        (LogPolicy(show=((5, 5),)), True),
        (LogPolicy(show=((0, 4), (6, 7))), False),
        (LogPolicy(show=((3, 9),)), True),
        (LogPolicy(show=((-3, -3),)), True),
        (LogPolicy(show=((-1, -1),)), False),
        (LogPolicy(show=((1, 1),)), False),
        (LogPolicy(show=((5, 5),), local_ranks=frozenset({0})), False),
        (LogPolicy(show=((5, 5),), local_ranks=frozenset({1})), True),
        (LogPolicy(show=((4, 4),), local_ranks=frozenset({1})), False),
    ],
)
def test_local_rank_1_that_is_rank_5_of_8_is_shown(policy: LogPolicy, shown: bool) -> None:
    assert policy.shows(1, 5, 8) == shown


def test_by_default_stdout_is_the_agents_own_and_stderr_passes_byte_for_byte(make: Callable[..., Loop]) -> None:
    loop = make()
    text = "50%\r100%\r\n\tno end \x1b[1mbold\x1b[0m"
    logs = loop.logs.open_round(0, [spec("")])
    assert logs.descriptors(0)[0] is None
    logs.finish()
    loop.attempt = 1
    assert run(loop, spec(says(err=text))) == (b"", text.encode())
    assert loop.logs.last_lines(0) == ("100%", "\tno end bold")


def test_redirected(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path / "a" / "logs", redirects=ALL)
    text = "".join(f"line {i}\n" for i in range(5000))
    assert run(loop, spec(says("out", text)), spec(says(), 1)) == (b"", b"")
    assert files(tmp_path / "a" / "logs") == {
        "attempt_0/0/stdout.log": b"out",
        "attempt_0/0/stderr.log": text.encode(),
        "attempt_0/1/stdout.log": b"",
        "attempt_0/1/stderr.log": b"",
    }
    assert loop.logs.last_lines(0) == tuple(f"line {i}" for i in range(4970, 5000))
    assert loop.logs.last_lines(1) == ()


def test_teed_lines_have_a_prefix_and_the_file_has_none(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path, tee=ALL)
    out, err = run(loop, spec(says("one\n\ntwo", "three\n")), spec(says("four\n", "five"), 1))
    assert sorted(out.splitlines()) == [b"host:0> ", b"host:0> one", b"host:0> two", b"host:1> four"] and out.endswith(b"\n")
    assert sorted(err.splitlines()) == [b"host:0> three", b"host:1> five"] and err.endswith(b"\n")
    assert files(tmp_path)["attempt_0/0/stdout.log"] == b"one\n\ntwo"
    assert files(tmp_path)["attempt_0/1/stderr.log"] == b"five"
    assert loop.logs.last_lines(1) == ("five",)


def test_a_rank_that_is_not_shown(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path, tee=OUT, local_ranks=frozenset({0}))
    assert run(loop, spec(says("a\n", "b\n")), spec(says("c\n", "d\n"), 1)) == (b"host:0> a\n", b"b\n")
    assert files(tmp_path)["attempt_0/1/stdout.log"] == b"c\n"
    assert loop.logs.last_lines(1) == ("d",)


def test_ranks_of_the_whole_job_are_shown(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path, tee=OUT, show=((0, 0), (-1, -1)))
    specs = [spec(says(f"{rank}\n", f"e{rank}\n"), rank) for rank in range(2)]
    assert run(loop, *specs)[0].splitlines() in ([b"host:0> 0", b"host:1> 1"], [b"host:1> 1", b"host:0> 0"])
    logs = loop.logs.open_round(9, specs, 3)  # the same ranks in a larger world
    assert logs.descriptors(0)[0] is not None and [len(w.pumps) for w in logs.workers.values()] == [2, 1]
    logs.finish()
    loop.attempt = 1
    loop.logs._policy = LogPolicy(tmp_path, tee=OUT, show=((1, 1),))
    assert run(loop, *specs) == (b"host:1> 1\n", b"e1\n")
    assert files(tmp_path)["attempt_1/0/stdout.log"] == b"0\n"
    assert loop.logs.last_lines(0) == ("e0",)


def test_a_stream_that_is_only_kept_has_a_limit_too(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path, redirects=ALL, limit=1 << 16)
    code = "import os\nfor i in range(3000): [os.write(fd, b'%d:' % i + b'x' * 90 + b'\\n') for fd in (1, 2)]"
    assert run(loop, spec(code)) == (b"", b"")
    found = files(tmp_path)
    for name in ("stdout", "stderr"):
        now, before = found[f"attempt_0/0/{name}.log"], found[f"attempt_0/0/{name}.log.1"]
        assert max(len(now), len(before)) <= 1 << 16
        lines = (before + now).splitlines()
        assert lines == [b"%d:" % i + b"x" * 90 for i in range(3000 - len(lines), 3000)]
    assert loop.logs.last_lines(0)[-1] == "2999:" + "x" * 90


def test_the_prefix_template(make: Callable[..., Loop]) -> None:
    loop = make(log_dir=NOWHERE, tee=OUT, prefix_template="[${hostname} ${role_name}${rank}/${local_rank} ${else} $] ")
    assert run(loop, spec(says("x\n"), 3, ROLE_NAME="trainer"))[0] == f"[{os.uname().nodename} trainer3/3 ${{else}} $] x\n".encode()


def test_filters_copy_the_lines_of_teed_streams(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path, tee=OUT, stdout_filters=("loss", "acc"), stderr_filters=("loss",))
    run(loop, spec(says("loss 1\nhost\nacc 2\nloss", "loss\n")), spec(says("other\n"), 1))
    found = files(tmp_path)
    assert found["attempt_0/filtered_stdout.log"] == b"host:0> loss 1\nhost:0> acc 2\nhost:0> loss\n"
    assert "attempt_0/filtered_stderr.log" not in found  # stderr is not teed


def test_a_worker_that_goes_on_keeps_the_file_that_filters_fill_and_its_end_closes_it(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path / "logs", tee=OUT, stdout_filters=("loss",))
    pair = [spec("", 0), spec("", 1)]
    logs = loop.logs.open_round(0, pair)  # worker 0 is the first with the file; worker 1 goes on through all the rounds
    stdout = os.dup(logs.descriptors(1)[0] or 0)
    logs.close_worker_ends()
    counts = []
    for attempt in (1, 2, 3):
        following = loop.logs.open_round(attempt, pair, going_on=[1])
        following.adopt(logs, [1])
        logs.finish()
        loop.logs.disk.drain(PATIENCE)
        counts.append(sum(str(tmp_path) in line for line in descriptors()))
        with contextlib.ExitStack() as stack:
            for i in range(8):  # files of others, which get the numbers of closed descriptors
                stack.enter_context(open(tmp_path / f"other_{i}", "wb"))
            os.write(stdout, b"loss %d\n" % attempt)
            loop.once(PATIENCE)
            loop.logs.disk.drain(PATIENCE)
        assert not any((tmp_path / f"other_{i}").read_bytes() for i in range(8))
        following.close_worker_ends()
        logs = following
    os.close(stdout)
    logs.finish()
    loop.logs.disk.drain(PATIENCE)
    assert files(tmp_path / "logs")["attempt_0/filtered_stdout.log"] == b"host:1> loss 1\nhost:1> loss 2\nhost:1> loss 3\n"
    assert len(set(counts)) == 1, "files of rounds that are over stay open"
    assert not [line for line in descriptors() if str(tmp_path) in line]


# ---- directories


def test_each_round_has_its_own_directory_for_the_owner_alone(make: Callable[..., Loop], tmp_path: Path) -> None:
    loop = make(log_dir=tmp_path / "logs", redirects=OUT)
    for attempt in range(2):
        assert loop.logs.error_file(attempt, 0).endswith(f"/attempt_{attempt}/0/error.json")
        loop.run_all(spec(says(f"round {attempt}") + f"\nopen({loop.logs.error_file(attempt, 0)!r}, 'w').write('!')"))
    found = files(tmp_path / "logs")
    assert [found[f"attempt_{n}/0/stdout.log"] for n in range(2)] == [b"round 0", b"round 1"]
    assert [found[f"attempt_{n}/0/error.json"] for n in range(2)] == [b"!", b"!"]
    assert found == files(tmp_path / "logs")
    (run_dir,) = (path for path in (tmp_path / "logs").iterdir() if path.name != ".latest")
    assert re.fullmatch(r"job_host_\w+", run_dir.name) and loop.logs.directory == str(run_dir)
    assert (tmp_path / "logs" / ".latest" / "host").samefile(run_dir)
    for path in [tmp_path / "logs", *run_dir.parent.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0 or path.name == "error.json"  # the worker itself made that one


def test_each_node_has_a_link_to_its_newest_run_where_no_glob_follows(tmp_path: Path) -> None:
    def begin(node: str = "n0") -> Path:
        with selectors.PollSelector() as selector:
            logs = RunLogs(LogPolicy(log_dir=tmp_path), "job", node, Console(selector), selector)
            run_dir = Path(logs.error_file(0, 0)).parents[2]
            logs.close()
            (run_dir / "stdout.log").touch()
            return run_dir

    latest = tmp_path / ".latest" / "n0"
    for _ in range(2):
        run_dir = begin()
        assert latest.samefile(run_dir)
    other = begin("n/1")
    assert other.name.startswith("job_n_1_") and latest.samefile(run_dir) and (latest.parent / "n_1").samefile(other)
    assert len(glob.glob(f"{tmp_path}/**/*.log", recursive=True)) == 3, "no file twice"
    latest.unlink()
    latest.symlink_to("gone")
    assert begin().samefile(latest)
    latest.unlink()
    latest.write_text("mine")
    assert [path.name for path in begin().iterdir()] == ["stdout.log"]
    assert latest.read_text() == "mine"
    latest.unlink()
    latest.mkdir()
    begin()
    assert list(latest.iterdir()) == []
    latest.rmdir()
    elsewhere = tmp_path / "elsewhere"
    latest.parent.rename(elsewhere)
    latest.parent.symlink_to(elsewhere)
    begin("n9")
    assert not (elsewhere / "n9").is_symlink(), "a link may be somebody else's, and lead anywhere"
    if os.geteuid() == 0:
        latest.parent.unlink()
        latest.parent.mkdir()
        os.chown(latest.parent, 65534, 65534)
        begin("n9")
        assert list(latest.parent.iterdir()) == [], "a folder of another user"


@pytest.mark.parametrize("run_id", ["../a b" + "x" * 300, "\u8bad" * 90, "\udcff" * 90])
def test_a_run_id_is_no_path_and_a_name_has_255_bytes(tmp_path: Path, run_id: str) -> None:
    with selectors.PollSelector() as selector:
        logs = RunLogs(LogPolicy(log_dir=tmp_path), run_id, "\u8bad" * 40, Console(selector), selector)
        path = Path(logs.error_file(0, 0))
        logs.close()
    name = path.parents[2].name
    assert path.parents[3] == tmp_path and name.startswith((".._a_bxxx", "\u8bad" * 33, "_" * 90))


def test_without_a_directory_the_error_files_are_temporary(
    make: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop = make()
    for attempt in range(3):
        path = Path(loop.logs.error_file(attempt, 0))
        loop.run_all(spec(f"open({str(path)!r}, 'w').write('!')"))
        assert path.read_text() == "!"
        assert len(list(tmp_path.rglob("error.json"))) == 1
    assert loop.logs.directory is None
    loop.logs.close()
    assert list(tmp_path.iterdir()) == []


def test_redirecting_without_a_directory_keeps_a_temporary_one_and_says_so_once(
    make: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop = make(redirects=StdMap(by_rank=((0, Std.OUT),)))
    _, err = run(loop, spec(says("kept")))
    loop.run_all(spec(""))
    loop.logs.close()
    assert err.decode() == f"elastirun: no --log-dir given: the workers' logs are kept in {loop.logs.directory}\n"
    assert files(tmp_path)["attempt_0/0/stdout.log"] == b"kept"


def test_no_files_at_all(make: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop = make(log_dir=NOWHERE, tee=ERR, redirects=OUT, stderr_filters=("x",))
    assert loop.logs.error_file(0, 0) == ""
    assert run(loop, spec(says("", "x\n"))) == (b"", b"host:0> x\n")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file: this is not a directory"):
        begin(LogPolicy(log_dir=tmp_path / "file"))
    with pytest.raises(StartError, match="cannot make a directory"):
        begin(LogPolicy(log_dir=tmp_path / "file" / "below"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert begin(LogPolicy()) == ""  # the run goes on without files
    with pytest.raises(StartError, match="cannot make a directory"):
        begin(LogPolicy(tee=ALL))


def begin(policy: LogPolicy) -> str:
    """Return the path of the error file of a run with ``policy``."""
    with selectors.PollSelector() as selector:
        logs = RunLogs(policy, "job", "host", Console(selector), selector)
        try:
            return logs.error_file(0, 0)
        finally:
            logs.close()


# ---- the console


@pytest.mark.parametrize("stream", [1, 2])
def test_no_line_is_torn(make: Callable[..., Loop], stream: int) -> None:
    loop = make(log_dir=NOWHERE, tee=ALL)
    code = f"""
import os
data = b''.join(b'%d:%d:' % (RANK, i) + b'abcd'[RANK:RANK + 1] * 2000 + b'\\n' for i in range(2000))
while data:
    data = data[os.write({stream}, data[:3001]):]
"""
    reader = Reader(loop, loop.out if stream == 1 else loop.err, size=8192)
    ends = loop.run_all(*(spec(code.replace("RANK", str(rank)), rank) for rank in range(4)))
    assert [end.code for end in ends] == [0] * 4
    lines = reader.stop().splitlines()
    assert len(lines) == 8000
    for rank in range(4):
        mine = [line for line in lines if line.startswith(b"host:%d> " % rank)]
        assert mine == [b"host:%d> %d:%d:" % (rank, rank, i) + b"abcd"[rank : rank + 1] * 2000 for i in range(2000)]


def settle(loop: Loop) -> None:
    """Run the loop until no event comes any more."""
    while loop.once(0.3):
        pass


@pytest.mark.parametrize("tee", [True, False])
def test_a_console_that_nobody_reads_holds_up_the_workers_and_not_the_loop(make: Callable[..., Loop], tee: bool) -> None:
    loop = make(log_dir=NOWHERE, tee=ERR if tee else StdMap())
    size, count = 1000, 8000
    code = f"import os\nfor i in range({count}): os.write(2, b'x' * {size - 1} + b'\\n')"
    loop.start(*(spec(code, rank) for rank in range(2)))
    loop.run(lambda: loop.console.err.full)
    settle(loop)  # the loop sleeps: it neither blocks in a write nor spins
    assert loop.workers.alive == (0, 1)
    held = len(loop.console.err._buffer)
    assert BUFFER_LIMIT // 2 < held < BUFFER_LIMIT + 4 * 65536
    loop.console.say("still here")
    assert len(loop.console.err._buffer) <= held + 100
    reader = Reader(loop, loop.err)
    loop.run(lambda: not loop.workers.running)
    got = reader.stop()
    assert [end.code for end in loop.exits] == [0, 0]
    assert got.count(b"x") == 2 * count * (size - 1) and b"\nelastirun: still here\n" in got


@pytest.mark.parametrize("tee", [True, False])
def test_workers_that_are_to_stop_do_not_wait_for_a_console_that_nobody_reads(make: Callable[..., Loop], tee: bool) -> None:
    loop = make(log_dir=NOWHERE, tee=ERR if tee else StdMap())
    loop.start(spec("import os\nfor i in range(8000): os.write(2, b'x' * 999 + b'\\n')\nos.write(2, b'the end\\n')"))
    loop.run(lambda: loop.console.err.full)
    settle(loop)
    loop.console.start_dropping()
    loop.run(lambda: not loop.workers.running)
    assert loop.exits[0].code == 0 and loop.logs.last_lines(0)[-1] == "the end"
    assert len(loop.console.err._buffer) < BUFFER_LIMIT + 4 * 65536
    *lines, last = Reader(loop, loop.err).stop().splitlines()
    prefix = b"host:0> " * tee
    dropped = 8000 * (1000 + len(prefix)) + len(prefix) + 8 - sum(len(line) + 1 for line in lines)
    said = f"elastirun: nobody read stderr while the workers were stopping; {dropped} bytes of their output were dropped there"
    assert last.decode() == said
    assert {*lines} - {prefix + b"the end"} == {prefix + b"x" * 999}, "no line is cut"
    loop.console.err.write(b"-" * BUFFER_LIMIT)
    assert loop.console.err.full, "from then on workers wait again"


def test_a_pipe_that_nobody_reads_gets_larger_when_its_writers_are_to_stop(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.console.start_dropping()
    assert fcntl.fcntl(loop.out, fcntl.F_GETPIPE_SZ) == 65536, "not unless it is full"
    other = os.open(f"/proc/self/fd/{loop._fds[1]}", os.O_WRONLY | os.O_NONBLOCK)
    assert os.write(other, b"-" * (1 << 20)) == 65536
    loop.console.start_dropping()
    assert os.write(other, b"-" * (1 << 20)) == (1 << 20) - 65536
    os.close(other)


def test_the_beginning_of_a_line_is_shown_in_time(make: Callable[..., Loop]) -> None:
    loop = make()
    assert loop.logs.tick(0.0) == math.inf
    loop.start(spec("import os, signal\nos.write(2, b'Loading...')\nsignal.pause()"))
    loop.run(lambda: loop.logs.tick(0.0) < math.inf)
    due = loop.logs.tick(0.0)
    assert loop.logs.tick(due - 0.01) == due and not loop.console.err.pending
    loop.console.err.write(b"-" * BUFFER_LIMIT)
    assert loop.logs.tick(due) > due and len(loop.console.err._buffer) == BUFFER_LIMIT, "its end may be there and held up"
    assert Reader(loop, loop.err).stop() == b"-" * BUFFER_LIMIT
    assert [loop.logs.tick(due + 60) < due + 60, loop.logs.tick(due + 60)] == [True, math.inf] and loop.console.err.pending


def test_the_beginning_of_a_line_is_not_shown_between_lines_of_others(make: Callable[..., Loop]) -> None:
    loop = make()
    other = "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\nos.write(2, b'ready\\n')\n"
    other += "signal.sigwait({signal.SIGUSR1})\nos.write(2, b'whole\\n')\nsignal.pause()"
    loop.start(spec("import os, signal\nos.write(2, b'begun')\nsignal.pause()", 0), spec(other, 1))
    reader = Reader(loop, loop.err)
    loop.run(lambda: loop.logs.tick(0.0) < math.inf and b"ready\n" in reader.got)
    due = loop.logs.tick(0.0)
    os.kill(loop.workers.pids[1], signal.SIGUSR1)
    loop.run(lambda: b"whole\n" in reader.got)
    assert [loop.logs.tick(due) > due, loop.logs.tick(due) > due] == [True, True]
    assert [loop.logs.tick(due + 60) < due + 60, loop.logs.tick(due + 60)] == [True, math.inf]
    loop.run(lambda: b"begun" in reader.got)
    assert reader.stop() == b"ready\nwhole\nbegun"


def test_what_a_worker_wrote_is_not_lost_when_it_ends_while_the_console_is_stuck(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.console.err.write(b"-" * BUFFER_LIMIT)
    loop.start(spec(says(err="last words")))
    loop.run(lambda: not loop.workers.running)
    assert loop.logs.last_lines(0) == ("last words",)
    assert Reader(loop, loop.err).stop() == b"-" * BUFFER_LIMIT + b"last words"


def test_a_pipe_that_somebody_else_fills_after_our_poll_does_not_block_us(make: Callable[..., Loop]) -> None:
    loop = make()
    err = loop._fds[3]
    assert os.get_blocking(err)  # the workers' descriptor is unchanged
    loop.console.err.write(b"ours")
    with open(f"/proc/self/fd/{err}", "wb", buffering=0, opener=lambda path, flags: os.open(path, os.O_WRONLY | os.O_NONBLOCK)) as other:
        filled = other.write(b"-" * (1 << 20))
    loop.console.err.write_some()
    assert loop.console.err.pending
    os.read(loop.err, filled)
    assert loop.console.flush(5) and os.read(loop.err, 4096) == b"ours"


def test_a_stopped_terminal() -> None:
    selector = selectors.PollSelector()
    master, terminal = os.openpty()
    tty.setraw(terminal)
    console = Console(selector, terminal, terminal)
    termios.tcflow(terminal, termios.TCOOFF)
    console.out.write(b"x" * 20_000 + b"\n")
    assert not console.flush(0.1) and len(console.out._buffer) == 20_001
    termios.tcflow(terminal, termios.TCOON)
    got = b""
    while len(got) < 20_001:
        console.flush(0.01)
        got += os.read(master, 65536)
    assert got == b"x" * 20_000 + b"\n"
    console.close()
    os.close(terminal)
    os.close(master)


def test_a_line_of_ours_starts_a_line(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.console.say("one")
    loop.console.err.write(b"50%")
    loop.console.say("two")
    loop.console.out.write(b"out")
    assert loop.console.flush(5)
    assert os.read(loop.err, 4096) == b"elastirun: one\n50%\nelastirun: two\n"
    assert os.read(loop.out, 4096) == b"out"


def test_flush_gives_up(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.console.out.write(b"x" * 300_000)
    loop.console.err.write(b"y")
    assert not loop.console.flush(0.1)
    assert os.read(loop.err, 4096) == b"y"


@pytest.mark.parametrize("way", ["closed pipe", "closed descriptor", "/dev/full"])
def test_a_console_that_is_gone(way: str) -> None:
    selector = selectors.PollSelector()
    ours, fd = os.pipe()
    os.close(ours)
    if way == "/dev/full":
        os.close(fd)
        fd = os.open("/dev/full", os.O_WRONLY)
    elif way == "closed descriptor":
        os.close(fd)
    console = Console(selector, fd, fd)
    again: list[int] = []
    for _ in range(2):
        console.err.write(b"x" * BUFFER_LIMIT)
        if console.err.full:
            console.err.when_room(lambda: again.append(1))
        assert console.flush(5)
    console.say("nobody hears it")
    console.flush(5)
    assert console.err._dead == (way != "/dev/full")  # a disk may have room again
    assert not console.err.full and not selector.get_map() and (again or way == "closed descriptor")
    console.close()
    if way != "closed descriptor":
        os.close(fd)


@pytest.mark.parametrize("threads", [True, False], ids=["", "where no thread can be started"])
def test_a_console_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    selector = selectors.PollSelector()
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before\n")
    console = Console(selector, fd, fd)
    console.out.write(b"x" * 10_000 + b"\nend\n")
    assert console.flush(5)
    assert (tmp_path / "log").read_bytes() == b"before\n" + b"x" * 10_000 + b"\nend\n"
    console.close()
    os.close(fd)
    selector.close()


def test_a_console_that_is_a_file_on_a_hanging_disk_never_holds_up_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = selectors.PollSelector()
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    answers, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda to, data: (answers.wait(PATIENCE) if to == fd else None, write(to, data))[1])
    console = Console(selector, fd, fd)
    lines = b"x" * 1023 + b"\n"
    for _ in range(2048):
        console.err.write(lines)
        for key, mask in selector.select(0):
            key.data(mask)
    assert console.err.full, "the workers that print are to hold back"
    assert not console.flush(0.01)
    answers.set()
    assert console.flush(30)
    assert (tmp_path / "log").read_bytes() == lines * 2048
    console.close()
    os.close(fd)
    selector.close()
