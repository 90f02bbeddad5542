"""Rules of the report. As in tests/rendezvous/test_mutants.py, a test notices each rule that is taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import Mutant, copy, each, failing, mutants_in, unnoticed

__all__ = ["copy"]  # the fixture

mutant = mutants_in("elastirun/report", "tests/report")
COSTS = "each_fault_has_the_cost_of_its_restart_its_start_and_the_steps_done_again"
CLOCKS = "a_clock_that_differs_is_told_from_the_start_of_shared_rounds"
KILLED = "the_lane_of_a_killed_agent_ends_when_the_others_noticed_and_goes_on_with_the_next_agent"
SHIFT = "shift if abs(shift) > DELAY else 0.0"
MUTANTS = (
    mutant(
        "a node that sits out is no fault",
        *("story", "            self.fault, self.round = None, 0\n", ""),
        *("story", "a_node_that_sits_out_has_a_state_of_its_own_and_costs_no_fault"),
    ),
    mutant(
        "the start after a fault is charged to it",
        *("story", "self.fault, self._started = (self._job, self.round), None\n", "self.fault, self._started = None, None\n"),
        *("story", COSTS),
    ),
    mutant(
        "what follows the last round is no restart",
        *("story", "self.segments[: self._wait_since] + after", "self.segments"),
        *("story", "a_round_that_never_came_is_lost_time_and_the_end_of_a_job_is_none"),
    ),
    mutant(
        "a killed agent lived until the others noticed",
        *("story", "lane.end = max(lane.end, lost.get((agent.job, walk.round), lane.end))", "pass"),
        *("story", KILLED),
    ),
    mutant(
        "an agent is there before its first event",
        *("story", 'one.at - one.event.seconds("total")', "one.at"),
        *("story", "the_lane_of_an_agent_is_its_life_without_gaps"),
    ),
    mutant("clocks that differ are told", *("clocks", SHIFT, "0.0"), *("story", f"{CLOCKS}[300.0--300.0]")),
    mutant("delays are no clocks", *("clocks", SHIFT, "shift"), *("story", f"{CLOCKS}[1.5-0.0]")),
    mutant(
        "a line has a limit",
        *("reader", "if len(line) > MAX_LINE:", "if False:"),
        *("story", "a_line_that_is_cut_off_or_too_long_is_named"),
    ),
    mutant(
        "all files together have a limit",
        *("reader", "while size < most and", "while True and"),
        *("story", "too_much_is_left_out_and_named"),
    ),
    mutant(
        "links to folders are not followed twice",
        *("reader", "entry.is_dir(follow_symlinks=False)", "entry.is_dir()"),
        *("story", "files_are_found_in_folders_and_below_and_read_once"),
    ),
    mutant(
        "texts are printable",
        *("words", "one if one.isprintable() else", "one if True else"),
        *("story", "texts_are_printable_and_short"),
    ),
    mutant(
        "what events say is no markup",
        *("page", "join(escape(words.clean(line, LONGEST_LINE)) for", "join(words.clean(line) for"),
        *("page", "the_page_is_one_file_and_what_events_say_is_text_in_it"),
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    if "test_page" in one.test:
        pytest.importorskip("plotly")
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""
