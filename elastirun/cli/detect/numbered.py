"""Detection where nodes are counted and numbered, and ``MASTER_ADDR`` names the first: mpirun, Flux, Azure ML, and by hand. Pure.

None of these says where the first node is. Without ``MASTER_ADDR`` this node runs alone, with a warning that says how to name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.cli import parse
from elastirun.cli.detect.detected import LAST_CALL, OVERRIDE, PORT, Detected, UnclearError, nothing, number, source
from elastirun.errors import UsageError

FIRST, FIRSTS_PORT = "MASTER_ADDR", "MASTER_PORT"
HERE_ONLY = ("localhost", "127.", "::1", "0.0.0.0")  # addresses that are another machine on each node
WORLD, RANK, LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"


@dataclass(frozen=True)
class _Kind:
    """The variables of one way to start a job. ``advice``: how to name the first node, in words."""

    where: str
    nodes: str
    rank: str
    advice: str
    one_each: str = ""  # how to start one task on each node, in words
    tasks: str = ""  # the number of all tasks, where ``nodes`` counts nodes
    here: str = ""  # the number of tasks on this node, where ``nodes`` counts tasks
    job: str = ""  # the name of the job

    def is_seen(self, environ: Mapping[str, str]) -> bool:
        return all(name in environ for name in (self.nodes, self.rank, *filter(None, [self.here])))


KINDS = (  # the first that is seen counts
    _Kind(
        "a job of Open MPI's mpirun",  # https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
        nodes="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        one_each="mpirun --map-by ppr:1:node",
        advice="mpirun -x MASTER_ADDR=HOST",
    ),
    _Kind(
        "a Flux job",  # flux-environment(7)
        nodes="FLUX_JOB_NNODES",
        rank="FLUX_TASK_RANK",
        tasks="FLUX_JOB_SIZE",
        job="FLUX_JOB_ID",
        one_each="flux run --tasks-per-node=1",
        advice="MASTER_ADDR=$(flux hostlist --nth=0 local)",
    ),
    _Kind(
        "a job of mpiexec",  # MPICH's Hydra and Intel MPI
        nodes="PMI_SIZE",
        rank="PMI_RANK",
        here="MPI_LOCALNRANKS",
        one_each="mpiexec -ppn 1",
        advice="mpiexec -genv MASTER_ADDR HOST",
    ),
    _Kind(
        "an Azure ML job",  # learn.microsoft.com, how-to-train-distributed-gpu
        nodes="AZUREML_NODE_COUNT",
        rank="NODE_RANK",
        tasks=WORLD,
        job="AZUREML_RUN_ID",
        one_each="process_count_per_instance=1",
        advice="MASTER_ADDR",
    ),
    _Kind("NNODES and NODE_RANK", nodes="NNODES", rank="NODE_RANK", advice="MASTER_ADDR=HOST"),
)


def node(environ: Mapping[str, str]) -> Detected | None:
    """Return this node's part in a job of several; None: nothing of the kind is seen. Raises ``UnclearError`` and ``UsageError``."""
    kind = _seen(environ)
    if kind is None:
        return _of_workers(environ)
    nodes, rank = number(environ, kind.nodes), number(environ, kind.rank)
    if nodes < 1:
        raise UnclearError(f"{source(environ, kind.nodes)} is no number of nodes")
    if nodes < 2:
        return nothing(f"{kind.where}: there is one node ({source(environ, kind.nodes)})")
    if rank >= nodes:
        both = f"{source(environ, kind.rank)} and {source(environ, kind.nodes)}"
        raise UsageError(f"{both} contradict each other: nodes count from 0; {OVERRIDE}")
    first, port = _first(kind, environ), _port(environ)
    of_first = ", ".join(source(environ, name) for name in (FIRST, FIRSTS_PORT) if name in environ)
    job = environ.get(kind.job, "").replace("ƒ", "f")  # Flux writes its ids with either
    run_id = (job, source(environ, kind.job)) if job.isascii() and job.isprintable() and job.strip() else (f"{first}-{port}", of_first)
    endpoint = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    return Detected(
        where=kind.where,
        values={
            "nnodes": (f"1:{nodes}", source(environ, kind.nodes)),
            "rdzv_endpoint": (endpoint, of_first),
            "rdzv_id": run_id,
            "node_rank": (str(rank), source(environ, kind.rank)),
            "last_call": (str(LAST_CALL), f"all of {source(environ, kind.nodes)} are expected"),
        },
        is_host=rank == 0,
        why=f"{kind.where} ({source(environ, kind.rank)} of {source(environ, kind.nodes)}; the first is at {of_first})",
    )


def _seen(environ: Mapping[str, str]) -> _Kind | None:
    return next((kind for kind in KINDS if kind.is_seen(environ)), None)


def check_tasks(environ: Mapping[str, str]) -> None:
    """Raise ``UnclearError`` where each node starts several agents, which would train by themselves on the same GPUs.

    Under Slurm, too: mpirun starts one task of the step on each node, and its own tasks inherit the variables of that one.
    """
    kind = _seen(environ)
    if kind is None:
        return
    if kind.here and number(environ, kind.here) > 1:
        raise UnclearError(f"{kind.where} has several tasks on this node ({source(environ, kind.here)}), each an agent: {kind.one_each}")
    if kind.tasks in environ and number(environ, kind.tasks) > number(environ, kind.nodes):
        both = f"{source(environ, kind.tasks)}, {source(environ, kind.nodes)}"
        raise UnclearError(f"{kind.where} has several tasks on a node ({both}), each an agent: {kind.one_each}")


def _first(kind: _Kind, environ: Mapping[str, str]) -> str:
    nodes = source(environ, kind.nodes)
    if not environ.get(FIRST, "").strip():
        raise UnclearError(f"{nodes}, and nothing says where the first of them is: {kind.advice}, or --rdzv-endpoint=HOST:{PORT}")
    try:
        first = parse.host(environ[FIRST])
    except ValueError as error:
        raise UnclearError(f"{FIRST}: {error}") from None
    if first.startswith(HERE_ONLY):
        raise UnclearError(f"{source(environ, FIRST)} is another machine on each node of {nodes}: name the first node")
    return first


def _port(environ: Mapping[str, str]) -> int:
    port = number({FIRSTS_PORT: str(PORT), **environ}, FIRSTS_PORT)
    if not 0 < port < 1 << 16:
        raise UnclearError(f"{source(environ, FIRSTS_PORT)} is no port")
    return port


def _of_workers(environ: Mapping[str, str]) -> Detected | None:
    """Return a warning where the variables of torch's workers stand, as those of one process on each node mostly do."""
    if not all(environ.get(name) for name in (FIRST, WORLD, RANK)) or environ[FIRST].startswith(HERE_ONLY):
        return None
    if LOCAL_RANK in environ or number(environ, WORLD) < 2:
        return None
    found = ", ".join(source(environ, name) for name in (WORLD, RANK, FIRST))
    raise UnclearError(f"{found} are the variables of workers; for nodes give --nnodes=${WORLD} --node-rank=${RANK} --master-addr=${FIRST}")
