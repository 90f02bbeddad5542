"""The invariants of every step of every history: the promises P1 to P9 as predicates of the world. They raise ``Violation``."""

from __future__ import annotations

import itertools

from elastirun.rendezvous.formation import scale_down, take_seats
from elastirun.rendezvous.peers.seats import assign
from elastirun.rendezvous.rules import hold, most_nodes
from elastirun.rendezvous.timing import EXCHANGE_LIMIT
from elastirun.rendezvous.transitions import DONE, DRAINING, JOINING, LEFT
from elastirun.rendezvous.wire.actions import Outcome, Start
from elastirun.rendezvous.wire.records import Cause, RoundRecord, Verdict
from tests.sim import store_invariants
from tests.sim.world import Node, World, must

SLACK = 0.05  # seconds, for messages under way
RATES = 1.1  # rate of the fastest clock, relative to the right one


def install(world: World) -> None:
    world.watch += [_written]
    world.on_starting += [_start]
    world.on_progress += [_one_makes_progress]
    if world.rules.succession:
        store_invariants.install(world)


def _written(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    if old is None and new.term:
        _taken_over(world, node, new)
        return
    if old is not None and world.rules.lasting and new.store_id != old.store_id:
        must(not _complete(world, old), f"the next run begins while round {old.round} of the last one goes on")
        old = None  # the new store is another rendezvous
    for check in (_version_rises, _rounds, _members, _closing, _expulsion, _newcomers):
        check(world, node, old, new)
    if old is None or new.round > old.round:
        world.formed_at[new.fence, world.writes_to] = world.t


def _taken_over(world: World, node: Node, new: RoundRecord) -> None:
    """P1, P9: one store at a time takes over, only from a host that has died, and it calls only those lost that have.

    With a majority, a store takes over from any host.
    """
    for other in world.nodes:
        record = world.record_at(other) if other.alive and other is not node else None
        twice = record is not None and record.store_id == new.store_id and record.term >= new.term
        must(not twice, f"{node.id} takes over although {other.id} has done so, and lives")
    for m in new.members:
        world.written_at.setdefault((m.id, node.id), [world.t])  # who has not come counts as silent from now on
    broken = new.broken
    must(broken is not None, "a store takes over with a round that is on")
    assert broken is not None
    if world.rules.majority:
        return
    for i in set(broken.lost) - world.called_lost.get(new.fence, set()):
        lost = next(node for node in world.nodes if node.id == i)
        gone = not lost.alive or lost.machine.state is LEFT
        must(gone and lost.working is None, f"{i} is called lost when a store takes over, and it lives, or its workers run")


def _version_rises(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    must(new.version == (old.version + 1 if old else 1), "every write of the record raises its version by one")
    must(old is None or old.store_id == new.store_id, "a store keeps its name")


def _rounds(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    """P3, P4: round numbers grow by one, each round is formed once, a closed job stays closed."""
    before = old.round if old else 0
    must(new.round in (before, before + 1), f"round {new.round} after round {before}")
    must(old is None or old.closed is None, "a closed record was written")
    if new.round == before + 1:
        must(before == 0 or (old is not None and old.broken is not None), f"round {new.round} formed while round {before} was on")
        must(new.broken is None and new.closed is None, "a round is formed whole")
        counted = old is not None and new.failures > old.failures and old.broken is not None
        failed = old is not None and old.broken is not None and old.broken.cause is Cause.FAILURE and not old.broken.lost
        must(not counted or failed, "what was no failure of a worker cost a restart")
        must(not failed or counted or world.rules.restart_window > 0, "a failure was not counted")
    elif old is not None:
        must(new.members == old.members, "a round's members are for ever")
        must(old.broken is None or new.broken is not None, "a broken round is not mended")


def _members(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    """P2, P3: min to max members, each node once, survivors in their order; the last round can make no progress any more."""
    if old is None or new.round == old.round:
        return
    ids = [m.id for m in new.members]
    must(world.rules.min_nodes <= len(ids) <= world.rules.max_nodes, f"a round of {len(ids)} nodes")
    must(len(set(ids)) == len(ids), "a node twice in a round")
    waited = not world.rules.majority and world.rules.mesh is None  # else more may be needed to go on, or to form a replica
    must(not waited or len(ids) <= max(most_nodes(world.rules, old), 1), f"a round of {len(ids)} nodes, where {old.wanted} are wanted")
    if world.rules.mesh is not None:
        must(world.rules.mesh.is_formed_by([m.slots for m in new.members]), f"a round of {new.world_size} workers for {world.rules.mesh}")
        slots = {n.id: n.machine.row.slots for n in world.nodes}
        must(all(m.slots <= slots[m.id] for m in new.members), "a node with more workers than it has")
        hosts = [n.id for n in world.nodes if n.alive and n.machine.row.hosts and not old.term]
        must(not hosts or not set(hosts).isdisjoint(ids), "a round without the host of the store")
    elif not world.rules.fixed_ranks:
        stayed = [m.id for m in old.members if m.id in ids]
        must([i for i in ids if i in stayed] == stayed, "survivors changed their order")
        if len(ids) >= len(old.members):
            kept = all(ids[k] == m.id for k, m in enumerate(old.members) if m.id in stayed)
            must(kept, "a survivor lost its place although newcomers filled every hole")
    else:
        ranks = {n.id: n.machine.row.node_rank for n in world.nodes}
        must([ranks[i] for i in ids] == list(range(len(ids))), "a fixed rank is not the wish")
    working = {n.id for n in world.nodes if n.progressing and n.working and n.working.round == old.round}
    must(not old.members or not working.issuperset(m.id for m in old.members), f"round {new.round} is formed while {old.round} works")


def _closing(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    """P4: only a verdict closes the job, and it is true."""
    if new.closed is None or (old and old.closed):
        return
    if new.closed.verdict is Verdict.SUCCEEDED:
        missing = [m.name for m in new.members if (m.id, new.round) not in world.succeeded]
        must(not missing, f"success without {missing}")
    else:
        spent = new.failures > world.rules.max_restarts or world.rules.fail_fast
        must(spent and bool(new.closed.failures), "failed with restarts left, or without a failure")
        order = [(failure.blame, failure.after) for failure in new.closed.failures]
        must(order == sorted(order), "the first of the failures is not the one to blame")


def _expulsion(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    """P5, P9: a node is called lost only if a death notice says so, or if its row has not changed for ``expire`` by the fastest clock."""
    broken = new.broken
    if broken is None:
        return
    known = old.broken.lost if old and old.broken and old.round == new.round else ()
    told = world.telling
    if told is not None and new.moved is None:
        must(not told.up and told.working is None, f"a death notice of {told.id}, which lives, or whose workers run")
        must(set(broken.lost) - set(known) <= {told.id}, f"a death notice of {told.id} that calls others lost")
        return
    for lost in set(broken.lost) - set(known):
        times = [*world.written_at.get((lost, world.writes_to), [-1e9]), world.t]
        gaps = [after - before for before, after in itertools.pairwise(times) if after >= world.t - 2 * EXCHANGE_LIMIT]
        silent = max(gaps)  # the node may have come back between the read and this write
        must(silent >= world.rules.expire / RATES - SLACK, f"{lost} was called lost after {silent:.2f} s")


def _newcomers(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
    """A node that crashes again and again causes no round more often than ``hold`` allows, while the others can do without it."""
    if old is None:
        return
    broken, members, wait = new.broken, {m.id for m in old.members}, hold(old)
    if world.rules.mesh is not None and broken is not None and broken.cause is Cause.JOIN and old.broken is None:
        known = {row.id for row in node.machine.store.view(old).newcomers()} | {node.id}  # of other dead ones it knows that they are gone
        waits = [n.machine.row for n in world.nodes if n.id in members or (n.id in known and _waits(n))]
        host = any(row.hosts and row.id not in members for row in waits)
        more = assign(world.rules.mesh, old.members, waits, most_nodes(world.rules, old)).world > old.world_size
        must(more or host or _is_large(world, old), f"newcomers that add no replica of {world.rules.mesh} end a round")
    if hold(new) == 0:
        return
    if broken is not None and broken.cause is Cause.JOIN and old.broken is None and not _is_large(world, old):
        ran = world.t - world.formed_at[new.fence, world.writes_to]  # two stores may form rounds of one number, of which one never starts
        must(ran >= wait / RATES - SLACK, f"newcomers ended a round after {ran:.1f} s, and are to wait {wait:g} s")
    if new.round > old.round and old.broken is not None and old.broken.cause is not Cause.JOIN:
        stayed = [m for m in new.members if m.id in members]
        rows = [n.machine.row for n in world.nodes if n.id in {m.id for m in stayed}]
        enough = len(take_seats(world.rules, old, rows).members) >= world.rules.min_nodes
        enough = enough and not (world.rules.mesh and world.rules.majority)  # the seats may be too few for the quorum
        others = [m for m in new.members if m.id not in members and m.id != new.host]  # every round includes the store's host
        must(not enough or not others, "a newcomer is taken in at once after many early losses")


def _is_large(world: World, record: RoundRecord) -> bool:
    """Return whether the round has more members than the job is scaled to."""
    return len(record.members) > most_nodes(world.rules, record)


def _waits(node: Node) -> bool:
    """Return whether the node is, or has last written that it is, a newcomer. It may have died since, unnoticed so far."""
    stored = node.machine.store.own.stored
    return JOINING in (node.machine.state, stored.status if stored else None)


def _start(world: World, node: Node, start: Start) -> None:
    """P2: all members start from one member table, after all have been ready."""
    record = start.record
    must(record.members[start.node_rank].id == node.id, "a wrong node rank")
    held = node.session.worker_store
    must(start.node_rank > 0 or (held is not None and record.members[0].port == held.port), "node rank 0 holds another port than it said")
    for other in world.nodes:
        for earlier in other.began:
            same = earlier.fence == record.fence
            must(not same or earlier.members == record.members, f"round {record.round} with two member tables")
    by_id = {n.id: n for n in world.nodes}
    late = [m.name for m in record.members if record.round not in by_id[m.id].ready_for]
    must(not late, f"round {record.round} starts before {late} were ready")


def _one_makes_progress(world: World) -> None:
    """P1: two rounds are never complete at once. Checked after each event that changed which workers can take a step."""
    complete = {n.working.fence: n.working for n in world.nodes if n.working and _complete(world, n.working)}
    stores = [record.store_id for record in complete.values()]
    if _lost_what_it_held(world) or world.disconnected:  # nothing is promised beyond such a store
        must(len(set(stores)) == len(stores), f"{sorted(complete)} can both make progress")
    else:
        must(len(complete) <= 1, f"{sorted(complete)} can both make progress")


def _lost_what_it_held(world: World) -> bool:
    """Return whether another, empty store took the place of one that no node hosts."""
    return not world.hosted and world.replaced > 0


def _complete(world: World, record: RoundRecord) -> bool:
    """Return whether the workers of all members run, so that they could finish a step together."""
    working = {n.id for n in world.nodes if n.progressing and n.working and n.working.fence == record.fence}
    return all(m.id in working for m in record.members)


def settled(world: World) -> bool:
    """Return whether every node that can be is in one running round, or the job is over and all nodes have gone."""
    record = world.record
    alive = [n for n in world.nodes if n.alive]
    over = any(n.outcome in (Outcome.SUCCEEDED, Outcome.FAILED) for n in world.nodes)
    forgets = world.rules.lasting or _lost_what_it_held(world)
    if over and forgets and len(alive) < world.rules.min_nodes:
        return all(n.working is None for n in alive)  # nodes that came too late wait for the next run
    if over and not alive:
        return True
    if over and world.rules.succession and all(n.starts == [] and n.finish is None for n in alive):
        return True  # nodes that came too late, and where the job did not end, wait for another store, or for others
    if record.closed is not None if record is not None else over:
        return all(n.starts == [] and n.finish is None for n in alive)  # nodes that came too late wait for another store
    if record is None or not record.open or len(alive) < world.rules.min_nodes:
        return False
    if any(n.machine.state in (DRAINING, LEFT) for n in alive):
        return False
    taking_part = {n.id for n in alive if takes_part(n, record)}
    if not all(m.id in taking_part or (m.id, record.round) in world.succeeded for m in record.members):
        return False
    finishing = any((m.id, record.round) in world.succeeded for m in record.members)
    if world.rules.mesh is not None:
        seats = take_seats(world.rules, record, [n.machine.row for n in alive])
        stays = _is_large(world, record) and scale_down(world.rules, record, "", 0.0) is None  # on fewer of its nodes there is no replica
        return finishing or stays or record.world_size == seats.world
    return finishing or len(record.members) == _places(world, alive)


def goes_on(world: World) -> bool:
    """Return whether the workers of a round run, and can take steps."""
    return any(n.working is not None and _complete(world, n.working) for n in world.nodes)


def two_runs(world: World) -> bool:
    """Return whether all nodes train, but in several runs: where a second one can begin, it may go on (decision 0021)."""
    alive = [n for n in world.nodes if n.alive]
    stores = {n.working.store_id for n in alive if n.working}
    return world.disconnected and len(stores) > 1 and all(n.working is not None and _complete(world, n.working) for n in alive)


def all_train(world: World) -> bool:
    """Return whether all workers of a live job train in one world, or some have succeeded, or the job is over."""
    record = world.record
    if any(n.outcome in (Outcome.SUCCEEDED, Outcome.FAILED) for n in world.nodes):
        return True
    if record is None or record.closed is not None or any((m.id, record.round) in world.succeeded for m in record.members):
        return True
    return world.live is not None and world.live.rounds.all_train()


def takes_part(node: Node, record: RoundRecord) -> bool:
    """Return whether the node's workers run in the round, or have all succeeded in it."""
    done = node.machine.state is DONE and node.machine.row.succeeded == record.round
    return done or (node.working is not None and node.working.fence == record.fence and not node.stopping)


def _places(world: World, alive: list[Node]) -> int:
    if world.rules.fixed_ranks:
        return len({n.machine.row.node_rank for n in alive if (n.machine.row.node_rank or 0) < most_nodes(world.rules, world.record)})
    return min(most_nodes(world.rules, world.record), len(alive))


def verdicts_agree(world: World) -> None:
    """P14: all nodes that learn the verdict of a run learn the same one.

    Where the store outlives its jobs, a node that comes after all nodes of a run have gone begins the next run.
    """
    outcomes: dict[str, set[Outcome]] = {}
    for node in world.nodes:
        if node.outcome in (Outcome.SUCCEEDED, Outcome.FAILED) and node.machine.record is not None:
            run = node.machine.record.store_id if world.rules.lasting else ""
            outcomes.setdefault(run, set()).add(node.outcome)
    for of_run in outcomes.values():
        must(len(of_run) <= 1 or world.record is None, f"some nodes {of_run}")
