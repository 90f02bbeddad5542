"""The event ``start``: the command without secrets, and the version of torch without its import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from elastirun.agent.observe import job_start
from elastirun.config import Command


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--lr=0.1", "a b"), "train.py --lr=0.1 'a b'"),
        (("--api-key=abc", "--lr=1"), "train.py '--api-key=***' --lr=1"),
        (("--hf_token", "abc", "rest"), "train.py --hf_token '***' rest"),
        (("--password", "--lr=1"), "train.py --password --lr=1"),
        (("--tokenizer=gpt2", "--keyframes", "3", "--monkey=1"), "train.py --tokenizer=gpt2 --keyframes 3 --monkey=1"),
    ],
)
def test_the_command_is_shown_without_secrets(args: tuple[str, ...], line: str) -> None:
    assert job_start.shown(Command("train.py", args)) == line


def test_a_module_is_shown_as_one_and_a_long_command_is_cut() -> None:
    assert job_start.shown(Command("train", module=True)) == "-m train"
    assert len(job_start.shown(Command("train.py", ("x" * 5000,)))) == job_start.MOST_COMMAND


def test_the_version_of_torch_needs_no_import_of_it() -> None:
    code = "import sys; from elastirun.rendezvous.stores.torch_class import torch_version; print(torch_version(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [version("torch"), "False"]
