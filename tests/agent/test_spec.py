"""What each worker is given: every variable torchrun gives, with the meanings that were mended, argv and CPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastirun.agent.host import numa
from elastirun.agent.processes import spawn
from elastirun.agent.processes.preload import forkserver
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.workers.spec import NodeEnvironment, command_line, cpu_sets, describe_mesh, worker_like, worker_specs
from elastirun.config import Command, Endpoint, LaunchConfig
from elastirun.rendezvous.wire.records import Member, RoundRecord

TOKEN = b"the secret of this job"
CONFIG = LaunchConfig(
    command=Command("t.py"), min_nodes=1, max_nodes=3, nproc=2, run_id="job7", endpoint=Endpoint("h", 1), max_restarts=4, token=TOKEN
)
LIVE = "elastirun-1-abc"
PAGES = tuple(f"/page{i}" for i in range(16))
EVERYWHERE = {
    "WORLD_SIZE": "6",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4001",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "TORCHELASTIC_MAX_RESTARTS": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "GLOO_SOCKET_IFNAME": "eth1",
    "NCCL_SOCKET_IFNAME": "=eth1",
    "ELASTIRUN_AGENT": "run-1",
    "ELASTIRUN_ROUND": "5",
    "ELASTIRUN_ROUND_REASON": "c joined",
    "ELASTIRUN_FENCE": "store:5",
    "ELASTIRUN_SOCKET": "/tmp/socket",
    "ELASTIRUN_LIVE": LIVE,
    "ELASTIRUN_DEADLINE": "30",
}
PER_NODE = {"LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS"}
PER_NODE |= {"PYTHONPATH"}  # which Python's start takes away again, see processes/startup
PER_WORKER = {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE", "ELASTIRUN_PROGRESS"}


def round_of(*slots: int, roles: str = "") -> RoundRecord:
    """Round 5 with a node for each of ``slots``; ``roles``: a letter for each."""
    members = tuple(
        Member(f"n{i}", "abc"[i], f"10.0.0.{i + 1}", 4001 + i, count, roles[i : i + 1] or "default") for i, count in enumerate(slots)
    )
    return RoundRecord("store", round=5, members=members, reason="c joined", failures=1)


def specs(
    record: RoundRecord,
    node_rank: int = 0,
    environ: Mapping[str, str] | None = None,
    config: LaunchConfig = CONFIG,
    cpus: int = 16,
    cpu_sets: list[frozenset[int]] | None = None,
) -> list[WorkerSpec]:
    """The workers of a node with ``config`` fitted to its place in the round."""
    member = record.members[node_rank]
    config = replace(config, nproc=member.slots, role=member.role)
    here = NodeEnvironment(environ or {}, cpus, "eth1", "lo", cpu_sets=cpu_sets, mark="run-1", live=LIVE, socket="/tmp/socket", pages=PAGES)
    return worker_specs(config, record, node_rank, here, lambda local: f"/logs/{local}/error.json")


def envs(record: RoundRecord, node_rank: int = 0, environ: Mapping[str, str] | None = None) -> list[Mapping[str, str]]:
    return [spec.env for spec in specs(record, node_rank, environ)]


def column(record: RoundRecord, *names: str) -> list[tuple[str, ...]]:
    """These variables of all workers of the round, node after node."""
    return [tuple(env[name] for name in names) for node in range(len(record.members)) for env in envs(record, node)]


# --- the variables


def test_workers_get_the_mesh_of_their_round() -> None:
    config = replace(CONFIG, mesh="dp=auto,pp=2,tp=2")
    assert {spec.env["ELASTIRUN_MESH"] for spec in specs(round_of(4, 4), config=config)} == {"dp=2,pp=2,tp=2"}
    outer = {"ELASTIRUN_MESH": "that of a job around this one"}
    assert "ELASTIRUN_MESH" not in specs(round_of(4), environ=outer, config=replace(CONFIG, node_unit=2))[0].env


def test_a_mesh_is_described_for_the_fewest_and_the_most_nodes() -> None:
    assert list(describe_mesh(replace(CONFIG, nproc=4, mesh="dp=auto,pp=2,tp=4"))) == [
        "with 1 node no round, one replica of dp=auto,pp=2,tp=4 needs 8 workers on nodes of at least 4, and 4 are here",
        "with 3 nodes dp=1,pp=2,tp=4, 1 of them left over",
        "dp 0, pp 0: ranks 0-3 on node 0",
        "dp 0, pp 1: ranks 4-7 on node 1",
    ]
    lines = list(describe_mesh(replace(CONFIG, nproc=10, min_nodes=3, node_unit=3, mesh="dp=auto")))
    assert len(lines) == 18 and lines[-1] == "and 14 more"
    assert list(describe_mesh(CONFIG)) == []


def test_the_mark_comes_first_whatever_the_user_has_set() -> None:
    """The guard reads environments with a limit."""
    (env,) = envs(round_of(1), environ={"A": "1", "ELASTIRUN_AGENT": "outer"})
    assert next(iter(env.items())) == ("ELASTIRUN_AGENT", "run-1")


def test_what_is_the_same_everywhere() -> None:
    record = round_of(2, 2, 2)
    for node_rank in range(3):
        for env in envs(record, node_rank):
            assert env.items() >= EVERYWHERE.items()
            assert env.keys() == EVERYWHERE.keys() | PER_NODE | PER_WORKER, "nothing is given by accident"


def test_what_differs_between_workers_or_rounds_is_what_the_fork_server_lacks() -> None:
    """Any other variable may be read by a module that is imported once for all of them."""
    rounds = (round_of(2, 2, 2), replace(round_of(2, 2), round=6, reason="n2 was lost"), replace(round_of(2), round=7))
    every = [spec for record in rounds for node in range(len(record.members)) for spec in specs(record, node, {"RANK": "9", "A": "1"})]
    same = {name: value for name, value in every[0].env.items() if all(spec.env.get(name) == value for spec in every)}
    varies = {name for spec in every for name in spec.env} - same.keys()
    assert varies <= forkserver.ROUND_NAMES and not {"A", "OMP_NUM_THREADS", "ELASTIRUN_AGENT"} & varies
    node = NodeEnvironment({"RANK": "9", "A": "1"}, 16, mark="run-1", live=LIVE, socket="/tmp/socket")
    like = worker_like(replace(CONFIG, nproc=2), node)
    assert {name: value for name, value in like.env.items() if name not in forkserver.ROUND_NAMES} == {
        name: value for name, value in same.items() if name not in forkserver.ROUND_NAMES
    }
    assert next(iter(like.env)) == "ELASTIRUN_AGENT", "at the beginning, where the guard finds it"


def test_each_worker_has_a_page_of_its_own_and_none_where_there_are_none() -> None:
    assert column(round_of(2, 1), "ELASTIRUN_PROGRESS") == [("/page0",), ("/page1",), ("/page0",)]
    (spec,) = worker_specs(replace(CONFIG, nproc=1), round_of(1), 0, NodeEnvironment({"ELASTIRUN_PROGRESS": "/outer"}), lambda local: "")
    assert spec.env["ELASTIRUN_PROGRESS"] == "", "never that of a worker that has started this launcher"


def test_ranks_with_different_numbers_of_workers() -> None:
    assert column(round_of(1, 3, 2), "RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE") == [
        ("0", "0", "0", "1", "6"),
        ("1", "0", "1", "3", "6"),
        ("2", "1", "1", "3", "6"),
        ("3", "2", "1", "3", "6"),
        ("4", "0", "2", "2", "6"),
        ("5", "1", "2", "2", "6"),
    ]


def test_roles_are_counted_apart() -> None:
    assert column(round_of(1, 2, 2, roles="aba"), "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE") == [
        ("a", "0", "3"),
        ("b", "0", "2"),
        ("b", "1", "2"),
        ("a", "1", "3"),
        ("a", "2", "3"),
    ]


def test_a_worker_has_its_own_error_file_whatever_the_launcher_was_given() -> None:
    found = envs(round_of(2), 0, {"TORCHELASTIC_ERROR_FILE": "/the/launchers"})
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in found] == ["/logs/0/error.json", "/logs/1/error.json"]


def test_the_agents_environment_goes_to_the_workers_below_what_is_theirs() -> None:
    (env,) = envs(round_of(1), 0, {"PATH": "/bin", "RANK": "7", "MASTER_ADDR": "of an outer launcher", "TORCHELASTIC_TIMER_FILE": "/f"})
    assert (env["PATH"], env["RANK"], env["MASTER_ADDR"], env["TORCHELASTIC_TIMER_FILE"]) == ("/bin", "0", "10.0.0.1", "/f")


def test_what_the_user_set_stays() -> None:
    own = dict.fromkeys(("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"), "mine")
    env = envs(round_of(1, 1), 1, own)[0]
    assert env.items() >= own.items()
    assert env["NCCL_SOCKET_IFNAME"] == "=eth1", "each is decided for itself"


def test_gloo_of_a_single_node_stays_on_the_loopback() -> None:
    (env, _) = envs(round_of(2))
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in env, "NCCL of one node may still speak to processes that others started"
    assert envs(round_of(2), 0, {"GLOO_SOCKET_IFNAME": "mine"})[0]["GLOO_SOCKET_IFNAME"] == "mine"


def test_workers_that_meet_on_the_rendezvous_store_reach_it_as_their_agent_does() -> None:
    record, here = round_of(1, 1), NodeEnvironment({}, 1, None, store=("10.9.9.9", 4001))
    for node in (0, 1):
        (spec,) = worker_specs(replace(CONFIG, nproc=1), record, node, here, str)
        assert (spec.env["MASTER_ADDR"], spec.env["MASTER_PORT"]) == ("10.9.9.9", "4001")
    (spec,) = worker_specs(replace(CONFIG, nproc=1), record, 0, replace(here, store=("10.9.9.9", 4999)), str)
    assert (spec.env["MASTER_ADDR"], spec.env["MASTER_PORT"]) == ("10.0.0.1", "4001"), "node 0 serves a store of its own"


def test_no_interface_is_made_up() -> None:
    record = round_of(1, 1)
    (spec,) = worker_specs(CONFIG, record, 0, NodeEnvironment({}, 1, None), str)
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & spec.env.keys()


def test_the_secret_stays_with_the_agent() -> None:
    for spec in specs(round_of(2, 1)):
        assert not any(TOKEN.decode() in text for text in (*spec.env.values(), *spec.env, *spec.argv))


@pytest.mark.parametrize(
    ("cpus", "workers", "bound", "threads"),
    [(16, 2, None, "8"), (17, 4, None, "4"), (2, 8, None, "1"), (64, 2, 4, "4"), (4, 2, 16, "2")],
)
def test_threads_are_a_fair_share(cpus: int, workers: int, bound: int | None, threads: str) -> None:
    sets = None if bound is None else [frozenset(range(bound))] * workers
    for record, node_rank in ((round_of(workers), 0), (round_of(1, workers), 1)):
        assert {spec.env["OMP_NUM_THREADS"] for spec in specs(record, node_rank, cpus=cpus, cpu_sets=sets)} == {threads}


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, ["0", "1"]), ("4, 7", ["4", "7"]), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"]), ("", ["", ""])]
)
def test_virtual_local_ranks(visible: str | None, devices: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = specs(round_of(2), environ=environ, config=replace(CONFIG, virtual_local_rank=True))
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in found] == devices
    assert [(spec.env["LOCAL_RANK"], spec.env["RANK"]) for spec in found] == [("0", "0"), ("0", "1")]


# --- argv


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (Command("t.py", ("-m",)), [sys.executable, "-u", "t.py", "-m"]),
        (Command("pkg.mod", ("a",), module=True), [sys.executable, "-u", "-m", "pkg.mod", "a"]),
        (Command("/bin/t", ("a",), no_python=True), ["/bin/t", "a"]),
    ],
)
def test_what_is_run(command: Command, argv: list[str]) -> None:
    assert command_line(command, {}) == tuple(argv)
    assert command_line(command, {"PYTHON_EXEC": "other"})[0] == ("/bin/t" if command.no_python else "other")


def torchrun_substitutes(arguments: list[str], local_rank: str) -> list[str]:
    """With torch's own function, out of the one file that holds it: importing torch takes seconds."""
    torch = importlib.util.find_spec("torch")
    assert torch and torch.origin
    spec = importlib.util.spec_from_file_location("torch_macros", Path(torch.origin).parent / "distributed/elastic/utils/api.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    substituted: list[str] = module.macros.substitute(arguments, local_rank)
    return substituted


@pytest.mark.parametrize(
    ("argument", "replaced"),
    [
        ("--local-rank=${local_rank}", "--local-rank=1"),
        ("$local_rank", "1"),
        ("$local_rank.txt", "1.txt"),
        ("$local_ranks", "$local_ranks"),
        ("${LOCAL_RANK} ${rank} $1 $ 5$", "${LOCAL_RANK} ${rank} $1 $ 5$"),
        ("$$local_rank", "$local_rank"),
        ("a$$b", "a$b"),
        ("\udcff$local_rank", "\udcff1"),
    ],
)
def test_local_rank_in_arguments(argument: str, replaced: str) -> None:
    command = Command("${local_rank}.py", (argument,))
    found = specs(round_of(2), config=replace(CONFIG, command=command))[1].argv
    assert found == (sys.executable, "-u", "1.py", replaced), "the script is looked through too"
    assert found == (sys.executable, *torchrun_substitutes(["-u", "${local_rank}.py", argument], "1")), "as torchrun does"


def test_a_program_is_no_template() -> None:
    command = Command("./$local_rank", ("$local_rank",), no_python=True)
    assert specs(round_of(2), config=replace(CONFIG, command=command))[1].argv == ("./$local_rank", "1")
    environ = {"PYTHON_EXEC": "/opt/$local_rank"}
    assert specs(round_of(1), environ=environ)[0].argv[0] == "/opt/$local_rank"


# --- CPUs


def test_without_a_binding_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(numa, "gpu_pci_ids")
    assert cpu_sets(CONFIG, {}) is None
    assert specs(round_of(1))[0].cpus is None


def test_a_set_for_each_worker() -> None:
    sets = [frozenset({0, 1}), frozenset({2})]
    assert [spec.cpus for spec in specs(round_of(2), cpu_sets=sets)] == sets


def test_the_sets_are_made_once_from_gpus_and_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "gpu_pci_ids", lambda environ: [environ["CUDA_VISIBLE_DEVICES"]])
    asked: list[object] = []

    def cpus_for(*arguments: object) -> frozenset[int]:
        asked.append(arguments)
        return frozenset({len(asked)})

    monkeypatch.setattr(numa, "cpus_for", cpus_for)
    assert cpu_sets(replace(CONFIG, numa_binding="socket"), {"CUDA_VISIBLE_DEVICES": "3"}) == [{1}, {2}]
    assert asked == [("socket", rank, 2, ["3"], os.sched_getaffinity(0)) for rank in range(2)]


def run_bound(cpus: str) -> subprocess.CompletedProcess[str]:
    """A program that prints its CPUs, started as a worker is."""
    program = [sys.executable, "-I", "-S", "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]
    shim = [sys.executable, "-I", "-S", spawn._EXEC_WORKER, str(os.getpid()), cpus, "-", "-", "0", *program]
    return subprocess.run(shim, capture_output=True, text=True, check=True)


def test_a_worker_runs_on_its_cpus() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert run_bound(str(allowed[-1])).stdout == f"{allowed[-1]}\n"
    assert run_bound("-").stdout.split() == [str(cpu) for cpu in allowed]


def test_cpus_that_are_gone_do_not_keep_a_worker_from_running() -> None:
    done = run_bound("1023")
    assert done.stdout.split() == [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    assert done.stderr == "elastirun: cannot bind to CPUs 1023: Invalid argument; this worker runs on all it may use\n"
