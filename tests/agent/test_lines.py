"""Worker output in lines: the last lines, whole lines on the console, log files of limited size."""

from __future__ import annotations

import math
import os
import random
import re
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastirun import clock
from elastirun.agent.output.disk import DiskThread
from elastirun.agent.output.lines import (
    LAST_LINES,
    PARTIAL_LINE_DELAY,
    PARTIAL_LINE_LIMIT,
    PIECE_DELAY,
    LastLines,
    PrefixedLines,
    WholeLines,
    may_tear,
)
from elastirun.agent.output.log_files import MAX_LINE, LogFile, open_log
from tests.support.cluster import PATIENCE


def lines_of(*data: bytes) -> tuple[str, ...]:
    last = LastLines()
    for each in data:
        last.feed(each)
    return last.lines()


def test_the_last_lines() -> None:
    assert lines_of() == lines_of(b"") == ()
    assert lines_of(b"a\nb", b"c\n", b"\nd") == ("a", "bc", "", "d")
    assert lines_of(b"".join(b"%d\n" % i for i in range(100))) == tuple(str(i) for i in range(70, 100))
    assert lines_of(b"x\n" * LAST_LINES + b"y") == ("x",) * 29 + ("y",)
    assert lines_of(b"x" * 400, b"y" * 400, b"\nz") == ("x" * 400 + "y" * 100, "z")
    assert lines_of(b"\xff\xc3\xa9\x1b[31mred\x1b[0m\n") == ("\\xff\u00e9red",)


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    assert lines_of(b"0%\r50%", b"\r100%\ndone\r\n") == ("100%", "done")
    assert lines_of(*(b"%d%%\r" % i for i in range(101))) == ("100%",)
    assert lines_of(b"start\n", *(b"\r" + b"#" * 600 + b"%d" % i for i in range(99)), b"\rend") == ("start", "end")


def test_a_long_line_is_cut_into_lines() -> None:
    got: list[bytes] = []
    lines = PrefixedLines(b"> ", got.append)
    for _ in range(150):
        lines.feed(b"x" * 1024)
    assert sum(len(each) for each in got) > 128 * 1024  # output is written before the line ends
    lines.feed(b"\nshort\n" + b"y" * 70000 + b"\nz")
    lines.flush()
    lines.flush()
    sizes = [len(line) for line in b"".join(got).split(b"\n")]
    assert sizes == [65538, 65538, 150 * 1024 - 2 * 65536 + 2, 7, 65538, 70000 - 65536 + 2, 3, 0]


def test_lines_that_no_filter_finds_do_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no bytes, so the limit of the queue would not hold for them."""
    written: list[bytes] = []
    with selectors.PollSelector() as selector:
        disk = DiskThread(selector, pytest.fail)
        copy = log_file(tmp_path / "filtered", disk)
        monkeypatch.setattr(copy, "write", written.append)
        lines = PrefixedLines(b"> ", lambda data: None, [b"loss"], copy)
        for data in (b"step 1\n", b"lo", b"ss 2\nstep", b" 2\n"):
            lines.feed(data)
        copy.close()
        disk.close(PATIENCE)
    assert written == [b"> loss 2\n"]


class Prefixed:
    """Prefixed lines on a clock of their own. ``at``: what happens then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.got = 0.0, b""
        monkeypatch.setattr(clock, "now", lambda: self.now)
        self.lines = PrefixedLines(b"> ", self.write)

    def write(self, data: bytes) -> None:
        self.got += data

    def at(self, now: float, data: bytes = b"") -> bytes:
        """Return what is written at ``now`` of what is due, and of ``data``."""
        self.now, self.got = now, b""
        if now >= self.lines.due:
            self.lines.show_begun()
        if data:
            self.lines.feed(data)
        return self.got


def test_the_beginning_of_a_prefixed_line_is_shown_and_its_rest_is_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Prefixed(monkeypatch)
    assert screen.at(0, b"name? ") == b"" and screen.lines.due == PIECE_DELAY
    assert screen.at(0.1) == b""
    assert screen.at(PIECE_DELAY) == b"> name? \n" and screen.lines.due == math.inf
    assert screen.at(1, b"Ada\n") == b"> Ada\n"
    assert screen.at(2, b"name? ") + screen.at(3) + screen.at(4, b"\n\nnext\n") == b"> name? \n> \n> next\n"
    assert screen.at(5, b"one ") + screen.at(5.1, b"line\n") == b"> one line\n"


def test_of_a_bar_under_a_prefix_some_states_are_shown_and_the_last_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Prefixed(monkeypatch)
    shown = b"".join(screen.at(tenth / 10, b"\r%d%%" % tenth) for tenth in range(101))
    states = re.findall(rb"> (\d+)%\n", shown)
    assert len(states) == 10 and b"\r" not in shown
    assert screen.at(10.5, b"\n") == b"> 100%\n"
    assert screen.at(11, b"\r1%") + screen.at(12) + screen.at(13, b"\nend\r\n") == b"> 1%\n> end\r\n"


# ---- whole lines


def passed_on(*data: bytes) -> tuple[list[bytes], WholeLines]:
    got: list[bytes] = []
    lines = WholeLines(got.append)
    for each in data:
        lines.feed(each)
    return got, lines


def test_a_line_is_passed_on_in_one_piece() -> None:
    got, lines = passed_on(b"a\nb", b"c", b"\n", b"d\ne\n", b"f")
    assert got == [b"a\n", b"bc\n", b"d\ne\n"]
    assert time.monotonic() < lines.due <= time.monotonic() + PARTIAL_LINE_DELAY
    lines.flush()
    assert got[-1] == b"f" and lines.due == math.inf


def test_a_line_waits_longer_for_its_end_while_others_write() -> None:
    (_, line), (_, other) = passed_on(b"begun"), passed_on(b"whole\n")
    assert may_tear(line, [line, other], other.wrote + PARTIAL_LINE_DELAY - 0.01)
    assert not may_tear(line, [line, other], other.wrote + PARTIAL_LINE_DELAY), "they have stopped"
    late = line.begun + PARTIAL_LINE_LIMIT
    other.wrote = late
    assert may_tear(line, [line, other], late - 0.01) and not may_tear(line, [line, other], late), "a prompt is shown in the end"
    line.feed(b"\nbegun")
    assert not may_tear(line, [line], line.begun), "its own lines do not tear it"


def test_a_prefixed_line_waits_longer_while_others_write_and_a_bar_does_not() -> None:
    line, other = (PrefixedLines(b"> ", lambda data: None) for _ in range(2))
    line.feed(b"begun")
    assert not may_tear(line, [line, other], line.begun), "nobody writes"
    other.feed(b"whole\n")
    assert may_tear(line, [line, other], other.wrote) and not line.is_bar
    line.feed(b"\r50%")
    assert line.is_bar


def test_a_beginning_waits_from_when_it_came() -> None:
    got, lines = passed_on(b".")
    due = lines.due
    lines.feed(b".")
    assert lines.due == due and got == [], "dots that come one by one are shown in the end"
    lines.feed(b"\n.")
    assert lines.due >= due and got == [b"..\n"]
    lines.feed(b"\n")
    assert lines.due == math.inf


@pytest.mark.parametrize("data", [b"\r50%", b"50%\r", b"x\n\r1%", b"x" * MAX_LINE])
def test_a_progress_bar_and_a_very_long_line_do_not_wait(data: bytes) -> None:
    got, lines = passed_on(data)
    assert got == [data] and lines.due == math.inf


# ---- files


@pytest.fixture
def disk() -> Iterator[DiskThread]:
    with selectors.PollSelector() as selector:
        made = DiskThread(selector, pytest.fail)
        yield made
        made.close(60)
        assert not selector.get_map()


def log_file(path: Path, disk: DiskThread, limit: int = 0) -> LogFile:
    return LogFile(str(path), open_log(str(path)), disk, limit)


@pytest.mark.parametrize("seed", range(20))
def test_a_file_with_a_limit_keeps_the_newest_lines_whole(disk: DiskThread, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path, older = tmp_path / "log", tmp_path / "log.1"
    limit = rng.choice([MAX_LINE, MAX_LINE + 1, 100_000])
    file = log_file(path, disk, limit)
    sizes = rng.choice([[0, 1, 80], [2000], [30_000, 60_000, MAX_LINE - 20], [5, 40_000]])
    text = b"".join(b"%d " % i + b"x" * rng.choice(sizes) + b"\n" for i in range(5 * limit // (sum(sizes) // len(sizes) + 5)))
    at = 0
    while at < len(text):
        size = rng.choice([1, 100, 4096, 65536, 131072]) if len(text) - at < 300_000 else 65536
        file.write(text[at : at + size])
        at += size
        disk.drain(60)
        assert path.stat().st_size <= limit and (not older.exists() or older.stat().st_size <= limit)
    file.close()
    disk.drain(60)
    kept = older.read_bytes() + path.read_bytes()
    assert older.read_bytes().endswith(b"\n") and older.stat().st_size > limit - MAX_LINE
    assert text.endswith(kept) and kept[:1].isdigit() and text[-len(kept) - 1 :][:1] == b"\n", "nothing torn, nothing lost between"
    assert {each.stat().st_mode & 0o777 for each in (path, older)} == {0o600} and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("size", [1000, 65536, 1 << 20])
def test_a_line_without_end_is_cut(disk: DiskThread, tmp_path: Path, size: int) -> None:
    file = log_file(tmp_path / "log", disk, 100_000)
    for _ in range((1 << 20) // size):
        file.write(b"x" * size)
    file.write(b"\nend\n")
    file.close()
    disk.drain(60)
    kept = (tmp_path / "log.1").read_bytes() + (tmp_path / "log").read_bytes()
    assert kept == b"x" * (len(kept) - 5) + b"\nend\n" and 100_000 <= len(kept) <= 200_000


def test_a_file_that_somebody_has_taken_away(disk: DiskThread, tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", disk, MAX_LINE)
    file.write(b"x" * 60_000 + b"\n")
    disk.drain(60)
    (tmp_path / "log").unlink()
    file.write(b"y" * 60_000 + b"\n")
    file.close()
    disk.drain(60)
    assert (tmp_path / "log").read_bytes() == b"y" * 60_000 + b"\n"


def test_without_a_limit_a_file_grows(disk: DiskThread, tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", disk)
    for _ in range(40):
        file.write(b"x" * 9999 + b"\n")
    file.close()
    disk.drain(60)
    assert (tmp_path / "log").stat().st_size == 400_000 and len(list(tmp_path.iterdir())) == 1


def test_a_closed_file_writes_into_no_file_that_gets_its_number(disk: DiskThread, tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", disk)
    file.close()
    disk.drain(PATIENCE)
    others = [os.open(tmp_path / f"other_{i}", os.O_CREAT | os.O_WRONLY) for i in range(4)]
    file.write(b"late")
    file.close()
    disk.drain(PATIENCE)
    for fd in others:
        os.close(fd)  # raises if the second close has taken it
    assert not any((tmp_path / f"other_{i}").read_bytes() for i in range(4))


def test_a_full_disk_is_told_once() -> None:
    said: list[str] = []
    with selectors.PollSelector() as selector:
        disk = DiskThread(selector, said.append)
        file = log_file(Path("/dev/full"), disk)
        file.write(b"x")
        file.write(b"x")
        file.close()
        disk.close(60)
    assert said == ["warning: cannot write /dev/full: No space left on device; output that does not fit is lost there"]
