"""The changes that a node makes to a round record, as pure functions that return the changed record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastirun.rendezvous.failures import root_cause, signature
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import EARLY, PROGRESS, QUICK, Rules, keeps_state
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Blame, Broken, Cause, Closed, ExitRecord, Member, NodeRow, RoundRecord, Status, Verdict


def break_up(
    record: RoundRecord, cause: Cause, reason: str, by: str, ran: float, lost: tuple[str, ...] = (), victim: bool = False
) -> RoundRecord:
    """Return the record with its round broken."""
    broken = Broken(cause, clip(reason), by, lost, ran=round(max(0.0, ran), 3), victim=victim)
    return replace(record, version=record.version + 1, broken=broken)


def lose_member(view: View, expire: float, ran: float) -> RoundRecord | None:
    """Return the record with its round broken because another member is gone; None: there is none, as far as this node knows."""
    record = view.record
    known = {*view.rows, *view.live.found_silent} - {view.me}  # few: the rows of most of a thousand members are not read
    for rank in sorted(rank for i in known if (rank := record.index(i)) is not None):
        m = record.members[rank]
        if view.is_over(m) and not view.has_succeeded(m):
            return _lose(view, m, expire, view.me, ran)
    return None


def _lose(view: View, m: Member, expire: float, by: str, ran: float) -> RoundRecord:
    """Return the record with its round broken because the member ``m`` left, stopped, or is silent for ``expire`` seconds."""
    record, row = view.record, view.rows.get(m.id)
    who, note = f"{m.name} {m.address}", row.note if row else ""
    if row is not None and row.status is Status.LEFT:
        return break_up(record, Cause.LEAVE, f"{who} left: {note}", by, ran)
    if not view.silent(m.id):
        return break_up(record, Cause.LEAVE, f"{who} stopped: {note}", by, ran)
    return break_up(record, Cause.LOST, f"{who} silent for {expire:g} s", by, ran, (m.id,))


def mark_over(record: RoundRecord, row: NodeRow, left: Collection[str] = ()) -> RoundRecord | None:
    """Return the broken record with the mark that a leaving member, that of ``row``, has stopped its workers; None if there is no need.

    ``left``: nodes that have left; where many leave at once, one names the others.

    The member's row vanishes with its lease, the record stays: nodes that come later need not wait for the round to end. So may a store
    that a node hosts, with the row, before the others have read it: there the record names the member.
    """
    broken = record.broken
    if broken is None or record.closed or record.index(row.id) is None or row.done_round < record.round:
        return None
    if row.id in broken.ended or (broken.over and not record.host):
        return None
    more = (m.id for m in record.members if m.id in left and m.id not in broken.ended and m.id != row.id)
    ended = (*broken.ended, row.id, *more) if record.host else ()
    return replace(record, version=record.version + 1, broken=replace(broken, over=True, ended=ended))


def share_losses(view: View) -> RoundRecord | None:
    """Return the broken record with the silent members that it does not name yet; None when it names all of them."""
    record, broken = view.record, view.record.broken
    more = tuple(m.id for m in record.members if broken and view.silent(m.id) and m.id not in broken.lost)
    if broken is None or not more:
        return None
    return replace(record, version=record.version + 1, broken=replace(broken, lost=broken.lost + more))


def succeed(record: RoundRecord, by: str) -> RoundRecord:
    """Return the record with the job closed: every worker of the round succeeded."""
    closed = Closed(Verdict.SUCCEEDED, f"all {record.world_size} workers of round {record.round} succeeded", by)
    return replace(record, version=record.version + 1, closed=closed)


def close(record: RoundRecord, row: NodeRow) -> RoundRecord:
    """Return the record with the job closed as failed, at the wish of the node of ``row``."""
    closed = Closed(Verdict.FAILED, f"closed by {row.name} {row.address}", row.id)
    return replace(record, version=record.version + 1, closed=closed)


def count_failure(rules: Rules, view: View, lost: list[Member]) -> tuple[RoundRecord, tuple[ExitRecord, ...]]:
    """Return the record with the broken round's failure counted, and the causes, most likely first; no causes when it was no failure.

    The version is not raised. A failure in a round that also lost a member is a consequence of that loss: see docs/decisions/0001.
    """
    record = view.record
    if record.broken is None or record.broken.cause is not Cause.FAILURE or lost:
        return record, ()
    causes = root_cause(f for m in record.members if m.id in view.rows for f in view.rows[m.id].failures)
    if not causes:  # the node that saw the failure has left since, and its row with the failure is gone
        causes = (ExitRecord("a node that has left", -1, -1, 0, 1, Blame.OWN_FAULT, 0.0),)
    ran, mark = causes[0].after, signature(causes[0])
    before = 0 if rules.restart_window and ran >= rules.restart_window else record.failures
    again = mark == record.signature and ran < PROGRESS
    repeats, quick = record.repeats + 1 if again else 1, record.quick + 1 if ran < QUICK else 0
    return replace(record, failures=before + 1, signature=mark, repeats=repeats, quick=quick), causes


def count_loss(view: View, lost: list[Member]) -> RoundRecord:
    """Return the record with the broken round counted if it lost a node early, its version not raised.

    A node that leaves the round in which it came counts as one that is lost. One that had been there longer does not: nodes are
    upgraded one after the other. A round that ended because newcomers came says nothing about those newcomers yet, unless the one that
    ended it is gone again: that is a loss, too. A round whose workers go on with their state has lost no progress.
    """
    record = view.record
    broken = record.broken
    if broken is None:
        return record
    lost = [m for m in lost if m.id in broken.died or m.id not in broken.lost]
    here = {row.id for row in view.candidates()}
    came: Collection[str] = ()  # who came just before, and counts as lost when it is gone again
    if broken.cause is Cause.JOIN:
        came = (broken.by,)
    elif broken.cause is Cause.LEAVE:
        came = record.came
    gone = bool(lost) or not here.issuperset(came)
    if broken.cause is Cause.JOIN and not gone:
        return record
    kept = keeps_state(view.rows.values(), record.round)
    return replace(record, losses=0 if broken.ran >= EARLY else record.losses + (gone and not kept))
