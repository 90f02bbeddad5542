"""``elastirun.launch`` runs a function on workers, like torch's elastic_launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import elastirun
from elastirun.errors import UsageError
from elastirun.functions import command_line
from tests.support.cluster import dies
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import dataclasses, os, signal, sys
import elastirun
from elastirun.errors import JobFailed

@dataclasses.dataclass
class Point:
    x: int

def work(kind, point):
    rank, number = int(os.environ["RANK"]), int(os.environ["ELASTIRUN_ROUND"])
    if kind == "wait":
        print("pids", os.getpid(), os.getppid(), flush=True)
        signal.pause()
    if rank == 1 and (kind == "fail" or (kind == "once" and number == 1)):
        raise ValueError(f"no such data in round {number}")
    return rank, number, Point(point.x + 1), sys.argv[1:]

if __name__ == "__main__":
    options = {"fail_fast": True, "max_restarts": 1, "set": {"restart-pause": 0}} if sys.argv[1] == "once" else {}
    try:
        print(elastirun.launch(work, (sys.argv[1], Point(3)), nproc_per_node=int(sys.argv[2]), **options))
    except JobFailed as error:
        print("failed", error.exit_code, error.cause, error.details.splitlines()[-1:])
"""


TENSORS = """
import elastirun, torch
def double(x):
    return 2 * x
if __name__ == "__main__":
    print(elastirun.launch(double, (torch.ones(3),))[0].tolist())
"""


def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}


def run(tmp_path: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    line = [sys.executable, str(path), *arguments]
    done = subprocess.run(
        line, cwd=tmp_path, env=environ(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert [path.name for path in tmp_path.glob("elastirun*")] == [], "no folder stays"
    return done


def test_what_the_workers_return_comes_back_by_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "fine", "2")
    assert done.stdout == f"{{0: (0, 1, Point(x=4), {['fine', '2']}), 1: (1, 1, Point(x=4), {['fine', '2']})}}\n", done.stderr
    assert done.stderr == ""


def test_tensors_come_and_go_by_value(tmp_path: Path) -> None:
    """Torch's own pickling would pass handles to memory that ends with the process."""
    done = run(tmp_path, script=TENSORS)
    assert done.stdout == "[2.0, 2.0, 2.0]\n", done.stderr


def test_after_a_restart_the_last_round_counts(tmp_path: Path) -> None:
    assert run(tmp_path, "once", "2").stdout.startswith("{0: (0, 2, Point(x=4),")


def test_a_failure_is_raised_with_its_root_cause(tmp_path: Path) -> None:
    text = "ValueError: no such data in round 1"
    done = run(tmp_path, "fail", "2")
    assert done.stdout == f"failed 1 {text} ['{text}']\n", done.stderr
    assert "FAILED" in done.stderr and text in done.stderr, "the usual report"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_workers_end_with_the_process_that_launched_them(tmp_path: Path, signum: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    line, output = [sys.executable, "script.py", "wait", "1"], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, cwd=tmp_path, env=environ(tmp_path), text=True, **output) as process:
        assert process.stdout is not None
        _, worker, agent = process.stdout.readline().split()
        process.send_signal(signum)
        assert dies(int(worker)) and dies(int(agent))
        assert process.wait(PATIENCE) == -signum


def test_what_cannot_be_launched_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"launch: the arguments of print are 'x'; give a tuple, such as \('x',\)"):
        elastirun.launch(print, "x")
    with pytest.raises(UsageError, match=r"launch: .*<lambda> and its arguments cannot be sent to .*; give a function of a module"):
        elastirun.launch(lambda: None)
    with pytest.raises(UsageError, match="launch: max_restarts=True: give --max-restarts a value, N"):
        elastirun.launch(print, max_restarts=True)
    with pytest.raises(UsageError, match="launch: module is for scripts, and this runs a function; leave it out"):
        elastirun.launch(print, module=True)
    with pytest.raises(UsageError, match="--nproc-per-nodes"):
        elastirun.launch(os.getcwd, nproc_per_nodes=2)
    with pytest.raises(UsageError, match="write --set restart-pause=SECONDS"):
        elastirun.launch(os.getcwd, restart_pause=0)
    interactive = "import elastirun\ndef train(): pass\nelastirun.launch(train)"
    done = subprocess.run([sys.executable, "-c", interactive], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert "UsageError: launch: train is defined in a notebook's cell or an interactive session" in done.stderr.splitlines()[-1]


def test_a_script_without_a_guard_is_told_so_by_the_standard_library(tmp_path: Path) -> None:
    done = run(tmp_path, script="import elastirun\ndef work(): pass\nelastirun.launch(work)\n")
    assert done.returncode == 1 and "if __name__ == '__main__':" in done.stderr


def test_the_start_method_of_the_caller_stays_unchosen() -> None:
    code = "import multiprocessing as m; from elastirun.functions import _preparation; _preparation(); print(m.get_start_method(True))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE).stdout == "None\n"


def test_options_are_those_of_the_command_line() -> None:
    line = command_line({"nproc_per_node": 2, "standalone": True, "fail_fast": False, "log_dir": None, "show": [0, -1]})
    assert line == ["--nproc-per-node=2", "--standalone", "--show=0,-1"]
    assert command_line({"set": {"restart-pause": 0, "strikes-cooldown": None, "log_mode": 640}}) == ["--set=restart-pause=0,log_mode=640"]


@pytest.mark.parametrize(("options", "alone"), [("", True), (", detect='auto', join_timeout=0.1", False)])
def test_a_call_on_each_node_of_a_scheduler_is_for_that_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, alone: bool
) -> None:
    script = f"import elastirun\ndef work(): pass\nif __name__ == '__main__':\n    print(elastirun.launch(work{options}))\n"
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    for name, value in {**step, "SLURM_STEP_NODELIST": "n[1-2].invalid"}.items():
        monkeypatch.setenv(name, value)
    done = run(tmp_path, script=script)
    assert (done.stdout == "{0: None}\n") is alone, done.stderr
    assert ("n1.invalid" in done.stderr) is not alone
