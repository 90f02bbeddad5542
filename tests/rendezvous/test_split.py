"""A network that falls into single nodes: once it is whole, all of them are in one round again, however long that took (0020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from elastirun.rendezvous.failover.decide import Move
from elastirun.rendezvous.failover.evidence import Evidence
from elastirun.rendezvous.failover.failover import Failover
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import NodeRow, Place, RoundRecord, Vote
from tests.rendezvous.test_majority import MAJORITY, world_of
from tests.rendezvous.test_succession import PLACES, RECORD, follows, goes_on

OWN, OF_C = PLACES[2], PLACES[3]
NEWER = replace(RECORD, version=RECORD.version + 1)
HOST = NodeRow("h", "h", "", 0, 2, seq=5)


@pytest.mark.daily(8)
@pytest.mark.parametrize("lasts", [11, 12, 13, 14, 16, 18, 22, 30, 40, 50])
@pytest.mark.parametrize(("count", "least"), [(3, 1), (3, 2), (3, 3), (4, 1), (4, 3), (5, 5)])
def test_after_a_split_into_single_nodes_all_are_in_one_round_again(count: int, least: int, lasts: float) -> None:
    world = world_of(count, store_grace=60.0, min_nodes=least)
    for side, node in enumerate(world.nodes):
        node.side = side
    world.run(lasts)
    for node in world.nodes:
        node.side = 0
    goes_on(world, *world.nodes, within=40.0)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_looks_that_hang_leave_time_for_the_store_in_use(count: int) -> None:
    """Only the host can be reached, as where a firewall drops what comes to the ports of standby stores."""
    world = world_of(count, store_grace=60.0)
    host, *others = [node.name for node in world.nodes]
    world.walls = [frozenset((name, other) for name in (host, *others) for other in others if name != other)]
    for side, node in enumerate(world.nodes):
        node.side = side
    world.run(8)
    for node in world.nodes:
        node.side = 0
    goes_on(world, *world.nodes, within=40.0)


@pytest.mark.parametrize(("count", "silent", "within"), [(7, 2, 25), (9, 3, 30), (17, 7, 40)])
def test_a_silent_host_does_not_hold_up_the_looks_at_those_that_fell_silent_with_it(count: int, silent: int, within: float) -> None:
    """A rack loses its power, with the host and those first in line. Each look at one of them hangs, and so does each word to the host."""
    world = world_of(count, store_grace=120.0)
    for node in world.nodes[: silent + 1]:
        node.cut = True
    goes_on(world, *world.nodes[silent + 1 :], within=within)


def test_a_node_that_goes_back_serves_another_standby_store() -> None:
    """Nobody is to look for a job in the one that it has given up."""
    world = world_of(3, store_grace=60.0)
    before = {node.id: node.machine.row.standby for node in world.nodes}
    world.nodes[0].side = 1
    assert world.run(20, lambda: any(map(world.undecided, world.nodes)))
    (waits,) = filter(world.undecided, world.nodes)
    for node in world.nodes:
        node.side = int(node is waits)  # before the third node has come there
    world.run(10)
    for node in world.nodes:
        node.side = 0
    ended = waits.machine.store.place
    assert ended is not None and ended.id == waits.id
    goes_on(world, *world.nodes, within=40.0)
    assert world.record is not None and world.record.term == 0 and waits.machine.store.place is None
    assert not world.is_up(ended) and waits.machine.row.standby == waits.session.access.standby_port not in (0, before[waits.id])


def waiting_in(place: Place, *, silent: bool = True, gone: str = "") -> Failover:
    """The node b, which waits in the undecided store of ``place``. ``silent``: the store that it gave up did not answer."""
    moves = Failover("b", MAJORITY, Evidence(gone=frozenset(gone)))
    if not silent:
        moves.note_minority(True, 0.0)
    moves.search(RECORD, 0.0 if silent else None, {}, 2 * MAJORITY.expire)
    moves.move(place, RECORD, {"h": HOST}, False, 2 * MAJORITY.expire)
    return moves


def goes_back(
    moves: Failover, found: RoundRecord | None, place: Place | None = None, standby: int = OF_C.port, came: str = "b", host_seq: int = 6
) -> bool:
    """Return whether the node goes back where ``found`` stands; the row of c there names ``standby``. ``came``: to the store in use."""
    there = {"c": NodeRow("c", "c", "", 0, 2, standby=standby), "h": replace(HOST, seq=host_seq)}
    rows = {i: NodeRow(i, i, "", 0, 2) for i in came}
    moves.evidence = replace(moves.evidence, terms=dict.fromkeys(came, RECORD.term))
    return is_back(moves, place, Synced(20.0, 20.0, found, there), RECORD, rows)


def is_back(moves: Failover, place: Place | None, answer: Synced, record: RoundRecord, rows: dict[str, NodeRow]) -> bool:
    """Return whether the node goes back to the store of ``place``, which has given this ``answer``."""
    decision = moves.looked(place, answer, record, rows)
    return isinstance(decision, Move) and decision.back


def looks(moves: Failover, silent_since: float, times: Iterable[float]) -> list[Sync]:
    """Return the looks that the node makes at these ``times``."""
    return [moves.look(RECORD, now) for now in times if moves.search(RECORD, silent_since, {}, now) is not None]


def test_a_node_goes_back_from_its_own_store_to_the_one_that_has_gone_on() -> None:
    assert goes_back(waiting_in(OWN), NEWER)
    moves = waiting_in(OWN)
    assert (
        moves.go_back() is None
        and moves.evidence.at is None
        and not moves.evidence.undecided
        and moves.places(RECORD) == [PLACES[1], *PLACES[3:]]
    )


@pytest.mark.parametrize(
    "found",
    [None, replace(RECORD, version=4), replace(NEWER, store_id="another"), replace(NEWER, term=1), replace(NEWER, moved=OWN)],
    ids=["nothing", "an older one", "another run", "taken over since", "moved"],
)
def test_it_does_not_go_back_to_anything_else(found: RoundRecord | None) -> None:
    assert not goes_back(waiting_in(OWN), found)


def test_it_goes_back_to_no_store_but_the_last_one_that_was_decided() -> None:
    assert not goes_back(waiting_in(OWN), NEWER, place=PLACES[4])
    moves = Failover("b", MAJORITY)
    moves.move(PLACES[4], RECORD, {}, True, 1.0)
    moves.search(RECORD, 1.0, {}, 20.0)
    moves.move(OWN, RECORD, {"h": HOST}, False, 20.0)
    assert PLACES[4] in [sync.at for sync in looks(moves, 1.0, range(30, 70))], "it looks there"
    assert goes_back(moves, NEWER, place=PLACES[4]) and not goes_back(moves, NEWER)
    assert moves.go_back() == PLACES[4]


def test_it_goes_back_where_the_host_has_written_its_row_since_although_nothing_else_had_to_be_written() -> None:
    """The record calls those lost that come back: they were silent before."""
    assert goes_back(waiting_in(OWN), RECORD)
    assert not goes_back(waiting_in(OWN), NEWER, host_seq=HOST.seq), "its store answers, but its agent stands still"


def test_the_row_of_a_host_that_it_had_not_read_there_is_read_twice() -> None:
    moves = waiting_in(OWN)
    moves.evidence = replace(moves.evidence, host_seq=None)
    assert not goes_back(moves, NEWER, host_seq=6)
    assert not goes_back(moves, NEWER, host_seq=6)
    assert goes_back(moves, NEWER, host_seq=7)


def test_it_does_not_go_back_to_a_store_of_its_own() -> None:
    """It has ended that one, and serves another."""
    moves, mine = Failover("b", MAJORITY), replace(RECORD, host="b")
    own = replace(HOST, id="b")
    moves.move(OWN, mine, {}, True, 1.0)
    moves.search(mine, 1.0, {}, 20.0)
    moves.move(OF_C, mine, {"b": own}, False, 20.0)
    there = {"b": replace(own, seq=own.seq + 1), "c": NodeRow("c", "c", "", 0, 2, standby=0)}
    assert not is_back(moves, OWN, Synced(20.0, 20.0, replace(mine, version=mine.version + 1), there), mine, {})


def test_whoever_waits_in_the_store_of_another_node_is_not_lured_away_by_a_row_that_this_one_wrote_before() -> None:
    """The row stands in a third store, and says of its owner only where that was before it came to its own store."""
    moves = waiting_in(OF_C)
    for standby, expected in ((OF_C.port, False), (0, True), (OF_C.port + 1, True)):
        there = {"a": NodeRow("a", "a", "", 0, 2), "c": NodeRow("c", "c", "", 0, 2, standby=standby)}
        assert follows(moves, PLACES[1], Synced(20.0, 20.0, None, there), RECORD) is expected


def test_it_does_not_go_back_to_a_host_whose_end_is_proven() -> None:
    assert not goes_back(waiting_in(OWN, gone="h"), NEWER)


def test_it_goes_back_from_the_side_of_the_few_only_when_a_round_has_formed_without_it() -> None:
    """Else it would give that store up again, for the same reason."""
    assert not goes_back(waiting_in(OWN, silent=False), NEWER)
    assert goes_back(waiting_in(OWN, silent=False), replace(NEWER, round=RECORD.round + 1))


def test_it_does_not_go_back_when_enough_have_come_to_its_own_store() -> None:
    assert not goes_back(waiting_in(OWN), NEWER, came="bcd")


def test_whoever_waits_in_the_store_of_another_node_goes_back_when_that_one_has_ended_its_store() -> None:
    assert not goes_back(waiting_in(OF_C), NEWER)
    assert goes_back(waiting_in(OF_C), NEWER, standby=0)


def test_in_a_store_that_is_decided_nobody_goes_back() -> None:
    moves = waiting_in(OWN)
    moves.answered(Sync(), Synced(21.0, 21.0, NEWER, {}, votes=()), RECORD)
    assert not goes_back(moves, NEWER)


def test_a_look_back_reads_the_row_of_the_owner_of_the_store_in_use() -> None:
    moves = waiting_in(OF_C)
    asked = looks(moves, 0.0, range(20, 60))
    assert [sync.rows for sync in asked if sync.at is None] and {sync.rows for sync in asked if sync.at is None} == {("h", "c")}


def test_votes_are_not_written_where_a_node_goes_back_to() -> None:
    moves = waiting_in(OWN)
    assert moves.votes == (Vote("b", RECORD),)
    moves.go_back()
    assert not moves.votes
