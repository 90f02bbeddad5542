"""The page of a report: one small file without scripts, escaped, with links that lead somewhere; and the command that writes it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastirun.agent.observe.node_states import NodeState
from elastirun.cli import main
from elastirun.report import picture
from elastirun.report.story import Fault, Segment
from tests.report.events import NOON, Agent, two_nodes
from tests.support.until import PATIENCE

RUNNING, STOPPING, RESTARTING, STARTING = NodeState.RUNNING, NodeState.STOPPING, NodeState.RESTARTING, NodeState.STARTING
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome", "chrome"))), None)
Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as exit_:
            main.main(("report", *argv))
        out, err = capsys.readouterr()
        return SimpleNamespace(status=exit_.value.code, out=out, err=err)

    return call


def save(folder: Path, agents: list[Agent] | None = None) -> None:
    for agent in agents or two_nodes():
        agent.save(folder)


class Parts(HTMLParser):
    """The texts of a page outside of styles, what it would load, its links and ids, and the boxes of each kind of row."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.loads, self.links, self.ids = "", list[str](), list[str](), list[str]()
        self.scripts, self._in, self.rows = 0, "", list[tuple[str, list[str]]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its, self._in = dict(attrs), tag
        kind = its.get("class") or ""
        self.scripts += tag == "script" or any(name.startswith("on") for name in its)
        self.loads += [value or "" for name, value in attrs if name == "src" or (name == "href" and not (value or "").startswith("#"))]
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "div" and kind.startswith("row "):
            self.rows.append((kind.split()[1], []))
        elif tag == "i" and self.rows and "left:" in (its.get("style") or ""):
            self.rows[-1][1].append(kind)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in != "style":
            self.text += data


def parts_of(path: Path) -> Parts:
    parts = Parts()
    parts.feed(path.read_text())
    assert (parts.loads, parts.scripts) == ([], 0), "a page that opens offline loads nothing and runs nothing"
    assert {link[1:] for link in parts.links} <= {*parts.ids} and len({*parts.ids}) == len(parts.ids)
    return parts


def test_the_page_is_one_file_and_what_events_say_is_text_in_it(run: Run, tmp_path: Path) -> None:
    hostile = '</script><script>alert(1)</script><img src="https://example.org/x" onerror="alert(2)">\'"</style>'
    agents = two_nodes()
    agents[0].at(0, "start", job=hostile, command=hostile, version=hostile, python=hostile, torch=hostile)
    agents[0].lines.insert(0, agents[0].lines.pop())
    for line in agents[0].lines:
        line["name"] = hostile
        line.update({name: hostile for name in ("reason", "cause", "by", "verdict", "outcome") if name in line})
    for number, agent in enumerate(agents):
        agent.name = f"safe{number}"
        agent.save(tmp_path / "logs")
    result = run("logs")
    assert (result.status, result.err) == (0, "") and result.out.endswith("Written: 'report.html'\n")
    text, parts = (tmp_path / "report.html").read_text(), parts_of(tmp_path / "report.html")
    assert "alert(1)" in parts.text, "shown as text"
    assert "<img" not in text and "<script" not in text
    assert "default-src 'none'" in text, "and the browser would refuse both"
    assert "Most was lost" in parts.text and "rank 1 failed: exit code 1" in parts.text
    assert os.stat(tmp_path / "report.html").st_mode & 0o777 == 0o600, "as the logs"


def test_the_page_names_the_job_and_has_four_large_numbers(run: Run, tmp_path: Path) -> None:
    agents = two_nodes()
    start = {"job": "job7", "command": "train.py --lr=1", "version": "9.8", "python": "3.12.1"}
    for number, agent in enumerate(agents):
        agent.at(agent.lines[0]["mono"] - agent.mono, "start", **start, torch=f"2.{number}")
        agent.lines.insert(0, agent.lines.pop())
    save(tmp_path / "logs", agents)
    assert run("logs").out.startswith("Job job7: 2023-")
    text, parts = (tmp_path / "report.html").read_text(), parts_of(tmp_path / "report.html")
    assert "<h1>job7</h1>" in text and "<code>train.py --lr=1</code>" in text
    assert "elastirun 9.8 · Python 3.12.1 · torch 2.0, 2.1, 2.2" in parts.text
    numbers = re.findall(r"<div><b>([^<]*)</b><span>([^<]*)</span></div>", text)
    assert numbers == [
        ("59.7 %", "of the nodes&#x27; time: training that counted"),
        ("75.0 s", "lost, of 4 min 13 s of all nodes"),
        ("100", "steps"),
        ("3", "rounds ended early"),
    ]


def test_rows_and_marks_have_the_same_numbers_the_costliest_first(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    run("logs")
    text, parts = (tmp_path / "report.html").read_text(), parts_of(tmp_path / "report.html")
    assert [one for one in parts.ids if one[0] in "fm" and one[1:].isdigit()] == ["m1", "m2", "m3", "f1", "f2", "f3"]
    assert re.search(r'<tr id="f1"><td><a class="number" href="#m1">1</a> </td><td>22:14:10</td><td>1</td><td>failure</td>', text)
    (lost,) = re.findall(r"<tr><td>a worker failed</td>.*", text)
    assert '<i class="stopping" style="width:33.33%"></i><i class="restarting" style="width:25.00%"></i>' in lost, "colours of the picture"
    assert 'href="#m1">1</a> 21.0 s at 22:14:10' in lost


def test_each_node_has_a_lane_with_a_box_for_each_state(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    run("logs")
    parts = parts_of(tmp_path / "report.html")
    lanes = [boxes for kind, boxes in parts.rows if kind == "lane"]
    assert len(lanes) == 2, "the second agent of b goes on in the lane of the first"
    assert lanes[0][:7] == ["joining", "starting", "running", "stopping", "restarting", "starting", "repeated"]
    assert lanes[1].count("gone") == 1 and "unknown" in lanes[1]


def test_a_page_with_too_much_of_all_stays_below_a_megabyte_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    agents = []
    for node in range(4):
        agent = Agent(f"n-{node}", f"node{node}")
        for number in range(1, 1102):
            begin = 1000.0 * number
            agent.start(begin, number).broken(begin + 900, number, "failure", "why " * 75)
            if number < 400:
                lines = ["x" * 400] * 5
                agent.at(begin, "failure", round=number, rank=1, local_rank=1, pid=7, code=1, blame="victim", note="", lines=lines)
            agent.spent(begin + 950 + node, number, "failure", starting=20, repeated=5, training=800 + node)
        agents.append(agent.end(1_102_000, 1_101_000))
    save(tmp_path / "logs", agents)
    assert run("logs").status == 0
    size, parts = (tmp_path / "report.html").stat().st_size, parts_of(tmp_path / "report.html")
    assert 700_000 < size < 1_000_000
    boxes = {kind: sum(len(found) for row, found in parts.rows if row == kind) for kind, _ in parts.rows}
    assert boxes["size"] == 1000 and 2000 < boxes["lane"] <= 4000
    for note in (
        "The picture merges neighbouring states shorter than",
        "The picture has the number of workers of the first 1000 of 1101 rounds",
        "The page has 400 of 1101 rounds that ended early, the costliest ones",
        "The page has 300 of 1596 failures, the first ones",
    ):
        assert note in parts.text, note


def test_a_trace_is_written_besides(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    result = run("logs", "--trace=trace.json")
    assert (result.status, result.err) == (0, "") and result.out.endswith("Written: 'report.html', 'trace.json'\n")
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize(
    ("argv", "status", "part"),
    [
        ((), 2, "give the folders of the logs"),
        (("--no-such",), 2, "(see elastirun report --help)"),
        (("no",), 2, "there is no folder 'no'"),
        (("logs", "--trace="), 2, "--trace is empty"),
        (("logs", "--trace=./report.html"), 2, "--trace is the file of the page"),
        (("logs", "--out=logs/run/events.jsonl"), 2, "is a file of events, which the report is made from"),
        (("empty",), 4, "no events in 'empty': no events.jsonl is in or below them"),
        (("bad",), 4, "bad/events.jsonl: 1 line that cannot be read; line 1: not JSON"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, tmp_path: Path, argv: tuple[str, ...], status: int, part: str) -> None:
    save(tmp_path / "logs")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "events.jsonl").write_bytes(b"\x00\x1b[2J\xff\n")
    result = run(*argv)
    assert result.status == status and result.err.count("\n") == 1 and "Written" not in result.out
    assert result.err.startswith("elastirun report: ") and part in result.err and result.err.strip().isprintable()


def test_a_link_stays_one_and_a_pipe_is_written_to(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    (tmp_path / "link").symlink_to("page.html")
    os.mkfifo(tmp_path / "pipe")
    reads = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reads, fcntl.F_SETPIPE_SZ, 1 << 20)
    try:
        assert [run("logs", f"--out={name}").status for name in ("link", "pipe")] == [0, 0]
        assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()
        assert os.read(reads, 1 << 20) == (tmp_path / "page.html").read_bytes()
    finally:
        os.close(reads)


def test_a_folder_that_cannot_be_written_to_is_one_line(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    for out in ("no/such/report.html", "logs"):
        result = run("logs", f"--out={out}")
        assert result.status == 3 and f"cannot write '{out}': " in result.err and result.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_help_and_a_script_that_is_called_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--help").out.startswith("usage: elastirun report DIR... [--out=report.html]")
    (tmp_path / "report").touch()
    monkeypatch.setattr(main, "_prepare", lambda argv, warn: 5)
    assert run("logs").status == 5


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_a_browser_finds_no_error_and_refuses_nothing(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    assert run("logs").status == 0
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", f"file://{tmp_path}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-3000:]
    assert done.stdout.count('class="running" style') >= 5


def test_short_neighbours_are_merged_into_the_longest_of_them_and_no_time_is_left_out() -> None:
    ends = [0, 100, 101, 103, 104, 200, 201, 300]
    states = [RUNNING, STOPPING, RESTARTING, STARTING, RUNNING, STOPPING, RUNNING]
    segments = [Segment(state, begin, end, 1) for state, begin, end in zip(states, ends, ends[1:], strict=False)]
    assert [(one.state, one.begin, one.end) for one in picture.merged(segments, 10)] == [
        (RUNNING, 0, 100),
        (RESTARTING, 100, 104),
        (RUNNING, 104, 200),
        (STOPPING, 200, 201),
        (RUNNING, 201, 300),
    ]
    assert picture.merged(segments, 0.5) == segments and len(picture.merged(segments, 1000)) == 1


def test_of_marks_that_meet_the_costliest_is_shown_and_the_others_at_a_larger_zoom() -> None:
    faults = [Fault(0, number, at, "failure", "", number=number) for number, at in enumerate((50.0, 51.0, 50.2, 20.0, 50.0), 1)]
    assert picture.shown_from(faults, picture.Axis(0, 100)) == {1: 1, 4: 1, 2: 4, 3: 16}


@pytest.mark.parametrize(
    ("took", "count", "expected"),
    [
        (72.0, 7, ["22:13:20", "22:13:40", "22:14:00", "22:14:20"]),
        (0.25, 3, ["22:13:20.0", "22:13:20.1", "22:13:20.2"]),
        (7200.0, 3, ["23:00", "00:00"]),
        (30 * 86400.0, 5, ["2023-11-19", "2023-11-25", "2023-12-01", "2023-12-07", "2023-12-13"]),
        (0.0, 7, ["22:13:20.0"]),
    ],
)
def test_ticks_are_round_times(took: float, count: int, expected: list[str]) -> None:
    assert [text for _, text in picture.ticks(picture.Axis(NOON, NOON + took), count)] == expected
