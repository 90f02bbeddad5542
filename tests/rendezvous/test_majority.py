"""--store-succession=majority: the store moves away from a host that has fallen silent, and the other side forms no round (0020)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastirun.rendezvous import formation
from elastirun.rendezvous.failover.failover import Failover
from elastirun.rendezvous.failover.succession import another_run, take_over
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.peers import quorum
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.wire.actions import Outcome, Reconnect, Sync
from elastirun.rendezvous.wire.events import Synced, SyncFailed, Tick
from elastirun.rendezvous.wire.records import Cause, Closed, NodeRow, Quorum, RoundRecord, Status, Verdict, Vote
from tests.rendezvous import test_formation
from tests.rendezvous.test_succession import PLACES, PROOF, RECORD, answer, come, follows, goes_on, rows, told
from tests.sim.world import Deaths, Node, World

MAJORITY = Rules(1, 5, store_succession="majority")
WITHIN = 2 * MAJORITY.expire + 3.0  # seconds in which a job goes on whose host has fallen silent
FIVE = tuple("habcd")


def world_of(count: int, **rules: object) -> World:
    """A world of ``count`` nodes whose guards tell nobody of a death."""
    world = told(count, store_succession="majority", **rules)
    world.deaths = Deaths()
    return world


# -- a job goes on, on one side ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5])
def test_the_others_go_on_without_a_host_of_which_nobody_tells(count: int) -> None:
    world = world_of(count)
    host, *others = world.nodes
    host.crash()
    goes_on(world, *others, within=WITHIN)
    assert world.record and (world.record.term, world.record.host) == (1, others[0].id)


def test_a_host_that_is_started_anew_at_once_joins_the_others() -> None:
    """Its empty store shows them that the old one is gone, so that they need not wait until they doubt."""
    world = world_of(3, store_grace=60.0)
    host, *others = world.nodes
    host.crash()
    world.run(0.3)
    again = world.add("n0")
    goes_on(world, *others, again, within=8.0)
    assert world.record and world.record.store_id == f"store-of-{host.id}"


@pytest.mark.parametrize(("count", "beside"), [(3, 0), (5, 0), (5, 1)])
def test_the_greater_part_goes_on_without_a_host_that_is_cut_off_and_the_smaller_part_follows_when_it_can(count: int, beside: int) -> None:
    world = world_of(count, store_grace=60.0)
    smaller, greater = [world.nodes[0], *world.nodes[count - beside :]], world.nodes[1 : count - beside]
    for node in smaller:
        node.side = 1
    goes_on(world, *greater, within=WITHIN - 0.5)
    started = {node.id: len(node.starts) for node in smaller}
    world.run(20)
    assert all(node.working is None and len(node.starts) == started[node.id] for node in smaller), "a round on the smaller side"
    for node in smaller:
        node.side = 0
    goes_on(world, *world.nodes, within=15.0)
    assert world.record is not None
    assert {n.machine.record.store_id for n in world.nodes if n.machine.record} == {world.record.store_id}
    assert world.record.failures == 0


def test_each_node_can_host_the_store_again_and_again() -> None:
    """Who has been cut off serves another standby store when it is back: what others have given up they do not go back to."""
    world = world_of(3, store_grace=60.0)
    hosts, stale = [], []

    def compare(world: World, node: Node, old: RoundRecord | None, new: RoundRecord) -> None:
        if old is None or new.round > old.round:
            served = {node.id: node.session.access.standby_port for node in world.nodes}
            stale.extend(m.name for m in new.members if m.standby not in (0, served[m.id]))

    world.watch.append(compare)
    for _ in range(7):
        world.run(70)  # an early loss would keep the host that comes back from the next round
        host = next(node for node in world.nodes if node.machine.hosting)
        hosts.append(host.name)
        host.side = 1
        goes_on(world, *(node for node in world.nodes if node is not host), within=WITHIN)
        host.side = 0
        goes_on(world, *world.nodes, within=15.0)
    assert world.record is not None and world.record.store_id == f"store-of-{world.nodes[0].id}" and len(set(hosts)) == 3
    assert not stale, "a round names stores that nobody serves any more"


def test_who_has_given_up_its_own_standby_store_has_none_until_it_serves_the_next_one() -> None:
    world = world_of(3, store_grace=60.0)
    world.nodes[0].side = 1
    goes_on(world, *world.nodes[1:], within=WITHIN)
    world.nodes[0].side = 0
    goes_on(world, *world.nodes, within=15.0)
    second = world.nodes[1]
    assert second.machine.hosting and second.machine.store.place is not None
    second.side = 1
    world.run(WITHIN)
    second.side = 0
    assert world.run(15, lambda: second.machine.store.place is not None and second.machine.store.place.id != second.id)
    assert second.machine.row.standby == 0
    goes_on(world, *world.nodes, within=15.0)
    assert second.machine.row.standby == second.session.access.standby_port == 2001


def test_a_store_that_nobody_has_taken_over_says_nothing_about_a_round() -> None:
    """Else a worker that asks would hear that its round is over, and later that it is not."""
    world = world_of(3)
    host, *others = world.nodes
    for node in others:
        node.stop_time = 30.0  # its workers save for so long
    host.crash()
    waits = [node for node in others if world.run(20, lambda node=node: node.machine.record is not None and world.undecided(node))]  # type: ignore[misc]
    assert waits and all(node.machine.store.looking for node in waits if world.undecided(node))


def test_a_host_that_is_cut_off_knows_that_it_may_have_been_replaced() -> None:
    world = world_of(3)
    host, *others = world.nodes
    host.stop_time = 30.0  # its workers save for so long
    host.side = 1
    assert not host.machine.store.may_be_replaced
    world.run(WITHIN)
    assert [len(node.starts) for node in others] == [2, 2] and host.machine.store.may_be_replaced


def test_who_has_taken_over_still_hears_the_guard_of_the_host_while_no_round_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host comes back at once with an empty store, so the others move away before its guard has told them that it had died."""
    host, second, third = (world := told(3, store_succession="majority")).nodes
    world.deaths = Deaths(told=1.0, late=1.0)
    monkeypatch.setattr("tests.sim.world.LATE_NOTICE", 2.0)
    third.stop_time = 1.0
    third.leave()
    host.crash()
    newcomer = world.add(host.name)
    assert world.run(1.0, lambda: (record := world.record_at(second)) is not None and record.term > 0)
    assert host.id not in second.machine.store._failover.evidence.gone
    goes_on(world, second, newcomer, within=6.0)


def test_a_host_whose_others_have_died_has_not_been_replaced() -> None:
    world = told(3, store_succession="majority")
    host, *others = world.nodes
    for node in others:
        node.crash()
    host.stop_time = 15.0  # its workers save for so long
    answers: list[bool] = []
    alone = world.running(host)
    assert world.run(20, lambda: answers.append(host.machine.store.may_be_replaced) or alone())
    assert world.t > 15 and not any(answers)


def test_of_two_nodes_the_host_goes_on_and_the_other_ends() -> None:
    world = world_of(2)
    host, other = world.nodes
    host.side = 1
    assert world.run(60, lambda: bool(other.finish))
    assert other.outcome is Outcome.STORE_LOST and host.working is not None and host.starts[-1][2] == 1


def test_a_node_that_is_cut_off_alone_does_not_give_up_the_store() -> None:
    world = world_of(5, store_grace=60.0)
    alone = world.nodes[1]
    alone.side = 1
    goes_on(world, world.nodes[0], *world.nodes[2:])
    world.run(20)
    assert alone.machine.store.place is None and not alone.finish
    alone.side = 0
    goes_on(world, *world.nodes, within=15.0)
    assert world.record and world.record.term == 0


def test_the_smaller_side_ends_after_the_store_grace() -> None:
    world = world_of(5)
    host, a, *_ = world.nodes
    host.side = a.side = 1
    assert world.run(60, lambda: bool(host.finish and a.finish))
    assert {host.outcome, a.outcome} == {Outcome.STORE_LOST} and "too few nodes" in str(host.finish)


def test_hosts_that_fall_silent_one_after_the_other_are_survived_as_long_as_more_than_half_are_left() -> None:
    world = world_of(5)
    for k in range(3):
        world.nodes[k].crash()
        goes_on(world, *world.nodes[k + 1 :], within=WITHIN + 2.0)
    world.nodes[3].crash()
    assert world.run(60, lambda: bool(world.nodes[4].finish)) and world.nodes[4].outcome is Outcome.STORE_LOST


def test_nodes_whose_end_is_proven_are_not_waited_for() -> None:
    world = world_of(5)
    world.deaths = Deaths(told=1.0)
    for node in world.nodes[1:4]:
        node.crash()
    goes_on(world, world.nodes[0], world.nodes[4])
    assert world.record and (world.record.term, len(world.record.members)) == (0, 2), "the host lives, so the store stays"


# -- quorums ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "ended", "expected"),
    [
        ("hab", "", True),
        ("ab", "", False),
        ("ab", "hcd", True),
        ("ab", "hc", False),
        ("", "habcd", True),  # nothing is left that could go on
    ],
)
def test_more_than_half_or_all_that_have_not_ended_may_go_on(here: str, ended: str, expected: bool) -> None:
    assert quorum.is_met(Quorum(FIVE, "h"), here, ended) is expected


def test_of_two_halves_the_one_with_the_host_may_go_on() -> None:
    four = Quorum(tuple("habc"), "h")
    assert quorum.is_met(four, {"h", "a"}) and not quorum.is_met(four, {"b", "c"})
    assert not quorum.is_met(replace(four, tie=""), {"h", "a"})


def test_what_had_ended_when_the_store_moved_is_known_afterwards() -> None:
    (noted,) = quorum.noted([Quorum(FIVE)], "hx")
    assert noted.ended == ("h",) and noted.ids == FIVE
    (noted,) = quorum.noted([noted], "cd")
    assert quorum.is_met(noted, "ab") and not quorum.is_met(Quorum(FIVE), "ab")


def test_a_round_that_may_not_have_started_does_not_take_the_place_of_the_one_before() -> None:
    record = replace(RECORD, round=4, quorums=(*RECORD.quorums, Quorum(tuple("ab"), "a")))
    assert quorum.asked(record, rows("ab")) == record.quorums
    begun = {**rows("a"), "b": replace(rows("b")["b"], started=4)}
    assert quorum.asked(record, begun) == record.quorums[-1:]
    assert quorum.following(record, rows("ab"), ("a",), "a") == (*record.quorums, Quorum(("a",), "a"))


def round_after(ready: str, left: str = "", rules: Rules = MAJORITY) -> formation.Forming:
    """What is decided beside the nodes ``ready`` when round 3 of five nodes has lost some, and ``left`` have ended."""
    record = test_formation.after("habcd", Cause.LOST, host="h", quorums=(Quorum(FIVE, "h"),))
    there = [test_formation.row(i, 1, hosts=i == "h") for i in ready]
    there += [test_formation.row(i, 1, status=Status.LEFT) for i in left]
    silent = "".join(i for i in "habcd" if i not in ready + left)
    return formation.form(rules, test_formation.view(record, test_formation.rows(there), silent), 0.0, 0.0)


def test_a_round_forms_in_the_store_only_with_enough_members_of_the_one_before() -> None:
    decision = round_after("ha")
    assert decision.record is None and decision.minority and "only 2 of the 5 nodes of round 1 are here" in decision.reason
    assert round_after("ha", rules=PROOF).record is not None
    assert round_after("ha", left="bcd").record is not None
    formed = round_after("hab").record
    assert formed is not None and formed.quorums == (Quorum(FIVE, "h"), Quorum(tuple("hab"), "h"))


def test_who_waits_for_a_silent_host_looks_for_it_elsewhere() -> None:
    """It may have gone to another store, when it was left with too few nodes."""
    record = test_formation.after("habcd", Cause.LOST, host="h", quorums=(Quorum(FIVE, "h"),))
    there = test_formation.rows(test_formation.row(i, 1, hosts=i == "h") for i in FIVE)
    for silent, rules, minority in (("h", MAJORITY, True), ("", MAJORITY, False), ("h", PROOF, False)):
        rows = {**there, "h": replace(there["h"], status=Status.READY)}
        decision = formation.form(rules, test_formation.view(replace(record, round=1), rows, silent), 0.0, 0.0)
        assert decision.record is None and decision.minority is minority, decision.reason


# -- the vote before the vote ----------------------------------------------------------------------------------------------------------


def doubting(me: str) -> Failover:
    """A node that has not heard of the store for long."""
    moves = Failover(me, MAJORITY)
    moves.search(RECORD, 0.0, {}, 2 * MAJORITY.expire)
    return moves


def votes(ids: str, number: int = 3) -> tuple[Vote, ...]:
    return tuple(Vote(i, replace(RECORD, round=number)) for i in ids)


def test_the_first_in_line_gives_up_the_store_when_enough_others_doubt_too() -> None:
    assert not follows(doubting("a"), PLACES[1], answer(votes=votes("b")), RECORD)
    assert follows(doubting("a"), PLACES[1], answer(votes=votes("bc")), RECORD)
    assert not follows(doubting("a"), PLACES[1], answer(votes=votes("bc", number=1)), RECORD), "they doubted earlier"
    assert follows(doubting("a"), PLACES[1], answer(votes=votes("bc", number=2)), RECORD), "they have not read the last round"


def test_the_last_word_of_a_node_that_leaves_is_no_doubt() -> None:
    """It writes that word whenever the store does not answer when it leaves. The host may only be slow."""
    leaver = Vote("c", RECORD, ("c",))
    assert not follows(doubting("a"), PLACES[1], answer(votes=(*votes("b"), leaver)), RECORD)
    assert follows(doubting("a"), PLACES[1], answer(votes=(*votes("bd"), leaver)), RECORD)


def test_the_others_go_to_an_owner_that_has_given_up_the_store() -> None:
    assert follows(doubting("b"), PLACES[1], answer("a", votes=()), RECORD)
    assert not follows(doubting("b"), PLACES[1], answer(votes=votes("acd")), RECORD)


def test_nobody_doubts_early_nor_without_majority() -> None:
    early = Failover("a", MAJORITY)
    early.search(RECORD, 0.0, {}, 2 * MAJORITY.expire - 0.1)
    proof = Failover("a", PROOF)
    proof.search(RECORD, 0.0, {}, 1000.0)
    for moves in (early, proof):
        assert not follows(moves, PLACES[1], answer("a", votes=votes("bcd")), RECORD)


def test_a_host_that_is_left_with_too_few_follows_as_the_others_do() -> None:
    host = Failover("h", MAJORITY)
    host.note_minority(True, 0.0)
    for now, expected in ((MAJORITY.expire - 0.1, False), (MAJORITY.expire, True)):
        host.search(RECORD, None, {}, now)
        assert follows(host, PLACES[1], answer("a", votes=()), RECORD) is expected


def test_a_doubt_is_written_where_it_is_counted() -> None:
    asked = doubting("b").look(RECORD, 10.0)
    assert asked == Sync(rows=("a",), voters=FIVE, votes=(Vote("b", RECORD),), at=PLACES[1], look=True)
    assert set(doubting("a").look(RECORD, 10.0).voters) == set(FIVE)


def test_an_owner_without_a_word_waits_a_moment_for_those_that_are_about_to_come() -> None:
    owner = doubting("a")
    follows(owner, PLACES[1], answer(votes=votes("bcd")), RECORD)
    owner.move(PLACES[1], RECORD, {}, False, 10.0)
    come(owner, "abcd")
    assert owner.take_over(rows("ab"), 99.0) is None
    assert owner.take_over(rows("abc"), 10.5) is None
    at_once, later = owner.take_over(rows("abcd"), 10.5), owner.take_over(rows("abc"), 11.0)
    assert at_once and at_once.record.broken and at_once.record.broken.lost == ("h",)
    assert later and later.record.broken and later.record.broken.lost == ("h", "d")
    assert later.record.quorums == RECORD.quorums


def test_a_suspended_node_has_not_waited_meanwhile() -> None:
    moves = doubting("a")
    moves.move(PLACES[1], RECORD, {}, False, 10.0)
    moves.unanswered(PLACES[2], 10.0)
    moves.stood_still(70.0, 60.0)
    assert moves.evidence.undecided_since == 70.0 and not moves.evidence.silent_since


def test_who_begins_to_doubt_waits_for_no_answer_any_more() -> None:
    """The exchange with the silent host may hang for seconds. The others look at the standby stores now."""
    machine = Machine(MAJORITY, NodeRow("b", "b", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, replace(RECORD, settings=MAJORITY.settings), {}))
    machine.step(Tick(1.0))
    machine.step(SyncFailed(4.0, "no answer"))
    now = 4.0
    while not machine.store._link.schedule.under_way or machine.store._link.schedule.asked.look:
        now += 0.05
        machine.step(SyncFailed(now, "no answer") if machine.store._link.schedule.under_way else Tick(now))
    assert now < 0.1 + 2 * MAJORITY.expire
    asked = machine.step(Tick(0.2 + 2 * MAJORITY.expire))
    assert isinstance(asked[-2], Reconnect) and isinstance(asked[-1], Sync) and asked[-1].look and asked[-1].votes


def test_a_take_over_goes_before_another_look() -> None:
    """What the owner knows of the place where the job was started holds for a moment only."""
    machine = Machine(MAJORITY, NodeRow("a", "a", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, replace(RECORD, settings=MAJORITY.settings), {}))
    machine.store._failover = doubting("a")
    follows(machine.store._failover, PLACES[1], answer(votes=(Vote("h", RECORD, ("h",)),)), RECORD)
    machine.store._move(PLACES[1], RECORD, decided=False)
    machine.store._link.rows = rows("abcd")
    machine.store._failover.answered(Sync(), answer(votes=votes("abcd")), RECORD)
    assert [action for action in machine.step(Tick(0.2)) if isinstance(action, Sync) and action.look], "it looks where the job was started"
    machine.store._link.schedule.under_way = False
    machine.store._link.schedule.due = math.inf  # else the store in use would have its turn anyhow
    machine.store._failover.unanswered(None, 20.0)
    (asked,) = [action for action in machine.step(Tick(20.0)) if isinstance(action, Sync)]
    assert asked.change is not None and asked.change.record.term == 1


def test_nodes_that_were_suspended_together_go_on() -> None:
    world = told(3)
    host, a, b = world.nodes
    host.crash()
    assert world.run(5, lambda: a.machine.store._failover.evidence.undecided)
    for node in (a, b):
        node.freeze()
    world.run(40.0)  # its store grace is 15 s
    for node in (a, b):
        node.thaw()
    goes_on(world, a, b)


def test_who_knows_another_round_looks_first_where_the_guard_of_the_host_says() -> None:
    newer = replace(RECORD, version=9, round=4, members=(RECORD.members[0], *RECORD.members[3:]))
    moves = Failover("b", MAJORITY)
    follows(moves, PLACES[1], answer(votes=(Vote("h", newer, ("h",)),)), RECORD)
    assert [place.id for place in moves.places(RECORD)] == ["c", "d", "a", "b"]
    assert [place.id for place in Failover("b", MAJORITY).places(RECORD)] == ["a", "b", "c", "d"]


def test_a_newcomer_that_was_sent_to_an_empty_store_turns_back() -> None:
    machine = Machine(MAJORITY, NodeRow("n", "n", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, replace(RECORD, round=0, members=(), quorums=(), moved=PLACES[1]), {}))
    assert machine.store.place == PLACES[1]
    now = 0.1
    while machine.store.place is not None and now < 60.0:
        now += 0.1
        machine.step(Synced(now, now, None, {}))
        machine.step(Tick(now))
    assert MAJORITY.expire <= now < 2 * MAJORITY.expire


def test_another_run_that_has_ended_does_not_end_this_one() -> None:
    other = replace(RECORD, store_id="other")
    assert another_run(other, RECORD)
    assert not another_run(replace(other, closed=Closed(Verdict.SUCCEEDED, "", "x")), RECORD)


def test_members_do_not_stay_with_a_host_that_has_gone_to_another_store() -> None:
    world = world_of(5, store_grace=60.0)
    h, a, b, c, y = world.nodes
    h.side = c.side = 1
    a.side = b.side = 2
    world.run(14.0)  # h and c are too few, and doubt
    for node in (h, c, y):
        node.side = 3
    goes_on(world, h, c, y, within=30.0)
    assert world.record and {m.id for m in world.record.members} == {h.id, c.id, y.id}


def test_who_comes_late_to_a_decision_after_success_does_not_undo_it() -> None:
    """The workers of all others have succeeded. The host, which is cut off, may say that the job has."""
    world = world_of(3)
    host, *others = world.nodes
    for node in others:
        node.succeed()
    assert world.run(5, lambda: {node.machine.state for node in others} == {Status.DONE})
    world.run(1)
    host.side = 1
    world.run(WITHIN)
    host.succeed()
    assert world.run(5, lambda: bool(host.machine.record and host.machine.record.closed))
    world.run(30)
    assert all(len(node.starts) == 1 for node in others), "a round beside a job that has succeeded"


def test_a_look_says_nothing_about_the_store_in_use() -> None:
    machine = Machine(MAJORITY, NodeRow("b", "b", "", 0, 2), 0.0)
    machine.step(Tick(0.0))
    machine.step(Synced(0.1, 0.0, replace(RECORD, settings=MAJORITY.settings), {}))
    machine.step(Tick(1.0))
    assert not machine.store.looking
    machine.step(SyncFailed(4.0, "no answer"))
    assert machine.store.looking


def test_a_take_over_sends_nobody_elsewhere() -> None:
    assert take_over(replace(RECORD, moved=PLACES[2]), "a", {"h"}, ()).moved is None


def test_two_owners_never_take_over_with_the_same_term() -> None:
    first, second = doubting("a"), doubting("b")
    terms = []
    for moves, place in ((first, PLACES[1]), (second, PLACES[2])):
        follows(moves, place, answer(votes=(Vote("h", RECORD, ("h",)),)), RECORD)
        moves.move(place, RECORD, {}, False, 10.0)
        come(moves, "abcd")
        change = moves.take_over(rows("abcd"), 20.0)
        assert change is not None
        terms.append(change.record.term)
    assert terms == [1, 2]


@pytest.mark.parametrize("delay", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_verdict_that_the_guard_of_the_host_has_brought_ends_the_job(delay: float) -> None:
    """It does so also for the first in line, which reads it in its own standby store."""
    world = told(3)
    host, *others = world.nodes
    world.run(delay, lambda: False)
    for node in world.nodes:
        node.succeed()
    world.watch.append(lambda world, node, old, new: [setattr(node, "cut", True) for node in others if new.closed])
    assert world.run(5, lambda: bool(host.machine.record and host.machine.record.closed))
    host.crash()
    for node in others:
        node.cut = False
    assert world.run(10, world.all_finished)
    assert {node.outcome for node in others} == {Outcome.SUCCEEDED}


def test_a_row_of_a_node_that_has_left_is_no_presence() -> None:
    assert not quorum.is_there(NodeRow("a", "a", "", 0, 1, status=Status.LEFT)) and not quorum.is_there(None)
