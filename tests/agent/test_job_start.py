"""The event ``start``: the command without secrets, and the version of torch without its import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from elastirun.agent.agent import with_a_store_for_workers
from elastirun.agent.observe import job_start
from elastirun.config import Command
from tests.cli.test_resolve import config_of
from tests.support.until import PATIENCE


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
    code = """
import sys
from elastirun.rendezvous.stores import torch_class
print(torch_class.torch_version(), "torch" in sys.modules)
torch_class.store_only()
torch_class.tcp_store_class()
print(torch_class.torch_version(), hasattr(sys.modules["torch"], "nn"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == [version("torch"), "False", version("torch"), "False"]


@pytest.mark.parametrize(("version", "shared"), [("2.13.0+cpu", True), ("2.10.0", True), ("2.9.1", False), ("", True), ("git", True)])
def test_workers_have_a_store_of_their_own_where_torchs_cannot_list_its_keys(version: str, shared: bool) -> None:
    config = config_of("--nnodes=2 --node-rank=0 --master-addr=127.0.0.1 train.py")
    assert config.meet_at_endpoint and with_a_store_for_workers(config, version).meet_at_endpoint is shared
