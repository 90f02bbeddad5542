"""The examples: alone, under torchrun and under elastirun, broken off and resumed with other numbers of workers."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.digits import without_sklearn
from tests.support.until import PATIENCE
from tests.system.test_hostile import Trap

ROOT = Path(__file__).resolve().parents[2]
TRAIN, WITH_TORCH, LIVE = (ROOT / "examples" / name for name in ("train.py", "train_torch.py", "live.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=logs")  # else it leaves a folder in TMPDIR
ELASTIRUN = ("-m", "elastirun", "--standalone")


def train(cwd: Path, *arguments: str | Path, launcher: tuple[str, ...] = (), script: Path = TRAIN) -> str:
    """What the example prints when run in ``cwd``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((without_sklearn(cwd), str(ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epochs(output: str) -> dict[int, float]:
    """The loss of each epoch that was reported."""
    return {int(number): float(loss) for number, loss in re.findall(r"epoch +(\d+)/\d+  loss ([\d.]+)", output)}


@pytest.mark.daily(2)
def test_training_in_pieces_with_other_launchers_and_worker_counts_is_the_same_training(tmp_path: Path) -> None:
    """test_failover.py checks how well the example learns."""
    whole = train(tmp_path, "--epochs=3")
    first = train(tmp_path, "--epochs=1", "--checkpoint=pieces", launcher=TORCHRUN)
    second = train(tmp_path, "--epochs=3", "--checkpoint=pieces", launcher=ELASTIRUN)
    assert "from scratch" in first and first.count("world size 2") == 1
    assert "going on after step 22 of pieces" in second and second.count("world size 1") == 2
    assert {**epochs(first), **epochs(second)} == pytest.approx(epochs(whole), rel=0.001)
    assert re.search(r"test accuracy [\d.]+ %\s*\Z", second), second
    for folder in (tmp_path / "runs" / "digits", tmp_path / "pieces"):
        names = {path.name for path in folder.iterdir()}
        assert {name for name in names if not name.startswith(".")} == {"step-00000050", "step-00000060", "step-00000066"}


@pytest.mark.daily(2)
def test_the_live_example_runs_without_a_launcher_and_goes_on_under_elastirun(tmp_path: Path) -> None:
    """test_live.py kills workers."""
    first, second = train(tmp_path, "--epochs=2", script=LIVE), train(tmp_path, "--epochs=3", launcher=ELASTIRUN, script=LIVE)
    assert "is rank 0 of 1 after step 0" in first and "epoch   2/2" in first
    assert "is rank 0 of 1 after step 58" in second and "epoch   3/3" in second


@pytest.mark.long
def test_with_torch_alone_training_in_pieces_is_the_same_training_as_well(tmp_path: Path) -> None:
    whole = train(tmp_path, "--epochs=3", script=WITH_TORCH)
    first = train(tmp_path, "--epochs=1", "--checkpoint=pieces/digits.pt", launcher=TORCHRUN, script=WITH_TORCH)
    second = train(tmp_path, "--epochs=3", "--checkpoint=pieces/digits.pt", launcher=ELASTIRUN, script=WITH_TORCH)
    assert "going on after epoch 1 of pieces/digits.pt" in second and second.count("world size 1") == 2
    assert {**epochs(first), **epochs(second)} == pytest.approx(epochs(whole), rel=0.02)
    assert sorted(path.name for path in (tmp_path / "pieces").iterdir()) == ["digits.pt"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", WITH_TORCH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_images_without_sklearn_are_those_of_sklearn(tmp_path: Path, example: ModuleType) -> None:
    own = runpy.run_path(f"{without_sklearn(tmp_path)}/sklearn/datasets.py")["load_digits"]()
    theirs = example.load_digits()
    assert own.images.dtype == theirs.images.dtype and own.target.dtype == theirs.target.dtype
    assert (own.images == theirs.images).all() and (own.target == theirs.target).all()


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.pt"
    example.save(path, {"epoch": 1})

    def half(state: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(example.torch, "save", half)
        example.save(path, {"epoch": 2})
    assert example.torch.load(path, weights_only=True) == {"epoch": 1}
    example.save(path, {"epoch": 3})
    assert example.torch.load(path, weights_only=True) == {"epoch": 3}


def test_a_worker_whose_round_was_replaced_publishes_nothing(tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    example.save(tmp_path / "digits.pt", {"epoch": 2})
    monkeypatch.setattr(example, "is_current", lambda timeout: False)
    with pytest.raises(RuntimeError, match="not published"):
        example.save(tmp_path / "digits.pt", {"epoch": 1})
    assert example.torch.load(tmp_path / "digits.pt", weights_only=True) == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["digits.pt"]


def test_a_checkpoint_of_another_rank_is_not_unpickled(tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches the workers' store can take the place of rank 0."""
    data = io.BytesIO()
    example.torch.save(Trap(tmp_path / "trap"), data)
    content = example.torch.frombuffer(bytearray(data.getvalue()), dtype=example.torch.uint8)
    sent = iter((example.torch.tensor(len(content)), content))
    stranger = SimpleNamespace(get_rank=lambda: 1, broadcast=lambda tensor, src: tensor.copy_(next(sent)))
    monkeypatch.setattr(example, "dist", stranger)
    with pytest.raises(pickle.UnpicklingError):
        example.resume(tmp_path / "none", None, None, example.torch.device("cpu"))
    assert not (tmp_path / "trap").exists()
