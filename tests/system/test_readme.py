"""Every command and every piece of code of the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE, free_port
from tests.support.until import until

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
STAYS = """
import os, time
open(os.environ["WORLD_SIZE"] + "." + os.environ["RANK"], "w").close()
while not os.path.exists("over"):
    time.sleep(0.02)
"""
SETTING = """
import torch, torch.distributed as dist
from torch.utils.data import TensorDataset
if {joins}:
    dist.init_process_group("gloo")
world_size = dist.get_world_size() if dist.is_initialized() else 1
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 4), torch.randint(0, 2, (128,)))
model, loss_of = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
ENDS = r"""
import os
os.write(1, f"rank {dist.get_rank()}: {next(model.parameters()).sum():.4f}\n".encode())  # in one piece, unlike print
os._exit(0)  # torch's gloo threads may abort at the interpreter's end (pytorch issue 190489)
"""


def only(kind: str) -> str:
    (text,) = (text for found, text in BLOCKS if found == kind)
    return text


def elastirun(*argv: str) -> list[str]:
    return [sys.executable, "-m", "elastirun", *argv]


def test_each_command_is_known_here() -> None:
    assert [command[:2] for command in COMMANDS if command[0] != "elastirun"] == [["pip", "install"], ["make", "train"], ["make", "test"]]
    assert all(subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True).returncode == 0 for command in COMMANDS[-2:])
    assert [command[1] for command in COMMANDS if command[0] == "elastirun"] == ["--nproc-per-node=auto", "--nnodes=2:8", "status"]


def test_the_commands_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STAYS)
    alone, several, status = (command[1:] for command in COMMANDS if command[0] == "elastirun")
    several = [word.replace("node0:29400", f"127.0.0.1:{free_port()}") for word in several]
    agents = [subprocess.Popen(elastirun(*several), cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(2)]
    agents.append(subprocess.Popen(elastirun(*alone), cwd=tmp_path, stderr=subprocess.DEVNULL))
    until(lambda: len(list(tmp_path.glob("16.*"))) == 16 and any(tmp_path.glob("*.0")), "all workers")
    said = subprocess.run(elastirun(*status), capture_output=True, text=True, timeout=PATIENCE).stdout
    (tmp_path / "over").touch()
    assert [agent.wait(PATIENCE) for agent in agents] == [0, 0, 0]
    assert re.search(r"job +job7: running", said) and "16 workers" in said, said


def run_code(tmp_path: Path, text: str, joins: bool) -> list[str]:
    """Return what two workers print."""
    script = tmp_path / "script.py"
    script.write_text(SETTING.format(joins=joins) + text + ENDS)
    done = subprocess.run(elastirun("--nproc-per-node=2", str(script)), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


def test_the_port_of_a_script_runs_before_and_after_and_goes_on_with_a_checkpoint(tmp_path: Path) -> None:
    lines = only("diff").splitlines()
    before, after = ("\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-")
    assert run_code(tmp_path, before, joins=True)[0].startswith("rank 0: ")
    first = run_code(tmp_path, after, joins=True)
    again = run_code(tmp_path, after.replace("run.step += 1", "raise SystemExit('nothing is left to do')"), joins=True)
    assert [line.partition(": ")[2] for line in first] == [first[0].partition(": ")[2]] * 2 and again == first


@pytest.mark.parametrize("workers", [2])
def test_live_elasticity_in_ten_lines_runs(tmp_path: Path, workers: int) -> None:
    text = only("python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 12
    assert len(run_code(tmp_path, text, joins=False)) == workers
