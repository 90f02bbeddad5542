"""The status of a job as the records in its store say it: rounds, nodes, and who is waited for. Pure; for ``elastirun status``.

One look at a store cannot tell whether a node lives, because no record has a date. Silence that the members have found stands in the round
record, ``--expire`` after it began at the latest. Whoever looks again and again finds it as the members do, by ``View.live``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from elastirun.agent.failures.strikes import sits_out
from elastirun.agent.observe.node_states import NodeState
from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.mesh import Mesh, picture
from elastirun.rendezvous.failures import describe, root_cause
from elastirun.rendezvous.formation import adds_no_replica, names
from elastirun.rendezvous.peers.seats import assign
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import hold, why_held
from elastirun.rendezvous.wire.records import Member, NodeRow, RoundRecord, Status, Verdict

FORMING, STARTING, RUNNING, FINISHING, RESTARTING = "forming", "starting", "running", "finishing", "restarting"  # and the verdicts
BY_ROW = {  # the state of a member
    Status.JOINING: NodeState.JOINING,
    Status.READY: NodeState.JOINING,
    Status.RUNNING: NodeState.RUNNING,
    Status.DONE: NodeState.FINISHING,
    Status.DRAINING: NodeState.STOPPING,
    Status.LEFT: NodeState.LEFT,
}
MOST_FAILURES, MOST_LEFT = 4, 4  # lines about failed workers, and about nodes that have left
QUIET = 2.5  # seconds without a change of a row that are worth a word: five beats


@dataclass(frozen=True)
class NodeStatus:
    """One node of a job. Those that were lost or have left before the round are not listed."""

    id: str
    name: str
    address: str
    node_rank: int | None  # in the round; None: it is no member
    first_rank: int | None  # of its workers
    workers: int
    role: str
    state: NodeState
    hosts_store: bool
    quiet: float  # seconds since its row has changed, as far as it was watched; 0: less than QUIET


@dataclass(frozen=True)
class JobStatus:
    """One job at one moment. The fields are those of ``elastirun status --json``."""

    job: str
    store: str  # where the records were read
    state: str  # FORMING, STARTING, RUNNING, FINISHING, RESTARTING, or the verdict
    round: int  # 0: none has formed yet
    reason: str  # why the round was formed
    ended: str  # why it ended; empty: it has not
    world_size: int
    min_nodes: int | None  # None: not known yet
    max_nodes: int | None
    wanted: int  # nodes that ``elastirun scale`` has asked for; 0: as many as --nnodes allows
    failures: int  # that count against --max-restarts
    max_restarts: int | None
    waiting: str  # for what the job waits, in words; empty: for nothing
    waiting_for: tuple[str, ...]  # ids of the nodes that it waits for
    nodes: tuple[NodeStatus, ...]  # members by rank, then those that wait
    mesh: str  # of the round, as workers get it in ELASTIRUN_MESH; before the first round as --mesh gives it; empty: there is none
    cells: tuple[str, ...]  # a line for each group of the innermost dimension: its place in the mesh, its ranks, its node
    events: tuple[str, ...]  # failed workers, root cause first, nodes that sit out, and nodes that left
    steps: tuple[WorkerSteps, ...]  # of the workers on this machine that stamp them, by rank
    live: tuple[int, ...]  # ranks on this machine whose workers keep their processes when the world changes, see docs/elastic.md
    finished: tuple[int, ...]  # ranks on this machine whose workers have ended with 0
    ignored: tuple[str, ...]  # records that do not parse, or were not signed with the token

    @property
    def over(self) -> bool:
        """Whether the job has ended, for all nodes."""
        return self.state in {verdict.value for verdict in Verdict}


def judge(
    job: str,
    store: str,
    view: View,
    ignored: tuple[str, ...] = (),
    steps: tuple[WorkerSteps, ...] = (),
    live: tuple[int, ...] = (),
    finished: tuple[int, ...] = (),
) -> JobStatus:
    """Return the status of a job whose records are those of ``view``. ``view.me`` is nobody."""
    record = view.record
    min_nodes, max_nodes = _numbers(record, r"--nnodes=(\d{1,9}):(\d{1,9})", 2)
    (max_restarts,) = _numbers(record, r"--max-restarts=(\d{1,9})", 1)
    mesh, shown = _mesh(record)
    most = min(max_nodes, max(record.wanted, min_nodes or 1)) if record.wanted and max_nodes else max_nodes
    waiting, nodes = _waiting(view, min_nodes, most, mesh)
    over = record.closed or record.broken
    fits = mesh is not None and mesh.is_formed_by([m.slots for m in record.members])
    return JobStatus(
        job=job,
        store=store,
        state=_state(view),
        round=record.round,
        reason=record.reason,
        ended=over.reason if over else "",
        world_size=record.world_size,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        wanted=record.wanted,
        failures=record.failures,
        max_restarts=max_restarts,
        waiting=waiting,
        waiting_for=tuple(node.id for node in nodes),
        nodes=(*_members(view), *_others(view, most, mesh)),
        mesh="" if mesh is None or not shown else mesh.described(record.world_size) if fits else str(mesh),
        cells=tuple(picture(mesh, [(f"{m.name} {m.address}", m.slots) for m in record.members])) if mesh and shown and fits else (),
        events=_events(view),
        steps=steps,
        live=live,
        finished=finished,
        ignored=ignored,
    )


def _numbers(record: RoundRecord, form: str, count: int) -> tuple[int | None, ...]:
    """Return the numbers in the one of the job's settings that has the form; None for each when there is none."""
    match = next((found for text in record.settings if (found := re.fullmatch(form, text, re.ASCII))), None)
    return tuple(map(int, match.groups())) if match else (None,) * count


def _mesh(record: RoundRecord) -> tuple[Mesh | None, bool]:
    """Return the mesh of the job's rounds, and whether its workers get it."""
    for text in record.settings:
        with suppress(ValueError):  # somebody else has written that
            if text.startswith("--mesh="):
                return Mesh.parse(text.removeprefix("--mesh=")), True
            if unit := re.fullmatch(r"--node-unit=(\d{1,5}) with --nproc-per-node=(\d{1,5})", text, re.ASCII):
                return Mesh.of_nodes(int(unit[1]), int(unit[2])), False
    return None, False


def _state(view: View) -> str:
    record = view.record
    if record.closed is not None:
        return record.closed.verdict.value
    if record.round == 0:
        return FORMING
    if record.broken is not None:
        return RESTARTING
    if any(view.has_succeeded(m) for m in record.members):
        return FINISHING
    return STARTING if _not_started(view) else RUNNING


def _not_started(view: View) -> list[Member]:
    """Return the members whose workers have not started yet."""
    rows = [(m, view.rows.get(m.id)) for m in view.record.members]
    begun = (Status.RUNNING, Status.DONE, Status.DRAINING, Status.LEFT)
    return [m for m, row in rows if row is None or row.round != view.record.round or row.status not in begun]


def _waiting(view: View, low: int | None, high: int | None, mesh: Mesh | None) -> tuple[str, list[Member]]:
    """Return for what the job waits, and for which members."""
    record = view.record
    if record.closed is not None:
        return "", []
    if record.round and record.broken is None:
        if missing := _not_started(view):
            return f"for {names(missing)} to start the workers of round {record.round}", missing
        done = [m for m in record.members if view.has_succeeded(m)]
        if not done:
            return _held(view, high), []
        missing = [m for m in record.members if m not in done]
        return (f"for {names(missing)} to finish" if missing else ""), missing
    if active := [m for m in record.members if not view.is_over(m)]:
        return f"for {names(active)} to stop the workers of round {record.round}", active
    here = len(view.candidates())
    if low is None or high is None:
        return f"for a round to form; nodes here: {here}", []
    if here < low:
        return f"for more nodes: {here} of at least {low} are here", []
    if mesh is not None and (why := assign(mesh, record.members, view.candidates(), high).reason):
        return f"for more nodes: {why}", []
    return f"for a round to form; nodes here: {here}, at least {low}, at most {high}", []


def _held(view: View, most: int | None) -> str:
    """Return in words for how long newcomers wait beside the running round, see docs/decisions/0011. Empty: none has to wait."""
    record = view.record
    full = most is not None and len(record.members) >= most
    newcomers = [row for row in view.newcomers() if not row.hosts]  # the round ends at once for the store's host
    if full or not newcomers or not hold(record):
        return ""
    return f"newcomers join after {hold(record):g} s ({why_held(record)})"


def _members(view: View) -> list[NodeStatus]:
    first, found = 0, []
    for node_rank, m in enumerate(view.record.members):
        row = view.rows.get(m.id)
        found.append(_node(view, m, node_rank, first, _state_of(view, m, row), row is not None and row.hosts))
        first += m.slots
    return found


def _state_of(view: View, m: Member, row: NodeRow | None) -> NodeState:
    if view.is_lost(m):
        return NodeState.LOST
    if row is None:
        return NodeState.ABSENT
    if sits_out(row):
        return NodeState.SITTING_OUT
    of_this_round = row.round == view.record.round or row.status is Status.LEFT
    return BY_ROW[row.status] if of_this_round else NodeState.JOINING


def _others(view: View, most: int | None, mesh: Mesh | None) -> list[NodeStatus]:
    """Return the nodes that wait beside the round."""
    record = view.record
    full = record.open and most is not None and len(record.members) >= most
    out = [row for row in view.rows.values() if sits_out(row) and record.index(row.id) is None]
    newcomers = view.newcomers()
    if mesh is not None and record.open and adds_no_replica(mesh, most or len(view.rows), view, newcomers):
        full = True
    rows = sorted((*newcomers, *out), key=lambda row: (row.name, row.address, row.id))
    waiting = NodeState.SPARE if full else NodeState.JOINING
    return [_node(view, row, None, None, NodeState.SITTING_OUT if sits_out(row) else waiting, row.hosts) for row in rows]


def _node(view: View, of: Member | NodeRow, node_rank: int | None, first: int | None, state: NodeState, hosts: bool) -> NodeStatus:
    quiet = view.quiet(of.id)
    quiet = round(quiet, 1) if quiet >= QUIET and state not in (NodeState.LOST, NodeState.LEFT) else 0.0
    hosts = hosts if view.record.term == 0 else of.id == view.record.host
    return NodeStatus(of.id, of.name, of.address, node_rank, first, of.slots, of.role, state, hosts, quiet)


def _events(view: View) -> tuple[str, ...]:
    """Return lines about failed workers, about nodes that sit out, and about nodes that have left, the newest of these first."""
    record = view.record
    failures = record.closed.failures if record.closed else ()
    failures = failures or root_cause(failure for row in view.rows.values() if row.round >= record.round for failure in row.failures)
    left = [row for row in view.rows.values() if row.status is Status.LEFT and row.note]
    left.sort(key=lambda row: (-row.round, row.name, row.address))
    lines = [describe(failure) for failure in failures[:MOST_FAILURES]]
    lines += [f"{row.name} {row.address} sits out: {row.note}" for row in view.rows.values() if sits_out(row)][:MOST_LEFT]
    return (*lines, *(f"{row.name} {row.address} left: {row.note}" for row in left[:MOST_LEFT]))
