"""The rendezvous store survives its host: who takes over, when, and what becomes of those that come later (docs/decisions/0020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from elastirun.errors import StoreError, UnreadableMembers
from elastirun.rendezvous.failover import succession
from elastirun.rendezvous.failover.decide import Move
from elastirun.rendezvous.failover.evidence import Evidence
from elastirun.rendezvous.failover.failover import Failover
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire import exchanges, lists
from elastirun.rendezvous.wire.actions import Outcome, Say, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import FoundAtStart, Synced, SyncFailed, Tick
from elastirun.rendezvous.wire.records import Broken, Cause, Closed, Member, NodeRow, Place, Quorum, RoundRecord, Status, Verdict, Vote
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.rendezvous import test_formation
from tests.sim import invariants
from tests.sim.world import Deaths, Node, World, write_round

MEMBERS = tuple(Member(i, f"name-{i}", f"10.0.0.{k}", 1000, 2, standby=2000) for k, i in enumerate("habcd", start=1))
RECORD = RoundRecord("s", version=5, round=3, members=MEMBERS, host="h", quorums=(Quorum(tuple("habcd"), "h"),))
PROOF = Rules(1, 5, store_succession="proof")
OFF = Rules(1, 5)
DEAD = Vote("h", RECORD, ("h",))


PLACES = tuple(Place(m.id, m.address, m.standby) for m in MEMBERS)


def answer(*there: str, now: float = 0.0, votes: tuple[Vote, ...] = (DEAD,), found: RoundRecord | None = None) -> Synced:
    """What a standby store says in which the nodes ``there`` have their rows."""
    return Synced(now, now, found, {i: NodeRow(i, i, "", 0, 2) for i in there}, votes=votes)


def told(count: int = 3, **rules: object) -> World:
    """A world of ``count`` nodes, whose store is served by node 0, whose guards tell of deaths, with the invariants watched."""
    world = World(hosted=True, **{"min_nodes": 1, "max_nodes": count, "store_grace": 15.0, "store_succession": "proof", **rules})
    world.deaths = Deaths(told=1.0)
    invariants.install(world)
    for _ in range(count):
        world.add()
    assert world.run(20, world.running(*world.nodes))
    return world


def goes_on(world: World, *nodes: Node, within: float = 8.0) -> None:
    assert world.run(within, world.running(*nodes)), [(n.id, n.outcome, n.said[-1:]) for n in world.nodes]


# -- a job goes on ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_others_go_on_when_the_host_has_died(count: int) -> None:
    world = told(count)
    host, *others = world.nodes
    began = world.t
    host.crash()
    goes_on(world, *others, within=1.5)
    assert world.t - began < 1.5 and world.record and (world.record.term, world.record.host) == (1, others[0].id)
    assert others[0].starts[-1][:2] == (2, 0) and "hosted the rendezvous store, was lost" in world.record.reason


@pytest.mark.parametrize("how", ["proof", "majority"])
def test_a_member_dies_and_then_the_host_before_the_third_has_stopped_its_workers(how: str) -> None:
    """The store with the row of the first one is gone then, but the record has said that nothing of it runs any more."""
    host, second, third = (world := told(3, store_succession=how)).nodes
    third.stop_time = 5.0
    second.crash()
    assert world.run(2, lambda: third.stops != [])
    third.cut_in = True  # it has read the record, and reads no rows before the host dies
    assert world.run(2, lambda: b'"status":"left"' in world.data[f"job/node/{second.id}"])
    world.run(0.05)  # the guard of the second one has nothing more to do
    host.crash()
    third.cut_in = False
    assert third.machine.store.rows[second.id].status is not Status.LEFT
    goes_on(world, third, within=12.0)


def test_hosts_die_one_after_the_other_until_one_node_is_left() -> None:
    world = told(5)
    for k in range(4):
        world.nodes[k].crash()
        goes_on(world, *world.nodes[k + 1 :], within=8.0)
    assert world.record and world.record.term == 4 and [n for _, n in world.history] == [5, 4, 3, 2, 1]
    assert world.record.failures == 0


def test_a_host_that_leaves_is_told_of_when_it_has_gone() -> None:
    world = told()
    host, *others = world.nodes
    host.leave()
    goes_on(world, *others)
    assert host.outcome is Outcome.LEFT and world.record is not None and world.record.losses == 0


def test_a_host_that_has_left_before_the_others_heard_of_it_was_not_lost() -> None:
    world = told()
    host, *others = world.nodes
    usual = [node.delay for node in others]
    for node in others:
        node.delay = (2.0, 2.0)  # seconds; the host has gone by then
    records: list[RoundRecord] = []
    world.watch.append(lambda world, node, old, new: records.append(new))
    host.leave()
    assert world.run(2, lambda: host.finish is not None) and all(node.machine.record and node.machine.record.open for node in others)
    for node, delay in zip(others, usual, strict=True):
        node.delay = delay
    assert world.run(5, lambda: all(node.machine.record and node.machine.record.broken for node in others))
    assert {node.machine.record.broken.cause for node in others if node.machine.record and node.machine.record.broken} == {Cause.LEAVE}
    goes_on(world, *others)
    ends = [record.broken for record in records if record.broken is not None]
    assert {(broken.cause, broken.died) for broken in ends} == {(Cause.LEAVE, ())} and not any(record.losses for record in records)
    assert all(any("which hosted the rendezvous store, has left" in line for line in node.said) for node in others)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("left", [1, 2])
def test_the_host_dies_and_others_with_it(count: int, left: int) -> None:
    """Their guards cannot say so in the store, which has ended as well."""
    world = told(count)
    for node in world.nodes[:-left]:
        node.crash()
    goes_on(world, *world.nodes[-left:], within=1.5)
    assert world.record and world.record.host == world.nodes[-left].id and world.record.failures == 0


def test_a_member_that_leaves_while_the_host_dies_is_not_waited_for() -> None:
    world = told(3)
    host, a, b = world.nodes
    host.crash()
    a.leave()
    goes_on(world, b, within=5.0)
    assert a.outcome is Outcome.LEFT


def test_a_host_of_which_nobody_tells_ends_the_job_as_before() -> None:
    world = told()
    world.deaths = Deaths()
    world.nodes[0].crash()
    assert world.run(40, world.all_finished)
    assert {n.outcome for n in world.nodes[1:]} == {Outcome.STORE_LOST}


def test_it_is_off_unless_asked_for() -> None:
    world = told(3, store_succession="off")
    world.nodes[0].crash()
    assert world.run(40, world.all_finished)
    assert {n.outcome for n in world.nodes[1:]} == {Outcome.STORE_LOST}


def test_a_minority_waits_and_gives_up() -> None:
    world = told(5)
    host, a, b, c, d = world.nodes
    d.side = 1
    host.crash()
    goes_on(world, a, b, c)
    assert world.run(40, lambda: bool(d.finish)) and d.outcome is Outcome.STORE_LOST and d.working is None


def test_who_waits_in_a_store_that_too_few_reach_gives_up() -> None:
    world = told(5)
    host, a, b, c, d = world.nodes
    host.crash()
    assert world.run(5, lambda: a.machine.store.place is not None)
    b.crash()  # its guard tells a, which is not enough: c and d may live
    a.side, c.side, d.side = 1, 2, 3
    assert world.run(60, world.all_finished)
    assert {n.outcome for n in (a, c, d)} == {Outcome.STORE_LOST}


def test_all_meet_at_one_store_when_a_round_was_formed_that_the_host_has_not_read() -> None:
    """Most members of round 1 cannot reach the host, and round 2 is formed without them. The guard names round 1, and all hear it."""
    world = told(4)
    host, a, b, c = world.nodes
    d = world.add()
    world.run(3)
    world.walls = [frozenset({(a.name, host.name), (b.name, host.name)})]
    assert world.run(20, lambda: world.record is not None and world.record.round == 2)
    host.stall()
    world.run(0.5)
    host.crash()
    assert [n.machine.record.round for n in (a, b, c, d, host) if n.machine.record] == [1, 1, 2, 2, 1]
    goes_on(world, a, b, c, d, within=20.0)  # two of the three that are counted would do; c alone is not enough with d


# -- those that come later ---------------------------------------------------------------------------------------------------------


def test_a_host_that_comes_back_joins_the_job_where_it_is_now() -> None:
    world = told()
    host, *others = world.nodes
    host.crash()
    goes_on(world, *others)
    again = world.add("n0")
    goes_on(world, *others, again, within=10.0)
    assert world.record and world.record.store_id == f"store-of-{host.id}" and any("has moved to 10.0.0.2" in line for line in again.said)


def test_a_newcomer_is_not_sent_in_vain_for_ever() -> None:
    world = told(3)
    host, a, b = world.nodes
    host.crash()
    goes_on(world, a, b)
    again = world.add("n0")
    assert world.run(5, lambda: again.machine.store.place is not None)
    world.deaths = Deaths()
    a.crash()
    b.crash()
    assert not world.run(world.rules.longest_alone - 3.0, lambda: again.working is not None), "the others may live"
    assert any("this job has moved to 10.0.0.2, where nobody answers" in line for line in again.said)
    assert world.run(15, lambda: again.working is not None)
    assert again.starts == [(1, 0, 1)]


def test_a_job_that_has_moved_yields_to_one_that_has_begun_where_it_was_started() -> None:
    world = told()
    world.disconnected = True
    host, *others = world.nodes
    host.crash()
    goes_on(world, *others)
    again = world.add("n0")
    again.side = 1
    assert world.run(20, lambda: again.working is not None)
    again.side = 0
    assert world.run(40, lambda: all(n.finish for n in others))
    assert {n.outcome for n in others} == {Outcome.STORE_LOST} and "another run of this job" in str(others[0].finish)


def test_a_first_round_waits_until_it_would_have_heard_of_the_job_elsewhere() -> None:
    world = World(hosted=True, store_succession="proof", min_nodes=1, max_nodes=2)
    nodes = [world.add(), world.add()]
    assert world.run(5, world.running(*nodes))
    assert world.t > 1.0


def test_a_first_round_of_all_nodes_that_there_can_be_waits_for_no_word() -> None:
    world = World(hosted=True, store_succession="proof", min_nodes=2, max_nodes=2)
    nodes = [world.add(), world.add()]
    assert world.run(5, world.running(*nodes))
    assert world.t < 1.0


def test_who_waits_for_others_begins_again_with_the_host_at_its_own_endpoint() -> None:
    world = World(hosted=True, store_succession="proof", min_nodes=3, max_nodes=3)
    host, waits = world.add(), world.add()
    world.run(5)
    before = waits.machine.row.standby
    host.crash()
    again, third = world.add("n0"), world.add("n2")
    goes_on(world, waits, again, third)
    assert before and waits.machine.row.standby == before


def test_nobody_finds_a_spare_that_has_begun_again_where_it_was() -> None:
    """The round of which it has read may have been followed by one that names it, and the others would wait for it to take over."""
    world = World(hosted=True, store_succession="proof", min_nodes=1, max_nodes=1)
    host, spare = world.add(), world.add()
    assert world.run(9, world.running(host))
    world.run(2)
    before, connects = spare.machine.row.standby, []
    reconnect = spare.session._exchanges.reconnect
    spare.session._exchanges.reconnect = lambda: (connects.append(True), reconnect())  # type: ignore[method-assign]
    host.crash()
    again = world.add("n0")
    goes_on(world, again)
    assert world.run(5, lambda: spare.machine.row.standby not in (0, before))
    assert before and connects, "another one is served with a new connection"


# -- the rules ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "ended", "expected"),
    [
        ("abc", "", True),  # more than half of four
        ("ab", "", False),
        ("ab", "cd", True),  # all that have not died
        ("ab", "c", False),
        ("d", "abc", True),
        ("", "abcd", False),
        ("hab", "", False),  # the host does not count
        ("xyz", "", False),  # nor does who was no member
        ("ab", "xyz", False),
    ],
)
def test_enough_is_more_than_half_of_the_others_or_all_that_have_not_died(here: str, ended: str, expected: bool) -> None:
    needed = quorum.without(RECORD.quorums[-1], "h")
    assert (bool(set(here) & set(needed.ids)) and quorum.is_met(needed, set(here), {*ended, "h"})) is expected


def test_two_groups_are_never_both_enough() -> None:
    """However five members are spread over two stores, and whoever has died: not both may go on with a living member each."""
    others = "abcd"
    for spread in range(3**4):
        where = {i: spread // 3**k % 3 for k, i in enumerate(others)}  # 0, 1: the store in which it is; 2: it has died
        dead = {i for i in others if where[i] == 2}
        sides = [{i for i in others if where[i] == side} for side in (0, 1)]
        needed = quorum.without(RECORD.quorums[-1], "h")
        assert not all(side and quorum.is_met(needed, side, dead | {"h"}) for side in sides)


def test_the_standbys_are_those_of_the_members_in_rank_order_without_the_host() -> None:
    assert [p.id for p in succession.standbys(RECORD)] == list("abcd")
    assert [p.id for p in succession.standbys(replace(RECORD, host="b"))] == list("hacd")
    for nobody in (None, replace(RECORD, host=""), replace(RECORD, members=())):
        assert succession.standbys(nobody) == ()
    without = (*MEMBERS[:2], replace(MEMBERS[2], standby=0), *MEMBERS[3:])
    assert [p.id for p in succession.standbys(replace(RECORD, members=without))] == list("acd")


def test_the_newest_record_is_that_of_the_last_term() -> None:
    later = replace(RECORD, term=1, version=2)
    assert succession.newest(RECORD, later) is later and succession.newest(later, RECORD) is later
    assert succession.newest(RECORD, None) is RECORD


@pytest.mark.parametrize("broken", [None, Broken(Cause.FAILURE, "boom", "b", ("c",))])
def test_a_record_that_is_taken_over_says_that_its_round_is_over(broken: Broken | None) -> None:
    taken = succession.take_over(replace(RECORD, broken=broken), "a", {"h", "d", "x"}, ())
    assert (taken.version, taken.term, taken.host, taken.round, taken.store_id) == (6, 1, "a", 3, "s")
    assert taken.broken and taken.broken.over and set(taken.broken.lost) == {"h", "d", *(broken.lost if broken else ())}
    assert taken.broken.cause is (broken.cause if broken else Cause.LOST)


def follows(moves: Failover, place: Place, answer: Synced, record: RoundRecord) -> bool:
    """Whether a node goes on to the standby store of ``place``, which has given this ``answer``."""
    decision = moves.looked(place, answer, record, {})
    return isinstance(decision, Move) and not decision.back


def found_where_started(owner: Failover, answer: Synced) -> str:
    """Let ``owner`` find this where the job was started. Return why it ends; empty: it does not."""
    assert not isinstance(owner.looked(None, answer, RECORD, {}), Move)
    return succession.another_run(answer.round, RECORD)


def test_nobody_follows_before_the_end_of_the_host_is_proven() -> None:
    moves = Failover("b", PROOF)
    assert not follows(moves, PLACES[1], answer("a", votes=()), RECORD)
    assert not follows(moves, PLACES[1], answer("a", votes=(Vote("c", RECORD, ("d",)),)), RECORD)
    assert follows(moves, PLACES[1], answer("a"), RECORD)


def test_nobody_follows_into_a_store_whose_owner_is_not_there() -> None:
    moves = Failover("b", PROOF)
    assert not follows(moves, PLACES[1], answer("c", "d"), RECORD)
    left = Synced(0.0, 0.0, None, {"a": NodeRow("a", "a", "", 0, 2, status=Status.LEFT)}, votes=(DEAD,))
    assert not follows(moves, PLACES[1], left, RECORD)


def test_a_store_that_was_taken_over_is_followed_at_once() -> None:
    taken = succession.take_over(RECORD, "a", {"h"}, ())
    assert follows(Failover("b", PROOF), PLACES[1], answer(votes=(), found=taken), RECORD)
    assert not follows(Failover("b", PROOF), PLACES[1], answer(votes=(), found=RECORD), RECORD)
    assert not follows(Failover("b", PROOF), PLACES[1], answer(votes=(), found=replace(taken, store_id="other")), RECORD)


def test_the_first_in_line_opens_its_own_store_the_next_only_after_it_has_asked_in_vain() -> None:
    assert follows(Failover("a", PROOF), PLACES[1], answer(), RECORD)
    second = Failover("b", PROOF)
    assert not follows(second, PLACES[2], answer(now=1.0), RECORD)
    second.unanswered(PLACES[1], 1.0)
    second.unanswered(PLACES[1], 3.0)
    assert not follows(second, PLACES[2], answer(now=5.9), RECORD)
    assert follows(second, PLACES[2], answer(now=6.0), RECORD)
    follows(second, PLACES[1], answer(now=6.1), RECORD)  # it has answered
    assert not follows(second, PLACES[2], answer(now=6.2), RECORD)
    assert follows(second, PLACES[2], answer(now=6.3, votes=(Vote("a", RECORD, ("a",)),)), RECORD)


def rows(ids: str) -> dict[str, NodeRow]:
    return {i: NodeRow(i, i, "", 0, 2) for i in ids}


def undecided(me: str, at: str) -> Failover:
    """A node that waits in the standby store of another, or in its own."""
    moves = Failover(me, PROOF)
    follows(moves, PLACES[3], answer(), RECORD)  # it has heard that the host has died
    moves.move(next(p for p in PLACES if p.id == at), RECORD, {}, False, 0.0)
    return moves


def come(owner: Failover, ids: str, record: RoundRecord = RECORD) -> None:
    """Let the nodes ``ids``, which know ``record``, come to the undecided store of ``owner``. No other run answers at the start."""
    owner.answered(Sync(), answer(votes=tuple(Vote(i, record) for i in ids)), RECORD)
    owner.unanswered(None, 1.0)


@pytest.mark.parametrize("answers", [False, True], ids=["refused", "an_answer"])
@pytest.mark.parametrize("when", ["while it looks", "when it has looked"])
def test_what_an_owner_has_found_at_the_start_does_not_count_after_it_was_suspended(when: str, answers: bool) -> None:
    owner = undecided("b", "b")
    owner.answered(Sync(), answer(votes=tuple(Vote(i, RECORD) for i in "abc")), RECORD)

    def look(suspended: str) -> bool:
        """Look where the job was started. Return whether the owner may take over then."""
        assert owner.search(RECORD, None, rows("abc"), 1.0) == 1.0 and owner.look(RECORD, 1.0).at is None
        if suspended == "while it looks":
            owner.stood_still(9.0, 8.0)
        if answers:
            owner.looked(None, Synced(1.0, 1.0, None, {}), RECORD, {})
        else:
            owner.unanswered(None, 1.0)
        if suspended == "when it has looked":
            owner.stood_still(9.0, 8.0)
        return owner.take_over(rows("abc"), 9.0) is not None

    assert not look(when) and look("")


@pytest.mark.parametrize(("error", "clear"), [(StoreError("no answer for 3 s"), True), (UnreadableMembers("others are there"), False)])
def test_a_record_that_is_replaced_while_an_owner_reads_it_is_no_silence(error: StoreError, clear: bool) -> None:
    """Another run may be forming its rounds there."""
    machine = Machine(PROOF, NodeRow("b", "b", "", 0, 2), 0.0)
    machine.store.record, machine.store._failover = RECORD, undecided("b", "b")
    machine.store._link.schedule.asked = Sync(rows=(), look=True)  # where the job was started
    machine.step(exchanges.failure(error, 0.1))
    assert machine.store._failover.evidence.start_is_clear is clear


def test_an_owner_gives_up_its_undecided_store_only_for_one_before_it_in_line() -> None:
    assert follows(undecided("b", "b"), PLACES[1], answer("a"), RECORD)
    assert not follows(undecided("b", "b"), PLACES[3], answer("c"), RECORD)


def test_who_waits_in_an_undecided_store_leaves_it_when_its_owner_has() -> None:
    assert not follows(undecided("c", "b"), PLACES[1], answer("a"), RECORD)
    assert follows(undecided("c", "b"), PLACES[1], answer("a", "b"), RECORD)
    assert follows(undecided("c", "b"), PLACES[1], answer("a", votes=(DEAD, Vote("b", RECORD, ("b",)))), RECORD)


def test_an_owner_in_the_smaller_part_does_not_overrule_another_word() -> None:
    """Another node may have taken over as well, with the larger part. Where nobody has said that, a second run must not begin."""
    owner = undecided("a", "a")
    record = replace(RECORD, host="a", term=1)
    assert owner.forward(record) is None, "it has not taken over yet"
    owner.evidence = replace(owner.evidence, undecided_since=None)
    sent = []
    for minority in (False, True, False):
        owner.note_minority(minority, 1.0)
        sent.append(owner.forward(record))
    assert sent == [(PLACES[1], record), (PLACES[1], None), (PLACES[1], record)]
    assert owner.forward(replace(record, closed=Closed(Verdict.SUCCEEDED, "", "a"))) is None


OTHER, WAITS = "of another run", "of this run"  # store ids, in this order


def finds(owner: Failover, run: str, *times: float, store_id: str = OTHER, waits: bool = True) -> str:
    """Return what an owner, whose store has ``store_id``, says when it finds the word of ``run`` at each of ``times``."""
    found = RoundRecord("", moved=replace(PLACES[2], run=run)) if run else None
    return [owner.found_at_start(found, replace(RECORD, store_id=store_id), waits, now) for now in times][-1]


def seconds(start: float, count: float) -> list[float]:
    return [start + k for k in range(int(count) + 1)]


def test_an_owner_that_waits_while_another_run_takes_the_nodes_that_come_gives_up() -> None:
    """Both have moved, and each writes its word over the other's."""
    grace = PROOF.store_grace
    assert not finds(Failover("a", PROOF), WAITS, *seconds(1, grace - 1))
    assert "has moved, to 10.0.0.3" in finds(Failover("a", PROOF), WAITS, *seconds(1, grace))
    for own in ("", OTHER):
        assert not finds(Failover("a", PROOF), own, *seconds(1, 3 * grace)), "another owner of this job will end, or follow"
    assert not finds(Failover("a", PROOF), WAITS, *seconds(1, 3 * grace), waits=False), "it goes on with the nodes that it has"


def test_of_two_runs_that_wait_one_waits_for_twice_as_long() -> None:
    grace = PROOF.store_grace
    assert not finds(Failover("a", PROOF), OTHER, *seconds(1, 2 * grace - 1), store_id=WAITS)
    assert finds(Failover("a", PROOF), OTHER, *seconds(1, 2 * grace), store_id=WAITS)


def test_words_of_another_run_count_while_they_come_again_and_again() -> None:
    grace = PROOF.store_grace
    cases: list[tuple[float, Callable[[Failover], object]]] = [
        (53.0, lambda owner: finds(owner, WAITS, 52.0, waits=False)),
        (53.0, lambda owner: finds(owner, "a third one", 52.0)),
        (53.0, lambda owner: owner.stood_still(52.0, 1.0)),
        (53.0, lambda owner: owner.move(PLACES[1], RECORD, {}, True, 52.0)),
        (57.0, lambda owner: None),  # a gap
    ]
    for later, between in cases:
        owner = Failover("a", PROOF)
        finds(owner, WAITS, *seconds(1, 50))
        between(owner)
        assert not finds(owner, WAITS, *seconds(later, grace - 1))
        assert finds(owner, WAITS, *seconds(later + grace, 1))


def test_an_owner_that_gives_up_ends_with_its_store_lost() -> None:
    world = told(3, min_nodes=2)
    host, *others = world.nodes
    host.crash()
    goes_on(world, *others)
    owner = next(node for node in others if node.machine.store.forward is not None)
    word = RoundRecord("", moved=Place("n9", "10.0.0.9", 2000, "another"))

    def tell() -> None:
        owner.post(lambda now: FoundAtStart(now, word))
        world.at(1.0, tell)

    def ends() -> bool:
        return owner.finish is not None

    tell()
    assert not world.run(3 * world.rules.store_grace, ends), "its round runs"
    next(node for node in others if node is not owner).crash()
    assert world.run(3 * world.rules.store_grace, ends) and owner.outcome is Outcome.STORE_LOST


def test_nobody_goes_back_to_a_store_that_it_has_left() -> None:
    moves = undecided("b", "b")
    assert [p.id for p in moves.places(RECORD)] == ["a", "c", "d"]
    moves.move(PLACES[1], RECORD, {}, False, 1.0)
    assert [p.id for p in moves.places(RECORD)] == ["c", "d"]


def test_who_has_left_a_store_does_not_wait_for_it() -> None:
    """Nobody looks there any more, so it would never be found silent."""
    renewed = replace(RECORD, members=(*MEMBERS[:1], replace(MEMBERS[1], standby=2001), *MEMBERS[2:]))
    for record, expected in ((RECORD, True), (renewed, False)):  # the next store of that node is another one
        moves = Failover("d", PROOF, Evidence(left=frozenset({PLACES[1].name})))
        assert follows(moves, PLACES[4], answer("d", votes=(Vote("h", record, ("h", "b", "c")),)), record) is expected


def test_who_says_that_a_host_has_died_knows_the_record_that_it_knew() -> None:
    newer = replace(RECORD, version=9, round=4)
    moves = Failover("b", PROOF)
    follows(moves, PLACES[1], answer(votes=(Vote("h", newer, ("h",)),)), RECORD)
    moves.move(PLACES[1], RECORD, {}, False, 0.0)
    assert moves.votes == (Vote("h", newer, ("h",)), Vote("b", newer, ("h",)))


def test_the_guard_of_a_host_tells_what_it_knew() -> None:
    assert Failover("h", PROOF).notice(RECORD) == DEAD
    assert Failover("a", PROOF).notice(RECORD) == Vote("a", RECORD, ("a",)), "the store may be gone, too"
    assert (
        Failover("x", PROOF).notice(RECORD) is None
        and Failover("h", OFF).notice(RECORD) is None
        and Failover("h", PROOF).notice(None) is None
    )
    owner = undecided("b", "b")
    assert owner.notice(RECORD) == Vote("b", RECORD, ("b", "h")) and undecided("c", "b").notice(RECORD) == Vote("c", RECORD, ("c", "h"))


def test_a_vote_names_only_nodes_that_its_record_names() -> None:
    """A guard keeps its vote in a pipe, which would be full after some hundred nodes that have come and gone."""
    earlier = replace(RECORD, quorums=(Quorum(("h", "x"), "h"), *RECORD.quorums))
    moves = Failover("b", PROOF, Evidence(gone=frozenset({"a", "x", *(f"gone-{i}" for i in range(1000))})))
    assert moves.notice(RECORD) == Vote("b", RECORD, ("a", "b")) and moves.notice(earlier) == Vote("b", earlier, ("a", "b", "x"))
    moves.move(PLACES[1], earlier, {}, False, 0.0)
    assert moves.votes == (Vote("b", earlier, ("a", "x")),)


def test_votes_about_another_run_are_not_heard() -> None:
    moves = Failover("b", PROOF)
    other = Vote("h", replace(RECORD, store_id="another"), ("h", "b"))
    assert not follows(moves, PLACES[1], answer("a", votes=(other,)), RECORD) and not moves.evidence.gone


def test_only_the_owner_takes_over_and_only_when_enough_have_come_and_no_other_run_has_begun() -> None:
    owner = undecided("a", "a")
    come(owner, "abcd")
    owner.answered(Sync(), answer(votes=()), RECORD)
    assert owner.take_over(rows("abc"), 1.0) is None  # it has not asked where the job was started
    owner.unanswered(None, 1.0)
    assert owner.take_over(rows("ab"), 1.0) is None and owner.take_over(rows("bcd"), 1.0) is None
    taken = owner.take_over(rows("abc"), 1.0)
    assert taken is not None and taken.record.host == "a"
    guest = undecided("b", "a")
    come(guest, "abc")
    assert guest.take_over(rows("abc"), 1.0) is None


NEXT = (MEMBERS[0], *(Member(i, i, "", 0, 2, standby=1) for i in "efa"))
NEWER = replace(RECORD, version=9, round=4, members=NEXT, quorums=(*RECORD.quorums, Quorum(tuple("hefa"), "h")))


def heard(*votes: Vote) -> Failover:
    """The owner of its undecided store, which has read these votes there."""
    owner = Failover("a", PROOF)
    follows(owner, PLACES[3], answer(votes=votes), RECORD)
    owner.move(PLACES[1], RECORD, {}, False, 0.0)
    owner.unanswered(None, 1.0)
    return owner


def test_owners_count_in_the_round_that_the_guard_of_the_host_has_named() -> None:
    """Others may know a newer round, which the host has never read. The owner of another store may not know of that one."""
    owner = heard(DEAD, Vote("e", NEWER))
    come(owner, "abcef")
    assert owner.take_over(rows("aef"), 1.0) is None
    taken = owner.take_over(rows("abc"), 1.0)
    assert taken is not None and (taken.record.round, taken.record.version) == (4, 10), "the newest record goes on"


def test_who_has_not_heard_the_guard_of_the_last_host_does_not_take_over() -> None:
    later = succession.take_over(RECORD, "d", {"h"}, ())
    owner = heard(DEAD, Vote("b", later, ("d",)))
    come(owner, "abcdef", later)
    assert owner.take_over(rows("abcdef"), 1.0) is None
    later = replace(later, quorums=RECORD.quorums)
    owner = heard(DEAD, Vote("d", later, ("d",)))
    come(owner, "abcdef", later)
    assert owner.take_over(rows("abcdef"), 1.0) is not None


def test_a_node_counts_only_for_the_store_that_it_had_given_up_when_it_came() -> None:
    """It may have gone on to a store that has taken over meanwhile, and wait in another one since that was lost."""
    later = replace(succession.take_over(RECORD, "d", {"h"}, ()), quorums=RECORD.quorums)
    owner = heard(DEAD, Vote("d", later, ("d",)))
    come(owner, "bc")
    assert owner.take_over(rows("abc"), 1.0) is None
    come(owner, "bc", later)
    assert owner.take_over(rows("abc"), 1.0) is not None


def test_the_dead_are_not_there() -> None:
    owner = heard(DEAD)
    come(owner, "abc")
    owner.answered(Sync(), answer(votes=(Vote("c", RECORD, ("c",)),)), RECORD)
    owner.unanswered(None, 1.0)
    assert owner.take_over(rows("abc"), 1.0) is None


@pytest.mark.parametrize("me", ["a", "b"])
def test_who_hears_in_an_undecided_store_of_a_later_one_votes_again(me: str) -> None:
    moves, later = undecided(me, "a"), succession.take_over(RECORD, "d", {"h"}, ())
    assert me == "a" or moves.complete(Sync(), RECORD, {}).voters == ("a",)
    moves.answered(Sync(votes=moves.votes), answer(votes=(DEAD,)), RECORD)
    assert moves.votes == ()
    moves.answered(Sync(), answer(votes=(Vote("a", later),)), RECORD)
    assert moves.votes == (DEAD, Vote(me, later, ("h",)))


def test_an_owner_reads_the_votes_of_all_that_it_may_count() -> None:
    owner = heard(DEAD, Vote("e", NEWER))
    assert set(owner.complete(Sync(), NEWER, {}).voters) == set("habcdef")


def test_before_it_takes_over_an_owner_keeps_another_run_from_forming_its_first_round() -> None:
    owner = undecided("a", "a")
    come(owner, "abc")
    owner.answered(Sync(), answer(votes=()), RECORD)
    first = RoundRecord("other", version=1)

    def look() -> Synced | None:
        assert owner.search(RECORD, None, rows("abc"), 1.0) == 1.0
        asked = owner.look(RECORD, 1.0)
        assert asked.at is None
        return Synced(1.0, 1.0, asked.change.record if asked.change else first, {})

    found = look()
    assert found and not found_where_started(owner, found)
    assert owner.take_over(rows("abc"), 1.0) is None  # a round may form there any moment
    found = look()
    assert found and found.round and found.round.moved == PLACES[1]
    assert not found_where_started(owner, found) and owner.take_over(rows("abc"), 1.0) is not None
    begun = replace(first, round=1, version=3)
    assert "another run of this job" in found_where_started(owner, Synced(1.0, 1.0, begun, {}))
    assert owner.take_over(rows("abc"), 1.0) is None


@pytest.mark.parametrize("how", ["proof", "majority"])
@pytest.mark.parametrize("gap", [0.0, 0.04, 0.2, 0.44, 0.7])
@pytest.mark.parametrize("host_leaves", [True, False])
def test_a_node_leaves_and_then_the_host_goes(how: str, gap: float, host_leaves: bool) -> None:
    """The third node has not read the row of the first one when the store with that row goes."""
    host, first, third = (world := told(3, store_succession=how)).nodes
    third.stop_time = 3.0
    first.leave()
    assert world.run(2, lambda: first.outcome is Outcome.LEFT)
    assert world.record and world.record.broken and world.record.broken.ended == (first.id,), "it needs no vote then"
    world.run(gap)
    host.leave() if host_leaves else host.crash()
    goes_on(world, third, within=12.0)


@pytest.mark.parametrize("drain", [6.0, 29.0])
def test_the_last_node_of_a_job_that_has_moved_says_where_it_is_as_long_as_its_workers_may_train(drain: float) -> None:
    host, last = (world := told(2)).nodes
    host.crash()
    goes_on(world, last)
    last.stop_time = drain
    last.leave()
    world.run(0.3)
    world.add(host.name)
    world.run(drain + 10.0)  # a second run beside it is a violation of P1, which is raised
    assert last.outcome is Outcome.LEFT


@pytest.mark.parametrize("drain", [0.5, 10.0, 20.0])
@pytest.mark.parametrize("how", ["proof", "majority"])
def test_an_owner_that_leaves_keeps_a_second_run_from_beginning_beside_the_others(drain: float, how: str) -> None:
    host, owner, *others = (world := told(4, store_succession=how, store_grace=60.0)).nodes
    owner.stop_time = drain
    host.crash()
    world.run(0.2)
    owner.leave()
    newcomer = world.add(host.name)
    goes_on(world, *others, newcomer, within=drain + 20.0)
    assert owner.outcome is Outcome.LEFT


def test_a_node_that_leaves_and_is_not_the_last_still_says_where_the_job_is() -> None:
    """Else a second run would begin while the others wait for it to stop its workers."""
    host, owner, other = (world := told(3)).nodes
    host.crash()
    goes_on(world, owner, other)
    owner.stop_time = 5.0
    owner.leave()
    newcomer = world.add(host.name)
    goes_on(world, other, newcomer, within=12.0)


def test_an_owner_that_leaves_sends_no_newcomer_to_its_store() -> None:
    """They would wait there for ``longest_alone``."""
    host, owner = (world := told(2)).nodes
    owner.stop_time = 5.0
    owner.leave()
    host.crash()
    assert world.run(1.5, lambda: world.undecided(owner))
    newcomer = world.add(host.name)
    goes_on(world, newcomer, within=8.0)
    assert owner.outcome in (None, Outcome.LEFT)


def test_a_look_at_the_start_holds_for_one_exchange() -> None:
    owner = undecided("a", "a")
    come(owner, "abc")
    assert owner.take_over(rows("abc"), 1.0) is not None
    owner.answered(owner.complete(Sync(), RECORD, {}), answer(), RECORD)
    assert owner.take_over(rows("abc"), 1.0) is None


def test_a_newcomer_begins_no_job_in_a_standby_store() -> None:
    """It was sent there, and the owner is about to write the record."""
    machine = Machine(Rules(1, 5, store_succession="proof"), NodeRow("n", "n", "", 0, 2), 0.0)
    asked = machine.step(Tick(0.0))
    sent = RoundRecord("other", moved=PLACES[1])
    asked = machine.step(Synced(0.1, 0.0, sent, {}))
    assert any(isinstance(action, Sync) and action.at == PLACES[1] for action in asked)
    asked = machine.step(Synced(0.2, 0.1, None, {}))
    assert not [action for action in asked if isinstance(action, Sync) and action.change], "it has written a record"
    taken = succession.take_over(RECORD, "a", {"h"}, ())
    asked = machine.step(Tick(0.4))
    machine.step(Synced(0.5, 0.4, replace(taken, settings=machine.rules.settings), {}))
    assert machine.record is not None and machine.record.term == 1


def test_a_newcomer_goes_where_another_endpoint_sends_it() -> None:
    """Nobody answers where the job was started."""
    machine = Machine(Rules(1, 5, store_succession="proof"), NodeRow("n", "n", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    asked = machine.step(SyncFailed(0.1, "refused", moved=PLACES[1]))
    assert machine.store.place == PLACES[1] and [action.at for action in asked if isinstance(action, Sync)] == [PLACES[1]]
    assert any(isinstance(action, Say) and "has moved to" in action.text for action in asked)
    machine.store._failover.turn_back(0.2)
    machine.step(Tick(1.0))
    machine.step(SyncFailed(1.1, "refused", moved=PLACES[1]))
    assert machine.store.place is None, "nobody has answered there"
    machine.step(Tick(3.0))
    machine.step(SyncFailed(3.1, "refused", moved=PLACES[2]))
    assert machine.store.place == PLACES[2]


def test_a_newcomer_that_was_sent_in_vain_for_long_stays_where_the_job_was_started_for_as_long() -> None:
    """There it meets the others, which were sent there, too: a first round waits until nobody has come for a while."""
    rules, sends = Rules(1, 5, store_succession="proof"), RoundRecord("other", moved=PLACES[1])
    failover = Failover("n", rules)
    for now, pause in ((1.0, 2 * rules.expire), (1.0 + rules.longest_alone, rules.longest_alone)):
        assert failover.is_sent(sends, now) == PLACES[1]
        failover.follow(PLACES[1])
        failover.turn_back(now)
        assert failover.is_sent(sends, now + pause - 0.1) is None and failover.is_sent(sends, now + pause) == PLACES[1]


def test_a_newcomer_goes_there_also_when_it_has_read_a_record_without_a_round() -> None:
    machine = Machine(Rules(2, 5, store_succession="proof"), NodeRow("n", "n", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, RoundRecord("other", settings=machine.rules.settings), {}))
    machine.step(SyncFailed(0.2, "refused", moved=PLACES[1]))
    assert machine.store.place == PLACES[1] and machine.record is None


def test_a_member_is_sent_nowhere() -> None:
    """It has written into the store whose host has died, so that it needs the proof of that."""
    machine = Machine(Rules(1, 5, store_succession="proof"), NodeRow("n", "n", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, replace(RECORD, settings=machine.rules.settings), {}))
    machine.step(SyncFailed(0.2, "refused", moved=PLACES[1]))
    assert machine.store.place is None and machine.record is not None


@pytest.mark.parametrize(("present", "expected"), [("bc", ""), ("abc", "abc")])
def test_no_round_is_formed_without_the_owner_of_a_store_that_has_taken_over(present: str, expected: str) -> None:
    record = test_formation.after("abc", Cause.LOST, term=1, host="a")
    rows = [test_formation.row(i, 1, hosts=i == "a") for i in present]
    silent = "" if "a" in present else "a"
    assert test_formation.chosen(test_formation.form(record, rows, silent)) == expected


def test_a_record_of_a_later_term_is_not_an_older_one() -> None:
    protocol, data = SyncProtocol("job/", "me", Codec(), lambda: 0.0), dict[str, bytes]()
    for record in (replace(RECORD, version=9), replace(RECORD, version=6, term=1)):
        write_round(data, record)
        assert protocol.carry_out(MemoryStore(data), Sync(rows=()), 0.0).round == record
    write_round(data, replace(RECORD, version=9))
    with pytest.raises(StoreError, match="an older round record"):
        protocol.carry_out(MemoryStore(data), Sync(rows=()), 0.0)


def test_a_look_at_an_empty_store_makes_nobody_believe_an_older_record() -> None:
    protocol, data = SyncProtocol("job/", "me", Codec(), lambda: 0.0), dict[str, bytes]()
    write_round(data, replace(RECORD, version=9))
    protocol.carry_out(MemoryStore(data), Sync(rows=()), 0.0)
    protocol.fresh().carry_out(MemoryStore({}), Sync(rows=(), look=True), 0.0)
    protocol.carry_out(MemoryStore({}), Sync(rows=(), look=True), 0.0)
    write_round(data, RECORD)
    with pytest.raises(StoreError, match="an older round record"):
        protocol.carry_out(MemoryStore(data), Sync(rows=()), 0.0)


def test_votes_come_with_the_members_of_their_round_and_garbage_is_ignored() -> None:
    protocol, store = SyncProtocol("job/", "b", Codec(), lambda: 0.0), MemoryStore()
    execute(protocol.put_vote(DEAD), store)
    execute(protocol.put_vote(DEAD), store)
    store.put_if("job/vote/a", None, b"garbage")
    store.put_if("job/vote/c", None, store.get(["job/vote/h"])["job/vote/h"])  # the vote of another node
    found = SyncProtocol("job/", "b", Codec(), lambda: 0.0).carry_out(store, Sync(rows=(), voters=("h", "a", "c", "x")), 0.0)
    assert found.votes == (DEAD,) and len(found.ignored) == 2


def test_the_members_beside_the_votes_of_a_connection_are_written_once() -> None:
    """A thousand nodes vote about the same round, some of them twice."""
    data: dict[str, bytes] = {}
    protocol = SyncProtocol("job/", "b", Codec(), lambda: 0.0)
    execute(protocol.put_vote(DEAD), MemoryStore(data))
    (members,) = (key for key in data if key.startswith("job/members/"))
    del data[members]
    execute(protocol.put_vote(replace(DEAD, id="b")), MemoryStore(data))
    assert members not in data and "job/vote/b" in data
    execute(protocol.fresh("b").put_vote(DEAD), MemoryStore(data))
    assert members in data, "another connection leads elsewhere"


class WithoutLists(MemoryStore):
    """A store in which nobody may write a list of members."""

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        assert "members/" not in key
        return super().put_if(key, expected, value)


def test_members_that_another_node_has_written_beside_its_vote_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand nodes would send the list of a thousand members."""
    monkeypatch.setattr(lists, "LARGE", 0)
    data: dict[str, bytes] = {}
    execute(SyncProtocol("job/", "b", Codec(), lambda: 0.0).put_vote(DEAD), MemoryStore(data))
    execute(SyncProtocol("job/", "c", Codec(), lambda: 0.0).put_vote(replace(DEAD, id="c")), WithoutLists(data))
    assert "job/vote/c" in data


class Spelling(Codec):
    """Remembers what it spells."""

    spelled: ClassVar[list[str]] = []

    def encode(self, key: str, record: Any) -> bytes:
        self.spelled.append(key)
        return super().encode(key, record)


def test_members_that_were_read_are_not_spelled_again_for_a_vote() -> None:
    """All of a thousand nodes vote at once."""
    Spelling.spelled.clear()
    protocol, there, elsewhere = SyncProtocol("job/", "b", Spelling(), lambda: 0.0), dict[str, bytes](), dict[str, bytes]()
    write_round(there, RECORD)
    record = protocol.carry_out(MemoryStore(there), Sync(rows=()), 0.0).round
    assert record == RECORD
    execute(protocol.fresh("b").put_vote(Vote("b", record)), MemoryStore(elsewhere))
    (key,) = (key for key in elsewhere if key.startswith("job/members/"))
    assert elsewhere[key] == there[key] and Spelling.spelled == ["job/vote/b"]


def test_a_word_of_a_guard_is_not_lost_to_a_doubt_that_arrives_late() -> None:
    protocol, store = SyncProtocol("job/", "b", Codec(), lambda: 0.0), MemoryStore()
    older = Vote("h", replace(RECORD, version=4))
    for vote, stands in ((older, older), (DEAD, DEAD), (older, DEAD)):
        assert execute(protocol.put_vote(vote), store)
        found = SyncProtocol("job/", "b", Codec(), lambda: 0.0).carry_out(store, Sync(rows=(), voters=("h",)), 0.0)
        assert found.votes == (stands,)


def test_where_a_round_has_formed_nobody_says_that_the_store_has_moved() -> None:
    protocol, data = SyncProtocol("job/", "a", Codec(), lambda: 0.0), dict[str, bytes]()
    assert execute(protocol.put_moved(PLACES[1]), MemoryStore(data)) is None
    write_round(data, first := RoundRecord("other"))
    for found in (first, told := RoundRecord("other", version=2, moved=PLACES[1]), told):
        assert execute(protocol.put_moved(PLACES[1]), MemoryStore(data)) == found
    write_round(data, formed := RoundRecord("other", version=3, round=1))
    for found in (formed, formed):
        assert execute(protocol.put_moved(PLACES[2]), MemoryStore(data)) == found


def test_a_word_that_overrules_none_is_written_where_nothing_is_said() -> None:
    protocol, data = SyncProtocol("job/", "a", Codec(), lambda: 0.0), dict[str, bytes]()
    write_round(data, RoundRecord("other"))
    for place in PLACES[1:3]:
        execute(protocol.put_moved(place, over=False), MemoryStore(data))
        execute(protocol.put_place(place, over=False), MemoryStore(data))
        assert execute(protocol.find_job(), MemoryStore(data)) == (RoundRecord("other", version=2, moved=PLACES[1]), PLACES[1])
    execute(protocol.put_place(PLACES[2]), MemoryStore(data))
    assert execute(protocol.find_job(), MemoryStore(data))[1] == PLACES[2]


def test_a_standby_store_that_has_had_the_job_says_so_in_its_record() -> None:
    """Whoever looks there finds that record, and would wait for its round."""
    protocol, data = SyncProtocol("job/", "a", Codec(), lambda: 0.0), dict[str, bytes]()
    write_round(data, RECORD)
    job = replace(RECORD, version=9, term=1)
    for other in (None, RECORD, replace(job, store_id="other")):
        execute(protocol.put_place(PLACES[1], other), MemoryStore(data))
        assert execute(protocol.find_job(), MemoryStore(data)) == (RECORD, PLACES[1])
    told = replace(RECORD, version=6, moved=PLACES[2])
    for _ in range(2):
        execute(protocol.put_place(PLACES[2], job), MemoryStore(data))
        assert execute(protocol.find_job(), MemoryStore(data)) == (told, PLACES[1])


def test_an_earlier_store_of_the_job_whose_host_lives_says_where_the_job_is() -> None:
    protocol, data = SyncProtocol("job/", "a", Codec(), lambda: 0.0), dict[str, bytes]()
    write_round(data, RECORD)
    job = replace(RECORD, version=9, term=1)
    for other in (RECORD, replace(job, store_id="other")):
        execute(protocol.put_moved(PLACES[1], job=other), MemoryStore(data))
        assert execute(protocol.find_job(), MemoryStore(data)) == (RECORD, None)
    execute(protocol.put_moved(PLACES[1], job=job), MemoryStore(data))
    told, _ = execute(protocol.find_job(), MemoryStore(data))
    assert told == replace(RECORD, version=6, moved=PLACES[1])
    newcomer, member = Machine(PROOF, NodeRow("n", "n", "", 0, 2), 0.0), Machine(PROOF, NodeRow("b", "b", "", 0, 2), 0.0)
    for machine in (newcomer, member):
        machine.step(Tick(0.0))
    member.step(Synced(0.1, 0.0, replace(RECORD, settings=PROOF.settings), {}))
    member.step(Tick(1.0))
    for machine in (newcomer, member):
        machine.step(Synced(1.1, 1.0, replace(told, settings=PROOF.settings), {}))
        assert machine.store.place == PLACES[1]
    assert newcomer.record is None and member.record and member.record.broken and not member.store.undecided
