"""The account of a node: each second has one kind, whatever happens, and lost time is charged to its cause."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from elastirun import clock
from elastirun.agent.observe.account import NO_STAMPS, Account, Stamps, StateChange, Totals, lines, stamps
from elastirun.agent.observe.accounting import Accounting
from elastirun.agent.observe.events import Event, State
from elastirun.agent.observe.node_states import SPENT, WORDS, NodeState
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.part import NodeRound
from elastirun.rendezvous.wire.records import Broken, Cause, Member, RoundRecord
from elastirun.worker.progress_page import FARTHEST, NS, Page
from tests.agent.test_hangs import pages, worker

__all__ = ["pages", "worker"]  # fixtures


def started(began: float = 10.0, told: list[StateChange] | None = None) -> Account:
    """An account whose first round starts at ``began``; the agent was up at 2 and its workers' processes take 1 s."""
    account = Account(0.0, [].append if told is None else told.append)
    account.join(2.0)
    account.start_round(began)
    account.workers_started(began + 1)
    return account


def restarted() -> Account:
    """An account whose first round made steps from 20 to 49; the workers of the second one start at 52."""
    account = started()
    account.end_early("failure", 50.0, Stamps(first=20.0, last=49.0))
    account.end_round(51.0, Stamps(first=20.0, last=49.0))
    account.start_round(52.0)
    account.workers_started(53.0)
    return account


def spent(totals: Totals) -> dict[str, float]:
    """What is not zero."""
    return {kind: seconds for kind, seconds in totals.seconds.items() if seconds}


def test_time_is_that_of_the_start_the_wait_the_workers_start_and_the_training() -> None:
    account = started()
    totals = account.totals(110.0, Stamps(first=30.0, last=105.0))
    assert spent(totals) == {"starting": 2.0 + 20.0, "waiting": 8.0, "training": 80.0}
    assert (totals.total, totals.goodput, totals.lost_seconds, totals.steps_stamped) == (110.0, round(80 / 110, 4), {}, True)


def test_without_stamps_a_start_ends_with_the_processes_and_what_is_not_known_is_null() -> None:
    totals = started().totals(110.0, NO_STAMPS)
    assert spent(totals) == {"starting": 3.0, "waiting": 8.0, "training": 99.0}
    assert (totals.seconds["repeated"], totals.seconds["saving"], totals.steps_stamped) == (None, None, False)
    assert "(not known: first steps of the rounds, steps done again, saving)" in lines("n", totals)[0]


def test_until_the_first_step_of_a_script_that_stamps_all_is_starting() -> None:
    account = restarted()
    assert spent(account.totals(60.0, NO_STAMPS))["starting"] == 12.0 + 8.0


def test_a_round_without_a_step_for_much_longer_than_a_start_takes_is_training() -> None:
    """As of workers that were executed, where those before were forks and stamped their steps."""
    account = restarted()
    assert spent(account.totals(52.0 + 79.0, NO_STAMPS))["training"] == 29.0, "a start has taken 10 s"
    long = account.totals(1052.0, NO_STAMPS)
    assert spent(long)["training"] == 29.0 + 999.0, "from the start of the processes on"
    account.end_early("failure", 1052.0)
    account.end_round(1052.0, NO_STAMPS)
    assert spent(account.totals(1052.0, NO_STAMPS)) == spent(long)


def test_a_wait_for_a_lost_node_that_is_never_replaced_is_charged_to_the_loss() -> None:
    account = started()
    account.end_early("lost", 50.0, Stamps(first=20.0, last=49.0))
    account.end_round(51.0, Stamps(first=20.0, last=49.0))
    account.end_part(651.0)
    totals = account.totals(652.0, NO_STAMPS)
    assert (totals.lost_seconds, totals.rounds_ended) == ({"lost": 602.0}, {"lost": 1}) and spent(totals)["finishing"] == 1.0


def test_a_node_that_waits_beside_a_round_is_waiting() -> None:
    account = started()
    account.end_early("join", 50.0)
    account.wait_beside(50.5)
    account.end_round(51.0, Stamps(first=20.0, last=50.0))
    for at in (51.2, 60.0, 70.0):
        account.wait_beside(at)
    totals = account.totals(151.2, NO_STAMPS)
    assert spent(totals)["waiting"] == 8.0 + 100.0 and totals.lost_seconds == {"join": 1.2} and totals.rounds_ended == {"join": 1}
    account.sit_out(151.2)
    account.wait_beside(161.2)
    assert spent(account.totals(171.2, NO_STAMPS))["sitting_out"] == 20.0


def test_a_round_that_ended_before_its_first_step_was_starting_as_later_rounds_show() -> None:
    account = started()
    account.end_early("failure", 50.0)
    account.end_round(50.0, NO_STAMPS)
    assert spent(account.totals(50.0, NO_STAMPS))["training"] == 39.0, "does this script stamp at all?"
    account.start_round(52.0)
    totals = account.totals(70.0, Stamps(first=60.0, last=70.0))
    assert spent(totals) == {"starting": 2.0 + 40.0 + 8.0, "waiting": 8.0, "restarting": 2.0, "training": 10.0}


def test_training_ends_with_the_last_step_and_what_follows_is_charged_to_the_cause() -> None:
    """A hang of 40 s, a stop of 5 s, a pause of 2 s, and 8 s until the first step of the next round."""
    account = started()
    found = Stamps(first=20.0, last=60.0)
    account.end_early("failure", 100.0, found, certain=False)
    account.end_early("failure", 101.0, found)
    round_spent = account.end_round(105.0, found)
    assert round_spent and (round_spent.cause, round_spent.training) == ("", 40.0)
    account.start_round(107.0)
    totals = account.totals(120.0, Stamps(first=115.0, last=120.0))
    assert spent(totals) == {"starting": 12.0 + 8.0, "waiting": 8.0, "training": 45.0, "restarting": 47.0}
    assert (totals.lost_seconds, totals.rounds_ended) == ({"failure": 55.0}, {"failure": 1})
    round_spent = account.end_round(120.0, Stamps(first=115.0, last=120.0))
    assert round_spent and (round_spent.cause, round_spent.restarting, round_spent.starting) == ("failure", 47.0, 8.0)


def test_steps_that_the_workers_make_while_they_are_stopped_count() -> None:
    account = started()
    account.end_early("join", 50.0, Stamps(first=20.0, last=50.0))
    round_spent = account.end_round(60.0, Stamps(first=20.0, last=53.0))
    assert round_spent and round_spent.training == 33.0


def test_the_cause_is_that_of_the_round_record_also_when_a_worker_failed_first() -> None:
    account = started()
    account.end_early("failure", 50.0, certain=False)
    account.end_round(51.0, NO_STAMPS)
    account.end_early("lost", 52.0)
    account.end_early("leave", 53.0, certain=False)
    account.start_round(54.0)
    assert account.totals(54.0, NO_STAMPS).lost_seconds == {"lost": 4.0}


def test_a_second_end_before_workers_run_is_charged_for_the_rest() -> None:
    account = started()
    account.end_early("failure", 50.0)
    account.end_round(50.0, NO_STAMPS)
    account.end_early("join", 53.0)
    account.start_round(60.0)
    totals = account.totals(60.0, NO_STAMPS)
    assert (totals.lost_seconds, totals.rounds_ended) == ({"join": 7.0, "failure": 3.0}, {"failure": 1, "join": 1})
    round_spent = account.end_round(61.0, NO_STAMPS)
    assert round_spent and round_spent.restarting == 10.0


def test_of_an_end_that_is_told_again_the_last_cause_is_charged() -> None:
    account = started()
    account.end_early("lost", 50.0)
    account.end_round(50.0, NO_STAMPS)
    account.end_early("leave", 53.0, again=True)
    account.start_round(60.0)
    totals = account.totals(60.0, NO_STAMPS)
    assert (totals.lost_seconds, totals.rounds_ended) == ({"leave": 10.0}, {"leave": 1})
    account.end_round(61.0, NO_STAMPS)
    account.end_early("leave", 62.0, again=True)
    assert spent(account.totals(63.0, NO_STAMPS))["finishing"] == 2.0, "its workers have succeeded since"


def test_steps_up_to_the_farthest_of_earlier_rounds_are_done_again() -> None:
    account = started()
    found = Stamps(first=20.0, last=50.0, at=1200)
    account.end_early("lost", 50.0, found)
    account.end_round(50.0, found)
    assert account.farthest == 1200
    account.start_round(60.0)
    behind = Stamps(first=70.0, last=75.0, at=1150)
    assert spent(account.totals(75.0, behind))["repeated"] == 5.0
    ahead = Stamps(first=70.0, last=80.0, at=1201, caught_up=78.0)
    totals = account.totals(90.0, ahead)
    assert totals.seconds["repeated"] == 8.0 and totals.seconds["training"] == 30.0 + 12.0
    assert totals.lost_seconds == {"lost": 10.0 + 10.0 + 8.0}
    restored = Stamps(first=70.0, last=80.0, at=1200, caught_up=65.0)
    assert account.totals(90.0, restored).seconds["repeated"] == 0.0, "its checkpoint was of the last step"


def test_whatever_rounds_reached_the_farthest_counts() -> None:
    account = started()
    for reached in (1200, 1150):
        account.end_early("lost", 50.0)
        account.end_round(50.0, Stamps(at=reached))
        account.start_round(50.0)
    assert account.farthest == 1200


def test_saves_are_no_training_but_those_after_the_end_of_a_round_are_its_stop() -> None:
    account = started()
    account.end_early("leave", 50.0, Stamps(first=20.0, last=50.0, saving=4.0))
    totals = account.totals(60.0, Stamps(first=20.0, last=50.0, saving=9.0))
    assert (totals.seconds["saving"], totals.seconds["training"], totals.seconds["restarting"]) == (4.0, 26.0, 10.0)


def test_after_success_a_node_waits_for_the_others_and_may_have_to_start_again() -> None:
    account = started()
    account.end_round(50.0, Stamps(first=20.0, last=45.0))
    assert spent(account.totals(60.0, NO_STAMPS))["finishing"] == 10.0
    account.end_early("lost", 60.0)
    account.start_round(62.0)
    totals = account.totals(62.0, NO_STAMPS)
    assert (totals.seconds["training"], totals.seconds["finishing"], totals.lost_seconds) == (30.0, 10.0, {"lost": 2.0})
    account = started()
    account.end_round(50.0, NO_STAMPS)
    account.start_round(62.0)
    assert account.totals(62.0, NO_STAMPS).rounds_ended == {"unknown": 1}, "nobody saw why"


@pytest.mark.parametrize(("decided", "kind"), [(True, "finishing"), (False, "restarting")])
def test_the_end_of_a_job_is_no_restart_but_a_wait_in_vain_is(decided: bool, kind: str) -> None:
    account = started()
    account.end_early("failure", 50.0)
    account.end_round(51.0, NO_STAMPS)
    if decided:
        account.end_part(55.0)
    assert spent(account.totals(60.0, NO_STAMPS))[kind] == 10.0


def test_a_node_beside_the_rounds_waits() -> None:
    account = Account(0.0, [].append)
    account.join(1.0)
    account.end_early("failure", 5.0)
    assert spent(account.totals(9.0, NO_STAMPS)) == {"starting": 1.0, "waiting": 8.0}


def test_a_node_that_sits_out_does_so_until_it_joins_again() -> None:
    account = started()
    account.end_early("failure", 50.0)
    account.end_round(51.0, NO_STAMPS)
    account.sit_out(52.0)
    account.end_early("failure", 60.0)  # the end of a round of others
    account.join(72.0)
    totals = account.totals(80.0, NO_STAMPS)
    assert (totals.seconds["sitting_out"], totals.seconds["waiting"]) == (20.0, 8.0 + 8.0)
    assert "sitting out 20.0 s" in lines("n", totals)[1]


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_and_is_stamped_the_parts_add_up(seed: int) -> None:
    rng, now = random.Random(seed), 5.0
    account = Account(now, [].append)

    def found() -> Stamps:
        moments = [rng.choice([None, rng.uniform(-10, 2 * now)]) for _ in range(3)]
        return Stamps(*moments[:2], at=rng.choice([0, 1, 5, 2**64 - 1]), caught_up=moments[2], saving=rng.choice([0.0, 3.0, 1e12]))

    account.join(now)
    for _ in range(40):
        now += rng.choice([0.0, 0.1, 7.0])
        what = rng.randrange(3)
        if what == 0:
            account.end_early(rng.choice(["failure", "join", "lost"]), now, found(), rng.random() < 0.5)
        elif account.running:
            account.workers_started(now) if what == 1 else account.end_round(now, found())
        else:
            account.start_round(now) if what == 1 else account.end_part(now)
        totals = account.totals(now, found())
        parts = [seconds or 0.0 for seconds in totals.seconds.values()]
        assert abs(sum(parts) - (now - 5.0)) < 0.01 and min(parts) >= 0.0, totals
        assert sum(totals.lost_seconds.values()) <= totals.total + 0.01 and 0 <= totals.goodput <= 1


def drawn(told: list[StateChange], now: float) -> list[tuple[NodeState, float, float]]:
    """The states with their begin and end, where the later word counts."""
    found: list[StateChange] = []
    for change in told:
        while found and found[-1].at >= change.at:
            found.pop()
        found.append(change)
    ends = [*(change.at for change in found[1:]), now]
    return [(change.state, change.at, end) for change, end in zip(found, ends, strict=True)]


def test_each_change_of_state_is_told_and_told_again_when_more_is_known_of_it() -> None:
    told: list[StateChange] = []
    account = started(10.0, told)
    account.look(20.0, NO_STAMPS)
    assert drawn(told, 20.0)[-2:] == [(NodeState.STARTING, 10.0, 11.0), (NodeState.RUNNING, 11.0, 20.0)], "does it stamp at all?"
    account.look(30.0, Stamps(first=25.0, last=30.0))
    begin = [(NodeState.STARTING, 0.0, 2.0), (NodeState.JOINING, 2.0, 10.0), (NodeState.STARTING, 10.0, 25.0)]
    assert drawn(told, 30.0) == [*begin, (NodeState.RUNNING, 25.0, 30.0)]
    count = len(told)
    account.look(40.0, Stamps(first=25.0, last=40.0))
    assert len(told) == count, "that is no news"
    account.end_early("failure", 50.0, Stamps(first=25.0, last=45.0))
    assert drawn(told, 51.0)[-1] == (NodeState.STOPPING, 50.0, 51.0)
    account.end_round(52.0, Stamps(first=25.0, last=45.0))
    end = [(NodeState.RUNNING, 25.0, 45.0), (NodeState.STOPPING, 45.0, 52.0), (NodeState.RESTARTING, 52.0, 53.0)]
    assert drawn(told, 53.0) == [*begin, *end]
    assert [change.cause for change in told[-2:]] == ["failure", "failure"]
    account.end_part(54.0)
    assert drawn(told, 55.0)[-1] == (NodeState.FINISHING, 45.0, 55.0), "none came, so it was none"


@pytest.mark.parametrize("seed", range(100))
def test_the_changes_that_are_told_add_up_to_the_account(seed: int) -> None:
    rng, now, told = random.Random(seed), 11.0, list[StateChange]()
    account = started(10.0, told)
    found, farthest = Stamps(first=12.0, last=14.0), 0
    for _ in range(30):
        now += rng.choice([0.1, 7.0])
        what = rng.randrange(4)
        if not account.running:
            account.start_round(now) if what else account.end_early("lost", now)
            first = now + rng.uniform(0.1, 9)
            reached = rng.choice([0, farthest, farthest + 5])
            found = Stamps(first, first + rng.uniform(0, 9), reached, rng.choice([None, first + 1]), rng.choice([0.0, 0.5]))
        elif what == 0:
            account.look(now, found)
        elif what == 1:
            account.end_early(rng.choice(["failure", "join"]), now, found, rng.random() < 0.5)
        else:
            account.end_round(now, found)
            farthest = account.farthest
    if account.running:
        account.end_round(now, found)
    seconds = dict.fromkeys(SPENT, 0.0)
    for state, begin, end in drawn(told, now + 1):
        seconds[WORDS[state].spent] += end - begin
    assert spent(account.totals(now + 1, NO_STAMPS)) == pytest.approx(
        {kind: value for kind, value in seconds.items() if value > 1e-6}, abs=0.002
    )


def test_the_lines_say_what_was_lost_to_which_cause() -> None:
    seconds = dict.fromkeys(SPENT, 0.0) | {"training": 80.0, "restarting": 15.0, "repeated": 5.0}
    totals = Totals(100.0, 0.8, seconds, {"failure": 15.0, "join": 5.0}, {"failure": 3, "join": 1}, True)
    assert lines("node7", totals) == [
        "time of node7: 100.0 s, 80.0 % of it training that counted",
        "  spent on: training 80.0 s, steps done again 5.0 s, restarting 15.0 s",
        "  lost by cause: failure 15.0 s (3 times), join 5.0 s (once)",
    ]
    assert lines("node7", Totals(1.0, 0.0, seconds, {}, {}, True))[2] == "  lost by cause: nothing"


# -- the round record ----------------------------------------------------------------------------------------------------------


def broken(number: int, cause: Cause, lost: tuple[str, ...] = (), term: int = 0) -> RoundRecord:
    return RoundRecord("s", round=number, broken=Broken(cause, "why", "n1", lost), term=term)


def round_of(number: int) -> NodeRound:
    return NodeRound(RoundRecord("s", round=number), 0, {})


def ended(*told: RoundRecord | int) -> dict[str, int]:
    """Return the rounds that have ended early for a node of round 1 which reads these records. A number: it starts that round."""
    kept = Accounting(ProgressPages(), lambda event: None, "n1")
    kept.round_starts(round_of(1))
    for record in told:
        if isinstance(record, int):
            kept.round_starts(round_of(record))
        else:
            kept.see(record, clock.now())
            kept.idle()
    return dict(kept.totals(clock.now()).rounds_ended)


def test_a_round_whose_record_names_more_lost_nodes_later_has_ended_once() -> None:
    """So does that of a node that takes over the store: it adds the host that has left."""
    assert ended(broken(1, Cause.LEAVE), broken(1, Cause.LEAVE, ("n1",)), broken(1, Cause.LEAVE, ("n1", "n2"), term=1)) == {"leave": 1}


def test_the_last_cause_that_is_told_of_a_round_counts() -> None:
    """A node that sees the host go takes it for lost. The node that takes over the store may know better."""
    assert ended(broken(1, Cause.LOST, ("n1",)), broken(1, Cause.LEAVE, ("n1",), term=1), 2) == {"leave": 1}


def test_a_round_without_this_node_costs_it_no_time() -> None:
    """It was scaled down, stood still, or is one too many: the round that ended it costs the time until the next one."""
    members = tuple(Member(name, name, "", 1, 1) for name in ("n2", "n3"))
    events: list[Event] = []
    kept = Accounting(ProgressPages(), events.append, "n1")
    kept.round_starts(round_of(1))
    kept.see(broken(1, Cause.JOIN), clock.now())
    kept.idle()
    for _ in range(2):
        kept.see(RoundRecord("s", round=2, members=members), clock.now())
    states = [event.state for event in events if isinstance(event, State)]
    assert states[-2:] == [NodeState.RESTARTING, NodeState.JOINING] and kept.totals(clock.now()).rounds_ended == {"join": 1}


def test_a_failure_in_a_round_that_also_lost_a_node_is_charged_to_the_loss() -> None:
    """The workers of the others crash seconds before anybody can know that a node is gone, see docs/decisions/0001."""
    failed, lost = broken(1, Cause.FAILURE), broken(1, Cause.FAILURE, ("n2",))
    assert ended(failed, lost, RoundRecord("s", round=2), 2) == ended(lost, 2) == {"lost": 1}
    both = tuple(Member(name, name, "", 1, 1) for name in ("n1", "n2"))
    failed, second = replace(failed, members=both), RoundRecord("s", round=2, members=both[:1])
    assert ended(failed, second, 2) == {"lost": 1}, "the record that names it was not read"
    assert ended(failed, replace(second, failures=1), 2) == {"failure": 1}, "the other node has left"
    assert ended(failed, replace(second, members=both), 2) == {"failure": 1}, "as after --restart-window, where the count begins anew"


def test_the_next_round_ends_once_more() -> None:
    """Also where one of its number had ended in the store that was lost: the node that took over had not read that one."""
    assert ended(broken(1, Cause.JOIN), 2, broken(2, Cause.JOIN)) == {"join": 2}
    assert ended(broken(1, Cause.JOIN), broken(2, Cause.LOST)) == {"join": 1, "lost": 1}, "no worker of it started here"
    retold = broken(1, Cause.JOIN), broken(2, Cause.LOST), broken(1, Cause.JOIN, term=1)
    assert ended(*retold) == {"join": 1, "lost": 1}
    assert ended(*retold, 2, broken(2, Cause.FAILURE, term=1)) == {"join": 1, "lost": 1, "failure": 1}


# -- the pages -----------------------------------------------------------------------------------------------------------------


def test_the_stamps_of_a_round_are_those_of_all_its_workers() -> None:
    def page(first: float, last: float, at: int, caught_up: float, saving: float) -> Page:
        return Page(7, 0, 3, int(last * NS), 0, 0, int(first * NS), at, 0, int(caught_up * NS), int(saving * NS))

    both = [page(1.0, 5.0, 11, 3.0, 0.5), page(2.0, 4.0, 10, 0.0, 0.7), Page(8, 0, 0, 0, 0, 0)]
    assert stamps(both, 1010.0, 10 * NS) == Stamps(first=1002.0, last=1005.0, at=11, caught_up=1003.0, saving=0.7)
    assert stamps([Page(8, 0, 0, 0, 0, 0)], 1010.0, 10 * NS) == NO_STAMPS


NUMBERED = """
import signal
from elastirun.progress import at_step, progress, saving
for step in (8, 9, 10, 11):
    progress(step=step)
with saving():
    at_step(5)
print("stamped", flush=True)
while True:
    signal.pause()
"""


def test_a_worker_stamps_its_first_step_its_number_its_saves_and_when_it_caught_up(worker: Any, pages: Any) -> None:
    worker(script=NUMBERED)
    found = pages.read(0)
    assert found.steps == 4 and 0 < found.first < found.stamped and (found.at, found.caught_up) == (6, 0) and found.saving > 0


def test_a_worker_says_when_it_has_come_to_the_farthest_step_of_earlier_rounds(worker: Any, pages: Any) -> None:
    renew = pages.renew
    pages.renew = lambda count: renew(count, farthest=11)
    worker(script=NUMBERED)
    found = pages.read(0)
    assert (found.farthest, found.at) == (11, 6) and found.first < found.caught_up < found.stamped
    assert 8 * FARTHEST == 72, "docs/worker.md names the place"
