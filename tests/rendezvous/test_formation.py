"""The pure rules of forming a round, case by case: its time, its members, their order, and silent nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from elastirun.rendezvous import formation
from elastirun.rendezvous.formation import Forming
from elastirun.rendezvous.peers import ranks
from elastirun.rendezvous.peers.liveness import Liveness
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import Rules, disagreement, untrue
from elastirun.rendezvous.wire.records import Broken, Cause, ExitRecord, NodeRow, Quorum, RoundRecord, Status, Verdict

RULES = Rules(min_nodes=1, max_nodes=3, last_call=5.0, max_restarts=1)
EMPTY = RoundRecord("store")


def row(i: str, done: int = 0, status: Status = Status.JOINING, **fields: object) -> NodeRow:
    made = NodeRow(i, f"name-{i}", f"10.0.0.{ord(i) - ord('a') + 1}", 1000, 2, status=status, done_round=done)
    return replace(made, **fields)  # type: ignore[arg-type]


def rows(made: Iterable[NodeRow]) -> dict[str, NodeRow]:
    return {r.id: r for r in made}


def after(ids: str, cause: Cause | None = Cause.JOIN, **fields: object) -> RoundRecord:
    """Round 1 of the nodes ``ids``, broken."""
    broken = Broken(cause, f"because of {cause.value}", ids[:1]) if cause else None
    record = RoundRecord("store", 3, 1, tuple(ranks.member(row(i)) for i in ids), "the first round", broken=broken)
    return replace(record, **fields)  # type: ignore[arg-type]


class Told(Liveness):
    """Says of the nodes what a test says: which of them are ``silent``, and for how many seconds each was ``quiet``."""

    def __init__(self, silent: str, quiet: Mapping[str, float]) -> None:
        super().__init__(RULES.expire)
        self._silent, self._quiet = silent, quiet

    def silent(self, node_id: str) -> bool:
        return node_id in self._silent

    def quiet(self, node_id: str, now: float) -> float:
        return self._quiet.get(node_id, 0.0)


def view(record: RoundRecord, present: dict[str, NodeRow] | None = None, silent: str = "", quiet: float = 1e9, now: float = 100.0) -> View:
    return View("", record, present or {}, Told(silent, dict.fromkeys("abcdefgh", quiet)), now)


def form(
    record: RoundRecord,
    present: Iterable[NodeRow],
    silent: str = "",
    now: float = 100.0,
    since: float = 0.0,
    over: float = 0.0,
    quiet: float = 1e9,
    **rules: object,
) -> Forming:
    return formation.form(replace(RULES, **rules), view(record, rows(present), silent, quiet, now), since, over)  # type: ignore[arg-type]


def chosen(decision: Forming) -> str:
    """The ids of the round decided upon, in rank order; empty when there is none."""
    return "".join(m.id for m in decision.record.members) if decision.record else ""


# -- ranks: who sits where ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "present", "limit", "expected"),
    [
        ("", "cab", 9, "abc"),  # the first round: by address
        ("", "cab", 2, "ab"),  # beyond the limit: spares
        ("abc", "cba", 9, "abc"),  # survivors keep their order, whatever order the rows come in
        ("cab", "abc", 9, "cab"),  # ... even when it is not that of the addresses
        ("abc", "ac", 9, "ac"),  # a hole that nobody fills closes up
        ("abc", "acd", 9, "adc"),  # a newcomer takes the hole
        ("abc", "bcd", 9, "dbc"),  # ... even the first
        ("abcd", "adef", 9, "aefd"),  # two holes, two newcomers, in their own order
        ("abcd", "ade", 9, "aed"),  # two holes, one newcomer: it takes the first
        ("abc", "abcde", 9, "abcde"),  # without a hole they go to the end
        ("abc", "abcd", 3, "abc"),  # a survivor is never put out by a newcomer
        ("bcd", "abcd", 3, "bcd"),
        ("bcd", "abd", 3, "bad"),  # a spare fills exactly the hole
        ("abc", "bcde", 3, "dbc"),  # one hole, two spares: one stays a spare
        ("abc", "def", 3, "def"),  # nobody is left: a new beginning
        ("abc", "", 3, ""),
        ("abc", "abc", 2, "ab"),
        ("abcd", "bcde", 3, "bcd"),  # too many survivors (another --nnodes than before): the newcomer puts none of them out
    ],
)
def test_survivors_keep_their_place_and_newcomers_take_holes(previous: str, present: str, limit: int, expected: str) -> None:
    members = [ranks.member(row(i)) for i in previous]
    assert "".join(r.id for r in ranks.choose(members, [row(i) for i in present], limit, fixed=False)) == expected


@pytest.mark.parametrize(
    ("previous", "wishes", "expected"),
    [
        ("", {"c": 0, "a": 1, "b": 2}, "cab"),  # an Indexed Job begins in the order of its indexes
        ("abc", {"a": 0, "c": 2, "x": 1}, "axc"),  # one pod was replaced
        ("abcd", {"a": 0, "d": 3, "x": 2, "y": 1}, "ayxd"),  # two were, and came back in another order
        ("ab", {"a": 0, "b": 1, "d": 3, "c": 2}, "abcd"),  # the Job has grown
        ("abcd", {"a": 0, "b": 1}, "ab"),  # and shrunk
        ("ac", {"a": 0, "c": 2, "x": 1}, "acx"),  # a round ran without the pod that was replaced: survivors stay where they are
    ],
)
def test_pods_that_wish_for_their_index_get_it_at_first_and_back_when_they_are_replaced(
    previous: str, wishes: dict[str, int], expected: str
) -> None:
    members = [ranks.member(row(i)) for i in previous]
    found = ranks.choose(members, [row(i, node_rank=wish) for i, wish in wishes.items()], 4, fixed=False)
    assert "".join(r.id for r in found) == expected


@pytest.mark.parametrize(
    ("previous", "wishes", "expected"),
    [
        ("", {"a": 2, "b": 0, "c": 1}, "bca"),  # the wish decides, not the address
        ("", {"a": 0, "b": 0, "c": 1}, "ac"),  # one place, two wishes: the first by address
        ("b", {"a": 0, "b": 0, "c": 1}, "bc"),  # ... unless the other had the place
        ("", {"a": 0, "b": 3, "c": -1, "d": None, "e": 2}, "ae"),  # no such place, no wish: no part in it
        ("ba", {"a": 0, "b": 1}, "ab"),  # the place held before does not matter
        ("xa", {"a": 1, "b": 0}, "ba"),  # nor who is gone
    ],
)
def test_fixed_ranks_are_the_wish_and_nothing_else(previous: str, wishes: dict[str, int | None], expected: str) -> None:
    members = [ranks.member(row(i)) for i in previous]
    found = ranks.choose(members, [row(i, node_rank=wish) for i, wish in wishes.items()], 3, fixed=True)
    assert "".join(r.id for r in found) == expected


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.9", "10.0.0.10", "10.0.0.100", "10.0.1.1"],
        ["node2", "node10", "node10-a"],
        ["10.0.0.2", "fd00::9", "fd00::10", "gpu-3"],
        ["1", "1a", "a", "a1", "a²", "²", "½"],  # what isdigit() takes for a number and int() does not must not crash anybody
        ["", "0", "٣"],  # no number, and another script's digits
    ],
)
def test_numbers_in_addresses_are_compared_as_numbers(addresses: list[str]) -> None:
    last = len(addresses)  # names and ids in the opposite order
    made = [NodeRow(f"{last - i:02}", f"n{last - i}", address, 1, 1) for i, address in enumerate(addresses)]
    assert [r.address for r in ranks.choose([], made[::-1], 99, fixed=False)] == addresses


def test_equal_numbers_in_addresses_are_told_apart_by_id() -> None:
    made = [row("a", address="00"), row("b", address="0")]
    assert "".join(r.id for r in ranks.choose([], made[::-1], 99, fixed=False)) == "ab"


def test_wishes_come_before_addresses_when_ranks_are_not_fixed() -> None:
    made = [row("a"), row("b", node_rank=7), row("c", node_rank=1), row("d", node_rank=0)]
    assert "".join(r.id for r in ranks.choose([], made, 99, fixed=False)) == "dcba"


def test_one_address_many_nodes_are_told_apart_by_id() -> None:
    made = [row(i, address="10.0.0.1") for i in "cab"]
    assert "".join(r.id for r in ranks.choose([], made, 99, fixed=False)) == "abc"


def test_places_number_the_workers_over_all_nodes_and_within_their_role() -> None:
    slots = [("a", 2, "trainer"), ("b", 3, "reader"), ("c", 2, "trainer")]
    record = RoundRecord("s", members=tuple(ranks.member(row(i, slots=n, role=role)) for i, n, role in slots))
    table = [[(p.rank, p.local_rank, p.role_rank, p.role_world_size) for p in ranks.worker_ranks(record, i)] for i in range(3)]
    assert table == [
        [(0, 0, 0, 4), (1, 1, 1, 4)],
        [(2, 0, 0, 3), (3, 1, 1, 3), (4, 2, 2, 3)],
        [(5, 0, 2, 4), (6, 1, 3, 4)],
    ]
    assert record.world_size == 7


@pytest.mark.parametrize(
    ("ids", "me", "expected"),
    [
        ("abcde", "a", "bcd"),
        ("abcde", "d", "eab"),
        ("abc", "b", "ca"),
        ("ab", "b", "a"),
        ("a", "a", ""),
        ("abcde", "x", "abcde"),
        ("", "x", ""),
    ],
)
def test_each_node_watches_those_after_it_around_the_end(ids: str, me: str, expected: str) -> None:
    assert "".join(ranks.successors(after(ids), me)) == expected


def test_every_member_is_watched_by_three_others() -> None:
    record = after("abcdefgh")
    watched = [w for m in record.members for w in ranks.successors(record, m.id)]
    assert sorted(watched) == sorted("abcdefgh" * 3)


# -- the decision to form a round, its members, and the reasons against it ----------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "now", "expected", "check_again"),
    [
        ("", 100.0, "", None),
        ("abc", 0.0, "abc", None),  # a full house needs no last call
        ("abcd", 0.0, "abc", None),
        ("ab", 4.9, "", 5.0),
        ("ab", 5.0, "ab", None),
        ("a", 5.0, "a", None),
    ],
)
def test_the_first_round_waits_for_a_last_call_unless_the_house_is_full(
    present: str, now: float, expected: str, check_again: float | None
) -> None:
    decision = form(EMPTY, [row(i) for i in present], now=now)
    assert (chosen(decision), decision.check_again) == (expected, check_again)
    if decision.record:
        assert (decision.record.round, decision.record.version, decision.record.reason) == (1, 2, "the first round")
        assert decision.leader == "a"


def test_a_re_formation_waits_for_no_last_call() -> None:
    decision = form(after("ab"), [row("a", 1), row("b", 1)], now=0.0)
    assert chosen(decision) == "ab" and decision.record
    assert (decision.record.round, decision.record.version, decision.record.broken) == (2, 4, None)
    assert decision.reason == decision.record.reason == "because of join"


@pytest.mark.parametrize(("hosts", "joins"), [(True, True), (False, False)])
def test_the_host_of_the_store_is_not_held_back_after_early_losses(hosts: bool, joins: bool) -> None:
    """No round goes on without it for long: its store ends with it."""
    record = after("ab", None, losses=9)
    comes = row("c", hosts=hosts)
    seen = view(record, rows([row("a", status=Status.RUNNING), row("b", status=Status.RUNNING), comes]), now=10.0)
    decision = formation.take_in(RULES, seen, comes, [comes], 5.0, 0.0)
    assert (decision.record is not None) is joins


@pytest.mark.parametrize(("term", "expected"), [(1, ""), (0, "bc")])
def test_in_a_store_that_has_taken_over_only_its_owner_counts_as_host(term: int, expected: str) -> None:
    """A row that says so may be of the time before, or of a node that serves another store."""
    record = after("abc", term=term, host="a" if term else "c")
    decision = form(record, [row("a", 1, status=Status.LEFT), row("b", 1), row("c", 1, hosts=True)])
    assert chosen(decision) == expected
    assert bool(expected) or decision.reason == "waiting for the node that has taken over the store"


@pytest.mark.parametrize("hosts", [False, True])
def test_a_job_in_the_store_of_another_one_needs_no_majority(hosts: bool) -> None:
    """Its store cannot move, so one half of its nodes may go on without the other."""
    decision = form(after("ab"), [row("a", 1, hosts=hosts), row("b", 1)], store_succession="majority")
    assert decision.record is not None
    assert [quorum.ids for quorum in decision.record.quorums] == ([("a", "b")] if hosts else [])


@pytest.mark.parametrize(
    ("third", "silent", "expected"),
    [
        (row("c"), "", ""),  # has not yet said that it has stopped
        (row("c", 1), "", "abc"),
        (row("c", 7), "", "abc"),  # a later round, too, is no earlier one
        (row("c", status=Status.LEFT), "", "ab"),
        (row("c", status=Status.DRAINING), "", ""),
        (row("c", status=Status.RUNNING), "", ""),
        (row("c", 1, status=Status.DRAINING), "", "ab"),  # over, and not yet back
        (row("c", status=Status.RUNNING), "c", "ab"),
        (row("c", 1), "c", "ab"),
        (None, "", ""),  # its row is missing: not over until it is silent
        (None, "c", "ab"),
    ],
)
def test_no_round_before_every_member_of_the_last_is_over(third: NodeRow | None, silent: str, expected: str) -> None:
    present = [row("a", 1), row("b", 1)] + ([third] if third else [])
    decision = form(after("abc"), present, silent)
    assert chosen(decision) == expected
    if not expected:
        assert decision.reason == "waiting for name-c 10.0.0.3 to stop the workers of round 1"


@pytest.mark.parametrize(
    ("newcomer", "silent", "expected"),
    [
        (row("d"), "", "abd"),
        (row("d", status=Status.LEFT), "", "ab"),
        (row("d", status=Status.RUNNING, round=9), "", "ab"),
        (row("d"), "d", "ab"),
    ],
)
def test_only_live_nodes_that_want_to_join_are_taken_in(newcomer: NodeRow, silent: str, expected: str) -> None:
    assert chosen(form(after("ab"), [row("a", 1), row("b", 1), newcomer], silent)) == expected


def test_a_member_is_no_candidate_before_it_has_given_its_round_up() -> None:
    present = rows([row("a"), row("b", 1), row("c", 2), row("d")])
    assert [r.id for r in view(after("abc"), present).candidates()] == ["b", "c", "d"]


def test_fewer_than_min_wait_and_say_for_whom() -> None:
    present = [row("a", 1), row("b", 1)]
    decision = form(after("abc"), present, "c", min_nodes=3)
    assert decision.reason == "2 of 3 nodes joined (name-a 10.0.0.1, name-b 10.0.0.2), waiting for 1 more"
    assert form(EMPTY, [], min_nodes=2).reason == "0 of 2 nodes joined, waiting for 2 more"
    fixed = form(EMPTY, [row("a", node_rank=1)], min_nodes=3, fixed_ranks=True)
    assert fixed.reason == "1 of 3 nodes joined (name-a 10.0.0.1), waiting for node rank 0, 2"
    assert {decision.record, fixed.record} == {None}
    many = form(EMPTY, [], min_nodes=40, max_nodes=40, fixed_ranks=True).reason
    assert many.endswith("waiting for node rank 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")


def test_a_long_list_of_names_is_cut() -> None:
    many = [row(chr(ord("a") + i)) for i in range(20)]
    assert formation.names(many).endswith("name-c 10.0.0.3, and 17 more")
    assert formation.names(many[:4]).endswith("name-c 10.0.0.3, and 1 more")
    assert formation.names(many[:3]).endswith("name-c 10.0.0.3")


@pytest.mark.parametrize(
    ("cause", "silent", "failures", "max_restarts", "expected"),
    [
        (Cause.FAILURE, "", 0, 1, 1),  # a failure costs one
        (Cause.FAILURE, "", 0, 0, None),
        (Cause.FAILURE, "", 1, 1, None),
        (Cause.FAILURE, "c", 0, 0, 0),  # a member was lost at the same time: the failure is a consequence
        (Cause.FAILURE, "c", 1, 1, 1),
        (Cause.LOST, "c", 0, 0, 0),
        (Cause.LEAVE, "", 0, 0, 0),
        (Cause.JOIN, "", 1, 1, 1),
    ],
)
def test_only_a_failure_without_a_lost_member_costs_a_restart(
    cause: Cause, silent: str, failures: int, max_restarts: int, expected: int | None
) -> None:
    """``expected``: the count of failures that the next round carries; None: the job is closed."""
    decision = form(after("abc", cause, failures=failures), [row(i, 1) for i in "abc"], silent, max_restarts=max_restarts)
    assert decision.record and (decision.record.closed is None) == (expected is not None)
    if expected is not None:
        assert decision.record.failures == expected and decision.record.round == 2


def test_the_reason_names_the_lost_member_before_the_failure() -> None:
    lost = form(after("abc", Cause.FAILURE), [row("a", 1), row("b", 1)], "c")
    assert lost.reason == "name-c 10.0.0.3 was lost; because of failure"
    assert form(after("abc", Cause.LOST), [row("a", 1), row("b", 1)], "c").reason == "because of lost"


def test_a_loss_that_one_node_has_found_counts_for_all() -> None:
    broken = Broken(Cause.FAILURE, "because of failure", "a", lost=("c",))
    decision = form(after("abc", broken=broken), [row("a", 1), row("b", 1), row("c", status=Status.RUNNING)], max_restarts=0)
    assert chosen(decision) == "ab" and decision.record and decision.record.failures == 0
    assert decision.reason == "name-c 10.0.0.3 was lost; because of failure"


def failure(rank: int, blame: int = 0, at: float = 1.0) -> ExitRecord:
    return ExitRecord("n", rank, 0, 1, 1, blame, at)


def test_a_spent_budget_closes_the_job_with_the_failures_of_its_members_root_cause_first() -> None:
    failures = {"a": (failure(0, blame=5), failure(1, at=2.0)), "b": (failure(2, at=1.5),), "x": (failure(9, at=0.0),)}
    present = [row(i, 1, failures=found) for i, found in failures.items()]
    decision = form(after("ab", Cause.FAILURE, failures=1), present)
    record = decision.record
    assert record and record.closed and decision.leader == "a"
    assert (record.round, record.failures, record.version) == (1, 2, 4), "no new round; the count is told"
    assert [f.rank for f in record.closed.failures] == [2, 1, 0], "without those of a node that was no member"
    assert record.closed.verdict is Verdict.FAILED and record.closed.by == "a"
    assert record.closed.reason == "a worker failed in 2 rounds, --max-restarts=1 is spent: rank 2 on n failed (exit code 1)"
    once = form(after("ab", Cause.FAILURE), present, max_restarts=0).record
    assert once and once.closed and once.closed.reason.startswith("a worker failed, --max-restarts=0")


def test_the_budget_is_judged_only_when_all_have_stopped() -> None:
    assert form(after("ab", Cause.FAILURE), [row("a", 1), row("b")], max_restarts=0).record is None


def test_the_verdict_holds_no_more_than_sixteen_failures() -> None:
    present = [row("a", 1, failures=tuple(failure(i) for i in range(40)))]
    record = form(after("a", Cause.FAILURE), present, max_restarts=0).record
    assert record and record.closed and len(record.closed.failures) == 16


def test_success_is_of_the_very_round() -> None:
    record = after("ab", None)
    there = rows([row("a", succeeded=1), row("b", succeeded=0)])
    assert [view(record, there).has_succeeded(m) for m in record.members] == [True, False]
    assert not view(replace(record, round=2), there).has_succeeded(record.members[0]), "a success of an earlier round is none"
    assert not view(record).has_succeeded(record.members[0])


@pytest.mark.parametrize(
    ("members", "silent", "done", "quiet", "formed"),
    [
        ("ab", "ab", "", 87.0, False),  # cut off together they may still take their steps
        ("ab", "ab", "", 87.5, True),
        ("ab", "a", "b", 5.0, True),  # one that has stopped ends it for both
        ("ab", "ab", "a", 5.0, True),
        ("a", "a", "", 5.0, True),  # a round of one is gone by then
    ],
)
def test_a_round_of_which_nothing_is_heard_is_given_the_time_to_stop_by_itself(
    members: str, silent: str, done: str, quiet: float, formed: bool
) -> None:
    present = [row("c"), row("d"), *(row(i, 1) for i in done)]
    decision = form(after(members, Cause.LOST), present, silent, quiet=quiet, store_grace=60.0)
    assert (decision.record is not None) is formed
    if not formed:
        assert decision.check_again == 100.5
        assert "nothing is heard of name-a 10.0.0.1, name-b 10.0.0.2: they may be cut off together" in decision.reason


def test_of_a_round_that_is_cut_off_the_member_heard_of_last_counts() -> None:
    quiet = {"a": 1e9, "b": 10.0}
    record = after("ab", Cause.LOST)
    seen = View("c", record, rows([row("c")]), Told("ab", quiet), 100.0)
    decision = formation.form(RULES, seen, 0.0, 0.0)
    assert decision.record is None and decision.check_again == 100.0 + RULES.longest_alone - 10.0


# -- a mesh ---------------------------------------------------------------------------------------------------------------

MESH = replace(RULES, max_nodes=4, mesh_text="dp=auto,pp=2,tp=2")  # a replica has two nodes


def meshed(present: str, record: RoundRecord = EMPTY, **rules: object) -> Forming:
    changed = replace(MESH, **rules)  # type: ignore[arg-type]
    lost = "".join(i for i in record.ids if i not in present)
    return formation.form(changed, view(record, rows(row(i, done=1) for i in present), lost), 0.0, 99.0)


def test_a_round_has_whole_replicas_and_who_is_over_is_a_spare() -> None:
    assert [chosen(meshed(present)) for present in ("a", "ab", "abc", "abcd")] == ["", "ab", "ab", "abcd"]
    assert (
        meshed("a").reason
        == "1 node joined (name-a 10.0.0.1); one replica of dp=auto,pp=2,tp=2 needs 4 workers on nodes of at least 2, and 2 are here"
    )
    assert meshed("abc", min_nodes=3).reason.endswith("--mesh=dp=auto,pp=2,tp=2 takes 2 of them, and --nnodes wants at least 3")


def test_survivors_that_form_no_replica_wait_for_others_and_do_not_look_for_another_store() -> None:
    quorums = (Quorum(("a", "b", "c", "d"), "a"),)
    record = after("abcd", Cause.LEAVE, quorums=quorums, host="a")
    for present, reason in (("abd", ""), ("ab", "2 nodes joined (name-a 10.0.0.1, name-b 10.0.0.2); one replica"), ("bcd", "")):
        decision = meshed(present, record, mesh_text="dp=auto,pp=3,tp=2" if reason else "dp=auto,pp=2,tp=2", store_succession="majority")
        assert not decision.minority and (reason in decision.reason)
    few = meshed("bcd", record, store_succession="majority")
    assert few.record is None and not few.minority
    assert few.reason == "the mesh has seats for too few nodes of round 1 to go on without those that may go on elsewhere"


def test_a_spare_takes_the_seat_of_a_lost_node() -> None:
    assert chosen(meshed("acd", after("abcd", Cause.FAILURE))) == "ac"
    assert chosen(meshed("acde", after("abcd", Cause.FAILURE))) == "aecd"


def joined(newcomers: str, hosts: bool = False, own: str = "c", **rules: object) -> Forming:
    record = replace(after("ab", None), members=meshed("ab").record.members)  # type: ignore[union-attr]
    present = [*(row(i, status=Status.RUNNING) for i in "ab"), *(row(i, hosts=hosts and i == own) for i in newcomers)]
    comes = [one for one in present if one.id in newcomers]
    mine = next(one for one in present if one.id == own)
    return formation.take_in(replace(MESH, **rules), view(record, rows(present)), mine, comes, 5.0, 0.0)  # type: ignore[arg-type]


def test_a_newcomer_ends_a_round_only_if_it_adds_a_replica() -> None:
    waits = joined("c")
    assert waits.record is None and waits.news
    assert waits.reason == "round 1 goes on: 2 of the 4 workers of the next replica of dp=auto,pp=2,tp=2 are here; this node is a spare"
    more = joined("cd")
    assert more.record is not None and more.record.broken is not None
    assert "there is no place for a replica; this node is a spare" in joined("cd", max_nodes=3).reason
    assert joined("c", hosts=True).record is not None, "the store's host takes part in each round"


def test_survivors_that_the_mesh_does_not_fit_take_newcomers_after_early_losses() -> None:
    record = after("ab", Cause.LOST, losses=3)
    assert chosen(meshed("abcd", record)) == "ab", "the newcomers are held back"
    assert "rounds in a row lost a node within" in meshed("acd", record).reason


def test_survivors_with_too_few_seats_for_the_quorum_take_newcomers_after_early_losses() -> None:
    record = after("abcd", Cause.LOST, losses=3, quorums=(Quorum(("a", "b", "c", "d")),), host="a")
    held = meshed("abcef", record, store_succession="majority")  # without newcomers two of the three survivors would have seats
    assert held.record is None and "rounds in a row lost a node" in held.reason


def test_with_a_mesh_the_last_call_ends_when_all_nodes_are_there() -> None:
    present = rows(row(i) for i in "abc")
    rules = replace(MESH, max_nodes=3)
    assert chosen(formation.form(rules, view(EMPTY, present, now=1.0), 0.0, 0.0)) == "ab"
    assert "last call" in formation.form(replace(rules, max_nodes=4), view(EMPTY, present, now=1.0), 0.0, 0.0).reason


def test_a_record_that_does_not_fit_the_mesh_is_not_true() -> None:
    settings = MESH.settings
    record = replace(after("ab", None), settings=settings)
    assert untrue(MESH, record, row("z")) == ""
    assert (
        untrue(MESH, replace(record, members=record.members[:1]), row("z"))
        == "it has 2 workers on 1 nodes, which do not fit the mesh dp=auto,pp=2,tp=2"
    )
    assert "--mesh=dp=auto,pp=2,tp=2" in disagreement(MESH, replace(record, settings=RULES.settings))
