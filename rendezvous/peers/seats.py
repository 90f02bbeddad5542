"""The nodes that form a mesh, in which order, with how many workers each. Pure: rows and the last round's members in, members out.

A *block* is the smallest run of nodes that holds whole replicas. All blocks are interchangeable, and so are nodes at the same place of two
blocks, because they hold the same parts of the model. What is wanted, in this order: the world fits the mesh, and cells are inside nodes
(always); as many replicas as the nodes allow; the store's host takes part (always); whole replicas stay as they are; few nodes get other
parts of the model; survivors keep their order. See docs/parallelism.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from elastirun.mesh import Mesh
from elastirun.rendezvous.peers.ranks import arrival_order, member
from elastirun.rendezvous.wire.records import Member, NodeRow


@dataclass(frozen=True)
class Seats:
    """The members of a round in node rank order. Their ``slots`` are those that the mesh uses. ``reason``: why there are none."""

    members: tuple[Member, ...] = ()
    reason: str = ""

    @property
    def world(self) -> int:
        return _world(self.members)


@dataclass
class _Block:
    places: list[tuple[int, int]]  # the first cell's place in the block, and the number of cells
    nodes: list[NodeRow | None]
    at: int = 0  # order among the old blocks

    @property
    def missing(self) -> int:
        return sum(cells for (_, cells), node in zip(self.places, self.nodes, strict=True) if node is None)


def assign(mesh: Mesh, previous: Sequence[Member], candidates: Iterable[NodeRow], limit: int) -> Seats:
    """Return the members of the next round: at most ``limit`` of ``candidates``, with the store's host."""
    rows = sorted(candidates, key=arrival_order)
    found = _in_order(mesh, previous, rows, limit)
    small_first = not found.members and len(rows) > limit  # those that come first may be too small
    return _in_order(mesh, (), sorted(rows, key=lambda row: -row.slots), limit) if small_first else found


def _in_order(mesh: Mesh, previous: Sequence[Member], rows: Sequence[NodeRow], limit: int) -> Seats:
    host = next((row for row in rows if row.hosts), None)
    for host_first in (False, True):
        members = _assign(mesh, previous, rows, limit, host_first)
        if not mesh.fits(_world(members)):  # there is no replica, or a stranger has written the last round
            members = _assign(mesh, (), rows, limit, host_first)
        while len(rows) > limit and _world(more := _assign(mesh, members, rows, limit, host_first)) > _world(members):
            members = more  # in place of small nodes that have no seat, larger ones that the limit had left out
        if not members or host is None or host.id in {m.id for m in members}:
            return Seats(members, "" if members else _why_none(mesh, rows, limit))
    assert host is not None
    return Seats((), f"{host.name} {host.address} hosts the store, and {mesh} has no place for it with --nproc-per-node={host.slots}")


def _world(members: Sequence[Member]) -> int:
    return sum(m.slots for m in members)


def _why_none(mesh: Mesh, rows: Sequence[NodeRow], limit: int) -> str:
    have = sum(row.slots // mesh.inner * mesh.inner for row in rows)
    inside = f" on nodes of at least {mesh.inner}" if mesh.inner > 1 else ""
    if have >= mesh.unit and mesh.outer > 1:
        return (
            f"{mesh} needs {mesh.outer} or more nodes with as many workers as the store's host, which divide it; none holds a whole replica"
        )
    over = f", on more than the {limit} nodes that may take part" if have >= mesh.unit else ""
    return f"one replica of {mesh} needs {mesh.unit} workers{inside}, and {have} are here{over}"


def _assign(mesh: Mesh, previous: Sequence[Member], rows: Sequence[NodeRow], limit: int, host_first: bool) -> tuple[Member, ...]:
    ranks = {m.id: at for at, m in enumerate(previous)}
    rows = _alike(mesh, rows, ranks) if mesh.outer > 1 else rows
    here = {row.id: row for row in rows}
    cells = {row.id: row.slots // mesh.inner for row in rows}
    stayed = [here[m.id] for m in previous if cells.get(m.id)]
    newcomers = [row for row in rows if cells[row.id] and row.id not in ranks]
    chosen = _limited(stayed, newcomers, limit)
    stayed, newcomers = [row for row in chosen if row.id in ranks], [row for row in chosen if row.id not in ranks]
    blocks, loose = _old_blocks(mesh, previous, {row.id: row for row in stayed}, cells)
    kept, rest = _keep(blocks, loose, newcomers, cells, host_first)
    rest.sort(key=lambda row: (not (host_first and row.hosts), ranks.get(row.id, len(ranks))))
    made = [*sorted(kept, key=lambda block: block.at), *_new_blocks(mesh, rest, cells)]
    if host_first:
        _seat_host(chosen, made, cells, set(ranks))
    members = [
        replace(member(row), slots=count * mesh.inner, block=number, phase=phase)
        for number, block in enumerate(made)
        for (phase, count), row in zip(block.places, block.nodes, strict=True)
        if row is not None
    ]
    return tuple(_stages_first(mesh, members) if mesh.outer > 1 and members else members)


def _alike(mesh: Mesh, rows: Sequence[NodeRow], known: Collection[str]) -> list[NodeRow]:
    """Return the nodes with as many cells as the store's host has, else as most survivors, else as most of all nodes."""
    usable = [row for row in rows if row.slots >= mesh.inner]
    deciding = [row for row in usable if row.hosts] or [row for row in usable if row.id in known] or usable
    counts = Counter(row.slots // mesh.inner for row in deciding)
    most = max(counts, key=lambda cells: (counts[cells], cells), default=0)
    return [row for row in usable if row.slots // mesh.inner == most]


def _limited(stayed: list[NodeRow], newcomers: list[NodeRow], limit: int) -> list[NodeRow]:
    """Return the survivors, then newcomers, at most ``limit``; the host always."""
    chosen = [*stayed, *newcomers][:limit]
    host = next((row for row in [*stayed, *newcomers] if row.hosts), None)
    if host is not None and host not in chosen and chosen:
        chosen[-1] = host
    return chosen


_Held = tuple[tuple[int, int], NodeRow]  # a node with the place whose parts of the model it holds


def _old_blocks(
    mesh: Mesh, previous: Sequence[Member], stayed: dict[str, NodeRow], cells: dict[str, int]
) -> tuple[list[_Block], list[_Held]]:
    """Return the blocks of the last round with those of their nodes that are still there, with as many cells; and the other nodes.

    A block whose last node kept slots free is made anew, as long as now possible. So is one that has no whole replicas: a stranger has
    written it.
    """
    sizes = Counter[int]()
    for m in previous:
        sizes[m.block] += m.slots // mesh.inner
    trimmed = {m.block for m in previous if m.id in stayed and cells[m.id] > m.slots // mesh.inner}
    trimmed |= {block for block, size in sizes.items() if size % (mesh.outer * mesh.depth)}
    blocks: dict[int, _Block] = {}
    loose: list[_Held] = []
    for m in previous:
        node = stayed.get(m.id)
        if m.block in trimmed:
            loose += [((m.phase, cells[node.id]), node)] if node is not None else []
            continue
        block = blocks.setdefault(m.block, _Block([], [], at=m.block))
        count = m.slots // mesh.inner
        if node is not None and cells[node.id] < count:  # it has lost slots
            loose.append(((m.phase, cells[node.id]), node))
            node = None
        block.places.append((m.phase, count))
        block.nodes.append(node)
    return list(blocks.values()), loose


def _keep(
    blocks: list[_Block], loose: list[_Held], newcomers: list[NodeRow], cells: dict[str, int], host_first: bool
) -> tuple[list[_Block], list[NodeRow]]:
    """Fill up as many old blocks as possible. Return them, and the nodes that are left, in order."""

    def first(block: _Block) -> tuple[bool, int, int]:
        hosts = host_first and any(node is not None and node.hosts for node in block.nodes)
        return not hosts, block.missing, block.at

    ordered = sorted((block for block in blocks if any(block.nodes)), key=first)
    fresh = sorted(newcomers, key=lambda row: not (host_first and row.hosts))
    for count in range(len(ordered), -1, -1):
        chosen = [_Block(block.places, list(block.nodes), block.at) for block in ordered[:count]]
        broken = reversed(ordered[count:])
        held = loose + [(place, node) for b in broken for place, node in zip(b.places, b.nodes, strict=True) if node is not None]
        _fill(chosen, held, exact=True)
        others = [*(((0, cells[row.id]), row) for row in fresh), *held]
        _fill(chosen, others, exact=False)
        if not any(block.missing for block in chosen):
            return chosen, [node for _, node in others]
    raise AssertionError("no block at all can always be kept")


def _fill(blocks: list[_Block], nodes: list[_Held], exact: bool) -> None:
    """Put ``nodes`` into the holes of ``blocks``, and take them from the list. ``exact``: only where they hold the right parts."""
    for block in blocks:
        for at, (place, there) in enumerate(zip(block.places, block.nodes, strict=True)):
            fits = (held for held in nodes if (held[0] == place if exact else held[0][1] == place[1]))
            if there is None and (found := next(fits, None)) is not None:
                block.nodes[at] = found[1]
                nodes.remove(found)


def _new_blocks(mesh: Mesh, rows: Sequence[NodeRow], cells: dict[str, int]) -> list[_Block]:
    """Chain ``rows`` to blocks of whole replicas. The last node may keep some slots free; nodes beyond the last replica stay out."""
    if mesh.outer > 1:
        return _stage_blocks(mesh, rows, cells)
    left = sum(cells[row.id] for row in rows) // mesh.depth * mesh.depth
    blocks, block, phase = list[_Block](), _Block([], []), 0
    for row in rows:
        if not left:
            break
        count = min(cells[row.id], left)
        block.places.append((phase, count))
        block.nodes.append(row)
        left, phase = left - count, (phase + count) % mesh.depth
        if not phase:
            blocks.append(block)
            block = _Block([], [])
    return blocks


def _stage_blocks(mesh: Mesh, rows: Sequence[NodeRow], cells: dict[str, int]) -> list[_Block]:
    if not rows:
        return []
    count = cells[rows[0].id]
    if count % mesh.depth and mesh.depth % count:
        return []
    size = mesh.outer * max(1, mesh.depth // count)
    places = [(at * count, count) for at in range(size)]
    return [_Block(list(places), list(rows[at : at + size])) for at in range(0, len(rows) // size * size, size)]


def _stages_first(mesh: Mesh, members: list[Member]) -> list[Member]:
    """Return the members in the order of ranks where a dimension lies outside of ``auto``."""
    count = members[0].slots // mesh.inner
    inside = max(1, mesh.depth // count)  # nodes of one outer group of a block
    return sorted(members, key=lambda m: (m.phase // count // inside, m.block, m.phase))


def _seat_host(chosen: Sequence[NodeRow], blocks: Sequence[_Block], cells: dict[str, int], known: set[str]) -> None:
    """Give the host the place of a node with as many cells, of a newcomer if there is one, if it has none."""
    host = next((row for row in chosen if row.hosts), None)
    seats = [(block, at, row) for block in blocks for at, row in enumerate(block.nodes) if row is not None]
    if host is None or any(row is host for _, _, row in seats):
        return
    fits = [(row.id not in known, number) for number, (block, at, row) in enumerate(seats) if block.places[at][1] <= cells[host.id]]
    if fits:
        block, at, _ = seats[max(fits)[1]]
        block.nodes[at] = host
