"""What an agent ends is what its workers started, however well hidden, and nothing else. Real processes, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.agent.processes.process_tree import _own_group
from tests.support.children import guard_of
from tests.support.cluster import Cluster, Worker, dies, kill
from tests.support.left_behind import own_files
from tests.support.until import PATIENCE

root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
REPORT = """
import ctypes, json, os, signal, socket, subprocess, sys, threading
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
def report(**more):
    s.sendall(json.dumps({**os.environ, "pid": os.getpid(), **more}).encode() + bytes([10]))
"""
WORKER = REPORT + "report()\nsys.exit(int(s.makefile().readline()))"

# Each is a child of a worker that reads itself, and says when it has hidden.
TITLED = """
import os, signal, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])  # env_start, env_end
memory = os.open("/proc/self/mem", os.O_WRONLY)
os.pwrite(memory, b"\\0" * (end - start), start)  # as setproctitle does
"""
THREAD = """
import ctypes, signal, threading, os, sys
def wait():
    os.write(1, b"x")
    while True: signal.sigtimedwait([], 1000)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)  # exit, of this thread alone
"""
HIDING = {
    "titled": TITLED + "os.write(1, b'x')\nsignal.pause()",
    "titled, in a session of its own": TITLED + "os.setsid()\nos.write(1, b'x')\nsignal.pause()",
    "main thread ended": THREAD,
    "main thread ended, in a session of its own": "import os; os.setsid()\n" + THREAD,
    "2 MiB of environment": "import os, signal\nos.setsid()\nos.write(1, b'x')\nsignal.pause()",
}
HIDER = (
    REPORT
    + """
mark = os.environ.pop("ELASTIRUN_AGENT")
big = {f"BIG{i}": "x" * 100_000 for i in range(20)} if sys.argv[1].startswith("2 MiB") else {}
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, env={**os.environ, **big, "ELASTIRUN_AGENT": mark})
child.stdout.read(1)
report(child=child.pid)
signal.pause()
"""
)


@pytest.fixture
def nodes(nodes: Cluster) -> Cluster:
    nodes.script.write_text(WORKER)
    return nodes


def ungrouped() -> tuple[str, ...]:
    """A prefix for commands that must not be able to make a control group."""
    if _own_group() is None or not os.access(_own_group() or "", os.W_OK):
        return ()
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("control groups can be made here, and taken away by root only")
    mount = "for m in $(awk '$3 == \"cgroup2\" {print $2}' /proc/mounts); do mount -o bind,remount,ro $m; done"
    return ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")


def kill_with_guard(agent: subprocess.Popen[str]) -> None:
    """Both die at once, so that the guard ends nothing."""
    guard = guard_of(agent)
    os.kill(guard, signal.SIGSTOP)
    kill(agent)
    os.kill(guard, signal.SIGKILL)


def environment_of(worker: Worker) -> dict[str, str]:
    return {name: value for name, value in worker.env.items() if name != "pid"}


def dies_or_is_ended(pid: int, timeout: float) -> bool:
    died = dies(pid, timeout)
    if not died:
        os.kill(pid, signal.SIGKILL)  # so that a failed test leaves nothing
    return died


# -- processes of our workers that hide: they end with the agent


@pytest.mark.parametrize("way", [way for way in HIDING if way != "titled, in a session of its own"])
def test_what_hides_ends_with_its_agent(nodes: Cluster, way: str) -> None:
    nodes.script.write_text(HIDER)
    agent = nodes.launch(1, str(nodes.script), way, HIDING[way], before=ungrouped())
    child = int(nodes.worker().env["child"])
    kill(agent)
    assert dies_or_is_ended(child, 10)


@pytest.mark.daily(5)
@pytest.mark.parametrize("way", list(HIDING))
def test_what_hides_ends_with_the_lease_of_a_frozen_agent(nodes: Cluster, way: str) -> None:
    nodes.script.write_text(HIDER)
    options = ("--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=t", "--last-call=0.1", "--expire=1")
    agent = nodes.launch(1, *options, "--local-addr=127.0.0.1", str(nodes.script), way, HIDING[way], before=ungrouped())
    child = int(nodes.worker().env["child"])
    agent.send_signal(signal.SIGSTOP)
    assert dies_or_is_ended(child, 20)


# -- processes that no worker of ours started: they run on

STRAY = """
import os
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.close(1)
    os.execvp("sleep", ["sleep", "1000"])
"""


@pytest.mark.parametrize("way", ["ends", "is killed"])
def test_what_a_worker_submits_elsewhere_lives_on_when_its_agent(nodes: Cluster, way: str) -> None:
    """As Slurm's sbatch does: the environment goes along, but another daemon starts it. Here this test is that daemon."""
    agent = nodes.launch(1, "--rdzv-id=submits", "--standalone", str(nodes.script))
    worker = nodes.worker()
    submitted = subprocess.Popen(["sleep", "1000"], env=environment_of(worker), start_new_session=True)
    orphan = int(subprocess.run([sys.executable, "-c", STRAY], stdout=subprocess.PIPE, check=True).stdout)  # goes where ours go
    try:
        if way == "ends":
            worker.tell("0")
            assert nodes.ends(agent) == 0
        else:
            guard = guard_of(agent)
            kill(agent)
            assert dies(worker.pid) and dies(guard)
        assert not dies(submitted.pid, 0) and not dies(orphan, 0)
    finally:
        submitted.kill()
        if not dies(orphan, 0):
            os.kill(orphan, signal.SIGKILL)
        submitted.wait()


BATCH = """
(setsid sh -c 'echo $$ > "$1/daemon"; exec sleep 1000' sh "$1" &)
while ! [ -s "$1/daemon" ]; do sleep 0.01; done
(sleep 1000 & echo $! > "$1/orphan")
$3 "$2" -m elastirun --standalone --rdzv-id=again "$1/worker.py"
echo $? > "$1/code"
"""
DETACHED = 'sh -c "$@" > /dev/null & echo $!'  # its parent and session leader ends: it is an orphan that goes where ours go


@pytest.mark.parametrize("launched", ["env", "env -u ELASTIRUN_AGENT"])
def test_a_batch_script_with_a_workers_environment_starts_the_next_job(nodes: Cluster, launched: str) -> None:
    agent = nodes.launch(1, "--rdzv-id=again", "--standalone", str(nodes.script))
    worker = nodes.worker()
    kill_with_guard(agent)
    assert dies(worker.pid)
    command = ["sh", "-c", DETACHED, "sh", BATCH, "sh", str(nodes.tmp_path), sys.executable, launched]
    where = Path(__file__).parents[2]
    detached = subprocess.run(command, env=environment_of(worker), cwd=where, stdout=subprocess.PIPE, start_new_session=True, check=True)
    batch = int(detached.stdout)
    pids = {"batch": batch}
    try:
        nodes.worker().tell("0")
        pids |= {name: int((nodes.tmp_path / name).read_text()) for name in ("daemon", "orphan")}
        assert dies(batch) and (nodes.tmp_path / "code").read_text() == "0\n"
        assert not dies(pids["orphan"], 0), "what shares the session of the script is not a leftover"
        assert not dies(pids["daemon"], 0) or launched != "env", "nor is what it started besides, where the agent can know"
    finally:
        for pid in pids.values():
            if not dies(pid, 0):
                os.kill(pid, signal.SIGKILL)


def test_what_a_scheduler_above_the_next_run_started_for_a_worker_is_left_alone(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--rdzv-id=submitted", "--standalone", str(nodes.script))
    worker = nodes.worker()
    environment = environment_of(worker)
    worker.tell("0")
    assert nodes.ends(agent) == 0
    submitted = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)  # we are the scheduler
    try:
        again = nodes.launch(1, "--rdzv-id=submitted", "--standalone", str(nodes.script))
        nodes.worker().tell("0")
        assert nodes.ends(again) == 0
        assert submitted.poll() is None
    finally:
        submitted.kill()
        submitted.wait()


@root
def test_a_live_agent_in_another_pid_namespace_keeps_its_workers(nodes: Cluster) -> None:
    inside = nodes.launch(1, "--rdzv-id=both", "--standalone", str(nodes.script), before=("unshare", "--pid", "--fork", "--mount-proc"))
    there = nodes.worker()
    outside = nodes.launch(2, "--rdzv-id=both", "--standalone", str(nodes.script))
    nodes.worker().tell("0")
    assert nodes.ends(outside) == 0
    assert "an earlier run" not in nodes.out(2)
    there.tell("0")
    assert nodes.ends(inside) == 0


def static(nodes: Cluster, rank: int) -> subprocess.Popen[str]:
    where = ("--master-addr=127.0.0.1", f"--master-port={nodes.port}")
    return nodes.launch(rank, "--nnodes=2", f"--node-rank={rank}", *where, str(nodes.script))


def test_an_id_that_nobody_chose_names_no_earlier_run(nodes: Cluster) -> None:
    """Every static job without an id has the id ``none``."""
    first = [static(nodes, rank) for rank in (0, 1)]
    environment = [environment_of(nodes.worker()) for _ in first][0]
    assert environment["TORCHELASTIC_RUN_ID"] == "none"
    for agent in first:
        kill_with_guard(agent)
    pid = int(subprocess.run([sys.executable, "-c", STRAY], env=environment, stdout=subprocess.PIPE, check=True).stdout)
    try:
        again = [static(nodes, rank) for rank in (0, 1)]
        for worker in [nodes.worker() for _ in again]:
            worker.tell("0")
        assert [nodes.ends(agent) for agent in again] == [0, 0]
        assert not dies(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


# An orphan where our own orphans go: with these user ids (real, effective, saved), perhaps in a pid namespace of its own.
ORPHAN = """
import ctypes, os, sys
if sys.argv[2] == "inside":
    ctypes.CDLL(None).unshare(0x20000000)  # CLONE_NEWPID, for its children
ready, running = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    os.close(1)
    os.setresuid(*map(int, sys.argv[1].split(",")))
    os.execvp("sleep", ["sleep", "1000"])
os.close(running)
os.read(ready, 1)  # it has been closed by exec
print(pid)
"""
STRANGERS = {  # user ids, namespace, start time of the dead agent, job
    "of another user": ("65534,65534,65534", "", 1, "attacked"),
    "of another user, with our rights": ("65534,0,0", "", 1, "attacked"),
    "in another pid namespace": ("0,0,0", "inside", 1, "attacked"),
    "older than the agent": ("0,0,0", "", 10**15, "attacked"),
    "of another job": ("0,0,0", "", 1, "other"),
}


@root
def test_only_an_orphan_of_our_user_pid_namespace_and_job_is_ended_by_its_environment(nodes: Cluster) -> None:
    def orphan(ids: str, where: str, started: int, job: str) -> int:
        dead = f"{2**22 - 1}-{started}-{os.stat('/proc/self/ns/pid').st_ino}-0123456789abcdef"
        environment = {**os.environ, "ELASTIRUN_AGENT": dead, "TORCHELASTIC_RUN_ID": job}
        command = [sys.executable, "-c", ORPHAN, ids, where]
        return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    ours = orphan("0,0,0", "", 1, "attacked")
    strangers = {who: orphan(*how) for who, how in STRANGERS.items()}
    try:
        agent = nodes.launch(1, "--rdzv-id=attacked", "--standalone", str(nodes.script))
        nodes.worker().tell("0")
        assert nodes.ends(agent) == 0
        assert "ended 1 process of an earlier run of this job" in nodes.out(1) and dies(ours, 0)
        assert [who for who, pid in strangers.items() if dies(pid, 0)] == []
    finally:
        for pid in (ours, *strangers.values()):
            if not dies(pid, 0):
                os.kill(pid, signal.SIGKILL)


def test_a_line_break_in_a_temporary_folder_ends_no_name(nodes: Cluster) -> None:
    precious, odd = nodes.tmp_path / "precious", nodes.tmp_path / "precious\nx"
    for folder in (precious, odd):
        folder.mkdir()
    nodes.env["TMPDIR"] = str(odd)
    agent = nodes.launch(1, str(nodes.script))
    nodes.worker()
    guard = guard_of(agent)
    assert list(odd.iterdir()), "the folder for error files"
    kill(agent)
    assert dies(guard)
    assert precious.exists() and not own_files(odd)


# -- the guard


def test_a_stopped_guard_does_not_hold_up_the_end(nodes: Cluster) -> None:
    agent = nodes.launch(1, str(nodes.script))
    worker = nodes.worker()
    guard = guard_of(agent)
    os.kill(guard, signal.SIGUSR1)  # which a batch system sends to all processes
    os.kill(guard, signal.SIGSTOP)
    worker.tell("0")
    assert nodes.ends(agent, timeout=PATIENCE) == 0
    assert dies(guard) and "guard" not in nodes.out(1)


SLOW_GUARD = """
import os, selectors, sys
from elastirun.agent.processes import process_tree
process_tree._make_group = lambda name: sys.argv[1]
own = process_tree.ProcessTree("job", 0.0, selectors.PollSelector(), lambda line: None)
print(open(f"/proc/self/task/{os.getpid()}/children").read())
own.close()
"""


def test_a_guard_that_waits_for_the_death_of_a_large_worker_does_not_hold_up_the_end(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "busy").touch()
    command = [sys.executable, "-c", SLOW_GUARD, str(group)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE, check=True)
    guard = int(done.stdout)
    assert not dies(guard, 0)
    (group / "busy").unlink()
    assert dies(guard) and not group.exists()


WITHOUT_GUARD = """
import os, selectors, signal, sys
from elastirun.agent.processes import process_tree
process_tree.GUARD_RETRY = 0.0
python, selector = sys.executable, selectors.PollSelector()
own = process_tree.ProcessTree("job", 0.0, selector, lambda line: print(line, flush=True))
sys.executable = sys.argv[1]
(guard,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
os.kill(guard, signal.SIGKILL)
for key, mask in selector.select():
    key.data(mask)
own.renew(own.renewed + 1)
if sys.argv[2] == "again":
    sys.executable = python
    own.renew(own.renewed + 2)
    assert open(f"/proc/self/task/{os.getpid()}/children").read()
own.close()
print("closed")
"""


REPLACED = """
import os, selectors, signal, subprocess, sys
from elastirun.agent.processes import process_tree
def children():
    return [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
selector = selectors.PollSelector()
own = process_tree.ProcessTree("job", 0.0, selector, lambda line: None)
(first,) = children()
own.remove_folder_at_end(sys.argv[1])
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
own.add_workers([worker.pid])
os.kill(first, signal.SIGKILL)
for key, mask in selector.select():
    key.data(mask)
(second,) = set(children()) - {worker.pid}
print(worker.pid, second, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_later_guard_knows_what_the_first_one_knew(tmp_path: Path) -> None:
    """The worker has no mark in its environment."""
    folder = tmp_path / "elastirun_x"
    folder.mkdir()
    command = [sys.executable, "-c", REPLACED, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE)
    worker, second = map(int, done.stdout.split())
    assert dies_or_is_ended(worker, 10)
    assert dies(second) and not folder.exists()


@pytest.mark.parametrize("python", ["/nonexistent", "true"])
@pytest.mark.parametrize("then", ["again", "end"])
def test_without_a_guard_the_agent_goes_on_and_tries_again(python: str, then: str) -> None:
    command = [sys.executable, "-c", WITHOUT_GUARD, shutil.which(python) or python, then]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "closed", done
    assert done.stdout.count("the guard cannot be started") == 1


# -- control groups of the dead


def test_empty_groups_of_dead_agents_go_whatever_their_job(nodes: Cluster) -> None:
    own = _own_group()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control group can be made here")
    namespace, random = os.stat("/proc/self/ns/pid").st_ino, os.urandom(8).hex()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    dead, strange = own / f"elastirun-{2**22 - 1}-1-{namespace}-{random}-00000000", own / f"elastirun-{random}"
    alive, elsewhere = (own / f"elastirun-{os.getpid()}-{started}-{ns}-{random}-00000000" for ns in (namespace, 1))
    for group in (dead, strange, alive, elsewhere):
        group.mkdir()
    try:
        agent = nodes.launch(1, str(nodes.script))
        nodes.worker().tell("0")
        assert nodes.ends(agent) == 0
        assert not dead.exists()
        assert strange.exists() and alive.exists() and elsewhere.exists()
    finally:
        for group in filter(Path.exists, (dead, strange, alive, elsewhere)):
            group.rmdir()
