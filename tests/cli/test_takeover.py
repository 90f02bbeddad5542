"""``python -m elastirun.takeover``: launchers that call torchrun from inside run elastirun with the same arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastirun.takeover import arguments
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# Like accelerate and torchtune: makes the parser's namespace, changes some values, calls run().
BY_NAMESPACE = """
from torch.distributed.run import get_args_parser, run
import sys
args = get_args_parser().parse_args(["TRAIN", *sys.argv[1:]])
args.nproc_per_node, args.standalone, args.role = 2, True, "mine"
run(args)
"""
# Like Lightning's fabric, with an option that only elastirun has.
BY_LINE = """
import sys
import torch.distributed.run as torchrun
torchrun.main(["--nproc_per_node=2", "--node_rank=0", "--grace=20", "--role=mine", "TRAIN", *sys.argv[1:]])
"""
TRAIN = """
import os, sys
env = os.environ
print(f"rank {env['RANK']} of {env['WORLD_SIZE']} in round {env['ELASTIRUN_ROUND']}, {env['ROLE_NAME']}, {sys.argv[1:]}\\n", end="")
"""


def take_over(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "elastirun.takeover", *command]
    return subprocess.run(line, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.daily(2)
@pytest.mark.parametrize("launcher", [BY_NAMESPACE, BY_LINE])
def test_a_launcher_that_calls_torchrun_runs_elastirun(tmp_path: Path, launcher: str) -> None:
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    (tmp_path / "click.py").write_text("raise SystemExit('this is not the click that elastirun means')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "launch.py").write_text(launcher.replace("TRAIN", str(train)))
    done = take_over(tmp_path, "bin/launch.py", "--lr=0.1", "x y")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {i} of 2 in round 1, mine, ['--lr=0.1', 'x y']" for i in range(2)]


def test_what_cannot_be_taken_over_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("print('training in this process')\n")
    done = take_over(tmp_path, "alone.py")
    assert (done.returncode, done.stdout) == (0, "training in this process\n")
    assert done.stderr == "elastirun takeover: alone.py ended without calling torch.distributed.run, so elastirun did not run\n"
    for command in (["no-such-launcher", "launch"], [], ["-m", "no_such.module"], ["./missing.py"]):
        done = take_over(tmp_path, *command)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(("elastirun takeover: no ", "elastirun takeover: there is no file './missing.py' in "))
    done = take_over(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: elastirun takeover (COMMAND | ")


@pytest.mark.parametrize(
    "line",
    [
        ["t.py"],
        ["--nnodes=1:4", "--nproc_per_node", "8", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-conf=a=1,b=2", "t.py", "--x", "1"],
        ["--standalone", "-m", "pkg.train", "--standalone"],
        ["--no-python", "--master-port=1", "-r", "3", "-t", "0:1,1:2", "--log-dir", "a b", "run.sh", "--", "-x", ""],
        ["--duplicate-stdout-filters=a,,b,c", "--local-ranks-filter=0,1", "--monitor-interval=0.5", "t.py"],
        ["--node-rank=1", "--nnodes=2", "--master-addr=h", "--max-restarts=3", "--run-path", "t.py", "${local_rank}"],
    ],
)
def test_a_namespace_becomes_the_command_line_it_came_from(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = get_args_parser().parse_args(line)
    environ: dict[str, str] = {}
    again = arguments(parsed, get_args_parser(), environ)
    assert get_args_parser().parse_args(again) == parsed
    assert len(again) <= len(line) + 1 and environ == {}, "defaults are left to elastirun"
    monkeypatch.setenv("PET_STANDALONE", "1")
    arguments(parsed, get_args_parser(), environ)
    assert environ == ({} if parsed.standalone else {"PET_STANDALONE": "0"})


def test_values_of_other_types_than_the_parsers_are_the_same_values() -> None:
    parsed = get_args_parser().parse_args(["t.py"])
    parsed.nproc_per_node, parsed.max_restarts, parsed.use_env = 1, "0", False
    assert arguments(parsed, get_args_parser(), {}) == ["t.py", "--local-rank=${local_rank}"]
