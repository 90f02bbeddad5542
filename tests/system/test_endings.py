"""How it can end, and the exit code and termination message that each node ends with. One test for each line of docs/exit-codes.md."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import WORKER, Cluster, free_port, kill
from tests.support.until import until

QUICK = "--last-call=0.1"

# The agent, with one thing changed in it that cannot be brought about from outside.
IMMORTAL = """
from elastirun.agent.processes import process
from elastirun.agent.workers import workers
process.Process.kill_group = lambda self: None  # as if the worker hung in the kernel
workers.GIVE_UP = 1.0
"""
BUG = """
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.wire.events import WorkersFailed
step = Machine.step
def broken(self, event):
    if isinstance(event, WorkersFailed):
        raise ZeroDivisionError("a bug")
    return step(self, event)
Machine.step = broken
"""
NO_PROCESS = """
import errno, os, subprocess
start = subprocess.Popen.__init__
def full(self, *args, **options):
    if os.path.exists(os.environ["FULL"]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    start(self, *args, **options)
subprocess.Popen.__init__ = full
"""
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WORKER


VERDICTS = {  # by exit code; a worker's own code may be any
    0: {"succeeded"},
    1: {"failed"},
    2: {"usage"},
    3: {"environment", "disagrees", "failed"},
    200: {"timeout"},
    201: {"timeout", "store_lost"},
    202: {"sick"},
    203: {"bug"},
    204: {"excluded"},
}


@pytest.fixture
def nodes(nodes: Cluster) -> Iterator[Cluster]:
    """Nodes whose termination messages are compared with their exit codes at the end of each test."""
    nodes.ask_for_messages = True
    yield nodes
    ended = [(i, agent.returncode) for i, agent in zip(nodes.numbers, nodes.agents, strict=True) if agent.poll() is not None]
    for i, code in ended:
        if code != -signal.SIGKILL:
            message = nodes.message(i)
            assert message["exit_code"] == code and message["reason"]
            assert message["verdict"] in VERDICTS.get(code, {"left", "failed"}), message
            assert ("error" in message) == (message["verdict"] == "failed"), message


def with_change(change: str) -> tuple[str, ...]:
    return "-c", f"{change}\nfrom elastirun.cli.main import main\nmain()"


def test_0_for_everyone_when_all_workers_succeeded_and_for_a_spare_too(nodes: Cluster) -> None:
    a, b = nodes.agent(1, nnodes="2"), nodes.agent(2, nnodes="2")
    workers = nodes.round(2)
    spare = nodes.agent(3, nnodes="2")
    nodes.says(3, "this node is a spare")
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in (a, b, spare)] == [0, 0, 0]
    assert "no worker ran on this node" in nodes.out(3)


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("option", "command", "code"),
    [("--max-restarts=0", "exit 3", 1), ("--exit-code-from-worker", "exit 3", 3), ("--exit-code-from-worker", "kill 11", 139)],
)
def test_1_or_the_workers_own_code_on_every_node_when_a_worker_failed(nodes: Cluster, option: str, command: str, code: int) -> None:
    agents = [nodes.agent(i, option, nnodes="2") for i in (1, 2)]
    workers = nodes.round(2)
    spare = nodes.agent(3, option, nnodes="2")
    nodes.says(3, "this node is a spare")
    workers[1].tell(command)
    assert [nodes.ends(agent) for agent in (*agents, spare)] == [code, code, code]
    assert all("Root Cause" in nodes.out(i) for i in (1, 2, 3))


def test_2_for_wrong_use_3_for_a_missing_script_and_202_for_what_is_missing_here(nodes: Cluster) -> None:
    wrong, missing = nodes.launch(1, "--nnodes=two", str(nodes.script)), nodes.launch(2, "nowhere.py")
    no_gpu = nodes.launch(3, "--nproc-per-node=gpu", str(nodes.script), before=("env", "CUDA_VISIBLE_DEVICES="))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{taken.getsockname()[1]}"
        busy = nodes.launch(4, "--nnodes=2", endpoint, "--rdzv-conf=is_host=1", "--rdzv-id=a", str(nodes.script))
        codes = [nodes.ends(agent) for agent in (wrong, missing, no_gpu, busy)]
    assert codes == [2, 3, 202, 202], nodes.everything()
    assert [nodes.out(i).count("\n") for i in (1, 2, 3)] == [1, 1, 1]


def test_3_for_a_node_with_other_settings_than_the_job_which_goes_on(nodes: Cluster) -> None:
    a = nodes.agent(1, QUICK, nnodes="1:2")
    (worker,) = nodes.round(1)
    odd = nodes.agent(2, nnodes="1:3")
    assert nodes.ends(odd) == 3
    assert "giving up: this node was started with --nnodes=1:3, the job runs with --nnodes=1:2" in nodes.out(2)
    worker.tell("exit 0")
    assert nodes.ends(a) == 0


@pytest.mark.daily(3)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_128_and_the_signal_for_the_node_that_was_told_to_stop_and_the_others_go_on(nodes: Cluster, signum: signal.Signals) -> None:
    a, b = nodes.agent(1, nnodes="1:2"), nodes.agent(2, nnodes="1:2")
    nodes.round(2)
    b.send_signal(signum)
    assert nodes.ends(b) == 128 + signum
    (worker,) = nodes.round(1, after=1)
    worker.tell("exit 0")
    assert nodes.ends(a) == 0


def test_128_and_the_signal_also_before_any_round_while_waiting_for_others(nodes: Cluster) -> None:
    a, b = nodes.agent(1, nnodes="3"), nodes.agent(2, nnodes="3")
    children = [Path(f"/proc/{agent.pid}/task/{agent.pid}/children") for agent in (a, b)]
    until(lambda: all(path.read_text() for path in children), "the guards", state=nodes.everything)
    for agent in (b, a):
        agent.send_signal(signal.SIGTERM)
        assert nodes.ends(agent) == 143


def test_128_and_the_signal_also_for_a_node_that_is_done_and_waits_for_the_others(nodes: Cluster) -> None:
    a, _ = nodes.agent(1, nnodes="2"), nodes.agent(2, nnodes="2")
    done = nodes.round(2)[0]
    done.tell("exit 0")
    done.await_death()
    a.send_signal(signal.SIGTERM)
    assert nodes.ends(a) == 143


@pytest.mark.parametrize("code", [0, 1])
def test_a_node_that_is_done_waits_as_long_as_it_takes_and_ends_as_the_last_one_does(nodes: Cluster, code: int) -> None:
    a, b = nodes.agent(1, nnodes="2"), nodes.agent(2, nnodes="2")
    done, last = nodes.round(2)
    done.tell("exit 0")
    done.await_death()
    last.tell(f"exit {code}")
    assert (nodes.ends(a), nodes.ends(b)) == (code, code)
    assert ("Root Cause" in nodes.out(1)) == bool(code)


def test_200_when_peers_are_lost_and_too_few_come_back_in_time(nodes: Cluster) -> None:
    a, b = nodes.agent(1, "--join-timeout=9", nnodes="2"), nodes.agent(2, nnodes="2")
    nodes.round(2)
    kill(b)
    assert nodes.ends(a) == 200
    assert "giving up: no round within 9 s: 1 of 2 nodes joined" in nodes.out(1)


def test_201_when_too_few_nodes_come_in_time_or_the_store_goes_away(nodes: Cluster) -> None:
    alone = nodes.launch(3, "--nnodes=3", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=a", "--join-timeout=2", str(nodes.script))
    a, b = (nodes.agent(i, "--store-grace=2", "--store-succession=off", nnodes="2") for i in (1, 2))
    nodes.round(2)
    kill(a)
    assert (nodes.ends(b), nodes.ends(alone)) == (201, 201)
    assert "giving up: no round within 2 s: " in nodes.out(3)
    assert "start the other nodes with the same --rdzv-id and --rdzv-endpoint" in nodes.out(3)
    assert "giving up: the rendezvous store was away for" in nodes.out(2)


def test_202_when_a_worker_cannot_be_killed_and_the_node_does_not_come_back(nodes: Cluster) -> None:
    nodes.script.write_text(DEAF)
    options = ["--nproc-per-node=2", "--max-restarts=1", "--grace=0"]
    sick = nodes.launch(1, *options, str(nodes.script), program=with_change(IMMORTAL))
    first, second = nodes.round(2)
    first.tell("exit 1")
    assert nodes.ends(sick) == 202
    assert "this node should be checked" in nodes.out(1) and "giving up: a worker hangs in the kernel" in nodes.out(1)
    second.await_death()


def test_202_when_this_node_cannot_start_workers_and_the_others_spend_no_restart(nodes: Cluster) -> None:
    full = nodes.tmp_path / "full"
    nodes.env["FULL"] = str(full)
    options = [QUICK, "--preload=off", "--max-restarts=1", "--nnodes=1:2", "--rdzv-id=test", str(nodes.script)]
    where = f"--rdzv-endpoint=127.0.0.1:{nodes.port}"
    a = nodes.launch(1, where, "--rdzv-conf=is_host=1", *options)
    b = nodes.launch(2, where, "--rdzv-conf=is_host=0", *options, program=with_change(NO_PROCESS))
    workers = nodes.round(2)
    full.touch()
    workers[0].tell("exit 1")
    assert nodes.ends(b) == 202
    (left,) = [line for line in nodes.out(2).splitlines() if "giving up: " in line]
    assert "cannot start workers here: " in left and "Resource temporarily unavailable" in left
    (alone,) = nodes.round(1, after=1)
    alone.tell("exit 0")
    assert nodes.ends(a) == 0, nodes.everything()
    assert "cannot start workers here" in nodes.out(1) and "restarts used" not in nodes.out(1)


def test_202_at_the_first_start_of_a_single_node_in_one_line(nodes: Cluster) -> None:
    limit = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh")
    options = ["--nproc-per-node=8", "--tee=3", f"--log-dir={nodes.tmp_path}/logs"]
    agent = nodes.launch(1, *options, str(nodes.script), before=limit)
    assert nodes.ends(agent) == 202, nodes.out(1)
    (line,) = nodes.out(1).splitlines()
    assert line.startswith("elastirun: giving up: cannot start workers here: ")
    assert "Too many open files" in line


def test_203_for_a_bug_of_ours_and_the_workers_have_their_grace(nodes: Cluster) -> None:
    agent = nodes.launch(1, "--nproc-per-node=2", str(nodes.script), program=with_change(BUG))
    bad, good = nodes.round(2)
    bad.tell("exit 1")
    good.await_death()
    assert nodes.ends(agent) == 203
    out = nodes.out(1)
    assert "internal error, see below; stopping the workers here" in out and "ZeroDivisionError" in out
    assert out.splitlines()[-1].startswith("elastirun: this is a bug in elastirun")


def test_204_for_a_second_node_with_the_same_fixed_rank(nodes: Cluster) -> None:
    options = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={nodes.port}", "--rdzv-id=test", "--expire=2"]
    agents = [nodes.launch(i, *options, f"--node-rank={i - 1}", str(nodes.script)) for i in (1, 2)]
    workers = nodes.round(2)
    twin = nodes.launch(3, *options, "--node-rank=1", str(nodes.script))
    assert nodes.ends(twin) == 204
    assert "--node-rank=1 is held by" in nodes.out(3) and "give each node its own" in nodes.out(3)
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0, 0]
