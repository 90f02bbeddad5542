"""The commands of torchrun's own documentation and help, run unchanged but for the word: each asserts what its workers saw.

They run in a shell, in a folder with YOUR_TRAINING_SCRIPT.py, with the variables that the documentation uses; the hosts
they name are this one. The scripts do without torch, but for the two that form a real process group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cluster import WORKER, Cluster, Worker, cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
os.environ["CPUS"] = str(sorted(os.sched_getaffinity(0)))
rank = os.environ["RANK"]
print(f"an apple of rank {rank}\\nits core")
print(f"orange, rank {rank}", file=sys.stderr)
"""
GLOO = """
import os, sys, torch, torch.distributed as dist
where = {"env": "env://", "tcp": "tcp://" + os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]}[sys.argv[1]]
ranks = {} if sys.argv[1] == "env" else {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=where, **ranks)
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} has {total.item():g}", flush=True)
dist.destroy_process_group()
"""


class Shell:
    """A user's shell: a folder with scripts, and the variables of the documentation."""

    def __init__(self, folder: Path, nodes: Cluster) -> None:
        self.folder, self.nodes = folder, nodes
        self.write("YOUR_TRAINING_SCRIPT.py", SCRIPT + WORKER)
        self.write("pkg/train.py", SCRIPT + WORKER)
        self.write("GLOO.py", GLOO)
        self.program("train.sh", f'exec {shlex.quote(sys.executable)} YOUR_TRAINING_SCRIPT.py "$@"')
        self.program("mypython", f'BY_MY_PYTHON="$1" exec {shlex.quote(sys.executable)} "$@"')
        self.program("bin/python", f'exec {shlex.quote(sys.executable)} "$@"')
        self.program("bin/elastirun", 'exec python -m elastirun "$@"')
        nodes.env |= {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "PET_LAST_CALL": "0.5",  # the default of 5 s is a long time here; an environment variable leaves the command as it is
            "NUM_TRAINERS": "2",
            "NUM_NODES": "2",
            "JOB_ID": "job7",
            "HOST_NODE_ADDR": f"localhost:{nodes.port}",
            "MASTER": f"--master-addr=127.0.0.1 --master-port={nodes.port}",
        }

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, text: str) -> None:
        self.write(name, f"#!/bin/sh\n{text}\n").chmod(0o755)

    def run(self, command: str, agents: int = 1) -> None:
        """Run it in this folder once for each agent, which finds its number in NODE_RANK."""
        command = command.replace("torchrun", "elastirun").replace("torch.distributed.run", "elastirun")
        for i in range(agents):
            self.nodes.env["NODE_RANK"] = str(i)
            with open(self.nodes.out_path(i + 1), "a") as out:
                shell = ["sh", "-c", command]  # in a session of its own, so that it can be ended together with its agent
                process = subprocess.Popen(
                    shell, env=self.nodes.env, cwd=self.folder, stdout=out, stderr=out, text=True, start_new_session=True
                )
            self.nodes.agents.append(process)

    def close(self) -> None:
        for process in self.nodes.agents:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self, workers: list[Worker]) -> None:
        """Let the workers succeed, and with them the agents."""
        for worker in workers:
            worker.tell("exit 0")
        assert [self.nodes.ends(agent) for agent in self.nodes.agents] == [0] * len(self.nodes.agents), self.nodes.everything()

    def logs(self, folder: str) -> dict[str, str]:
        """What is in the folder of the only run under ``folder``, by path."""
        (run,) = (path for path in (self.folder / folder).iterdir() if path.name != ".latest")
        return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file() and path.suffix == ".log"}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with cluster(tmp_path) as nodes:
        (tmp_path / "user").mkdir()
        made = Shell(tmp_path / "user", nodes)
        try:
            yield made
        finally:
            made.close()


# --- the environment of each worker. Each entry: the command, agents, workers, and the values of each variable by rank

SINGLE = "torchrun --standalone --nnodes=1 --nproc-per-node=$NUM_TRAINERS"
TWO_RANKS = {"RANK": "0 1", "LOCAL_RANK": "0 1", "WORLD_SIZE": "2 2", "LOCAL_WORLD_SIZE": "2 2", "GROUP_RANK": "0 0"}
TWO_NODES = {
    "RANK": "0 1 2 3",
    "LOCAL_RANK": "0 1 0 1",
    "GROUP_RANK": "0 0 1 1",
    "WORLD_SIZE": "4 4 4 4",
    "LOCAL_WORLD_SIZE": "2 2 2 2",
    "GROUP_WORLD_SIZE": "2 2 2 2",
    "ROLE_RANK": "0 1 2 3",
    "ROLE_WORLD_SIZE": "4 4 4 4",
    "TORCHELASTIC_RESTART_COUNT": "0 0 0 0",
}
JOB = TWO_NODES | {"TORCHELASTIC_RUN_ID": "job7 job7 job7 job7", "TORCHELASTIC_MAX_RESTARTS": "3 3 3 3"}
ELASTIC = """torchrun
        --nnodes={nnodes}
        --nproc-per-node=$NUM_TRAINERS
        --max-restarts=3
        --rdzv-id=$JOB_ID
        --rdzv-backend=c10d
        --rdzv-endpoint=$HOST_NODE_ADDR
        YOUR_TRAINING_SCRIPT.py"""
COMMANDS: dict[str, tuple[str, int, dict[str, str]]] = {
    "single-node multi-worker": (
        "torchrun --standalone --nnodes=1 --nproc-per-node=$NUM_TRAINERS YOUR_TRAINING_SCRIPT.py --arg1 a",
        1,
        TWO_RANKS | {"argv": "--arg1,a --arg1,a", "TORCHELASTIC_RESTART_COUNT": "0 0", "TORCHELASTIC_MAX_RESTARTS": "0 0"},
    ),
    "stacked single-node": (
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=$NUM_TRAINERS YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS,
    ),
    "fault tolerant": (ELASTIC.format(nnodes="$NUM_NODES"), 2, JOB),
    "elastic": (ELASTIC.format(nnodes="1:4"), 2, {name: seen for name, seen in JOB.items() if name != "TORCHELASTIC_RESTART_COUNT"}),
    "static": ("torchrun --nnodes=2 --node-rank=$NODE_RANK $MASTER --nproc-per-node=2 YOUR_TRAINING_SCRIPT.py", 2, TWO_NODES),
    "static on one node": (
        "torchrun --nproc-per-node=2 $MASTER YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS | {"MASTER_ADDR": "127.0.0.1 127.0.0.1"},
    ),
    "as a module, in underscores": (
        "python -m torch.distributed.run --nproc_per_node 2 --nnodes 1 --max_restarts 3 YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS | {"TORCHELASTIC_MAX_RESTARTS": "3 3"},
    ),
    "of a module": (f"{SINGLE} -m pkg.train -m x", 1, TWO_RANKS | {"argv": "-m,x -m,x"}),
    "of a program": (f"{SINGLE} --no-python ./train.sh --lr 0.1", 1, TWO_RANKS | {"argv": "--lr,0.1 --lr,0.1"}),
    "of a path": (f"{SINGLE} --run-path $PWD/YOUR_TRAINING_SCRIPT.py x", 1, TWO_RANKS | {"argv": "x x"}),
    "with another interpreter": (f"PYTHON_EXEC=./mypython {SINGLE} YOUR_TRAINING_SCRIPT.py", 1, TWO_RANKS | {"BY_MY_PYTHON": "-u -u"}),
    "local rank as an argument": (
        f"{SINGLE} YOUR_TRAINING_SCRIPT.py '--local-rank=${{local_rank}}' '$$1' --nnodes=9",
        1,
        TWO_RANKS | {"argv": "--local-rank=0,$1,--nnodes=9 --local-rank=1,$1,--nnodes=9"},
    ),
    "variables": (
        "PET_STANDALONE=1 PET_NPROC_PER_NODE=2 PET_ROLE=trainer PET_MAX_RESTARTS=1 torchrun YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS | {"ROLE_NAME": "trainer trainer", "TORCHELASTIC_MAX_RESTARTS": "1 1"},
    ),
    "virtual local ranks": (
        f"CUDA_VISIBLE_DEVICES=3,5 {SINGLE} --virtual-local-rank YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS | {"LOCAL_RANK": "0 0", "CUDA_VISIBLE_DEVICES": "3 5"},
    ),
    "what has no effect": (
        f"{SINGLE} --monitor-interval=5 --start-method=spawn --event-log-handler=null --shutdown-timeout=9"
        " --signals-to-handle=SIGTERM,SIGUSR1 YOUR_TRAINING_SCRIPT.py",
        1,
        TWO_RANKS | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1 SIGTERM,SIGUSR1"},
    ),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_workers_see_what_torchrun_would_show_them(shell: Shell, name: str) -> None:
    command, agents, saw = COMMANDS[name]
    shell.run(" ".join(command.split()) if "\n" in command else command, agents)
    workers = shell.nodes.round(len(saw["RANK"].split()))
    seen = {variable: " ".join(show(worker, variable) for worker in workers) for variable in saw}
    assert seen == saw
    assert len({(w.env["MASTER_ADDR"], w.env["MASTER_PORT"]) for w in workers}) == 1
    shell.end(workers)
    said = [line for line in shell.nodes.out(1).splitlines() if line.startswith("elastirun: ") and agents == 1]
    assert said == [], "a drop-in has nothing to say about a command line that torchrun takes"


def show(worker: Worker, variable: str) -> str:
    return ",".join(worker.env["argv"][1:]) if variable == "argv" else worker.env[variable]


# --- jobs


def test_a_failure_costs_one_of_three_restarts_on_both_nodes(shell: Shell) -> None:
    shell.run(" ".join(COMMANDS["fault tolerant"][0].split()), agents=2)
    shell.nodes.round(4)[3].tell("exit 1")
    again = shell.nodes.round(4, after=1)
    assert {w.env["TORCHELASTIC_RESTART_COUNT"] for w in again} == {"1"}
    shell.end(again)


def test_separate_jobs_on_one_host(shell: Shell) -> None:
    shell.run(f"{SINGLE} YOUR_TRAINING_SCRIPT.py", agents=2)
    workers = [shell.nodes.worker() for _ in range(4)]
    assert len({w.env["TORCHELASTIC_RUN_ID"] for w in workers}) == len({w.env["MASTER_PORT"] for w in workers}) == 2
    shell.end(workers)


def test_workers_are_bound_to_cpus(shell: Shell) -> None:
    shell.run("torchrun --numa-binding=node --nproc-per-node=2 YOUR_TRAINING_SCRIPT.py")
    workers = shell.nodes.round(2)
    for worker in workers:
        cpus = json.loads(worker.env["CPUS"])
        assert set(cpus) <= os.sched_getaffinity(0) and 1 <= int(worker.env["OMP_NUM_THREADS"]) <= len(cpus)
    shell.end(workers)


# --- output: every rank writes "an apple of rank N", "its core" on stdout, and "orange, rank N" on stderr


def run_to_the_end(shell: Shell, options: str) -> tuple[dict[str, str], str]:
    """The log files and what came to the console."""
    shell.run(f"{SINGLE} --log-dir=logs {options} YOUR_TRAINING_SCRIPT.py")
    shell.end(shell.nodes.round(2))
    return shell.logs("logs"), shell.nodes.out(1)


def out(rank: int) -> str:
    return f"an apple of rank {rank}\nits core\n"


def err(rank: int) -> str:
    return f"orange, rank {rank}\n"


def test_redirected(shell: Shell) -> None:
    files, console = run_to_the_end(shell, "-r 3")
    assert console == ""
    assert files == {f"attempt_0/{i}/{name}.log": text(i) for i in range(2) for name, text in {"stdout": out, "stderr": err}.items()}


def test_redirected_by_local_rank(shell: Shell) -> None:
    files, console = run_to_the_end(shell, "-r 0:1,1:2")
    assert files == {"attempt_0/0/stdout.log": out(0), "attempt_0/1/stderr.log": err(1)}
    assert sorted(console.splitlines()) == sorted((err(0) + out(1)).splitlines())


def test_teed(shell: Shell) -> None:
    files, console = run_to_the_end(shell, "-t 3")
    assert [files[f"attempt_0/{i}/stdout.log"] for i in range(2)] == [out(0), out(1)]
    lines = [line.partition(":")[2] for line in console.splitlines()]  # behind the host's name
    assert sorted(lines) == sorted(f"{i}> {line}" for i in range(2) for line in (out(i) + err(i)).splitlines())


def test_only_some_local_ranks_on_the_console(shell: Shell) -> None:
    files, console = run_to_the_end(shell, "--local_ranks_filter=1 --tee 1")
    assert files == {f"attempt_0/{i}/stdout.log": out(i) for i in range(2)}
    assert "rank 1" in console and "rank 0" not in console


def test_lines_with_certain_words_are_duplicated(shell: Shell) -> None:
    files, _ = run_to_the_end(shell, "--tee 3 --duplicate_stdout_filters 'apple,pear' --duplicate_stderr_filters=nothing")
    assert sorted(line.partition("> ")[2] for line in files["attempt_0/filtered_stdout.log"].splitlines()) == [
        "an apple of rank 0",
        "an apple of rank 1",
    ]
    assert files.get("attempt_0/filtered_stderr.log", "") == ""


EVENTS = ["start", "formed", "round", "worker_exit", "worker_exit", "round_spent", "closed", "account", "end"]


def test_events_are_kept_beside_the_logs(shell: Shell) -> None:
    from torch.distributed.elastic.events import Event, EventSource

    run_to_the_end(shell, "--event-log-handler=console")
    path = shell.folder / "logs" / ".latest" / os.uname().nodename / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] != "state"] == EVENTS
    printed = [json.loads(line) for line in shell.nodes.out(1).splitlines() if line.startswith("{")]
    assert [line["metadata"] | {"v": 1, "event": line["name"], "time": line["timestamp"]} for line in printed] == [
        {**{key: value for key, value in event.items() if key != "mono"}, "time": int(event["time"] * 1000)} for event in events
    ]
    sources = {line["name"]: line["source"] for line in printed}
    assert (sources["round"], sources["worker_exit"]) == ("AGENT", "WORKER")
    assert Event.deserialize(json.dumps(printed[0])).source is EventSource.AGENT, "torch's own class reads a line"


# --- failures


def test_the_root_cause_is_left_for_what_started_the_launcher(shell: Shell) -> None:
    shell.run(f"TORCHELASTIC_ERROR_FILE=reply.json {SINGLE} YOUR_TRAINING_SCRIPT.py")
    shell.nodes.round(2)[1].tell("raise no such data")
    assert shell.nodes.ends(shell.nodes.agents[0]) == 1
    message = json.loads((shell.folder / "reply.json").read_text())["message"]
    assert message["message"] == "ValueError: no such data" and message["errorCode"] == 1
    assert "Traceback (most recent call last):" in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"].isdecimal()


def test_a_launcher_in_a_launcher_hands_the_cause_on(shell: Shell) -> None:
    shell.run(f"{SINGLE} --no-python elastirun --nproc-per-node=1 YOUR_TRAINING_SCRIPT.py")
    for worker in [shell.nodes.worker() for _ in range(2)]:
        worker.tell("raise no such data")
    assert shell.nodes.ends(shell.nodes.agents[0]) == 1
    report = shell.nodes.out(1).rpartition("elastirun FAILED")[2]
    assert "    ValueError: no such data" in report, "the outer launcher's own report"


# --- a real process group


@pytest.mark.daily(2)
@pytest.mark.parametrize("method", ["env", "tcp"])
def test_a_process_group_forms(shell: Shell, method: str) -> None:
    shell.run(f"{SINGLE} GLOO.py {method}")
    assert shell.nodes.ends(shell.nodes.agents[0], 120) == 0, shell.nodes.out(1)
    assert [f"rank {rank} has 3" in shell.nodes.out(1) for rank in range(2)] == [True, True]
