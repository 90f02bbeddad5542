"""Workers that are forks of a fork server: like executed ones, and executed wherever they could not be."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastirun import linux
from elastirun.agent.host.descriptors import ready
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.processes import kills, marks, proc
from elastirun.agent.processes.preload import forkserver, parked_forks, server_start
from elastirun.agent.processes.preload.parked_forks import ParkedForks
from elastirun.agent.processes.process_tree import PR_SET_CHILD_SUBREAPER, ProcessTree
from elastirun.agent.processes.spawn import Spawned, WorkerSpec
from elastirun.config import Preload
from elastirun.progress import EXIT_LIMIT
from elastirun.worker.progress_page import VARIABLE
from tests.support.cluster import PATIENCE, dies
from tests.support.descriptors import descriptors

HOW = """import sys
outermost = sys._getframe()
while outermost.f_back:
    outermost = outermost.f_back
print('forked' if outermost.f_code.co_filename.endswith('forkserver.py') else 'executed')
"""


WAITS = """import os
for process in ended:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
"""  # until the processes have ended; they are not reaped


class Spared:
    """What the agent's process tree knows of the server."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.spare, self.spare_no_longer = self.sessions.add, self.sessions.discard


class Agent:
    """Has parked forks, and starts workers that run a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.selector = selectors.DefaultSelector()
        self.said: list[str] = []
        self.spared = Spared()
        self.spec = WorkerSpec(0, 0, (sys.executable, "-u", str(self.script)), {**os.environ, "PYTHONPATH": str(folder / "modules")})
        self.forks: ParkedForks | None = None

    def start(self, *modules: str, count: int = 1, tried: tuple[str, ...] = ()) -> ParkedForks:
        forks = self.begin(*modules, count=count, tried=tried)
        self.turn(lambda: not forks.loading)
        return forks

    def begin(self, *modules: str, count: int = 1, tried: tuple[str, ...] = ()) -> ParkedForks:
        tree: Any = self.spared
        self.forks = ParkedForks(Preload(modules, tried), self.spec, count, self.selector, tree, self.said.append)
        return self.forks

    def turn(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, self.said
            self.look(0.05)

    def look(self, seconds: float) -> None:
        for key, mask in self.selector.select(seconds):
            key.data(mask)

    def server(self) -> int:
        assert self.forks is not None
        (pid,) = self.forks.pids
        return pid

    def worker(self, code: str = HOW, *arguments: str, pause: float = 0.0, **env: str) -> tuple[Spawned, int]:
        """Start a worker that runs ``code``. Return it and the read end of its stdout."""
        assert self.forks is not None
        self.script.write_text(code)
        read, write = os.pipe()
        try:
            spec = replace(self.spec, argv=(*self.spec.argv, *arguments), env={**self.spec.env, **env}, pause=pause)
            return self.forks.spawn(spec, write, write), read
        finally:
            os.close(write)

    def output(self, code: str = HOW, *arguments: str, **env: str) -> str:
        """Return what a worker has written when it has ended."""
        started, read = self.worker(code, *arguments, **env)
        with open(read) as file:
            text = file.read()
        assert ended(started) == 0, text
        return text.strip()


def ended(started: Spawned) -> int:
    found = os.waitid(linux.P_PIDFD, started.pidfd, os.WEXITED)
    os.close(started.pidfd)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def parked(agent: Agent) -> list[int]:
    """Wait until there is a fork that waits, and return all of them."""
    found: list[int] = []

    def there() -> bool:
        found[:] = [p.pid for pid in proc.children(os.getpid()) if (p := proc.look(pid)) and p.alive and p.session == agent.server() != pid]
        return bool(found)

    agent.turn(there)
    return found


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for limit in ("FORK_LIMIT", "KILL_LIMIT"):  # a busy machine may stand still for longer than an agent waits
        monkeypatch.setattr(parked_forks, limit, PATIENCE)
    (tmp_path / "modules").mkdir()
    before = descriptors()
    made = Agent(tmp_path)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield made
    finally:
        sessions = set(made.spared.sessions)
        if made.forks:
            made.forks.close()
        made.selector.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        left = [pid for pid, process in proc.descendants(os.getpid()).items() if process.session in sessions and not dies(pid)]
        for pid in proc.children(os.getpid()):
            if (found := proc.look(pid)) and found.session in sessions:
                os.waitpid(pid, 0)
    assert (left, made.spared.sessions, descriptors()) == ([], set(), before)


def test_a_fork_that_has_to_wait_begins_its_script_later(agent: Agent) -> None:
    agent.start("json")
    began = time.monotonic()
    started, read = agent.worker("import json, sys\nprint('json' in sys.modules)", pause=0.3)
    with open(read) as said:
        assert said.read() == "True\n" and time.monotonic() - began >= 0.3
    assert ended(started) == 0


def module(agent: Agent, name: str, text: str) -> None:
    (agent.folder / "modules" / f"{name}.py").write_text(text)


def test_a_worker_is_a_fork_that_has_the_modules_and_leads_a_session_of_its_own(agent: Agent) -> None:
    module(agent, "slow", "")
    agent.start("slow")
    code = "import os, sys\nprint('slow' in sys.modules, os.getsid(0) == os.getpgrp() == os.getpid(), os.getppid(), *sys.argv[1:])"
    assert agent.output(code, "a", "b c") == f"True True {os.getpid()} a b c"


@pytest.mark.parametrize(("modules", "within", "nearly"), [("torch", 99.0, True), ("torch", 0.0, False), ("torch,gated", 99.0, False)])
def test_that_only_a_part_of_torch_is_missing_is_told(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, modules: str, within: float, nearly: bool
) -> None:
    """How long another module takes nobody knows, nor how long a part does where torch itself took long."""
    monkeypatch.setattr(parked_forks, "NEARLY_WITHIN", within)
    gate = agent.folder / "gate"
    waits = f"open({str(gate)!r}).read()"
    os.mkfifo(gate)
    (agent.folder / "modules" / "torch").mkdir()
    module(agent, "torch/__init__", "")
    module(agent, "torch/_dynamo", waits if modules == "torch" else "")
    module(agent, "gated", waits)
    forks = agent.begin(*modules.split(","))
    with open(gate, "w"):  # the import of the last one has begun, and ends with this block
        agent.look(0.5)
        assert forks.loading and forks.nearly_loaded == nearly
    agent.turn(lambda: not forks.loading)


LEAVES = {
    "a thread": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "a descriptor": "file = open('/dev/zero')",
    "a variable of the rank": "rank = os.environ.get('RANK', '0')",
    "a crash": "hasattr(__main__, 'hook') or os.kill(os.getpid(), 11)",
    "a process": "process = hasattr(__main__, 'hook') or subprocess.Popen(['sleep', '1000'])",
    "a hook": "atexit.register(print)",
    "an error": "__main__.hook",
    "a word": "print('odd')",
    "many words": "os.write(2, bytes(1 << 20))",
}


@pytest.mark.daily(3)
@pytest.mark.parametrize("left", LEAVES)
def test_of_the_modules_that_are_tried_those_that_forks_can_share_are_there(agent: Agent, left: str) -> None:
    for name in ("first", "last"):
        module(agent, name, "")
    module(agent, "odd", f"import atexit, os, subprocess, sys, threading, time, __main__\n{LEAVES[left]}")
    agent.start("json.tool", tried=("first", "odd", "last"))
    had = "import sys\nprint(*(name in sys.modules for name in ('json.tool', 'first', 'odd', 'last')))"
    assert agent.output(f"{HOW}{had}").split() == ["forked", "True", "True", "False", "True"]
    assert agent.said == []


def test_nothing_is_started_without_modules(agent: Agent) -> None:
    agent.start()
    assert agent.forks and agent.forks.pids == () and agent.output() == "executed"


@pytest.mark.parametrize("lacking", ["a descriptor", "a process"])
def test_where_no_server_can_be_started_it_is_tried_again(agent: Agent, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    before = descriptors()
    with monkeypatch.context() as patch:
        if lacking == "a descriptor":
            patch.setattr(socket, "socketpair", refuse)
        else:
            patch.setattr(server_start, "spawn", refuse)
        forks = agent.begin("heavy")
        forks.refill()
    assert agent.said == ["--preload: the fork server cannot be started: Too many open files"] and descriptors() == before
    forks.refill()
    agent.turn(lambda: not forks.loading)
    assert forks.parked == 1


def test_as_many_forks_wait_as_are_wanted(agent: Agent) -> None:
    forks = agent.start("json", count=3)
    agent.turn(lambda: len(parked(agent)) == 3)
    assert agent.output() == "forked" and forks.parked == 2
    forks.refill()
    agent.turn(lambda: len(parked(agent)) == 3)


def test_the_rounds_own_names_reach_the_fork_and_nothing_else_may_differ(agent: Agent) -> None:
    forks = agent.start("json", count=2)
    code = f"{HOW}import os\nprint(os.environ.get('RANK'), os.environ.get('OTHER'), os.environ.get('MASTER_ADDR'))"
    assert agent.output(code, RANK="3", MASTER_ADDR="here").split() == ["forked", "3", "None", "here"]
    assert agent.output(code, RANK="4", OTHER="x").split() == ["executed", "4", "x", "None"]
    assert len(agent.said) == 1 and "(OTHER)" in agent.said[0]
    forks.refill()
    agent.turn(lambda: not forks.loading)
    assert agent.output(code, RANK="5", OTHER="x").split() == ["forked", "5", "x", "None"]


def test_a_server_that_dies_is_replaced_and_workers_are_executed_meanwhile(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_forks, "RESTART_AFTER", 0.0)
    forks = agent.start("json")
    (waiting,), first = parked(agent), agent.server()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    agent.turn(lambda: first not in forks.pids)
    assert dies(waiting)  # its socket has closed, a moment before
    assert forks.pids and forks.loading and agent.output() == "executed"
    agent.turn(lambda: not forks.loading)
    assert agent.output() == "forked"
    assert [line.partition("; ")[2] for line in agent.said] == ["another one is started", "workers are executed until they are"]


def test_a_fork_that_does_not_answer_is_killed_and_its_worker_executed(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_forks, "FORK_LIMIT", 0.3)
    forks = agent.start("json", count=2)
    agent.turn(lambda: len(parked(agent)) == 2)
    for pid in parked(agent):
        os.kill(pid, signal.SIGSTOP)
    assert agent.output() == "executed" and forks.pids == () and len(agent.said) == 1
    forks.refill()
    agent.turn(lambda: not forks.loading)
    assert agent.output() == "forked"


def test_a_fork_that_answers_when_the_agent_waits_no_longer_runs_nothing(agent: Agent) -> None:
    forks = agent.start("json")
    (pid,), job = parked(agent), forks._parked.popleft()
    agent.script.write_text(HOW)
    read, write = os.pipe()
    assert int(job.recv(32)) == pid
    socket.send_fds(job, [json.dumps({"argv": agent.spec.argv, "own": {}}).encode() + b"\n"], [write, write])
    os.close(write)
    assert job.recv(1) == b"\n"
    job.close()
    with open(read) as file:
        assert file.read() == ""
    os.waitpid(pid, 0)


def test_a_fork_that_was_killed_is_passed_over(agent: Agent) -> None:
    agent.start("json", count=2)
    agent.turn(lambda: len(parked(agent)) == 2)
    os.kill(parked(agent)[0], signal.SIGKILL)
    assert agent.output() == "forked"


def test_a_process_that_has_the_number_of_a_fork_that_was_killed_is_left_alone(agent: Agent) -> None:
    forks = agent.start("json")
    parked(agent)
    stranger = subprocess.Popen(["sleep", "1000"])
    ours, theirs = socket.socketpair()
    theirs.send(b"%d\n" % stranger.pid)
    forks._parked.appendleft(ours)
    try:
        assert agent.output() == "forked"
        assert stranger.poll() is None and not dies(stranger.pid, 0.2)
    finally:
        theirs.close()
        stranger.kill()
        stranger.wait()


def test_signals_are_ignored_without_work_and_none_is_lost_afterwards(agent: Agent) -> None:
    agent.start("json")
    (waiting,) = parked(agent)
    for pid in (waiting, agent.server()):
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(pid, signum)
    started, read = agent.worker(f"{HOW}import time\ntime.sleep(5)")
    os.kill(started.pid, signal.SIGTERM)  # at once, before the script can have begun
    os.close(read)
    assert (started.pid, ended(started)) == (waiting, -signal.SIGTERM)


def test_no_worker_has_the_descriptors_of_another(agent: Agent) -> None:
    agent.start("json", count=2)
    code = "import os, sys\nprint(len(os.listdir('/proc/self/fd')) - 1, flush=True)\nsys.argv[1:] and __import__('time').sleep(1000)"
    first, of_first = agent.worker(code, "wait")
    second, of_second = agent.worker(code)
    with open(of_second) as file:
        assert file.read() == "3\n", "the other worker holds the pipe, or this one has more than its three"
    os.kill(first.pid, signal.SIGKILL)
    with open(of_first) as file:
        assert file.read() == "3\n"
    assert (ended(first), ended(second)) == (-signal.SIGKILL, 0)


def test_an_error_is_shown_without_our_frame(agent: Agent) -> None:
    agent.start("json")
    started, read = agent.worker("def f():\n    raise ValueError('mine')\nf()")
    with open(read) as file:
        text = file.read()
    assert "ValueError: mine" in text and "forkserver" not in text and text.count("File ") == 2 and ended(started) == 1


def test_an_interrupt_that_nobody_catches_ends_a_worker_by_the_signal(agent: Agent) -> None:
    agent.start("json")
    started, read = agent.worker("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    os.close(read)
    assert ended(started) == -signal.SIGINT


@pytest.mark.parametrize("kind", ["a folder", "a zip", "a module of the same name", "an error of syntax", "no file"])
def test_a_script_that_a_fork_would_run_otherwise_is_executed(agent: Agent, kind: str) -> None:
    agent.start("json.tool", "wave")
    status = 0
    if kind == "a folder":
        agent.script.mkdir()
        (agent.script / "__main__.py").write_text(HOW)
    elif kind == "a zip":
        with zipfile.ZipFile(agent.script, "w") as archive:
            archive.writestr("__main__.py", HOW)
    elif kind == "a module of the same name":
        agent.script.write_text(f"import wave\nprint(wave.mine)\n{HOW}")
        (agent.folder / "wave.py").write_text("mine = 'mine'")
    elif kind == "an error of syntax":
        agent.script.write_text("def")
        status = 1
    else:
        status = 2
    read, write = os.pipe()
    assert agent.forks
    started = agent.forks.spawn(agent.spec, write, write)
    os.close(write)
    with open(read) as file:
        text = file.read()
    assert ended(started) == status
    if status == 0:
        assert text.splitlines()[-1] == "executed" and ("mine" in text) == ("name" in kind)
    else:
        assert "forkserver" not in text and str(agent.script) in text
    agent.turn(lambda: bool(agent.said))
    assert agent.said[0].endswith("; workers are executed")


def test_a_module_that_reads_a_variable_of_its_rank_is_left_out(agent: Agent) -> None:
    module(agent, "curious", "import os\nrank = os.environ.get('RANK', '0')")
    forks = agent.start("json.tool", "curious")
    agent.turn(lambda: not forks.loading)
    assert agent.said == ["--preload: curious is not imported: importing it reads RANK, which differs between workers"]
    assert agent.output("import sys\nprint('json.tool' in sys.modules, 'curious' in sys.modules)") == "True False"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "1 thread"),
        ("import subprocess\nprocess = subprocess.Popen(['sleep', '1000'])", "a process running"),
    ],
    ids=["a thread", "a process"],
)
def test_a_module_that_leaves_something_behind_makes_all_workers_executed(agent: Agent, text: str, left: str) -> None:
    module(agent, "busy", text)
    forks = agent.start("busy")
    forks.refill()
    assert forks.pids == () and agent.output() == "executed"
    assert agent.said == [f"--preload: importing busy left {left}, which forks cannot share; workers are executed"]


def test_a_process_that_a_module_has_started_and_that_has_ended_is_no_obstacle(agent: Agent) -> None:
    module(agent, "asks", "import subprocess\nended = [subprocess.Popen(['true']), subprocess.Popen(['true'])]\n" + WAITS)
    agent.start("asks")
    assert agent.output() == "forked" and agent.said == []


def test_a_module_sees_the_command_line_of_the_worker(agent: Agent) -> None:
    module(agent, "parser", "import sys\nseen = list(sys.argv)")
    agent.spec = replace(agent.spec, argv=(*agent.spec.argv, "--lr=1"))
    agent.start("parser")
    assert agent.output(f"{HOW}import parser, sys\nprint(parser.seen == sys.argv)").split() == ["forked", "True"]


def test_a_module_that_is_missing_is_named_and_the_others_are_there(agent: Agent) -> None:
    agent.start("nowhere", "json.tool")
    assert agent.said == ["--preload: nowhere cannot be imported: ModuleNotFoundError: No module named 'nowhere'"]
    assert agent.output(f"{HOW}import sys\nprint('json.tool' in sys.modules)").split() == ["forked", "True"]


MANY = """import gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
for _ in range(10_000):
    loop = []
    loop.append(loop)
gc.callbacks.pop()
"""


@pytest.mark.parametrize("change", ["pass", "gc.set_threshold(4321, 12, 13)", "gc.set_threshold(gc.get_threshold()[0] * 3, 11)"])
def test_no_garbage_is_collected_while_modules_are_imported_and_as_always_in_forks(agent: Agent, change: str) -> None:
    module(agent, "many", MANY)
    module(agent, "changes", f"import gc\n{change}")
    agent.start("many", "changes")
    code = f"{HOW}import gc, many\nprint(many.collections, *gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 1000)"
    alone = subprocess.run([sys.executable, "-c", f"import gc\n{change}\nprint(*gc.get_threshold())"], capture_output=True, text=True)
    assert agent.output(code).splitlines() == ["forked", f"[] {alone.stdout.strip()} True True"]


def test_a_worker_that_is_bound_to_cpus_is_executed(agent: Agent) -> None:
    agent.start("json")
    agent.spec = replace(agent.spec, cpus=frozenset(os.sched_getaffinity(0)))
    assert agent.output() == "executed"


@pytest.mark.daily(3)
def test_every_fork_draws_other_numbers(agent: Agent) -> None:
    agent.start("torch", "numpy", "multiprocessing", count=2)
    code = f"{HOW}import multiprocessing, numpy, random, torch\nprint(torch.initial_seed(), torch.rand(1).item())\n"
    code += "print(numpy.random.rand(), random.random(), multiprocessing.current_process().authkey.hex())"
    one, other = agent.output(code).split(), agent.output(code).split()
    assert one[0] == other[0] == "forked" and not {*one[1:]} & {*other[1:]}


STEPS = """
import os, sys, torch
assert "elastirun.progress" not in sys.modules
weight = torch.nn.Parameter(torch.ones(3))
optimizers = {name: getattr(torch.optim, name)([weight], lr=0.1) for name in ("SGD", "AdamW")}
compiled = torch.compile(lambda: optimizers["AdamW"].step(), backend="eager")
for step in range(3):
    weight.sum().backward()
    optimizers["SGD"].step()
    compiled()
if (child := os.fork()) == 0:
    optimizers["SGD"].step()
    os._exit(0)
os.waitpid(child, 0)
if "pause" in sys.argv:
    from elastirun.progress import progress
    progress(within=6000)
    optimizers["SGD"].step()
if "stamps" in sys.argv:
    from elastirun.train import progress
    progress()
    optimizers["SGD"].step()
    progress()
print(os.getpid())
"""


@pytest.mark.daily(3)
def test_the_steps_of_torchs_optimizers_are_stamped_in_a_fork_until_the_script_stamps_its_own(agent: Agent) -> None:
    pages = ProgressPages()
    try:
        agent.start("torch", count=3)
        for arguments, steps in ((), 6), (("pause",), 8), (("stamps",), 8):
            (path,) = pages.renew(1)
            pid = int(agent.output(STEPS, *arguments, **{VARIABLE: path}).split()[-1])  # the compiler has something to say before
            found = pages.read(0)
            assert found and (found.pid, found.steps) == (pid, steps)
            assert EXIT_LIMIT <= found.within / 1e9 < 2 * EXIT_LIMIT  # to exit; not what the script asked for
    finally:
        pages.close()


@pytest.mark.parametrize("modules", [{}, {"torch.optim.optimizer": types.ModuleType("old")}])
def test_without_torch_or_with_an_old_one_there_is_no_hook_and_no_error(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> None:
    monkeypatch.setenv(VARIABLE, "/a/page")
    before = {name: dict(vars(module)) for name, module in modules.items()}
    monkeypatch.setattr(sys, "modules", modules)
    forkserver.stamp_steps()
    monkeypatch.undo()
    assert {name: dict(vars(module)) for name, module in modules.items()} == before


def test_a_step_is_no_error_where_our_package_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "on_step", None)
    monkeypatch.setitem(sys.modules, "elastirun.worker.optimizer_steps", None)
    for _ in range(2):
        forkserver.on_optimizer_step("optimizer", (), {})
    assert forkserver.on_step is int, "the import is tried once"


def test_a_spared_session_is_left_alone_until_it_is_spared_no_longer() -> None:
    tree = ProcessTree.__new__(ProcessTree)  # without a guard: nothing is to be killed
    tree._evidence = kills.Traces(marks.own(), "", strict=False)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        tree.spare(child.pid)
        spared = not tree.owns(child.pid)
        tree.spare_no_longer(child.pid)
        owned = tree.owns(child.pid)
        child.kill()
    assert spared and owned


def test_names_of_the_round_are_no_part_of_the_servers_environment(agent: Agent) -> None:
    agent.spec = replace(agent.spec, env={**agent.spec.env, "RANK": "1"})
    agent.start("json")
    assert not [name for name in forkserver.ROUND_NAMES if proc.value_of(name, proc.environment(agent.server()))]


def test_a_fork_server_says_nothing_when_the_agent_dies_with_its_report_unread() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-u", forkserver.__file__, str(os.getpid()), str(theirs.fileno()), "json", "", sys.executable, "-u", "x.py"]
    with theirs:
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    with server:
        assert ready([ours.fileno()], PATIENCE), "the report has come"
        ours.close()
        assert server.stderr and server.stderr.read() == b"" and server.wait() == 1
