"""The names that torch keeps private: whether all that are used are checked, and what a torch without one of them leads to."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastirun.train.errors import WrongUse
from elastirun.train.torch_private import NEEDED, missing, private
from tests.support.until import PATIENCE

TRAIN = Path(__file__).resolve().parents[2] / "elastirun" / "train"
MODULES = {"torch": "torch", "dist": "torch.distributed", "c10d": "torch.distributed.distributed_c10d", "nn": "torch.nn"}
SCRIPT = """
import torch
del torch._C._will_engine_execute_node
import elastirun.train
"""
SENTENCE = (
    "elastirun.train.errors.WrongUse: elastirun.train cannot run on torch "
    f"{torch.__version__}, which lacks torch._C._will_engine_execute_node: install torch 2.6 to 2.14"
)


def uses(tree: ast.AST) -> Iterator[str]:
    """Yield the names of torch, in full, as a module spells them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in MODULES:
            yield ".".join([MODULES[node.id], *parts])


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_each_private_name_that_is_used_is_checked() -> None:
    used = {name for path in TRAIN.rglob("*.py") for name in uses(ast.parse(path.read_text())) if is_private(name)}
    checked = {f"{module}.{name}" for module, names in NEEDED.items() for name in names}
    known = {one for one in used for name in checked if f"{one}.".startswith(f"{name}.") or name.startswith(f"{one}.")}
    assert used - known == set() and len(used) > 15


def test_the_installed_torch_has_them_all() -> None:
    assert missing() == []


def test_a_torch_without_one_is_one_sentence() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (1, f"{SENTENCE}\n")


def test_the_job_ends_at_once_and_its_report_has_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(f"import os\nopen(f'started{{os.getpid()}}', 'x').close()\n{SCRIPT}")
    command = [sys.executable, "-m", "elastirun", "--max-restarts=3", "t.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and len(list(tmp_path.glob("started*"))) == 1, "no restart"
    assert ended.stderr.count(SENTENCE.partition(": ")[2]) >= 2 and "Traceback" not in ended.stderr


def test_a_name_that_is_missing_where_it_is_used_later_is_the_same_sentence() -> None:
    assert private("torch.nn.modules.batchnorm", "_NormBase") is torch.nn.modules.batchnorm._NormBase
    for module, name, lacks in (("torch.nn", "_gone", "torch.nn._gone"), ("torch.no_such", "_gone", "torch.no_such")):
        with pytest.raises(WrongUse, match=f"which lacks {lacks}: install torch 2.6 to 2.14$"):
            private(module, name)
