"""The page of a report: one file, escaped, and drawn by a real browser without an error; and the command that writes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastirun.cli import main, report_command
from tests.report.events import Agent, two_nodes

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
    """The texts of a page outside of scripts, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.loads, self.scripts, self._in = "", list[str](), 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in not in ("script", "style"):
            self.text += data


def test_the_page_is_one_file_and_what_events_say_is_text_in_it(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    hostile = '</script><script>alert(1)</script><img src="https://example.org/x">'
    agents = two_nodes()
    agents[0].name = hostile
    for line in agents[0].lines:
        line["name"] = hostile
    for number, agent in enumerate(agents):
        agent.name = f"safe{number}"
        agent.save(tmp_path / "logs")
    result = run("logs")
    assert (result.status, result.err) == (0, "") and result.out.endswith("Written: 'report.html'\n")
    text = (tmp_path / "report.html").read_text()
    parts = Parts()
    parts.feed(text)
    assert parts.loads == [], "a page that opens offline loads nothing"
    assert "alert(1)" in parts.text, "shown as text"
    assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.S) and "<script>alert" not in text
    assert "Most was lost" in parts.text and "rank 1 failed <b>here</b>" in parts.text
    assert os.stat(tmp_path / "report.html").st_mode & 0o777 == 0o600, "as the logs"


def test_without_plotly_the_summary_is_printed_and_one_line_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("plotly")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    save(tmp_path / "logs")
    result = run("logs")
    assert result.status == 3 and "Most was lost" in result.out and not (tmp_path / "report.html").exists()
    assert result.err == f"elastirun report: {report_command.LIBRARY}\n"


@pytest.mark.parametrize(
    ("argv", "status", "part"),
    [
        ((), 2, "give the folders of the logs"),
        (("--no-such",), 2, "(see elastirun report --help)"),
        (("no",), 2, "there is no folder 'no'"),
        (("empty",), 4, "no events in 'empty': no events.jsonl is in or below them"),
        (("bad",), 4, "bad/events.jsonl: 1 line that cannot be read; line 1: not JSON"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, tmp_path: Path, argv: tuple[str, ...], status: int, part: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "events.jsonl").write_bytes(b"\x00\x1b[2J\xff\n")
    result = run(*argv)
    assert (result.status, result.out) == (status, "") and result.err.count("\n") == 1
    assert result.err.startswith("elastirun report: ") and part in result.err and result.err.strip().isprintable()


def test_a_folder_that_cannot_be_written_to_is_one_line(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
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
def test_a_browser_draws_the_lanes_without_an_error(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    save(tmp_path / "logs")
    assert run("logs").status == 0
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", f"file://{tmp_path}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-3000:]
    bars = re.findall(r'<g class="trace bars".*?</g></g></g>', done.stdout, re.S)
    assert len(bars) == 8, "a trace for each state"
    assert done.stdout.count('class="point"') >= 20, "each segment of each lane"
    titles = set(re.findall('data-title="([^"]*)"', done.stdout))
    assert len(titles) == 6 and "Zoom" in titles and not [title for title in titles if "loud" in title], "no button sends data away"
    for name in ("waiting for nodes", "starting", "training", "steps done again", "stopping", "restarting"):
        assert f">{name}</text>" in done.stdout, "the legend"
