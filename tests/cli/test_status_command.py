"""``elastirun status``: when the word is the command, which options say where to look, and what is printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastirun import standard_streams
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.status.job_status import JobStatus
from elastirun.agent.status.reader import Found, Target
from elastirun.cli import main, status_command
from elastirun.cli.subcommands import NOTHING_FOUND
from elastirun.config import Endpoint
from tests.support.cluster import free_port
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SECRET = "correct horse battery staple"
JOB = JobStatus("job7", "node0:29400", "running", 3, "why", "", 4, 1, 2, 0, 0, 3, "", (), (), "", (), (), (), (), (), ())

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run ``main`` in an empty folder. A stand-in for the reader returns what it is given, one look after the other."""
    targets: list[Target] = []
    looks: list[Found] = []

    class Reader:
        def __init__(self, target: Target) -> None:
            targets.append(target)

        def look(self) -> Found:
            return looks.pop(0)

        def close(self) -> None: ...

    monkeypatch.setattr(status_command, "StatusReader", Reader)
    monkeypatch.chdir(tmp_path)
    for dest in (*status_command.SAME_AS_LAUNCH, "module", "no_python"):
        monkeypatch.delenv(f"PET_{dest.upper()}", raising=False)

    def call(*argv: str, found: tuple[Found, ...] = (Found((JOB,)),), **environ: str) -> SimpleNamespace:
        looks[:] = found
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as exit_:
            main.main(argv)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=exit_.value.code, out=out, err=err, target=targets[-1] if targets else None)

    return call


def bad(result: SimpleNamespace, *parts: str, status: int = ExitCode.USAGE) -> None:
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith("elastirun status: ") and result.err.count("\n") == 1, result.err
    assert all(part in result.err for part in parts), result.err


# --- the word


def test_the_word_is_the_command(run: Run) -> None:
    result = run("status", "--rdzv-endpoint=node0")
    assert (result.status, result.err) == (0, "") and result.out.startswith("job       job7: running\n")


@pytest.mark.parametrize("path", ["status", "status/__main__.py"])
def test_a_script_that_is_called_so_is_started(run: Run, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).touch()
    monkeypatch.setattr(main, "_prepare", lambda argv, warn: 5)
    result = run("status", "--rdzv-endpoint=node0")
    assert (result.status, result.target) == (5, None)


@pytest.mark.parametrize("before", ["--standalone", "--no-python", "--"])
def test_the_word_after_an_option_is_a_script(run: Run, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_prepare", lambda argv, warn: 5)
    assert run(before, "status").status == 5


@pytest.mark.parametrize("name", ["PET_MODULE", "PET_NO_PYTHON"])
def test_where_a_variable_says_what_the_script_is_the_word_is_a_script(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("status", "--rdzv-endpoint=node0", **{name: "0"}).status == 0
    monkeypatch.setattr(main, "_prepare", lambda argv, warn: 5)
    assert run("status", **{name: "1"}).status == 5


def test_a_folder_that_is_called_so_is_no_script(run: Run) -> None:
    Path("status").mkdir()
    assert run("status", "--rdzv-endpoint=node0").status == 0


# --- the endpoints and the job that the options name


def test_where_no_job_is_named_the_advice_is_to_name_it(run: Run) -> None:
    bad(run("status", "--rdzv-endpoint=node0", found=(Found(),)), "give the job's name (--rdzv-id), if its store has moved", status=4)
    assert "--rdzv-id" not in run("status", "a", "--rdzv-endpoint=node0", found=(Found(),)).err


@pytest.mark.parametrize(
    ("options", "endpoints", "job"),
    [
        ("--rdzv-endpoint=node0", ["node0:29400"], None),
        ("--rdzv-endpoint node0:1,node1 --rdzv-id=a", ["node0:1", "node1:29400"], "a"),
        ("--rdzv_endpoint=node0 a", ["node0:29400"], "a"),
        ("a --endpoint=[fd00::1]:7", ["[fd00::1]:7"], "a"),
        ("--rdzv-endpoint=node0 --rdzv-backend=static", ["node0:29500"], None),
        ("--rdzv-endpoint=node0 --rdzv-backend=c10d --rdzv-id=none", ["node0:29400"], None),
        ("--master-addr=node0", ["node0:29500"], None),
        ("--master-addr=node0 --master-port=7", ["node0:7"], None),
        ("--master-addr=node1 --rdzv-endpoint=node0", ["node0:29400"], None),
    ],
)
def test_the_options_of_a_launch_say_where_to_look(run: Run, options: str, endpoints: list[str], job: str | None) -> None:
    target = run("status", *options.split()).target
    assert ([str(one) for one in target.endpoints], target.job, target.token) == (endpoints, job, None)


def test_etcd_has_the_credentials_of_the_launch(run: Run) -> None:
    options = "a --rdzv-backend=etcd --rdzv-endpoint=https://e0,https://e1:9 --rdzv-conf=cacert=ca.pem,prefix=x"
    target = run("status", *options.split()).target
    assert (target.endpoints, target.job, target.names) == ((), "a", ("e0:2379", "e1:9"))
    assert (target.etcd.tls, target.etcd.ca_cert, target.etcd.prefix) == (True, "ca.pem", "/x/")


def test_without_an_endpoint_only_agents_on_this_machine_are_asked(run: Run) -> None:
    assert run("status").target == Target() and run("status", "a").target == Target(job="a")
    result = run("status", found=(Found(),))
    bad(result, "no job on this machine: no agent of this user runs it; give --rdzv-endpoint=HOST", status=NOTHING_FOUND)


@pytest.mark.parametrize(("words", "job"), [((), "a job"), (("a",), "job 'a'")])
def test_a_job_of_this_machine_whose_store_does_not_answer_is_not_said_to_be_missing(run: Run, words: tuple[str, ...], job: str) -> None:
    result = run("status", *words, found=(Found(problems=("node0:29400: no answer of the store",)),))
    bad(result, f"{job} has agents on this machine, but cannot be shown: node0:29400: no answer", status=NOTHING_FOUND)


def test_a_screen_that_cannot_be_written_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write = standard_streams.write
    monkeypatch.setattr(standard_streams, "write", lambda name, text: write(name, text) if name == "stderr" else OSError(28, "No space"))
    result = run("status")
    assert (result.status, result.err) == (ExitCode.FAILED, "elastirun: cannot write to stdout: No space\n")


def test_its_variables_do_so_too_and_options_take_precedence(run: Run) -> None:
    target = run("status", PET_RDZV_ENDPOINT="node0", PET_RDZV_ID="a").target
    assert (target.endpoints, target.job) == ((Endpoint("node0", 29400),), "a")
    assert run("status", "b", "--rdzv-endpoint=node1").target == Target((Endpoint("node1", 29400),), "b")


def test_the_token_is_read(run: Run) -> None:
    Path("secret").write_text(SECRET)
    assert run("status", "--rdzv-endpoint=node0", "--token-file=secret").target.token == SECRET.encode()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--rdzv-endpoint=node0 --rdzv-backend=etcd --rdzv-conf=user=a", ["--rdzv-conf: user is given without password_file"]),
        ("--rdzv-endpoint=node0:x", ["--rdzv-endpoint", "no port number"]),
        ("--rdzv-endpoint=node0 --token-file=none", ["--token-file", "cannot be read"]),
        ("--rdzv-endpoint=node0 a --rdzv-id=b", ["--rdzv-id=b and 'a' are two jobs"]),
        ("--rdzv-endpoint=node0 a b", ["status --help"]),
        ("--rdzv-endpoint=node0 --nnodes=2", ["--nnodes", "status --help"]),
        ("--rdzv-endpoint=node0 --watch=0", ["--watch: 0 seconds is too short"]),
        ("--rdzv-endpoint", ["--rdzv-endpoint"]),
    ],
)
def test_bad_input_is_one_line(run: Run, options: str, parts: list[str]) -> None:
    bad(run("status", *options.split()), *parts)


# --- the output


def test_json_is_one_object(run: Run) -> None:
    result = run("status", "--rdzv-endpoint=node0", "--json")
    assert (result.status, result.out.count("\n")) == (0, 1)
    found = json.loads(result.out)
    assert (found["v"], found["jobs"][0]["state"], found["problems"]) == (1, "running", [])
    result = run("status", "--rdzv-endpoint=node0", "--json", found=(Found(problems=("why",)),))
    assert (result.status, json.loads(result.out)["problems"]) == (NOTHING_FOUND, ["why"])


@pytest.mark.parametrize(
    ("found", "status", "parts"),
    [
        (Found(problems=("node0:29400: refused",)), NOTHING_FOUND, ["no job 'a' at node0:29400: node0:29400: refused; give "]),
        (Found(others=("b", "c\x1b")), NOTHING_FOUND, ["the store there has 'b', 'c\\x1b'; give "]),
        (Found(), NOTHING_FOUND, ["nothing of it is there"]),
        (Found(problems=("why",), unreadable=("not signed",)), ExitCode.ENVIRONMENT, ["not signed"]),
    ],
)
def test_where_no_job_is_found_one_line_says_what_was_looked_at(run: Run, found: Found, status: int, parts: list[str]) -> None:
    bad(run("status", "a", "--rdzv-endpoint=node0", found=(found,)), *parts, status=status)


@pytest.mark.parametrize("options", [["--watch"], ["--watch", "a"], ["--watch=7"], ["--watch", "7"]])
def test_watching_goes_on_whatever_is_found(run: Run, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise SystemExit(130)  # Ctrl-C, as early_signals.py handles it

    monkeypatch.setattr(status_command.time, "sleep", pause)
    result = run("status", "--rdzv-endpoint=node0", *options, found=(Found((JOB,)), Found(problems=("refused",)), Found((JOB,))))
    assert (result.status, result.err) == (130, "")
    assert result.out.count("job7: running") == 2 and result.out.count("refused") == 1 and "\x1b" not in result.out
    assert pauses == [7.0 if "7" in options[-1] else 2.0] * 3


@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_gets_a_clock_colours_and_no_more_than_fits(run: Run, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(seconds: float) -> None:
        raise SystemExit(130)

    monkeypatch.setattr(status_command.time, "sleep", pause)
    monkeypatch.setattr(standard_streams.os, "isatty", lambda fd: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    found = Found(tuple(replace(JOB, job=f"job{number}") for number in range(9)))
    size = {"LINES": "12", "COLUMNS": "60"}
    text = run("status", "--rdzv-endpoint=node0", "--watch", found=(found,), **environ, **size).out
    assert text.startswith(status_command.CLEAR) and text.count("\n") <= 11
    assert re.match(r"\d\d:\d\d:\d\d  9 jobs, every 2 s, Ctrl-C ends\n", text.removeprefix(status_command.CLEAR))
    assert "job0" in text and "and 8 more jobs: job1 running" in text
    assert ("\x1b[32mrunning" in text) == (not environ)
    assert ("\x1b[" in run("status", "--rdzv-endpoint=node0", **environ, **size).out) == (not environ), "also one look"


def test_a_file_or_pipe_gets_the_clock_and_neither_colours_nor_limits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(seconds: float) -> None:
        raise SystemExit(130)

    monkeypatch.setattr(status_command.time, "sleep", pause)
    found = Found(tuple(replace(JOB, job=f"job{number}") for number in range(9)))
    text = run("status", "--rdzv-endpoint=node0", "--watch", found=(found,), LINES="12").out
    assert "\x1b" not in text and all(f"job{number}: running" in text for number in range(9))
    assert re.match(r"\d\d:\d\d:\d\d  9 jobs", text)


def test_watching_ends_when_nobody_reads_the_screen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_streams, "write", lambda name, text: BrokenPipeError())
    assert run("status", "--rdzv-endpoint=node0", "--watch").status == ExitCode.FAILED


def test_help_names_every_option(run: Run) -> None:
    result = run("status", "--help", PET_RDZV_ENDPOINT="no:port")
    assert (result.status, result.err) == (0, "") and max(map(len, result.out.splitlines())) <= 100
    assert all(f" {name}" in result.out for name in ("--rdzv-endpoint", "--rdzv-id", "--token-file", "--json", "--watch"))


# --- a real process


def process(*argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, **settings)


def test_a_real_process_without_torch() -> None:
    result = process("-m", "elastirun", "status", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    assert (result.returncode, result.stdout) == (NOTHING_FOUND, "")
    assert result.stderr.startswith("elastirun status: no job at 127.0.0.1:") and "refused" in result.stderr
    code = "import sys; from elastirun.cli import main; sys.argv[1:] = ['status', '--rdzv-endpoint=127.0.0.1:1']\n"
    code += "try: main.main()\nexcept SystemExit: print('torch' in sys.modules)"
    assert process("-c", code).stdout == "False\n"
