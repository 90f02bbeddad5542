"""What gets installed: every module under its one name, beside whatever the user's own modules are called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import elastirun
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"elastirun": ROOT / "elastirun", "elastirun/agent": ROOT / "agent", "elastirun/rendezvous": ROOT / "rendezvous"}


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules() -> set[str]:
    """The paths at which the package's files must be found, relative to site-packages."""
    found = {"elastirun/py.typed", "elastirun/report/style.css"}
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            if path.resolve().is_relative_to(folder.resolve()):
                found.add(f"{name}/{path.relative_to(folder)}")
    return found


@pytest.mark.parametrize("name", ["agent", "rendezvous"])
def test_the_links_are_relative_and_right(name: str) -> None:
    assert os.readlink(ROOT / "elastirun" / name) == f"../{name}"
    assert (ROOT / "elastirun" / name / "__init__.py").samefile(ROOT / name / "__init__.py")


@pytest.mark.parametrize("name", ["agent", "rendezvous"])
def test_the_folders_cannot_be_imported_under_another_name(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"elastirun.{name}" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, the source distribution, and in ``again/`` the wheel made from the latter.

    Built in a copy: a build leaves folders behind, and would pick up those that earlier builds left.
    """
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("elastirun", "agent", "rendezvous"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, folder, "--wheel", copy, cwd=folder)
    run(*build, folder, "--sdist", copy, cwd=folder)
    run("tar", "xzf", next(folder.glob("*.tar.gz")), cwd=folder)
    run(*build, folder / "again", "--wheel", folder / f"elastirun-{elastirun.__version__}", cwd=folder)
    return folder


def contents(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_nothing_else(built: Path) -> None:
    assert contents(built) == modules()


def test_the_source_distribution_makes_the_same_wheel(built: Path) -> None:
    assert contents(built / "again") == modules()
    links = [path for path in (built / f"elastirun-{elastirun.__version__}").rglob("*") if path.is_symlink()]
    assert links == []


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment in which only the wheel was installed; its dependencies are borrowed from ours."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=built)
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=built)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_the_metadata_say_what_a_package_index_shows(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    fields = Parser().parsestr(metadata)
    assert (fields["Name"], fields["Version"], fields["License-Expression"]) == ("elastirun", elastirun.__version__, "Apache-2.0")
    assert fields["Requires-Python"] == ">=3.10" and fields["Author"] and fields["Keywords"] and len(fields["Summary"]) < 120
    assert fields["Description-Content-Type"] == "text/markdown" and "# elastirun" in metadata
    assert [need for need in fields.get_all("Requires-Dist", []) if "extra" not in need] == ["torch>=2.6", "click>=8.1", "psutil>=5.9"]


def test_the_version_is_in_one_place_and_the_changelog_has_it() -> None:
    assert f"\n## {elastirun.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    line = re.compile(rf"^.*(?<![\d.]){re.escape(elastirun.__version__)}(?![\d.]).*$", re.M)
    named = [path.name for path in (ROOT / "pyproject.toml", *FOLDERS["elastirun"].glob("*.py")) if line.search(path.read_text())]
    assert named == ["__init__.py"]


TORCH_SCRIPT = """
import torch
from elastirun.train import DistributedDataParallel
torch.distributed.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
before = ddp.module.weight.item()
ddp(torch.full((1, 1), 1.0 + torch.distributed.get_rank())).sum().backward()
optimizer.step()
print(f"rank {torch.distributed.get_rank()} moved by {before - ddp.module.weight.item():.3f}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


def test_an_installed_wheel_trains_and_has_every_command(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCH_SCRIPT)
    lines = run(bare / "elastirun", "--standalone", "--nproc-per-node=2", "train.py", cwd=tmp_path).splitlines()
    assert {"rank 0 moved by 1.500", "rank 1 moved by 1.500"} <= {*lines}, "the mean of 1 and 2"
    assert run(bare / "elastirun", "--version", cwd=tmp_path) == f"elastirun {elastirun.__version__}\n"
    for name in ("status", "report", "chaos", "checkpoint", "takeover", "warm"):
        assert f"usage: elastirun {name}" in run(bare / "elastirun", name, "--help", cwd=tmp_path).replace("Usage", "usage")
    done = subprocess.run([bare / "elastirun", "status", "no-such-job"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (4, "") and done.stderr.startswith("elastirun status: no job 'no-such-job' on this machine")


USER_SCRIPT = """
import os
import agent, rendezvous
words = ["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], agent.WHOSE, rendezvous.WHOSE]
os.write(1, (" ".join(words) + "\\n").encode())  # in one piece: two workers write at the same time
"""


def test_an_installed_launcher_is_no_obstacle_to_a_users_own_modules(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(USER_SCRIPT)
    (tmp_path / "agent.py").write_text("WHOSE = 'the agent is mine'\n")
    (tmp_path / "rendezvous.py").write_text("WHOSE = 'the rendezvous is mine'\n")
    where = "import elastirun.agent as module; print(module.__file__)"
    assert str(bare.parent) in run(bare / "python", "-c", where, cwd=tmp_path)
    lines = run(bare / "elastirun", "--standalone", "--nproc-per-node=2", "train.py", cwd=tmp_path)
    for rank in (0, 1):
        assert f"rank {rank} of 2 the agent is mine the rendezvous is mine" in lines
