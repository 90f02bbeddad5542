"""The meeting of the nodes of ``elastirun check`` at a store: who leads, who is on the roster, what is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastirun.agent.check import meeting as module
from elastirun.agent.check.meeting import CheckMeeting
from elastirun.agent.check.records import Arrival, Measured, Result
from elastirun.errors import StoreError
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.codec import Codec
from tests.agent.test_check_verdict import node
from tests.support.until import until

Wait = Callable[[float], object]


class Locked(MemoryStore):
    """A store in memory that several threads use."""

    lock = threading.Lock()

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self.lock:
            return super().put_if(key, expected, value)


def meet(data: dict[str, bytes], arrival: Arrival, wait: Wait = lambda seconds: threading.Event().wait(0.001)) -> CheckMeeting:
    return CheckMeeting(Locked(data), "job/", Codec(), arrival, wait)


def expected(count: int, limit: float = 60.0) -> tuple[int, int, float, float]:
    return count, count, limit, 60.0


def whole(data: dict[str, bytes], arrival: Arrival, count: int) -> tuple[tuple[str, ...], bool, Result]:
    """Take part from the beginning to the end. Return the ids of the roster, whether this node led, and the result."""
    meeting = meet(data, arrival)
    roster = meeting.assemble(*expected(count))
    found = meeting.collect(roster, Measured(arrival.id, (), (), ()), 60.0)
    if meeting.leads:
        assert found.keys() == {*roster.ids}
        meeting.publish(Result((), ()))
    result = meeting.result(60.0)
    meeting.part()
    return roster.ids, meeting.leads, result


def test_nodes_agree_on_the_roster_one_leads_and_nothing_is_left() -> None:
    data: dict[str, bytes] = {}
    found: list[tuple[tuple[str, ...], bool, Result]] = []
    threads = [threading.Thread(target=lambda i=i: found.append(whole(data, node(i), 5))) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {ids for ids, _, _ in found} == {("n0", "n1", "n2", "n3", "n4")} and len(found) == 5
    assert sum(leads for _, leads, _ in found) == 1
    assert not [key for key in data if "read/" not in key]


def test_the_host_of_the_store_comes_first_then_ranks() -> None:
    data: dict[str, bytes] = {}
    for one in (node(3, rank=1), replace(node(2, rank=2), hosting=True)):
        data[f"job/check/node/{one.id}"] = Codec().encode(f"job/check/node/{one.id}", one)
    roster = meet(data, node(1, rank=0)).assemble(*expected(3))
    assert roster.ids == ("n2", "n1", "n3")


def test_who_has_come_is_checked_when_the_limit_is_over_or_nobody_comes_any_more() -> None:
    roster = meet({}, node(1)).assemble(*expected(3, limit=0.01))
    assert roster.ids == ("n1",)
    roster = meet({}, node(1)).assemble(1, 3, 60.0, 0.01)
    assert roster.ids == ("n1",)


def test_a_node_that_comes_later_is_not_on_the_roster() -> None:
    data: dict[str, bytes] = {}
    meet(data, node(0)).assemble(*expected(1))
    roster = meet(data, node(1)).assemble(*expected(1))
    assert roster.ids == ("n0",)


def test_a_lead_that_was_killed_is_followed_by_another_which_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, bytes] = {}
    meet(data, node(0)).assemble(*expected(1))
    monkeypatch.setattr(module, "STALE", 0.05)
    meeting = meet(data, node(1))
    data.pop("job/check/roster")
    roster = meeting.assemble(*expected(2, limit=0.3))
    assert meeting.leads and roster.ids == ("n1",), "the row of the node that was killed is gone"


def test_a_node_that_follows_a_lead_that_was_killed_while_nodes_gathered_is_on_its_own_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"job/check/lead": b"killed 3"}
    monkeypatch.setattr(module, "STALE", 0.05)
    meeting = meet(data, node(1))
    assert meeting.assemble(*expected(2, limit=0.2)).ids == ("n1",), "its row was deleted with those of the check before"


def test_a_host_that_is_not_on_the_roster_serves_the_store_until_the_others_have_the_result() -> None:
    data: dict[str, bytes] = {}
    lead, host = meet(data, node(1)), meet(data, replace(node(0), hosting=True))
    roster = lead.assemble(*expected(1))
    assert host.assemble(*expected(1)).ids == ("n1",)
    thread = threading.Thread(target=host.outlast, args=(roster.ids,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "the lead has not read the result"
    lead.collect(roster, Measured("n1", (), (), ()), 60.0)
    lead.publish(Result((), ()))
    lead.part()
    thread.join(60)
    assert not thread.is_alive()


def test_a_lead_that_another_one_has_replaced_ends() -> None:
    data: dict[str, bytes] = {}
    meeting = meet(data, node(0))
    meeting.assemble(*expected(1))
    data["job/check/lead"] = b"another 0"
    with pytest.raises(StoreError, match="another node leads the check now"):
        meeting.meanwhile(lambda: False, 1.0)


def test_all_begin_their_all_reduces_together_and_who_does_not_come_is_not_waited_for_for_ever() -> None:
    data: dict[str, bytes] = {}
    lead, other, ids = meet(data, node(0)), meet(data, node(1)), ("n0", "n1")
    lead.assemble(*expected(1))
    together: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: together.append(other.await_all(0, ids, 600.0)))
    thread.start()
    until(lambda: "job/check/ready/0/n1" in data, "the first one to wait")
    assert not together
    assert lead.await_all(0, ids, 600.0) == ids
    thread.join(60)
    assert together == [ids]
    assert lead.await_all(1, ids, 0.01) == ("n0",)
    assert other.await_all(1, ids, 600.0) == ("n0",), "what the lead has found"


def test_a_lead_that_takes_no_part_in_the_all_reduces_waits_for_those_that_do() -> None:
    data: dict[str, bytes] = {}
    lead, other = meet(data, node(0)), meet(data, node(1))
    lead.assemble(*expected(1))
    thread = threading.Thread(target=lambda: other.await_all(0, ("n1",), 600.0))
    thread.start()
    assert lead.await_all(0, ("n1",), 600.0) == ("n1",)
    thread.join(60)
    assert "job/check/ready/0/n0" not in data


def test_a_node_that_has_died_is_not_waited_for_and_one_that_is_slow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE", 0.5)
    monkeypatch.setattr(module, "LIFE", 0.05)
    data: dict[str, bytes] = {}
    nodes = [meet(data, node(i)) for i in range(3)]
    for one in nodes[1:]:
        data[f"job/check/node/{one.arrival.id}"] = Codec().encode(f"job/check/node/{one.arrival.id}", one.arrival)
    lead, slow, _ = nodes
    roster = lead.assemble(*expected(3))
    began, measures = time.monotonic(), threading.Event()
    thread = threading.Thread(target=lambda: slow.meanwhile(measures.is_set, 600.0))
    thread.start()
    threading.Timer(2.0, measures.set).start()
    found: list[tuple[str, ...]] = []
    late = threading.Thread(target=lambda: (thread.join(60), found.append(slow.await_all(0, roster.ids, 600.0))))
    late.start()
    assert lead.await_all(0, roster.ids, 600.0) == ("n0", "n1"), "n2 has never shown a sign of life"
    assert 2.0 <= time.monotonic() - began < 60.0
    late.join(60)
    assert found == [("n0", "n1")]
    slow.collect(roster, Measured("n1", (), (), ()), 0.0)
    assert lead.collect(roster, Measured("n0", (), (), ()), 600.0).keys() == {"n0", "n1"}
    assert time.monotonic() - began < 60.0, "it has ended"


def test_a_node_for_which_the_lead_has_not_looked_for_a_while_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a long wait for another node."""
    now = 1000.0
    monkeypatch.setattr(module.clock, "now", lambda: now)
    data: dict[str, bytes] = {}
    lead, other = meet(data, node(0)), meet(data, node(1))
    assert lead._may_come(["n1"]) and lead._may_come(["n1", "n2"])
    for _ in range(30):
        now += 1.0
        other._rest()
        waits = lead._may_come(["n2"])
    assert not waits and lead._may_come(["n1", "n2"])
    now += module.STALE + module.LIFE
    assert not lead._may_come(["n1"]) and not lead._may_come([])


def test_who_waits_for_a_lead_that_was_killed_goes_on_without_all_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, bytes] = {}
    meet(data, node(0)).assemble(*expected(1))
    monkeypatch.setattr(module, "STALE", 0.05)
    began = time.monotonic()
    assert meet(data, node(1)).await_all(0, ("n0", "n1"), 600.0) == ()
    assert time.monotonic() - began < 60.0, "it has ended"


def test_a_node_reads_what_the_others_near_it_have_brought_and_the_roster_says_the_rest() -> None:
    data: dict[str, bytes] = {}
    for one in (replace(node(1), meet=0), replace(node(2), meet=7), replace(node(3), meet=8)):
        data[f"job/check/node/{one.id}"] = Codec().encode(f"job/check/node/{one.id}", one)
    meeting = meet(data, replace(node(0), meet=9))
    roster = meeting.assemble(*expected(4))
    assert (roster.meet, roster.hosted) == (("n0", "n2", "n3"), True)
    data["job/check/node/n3"] = b"garbage"
    assert meeting.arrivals(("n1", "n3", "n9")).keys() == {"n1"} and len(meeting.unreadable) == 1


@pytest.mark.parametrize("stranger", [None, b"", b"garbage", b"\xff 1", b"other -1"])
def test_what_a_stranger_writes_or_deletes_ends_no_lead(stranger: bytes | None) -> None:
    data: dict[str, bytes] = {}
    meeting = meet(data, node(0))
    meeting.assemble(*expected(1))
    data.pop("job/check/lead") if stranger is None else data.update({"job/check/lead": stranger})
    meeting.meanwhile(lambda: False, 0.05)
    assert data["job/check/lead"].startswith(b"n0 ")


def test_a_lead_that_writes_no_result_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, bytes] = {}
    meet(data, node(0)).assemble(*expected(1))
    with pytest.raises(StoreError, match="has written no result"):
        meet(data, node(1)).result(0.05)
    monkeypatch.setattr(module, "STALE", 0.05)
    began = time.monotonic()
    with pytest.raises(StoreError, match="has written no result"):
        meet(data, node(1)).result(600.0)
    assert time.monotonic() - began < 60.0, "it has ended"


def test_a_stranger_who_counts_as_the_lead_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE", 0.05)
    data: dict[str, bytes] = {}

    def count(seconds: float) -> None:
        data["job/check/lead"] = f"stranger {time.monotonic_ns() % 10**12}".encode()
        time.sleep(0.001)

    count(0.0)
    with pytest.raises(StoreError, match="a stranger may write there"):
        meet(data, node(1), wait=count).assemble(*expected(2, limit=0.2))


@pytest.mark.parametrize(
    "change", [{"id": "other"}, {"ports": (70_000,)}, {"ports": (0,)}, {"ports": tuple(range(1, 30))}, {"meet": -1}, {"address": "a name"}]
)
def test_rows_that_no_node_would_write_are_left_out(change: dict[str, object]) -> None:
    key = "job/check/node/n1"
    data = {key: Codec().encode(key, replace(node(1), **change)), "job/check/node/n2": b"\xff garbage"}  # type: ignore[arg-type]
    meeting = meet(data, node(0))
    roster = meeting.assemble(*expected(3, limit=0.01))
    assert roster.ids == ("n0",) and len(meeting.unreadable) == 2
