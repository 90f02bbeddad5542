"""The standby stores that may take over from the store of a round, the votes that move it, and the record of a take-over. Pure.

Every agent serves a standby store, empty until the host of the store in use has died and its guard has sent the others a ``Vote``, or,
with ``--store-succession=majority``, until the host has not answered more than half of the members for a while. Then they go to the
standby store of the first member in rank order whose owner is there itself. The owner writes the round record anew when enough of the
members have come. The rules are in decide.py; see docs/decisions/0020 for the argument why no two stores can ever have running rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Broken, Cause, Place, Quorum, RoundRecord, Vote

IN_LINE = 8  # standby stores that may take over: the guard writes into these, and so many do not all die at once


def standbys(record: RoundRecord | None) -> tuple[Place, ...]:
    """Return the standby stores that may take over from the store of ``record``, the first in line first. Its host's is not among them."""
    if record is None or not record.host:
        return ()
    others = (m for m in record.members if m.id != record.host and m.standby)
    return tuple(Place(m.id, m.address, m.standby) for m in itertools.islice(others, IN_LINE))


def newest(record: RoundRecord, other: RoundRecord | None) -> RoundRecord:
    """Return the newer one of two records of a job."""
    return other if other is not None and (other.term, other.version) > (record.term, record.version) else record


def vote(me: str, record: RoundRecord, ended: Collection[str]) -> Vote:
    """Return the vote of the node ``me``. Of those that have ``ended`` it names those that ``record`` does: there are ever more others."""
    counted = {me, *(m.id for m in record.members), *(i for q in record.quorums for i in q.ids)}
    return Vote(me, record, tuple(sorted(counted.intersection(ended))))


def another_run(found: RoundRecord | None, record: RoundRecord) -> str:
    """Return in words that another run of the job has begun where it was started; empty: none has. Nodes that come find only that one."""
    other = found is not None and found.round > 0 and found.closed is None and found.store_id != record.store_id
    return "another run of this job has begun where it was started" if other else ""


def host_of(record: RoundRecord) -> str:
    """Return for people the name and address of the node that hosts the store of ``record``."""
    return next((f"{m.name} {m.address}" for m in record.members if m.id == record.host), record.host)


def lost_host(record: RoundRecord) -> str:
    """Return in words that the host of the store of ``record`` has died, or has left."""
    leaves = record.broken is not None and record.broken.cause is Cause.LEAVE and record.broken.by == record.host
    return clip(f"{host_of(record)}, which hosted the rendezvous store, {'has left' if leaves else 'was lost'}")


def take_over(
    record: RoundRecord, owner: str, lost: Collection[str], needed: tuple[Quorum, ...], turn: int = 1, ran: float = 0.0
) -> RoundRecord:
    """Return the record as the node ``owner`` writes it into its standby store: the last round is over, because its host is lost.

    ``lost``: the nodes that are not waited for. ``needed``: what the next round needs. ``turn``: the owner's place in line, from 1 on, so
    that two owners never take over with the same term. ``ran``: seconds for which the owner had known the round.
    """
    names = tuple(m.id for m in record.members if m.id in lost)
    before = record.broken
    if before is not None:  # it was over anyway, and for that reason
        broken = replace(before, lost=tuple(dict.fromkeys((*before.lost, *names))), over=True)
    else:
        broken = Broken(Cause.LOST, lost_host(record), owner, names, over=True, ran=round(max(0.0, ran), 3))
    return replace(record, version=record.version + 1, term=record.term + turn, host=owner, broken=broken, quorums=needed, moved=None)
