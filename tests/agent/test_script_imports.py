"""``--preload=auto``: what the text of a script says about its imports decides what is imported for the workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elastirun.agent.processes.preload import script_imports
from elastirun.agent.processes.preload.script_imports import CHANGES, NO_TORCH, Files, Import, decide, of_command, steps
from elastirun.config import Command, Preload

INSTALLED = {"torch", "numpy", "tqdm", "lightning", "requests"}
NOBODY: Mapping[str, str] = {}


def decided(text: str, own: Mapping[str, str] = NOBODY) -> Preload:
    """Decide on a machine with the packages ``INSTALLED``, of which lightning needs torch, beside the files ``own``."""

    def local(step: Import) -> tuple[str, list[script_imports.FileStep]] | None:
        return (f"{step.module}.py", steps(own[step.module])) if step.module in own else None

    return decide(steps(text), local, INSTALLED.__contains__, {"lightning", "elastirun"}.__contains__)


def test_the_imports_of_a_file_in_their_order() -> None:
    text = '"""About."""\nfrom __future__ import annotations\nimport a.b, c\nfrom .d import e\nx = 1\nimport f\ndef g():\n    import h\n'
    assert steps(text, "p.q") == [
        Import(True, module="__future__", parts=("annotations",)),
        *(Import(True, module=name) for name in ("a.b", "c")),
        Import(True, module="p.q.d", parts=("e",)),
        Import(module="f"),
        Import(later=True, module="h"),
    ]
    assert steps("from .. import a", "p.q") == [Import(True, module="p", parts=("a",))]


@pytest.mark.parametrize("text", ["def", b"\xff", "a = \0", "(" * 1000 + ")" * 1000, "a" + ".b" * 100_000], ids=lambda text: text[:3])
def test_a_file_that_cannot_be_parsed_imports_nothing(text: str | bytes) -> None:
    assert steps(text) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import torch", "torch"),
        ("import torch.nn as nn", "torch.nn"),
        ("from torch.utils import data", "torch.utils"),
        ("def main():\n    import torch", "torch"),
        ("try:\n    import torch\nexcept ImportError:\n    pass", "torch"),
        ("import lightning as L", "lightning"),
        ("import requests, lightning", "lightning"),
        ("from elastirun import train", "elastirun"),
        ("from elastirun.train.elastic import elastic", "elastirun.train.elastic"),
    ],
)
def test_a_script_that_imports_torch_or_what_needs_it(text: str, cause: str) -> None:
    found = decided(text)
    assert (found.modules, found.why) == (("torch",), f"the script imports {cause}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import requests",
        "import torchmetrics",
        "from elastirun.progress import progress",
        "name = 'import torch'",
        "if TYPE_CHECKING:\n    import torch",
        "import torch as",
    ],
)
def test_a_script_without_torch_is_executed(text: str) -> None:
    assert decided(text) == Preload(why=NO_TORCH)


def test_files_beside_the_script_count_one_level_deep() -> None:
    assert decided("import model", {"model": "import torch"}) == Preload(("torch",), (), "model.py imports torch")
    assert decided("import model", {"model": "import layers", "layers": "import torch"}).modules == ()
    assert decided("import torch", {"torch": "mine = True"}) == Preload(why=NO_TORCH), "another torch"


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['A'] = '1'",
        "environ['A'] += '1'",
        "del os.environ['A']",
        "os.environ.setdefault('A', '1')",
        "os.environ.update(A='1')",
        "os.environ |= {'A': '1'}",
        "os.putenv('A', '1')",
        "load_dotenv()",
        "if True:\n    os.environ['A'] = '1'",
        "def change():\n    os.environ['A'] = '1'\nchange()",
    ],
)
def test_a_variable_that_is_set_before_torch_is_imported_must_have_its_effect(change: str) -> None:
    assert decided(f"import os\n{change}\nimport torch") == Preload(why=CHANGES)
    assert decided("import settings\nx = 1\nimport torch", {"settings": change}) == Preload(why=CHANGES)
    assert decided(f"import os\ndef main():\n    import torch\n{change}\nmain()") == Preload(why=CHANGES), (
        "when it is imported nobody knows"
    )
    assert decided(f"import os, torch\n{change}").modules == ("torch",)


@pytest.mark.parametrize("read", ["os.environ['A']", "os.environ.get('A')", "dict(os.environ)", "os.environ.copy()", "'A' in os.environ"])
def test_a_variable_may_be_read_before_torch_is_imported(read: str) -> None:
    assert decided(f"import os\na = {read}\nimport torch").modules == ("torch",)


def test_a_function_that_changes_variables_has_not_been_called_where_only_imports_come_first() -> None:
    own = {"tools": "import os\ndef change():\n    os.environ['A'] = '1'"}
    assert decided("import tools\nimport torch", own).modules == ("torch",)
    assert decided("import tools\ntools.change()\nimport torch", own) == Preload(why=CHANGES)
    assert decided("import tools\nimport torch", {"tools": "import os\nos.environ['A'] = '1'"}) == Preload(why=CHANGES)


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("import os, numpy\nfrom tqdm import tqdm\nimport torch", ("numpy", "tqdm")),
        ('"""About."""\nfrom __future__ import annotations\nimport torch\nfrom torch.utils import data', ("torch.utils",)),
        ("import numpy\nimport numpy\nimport torch", ("numpy",)),
        ("import numpy\nx = 1\nimport tqdm, torch", ("numpy",)),
        ("import numpy\nimport mine\nimport tqdm, torch", ("numpy",)),
        ("import numpy, unknown, tqdm, torch", ("numpy",)),
        ("try:\n    import tqdm\nexcept ImportError: pass\nimport torch", ()),
    ],
)
def test_installed_packages_are_tried_until_anything_else_is_done(text: str, tried: tuple[str, ...]) -> None:
    assert decided(text, {"mine": ""}) == Preload(("torch",), tried, "the script imports torch")


def test_files_are_found_as_python_finds_them(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import first")
    (tmp_path / "pack" / "part.py").write_text("from . import other\nimport second")
    (tmp_path / "pack" / "other.py").write_text("import torch")
    (tmp_path / "empty").mkdir()
    own = Files([str(tmp_path)])
    found = own.imported(Import(module="pack", parts=("part", "Class")))
    assert found and found[0] == "part.py"
    assert [step.module for step in found[1] if isinstance(step, Import)] == ["first", "second"], "not the files that these import"
    assert own.imported(Import(module="empty")) is None, "a folder with nothing in it comes after what is installed"
    assert [step.module for step in own.of_module("pack.part") if isinstance(step, Import)] == ["pack", "first", "pack", "second"]


def test_a_large_file_and_one_too_many_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.py"
    file.write_text("import torch")
    monkeypatch.setattr(script_imports, "MOST_FILES", 2)
    own = Files([])
    assert [own.read(str(file)) for _ in range(3)] == [b"import torch", b"import torch", b""]
    monkeypatch.setattr(script_imports, "TEXT_LIMIT", 5)
    assert Files([]).read(str(file)) == Files([]).read(str(tmp_path)) == Files([]).read(str(tmp_path / "none")) == b""


def test_a_package_needs_torch_by_its_requirements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs = {
        "direct-1.0": "Requires-Dist: numpy>1\nRequires-Dist: torch (>=2.4)",
        "Through.it-2": "Requires-Dist: direct; python_version > '3'",
        "extra-1": "Requires-Dist: torch>=2.4; extra == 'torch'",
        "another-1": "Requires-Dist: torch; extra == 'dev'\nRequires-Dist: direct; extra == \"all\"",
        "through_extra-1": "Requires-Dist: extra",
        "loop-1": "Requires-Dist: loop\nRequires-Dist: missing\n\nRequires-Dist: torch",
    }
    for name, text in needs.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    script_imports.distributions.cache_clear()
    names = ("direct", "through_it", "extra", "another", "through_extra", "loop", "unknown", "os")
    assert [name for name in names if script_imports.needs_torch(name)] == ["direct", "through_it", "extra"]
    script_imports.distributions.cache_clear()


def test_the_command_of_a_worker_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("import torch\n")
    (tmp_path / "pack" / "__init__.py").write_text("")
    expected = Preload(("torch",), (), "model.py imports torch")
    assert of_command(Command("t.py")) == of_command(Command("t", module=True)) == expected
    assert of_command(Command("pack", module=True)).modules == ("torch",)
    for script in ("none.py", "pack", "-", "${local_rank}.py"):
        assert of_command(Command(script)) == Preload(why=NO_TORCH)


def test_a_file_that_runs_before_the_script_and_asks_for_a_rank_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    (tmp_path / "usercustomize.py").write_text("import os\nrank = os.environ.get('RANK')\n")
    assert of_command(Command(str(tmp_path / "t.py"))).modules == ("torch",)
    monkeypatch.syspath_prepend(tmp_path)
    found = of_command(Command(str(tmp_path / "t.py")))
    assert found.modules == () and "names a variable of the workers' ranks" in found.why
