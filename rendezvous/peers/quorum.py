"""The nodes that must agree before a round forms, so that no two stores ever have running rounds (docs/decisions/0020). Pure.

The rule is that of Raft's joint consensus (Ongaro and Ousterhout 2014, section 6) with the rounds in the place of its configurations: the
next round needs a quorum of every round whose workers may have started since one is known to have started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from elastirun.rendezvous.wire.records import NodeRow, Quorum, RoundRecord, Status


def is_met(quorum: Quorum, here: Collection[str], ended: Collection[str] = ()) -> bool:
    """Return whether the nodes that are ``here`` may go on without the others.

    More than half of them are here, or half with the one that breaks a tie, or all that have not ``ended``: nothing of those runs.
    """
    count, ids = sum(i in here for i in quorum.ids), quorum.ids
    if 2 * count > len(ids) or (2 * count == len(ids) and quorum.tie in here):
        return True
    return all(i in here or i in ended or i in quorum.ended for i in ids)


def asked(record: RoundRecord, rows: Mapping[str, NodeRow]) -> tuple[Quorum, ...]:
    """Return the quorums that the round after that of ``record`` needs. Once its workers are known to have started, it is the only one."""
    started = any(i in rows and rows[i].started == record.round for quorum in record.quorums[-1:] for i in quorum.ids)
    return record.quorums[-1:] if started else record.quorums


def following(record: RoundRecord, rows: Mapping[str, NodeRow], ids: tuple[str, ...], host: str) -> tuple[Quorum, ...]:
    """Return the quorums that the next round is formed with: its members are ``ids``, and ``host`` serves its store; empty: no member."""
    return (*asked(record, rows), Quorum(ids, host)) if host else ()


def without(quorum: Quorum, host: str) -> Quorum:
    """Return the quorum of the other nodes when the ``host`` of the store has ended."""
    return Quorum(tuple(i for i in quorum.ids if i != host), ended=quorum.ended)


def noted(quorums: Iterable[Quorum], ended: Collection[str]) -> tuple[Quorum, ...]:
    """Return the quorums with the nodes that have ``ended``: their number stays, or two groups could both be more than half."""
    return tuple(replace(quorum, ended=tuple(i for i in quorum.ids if i in ended or i in quorum.ended)) for quorum in quorums)


def left(rows: Iterable[NodeRow]) -> frozenset[str]:
    """Return the nodes of which nothing runs any more, as their rows say."""
    return frozenset(row.id for row in rows if row.status is Status.LEFT)


def is_there(row: NodeRow | None) -> bool:
    """Return whether the node of ``row`` takes part in the rendezvous where the row was read."""
    return row is not None and row.status is not Status.LEFT
