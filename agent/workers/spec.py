"""Compute what each worker of this node runs, from the configuration and a round: argv, environment, CPUs. Pure but for ``cpu_sets``.

See docs/worker.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from elastirun.agent.host import numa
from elastirun.agent.processes import marks
from elastirun.agent.processes.spawn import STARTUP, WorkerSpec
from elastirun.config import Command, LaunchConfig
from elastirun.mesh import Mesh, picture
from elastirun.rendezvous.peers.ranks import WorkerRanks, worker_ranks
from elastirun.rendezvous.peers.seats import Seats, assign
from elastirun.rendezvous.wire.records import NodeRow, RoundRecord
from elastirun.worker import live_messages, progress_page

MOST_CELLS = 16  # lines about one mesh
_RUN_PATH = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class NodeEnvironment:
    """Values of this node and its agent that the workers get."""

    environ: Mapping[str, str]  # environment of the agent, as it was when the agent started
    cpus: int = 1  # usable by the agent
    interface: str | None = None  # network interface of the route to the other nodes
    loopback: str | None = None  # network interface of 127.0.0.1
    store: tuple[str, int] | None = None  # address and port of the rendezvous store, if the workers use it as theirs
    cpu_sets: Sequence[frozenset[int]] | None = None  # by local rank, with --numa-binding; None: every worker may use all CPUs
    mark: str = ""  # ELASTIRUN_AGENT, by which the guard recognises processes of this agent
    live: str = ""  # ELASTIRUN_LIVE, where live workers connect; empty: nowhere
    terminal: str = ""  # ELASTIRUN_TERMINAL, where a worker debugs; empty: the agent has none
    socket: str = ""  # ELASTIRUN_SOCKET, where workers ask whether their round is current; empty: nowhere
    pages: Sequence[str] = ()  # ELASTIRUN_PROGRESS by local rank: the page in which the worker stamps its steps; empty: there are none
    group: str = ""  # the control group for the workers; empty: there is none
    files: int | None = None  # soft limit of open descriptors for the workers; None: the agent's


def worker_specs(
    config: LaunchConfig, record: RoundRecord, node_rank: int, node: NodeEnvironment, error_file: Callable[[int], str]
) -> list[WorkerSpec]:
    """Return the workers of node ``node_rank`` in the round. ``error_file``: local rank to the path for torch's ``@record``."""
    shared = _same_always(config, node) | _shared(config, record, node_rank, node)
    argv = command_line(config.command, node.environ)
    specs = []
    for ranks in worker_ranks(record, node_rank):
        cpus = node.cpu_sets[ranks.local_rank] if node.cpu_sets else None
        first = {marks.VARIABLE: node.mark}  # at the beginning, so that the guard finds it in an environment of any length
        own = _own(config, ranks, node.environ) | {progress_page.VARIABLE: node.pages[ranks.local_rank] if node.pages else ""}
        env = {**first, **node.environ, **shared, **own, "TORCHELASTIC_ERROR_FILE": error_file(ranks.local_rank)}
        env.setdefault("OMP_NUM_THREADS", str(_threads(node.cpus, record.members[node_rank].slots, cpus)))
        if not config.mesh:
            env.pop("ELASTIRUN_MESH", None)  # that of a job around this one
        specs.append(WorkerSpec(ranks.local_rank, ranks.rank, _for_rank(argv, ranks.local_rank), env, cpus, node.group, node.files))
    return specs


def worker_like(config: LaunchConfig, node: NodeEnvironment) -> WorkerSpec:
    """Return a worker as each round has them, without what differs between workers or rounds (``forkserver.ROUND_NAMES``)."""
    env = {marks.VARIABLE: node.mark, **node.environ, **_same_always(config, node)}
    env.setdefault("OMP_NUM_THREADS", str(_threads(node.cpus, config.nproc, None)))
    return WorkerSpec(0, 0, command_line(config.command, node.environ), env, None, node.group, node.files)


def command_line(command: Command, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of a worker, before ``${local_rank}`` is replaced. ``PYTHON_EXEC`` in ``environ`` names another interpreter."""
    if command.no_python:
        return (command.script, *command.args)
    python = (environ.get("PYTHON_EXEC") or sys.executable, "-u")
    if command.run_path:
        return (*python, "-c", _RUN_PATH, command.script, *command.args)
    return (*python, *(["-m"] if command.module else []), command.script, *command.args)


def cpu_sets(config: LaunchConfig, environ: Mapping[str, str]) -> list[frozenset[int]] | None:
    """Return the CPUs of each worker of this node by ``--numa-binding``; None without it.

    Asks the driver of the GPUs and sysfs, so call it once. Raises StartError when no CPU is left for a worker.
    """
    if config.numa_binding is None:
        return None
    gpus, allowed = numa.gpu_pci_ids(environ), os.sched_getaffinity(0)
    return [numa.cpus_for(config.numa_binding, rank, config.nproc, gpus, allowed) for rank in range(config.nproc)]


def check_mesh(config: LaunchConfig) -> tuple[str, int]:
    """Return why no round could form with nodes like this one (empty: one could), and how many workers of the largest are never started.

    Errors: ``ValueError``, there is no such mesh.
    """
    seats = _seats(Mesh.parse(config.mesh_of_rounds), config, config.max_nodes)
    return seats.reason, sum(config.nproc - m.slots for m in seats.members)


def describe_mesh(config: LaunchConfig) -> Iterator[str]:
    """Yield lines about the rounds of the fewest and of the most nodes like this one; none without a mesh."""
    for count in sorted({config.min_nodes, config.max_nodes}) if config.mesh_of_rounds else ():
        mesh = Mesh.parse(config.mesh_of_rounds)
        seats, nodes = _seats(mesh, config, count), f"{count} node{'s' * (count > 1)}"
        over = f", {left} of them left over" if (left := count - len(seats.members)) else ""
        yield f"with {nodes} no round, {seats.reason}" if seats.reason else f"with {nodes} {mesh.described(seats.world)}{over}"
        cells = list(picture(mesh, [(m.name, m.slots) for m in seats.members])) if seats.members else []
        yield from [*cells[:MOST_CELLS], f"and {len(cells) - MOST_CELLS} more"] if len(cells) > MOST_CELLS else cells


def _seats(mesh: Mesh, config: LaunchConfig, count: int) -> Seats:
    """Return the members of a round of ``count`` nodes like this one; none if they are fewer than --nnodes wants."""
    rows = [NodeRow(str(at), f"node {at}", "", 0, config.nproc, node_rank=at) for at in range(count)]
    seats = assign(mesh, (), rows, count)
    too_few = f"the mesh takes {len(seats.members)} of them, and --nnodes wants at least {config.min_nodes}"
    return seats if seats.reason or len(seats.members) >= config.min_nodes else Seats((), too_few)


def _for_rank(argv: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Fill in the local rank as torchrun does: also for ``$local_rank``, with ``$`` for ``$$``, and not in the program's own name."""
    return argv[0], *(Template(arg).safe_substitute(local_rank=local_rank) for arg in argv[1:])


def _threads(usable: int, workers: int, cpus: frozenset[int] | None) -> int:
    """Return a fair share of the node's CPUs, but no more than the worker is bound to."""
    share = usable // workers
    return max(1, share if cpus is None else min(share, len(cpus)))


def _same_always(config: LaunchConfig, node: NodeEnvironment) -> dict[str, str]:
    """Return the variables that are the same for all workers of this node in all rounds."""
    env = {
        "ROLE_NAME": config.role,
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(config.signals),
        marks.VARIABLE: node.mark,
        "ELASTIRUN_SOCKET": node.socket,
        live_messages.VARIABLE: node.live,
        "ELASTIRUN_DEADLINE": f"{config.timing.grace:g}",
    }
    unless_set = {} if "TORCH_NCCL_ASYNC_ERROR_HANDLING" in node.environ else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return env | unless_set | (_with_stacks(node.environ) if config.stacks and not config.command.no_python else {})


def _with_stacks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what makes Python run ``STARTUP``, which takes itself out of the environment again."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (STARTUP, environ.get("PYTHONPATH", ""))))}


def _shared(config: LaunchConfig, record: RoundRecord, node_rank: int, node: NodeEnvironment) -> dict[str, str]:
    """Return the variables that are the same for all workers of this node in the round."""
    member = record.members[node_rank]
    master_addr, master_port = record.members[0].address, record.members[0].port
    if node.store and master_port == node.store[1]:  # the workers use the rendezvous store, see agent/store/worker_store.py
        master_addr = node.store[0]
    env = {
        "WORLD_SIZE": str(record.world_size),
        "LOCAL_WORLD_SIZE": str(member.slots),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(record.members)),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(record.round - 1),  # the same on every node, and new in every round
        "ELASTIRUN_ROUND": str(record.round),
        "ELASTIRUN_ROUND_REASON": record.reason,
        "ELASTIRUN_FENCE": record.fence,
    }
    if node.terminal and record.world_size > 1:
        env["ELASTIRUN_TERMINAL"] = node.terminal
    if config.mesh:
        env["ELASTIRUN_MESH"] = Mesh.parse(config.mesh).described(record.world_size)
    unless_set = {}
    if len(record.members) == 1 and node.loopback:
        unless_set["GLOO_SOCKET_IFNAME"] = node.loopback  # else gloo listens on the address that the host name resolves to
    elif len(record.members) > 1 and node.interface:
        unless_set |= {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}  # =: not eth10 for eth1
    return env | {name: value for name, value in unless_set.items() if name not in node.environ}


def _own(config: LaunchConfig, ranks: WorkerRanks, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one worker."""
    env = {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "ROLE_RANK": str(ranks.role_rank),
        "ROLE_WORLD_SIZE": str(ranks.role_world_size),
    }
    if config.virtual_local_rank:
        visible = environ.get("CUDA_VISIBLE_DEVICES")  # that there are enough was checked with the options
        devices = visible.split(",") if visible else ["" if visible == "" else str(i) for i in range(config.nproc)]
        env |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[ranks.local_rank].strip()}
    return env
