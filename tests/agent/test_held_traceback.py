"""Tests of agent/output/held_traceback.py and agent/failures/consequences.py."""

from __future__ import annotations

import math
from typing import cast

import pytest

from elastirun import clock
from elastirun.agent.failures.consequences import MOST_RANKS, Consequences, Victim, line
from elastirun.agent.output.held_traceback import HELD_LIMIT, HOLD, HeldTraceback, is_the_end
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import WorkerExit

PYTHON = b"Traceback (most recent call last):\n  File\nValueError: no\n"
BEGINNINGS = [
    PYTHON,
    b"[rank3]: " + PYTHON,
    b"[rank3]:[E1129 17:45:03.123 ProcessGroupNCCL.cpp:616] watchdog\n",
    b"[W1129 17:45:03.123 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3)\n",
    b"terminate called after throwing an instance of 'c10::DistBackendError'\n",
]


class Screen:
    def __init__(self) -> None:
        self.text = b""
        self.held = HeldTraceback(self.write)

    def write(self, data: bytes) -> None:
        self.text += data


@pytest.mark.parametrize("text", BEGINNINGS)
def test_everything_from_the_first_line_of_last_words_waits(text: bytes) -> None:
    screen = Screen()
    screen.held.feed(b"step 1\n" + text)
    screen.held.feed(b"more\n")
    assert (screen.text, screen.held.holds) == (b"step 1\n", True)
    screen.held.show()
    assert (screen.text, screen.held.holds) == (b"step 1\n" + text + b"more\n", False)


WARNING = b"[W1129 17:45:03.123 socket.cpp:200] The hostname cannot be found\n"


@pytest.mark.parametrize("text", [b"loss 0.3\n", b"he said: " + PYTHON, WARNING, b"Password: ", b"\r 50%\r 51%"])
def test_any_other_output_does_not_wait(text: bytes) -> None:
    screen = Screen()
    screen.held.feed(text)
    assert (screen.text, screen.held.due) == (text, math.inf)


def test_a_traceback_in_the_middle_of_a_line_does_not_begin_one() -> None:
    screen = Screen()
    screen.held.feed(b"caught ")
    screen.held.feed(PYTHON)
    assert screen.text == b"caught " + PYTHON
    screen.held.feed(PYTHON)
    assert screen.held.holds


def test_what_is_held_has_a_limit_in_time_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    screen = Screen()
    screen.held.feed(PYTHON)
    assert screen.held.due == 100.0 + HOLD
    screen.held.feed(b"x" * HELD_LIMIT)
    assert (screen.held.holds, screen.held.due, len(screen.text)) == (False, math.inf, HELD_LIMIT + len(PYTHON))
    screen.held.feed(PYTHON)  # the next one is held again: the last byte ended no line, so this one is not at the beginning of a line
    assert not screen.held.holds
    screen.held.feed(PYTHON)
    screen.held.wait()
    assert (screen.held.due, screen.held.take(), screen.held.holds) == (math.inf, PYTHON, False)


CPP = b"[rank0]:[E1129 17:45:03.123 ProcessGroupNCCL.cpp:616] watchdog\nframe #0: c10::Error\n"


@pytest.mark.parametrize(
    ("before", "last"),
    [(b"", PYTHON), (PYTHON + b"INFO go on\n", PYTHON), (PYTHON + b"INFO go on\n", CPP + PYTHON), (b"", CPP + CPP), (b"", PYTHON + CPP)],
)
def test_the_last_words_are_the_last_traceback_and_the_errors_before_it(before: bytes, last: bytes) -> None:
    screen = Screen()
    screen.held.feed(before + last)
    assert (screen.held.take_last_words(), screen.text) == (last, before)


def test_a_traceback_is_the_end_unless_something_was_written_after_it() -> None:
    assert is_the_end(PYTHON) and is_the_end(b"[rank0]: " + PYTHON + b"more of its message\n")
    assert not is_the_end(PYTHON + b"INFO go on\n")


def test_an_exception_behind_a_progress_bar_waits_if_torch_has_put_the_rank_in_front() -> None:
    screen = Screen()
    screen.held.feed(b"\r 50%|#####     |[rank1]: " + PYTHON)
    assert (screen.text, screen.held.holds) == (b"\r 50%|#####     |", True)


class Logs:
    """Stands in for ``RunLogs`` of workers whose output nobody keeps, by local rank."""

    def __init__(self, *texts: bytes) -> None:
        self.screens = [Screen() for _ in texts]
        for screen, text in zip(self.screens, texts, strict=True):
            screen.held.feed(text)

    def held(self, local_rank: int) -> HeldTraceback:
        return self.screens[local_rank].held

    def keep_traceback(self, local_rank: int, text: bytes) -> str:
        return ""


LOST = b"Traceback (most recent call last):\n  File\nConnectionResetError: reset\n"
ANOTHER = PYTHON + b"\nDuring handling of the above exception, another exception occurred:\n\n" + LOST


@pytest.mark.parametrize(
    ("text", "killed", "shown"),
    [(LOST, False, False), (LOST, True, False), (ANOTHER, False, True), (LOST + b"INFO go on\n", True, True)],
    ids=["lost its peers", "stopped at its end", "an exception before", "stopped after it had gone on"],
)
def test_a_traceback_that_may_be_the_cause_is_shown(text: bytes, killed: bool, shown: bool) -> None:
    logs, said = Logs(text), list[str]()
    victims = Consequences(cast(RunLogs, logs), said.append)
    victims.add(WorkerExit(0, 4, 99, 1, 1.0, killed_by_us=killed), ["Traceback (most recent call last):", "ConnectionResetError: reset"])
    victims.tell(cause_is_unknown=False)
    assert (logs.screens[0].text == text, said == []) == (shown, shown)


def test_if_the_cause_is_unknown_the_first_victim_is_shown() -> None:
    logs, said = Logs(LOST, LOST), list[str]()
    victims = Consequences(cast(RunLogs, logs), said.append)
    for local_rank in (1, 0):
        victims.add(WorkerExit(local_rank, local_rank, 99, 1, 1.0, killed_by_us=False), ["ConnectionResetError: reset"])
    victims.tell(cause_is_unknown=True)
    assert [screen.text for screen in logs.screens] == [b"", LOST]
    assert said == ["rank 0 ended because it lost its peers: ConnectionResetError: reset; --log-dir=FOLDER keeps its traceback"]


def test_the_line_on_those_that_lost_their_peers() -> None:
    one, two = Victim(0, 0, "PeerLost: gone"), Victim(2, 1, "OSError: closed")
    assert line([one], ["/l/0/traceback.log"]) == "rank 0 ended because it lost its peers: PeerLost: gone; its output: /l/0/traceback.log"
    both = "ranks 0, 2 ended because they lost their peers; rank 0: PeerLost: gone; their output: /l"
    assert line([one, two], ["/l/0/traceback.log", "/l/1/traceback.log"]) == both
    assert line([one, two], ["", ""]).endswith("PeerLost: gone; --log-dir=FOLDER keeps their tracebacks")
    assert f"{MOST_RANKS - 1} and 4 more ended" in line([Victim(n, n, "") for n in range(MOST_RANKS + 4)], [])
