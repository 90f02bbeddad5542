"""Rules of the agent about checkpoints in memory: a test notices each one that is taken out, as in tests/rendezvous/test_mutants.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, copy, each, failing, mutants_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = mutants_in("elastirun/agent", "tests/agent")
LIMIT = "memory_is_held_up_to_the_limit_and_a_replaced_image_does_not_count"
STRANGERS = "strangers_neither_hang_nor_fill_the_agent"
OTHERS = "other users are not answered"
MUTANTS = (
    mutant(
        "only memory of a fixed size is held",
        *("checkpoint_memory", "fcntl.fcntl(fd, _GET_SEALS) & _SEALS == _SEALS", "bool(fcntl.fcntl(fd, _GET_SEALS) & _SEALS)"),
        *("checkpoint_memory", "what_is_refused_is_refused_with_a_reason[a-2-of a fixed size]"),
    ),
    mutant(
        "memory is limited",
        *("checkpoint_memory", "if before + size > self._limit:", "if size > self._limit:"),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "what is replaced does not count",
        *("checkpoint_memory", "self.size - (os.fstat(old).st_size if old is not None else 0)", "self.size"),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "people are told once",
        *("checkpoint_memory", "            self._full = True\n", ""),
        *("checkpoint_memory", LIMIT),
    ),
    mutant(
        "the number of images is limited",
        *("checkpoint_memory", "if old is None and len(self._held) >= self._most:", "if False:"),
        *("checkpoint_memory", "the_number_of_images_is_limited"),
    ),
    mutant(
        "what is replaced is let go",
        *("checkpoint_memory", "        self._drop(name)\n", ""),
        *("checkpoint_memory", "what_is_put_is_found_again_under_its_name"),
    ),
    mutant(
        "what is refused is closed",
        *("checkpoint_memory", "                close_aside(fd)\n            return why", "                pass\n            return why"),
        *("checkpoint_memory", "what_a_client_brings_is_closed_with_it"),
    ),
    mutant(
        "nobody waits for a descriptor to close",
        *("local_socket", "threading.Thread(target=os.close, args=(fd,), daemon=True).start()", "os.close(fd)"),
        *("checkpoint_memory", "a_descriptor_that_takes_for_ever_to_close_does_not_hold_the_agent_up"),
    ),
    mutant(
        "a client brings one descriptor",
        *("local_socket", "client.lost_fds = client.lost_fds or bool(flags & socket.MSG_CTRUNC)", "pass"),
        *("checkpoint_memory", STRANGERS),
    ),
    mutant(
        "what a client has brought is closed with it",
        *("local_socket", "            close_aside(fd)\n\n    def close", "            pass\n\n    def close"),
        *("checkpoint_memory", "what_a_client_brings_is_closed_with_it"),
    ),
    mutant(
        OTHERS,
        *("local_socket", "if _uid_of(connection) != os.geteuid():", "if False:"),
        *("checkpoint_memory", "another_user_is_not_answered"),
    ),
    mutant(
        "an event waits until the amount has settled",
        *("checkpoint_memory", 'clock.now() + SETTLE\n        return ""', 'clock.now()\n        return ""'),
        *("checkpoint_memory", "events_tell_the_amount_when_it_has_settled"),
    ),
    mutant(
        "why a worker is stopped needs no store",
        *("round_check", "if client.line == STOP:", "if False:"),
        *("round_check", "who_asks_why_it_is_stopped_is_answered_at_once"),
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    if one.rule == OTHERS and os.geteuid():
        pytest.skip("only root can become another user")
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""
