"""The death notice: what the guard of an agent that has died writes into the store, so that the other nodes need not wait for ``expire``.

Only the guard may write the notice, and only when the agent and all processes of its workers have ended: see docs/decisions/0019. Pure,
like sync.py: the caller executes the operations.
"""

from __future__ import annotations

from dataclasses import replace

from elastirun.rendezvous.updates import break_up
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Cause, NodeRow, RoundRecord, Status
from elastirun.rendezvous.wire.sync import Steps, SyncProtocol

TRIES = 16  # writes; another node may write the record at the same moment, but no node writes more than a few times for one death
NOTE = "its agent died, and its workers have ended"  # why the row says ``left``, for people


def write_notice(protocol: SyncProtocol, me: str, round_: int, ran: float) -> Steps:
    """Yield the operations that write the notice of the agent ``me``; return whether the store says all of it now.

    ``ran``: seconds for which the agent knew the round with the number ``round_``. What the store holds is read first, and each write is a
    compare-and-set. So a notice that is repeated, or comes late, changes nothing that others have written meanwhile.
    """
    read = Sync(rows=())
    answer: Synced = yield from protocol.steps(read, 0.0)
    for _ in range(TRIES):
        record, row = answer.round, answer.row
        if row is None or row.id != me:
            return False  # this store is empty: its host was started anew, and the others wait elsewhere. Or a lease is over: nobody waits
        lost = mark_lost(record, row, ran if record is not None and record.round == round_ else 0.0)
        left = mark_left(row)
        if lost is not None:  # before the row: who sees the row first would take the death for a planned leave, with its long grace
            answer = yield from protocol.steps(replace(read, change=Change(record, lost)), 0.0)
        elif left is not None:
            answer = yield from protocol.steps(replace(read, put=Put(row, left)), 0.0)
        else:
            return True
    return False


def mark_lost(record: RoundRecord | None, row: NodeRow, ran: float) -> RoundRecord | None:
    """Return the record with the member of ``row``, whose agent has died, among the lost; None when nobody waits for this member.

    A member whose workers have all succeeded, or that had stopped them before, leaves the others nothing to wait for. But a round that is
    over names its end, because the store may be gone before the others have read its row.
    """
    if record is None or record.closed or record.index(row.id) is None:
        return None
    stopped = row.done_round >= record.round or row.succeeded == record.round
    if stopped and record.broken is None:
        return None
    if record.broken is None:
        record = break_up(record, Cause.LOST, f"{row.name} {row.address} was lost: {NOTE}", row.id, ran)
    elif row.id in record.broken.ended:
        return None
    else:
        record = replace(record, version=record.version + 1)
    assert record.broken is not None
    known = stopped or row.id in record.broken.lost
    lost = record.broken.lost if known else (*record.broken.lost, row.id)
    return replace(record, broken=replace(record.broken, lost=lost, over=True, ended=(*record.broken.ended, row.id)))


def mark_left(row: NodeRow) -> NodeRow | None:
    """Return the row of an agent that has died as it is to be written; None when it says already that the node has left."""
    if row.status is Status.LEFT:
        return None
    return replace(row, status=Status.LEFT, done_round=max(row.done_round, row.round), note=NOTE, seq=row.seq + 1)
