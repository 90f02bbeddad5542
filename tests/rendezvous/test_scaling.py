"""A number of nodes that is wanted from outside: the rules of forming and ending rounds by it, and the write itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.rendezvous import formation
from elastirun.rendezvous.rules import Rules, most_nodes
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Cause, Closed, Quorum, RoundRecord, Verdict
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from tests.rendezvous.test_formation import EMPTY, RULES, after, chosen, form, row, view
from tests.sim.world import World, write_round

RUNS = after("abcd", None)
SCALED = after("abcd", wanted=2)


@pytest.mark.parametrize(("wanted", "most"), [(0, 5), (1, 2), (3, 3), (9, 5)])
def test_what_is_wanted_counts_within_the_limits_of_the_job(wanted: int, most: int) -> None:
    assert most_nodes(Rules(2, 5), replace(EMPTY, wanted=wanted)) == most
    assert most_nodes(Rules(2, 5), None) == 5


def test_a_first_round_begins_as_soon_as_the_wanted_nodes_are_there() -> None:
    wanted = replace(EMPTY, wanted=2)
    assert chosen(form(wanted, [row("a")], now=1.0)) == "", "it waits for more"
    assert chosen(form(wanted, [row("a"), row("b")], now=1.0)) == "ab"
    assert chosen(form(wanted, [row("a"), row("b"), row("c")], now=1.0)) == "ab", "one is a spare"


@pytest.mark.parametrize(("host", "expected"), [("a", "ab"), ("d", "ad"), ("", "ab")])
def test_a_scaled_round_keeps_the_first_and_the_host_of_the_store(host: str, expected: str) -> None:
    present = [row(i, done=1, hosts=i == host) for i in "abcd"]
    assert chosen(form(SCALED, present, max_nodes=4)) == expected


def test_the_place_of_a_lost_member_goes_to_another_one_of_the_wanted_number() -> None:
    assert chosen(form(after("ab", Cause.LOST, wanted=2), [row("a", done=1), row("c"), row("d")], silent="b", max_nodes=4)) == "ac"


def test_a_large_job_is_halved_where_a_majority_must_agree() -> None:
    """Those that get no place may be cut off just then, and go on: so half of the last round, with the host of its store, is needed."""
    members = "abcdefgh"
    record = after(members, wanted=1, quorums=(Quorum(tuple(members), "a"),), host="a")
    present = [row(i, done=1, hosts=i == "a", started=1) for i in members]
    majority = {"max_nodes": 8, "store_succession": "majority", "hosted": True}
    assert chosen(form(record, present, **majority)) == "abcd"
    assert chosen(form(record, present, **{**majority, "store_succession": "proof"})) == "a"
    record = after("abc", wanted=1, quorums=(Quorum(tuple("abc"), "a"),), host="a")
    assert chosen(form(record, present[:3], **majority)) == "ab", "half of three is no majority"


def test_a_round_with_too_many_members_is_ended() -> None:
    rules = replace(RULES, max_nodes=4)
    assert formation.scale_down(rules, RUNS, "a", 9.0) is None
    assert formation.scale_down(rules, replace(RUNS, wanted=4), "a", 9.0) is None
    ended = formation.scale_down(rules, replace(RUNS, wanted=3), "a", 9.0)
    assert ended is not None and ended.broken is not None and ended.version == RUNS.version + 1
    assert (ended.broken.cause, ended.broken.reason) == (Cause.JOIN, "the job is scaled to 3 nodes")
    assert formation.scale_down(rules, SCALED, "a", 9.0) is None, "it is over already"


def test_a_round_goes_on_whose_mesh_has_no_replica_on_fewer_nodes() -> None:
    rules = replace(RULES, max_nodes=4, mesh_text="dp=auto,pp=4,tp=2")
    assert formation.scale_down(rules, replace(RUNS, wanted=3), "a", 9.0) is None, "its four stages need four nodes"
    two = replace(rules, mesh_text="dp=auto,pp=2,tp=2")
    assert formation.scale_down(two, replace(RUNS, wanted=3), "a", 9.0) is not None
    assert formation.scale_down(replace(two, min_nodes=3), replace(RUNS, wanted=3), "a", 9.0) is None, "two are too few for --nnodes"
    assert chosen(form(replace(SCALED, wanted=1), [row(i, done=1) for i in "abcd"], max_nodes=4, mesh_text="dp=auto,pp=2,tp=2")) == "ab"


def test_a_newcomer_beside_a_scaled_round_is_a_spare_until_more_are_wanted() -> None:
    running, rules = replace(after("ab", None), wanted=2), replace(RULES, max_nodes=4)
    spare = formation.take_in(rules, view(running), row("c"), [row("c")], 0.0, 0.0)
    assert (spare.record, spare.reason) == (None, "round 1 has its 2 nodes; this node is a spare")
    taken = formation.take_in(rules, view(replace(running, wanted=3)), row("c"), [row("c")], 0.0, 99.9)
    assert taken.record is not None, "it does not wait for a fourth one"


def test_only_members_first_in_line_end_a_round_that_is_too_large() -> None:
    world = World(1, Rules(1, 5, last_call=0.5), hosted=True)
    nodes = [world.add() for _ in range(5)]
    assert world.run(20.0, lambda: all(node.working for node in nodes))
    record = world.record
    assert record is not None
    written = []
    world.watch.append(lambda world, node, old, new: written.append(node.id) if new.broken and not (old and old.broken) else None)
    write_round(world.data, replace(record, version=record.version + 1, wanted=3))
    assert world.run(20.0, lambda: sum(node.working is not None and len(node.working.members) == 3 for node in nodes) == 3)
    assert len(written) == 1 and written[0] in record.ids[:2]


def test_the_number_is_written_over_what_stands_there_and_not_into_a_job_that_is_over() -> None:
    data: dict[str, bytes] = {}
    protocol, store = SyncProtocol("job/", "", Codec(), lambda: 0.0), MemoryStore(data)
    assert execute(protocol.scale(3), store) is None and data == {}
    write_round(data, RUNS)
    assert execute(protocol.scale(3), store) == RUNS
    found = protocol.carry_out(store, Sync(rows=()), 0.0).round
    assert found == replace(RUNS, version=RUNS.version + 1, wanted=3)
    execute(protocol.scale(3), store)
    assert protocol.carry_out(store, Sync(rows=()), 0.0).round == found, "it is written once"
    over: RoundRecord = replace(RUNS, version=9, closed=Closed(Verdict.SUCCEEDED, "done", "a"))
    write_round(data, over)
    execute(protocol.scale(2), store)
    assert protocol.carry_out(store, Sync(rows=()), 0.0).round == over
