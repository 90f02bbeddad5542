"""The decision to form the next round: from which nodes, or why not yet. Pure; each decision has its reason in words.

See docs/rendezvous.md.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from elastirun.mesh import Mesh
from elastirun.rendezvous.failures import describe
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.peers.ranks import choose, member
from elastirun.rendezvous.peers.seats import Seats, assign
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import QUICK, Rules, hold, holder, keeps_state, most_nodes, pause_before, why_held
from elastirun.rendezvous.updates import break_up, count_failure, count_loss
from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Blame, Cause, Closed, ExitRecord, Member, NodeRow, RoundRecord, Status, Verdict

LOOK_BACK = 2.0  # seconds; a store that has taken over from this one says so within 1.3 s to whoever serves an empty one in its place
MOST_CAME = 16  # newcomers that a record names: where more come at once, no single node comes again and again
MOST_CAUSES, MOST_MISSED = 12, 4  # failures that the verdict carries, and workers that the others missed, which come after them
MOST_NAMES = 3  # nodes that one line names; such a line is repeated every 10 s


@dataclass(frozen=True)
class Forming:
    """The decision: ``record`` is to be written now; None: wait, and ``reason`` says for what."""

    record: RoundRecord | None
    reason: str
    leader: str = ""  # id of the node that should write the record; the others write only when that node does not
    check_again: float | None = None  # when time alone may change the answer, seconds of this node's clock
    news: bool = False  # ``reason`` is worth a line at once
    excluded: bool = False  # this node has no place in the job
    minority: bool = False  # too few members of an earlier round are here: the others may go on elsewhere


def names(rows: Sequence[NodeRow | Member]) -> str:
    """Return the names and addresses of the nodes for people; of a long list only ``MOST_NAMES``."""
    shown = [f"{row.name} {row.address}" for row in sorted(rows, key=lambda row: (row.name, row.address))[:MOST_NAMES]]
    return ", ".join(shown) + (f", and {len(rows) - MOST_NAMES} more" if len(rows) > MOST_NAMES else "")


def form(rules: Rules, view: View, settled_since: float, over_since: float, redirected_since: float | None = None) -> Forming:
    """Decide on the round after that of ``view``, which is broken or the empty round 0.

    ``settled_since``: from when the wait for more candidates counts (``SameSince.settled_since``); ``over_since``: when it first saw that
    the round is over; ``redirected_since``: since when the record has sent it to a place where nobody answers. Seconds of its own clock.
    """
    record, now = view.record, view.now
    active = [m for m in record.members if not view.is_over(m)]
    if active:
        return Forming(None, f"waiting for {names(active)} to stop the workers of round {record.round}")
    lost = [m for m in record.members if view.is_lost(m)]
    left = may_still_work(rules, view)
    if left > 0:
        reason = f"nothing is heard of {names(lost)}: they may be cut off together, and then stop by themselves within {left:.0f} s"
        return Forming(None, reason, check_again=now + left)
    view = replace(view, record=count_loss(view, lost))
    record, causes = count_failure(rules, view, lost)
    if causes and (why := _why_final(rules, view, record, causes[0])):
        return _give_up(record, causes, why)
    ready, held = _admit(rules, view, record, view.candidates())
    seats = _scaled_seats(rules, view, record, ready)
    rows = {row.id: row for row in ready}
    chosen = [rows[m.id] for m in seats.members]
    here = ready if rules.mesh else chosen  # with a mesh some of those that are here may have no seat
    lacking = _lacking(rules, view, ready, chosen, seats.reason, over_since)
    if lacking is not None:
        return lacking
    pause = pause_before(rules, record) if causes else min(rules.restart_pause, held)
    if now < over_since + pause and not keeps_state(chosen, record.round):
        why = f"{record.quick} rounds in a row failed within {QUICK:g} s of their start" if causes else why_held(record)
        return Forming(None, f"{why}; the next one starts after {pause:.1f} s", check_again=over_since + pause, news=True)
    early = _too_early(rules, view, here, settled_since, over_since, redirected_since) if record.round == 0 else None
    if early is not None:
        return early
    host = record.host if record.term else next((row.id for row in chosen if row.hosts), "")
    following = replace(
        record,
        version=record.version + 1,
        round=record.round + 1,
        members=seats.members,
        reason=_why(record, lost, causes),
        came=tuple(row.id for row in chosen if record.round and record.index(row.id) is None)[:MOST_CAME],
        broken=None,
        moved=None,
        host=host,
        quorums=quorum.following(record, view.rows, tuple(row.id for row in chosen), host) if rules.succession else (),
    )
    return Forming(following, following.reason, leader=chosen[0].id)


def take_seats(rules: Rules, record: RoundRecord, ready: Sequence[NodeRow], limit: int = 0) -> Seats:
    """Return the members of the round after that of ``record``, if the nodes of ``ready`` were to form it.

    ``limit``: the most members; 0: as many as the job is to have.
    """
    limit = limit or most_nodes(rules, record)
    if rules.mesh is not None:
        return assign(rules.mesh, record.members, ready, limit)
    return Seats(tuple(member(row) for row in choose(record.members, ready, limit, rules.fixed_ranks)))


def _scaled_seats(rules: Rules, view: View, record: RoundRecord, ready: Sequence[NodeRow]) -> Seats:
    """Return the members of the next round: no more than ``elastirun scale`` wants, unless those are too few to go on.

    Half of the last round's members, with the store's host, may always go on without the others; so a job is halved again and again.
    """
    seats = take_seats(rules, record, ready)
    for limit in ((len(record.members) + 1) // 2, rules.max_nodes) if record.wanted else ():
        enough = len(seats.members) >= max(1, rules.min_nodes)
        if enough and _without_quorum(rules, view, frozenset(m.id for m in seats.members)) is None:
            break
        if limit > len(seats.members):
            seats = take_seats(rules, record, ready, limit)
    return seats


def scale_down(rules: Rules, record: RoundRecord, by: str, ran: float) -> RoundRecord | None:
    """Return the record with its round broken because it has more members than ``elastirun scale`` wants; None: it has not.

    A round that cannot be smaller goes on: its mesh has no replica on fewer nodes.
    """
    most = most_nodes(rules, record)
    if not record.open or len(record.members) <= most:
        return None
    rows = [NodeRow(m.id, m.name, m.address, m.port, m.slots, m.role, hosts=m.id == record.host) for m in record.members]
    limits = (most, (len(record.members) + 1) // 2)
    if rules.mesh and not any(rules.min_nodes <= len(take_seats(rules, record, rows, limit).members) < len(rows) for limit in limits):
        return None
    return break_up(record, Cause.JOIN, f"the job is scaled to {most} node{'s' * (most != 1)}", by, ran)


def _too_early(
    rules: Rules, view: View, here: list[NodeRow], settled_since: float, over_since: float, redirected_since: float | None
) -> Forming | None:
    """Return the decision to wait before the first round: for more nodes, or because this job may run elsewhere. None: do not wait."""
    now = view.now
    others_could_run = rules.min_nodes < rules.max_nodes  # else they wait for one of these nodes, and end when they hear of this round
    place = view.record.moved
    if place is not None and redirected_since is not None and others_could_run and now < redirected_since + rules.longest_alone:
        reason = f"this job has moved to {place.address}, where nobody answers; a new run begins after {rules.longest_alone:.0f} s of that"
        return Forming(None, reason, check_again=redirected_since + rules.longest_alone, news=True)
    until = settled_since + rules.last_call
    most = most_nodes(rules, view.record)
    if len(here) < most and now < until:
        reason = f"{len(here)} of at most {most} nodes joined ({names(here)}); last call for more"
        return Forming(None, reason, check_again=until)
    until = over_since + LOOK_BACK
    if rules.succession and others_could_run and now < until:
        return Forming(None, "waiting for word from another node that has taken over the store of this job", check_again=until)
    return None


def _admit(rules: Rules, view: View, record: RoundRecord, ready: list[NodeRow]) -> tuple[list[NodeRow], float]:
    """Return the candidates that may take part, and the seconds to wait first.

    After many early losses newcomers are left out, see docs/decisions/0011. Where the survivors are too few without them, all
    candidates take part, but not at once.
    """
    held = hold(record) if record.broken is not None and record.broken.cause is not Cause.JOIN else 0.0
    survivors = [row for row in ready if record.index(row.id) is not None or row.hosts]
    seated = take_seats(rules, record, survivors).members
    enough = not rules.mesh or _without_quorum(rules, view, frozenset(m.id for m in seated)) is None
    if held and enough and len(seated) >= rules.min_nodes:
        return survivors, 0.0
    return ready, held


def take_in(rules: Rules, view: View, own: NodeRow, newcomers: list[NodeRow], began: float, settled_since: float) -> Forming:
    """Decide whether the node of ``own`` ends the round of ``view``, which runs without it, so that the next one includes the newcomers.

    ``began``: when this node first saw the round; ``settled_since``: as for ``form``.
    """
    record = view.record
    held_by = holder(rules, record, own)
    admitted_at = began + (0.0 if own.hosts else hold(record))
    if held_by is not None and view.now >= began + rules.replacement:
        place = f"--node-rank={own.node_rank} is held by {names([held_by])} in round {record.round}"
        return Forming(None, f"{place}; give each node its own", excluded=True)
    most = most_nodes(rules, record)
    if len(record.members) >= most and not own.hosts:
        count = len(record.members)
        return Forming(None, f"round {record.round} has its {count} node{'s' * (count != 1)}; this node is a spare", news=True)
    if any(view.has_succeeded(m) for m in record.members):
        return Forming(None, f"round {record.round} is finishing; this node is a spare", news=True)
    if rules.mesh and not own.hosts and (spare := adds_no_replica(rules.mesh, most, view, newcomers)):
        return Forming(None, spare, news=True)
    if view.now < admitted_at:
        reason = f"{why_held(record)}; newcomers are taken in after {hold(record):g} s"
        return Forming(None, reason, check_again=admitted_at, news=True)
    more_may_come = len(record.members) + len(newcomers) < most
    if more_may_come and view.now < settled_since + rules.debounce:
        return Forming(None, "", check_again=settled_since + rules.debounce)
    joined = break_up(record, Cause.JOIN, f"{names(newcomers)} joined", own.id, view.now - began)
    return Forming(joined, "")


def adds_no_replica(mesh: Mesh, limit: int, view: View, newcomers: list[NodeRow]) -> str:
    """Return in words why a round with the newcomers would have no more replicas than that which runs; empty: it would have more."""
    record = view.record
    members = [view.rows.get(m.id) or NodeRow(m.id, m.name, m.address, m.port, m.slots, m.role) for m in record.members]
    if assign(mesh, record.members, [*members, *newcomers], limit).world > record.world_size:
        return ""
    have = sum(row.slots // mesh.inner * mesh.inner for row in [*members, *newcomers]) - record.world_size
    what = (
        f"{have} of the {mesh.unit} workers of the next replica of {mesh} are here"
        if have < mesh.unit
        else "there is no place for a replica"
    )
    return f"round {record.round} goes on: {what}; this node is a spare"


def stop(record: RoundRecord | None, number: int) -> Stop:
    """Return how the workers of round ``number`` are to stop, which is over by the ``record`` found in the store."""
    if record is None or record.open or record.round != number:
        return Stop(False, f"round {number} went on without this node")
    if record.closed:
        return Stop(False, record.closed.reason)
    assert record.broken is not None
    return Stop(record.broken.cause in (Cause.JOIN, Cause.LEAVE), record.broken.reason, victim=record.broken.victim)


def may_still_work(rules: Rules, view: View) -> float:
    """Return the seconds during which members partitioned from the store may still be training.

    None may once one member says that it is over: the others can finish no step without it. A single-node round is gone
    before it can be found silent. See docs/decisions/0006.
    """
    record = view.record
    if record.broken is not None and record.broken.over:
        return 0.0
    if len(record.members) < 2 or any(view.says_over(m) for m in record.members):
        return 0.0
    return rules.longest_alone - min(view.quiet(m.id) for m in record.members)


def _lacking(rules: Rules, view: View, ready: list[NodeRow], chosen: list[NodeRow], reason: str, over_since: float) -> Forming | None:
    """Return the decision to wait because nodes are missing; None: all that a round needs are among those that are ``chosen``.

    ``reason``: why none is, with a mesh. Who is here without a seat counts as here: it does not go on elsewhere.
    """
    here = ready if rules.mesh else chosen
    waiting = _without_host(rules, view, ready, over_since) or _without_quorum(rules, view, frozenset(row.id for row in here))
    if waiting is not None:
        return waiting
    if missing := _missing(rules, chosen, ready, reason):
        return Forming(None, missing)
    if rules.mesh and _without_quorum(rules, view, frozenset(row.id for row in chosen)):
        return Forming(
            None, f"the mesh has seats for too few nodes of round {view.record.round} to go on without those that may go on elsewhere"
        )
    return None


def _without_host(rules: Rules, view: View, ready: list[NodeRow], over_since: float) -> Forming | None:
    """Return the decision to wait for the node that hosts the store; None when that node can take part, or no row says that it hosts.

    Every round includes the store's host, so no round goes on once its store is gone: see docs/decisions/0009.
    """
    record = view.record
    hosts = [row for row in view.rows.values() if row.hosts and not (record.term and row.id != record.host)]
    if not hosts and record.term:
        return Forming(None, "waiting for the node that has taken over the store")
    if not hosts:
        until = over_since + rules.expire
        first = rules.hosted and not rules.private and record.round == 0
        return Forming(None, "waiting for the node that hosts the store", check_again=until) if first and view.now < until else None
    if any(row in ready for row in hosts):
        return None
    host = hosts[0]
    state = "has left" if host.status is Status.LEFT else "is silent" if view.silent(host.id) else "is not ready yet"
    gone = host.status is Status.LEFT or view.silent(host.id)  # perhaps to another store, when it was cut off
    reason = f"waiting for {names([host])}, which hosts the store and {state}"
    return Forming(None, reason, minority=gone and rules.majority and record.round > 0)


def _without_quorum(rules: Rules, view: View, ids: Set[str]) -> Forming | None:
    """Return the decision to wait because, as far as this node knows, the members of an earlier round may go on elsewhere without ``ids``.

    None: they cannot, or the store never moves while its host may live.
    """
    record = view.record
    unmet = [q for q in quorum.asked(record, view.rows) if not quorum.is_met(q, ids, view.ended)] if rules.majority else []
    if not unmet:
        return None
    here = [m for m in record.members if m.id in ids]
    count = f"{len(here)} of the {len(record.members)} nodes of round {record.round}"
    return Forming(None, f"only {count} are here ({names(here)}), too few to go on: the others may have, without them", minority=True)


def _missing(rules: Rules, chosen: list[NodeRow], ready: list[NodeRow], reason: str) -> str:
    """Return in words which nodes are missing; empty when there are enough. ``reason``: why there is no member, with a mesh."""
    if len(chosen) >= max(1, rules.min_nodes):
        return ""
    if rules.mesh and len(ready) >= rules.min_nodes:
        count = f"{len(ready)} node{'s' * (len(ready) != 1)} joined" + (f" ({names(ready)})" if ready else "")
        return f"{count}; {reason or f'--mesh={rules.mesh} takes {len(chosen)} of them, and --nnodes wants at least {rules.min_nodes}'}"
    chosen = ready if rules.mesh else chosen
    joined = f"{len(chosen)} of {rules.min_nodes} nodes joined" + (f" ({names(chosen)})" if chosen else "")
    if rules.fixed_ranks:
        absent = sorted(set(range(rules.max_nodes)) - {row.node_rank for row in chosen})
        twins = [row for row in ready if row not in chosen]
        same = f"; {names(twins)} says --node-rank={twins[0].node_rank}, which is taken: give each node its own" if twins else ""
        return f"{joined}, waiting for node rank {', '.join(map(str, absent[:16]))}{same}"
    return f"{joined}, waiting for {rules.min_nodes - len(chosen)} more"


def _why(record: RoundRecord, lost: list[Member], causes: tuple[ExitRecord, ...]) -> str:
    """Return the reason of the round after ``record``."""
    if record.broken is None:
        return "the first round"
    if causes:
        return describe(causes[0])
    if lost and record.broken.cause is Cause.FAILURE:
        return clip(f"{names(lost)} was lost; {record.broken.reason}")
    return record.broken.reason


def _why_final(rules: Rules, view: View, record: RoundRecord, cause: ExitRecord) -> str:
    """Return in words why there is no restart after the failure ``cause``; empty: there is one."""
    if record.failures > rules.max_restarts:
        return f"--max-restarts={rules.max_restarts} is spent"
    trains = keeps_state(view.rows.values(), record.round)  # then only a newcomer was refused
    if cause.blame == Blame.FINAL and not trains:
        return "as it would after each restart"
    return "--fail-fast" if rules.fail_fast and record.repeats > 1 else ""


def _give_up(record: RoundRecord, causes: tuple[ExitRecord, ...], why: str) -> Forming:
    """Return the decision to close the job as failed."""
    times = "a worker failed" if record.failures == 1 else f"a worker failed in {record.failures} rounds"
    same = f"; it was the same failure {record.repeats} times in a row" if record.repeats > 1 else ""
    reason = clip(f"{times}, {why}: {describe(causes[0])}{same}")
    shown = (*causes[:MOST_CAUSES], *causes[MOST_CAUSES:][-MOST_MISSED:])  # workers that the others missed come last
    closed = Closed(Verdict.FAILED, reason, record.broken.by if record.broken else "", shown)
    leader = record.members[0].id if record.members else ""
    return Forming(replace(record, version=record.version + 1, closed=closed), reason, leader)
