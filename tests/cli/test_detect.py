"""What is detected of a job of several nodes, from tables of environments as schedulers make them, and what is left alone."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastirun.cli.detect import node_list
from elastirun.cli.detect.detected import Detected, Host
from elastirun.cli.detect.schedulers import detect
from elastirun.cli.given_options import GivenOptions
from elastirun.cli.options import BY_DEST
from elastirun.config import Endpoint, LaunchConfig
from elastirun.errors import UsageError
from tests.cli.test_resolve import LAPTOP, error_of, resolved

Environment = Mapping[str, str]

# As srun gives it to task 1 of: sbatch --nodes=3, srun --ntasks-per-node=1.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_LAUNCHER_PORT": "40123",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu08",
}
NEEDED = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_JOB_ID")
SCRIPT = {name: value for name, value in STEP.items() if "_STEP_" not in name} | {"SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"}
SHELL = {name: value for name, value in SCRIPT.items() if name not in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME")}

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
INDEXED = {**POD, "JOB_COMPLETION_INDEX": "1"}
IN_JOB = Host("train-1", ("train-1.train.team.svc.cluster.local",))
IN_SWEEP = Host("sweep-1", ("sweep-1",))  # an Indexed Job without a subdomain
IN_SET = Host("exp-workers-0-1", ("exp-workers-0-1.exp.team.svc.cluster.local",))
IN_SET_JOB_2 = Host("exp-workers-2-1", ("exp-workers-2-1.exp.team.svc.cluster.local",))
IN_STATEFUL = Host("ddp-2", ("ddp-2.ddp-peers.team.svc.k8s.example.org",))
ON_NODE = Host("gpu-node-1", ("gpu-node-1.example.org",))  # a pod with hostNetwork has the names of its node
JOB_SET = {**INDEXED, "JOBSET_NAME": "exp"}


def values(line: str, environ: Environment, host: Host = LAPTOP) -> tuple[str, str, str, int | None, bool | None]:
    """Return the nodes, the endpoint, the job id, the rank, and whether this node hosts the store."""
    config, options = resolved(line, environ, host)
    assert options.warnings == []
    return f"{config.min_nodes}:{config.max_nodes}", str(config.endpoint), config.run_id, config.node_rank, config.is_host


def without(name: str) -> dict[str, str]:
    return {other: text for other, text in STEP.items() if other != name}


def assert_alone(line: str, environ: Environment, host: Host = LAPTOP, warning: str = "") -> None:
    """Assert that the command does what it does where no scheduler is, apart from a warning that has ``warning``."""
    config, options = resolved(line, environ, host)
    assert config == resolved(line)[0]
    assert (options.detected.where, len(options.warnings)) == ("", bool(warning))
    assert warning in "".join(options.warnings)


# --- Slurm


@pytest.mark.parametrize(
    ("line", "change", "expected"),
    [
        ("t.py", {}, ("1:3", "gpu07:24711", "slurm-4711.0", 1, False)),
        ("t.py", {"SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"}, ("1:3", "gpu07:24711", "slurm-4711.0", 0, True)),
        ("t.py", {"SLURM_RESTART_COUNT": "2"}, ("1:3", "gpu07:24711", "slurm-4711.0-restart2", 1, False)),
        ("t.py", {"SLURM_STEP_ID": "4"}, ("1:3", "gpu07:28747", "slurm-4711.4", 1, False)),
        ("--nnodes=2:3 t.py", {}, ("2:3", "gpu07:24711", "slurm-4711.0", 1, False)),
        ("--nnodes=3 t.py", {}, ("3:3", "gpu07:24711", "slurm-4711.0", 1, False)),
        ("t.py", {"PET_NNODES": "2:8", "PET_RDZV_ID": "mine"}, ("2:8", "gpu07:24711", "mine", 1, False)),
        ("--rdzv-id=mine --node-rank=2 t.py", {"PET_RDZV_ID": "theirs"}, ("1:3", "gpu07:24711", "mine", 2, False)),
        ("--nnodes=3 --node-rank=2 t.py", {}, ("3:3", "gpu07:24711", "slurm-4711.0", 2, False)),
        ("--rdzv-backend=c10d --rdzv-conf=is_host=1,rank=0 t.py", {}, ("1:3", "gpu07:24711", "slurm-4711.0", 0, True)),
        ("--rdzv-endpoint= t.py", {"PET_STANDALONE": "0", "PET_RDZV_ID": " "}, ("1:3", "gpu07:24711", "slurm-4711.0", 1, False)),
        # A cluster on Kubernetes: the pods of slurmd are those of a StatefulSet.
        ("t.py", POD, ("1:3", "gpu07:24711", "slurm-4711.0", 1, False)),
        # A reordered list: the name decides who hosts the store, and the index is a wish.
        ("t.py", {"SLURM_STEP_NODELIST": "gpu08,gpu07,gpu09"}, ("1:3", "gpu08:24711", "slurm-4711.0", 1, True)),
    ],
)
def test_a_step_of_slurm_with_one_task_per_node(line: str, change: Environment, expected: tuple[object, ...]) -> None:
    assert values(line, {**STEP, **change}) == expected
    config, _ = resolved(line, {**STEP, **change})
    assert not config.fixed_ranks and not config.standalone and not config.meet_at_endpoint


@pytest.mark.parametrize(
    ("line", "change", "seconds"),
    [
        ("t.py", {}, 60),
        ("--last-call=7 t.py", {}, 7),
        ("t.py", {"PET_LAST_CALL": "7"}, 7),
        ("--rdzv-conf=last_call_timeout=7 t.py", {}, 7),
        ("t.py", {"PET_RDZV_CONF": "last_call_timeout=7"}, 7),
        ("--nnodes=1:2 t.py", {}, 60),  # the step has three nodes, at most two take part
        ("--nnodes=1:8 t.py", {}, 5),  # the step has three nodes: eight never come
    ],
)
def test_the_first_round_waits_for_the_nodes_of_a_step(line: str, change: Environment, seconds: float) -> None:
    config, _ = resolved(line, {**STEP, **change})
    assert config.timing.last_call == seconds


def test_all_nodes_of_a_step_agree_and_one_hosts() -> None:
    found = [values("t.py", {**STEP, "SLURM_NODEID": str(i), "SLURMD_NODENAME": f"gpu0{7 + i}"}) for i in range(3)]
    assert len({one[:3] for one in found}) == 1
    assert [one[3:] for one in found] == [(0, True), (1, False), (2, False)]


def test_steps_side_by_side_have_ports_and_names_of_their_own() -> None:
    steps = [{**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(100) for step in range(9)]
    found = [detect(environ, lambda: LAPTOP, False).values for environ in steps]
    assert len({one["rdzv_endpoint"] for one in found}) == len({one["rdzv_id"][0] for one in found}) == 900


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on one node"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes"),
        ({**STEP, "SLURM_HET_SIZE": "2"}, "heterogeneous"),
        ({**STEP, "TORCHELASTIC_RUN_ID": "j"}, ""),  # a launcher inside a worker
        ({**STEP, "ELASTIRUN_AGENT": "1-2-3"}, ""),
        ({**STEP, "PET_DETECT": "off"}, ""),
        (SHELL, ""),  # salloc
        ({**SHELL, "SLURM_STEP_ID": "interactive"}, ""),
        (SCRIPT, "start one agent on each with srun"),
        ({**SCRIPT, "SLURM_JOB_NUM_NODES": "1"}, ""),
        ({**SCRIPT, "SLURM_JOB_NUM_NODES": "x"}, ""),
        # A script that was submitted from inside another step has the variables of that step.
        ({**STEP, "SLURM_NODEID": "0", "SLURMD_NODENAME": "cpu01"}, "does not name this node, SLURMD_NODENAME=cpu01"),
        ({**STEP, "SLURM_JOB_NODELIST": "gpu08"}, "is of another Slurm job"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[07-"}, "SLURM_STEP_NODELIST=gpu[07- cannot be read"),
        ({**STEP, "SLURM_STEP_NODELIST": "(null)"}, "SLURM_STEP_NODELIST=(null) cannot be read"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "three"}, "SLURM_STEP_NUM_NODES=three is no number"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "³"}, "SLURM_STEP_NUM_NODES=³ is no number"),
        ({**STEP, "SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 is no number"),
        ({**STEP, "SLURM_JOB_ID": "1\n2"}, r"SLURM_JOB_ID='1\n2' is no number"),
        *((without(name), f"{name} is not set") for name in NEEDED),
    ],
)
def test_slurm_without_a_step_of_one_task_per_node(environ: Environment, warning: str) -> None:
    assert_alone("--nproc-per-node=2 t.py", environ, warning=warning)


# Processes of a real Slurm, see tests/deploy/slurm_environments.py: what each is taken for.
ALONE = {
    "batch_script": "start one agent on each with srun",
    "batch_script_requeued": "start one agent on each with srun",
    "salloc_shell": "",
    "salloc_shell_on_a_node": "",
    "srun_alone_on_one_node": "",
    "srun_alone_with_three_tasks_on_two_nodes": "3 tasks on 2 nodes",
    "srun_alone_with_two_tasks_per_node": "6 tasks on 3 nodes",
    "step_of_heterogeneous_job": "heterogeneous",
    "step_on_one_node_of_three": "",
    "step_with_two_tasks_per_node": "6 tasks on 3 nodes",
}
TOGETHER = {
    "srun_alone": "h0",
    "step_of_array": "h0",
    "step_of_batch": "h0",
    "step_of_batch_requeued": "h0",
    "step_of_salloc": "h0",
    "step_on_two_nodes_of_three": "h1",
}
RECORDED: dict[str, list[dict[str, str]]] = json.loads(Path(__file__).with_name("slurm_environments.json").read_text())["environments"]


@pytest.mark.parametrize("kind", RECORDED)
def test_processes_of_a_real_slurm(kind: str) -> None:
    if kind in ALONE:
        for environ in RECORDED[kind]:
            assert_alone("t.py", environ, warning=ALONE[kind])
        return
    found = [values("t.py", environ) for environ in RECORDED[kind]]
    ((nodes, endpoint, run_id),) = {one[:3] for one in found}
    assert (nodes, endpoint.partition(":")[0]) == (f"1:{len(found)}", TOGETHER[kind])
    assert run_id.endswith("-restart1") == ("SLURM_RESTART_COUNT" in RECORDED[kind][0])
    assert [one[3:] for one in found] == [(i, i == 0) for i in range(len(found))]


# --- Kubernetes


@pytest.mark.parametrize(
    ("line", "environ", "host", "expected"),
    [
        ("t.py", INDEXED, IN_JOB, ("1:1024", "train-0.train.team.svc.cluster.local:29400", "team.train", 1, False)),
        (
            "t.py",
            {**INDEXED, "JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2:4", "PET_RDZV_ID": "uid"},
            Host("train-0", ("localhost.localdomain", "train-0.train.team.svc.cluster.local")),
            ("2:4", "train-0.train.team.svc.cluster.local:29400", "uid", 0, True),
        ),
        # setHostnameAsFQDN; a domain of the cluster without a name
        ("t.py", INDEXED, Host("train-1.train.team.svc"), ("1:1024", "train-0.train.team.svc:29400", "team.train", 1, False)),
        # a JobSet: with one job per group nothing need be set
        ("--nnodes=2 t.py", INDEXED, IN_SET, ("2:2", "exp-workers-0-0.exp.team.svc.cluster.local:29400", "team.exp-workers-0", 1, False)),
        ("--nnodes=2 t.py", JOB_SET, IN_SET, ("2:2", "exp-workers-0-0.exp.team.svc.cluster.local:29400", "team.exp-workers", 1, False)),
        (
            "--nnodes=6 t.py",
            JOB_SET,
            IN_SET_JOB_2,
            ("6:6", "exp-workers-0-0.exp.team.svc.cluster.local:29400", "team.exp-workers", None, False),
        ),
        # a StatefulSet: only where a number of nodes was given
        ("--nnodes=1:4 t.py", POD, IN_STATEFUL, ("1:4", "ddp-0.ddp-peers.team.svc.k8s.example.org:29400", "team.ddp", 2, False)),
        ("t.py", {**POD, "PET_NNODES": "3"}, IN_STATEFUL, ("3:3", "ddp-0.ddp-peers.team.svc.k8s.example.org:29400", "team.ddp", 2, False)),
    ],
)
def test_a_pod_with_an_index_and_a_name(line: str, environ: Environment, host: Host, expected: tuple[object, ...]) -> None:
    assert values(line, environ, host) == expected


@pytest.mark.parametrize(
    ("environ", "host", "warning"),
    [
        (INDEXED, IN_SWEEP, ""),
        (INDEXED, ON_NODE, ""),
        (INDEXED, LAPTOP, ""),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "one"}, IN_JOB, "JOB_COMPLETION_INDEX=one is no number"),
        (INDEXED, IN_SET_JOB_2, "set JOBSET_NAME from the label"),
        (INDEXED, Host("train-1", ("other-1.train.team.svc.cluster.local",)), ""),
        (INDEXED, Host("train-1", ("train-1.train.team.pod.cluster.local",)), ""),
        (POD, IN_STATEFUL, ""),
        (POD, IN_JOB, ""),
        ({**INDEXED, "RANK": "0", "TORCHELASTIC_RUN_ID": "j"}, IN_JOB, ""),
        ({**INDEXED, "PET_DETECT": "off"}, IN_JOB, ""),
    ],
)
def test_pods_that_work_alone(environ: Environment, host: Host, warning: str) -> None:
    assert_alone("t.py", environ, host, warning=warning)


def test_one_pod_of_a_job_set_hosts() -> None:
    def host(job: int, index: int) -> bool | None:
        name = f"exp-workers-{job}-{index}"
        environ = {**JOB_SET, "JOB_COMPLETION_INDEX": str(index)}
        return resolved("t.py", environ, Host(name, (f"{name}.exp.team.svc.cluster.local",)))[0].is_host

    assert [host(job, index) for job in (0, 1) for index in (0, 1)] == [True, False, False, False]


def test_an_index_beyond_the_most_nodes_is_a_spare() -> None:
    """A Job that was scaled too far must not fail: its other pods train."""
    config, options = resolved("t.py", {**INDEXED, "PET_NNODES": "1:1"}, IN_JOB)
    assert (config.max_nodes, options.warnings) == (1, []), "one node was asked for"
    config, options = resolved(
        "t.py", {**INDEXED, "JOB_COMPLETION_INDEX": "4", "PET_NNODES": "2:4"}, Host("train-4", ("train-4.train.team.svc.cluster.local",))
    )
    assert config.node_rank is None
    assert options.warnings == ["JOB_COMPLETION_INDEX=4: PET_NNODES allows 4 nodes; this one is a spare until there is room"]


# The variables that Kubeflow's operators set in their pods. They name the rendezvous, so nothing is detected.
TRAIN_JOB = {
    **INDEXED,
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
PYTORCH_JOB = {
    **POD,
    "PYTHONUNBUFFERED": "1",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "run-worker-0:23456",
    "PET_RDZV_ID": "run",
    "PET_NNODES": "1:3",
    "PET_NPROC_PER_NODE": "2",
    "PET_MAX_RESTARTS": "100",
}


@pytest.mark.parametrize(
    ("environ", "endpoint", "rank"),
    [(TRAIN_JOB, Endpoint("run-node-0-0.run", 29400), 1), (PYTORCH_JOB, Endpoint("run-worker-0", 23456), None)],
)
def test_what_kubeflow_sets_is_taken_as_it_is(environ: Environment, endpoint: Endpoint, rank: int | None) -> None:
    config, options = resolved("t.py", environ, IN_JOB)
    assert (config.endpoint, config.node_rank, config.nproc, options.detected.where) == (endpoint, rank, 2, "")
    assert config == resolved("t.py", {name: text for name, text in environ.items() if name.startswith("PET_")})[0]


# --- mpirun, Flux, Azure ML, and variables set by hand

MPI: dict[str, list[dict[str, str]]] = json.loads(Path(__file__).with_name("mpi_environments.json").read_text())["environments"]
FLUX = {"FLUX_JOB_ID": "ƒ3ETxsR9H", "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "3", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "0"}
FLUX |= {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "8", "FLUX_URI": "local:///run/flux/local", "MASTER_ADDR": "n7"}
AZURE = {"AZUREML_NODE_COUNT": "2", "AZUREML_RUN_ID": "brave_fig_1", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"}
AZURE |= {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
BY_HAND = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "fd00::7", "MASTER_PORT": "29500"}
RAY_TRAIN = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "41233", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "NODE_RANK": "1"}
PYTORCH_JOB_WITHOUT_PET = {"MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}


@pytest.mark.parametrize("kind", MPI)
def test_tasks_of_a_real_mpirun(kind: str) -> None:
    environs = MPI[kind]
    for environ in environs if "two_per_node" in kind else []:
        assert_alone("t.py", environ, warning="has several tasks on this node")
        assert_alone("t.py", {**environ, **STEP}, warning="has several tasks on this node")
    if "one_per_node" in kind:
        port = environs[0].get("MASTER_PORT", "29400")
        expected = ("1:2", f"node0:{port}", f"node0-{port}")
        assert [values("t.py", environ) for environ in environs] == [(*expected, i, i == 0) for i in range(2)]
        for environ in environs:
            nameless = {name: text for name, text in environ.items() if not name.startswith("MASTER_")}
            assert_alone("t.py", nameless, warning="and nothing says where the first of them is: mpi")
            assert_alone("t.py", {**environ, "MASTER_ADDR": "localhost"}, warning="MASTER_ADDR=localhost is another machine on each node")
    if "on_one_node" in kind:
        assert_alone("t.py", environs[0])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (FLUX, ("1:3", "n7:29400", "f3ETxsR9H", 1, False)),
        ({**FLUX, "FLUX_TASK_RANK": "0"}, ("1:3", "n7:29400", "f3ETxsR9H", 0, True)),
        (AZURE, ("1:2", "10.0.0.4:6105", "brave_fig_1", 1, False)),
        (BY_HAND, ("1:4", "[fd00::7]:29500", "fd00::7-29500", 2, False)),
        ({**INDEXED, **BY_HAND}, ("1:4", "[fd00::7]:29500", "fd00::7-29500", 2, False)),  # with hostNetwork: the pod has no name
        ({**BY_HAND, "PET_NNODES": "2:8", "PET_RDZV_ID": "mine"}, ("2:8", "[fd00::7]:29500", "mine", 2, False)),
    ],
)
def test_nodes_that_are_numbered_and_the_first_is_named(environ: Environment, expected: tuple[object, ...]) -> None:
    assert values("t.py", environ) == expected


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({**FLUX, "FLUX_JOB_SIZE": "6"}, "flux run --tasks-per-node=1"),
        ({**FLUX, "MASTER_ADDR": ""}, "MASTER_ADDR=$(flux hostlist --nth=0 local)"),
        ({**AZURE, "WORLD_SIZE": "8"}, "process_count_per_instance=1"),
        ({**BY_HAND, "NNODES": "1", "NODE_RANK": "0"}, ""),
        ({**BY_HAND, "NNODES": "many"}, "NNODES=many is no number"),
        ({**BY_HAND, "NNODES": "0"}, "NNODES=0 is no number of nodes"),
        ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({**BY_HAND, "MASTER_ADDR": "tcp://n7"}, "is a URL"),
        ({**BY_HAND, "MASTER_ADDR": "127.0.0.1"}, "is another machine on each node"),
        ({**BY_HAND, "TORCHELASTIC_RUN_ID": "j"}, ""),
        ({**BY_HAND, "PET_DETECT": "off"}, ""),
        (RAY_TRAIN, ""),  # an actor of Ray is a worker, and tells no number of nodes
        (PYTORCH_JOB_WITHOUT_PET, "--nnodes=$WORLD_SIZE --node-rank=$RANK --master-addr=$MASTER_ADDR"),
        ({**PYTORCH_JOB_WITHOUT_PET, "WORLD_SIZE": "1", "RANK": "0"}, ""),
        ({**PYTORCH_JOB_WITHOUT_PET, "MASTER_ADDR": "localhost"}, ""),
        ({"PBS_JOBID": "12.pbs", "PBS_NODENUM": "1", "PBS_TASKNUM": "7"}, "this PBS job has several nodes (PBS_NODENUM=1)"),
        ({"PBS_JOBID": "12.pbs", "PBS_NODENUM": "0", "PBS_NUM_NODES": "4"}, "this PBS job has several nodes (PBS_NUM_NODES=4)"),
        ({"PBS_JOBID": "12.pbs", "PBS_NODENUM": "0", "PBS_NUM_NODES": "1"}, ""),
    ],
)
def test_who_does_not_know_the_others_runs_alone(environ: Environment, warning: str) -> None:
    assert_alone("t.py", environ, warning=warning)


def test_a_pod_with_a_name_and_an_index_goes_before_variables_set_by_hand() -> None:
    assert values("t.py", {**INDEXED, **BY_HAND}, IN_JOB)[1] == "train-0.train.team.svc.cluster.local:29400"


# --- SageMaker, LSF, Volcano

SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "pytorch-2026-11-30", "SM_NUM_GPUS": "8"}
LSF = {"LSB_JOBID": "10477", "LSB_MCPU_HOSTS": "c1 4 c2 4 c3 2", "LSB_HOSTS": "c1 c1 c1 c1 c2 c2 c2 c2 c3 c3", "LSF_PM_TASKID": "2"}
VOLCANO = {**POD, "VC_WORKER_HOSTS": "run-worker-0.run,run-worker-1.run", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SAGEMAKER, ("1:2", "algo-1:29400", "pytorch-2026-11-30", 1, False)),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-1", "TRAINING_JOB_NAME": ""}, ("1:2", "algo-1:29400", "sagemaker", 0, True)),
        (LSF, ("1:3", "c1:20477", "lsf-10477", 1, False)),
        ({**LSF, "LSB_JOBINDEX": "3", "LSF_PM_TASKID": "1"}, ("1:3", "c1:20480", "lsf-10477.3", 0, True)),
        (VOLCANO, ("1:2", "run-worker-0.run:29400", "run-worker-0.run", 1, False)),
    ],
)
def test_nodes_that_are_listed(environ: Environment, expected: tuple[object, ...]) -> None:
    assert values("t.py", environ) == expected


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({**SAGEMAKER, "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, ""),
        ({**SAGEMAKER, "SM_HOSTS": "[" * 100_000}, "is no list of names in JSON"),
        ({**SAGEMAKER, "SM_HOSTS": "[1]"}, "is no list of names in JSON"),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-2","algo-2"]'}, "names a node twice"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, "does not name this node, SM_CURRENT_HOST=algo-9"),
        ({**SAGEMAKER, "SM_HOSTS": '["a b","algo-2"]'}, "is not a host name"),
        ({name: text for name, text in LSF.items() if name != "LSF_PM_TASKID"}, "start one agent on each with blaunch"),
        ({**LSF, "LSF_PM_TASKID": "9"}, "blaunch -z with each host once"),
        ({**LSF, "LSB_MCPU_HOSTS": "c1 8"}, ""),
        ({**LSF, "LSB_MCPU_HOSTS": "c1"}, "is no list of hosts"),
        ({**VOLCANO, "VC_PS_HOSTS": "run-ps-0.run"}, "several kinds of tasks (VC_PS_HOSTS, VC_WORKER_HOSTS)"),
        ({**VOLCANO, "VC_WORKER_HOSTS": "run-worker-0.run", "VC_TASK_INDEX": "0"}, ""),
    ],
)
def test_lists_that_make_no_job_of_several_nodes(environ: Environment, warning: str) -> None:
    assert_alone("t.py", environ, warning=warning)


# --- contradictions


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({**STEP, **INDEXED}, ["SLURM_STEP_ID=0", "JOB_COMPLETION_INDEX=1"]),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4"},
            ["SLURM_STEP_NODELIST=gpu[07-09] (3 nodes)", "SLURM_STEP_NUM_NODES=4"],
        ),
        ({**STEP, "SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "SLURM_STEP_NUM_NODES=3"]),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "2"}, ["JOB_COMPLETION_INDEX=2", "host name train-1"]),
        (JOB_SET, ["JOBSET_NAME=exp", "host name train-1"]),
        ({**INDEXED, "JOBSET_NAME": "train"}, ["JOBSET_NAME=train", "host name train-1"]),
        ({**BY_HAND, "NODE_RANK": "4"}, ["NODE_RANK=4", "NNODES=4"]),
        ({**VOLCANO, "VC_TASK_INDEX": "2"}, ["VC_TASK_INDEX=2", "(2 nodes)"]),
    ],
)
def test_contradictions_name_both_and_what_to_do(environ: Environment, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        resolved("t.py", environ, IN_JOB)
    for part in (*parts, "contradict each other", "--rdzv-endpoint", "--detect=off"):
        assert part in str(caught.value)
    assert_alone("--detect=off t.py", environ, IN_JOB)


def test_nodes_without_a_place_to_meet_are_told_why_none_was_detected() -> None:
    message = error_of("--nnodes=3 t.py", SCRIPT)
    assert message.startswith("--nnodes: 3 nodes need a place to meet;") and message.endswith("start one agent on each with srun)")
    assert error_of("--nnodes=3 t.py", {}).endswith("its own --node-rank")


# --- commands that detection does not change

NAMED = (
    "--standalone",
    "--standalone --nnodes=1:4",
    "--nnodes=1",
    "--nnodes=1:1",
    "--rdzv-endpoint=h:1",
    "--rdzv-endpoint=localhost:0 --rdzv-backend=c10d",
    "--nnodes=2:4 --rdzv-endpoint=h --rdzv-id=j",
    "--nnodes=2 --rdzv-endpoint=h",
    "--nnodes=3 --node-rank=1 --master-addr=h",
    "--master-addr=h",
    "--master-port=7",
    "--rdzv-backend=static",
    "--rdzv-backend=static --nnodes=1",
    "--rdzv-backend=etcd --rdzv-endpoint=e --nnodes=2 --rdzv-id=j",
    "--rdzv-backend=etcd --rdzv-endpoint=e --nnodes=2",
    "--detect=off",
)
OTHERS = ("", "--nproc-per-node=2", "--rdzv-id=j", "--max-restarts=3", "--node-rank=0", "--rdzv-conf=is_host=1", "--role=r")


def as_variables(line: str) -> dict[str, str]:
    """Return the options of a command line as PET_ variables."""
    given = dict(word[2:].partition("=")[::2] for word in line.split())
    return {str(BY_DEST[name.replace("-", "_")].env): text or "1" for name, text in given.items()}


def scheduler(dice: random.Random) -> dict[str, str]:
    """Return variables of one or more schedulers, some of them damaged or missing."""
    environ: dict[str, str] = {}
    for some in dice.sample(
        [STEP, SCRIPT, SHELL, INDEXED, JOB_SET, POD, FLUX, AZURE, BY_HAND, SAGEMAKER, LSF, VOLCANO], dice.randint(1, 3)
    ):
        environ |= some
    for name in dice.sample(sorted(environ), dice.randint(0, 3)):
        if dice.random() < 0.5:
            del environ[name]
        else:
            environ[name] = dice.choice(["", "0", "1", "7", "99999999999999999999", "-1", "x", "[", "a[1-", "\n", "n[1-3]", "²", "a" * 300])
    return environ


HOSTS = (LAPTOP, IN_JOB, IN_SWEEP, IN_SET, IN_SET_JOB_2, IN_STATEFUL, ON_NODE)


@pytest.mark.daily(5)
@pytest.mark.parametrize("seed", range(10))
def test_a_command_that_names_its_rendezvous_is_never_changed(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        named, other = dice.choice(NAMED), dice.choice(OTHERS)
        line, environ, host = f"{named} {other} t.py", scheduler(dice), dice.choice(HOSTS)
        if dice.random() < 0.5:
            line, environ = f"{other} t.py", environ | as_variables(named)
        assert seen(line, environ, host) == seen(line, {name: text for name, text in environ.items() if name.startswith("PET_")}, LAPTOP)


def seen(line: str, environ: Environment, host: Host) -> tuple[LaunchConfig, list[str]] | str:
    """Return the configuration and the warnings, or the error."""
    try:
        config, options = resolved(line, environ, host)
    except UsageError as error:
        return str(error)
    return config, options.warnings


@pytest.mark.daily(5)
@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_variables_say_the_answer_is_a_job_or_one_printable_line(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        line, environ, host = f"{dice.choice(OTHERS)} t.py", scheduler(dice), dice.choice(HOSTS)
        found = seen(line, environ, host)
        if isinstance(found, str):
            assert "contradict each other" in found and found.isprintable(), found
            continue
        config, warnings = found
        _, options = resolved(line, environ, host)
        assert all(text.isprintable() for text in (*warnings, options.detected.why, *(row.source for row in options.rows())))
        if options.detected.where:
            assert config.endpoint and config.max_nodes > 1 and config.run_id not in ("none", "new-id") and config.is_host is not None
        else:
            assert dataclasses.replace(config, is_host=None) == dataclasses.replace(seen(line, {}, LAPTOP)[0], is_host=None)  # type: ignore[call-overload]


def test_nothing_is_asked_of_names_unless_this_is_a_pod() -> None:
    asked: list[Host] = []

    def host() -> Host:
        asked.append(LAPTOP)
        return LAPTOP

    for environ in (STEP, SCRIPT, SHELL, {}, POD):
        detect(environ, host, False)
        assert asked == [], "a name server may be slow"


def test_dry_run_rows_say_where_a_value_was_found() -> None:
    _, options = resolved("--rdzv-id=j t.py", {**STEP, "PET_NODE_RANK": "2"})
    rows = {row.option: (row.value, row.source) for row in options.rows()}
    assert rows["--nnodes"] == ("1:3", "detected: SLURM_STEP_NUM_NODES=3")
    assert rows["--node-rank"] == ("2", "environment PET_NODE_RANK")
    assert rows["--rdzv-id"] == ("j", "command line")
    assert rows["--rdzv-backend"] == ("c10d", "derived: the endpoint was detected")
    assert options.detected.why == "a Slurm step with one task on each of 3 nodes (SLURM_STEP_ID=0 of SLURM_JOB_ID=4711)"
    assert GivenOptions({}, {}).detected == Detected()


# --- the list of nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("node[01-03,7],gpu-a[1-2]", ["node01", "node02", "node03", "node7", "gpu-a1", "gpu-a2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[0-1].x.org,b", ["r1n0.x.org", "r1n1.x.org", "r2n0.x.org", "r2n1.x.org", "b"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_a_list_of_nodes(text: str, names: list[str]) -> None:
    assert node_list.expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n1,",
        "n[1-3",
        "n]",
        "n[]",
        "n[3-1]",
        "n[1-2-3]",
        "n[a]",
        "n 1",
        "n[1-70000]",
        "n[1-300][1-300]",
        "n[1-999999999999999999]",
        "a," * 140000,
    ]
    + ["n[1-40000],m[1-40000]", "n[1-40000,1-40000]", "(null)", "n[1],\n"]
    + ["--help", "n1,-n2", ".n1", "n1,n1", "n[1-3],n2", "n[1,1]"],
)
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match=r"(it|\[).* "):
        node_list.expand(text)
