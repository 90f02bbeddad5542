"""Rank order: pure functions from the members of the last round and the candidates to the members of the next.

Survivors keep their order, and their node rank as long as no hole forces them to move up; a newcomer takes a hole, else
the end. The first round is in the order of the wished node ranks, then of the addresses, numbers compared as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastirun.rendezvous.wire.records import Member, NodeRow, RoundRecord

WATCHED = 3  # members that each node of a running round watches


def _natural(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.findall(r"\d+|\D+", text)]


def arrival_order(row: NodeRow) -> tuple[bool, int, list[tuple[int, int | str]], str]:
    """Return the sort key of nodes that had no place before."""
    return (row.node_rank is None, row.node_rank or 0, _natural(row.address), row.id)


def choose(previous: Sequence[Member], candidates: Iterable[NodeRow], limit: int, fixed: bool) -> list[NodeRow]:
    """Return the rows of the next round's members in node rank order: at most ``limit``, with the store's host (docs/decisions/0009).

    ``fixed``: the node rank is that which the row asks for. Of several nodes that ask for the same, the store's host gets it, else the
    one that had it before.
    """
    rows = {row.id: row for row in candidates}
    survivors = [rows.pop(m.id) if m.id in rows else None for m in previous]
    newcomers = sorted(rows.values(), key=arrival_order)
    if fixed:
        places: dict[int, NodeRow] = {}
        for row in sorted([s for s in survivors if s] + newcomers, key=lambda row: not row.hosts):
            if row.node_rank is not None and 0 <= row.node_rank < limit:
                places.setdefault(row.node_rank, row)
        return [places[rank] for rank in sorted(places)]
    over = sum(s is not None for s in survivors) - limit  # where the job is scaled down, those with the highest ranks go
    for k in range(len(survivors) - 1, -1, -1):
        if over > 0 and (survivor := survivors[k]) is not None and not survivor.hosts:
            survivors[k], over = None, over - 1
    room = max(0, limit - sum(s is not None for s in survivors))
    waiting = newcomers[:room]
    host = next((row for row in newcomers[room:] if row.hosts), None)
    if host is not None and waiting:
        waiting[-1] = host  # the last newcomer yields its place
    elif host is not None and survivors:
        survivors[max(i for i, s in enumerate(survivors) if s is not None)] = host
    placed = [s if s is not None else (waiting.pop(0) if waiting else None) for s in survivors]
    return [row for row in placed + waiting if row is not None][:limit]


def member(row: NodeRow) -> Member:
    """Return the node of ``row`` as a member of a round."""
    return Member(row.id, row.name, row.address, row.port, row.slots, row.role, row.standby)


def own_rank(record: RoundRecord, row: NodeRow) -> int | None:
    """Return the node rank of the node of ``row``; None: it is no member, or is named with more slots than it has."""
    rank = record.index(row.id)
    return rank if rank is not None and record.members[rank].slots <= row.slots else None


@dataclass(frozen=True)
class WorkerRanks:
    """The ranks of one worker in a round, in torchrun's terms."""

    rank: int
    local_rank: int
    role_rank: int
    role_world_size: int


def worker_ranks(record: RoundRecord, node_rank: int) -> list[WorkerRanks]:
    """Return the ranks of the workers of the node ``node_rank``. Global ranks are contiguous per node."""
    here = record.members[node_rank]
    before = record.members[:node_rank]
    first = sum(m.slots for m in before)
    role_first = sum(m.slots for m in before if m.role == here.role)
    role_size = sum(m.slots for m in record.members if m.role == here.role)
    return [WorkerRanks(first + i, i, role_first + i, role_size) for i in range(here.slots)]


def successors(record: RoundRecord, node_id: str, count: int = WATCHED) -> tuple[str, ...]:
    """Return the ids of the ``count`` members after ``node_id`` in rank order, around the end, which that node watches."""
    ids, at = record.ids, record.index(node_id)
    if at is None:
        return ids
    after = ids[at + 1 : at + 1 + count]
    return after + ids[: min(at, count - len(after))]
