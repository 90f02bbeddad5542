"""``--preload``: a worker that is a fork is as one that is executed, through restarts, kills and suspensions."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.host.descriptors import ready
from tests.support.cluster import Cluster, dies
from tests.support.until import PATIENCE, until
from tests.system.preload_kills import TARGETS, one_try
from tests.system.test_endings import with_change
from tests.system.test_status import status
from tests.system.test_suspension import SUSPENDED

# Reports all that a script can see of its process. It imports these modules first, so that they are loaded in a fork and without one.
PROBE = '''"""Documented."""
import atexit, ctypes, faulthandler, gc, json, locale, logging, multiprocessing, os, pickle, random, resource, signal, sys, threading, time
import traceback, warnings

class Local:
    def __eq__(self, other): return isinstance(other, Local)

def square(queue, number): queue.put((number * number, __name__, os.environ["RANK"]))

def status(*names):
    lines = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    return {name: lines[name] for name in names}

def prctl(option):
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(option, ctypes.byref(value))
    return value.value

def kind(fd): return os.fstat(fd).st_mode

def run(how):
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    process = context.Process(target=square, args=(queue, 7))
    process.start()
    got = queue.get()
    process.join()
    return got, process.exitcode

def frames():
    try: raise ValueError
    except ValueError: return traceback.format_exc()

def look():
    names = globals()
    seen = {
        "forked": "RANK=" not in open("/proc/self/environ").read(),  # the only difference
        "dunders": sorted(n for n in names if n.startswith("__")), "name": __name__, "file": names.get("__file__"),
        "spec": getattr(__spec__, "name", None), "package": __package__, "doc": __doc__, "cached": names.get("__cached__"),
        "loader": [type(__loader__).__name__, getattr(__loader__, "path", None), getattr(__loader__, "name", None)],
        "main": sys.modules["__main__"].__dict__ is names, "annotations": names.get("__annotations__"), "builtins": str(type(__builtins__)),
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "xoptions": sys._xoptions,
        "executable": [sys.executable, sys.prefix], "warnoptions": sys.warnoptions, "filters": [str(f) for f in warnings.filters],
        "handlers": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals if s not in (9, 19)},
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "timers": [signal.getitimer(n) for n in range(3)],
        "status": status("SigIgn", "SigCgt", "SigBlk", "SigPnd", "ShdPnd", "NoNewPrivs", "Threads", "Umask", "CapEff", "Groups", "Seccomp"),
        "threads": [t.name for t in threading.enumerate()], "main thread": threading.main_thread().native_id == os.getpid(),
        "stdio": [repr(f) + str((f.write_through, f.line_buffering, f.isatty(), f.errors)) for f in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": sorted((int(f), kind(int(f))) for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")),
        "inheritable": [os.get_inheritable(fd) for fd in range(3)],
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()], "death signal": prctl(2), "subreaper": prctl(37),
        "parent": os.getppid() == int(os.environ["ELASTIRUN_AGENT"].split(",")[-1].split("-")[0]), "environ": sorted(os.environ),
        "group": "elastirun" in open("/proc/self/cgroup").read(), "cwd": os.getcwd(), "affinity": sorted(os.sched_getaffinity(0)),
        "locale": [locale.getpreferredencoding(), sys.getfilesystemencoding(), locale.setlocale(locale.LC_ALL)], "zone": time.tzname,
        "limits": [resource.getrlimit(n) for n in range(16)], "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(),
        "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(), "gc": [gc.isenabled(), gc.get_threshold()],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile(), threading.excepthook is threading.__excepthook__],
        "importers": [len(sys.meta_path), len(sys.path_hooks)], "faulthandler": faulthandler.is_enabled(),
        "logging": len(logging.root.handlers), "pickle": pickle.loads(pickle.dumps(Local())) == Local(), "frames": frames(),
        "title": [open("/proc/self/comm").read(), open("/proc/self/cmdline").read().rstrip("\\0")],
        "process": [multiprocessing.current_process().name, str(multiprocessing.parent_process())],
        "started": [run(how) for how in ("fork", "spawn", "forkserver")],
    }
    with open(os.environ["TEST_OUT"], "w") as file:
        json.dump(seen, file, default=str)
    atexit.register(sys.stdout.write, "at exit\\n")  # in one piece: the other stream goes its own way
    raise LookupError("of the script")

if __name__ == "__main__": look()
'''
# Holds up the fork server when it imports torch._dynamo, until somebody has written to a pipe.
SLOW_MACHINE = "from elastirun.agent.processes.preload import parked_forks; parked_forks.NEARLY_WITHIN = 60.0"
GATED = """
import os, sys

class Gate:
    def find_spec(self, name, *_):
        if name == "torch._dynamo" and any("forkserver" in word for word in sys.orig_argv):
            open(os.environ["TEST_GATE"]).read()

sys.meta_path.insert(0, Gate())
"""
FEW = "asyncio,multiprocessing.pool"
DRAWS = """
import json, os, signal, socket, sys
import numpy, torch
import torch.utils.data as data

class Four(data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i

if __name__ == "__main__":
    loaded = {how: [int(x) for x in data.DataLoader(Four(), num_workers=1, multiprocessing_context=how)] for how in sys.argv[1:]}
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(1)).item()
    seen = {"loaded": loaded, "compiled": compiled, "numbers": [torch.rand(1).item(), float(numpy.random.rand()), torch.initial_seed()]}
    seen["threads"] = torch.get_num_threads()
    s = socket.socket(socket.AF_UNIX)
    s.connect(os.environ["TEST_SOCKET"])
    s.sendall(json.dumps({**os.environ, "pid": os.getpid(), **seen}).encode() + b"\\n")
    sys.exit(int(s.makefile().readline()))
"""


@pytest.mark.daily(3)
@pytest.mark.parametrize(("way", "modules"), [("{}", FEW), ("./{}", FEW), ("-m {}", FEW), ("{}", "torch"), ("{}", "by default")])
def test_a_script_sees_the_same_process_as_a_fork_and_executed(nodes: Cluster, way: str, modules: str) -> None:
    folder, name = nodes.tmp_path / "scripts", "probe_of_a_worker"
    folder.mkdir()
    own = "" if modules == FEW else "import torch, torch._dynamo\n"  # with torch, only what its import does is different
    (folder / f"{name}.py").write_text(PROBE.replace("import traceback", f"{own}import traceback"))
    nodes.env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    nodes.env.pop("PET_PRELOAD", None)

    def seen(i: int, *options: str) -> tuple[dict[str, Any], list[str]]:
        out = nodes.tmp_path / "seen.json"
        nodes.env["TEST_OUT"] = str(out)
        command = way.format(name if way.startswith("-m") else f"{name}.py").split()
        nodes.launch(i, "--max-restarts=1", *options, *command, "a", "", before=("env", "-C", str(folder))).wait(PATIENCE)
        text = [line for line in nodes.out(i).splitlines() if line.startswith(("  File ", "    ", "at exit", "LookupError"))]
        return dict(json.loads(out.read_text())), text

    executed, forked = seen(1, "--preload=off"), seen(2, *([] if modules == "by default" else [f"--preload={modules}"]))
    assert (executed[0].pop("forked"), forked[0].pop("forked")) == (False, True)
    differ = {key: (executed[0][key], forked[0][key]) for key in executed[0] if executed[0][key] != forked[0][key]}
    assert differ == {}
    assert "at exit" in forked[1] and not any("forkserver" in line for line in forked[1])


def test_torch_behaves_and_no_two_workers_of_any_round_draw_the_same_numbers(nodes: Cluster) -> None:
    nodes.script.write_text(DRAWS)
    nodes.env["OMP_NUM_THREADS"] = "2"
    hows = ("fork", "spawn", "forkserver")
    agent = nodes.launch(1, "--preload=torch", "--nproc-per-node=2", "--max-restarts=1", str(nodes.script), *hows)
    first = nodes.round(2)
    first[0].tell("3")
    second = nodes.round(2, after=1)
    for worker in second:
        worker.tell("0")
    assert nodes.ends(agent) == 0
    seen: list[dict[str, Any]] = [dict(worker.env) for worker in first + second]
    assert [one["loaded"] for one in seen] == [{how: [0, 1, 2, 3] for how in hows}] * 4
    assert [(one["compiled"], one["threads"]) for one in seen] == [(3.0, 2)] * 4
    assert all(len({one["numbers"][i] for one in seen}) == 4 for i in range(3))
    assert "--preload" not in nodes.out(1), "nothing stood in the way"


def test_a_newcomer_is_seen_while_it_imports_and_the_others_train_on_until_it_is_done(nodes: Cluster) -> None:
    modules, gate = nodes.tmp_path / "modules", nodes.tmp_path / "gate"
    modules.mkdir()
    os.mkfifo(gate)
    (modules / "sitecustomize.py").write_text(GATED)
    nodes.env |= {"PYTHONPATH": str(modules), "TEST_GATE": str(gate)}
    nodes.agent(1, "--preload=off", "--last-call=0.1", nnodes="1:2")
    (worker,) = nodes.round(1)
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test", "--rdzv-conf=is_host=0", "--local-addr=127.0.0.2")
    nodes.launch(2, "--nnodes=1:2", *where, "--preload=torch", str(nodes.script), program=with_change(SLOW_MACHINE))
    with open(gate, "w"):  # the import of torch._dynamo has begun, and ends with this block
        until(lambda: len(json.loads(status(where[0], "--json").stdout)["jobs"][0]["nodes"]) >= 2, "2 nodes", state=nodes.everything)
        assert not ready([worker.connection], 2.0), "the round was ended"  # twice as long as newcomers wait for others
    assert [one.round for one in nodes.round(2, after=1)] == [2, 2]


def test_the_store_of_the_workers_can_be_served_at_once_when_their_modules_are_imported(nodes: Cluster) -> None:
    """The agent needs a part of torch for that, and imports it meanwhile."""
    gate = nodes.tmp_path / "gate"
    os.mkfifo(gate)
    (nodes.tmp_path / "sitecustomize.py").write_text(GATED)
    nodes.env |= {"PYTHONPATH": str(nodes.tmp_path), "TEST_GATE": str(gate)}
    agent = nodes.launch(1, "--preload=torch", str(nodes.script), program=with_change(SLOW_MACHINE))
    with open(gate, "w"):  # the import of torch._dynamo has begun, and ends with this block
        maps = Path(f"/proc/{agent.pid}/maps")
        until(lambda: "libtorch" in maps.read_text(), "torch in the agent", state=nodes.everything, pause=0.05)
    (worker,) = nodes.round(1)
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_kill_leaves_nothing_and_the_job_goes_on(target: str) -> None:
    assert one_try(target, random.uniform(0.0, 1.0)).wrong == []


def test_forks_that_the_guard_may_be_killing_become_no_workers(nodes: Cluster) -> None:
    """After a suspension beyond the lease. Each such worker would cost a restart, of which there is none."""
    where = (f"--rdzv-endpoint=127.0.0.1:{nodes.port}", "--rdzv-id=test", "--rdzv-conf=is_host=1", "--last-call=0.1")
    options = ("--nnodes=1:2", *where, "--preload=json", "--forward-signals=SIGUSR1", str(nodes.script))
    agent = nodes.launch(1, *options, program=with_change(SUSPENDED))
    (worker,) = nodes.round(1)
    agent.send_signal(signal.SIGUSR1)
    assert dies(worker.pid)
    (again,) = nodes.round(1, after=1)
    again.tell("exit 0")
    assert nodes.ends(agent) == 0
