"""Invariants of the moves of the store between nodes (docs/decisions/0020): what must not be, lest two rounds run at once one day.

They are watched besides P1 (``invariants``), which a history breaks only when all that must go wrong does so.
"""

from __future__ import annotations

from elastirun.rendezvous.failover.decide import Case, StoreView, counted
from elastirun.rendezvous.peers.quorum import is_there
from elastirun.rendezvous.transitions import DRAINING, LEFT
from elastirun.rendezvous.wire.actions import Start
from elastirun.rendezvous.wire.records import Cause, Place, RoundRecord
from tests.sim.world import Node, Violation, World, must

SLACK = 5.0  # seconds beyond ``store_grace`` until a node that waits has given up


def install(world: World) -> None:
    world.watch += [_written]
    world.on_starting += [_started]
    world.on_moving += [_moved]
    world.on_forwarding += [_nobody_waits_for_ever]


def _written(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    if old is None and new.term:
        _taken_over(world, node, new)
    elif old is None:
        must(not world.writes_to, f"{node.id} begins a job in a standby store")
    elif new.round > old.round and old.round:
        _losses(world, old, new)


def _taken_over(world: World, node: Node, new: RoundRecord) -> None:
    """The owner alone decides, once, about a round that is over; who counts is there, or was and starts nothing there any more."""
    place, broken = node.machine.store.place, new.broken
    must(place is not None and place.id == node.id == world.writes_to, f"{node.id} takes over the store of another node")
    must(broken is not None and broken.over and new.moved is None, "a store takes over with a round that may go on, or sends nodes away")
    name = f"{new.store_id} {new.term}"
    must(name not in world.terms, f"two stores take over with term {new.term}")
    world.terms.add(name)
    world.owners.add(node.id)
    named = {i for quorum in new.quorums for i in quorum.ids} | {m.id for m in new.members}
    for other in world.nodes:
        if other.alive and other.id in named and is_there(node.machine.store.rows.get(other.id)):
            here = other.machine.store.place == place or place.name in other.given_up
            must(here, f"{node.id} counts {other.id}, which is in another store")
    evidence, rules = node.machine.store._failover.evidence, node.machine.rules
    assert evidence.known is not None and place is not None
    case = Case(evidence.known, evidence, StoreView(node.id, rules, node.machine.store.rows), node.now)
    counting = counted(case, evidence.known)
    for i in named & counting:
        once = world.counted.get(key := f"{new.store_id} {evidence.known.term} {i}", place)
        gone = not any(other.alive for other in world.nodes if other.id == once.id)  # each round there would include it
        must(once == place or gone, f"{i} counts at {once.id} and at {place.id} for one store that is lost")
        world.counted[key] = place
    for other in world.nodes:
        back = other.alive and other is not node and not other.machine.store.undecided and other.machine.store.place == evidence.before
        must(not (back and other.id in counting), f"{node.id} counts {other.id}, which is back in the store that is lost")
    must(is_there(node.machine.store.rows.get(node.id)), f"{node.id} takes over a store in which it is not")
    start = world.record_at_start()
    begun = start is not None and start.round > 0 and start.closed is None and start.store_id != new.store_id
    must(not begun or world.disconnected, f"{node.id} takes over although another run has begun where the job was started")


def _moved(world: World, node: Node, before: Place | None, after: Place | None) -> None:
    """Nobody gives up a store whose host lives, but for one that has taken over, or with a majority; and nobody goes back.

    But from an undecided store in which nothing is decided any more, to a store that has a round record.
    """
    record = node.machine.record
    if after is None and record is None:  # nobody answers where this newcomer was sent
        return
    if before is not None:
        node.given_up.add(before.name)
    if after is None or (after.name in node.given_up and "job/round" in world.data_at(after)):
        _went_back(world, node, before)
        return
    must(after.name not in node.given_up, f"{node.id} goes back to the store of {after.id}")
    if world.rules.majority or record is None or "job/round" in world.data_at(after) or (before and before.id != record.host):
        return
    host = next((other for other in world.nodes if other.id == record.host), None)
    must(host is None or not host.alive, f"{node.id} gives up the store of {record.host}, which lives, for an undecided one")


def _went_back(world: World, node: Node, before: Place | None) -> None:
    """A node has gone back from the undecided store ``before``: its owner is that node, has given it up, or has died."""
    must(before is not None, f"{node.id} goes back from the store where the job was started")
    assert before is not None
    owner = next(other for other in world.nodes if other.id == before.id)
    ended = owner is node or before.name in owner.given_up or not owner.alive
    must(ended and "job/round" not in world.data_at(before), f"{node.id} goes back from the store of {before.id}, which may take over")


def _losses(world: World, old: RoundRecord, new: RoundRecord) -> None:
    """A round that has ended because a member leaves that had been there before, and that has lost no other one, is no early loss."""
    if new.losses <= old.losses or not world.only_deaths or old.broken is None or old.broken.cause is not Cause.LEAVE:
        return
    gone = [node.id for node in world.nodes if (not node.alive or node.machine.state is LEFT) and old.index(node.id) is not None]
    must(gone != [old.broken.by] or old.broken.by in old.came, "an early loss is counted, and nobody has died or left at once")


def _started(world: World, node: Node, start: Start) -> None:
    """Workers of a round start. Others may have formed one in another store, which cannot start: a member of it has gone from there."""
    new, last = start.record, world.started.get(start.record.store_id)
    if world.rules.majority and last is not None and last.fence != new.fence:
        _enough(world, last, new)
    world.started[new.store_id] = new


def _enough(world: World, last: RoundRecord, new: RoundRecord) -> None:
    """Enough members of the last round that has started are in the one that starts now: more than half, or all others have ended."""
    ended = {node.id for node in world.nodes if node.working is None and (not node.alive or node.machine.state is LEFT)}
    ids, host = [m.id for m in last.members], last.host
    here = {m.id for m in new.members}
    gone = (ended & {host, *world.owners}) - here  # who takes part agreed to the round, and may have died since
    without_host = [i for i in ids if i not in gone]
    for some in (ids, without_host):
        count = sum(i in here for i in some)
        if 2 * count > len(some) or (2 * count == len(some) and host in here) or all(i in here or i in ended for i in some):
            return
    raise Violation(f"round {new.round} starts with {sorted(here & set(ids))} of {ids}, too few of those that may go on elsewhere")


def _nobody_waits_for_ever(world: World) -> None:
    for node in world.nodes:
        since = node.machine.store._failover.evidence.undecided_since
        leaves = node.machine.state in (DRAINING, LEFT)
        if node.alive and not node.frozen and not node.stalled and since is not None and not leaves:
            waited = node.now - since
            must(waited <= world.rules.store_grace + SLACK, f"{node.id} has waited in an undecided store for {waited:.0f} s")
