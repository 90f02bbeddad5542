"""Detection of a Slurm step with one agent per node: ``srun --ntasks-per-node=1 elastirun train.py``. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastirun.cli.detect import node_list
from elastirun.cli.detect.detected import FIRST_PORT, LAST_CALL, OVERRIDE, PORTS, Detected, UnclearError, nothing, number, source
from elastirun.errors import UsageError

STEP_STRIDE = 1009  # a prime: steps of one job that run side by side on a node get ports apart from those of the next jobs

JOB, RESTARTS, HETEROGENEOUS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_HET_SIZE"
STEP, NODES, TASKS, NODE_LIST = "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
INDEX, NAME = "SLURM_NODEID", "SLURMD_NODENAME"  # of this node
JOB_NODES, JOB_NODE_LIST = "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"


def step(environ: Mapping[str, str]) -> Detected:
    """Return this node's part in a job of all nodes of the step. Raises ``UnclearError``, and ``UsageError`` for contradictions."""
    nodes = number(environ, NODES)
    if nodes == 1:
        if (tasks := number({TASKS: "1", **environ}, TASKS)) > 1:
            why = f"this Slurm step has {tasks} tasks on one node ({TASKS}); each starts an agent, which trains by itself on the same GPUs"
            raise UnclearError(f"{why}: srun --ntasks-per-node=1")
        return nothing(f"this Slurm step has one node ({NODES}=1)")
    if number({HETEROGENEOUS: "0", **environ}, HETEROGENEOUS) > 1:
        why = "this is a heterogeneous Slurm job, which does not say whose nodes belong together"
        raise UnclearError(f"{source(environ, HETEROGENEOUS)}: {why}")
    tasks = number(environ, TASKS)
    if tasks > nodes:
        why = f"this Slurm step has {tasks} tasks on {nodes} nodes ({TASKS}, {NODES}), and a job of several nodes needs one agent on each"
        raise UnclearError(f"{why}: srun --ntasks-per-node=1")
    hosts, index, own = _hosts(environ, nodes), number(environ, INDEX), environ.get(NAME, "")
    if index >= nodes:
        raise UsageError(f"{source(environ, INDEX)} and {source(environ, NODES)} contradict each other: nodes count from 0; {OVERRIDE}")
    job, number_of_step = number(environ, JOB), number(environ, STEP)
    restarts = number({RESTARTS: "0", **environ}, RESTARTS)
    port = FIRST_PORT + (job + STEP_STRIDE * number_of_step) % PORTS
    run_id = f"slurm-{job}.{number_of_step}" + (f"-restart{restarts}" if restarts else "")  # a requeued job keeps its number
    parts = (JOB, STEP, RESTARTS) if restarts else (JOB, STEP)
    return Detected(
        where="a Slurm step",
        values={
            "nnodes": (f"1:{nodes}", source(environ, NODES)),
            "rdzv_endpoint": (f"{hosts[0]}:{port}", f"the first of {source(environ, NODE_LIST)}, a port by {JOB} and {STEP}"),
            "rdzv_id": (run_id, ", ".join(source(environ, name) for name in parts)),
            "node_rank": (str(index), source(environ, INDEX)),
            "last_call": (str(LAST_CALL), f"all of {source(environ, NODES)} are expected"),
        },
        is_host=own == hosts[0] if own else index == 0,
        why=f"a Slurm step with one task on each of {nodes} nodes ({source(environ, STEP)} of {source(environ, JOB)})",
    )


def outside_step(environ: Mapping[str, str]) -> Detected:
    """Return that nothing was detected in a process that ``srun`` has not started; in a batch script that may be a mistake."""
    in_script = INDEX in environ  # sbatch sets it for the script; salloc does not for its shell
    try:
        nodes = number(environ, JOB_NODES)
    except UnclearError:
        nodes = 1
    if nodes < 2 or not in_script:
        return nothing(f"this process is in no step of the Slurm job ({STEP} is not set)")
    return nothing(f"this is the script of a Slurm job of {nodes} nodes, on one of them; start one agent on each with srun", warn=True)


def _hosts(environ: Mapping[str, str], nodes: int) -> list[str]:
    """Return the names of the step's nodes."""
    hosts = _expand(environ, NODE_LIST)
    if len(hosts) != nodes:
        both = f"{source(environ, NODE_LIST)} ({len(hosts)} nodes) and {source(environ, NODES)}"
        raise UsageError(f"{both} contradict each other; {OVERRIDE}")
    _check_own(environ, hosts)
    return hosts


def _check_own(environ: Mapping[str, str], hosts: list[str]) -> None:
    """Refuse variables of another step. A batch script that was submitted from inside a step still has those of that step."""
    if environ.get(NAME, hosts[0]) not in hosts:
        raise UnclearError(f"{source(environ, NODE_LIST)} does not name this node, {source(environ, NAME)}: it is of another Slurm step")
    if JOB_NODE_LIST in environ and not {*hosts} <= {*_expand(environ, JOB_NODE_LIST)}:
        raise UnclearError(f"{source(environ, NODE_LIST)} is not in {source(environ, JOB_NODE_LIST)}: it is of another Slurm job")


def _expand(environ: Mapping[str, str], name: str) -> list[str]:
    if name not in environ:
        raise UnclearError(f"{name} is not set")
    try:
        return node_list.expand(environ[name])
    except ValueError as error:
        raise UnclearError(f"{source(environ, name)} cannot be read, {error}") from None
