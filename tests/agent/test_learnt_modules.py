"""``--preload=auto``: modules that workers import are imported for the next ones, unless that would change what those do."""

from __future__ import annotations

import importlib.machinery
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastirun import clock, linux
from elastirun.agent.processes.preload import forkserver
from elastirun.agent.processes.preload.parked_forks import AUTO, LEARN_AFTER, LEARN_LIMIT
from tests.agent.test_parked_forks import HOW, Agent, agent, parked

__all__ = ["agent"]  # the fixture
SLOW = "import time\ntime.sleep(0.1)\n"


def installed(agent: Agent, name: str, text: str) -> None:
    """Install a module of this text. ``name``: its path without ".py"."""
    folder = agent.folder / "site-packages"
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    path = f"{folder}:{agent.folder / 'modules'}"
    agent.spec = replace(agent.spec, env={**agent.spec.env, "PYTHONPATH": path})


def learn(agent: Agent, code: str, *names: str) -> None:
    """Run a worker with this code, wait until the agent knows the names, and let the fork server try the modules."""
    forks = agent.start(AUTO)
    assert agent.output(f"{HOW}{code}").splitlines()[0] == "forked"
    agent.turn(lambda: {*names} <= forks._learnt.keys())
    forks.refill()
    parked(agent)
    assert clock.now() < forks.tick(clock.now()) < math.inf, "a worker may be about to import more"
    assert forks.tick(clock.now() + LEARN_AFTER) > clock.now() + LEARN_LIMIT
    agent.turn(lambda: forks._server is None or not forks._server.learning)


def has(agent: Agent, *names: str) -> list[bool]:
    """Return which modules a new worker has before it imports any."""
    how, *found = agent.output(f"{HOW}import sys\nprint(*(name in sys.modules for name in {names!r}))").split()
    assert how == "forked"
    return [text == "True" for text in found]


def test_what_a_worker_has_imported_the_next_ones_have_from_the_start(agent: Agent) -> None:
    installed(agent, "heavy", SLOW)
    installed(agent, "second", SLOW)
    learn(agent, "import heavy\nimport second\nimport json", "heavy", "second")
    assert agent.said == ["--preload: workers of the next rounds need not import heavy, second"]
    assert has(agent, "heavy", "second") == [True, True]


def test_a_worker_that_is_killed_has_told_what_it_imported(agent: Agent) -> None:
    installed(agent, "heavy", SLOW)
    forks = agent.start(AUTO)
    started, read = agent.worker("import heavy\nimport time\ntime.sleep(1000)")
    agent.turn(lambda: "heavy" in forks._learnt)
    os.kill(started.pid, 9)
    os.waitid(linux.P_PIDFD, started.pidfd, os.WEXITED)
    os.close(started.pidfd)
    os.close(read)
    assert "heavy" in forks._learnt


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "importing odd left 1 thread"),
        ("file = open('/dev/zero')", "importing odd left /dev/zero open, which forks would share"),
        ("import os\nrank = os.environ.get('RANK', '0')", "importing it reads RANK, which differs between workers"),
        (
            "import sys, types\nsys.modules['torch._C'] = types.SimpleNamespace(_cuda_isInBadFork=lambda: True)",
            "importing odd left CUDA initialised, which forks cannot share",
        ),
        ("import os, __main__\nhasattr(__main__, 'hook') or os.kill(os.getpid(), 11)", "its import ends the process"),
        (
            "import subprocess, __main__\nprocess = hasattr(__main__, 'hook') or subprocess.Popen(['sleep', '1000'])",
            "importing odd left a process running, which forks cannot share",
        ),
        (
            "import os, __main__\nif not hasattr(__main__, 'hook') and os.fork() == 0:\n    time.sleep(1000)",
            "importing odd left a process running, which forks cannot share",
        ),
        ("import __main__\n__main__.hook", "it cannot be imported without the script: AttributeError: "),
    ],
    ids=["a thread", "a descriptor", "a variable of the rank", "CUDA", "a crash", "a process", "a fork", "an error"],
)
def test_a_module_that_forks_cannot_share_is_dropped_and_the_others_are_learnt(agent: Agent, text: str, why: str) -> None:
    installed(agent, "odd", f"{SLOW}{text}")
    installed(agent, "heavy", SLOW)
    code = "hook = 1\ntry:\n    import no_such_module\nexcept ImportError:\n    pass\nimport heavy\nimport odd"
    learn(agent, code, "odd", "heavy")
    assert len(agent.said) == 2 and agent.said[0].startswith(f"--preload: odd is not imported: {why}"), agent.said
    assert has(agent, "odd", "heavy") == [False, True]


def test_a_part_of_a_module_that_was_left_out_does_not_bring_it_in(agent: Agent) -> None:
    installed(agent, "torch/__init__", SLOW)
    installed(agent, "torch/_dynamo", SLOW)
    learn(agent, "import os\nos.environ['MODE'] = 'of the script'\nimport torch._dynamo", "torch", "torch._dynamo")
    assert len(agent.said) == 1 and "torch is not imported: environment variables were changed" in agent.said[0]
    assert has(agent, "torch", "torch._dynamo") == [False, False]
    assert agent.forks
    agent.forks.refill()
    assert has(agent, "torch", "torch._dynamo") == [False, False], "of a fork that was made afterwards"


def test_a_trial_that_does_not_end_is_given_up(agent: Agent) -> None:
    installed(agent, "odd", f"{SLOW}import __main__, signal\nhasattr(__main__, 'hook') or [signal.alarm(0), time.sleep(1000)]")
    forks = agent.start(AUTO)
    assert agent.output(f"{HOW}hook = 1\nimport odd") == "forked"
    agent.turn(lambda: "odd" in forks._learnt)
    forks.refill()
    now = clock.now()
    limit = forks.tick(now + LEARN_AFTER)
    assert [agent.output(), agent.output()] == ["forked", "executed"], "no fork is made meanwhile"
    assert forks.tick(limit - 1) == limit
    assert forks.tick(limit) == math.inf and forks.pids == ()
    assert agent.said == [
        "--preload: modules that the workers import are still being tried; workers are executed until that is done",
        "--preload: a trial takes more than 300 s; modules that the workers import are not tried any more",
    ]


def test_a_module_that_is_imported_quickly_is_not_worth_it(agent: Agent) -> None:
    installed(agent, "light", "")
    learn(agent, "import light", "light")
    assert agent.said == [] and has(agent, "light") == [False]


def test_a_module_that_is_looked_for_and_not_imported_is_not_learnt(agent: Agent) -> None:
    for name in ("heavy", "second"):
        installed(agent, name, SLOW)
    learn(agent, "from importlib.util import find_spec\nassert find_spec('second')\nimport heavy", "heavy")
    assert has(agent, "heavy", "second") == [True, False]


def test_the_users_own_modules_are_never_imported_for_the_workers(agent: Agent) -> None:
    """Neither those beside the script, though a package has the same name, nor those in a folder that nothing was installed into."""
    (agent.folder / "mine.py").write_text(SLOW)
    installed(agent, "mine", SLOW)
    (agent.folder / "modules" / "ours.py").write_text(SLOW)
    learn(agent, "import mine\nimport ours\nassert 'site-packages' not in mine.__file__", "ours")
    assert agent.said == [] and has(agent, "mine", "ours") == [False, False]


def test_a_new_server_learns_again(agent: Agent) -> None:
    installed(agent, "heavy", SLOW)
    learn(agent, "import heavy", "heavy")
    assert agent.forks
    forks = agent.forks
    forks.drop()
    forks.refill()
    agent.turn(lambda: not forks.loading)
    forks.tick(clock.now() + 2 * LEARN_AFTER)
    agent.turn(lambda: forks._server is not None and not forks._server.learning)
    assert has(agent, "heavy") == [True]


@pytest.mark.parametrize("before", ["os.environ['MODE'] = 'of the script'", "del os.environ['MODE']"])
def test_a_module_before_whose_import_the_script_changes_a_variable_is_not_learnt(agent: Agent, before: str) -> None:
    for name in ("first", "heavy"):
        installed(agent, name, SLOW)
    agent.spec = replace(agent.spec, env={**agent.spec.env, "MODE": "of the job"})
    own = "os.environ['RANK'] = '9'\nos.environ.pop('LOCAL_RANK', None)"  # variables of a worker make no difference
    learn(agent, f"import first, os\n{own}\n{before}\nimport heavy", "first", "heavy")
    assert len(agent.said) == 2 and "heavy is not imported: environment variables were changed before its import" in agent.said[0]
    assert has(agent, "first", "heavy") == [True, False]


def test_a_module_that_changes_a_variable_itself_does_so_for_those_that_follow(agent: Agent) -> None:
    installed(agent, "sets", f"{SLOW}import os\nos.environ['MODE'] = 'of the module'")
    installed(agent, "heavy", SLOW)
    learn(agent, "import sets\nimport heavy", "sets", "heavy")
    found = agent.output(f"{HOW}import os, sys\nprint('sets' in sys.modules, 'heavy' in sys.modules, os.environ['MODE'])")
    assert found.split() == ["forked", "True", "True", "of", "the", "module"]


def test_nothing_is_learnt_of_a_script_that_changes_sys_path(agent: Agent) -> None:
    for name in ("first", "vendored"):
        installed(agent, name, SLOW)
    (agent.folder / "other").mkdir()
    (agent.folder / "other" / "vendored.py").write_text("mine = True")
    learn(agent, f"import first, sys\nsys.path.insert(0, {str(agent.folder / 'other')!r})\nimport vendored\nassert vendored.mine", "first")
    assert has(agent, "first", "vendored") == [True, False]


def test_what_a_worker_tells_is_not_trusted(agent: Agent) -> None:
    forks = agent.start(AUTO)
    forks._hear_of(["+a b", "+a", "a 1", "+a.b 1", "+" + "x" * 200 + " 1", "+os;exit 1", "+é 1", "+c 99999999999"])
    assert forks._learnt == {"a.b": "1"}
    forks._hear_of(f"+m{i} 1" for i in range(1000))
    assert len(forks._learnt) == forkserver.MOST_NAMES


def test_a_module_that_does_other_things_than_on_trial_ends_the_learning(agent: Agent) -> None:
    count = agent.folder / "count"
    again = f"import threading\nwith open({str(count)!r}, 'a') as file:\n    file.write('x')\nif open({str(count)!r}).read() == 'xxx':\n"
    installed(agent, "odd", f"{SLOW}{again}    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()")
    installed(agent, "heavy", SLOW)
    learn(agent, "import odd", "odd")
    assert agent.said == ["--preload: importing odd went otherwise than on trial; modules that the workers import are not tried any more"]
    forks = agent.forks
    assert forks
    forks._modules = ("json.tool",)
    forks.refill()
    agent.turn(lambda: not forks.loading)
    assert has(agent, "odd", "json.tool") == [False, True]
    assert forks.tick(clock.now() + 2 * LEARN_AFTER) == math.inf and len(agent.said) == 1


def test_a_script_that_closes_all_descriptors_gets_no_names_into_its_sockets(agent: Agent) -> None:
    installed(agent, "heavy", SLOW)
    agent.start(AUTO)
    code = f"{HOW}import os, select, socket\nos.closerange(3, 64)\npairs = [socket.socketpair() for _ in range(20)]\nimport heavy\n"
    assert agent.output(f"{code}print(select.select([one for pair in pairs for one in pair], [], [], 0)[0])").split() == ["forked", "[]"]
    assert agent.forks and not agent.forks._learnt


def test_without_auto_a_worker_tells_nothing(agent: Agent) -> None:
    agent.start("json")
    code = f"{HOW}import sys\nprint(['Reporter' in str(finder) for finder in sys.meta_path].count(True))"
    assert agent.output(code).split() == ["forked", "0"]


def test_data_beside_the_script_has_no_name_of_a_module(tmp_path: Path) -> None:
    """A file ``queue.list`` kept all workers from being forks of a process that had imported ``queue``."""
    for name in ("queue.list", "json.txt", "own.py", "fast.cpython-311-x86_64-linux-gnu.so", "old.pyc", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "package").mkdir()
    found = forkserver.names_in(str(tmp_path))
    assert {"own", "old", "package"} <= found and not {"queue", "json", "hidden"} & found
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"built{suffix}").touch()
    assert "built" in forkserver.names_in(str(tmp_path))
