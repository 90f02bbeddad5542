"""The health port: /healthz, /readyz, /status and /metrics over HTTP, for probes, people and Prometheus. See docs/health.md.

The loop's thread makes a ``Snapshot`` when it is asked for one; ``http_port.py`` asks, and serves what the functions here make of it.
"""

from __future__ import annotations

import json
import selectors
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus

from elastirun import __version__, clock
from elastirun.agent.hangs.straggler_watch import StragglerWatch
from elastirun.agent.hangs.watch import HangWatch
from elastirun.agent.host import net
from elastirun.agent.observe.account import Totals
from elastirun.agent.observe.accounting import Accounting
from elastirun.agent.observe.events import RoundEvents
from elastirun.agent.observe.node_states import NodeState
from elastirun.agent.observe.round_ends import UNKNOWN
from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.quarantine import Quarantine
from elastirun.agent.session import Session
from elastirun.agent.status import job_status, metrics
from elastirun.agent.status.http_port import HttpPort, Response, Snapshots, text
from elastirun.agent.store.listening import EVERYWHERE
from elastirun.agent.workers.checkpoint_memory import CheckpointMemory
from elastirun.agent.workers.workers import Workers
from elastirun.config import Endpoint, LaunchConfig
from elastirun.errors import StartError
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.wire.records import Cause, Status

OPTION = "--health-port"
BY_ROW = {**job_status.BY_ROW, Status.LEFT: NodeState.FINISHING}  # an agent that answers is still about to end
STATES = (*dict.fromkeys(BY_ROW.values()), NodeState.SITTING_OUT)
CAUSES = (*(cause.value for cause in Cause), UNKNOWN)


@dataclass(frozen=True)
class Parts:
    """The parts of an agent that a snapshot shows. They belong to the loop's thread."""

    config: LaunchConfig
    session: Session
    workers: Workers
    rounds: RoundEvents
    memory: CheckpointMemory
    stragglers: StragglerWatch
    accounting: Accounting
    quarantine: Quarantine
    hangs: HangWatch


@dataclass(frozen=True)
class Snapshot:
    """One moment of an agent. The fields are those of /status."""

    state: NodeState  # one of ``STATES``
    version: str
    job: str  # --rdzv-id
    node: str  # host name
    address: str  # by which the other nodes reach it; empty before the store was reached
    node_rank: int | None  # in ``round``; None: it is no member
    round: int  # the newest that this node knows; 0: none yet
    reason: str  # why that round was formed
    world_size: int
    nodes: tuple[str, ...]  # host names of its members, in rank order
    min_nodes: int
    max_nodes: int
    joins_waiting: int  # nodes that this node knows of and that wait for the next round, itself included
    failures: int  # that count against --max-restarts
    max_restarts: int
    failures_caused: int  # rounds that ended by a failure of a worker of this node
    strikes: int  # of this node, since its start or since it has sat out
    hangs: int  # times that the workers of this node were found to hang
    restarts: Mapping[str, int]  # rounds that ended before their work was done while this agent ran, by cause
    seconds_since_round_start: float | None  # since workers were started here; None: they never were
    seconds_since_keep_alive: float  # since the store last acknowledged a sign of life of this node
    hosts_store: bool
    workers: Mapping[str, int]  # of this node, by state
    finished: tuple[int, ...]  # ranks of workers of this node that have ended with 0
    checkpoints_held_bytes: int
    steps: tuple[WorkerSteps, ...]  # of the workers of this node that stamp them
    account: Totals  # what the time of this agent was spent on


def snapshot(parts: Parts, now: float) -> Snapshot:
    """Return the state of an agent. Called in the loop's thread."""
    config, machine, started_at = parts.config, parts.session.machine, parts.rounds.started_at
    record, row, state = machine.record, machine.row, BY_ROW[machine.state]
    return Snapshot(
        state=NodeState.SITTING_OUT if parts.quarantine.out else state,
        version=__version__,
        job=config.run_id,
        node=row.name,
        address=row.address,
        node_rank=record.index(row.id) if record else None,
        round=record.round if record else 0,
        reason=record.reason if record else "",
        world_size=record.world_size if record else 0,
        nodes=tuple(member.name for member in record.members) if record else (),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        joins_waiting=_joins_waiting(machine),
        failures=record.failures if record else 0,
        max_restarts=config.max_restarts,
        failures_caused=parts.quarantine.failures_caused,
        strikes=len(parts.quarantine.strikes),
        hangs=parts.hangs.hangs,
        restarts={cause: parts.rounds.ended[cause] for cause in CAUSES},
        seconds_since_round_start=None if started_at is None else round(now - started_at, 3),
        seconds_since_keep_alive=round(now - machine.store.kept_alive, 3),
        hosts_store=machine.hosting,
        finished=tuple(sorted(parts.workers.finished)),
        workers=_workers(parts.workers, state, config.nproc),
        checkpoints_held_bytes=parts.memory.size,
        steps=parts.stragglers.steps(now),
        account=parts.accounting.totals(now),
    )


def described(parts: Parts, mark: str) -> str:
    """Return the snapshot as a line of JSON, with the marks of the agent and the pids of its workers by rank, for ``elastirun chaos``."""
    pids = {process.spec.rank: process.pid for process in parts.workers.processes.values()}
    return json.dumps({**asdict(snapshot(parts, clock.now())), "mark": mark, "pids": pids})


def _joins_waiting(machine: Machine) -> int:
    """Return how many nodes wait to be in the next round. A running node reads only its neighbours' rows, so it may see fewer."""
    rows = {**machine.store.rows, machine.row.id: machine.row}
    members = {member.id for member in machine.record.members} if machine.record and machine.record.open else set()
    waiting = (row for row in rows.values() if row.status is Status.JOINING and row.id not in members)
    return sum(machine.store.quiet(row.id) <= machine.rules.expire for row in waiting)


def _workers(workers: Workers, state: NodeState, started: int) -> dict[str, int]:
    """Return the workers by state. ``started``: workers of each round on this node."""
    alive = len(workers.alive)
    ended = started - alive if workers.running else 0
    stopping = alive if state is NodeState.STOPPING else 0
    return {"running": alive - stopping, "stopping": stopping, "ended": ended}


# -- the pages ----------------------------------------------------------------------------------------------------------------


def healthz(snapshot: Snapshot) -> Response:
    """Answer whether the loop is alive: it is, because it has made the snapshot."""
    return text(HTTPStatus.OK, snapshot.state)


def readyz(snapshot: Snapshot) -> Response:
    """Answer whether workers of a round run on this node."""
    return text(HTTPStatus.OK if snapshot.state is NodeState.RUNNING else HTTPStatus.SERVICE_UNAVAILABLE, snapshot.state)


def status(snapshot: Snapshot) -> Response:
    """Return the snapshot as JSON."""
    return Response(HTTPStatus.OK, json.dumps(asdict(snapshot), indent=1).encode() + b"\n", "application/json")


def metrics_page(snapshot: Snapshot) -> Response:
    """Return the snapshot in the text format of Prometheus, if the package for that is installed."""
    try:
        body, content_type = metrics.render(asdict(snapshot), STATES)
    except ImportError:
        why = "prometheus-client is not installed where elastirun runs; pip install '.[metrics]' in its folder"
        return text(HTTPStatus.NOT_IMPLEMENTED, why)
    return Response(HTTPStatus.OK, body, content_type)


PAGES = {"/healthz": healthz, "/readyz": readyz, "/status": status, "/metrics": metrics_page}


def serve(parts: Parts, selector: selectors.BaseSelector, say: Callable[[str], None]) -> Callable[[], None]:
    """Serve the health port if there is to be one. Returns what closes it. Raises StartError when the port cannot be had."""
    if parts.config.health is None:
        return lambda: None
    try:
        listening = net.open_port(parts.config.health, OPTION)
    except StartError as error:
        if not parts.config.health_optional:
            raise
        say(f"warning: PET_HEALTH_PORT is ignored with --standalone: {error}")
        return lambda: None
    address, port = net.address_of(listening), listening.getsockname()[1]
    say(f"health port: {f'port {port} of {EVERYWHERE}' if net.listens_everywhere(listening) else Endpoint(address, port)}")
    snapshots = Snapshots(selector, lambda: snapshot(parts, clock.now()))
    try:
        return HttpPort(listening, PAGES, snapshots).close
    except RuntimeError as error:
        raise StartError(f"{OPTION}: {error}") from error
