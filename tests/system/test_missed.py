"""A worker fails for having lost its peers: the report names the rank that it has waited for, and where that one was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

VICTIM = """
raise RuntimeError("[gloo] Timed out waiting 8000ms for recv operation to complete")
"""
LOADER = f"""
import os, time
def load_next_batch():
    time.sleep(600)
if os.environ["RANK"] == "0":
    load_next_batch()
time.sleep(1)
{VICTIM}"""
ENDED = f"""
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(1)
{VICTIM}"""
SHOWN = """
import json, os, sys
print(json.dumps([os.environ.get("PYTHONPATH"), [path for path in sys.path if "startup" in path], os.environ.get("TEST_SEEN")]))
print("module", getattr(sys.modules.get("sitecustomize"), "OURS", None))
"""
SHELL = f"""#!/bin/sh
[ $RANK = 0 ] && exec sleep 600
sleep 1
exec {sys.executable} -c 'raise RuntimeError("Connection closed by peer")'
"""
BARRIER = """
import os, time
def read_checkpoint():
    time.sleep(600)
if os.environ["RANK"] == "1":
    read_checkpoint()
exec(compile("def barrier():\\n    time.sleep(600)", "/x/torch/distributed/distributed_c10d.py", "exec"))
barrier()
"""
AT_EXIT = """
import ctypes, os
from elastirun.progress import progress
{stamps}
page = os.open(os.environ["ELASTIRUN_PROGRESS"], os.O_RDONLY)
number = int.from_bytes(os.pread(page, 8, 8 * 2), "little")
assert 32 < number <= 64, number
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc["raise"], ctypes.c_void_p), ctypes.c_void_p(number), None)  # called when the interpreter has ended
"""
MISSED = "Missed by the others, so probably the cause:"


def missed(nodes: Cluster, i: int = 1) -> str:
    """Return what the report of agent ``i`` says on the workers that the others have missed."""
    return nodes.out(i).partition(MISSED)[2].partition("-----")[0]


def test_the_rank_in_its_loader_is_named_with_its_function(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER)
    agent = nodes.agent(1, nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert "rank      : 1 (local_rank: 1)" in nodes.out(1), "who failed first is still the one that failed"
    assert "  rank 0 (" in missed(nodes) and "worker.py:4 in load_next_batch" in missed(nodes), nodes.everything()


def test_the_rank_in_its_loader_is_named_where_the_other_node_failed(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER)
    agents = [nodes.agent(i, nnodes="2") for i in (1, 2)]
    assert [nodes.ends(agent) for agent in agents] == [1, 1], nodes.everything()
    for i in (1, 2):
        assert "  rank 0 (" in missed(nodes, i) and "worker.py:4 in load_next_batch" in missed(nodes, i), nodes.everything()


def test_a_fork_of_the_fork_server_shows_its_stack_too(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER)
    agent = nodes.agent(1, "--preload=json", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert "  rank 0 (" in missed(nodes) and "in load_next_batch" in missed(nodes), nodes.everything()


def test_a_rank_that_had_ended_with_0_is_named(nodes: Cluster) -> None:
    nodes.script.write_text(ENDED)
    agent = nodes.agent(1, nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert "  rank 1 (" in missed(nodes) and " had ended with 0, " in missed(nodes), nodes.everything()


def test_a_node_whose_workers_had_all_ended_with_0_is_named(nodes: Cluster) -> None:
    nodes.script.write_text(ENDED)
    agents = [nodes.agent(i, nnodes="2") for i in (1, 2)]
    assert [nodes.ends(agent) for agent in agents] == [1, 1], nodes.everything()
    assert all("  ended     : all workers of " in nodes.out(i) for i in (1, 2)), nodes.everything()


def test_a_rank_that_failed_by_itself_is_the_only_cause(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER.replace(VICTIM, 'raise ValueError("no data")'))
    agent = nodes.agent(1, nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert "ValueError: no data" in nodes.out(1) and MISSED not in nodes.out(1) and "load_next_batch" not in nodes.out(1)


def test_a_worker_that_handles_no_such_signal_gets_none(nodes: Cluster) -> None:
    nodes.script.write_text(SHELL)
    nodes.script.chmod(0o700)
    folder = nodes.tmp_path / "logs"
    agent = nodes.agent(1, "--no-python", f"--log-dir={folder}", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    ends = [json.loads(line) for line in next(folder.glob("*/events.jsonl")).read_text().splitlines()]
    assert {one["rank"]: one["code"] for one in ends if one["event"] == "worker_exit"} == {1: 1, 0: -15}, nodes.everything()


def test_stacks_can_be_turned_off(nodes: Cluster) -> None:
    nodes.script.write_text(LOADER)
    agent = nodes.agent(1, "--stacks=off", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert MISSED not in nodes.out(1)


@pytest.mark.parametrize(("stamps", "stacks"), [("", "on"), ("progress()", "on"), ("progress()", "off")])
def test_the_signal_for_stacks_does_no_harm_after_the_interpreter_has_ended(nodes: Cluster, stamps: str, stacks: str) -> None:
    nodes.script.write_text(AT_EXIT.format(stamps=stamps))
    assert nodes.ends(nodes.agent(1, f"--stacks={stacks}", nnodes="1")) == 0, nodes.everything()


def test_a_script_sees_neither_our_folder_nor_our_sitecustomize(nodes: Cluster) -> None:
    own = nodes.tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nOURS = 'the user\\'s'\nos.environ['TEST_SEEN'] = 'yes'\n")
    nodes.script.write_text(SHOWN)
    nodes.env["PYTHONPATH"] = f"{Path(__file__).parents[2]}:{own}"
    agent = nodes.agent(1, nnodes="1")
    assert nodes.ends(agent) == 0, nodes.everything()
    assert json.dumps([nodes.env["PYTHONPATH"], [], "yes"]) in nodes.out(1) and "module the user's" in nodes.out(1), nodes.everything()


def test_before_the_first_step_the_rank_outside_of_the_barrier_is_the_cause(nodes: Cluster) -> None:
    nodes.script.write_text(BARRIER)
    agent = nodes.agent(1, "--set=first-step-timeout=3", nnodes="1", nproc=2)
    assert nodes.ends(agent) == 1, nodes.everything()
    assert "rank      : 1 (local_rank: 1)" in nodes.out(1) and "in read_checkpoint" in nodes.out(1), nodes.everything()
