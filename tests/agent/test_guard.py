"""Marks, recognition of an agent's processes, and the guard's program, without agents."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import costs
from elastirun import clock, linux
from elastirun.agent.processes import control_group, death_notice, guard, kills, leftovers, marks, proc
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.memory import MemoryStore
from tests.support.cluster import PATIENCE, dies
from tests.support.until import until

R = "0123456789abcdef"


def mark(text: str) -> marks.Mark:
    parsed = marks.parse(text)
    assert parsed is not None
    return parsed


# -- marks


@pytest.mark.parametrize(
    "text",
    ["", "1-1-x/", "1-1-x/system.slice", f"1-1-1-{R}/", f"1-1-1-{R}0", f"01-1-1-{R}", f"0-1-1-{R}", f"-1-1-1-{R}", f"1-1-{R}"]
    + [f"1-1-1-{R.upper()}", f"\uff11-1-1-{R}", f"1 -1-1-{R}", f"{'9' * 21}-1-1-{R}", "../../x", f"1-1-1-{R}\n"],
)
def test_nothing_but_a_well_formed_mark_is_one(text: str) -> None:
    assert marks.parse(text) is None
    assert marks.of(f"{text},1-2-3-{R}")[-1].text == f"1-2-3-{R}"
    assert marks.in_environment(f"A=1\0ELASTIRUN_AGENT={text}\0".encode()) == []


def test_an_agent_is_dead_only_where_its_pid_means_something() -> None:
    own = marks.own()
    assert marks.parse(own.text) and not own.is_dead()
    assert marks.Mark(own.pid, own.started - 1, own.namespace, R).is_dead(), "a later process has its pid"
    assert not marks.Mark(own.pid, own.started - 1, own.namespace + 1, R).is_dead()
    assert not marks.Mark(own.pid, own.started - 1, 0, R).is_dead()


def test_numbers_of_another_namespace_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ``unshare --pid`` without ``--mount-proc``, /proc shows other processes by the same numbers."""
    own = marks.own()
    gone = marks.Mark(own.pid, own.started - 1, own.namespace, R)
    assert gone.is_dead()
    monkeypatch.setattr(proc.os, "getpid", lambda: own.pid + 1)
    assert not gone.is_dead() and proc.pid_namespace() == 0


def test_a_variable_is_found_by_its_whole_name() -> None:
    assert [each.text for each in marks.in_environment(f"A=1\0ELASTIRUN_AGENT=1-2-3-{R}\0B=2\0".encode())] == [f"1-2-3-{R}"]
    assert proc.value_of("A", b"XA=1\0B=A=2\0") == "" and proc.value_of("A", b"A=1\0A=2") == "1"


def wait_until_it_runs_another_program(pid: int) -> None:
    """Wait until the process has executed another program than Python and has an environment: in the middle of exec it has none."""
    python, folder = os.path.realpath(sys.executable), f"/proc/{pid}"
    until(lambda: os.readlink(f"{folder}/exe") != python and Path(f"{folder}/environ").read_bytes(), f"another program in {pid}", 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("ids", "counts"), [("0, 0, 0", True), ("65534, 65534, 65534", False), ("65534, 0, 0", False)])
def test_a_mark_counts_only_in_a_process_of_our_own_user(ids: str, counts: bool) -> None:
    """The user who starts a set-user-ID program chooses its environment."""
    own = marks.own()
    code = f"import os; os.setresuid({ids}); print(flush=True); os.execvp('sleep', ['sleep', '1000'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, marks.VARIABLE: own.text}) as program:
        try:
            assert program.stdout and program.stdout.readline()
            wait_until_it_runs_another_program(program.pid)
            found = proc.look(program.pid)
            assert found is not None and own.text in proc.environment(program.pid).decode()
            assert [each.text for each in kills.marks_of(found)] == [own.text] * counts
        finally:
            program.kill()


# -- reading /proc


def test_a_mark_is_found_behind_two_mebibytes_of_environment() -> None:
    big = {f"BIG{i}": "x" * 100_000 for i in range(20)}
    with subprocess.Popen(["sleep", "1000"], env={**big, "PATH": os.environ["PATH"], marks.VARIABLE: f"1-2-3-{R}"}) as program:
        try:
            wait_until_it_runs_another_program(program.pid)
            assert [each.text for each in marks.in_environment(proc.environment(program.pid))] == [f"1-2-3-{R}"]
        finally:
            program.kill()


def test_an_environment_that_cannot_be_read_in_time_counts_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory lock of such a process is held."""
    held = threading.Event()
    monkeypatch.setattr(proc, "_environment", lambda pid: bytes(held.wait(PATIENCE)))
    began = time.monotonic()
    assert proc.environment(1) == b"" and time.monotonic() - began < 10 * proc.ENVIRONMENT_TIMEOUT
    held.set()


def test_an_environment_is_read_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard must find what it kills even if a worker's threads have reached the limit of processes."""

    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    expected = proc.environment(os.getpid())
    monkeypatch.setattr(proc._thread, "start_new_thread", refuse)
    assert expected and proc.environment(os.getpid()) == expected


def test_a_living_agent_looks_at_its_descendants_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's loop does this at the end of each round, so it must be fast on a machine with many processes."""
    listdir, looked = os.listdir, []
    evidence = kills.Traces(marks.own(), "", strict=False)
    evidence.excluded = set(proc.children(os.getpid()))  # pytest's own, if any
    monkeypatch.setattr(os, "listdir", lambda path: looked.append(path) or listdir(path))
    monkeypatch.setattr(proc, "environment", lambda pid: pytest.fail("an environment was read"))
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        assert kills.kill_below_agent(evidence) == 1
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL and "/proc" not in looked


# -- recognition of processes

AGENT, INIT, WORKER = 100, 1, 200


def process(pid: int, parent: int, session: int, started: int = 50) -> proc.ProcessStat:
    tail = ["S", str(parent), str(session), str(session), *["0"] * 13, "1", "0", str(started)]
    return proc.ProcessStat(pid, f"{pid} (a) b) {' '.join(tail)}".encode())


def selected(
    *processes: proc.ProcessStat, parent: int = INIT, strict: bool = True, before: float = kills.FOREVER, marked: tuple[int, ...] = ()
) -> set[int]:
    own = mark(f"{AGENT}-10-1-{R}")
    evidence = kills.Traces(own, "", strict)
    evidence.outside, evidence.excluded, evidence.sessions = {90, AGENT}, {101}, {WORKER: 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "marks_of", lambda each: [own] if each.pid in marked else [])
        return set(kills.owned(evidence, {each.pid: each for each in processes}, parent, before))


def test_stat_is_read_by_its_fields() -> None:
    own = proc.look(os.getpid())
    assert own and (own.parent, own.session, own.alive) == (os.getppid(), os.getsid(0), True)
    made = process(7, 6, 5, 4)
    assert (made.pid, made.parent, made.session, made.started, made.alive) == (7, 6, 5, 4, True)


def test_orphans_belong_to_the_agent_by_session_or_mark_and_their_descendants_with_them() -> None:
    assert selected(process(300, INIT, WORKER)) == {300}, "of a worker that has died"
    assert selected(process(300, INIT, 300), marked=(300,)) == {300}
    assert selected(process(300, INIT, 300)) == set()
    assert selected(process(300, INIT, 300), process(301, 300, 301), process(302, 301, 301), marked=(300,)) == {300, 301, 302}
    assert selected(process(300, INIT, 299), process(301, INIT, 299), marked=(300,)) == {300, 301}, "in one session, whose leader has died"


def test_a_mark_or_a_number_alone_is_no_evidence() -> None:
    assert selected(process(300, 99, 300), marked=(300,)) == set(), "another daemon's child"
    assert selected(process(300, INIT, 90), marked=(300,)) == set(), "in the session of the agent's shell"
    assert selected(process(299, 99, 299), process(300, INIT, 299), marked=(300,)) == set(), "in a session that somebody else leads"
    assert selected(process(300, INIT, 300, started=9), marked=(300,)) == set(), "older than the agent"
    assert selected(process(WORKER, INIT, WORKER, started=21), process(300, INIT, WORKER)) == set(), "the worker's number was used again"
    assert selected(process(300, INIT, 0), process(301, INIT, 0), marked=(300,)) == {300}, "0 is no session"


def test_all_children_of_a_living_agent_are_its_own_except_the_excluded_ones() -> None:
    found = (process(101, AGENT, 101), process(102, AGENT, AGENT), process(300, AGENT, 300), process(301, 300, 301))
    assert selected(*found, parent=AGENT, strict=False) == {300, 301}
    assert selected(*found, parent=AGENT, strict=True) == set(), "process 1 adopts strangers"


def test_workers_that_were_started_later_are_not_meant() -> None:
    found = (process(WORKER, AGENT, WORKER, 20), process(300, AGENT, WORKER, 60), process(400, AGENT, 400, 60), process(401, 400, 401, 61))
    assert selected(*found, parent=AGENT, strict=False, before=30) == {WORKER, 300}, "but a young child of an old worker is"


# -- the guard's program


@contextmanager
def running_guard(deadline: float, group: str = "") -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Run a guard whose agent is this test, with its timer, and a worker whose pid it is sent. Children of the test need evidence."""
    own = marks.own()
    timer = linux.timerfd_create()
    linux.timerfd_settime(timer, deadline)
    command = [sys.executable, "-I", "-S", guard.__file__, own.text, str(timer), "1", group]
    with os.fdopen(timer), subprocess.Popen(["sleep", "1000"], start_new_session=True) as worker:
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[timer]) as program:
                assert program.stdin and program.stdout and program.stdout.read(1)
                found = proc.look(worker.pid)
                assert found
                data = guard.message(guard.WORKER, worker.pid, found.started)
                for half in (data[:3], data[3:]):  # messages arrive in pieces
                    program.stdin.write(half)
                    program.stdin.flush()
                yield program, worker.pid, timer
        finally:
            worker.kill()


def stop(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)


def tell(program: subprocess.Popen[bytes], data: bytes) -> None:
    """Send the guard ``data``, and wait until it has read that."""
    assert program.stdin
    program.stdin.write(data)
    program.stdin.flush()
    program.send_signal(signal.SIGCONT)
    unread = array.array("i", [1])
    while unread[0]:
        fcntl.ioctl(program.stdin, termios.FIONREAD, unread)


def test_after_a_suspension_the_first_sign_of_life_comes_too_late() -> None:
    """Both agent and guard stood still, and the agent goes on first."""
    with running_guard(clock.now() + 1000) as (program, worker, timer):
        stop(program)
        linux.timerfd_settime(timer, clock.now() - 1)
        linux.timerfd_settime(timer, clock.now() + 1000)
        tell(program, guard.message(guard.LATE, clock.now()))
        assert dies(worker)


def test_a_guard_that_stood_still_itself_ends_nobody() -> None:
    with running_guard(clock.now() + 1000) as (program, worker, timer):
        stop(program)
        linux.timerfd_settime(timer, clock.now() - 1)
        linux.timerfd_settime(timer, clock.now() + 1000)
        tell(program, guard.message(guard.GONE, 1))
        assert not dies(worker, 0.3)


def test_a_renewal_wakes_no_guard() -> None:
    """Most wake-ups of an idle job were once the guard's."""
    with running_guard(clock.now() + 1000) as (program, worker, timer):
        tell(program, guard.message(guard.GONE, 1))
        until(lambda: ") S " in Path(f"/proc/{program.pid}/stat").read_text(), "the guard waits")
        before = costs.wake_ups([program.pid])
        for later in range(100):
            linux.timerfd_settime(timer, clock.now() + 1000 + later)
        assert costs.wake_ups([program.pid]) == before
        linux.timerfd_settime(timer, clock.now())
        assert dies(worker)


def test_a_moment_that_passes_without_a_sign_ends_the_workers() -> None:
    with running_guard(clock.now() + 0.5) as (_, worker, _):
        assert dies(worker)


def test_a_group_is_removed_when_its_last_process_has_died_at_last(tmp_path: Path) -> None:
    """The kernel needs seconds to free the memory of a large worker."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "busy").touch()
    with running_guard(clock.now() + 1000, str(tmp_path / "group")) as (program, worker, _):
        assert program.stdin
        program.stdin.close()
        assert dies(worker) and not dies(program.pid, 1.0), "the guard waits"
        (tmp_path / "group" / "busy").unlink()
        assert dies(program.pid) and not (tmp_path / "group").exists()


def test_only_a_folder_that_we_made_is_removed(tmp_path: Path) -> None:
    ours, other, link = tmp_path / "elastirun_x", tmp_path / "precious", tmp_path / "elastirun_y"
    for folder in (ours, other):
        folder.mkdir()
    link.symlink_to(other)
    for path in (ours, other, link):
        found = path.lstat()
        guard.remove_folder(found.st_dev, found.st_ino + (path is ours), os.fsencode(path))
        assert path.exists()
    found = ours.lstat()
    if os.geteuid() == 0:
        os.chown(ours, 65534, -1)
        guard.remove_folder(found.st_dev, found.st_ino, os.fsencode(ours))
        assert ours.exists(), "it is another user's now"
        os.chown(ours, 0, -1)
    guard.remove_folder(found.st_dev, found.st_ino, os.fsencode(ours))
    assert not ours.exists()


def test_groups_are_named_by_mark_and_job(tmp_path: Path) -> None:
    """Other folders are left alone, and so are groups of other jobs that have members."""
    namespace = proc.pid_namespace()
    dead = f"{2**22 - 1}-1-{namespace}-{R}"
    kept = [control_group.name(marks.own().text, "job"), f"elastirun-{dead}", f"elastirun-{dead}x-00000000", "elastirun-", "other"]
    full = [control_group.name(dead, job) for job in ("other", "none")]
    for name in (*kept, *full, control_group.name(dead, "job")):
        (tmp_path / name).mkdir()
    for name in full:
        (tmp_path / name / "cgroup.procs").write_text(f"{2**22 - 2}\n")
    assert leftovers.Sweep("none", "", tmp_path).count == 0, "every job without an id has that one"
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *full}
    assert leftovers.Sweep(os.urandom(8).hex(), "", tmp_path).count == 0


def test_a_group_that_we_are_in_or_that_is_another_users_is_left_alone(tmp_path: Path) -> None:
    job = os.urandom(8).hex()
    namespace = proc.pid_namespace()
    groups = [tmp_path / control_group.name(f"{2**22 - 1 - i}-1-{namespace}-{R}", job) for i in range(2)]
    for group, member in zip(groups, (os.getpid(), 2**22 - 1), strict=True):
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{member}\n")
    if os.geteuid() == 0:
        os.chown(groups[1], 65534, -1)
    else:
        (groups[1] / "cgroup.procs").write_text("")
    assert leftovers.Sweep(job, "", tmp_path).count == 0


def test_a_group_that_another_agent_has_just_removed_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / control_group.name(f"{2**22 - 1}-1-{proc.pid_namespace()}-{R}", "job")
    group.mkdir()
    is_dead = marks.Mark.is_dead

    def removed_meanwhile(mark: marks.Mark) -> bool:
        group.rmdir()
        return is_dead(mark)

    monkeypatch.setattr(marks.Mark, "is_dead", removed_meanwhile)
    assert leftovers.Sweep("job", "", tmp_path).count == 0
    assert not group.exists()


def test_orphans_are_looked_for_until_the_guard_has_been_adopted_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a dying agent end one after the other: its pipes may be closed before its children are adopted."""
    worker = "import os, signal; os.setsid(); pid = os.fork()\n"
    worker += "print(os.getpid(), pid, flush=True) if pid else (os.close(1), signal.pause())"
    parent = subprocess.run([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True, check=True)
    session, orphan = map(int, parent.stdout.split())
    try:
        found = proc.look(orphan)
        assert found is not None and found.session == session
        agent, parents = mark(f"{session}-1-1-{R}"), iter([session] * 8)
        evidence = kills.Traces(agent, "", strict=False)
        evidence.sessions[session] = 0
        monkeypatch.setattr(kills.os, "getppid", lambda: next(parents, found.parent))
        kills.kill_orphans(evidence)
        assert dies(orphan)
    finally:
        if not dies(orphan, 0):
            os.kill(orphan, signal.SIGKILL)


# -- the death notice


@contextmanager
def orphan_of_the_dead(env: dict[str, str] | None = None) -> Iterator[tuple[kills.Traces, proc.ProcessStat]]:
    """An agent that has died, with the session of a worker in which one process is left."""
    worker = "import os, signal; os.setsid(); pid = os.fork()\n"
    worker += "print(os.getpid(), pid, flush=True) if pid else (os.close(1), signal.pause())"
    parent = subprocess.run([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True, check=True, env=env)
    session, orphan = map(int, parent.stdout.split())
    try:
        found = proc.look(orphan)
        assert found is not None and found.session == session
        evidence = kills.Traces(mark(f"{session}-{found.started}-{proc.pid_namespace()}-{R}"), "", strict=False)
        evidence.sessions[session] = 0
        yield evidence, found
    finally:
        if not dies(orphan, 0):
            os.kill(orphan, signal.SIGKILL)


def test_all_has_ended_when_the_agent_and_all_that_its_workers_started_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kills.all_ended(kills.Traces(marks.own(), "", strict=False)), "the agent lives"
    with orphan_of_the_dead() as (evidence, orphan):
        monkeypatch.setattr(kills.os, "getppid", lambda: orphan.parent)
        assert not kills.all_ended(evidence), "a process of its worker is left"
        os.kill(orphan.pid, signal.SIGKILL)
        assert dies(orphan.pid) and guard.has_ended(evidence, PATIENCE)
        evidence.group = str(tmp_path)
        events = tmp_path / "cgroup.events"
        for populated in (1, 0):
            events.write_text(f"populated {populated}\nfrozen 0\n")
            ended = guard.has_ended(evidence, 0.0 if populated else PATIENCE)
            assert ended == (not populated), "a process is in the group that cannot be recognised otherwise"


def test_an_orphan_without_an_environment_may_be_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the environment of a killed process away first, and frees its memory and devices after that."""
    for env, ended in (({"SOME": "environment"}, True), ({}, False)):
        with orphan_of_the_dead(env) as (evidence, orphan):
            evidence.sessions.clear()
            monkeypatch.setattr(kills.os, "getppid", lambda parent=orphan.parent: parent)
            assert guard.has_ended(evidence, PATIENCE if ended else 0.0) == ended
            evidence.excluded.add(orphan.pid)
            assert guard.has_ended(evidence, PATIENCE), "a child of the agent that is no worker"


def test_what_cannot_be_read_is_no_proof_of_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full table of files, or a control group at its limit of memory, hides a process that lives."""
    read, own, unreadable = proc._read, marks.own(), [""]

    def fail(path: str, *limit: int) -> bytes:
        if path == unreadable[0]:
            raise OSError(errno.ENFILE, "too many open files in the system")
        return read(path, *limit)

    with orphan_of_the_dead() as (evidence, orphan):
        monkeypatch.setattr(kills.os, "getppid", lambda: orphan.parent)
        monkeypatch.setattr(proc, "_read", fail)
        unreadable[0] = f"/proc/{orphan.pid}/stat"
        assert not kills.all_ended(evidence)
    unreadable[0] = f"/proc/{own.pid}/stat"
    assert not own.is_dead()
    (tmp_path / "cgroup.events").mkdir()
    assert not control_group.is_empty(str(tmp_path)) and control_group.is_empty(str(tmp_path / "gone"))


def test_no_death_notice_is_written_before_all_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(guard, "END_TIMEOUT", 0.0)
    monkeypatch.setattr(guard, "write_in_thread", lambda notice, died: written.append(notice))
    state = guard.Guard(kills.Traces(marks.own(), "", strict=False))
    for notice in (b"", b"one"):
        state.receive(guard.message(guard.NOTICE, notice))
        guard.begin_death_notice(state, clock.now())
    assert not written, "the agent lives"
    monkeypatch.setattr(kills, "all_ended", lambda evidence: True)
    for notice in (b"two", b""):
        state.receive(guard.message(guard.NOTICE, notice))
        guard.begin_death_notice(state, clock.now())
    assert written == [b"two"], "none without a store, and none of an agent that has left"


PREPARED = """
import sys, time
from elastirun.agent.processes import guard, kills, marks
from elastirun.agent.processes.death_notice import Notice
for name in [name for name in sys.modules if name.startswith(("elastirun.rendezvous", "elastirun.agent.processes.death_notice"))]:
    del sys.modules[name]
state, needed = guard.Guard(kills.Traces(marks.own(), "", False)), "elastirun.rendezvous.stores.tcp"
state.receive(guard.message(guard.NOTICE, b""))
state.receive(guard.message(guard.NOTICE, Notice(None, "job/", "me-1", None, 3, 12.5).encode()))
while needed not in sys.modules:
    time.sleep(0.01)
"""


def test_what_writes_a_notice_is_imported_before_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", PREPARED], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_notice_is_the_same_when_the_guard_has_read_it() -> None:
    for token in (None, b"\0 a secret\xff"):
        notice = death_notice.Notice({"kind": "tcp", "address": "10.0.0.1", "port": 29400}, "job/", "me-1", token, 3, 12.5)
        state = guard.Guard(kills.Traces(marks.own(), "", strict=False))
        state.receive(guard.message(guard.NOTICE, notice.encode()))
        assert death_notice.Notice.decode(state.notice) == notice


def test_a_store_that_is_gone_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death_notice, "PAUSES", (0.0, 0.0))
    tries: list[dict[str, object]] = []

    def connect(store: dict[str, object]) -> MemoryStore:
        tries.append(store)
        raise StoreError("connection refused")

    monkeypatch.setattr(death_notice, "_connect", connect)
    store: dict[str, object] = {"kind": "tcp", "address": "127.0.0.1", "port": 1}
    notice = death_notice.Notice(store, "job/", "me-1", None, 3, 12.5).encode()
    assert not death_notice.write(notice, 13.0) and tries == [store] * 3
    monkeypatch.setattr(death_notice, "_connect", lambda store: MemoryStore())
    assert not death_notice.write(notice, 13.0), "another run's store holds no row of this agent: the others wait elsewhere"


def test_a_guard_that_can_start_no_thread_ends_although_the_store_does_not() -> None:
    code = "from elastirun.agent.processes import death_notice, guard; import threading, time\n"
    code += "def refuse(*args): raise RuntimeError\n"
    code += "threading.Thread.start, death_notice.write = refuse, lambda notice, died: time.sleep(1000)\n"
    code += "guard.ignore_signals(); wait = guard.write_in_thread(b'', 0.0); print(flush=True); wait(0.1)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout and program.stdout.readline(), "the folders are removed before"
            assert program.wait(PATIENCE) == -signal.SIGALRM
        finally:
            program.kill()
