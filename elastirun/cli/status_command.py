"""The command ``elastirun status``: shows how a job stands. See docs/status.md.

The command reads the store where the nodes of the job meet, writes nothing, and imports no torch. Bad input ends in one line on stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict

import click

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.output.agent_lines import shows_colours
from elastirun.agent.processes.preload import keep_warm
from elastirun.agent.status.job_status import JobStatus
from elastirun.agent.status.reader import UNNAMED, Found, StatusReader, Target
from elastirun.agent.status.screen import painted, screen, watched
from elastirun.cli import parse
from elastirun.cli.given_options import GivenOptions
from elastirun.cli.options import BY_DEST
from elastirun.cli.rendezvous_options import C10D_PORT, STATIC_PORT, etcd_of
from elastirun.cli.secret_files import read_token
from elastirun.cli.subcommands import read_options, show
from elastirun.cli.warm_command import line
from elastirun.config import Endpoint, Etcd
from elastirun.errors import NothingFound, StartError, UsageError

STDOUT = 1  # the descriptor
INTERVAL = "2"  # seconds from one screen to the next, by default
FORMAT = 1  # of the JSON; raised when a field changes its meaning
CLEAR = "\x1b[H\x1b[2J"  # puts the cursor at the top left, and erases the screen
SAME_AS_LAUNCH = ("rdzv_endpoint", "rdzv_id", "rdzv_backend", "rdzv_conf", "master_addr", "master_port", "token_file")
OWN = (("--json", "one JSON object"), (f"--watch[={INTERVAL}]", "draw the screen again each so many seconds, until Ctrl-C"))
_HELP = """\
Shows how a job stands: round, nodes, ranks, failures, and who is waited for. Reads only.
The options are those of the launch, which also come from its variables.

  elastirun status                                  the jobs of your agents on this machine
  elastirun status job7 --watch                     one of them, until Ctrl-C
  elastirun status --rdzv-endpoint=node0            from elsewhere: all jobs that meet there
  elastirun status job7 --rdzv-endpoint=node0,node1 the same as --rdzv-id=job7

Exit status: 0 shown; 2 wrong use; 3 the records cannot be read (is --token-file missing?);
4 no such job there.
"""


def main(argv: Sequence[str]) -> int:
    """Show the status that ``argv`` asks for. Return the exit code. Raises UsageError, StartError and NothingFound."""
    argv = [*argv, ""]
    words = [f"{word}={INTERVAL}" if word == "--watch" and not _is_number(argv[i + 1]) else word for i, word in enumerate(argv[:-1])]
    given = read_words("status", words, [click.Option(["json", "--json"], is_flag=True), click.Option(["watch", "--watch"])])
    if "help" in given:
        return show(f"usage: elastirun status [JOB] [OPTIONS]\n\n{_HELP}\n{options_of_job(OWN)}")
    as_json, every = "json" in given, given.get("watch")
    seconds = None if every is None else parse.value_of("--watch", every, parse.seconds(0.1))
    target = target_of(given)
    with closing(StatusReader(target)) as reader:
        if seconds is None:
            return _show(reader.look(), target, as_json)
        while (code := _show_again(reader.look(), target, as_json, seconds)) == ExitCode.OK:
            time.sleep(seconds)
        return code


def read_words(name: str, words: Sequence[str], own: Sequence[click.Parameter]) -> dict[str, str]:
    """Return the options of a command on a job by dest as text, a flag as "1". ``own``: what only this command has.

    Errors: ``UsageError``.
    """
    params: list[click.Parameter] = [*own]
    params += [click.Option([dest, BY_DEST[dest].name, *(["--endpoint"] if dest == "rdzv_endpoint" else [])]) for dest in SAME_AS_LAUNCH]
    params += [click.Argument(["job"], required=False)]
    read = read_options(name, params, words, token_normalize_func=lambda name: name.replace("_", "-"))
    found = {dest: "1" if value is True else value for dest, value in read.items() if value not in (None, False)}
    if (job := found.pop("job", None)) is not None:
        if found.get("rdzv_id", job) != job:
            raise UsageError(f"--rdzv-id={found['rdzv_id']} and {parse.quote(job)} are two jobs; give one")
        found["rdzv_id"] = job
    return found


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def target_of(given: Mapping[str, str]) -> Target:
    """Return where to look by what ``read_words`` has read, and by the rules of a launch. Errors: ``UsageError``."""
    options = GivenOptions({dest: given[dest] for dest in SAME_AS_LAUNCH if dest in given}, os.environ)
    backend = options.read("rdzv_backend", parse.choice("c10d", "static", "etcd", "etcd-v2"))
    conf = options.read("rdzv_conf", parse.rdzv_conf)
    etcd: Etcd | None = None
    endpoints: tuple[Endpoint, ...] = ()
    if backend.startswith("etcd") and options.has_text("rdzv_endpoint"):
        etcd = etcd_of(options, conf)
    elif options.has_text("rdzv_endpoint"):
        port = STATIC_PORT if backend == "static" and options.is_given("rdzv_backend") else C10D_PORT
        endpoints = options.read("rdzv_endpoint", lambda text: parse.endpoints(text, port))
    elif options.is_given("master_addr"):
        port = options.optional("master_port", parse.integer(1, 65535)) or STATIC_PORT
        endpoints = (Endpoint(options.read("master_addr", parse.host), port),)
    job = options.read("rdzv_id", parse.name)
    return Target(endpoints, job if job.strip() and job != UNNAMED else None, read_token(options), etcd)


def find_one(found: Found, target: Target) -> JobStatus:
    """Return the one job that was found. Raises UsageError for several, StartError and NothingFound for none."""
    running = [job for job in found.jobs if not job.over] or [*found.jobs]
    if len(running) > 1:
        raise UsageError(f"there are {len(running)} jobs: {', '.join(parse.quote(job.job) for job in running[:4])}; name one of them")
    if running:
        return running[0]
    raise _none(found, target)


def _show(found: Found, target: Target, as_json: bool) -> int:
    """Print what one look has found. Return the exit code. Raises StartError and NothingFound."""
    if found.jobs or as_json:
        written = show(_text(found, as_json) + ("" if as_json or target.names else _kept_warm()))
        if written != ExitCode.OK or found.jobs:
            return written
    raise _none(found, target)


def _show_again(found: Found, target: Target, as_json: bool, every: float) -> int:
    """Print what one of several looks has found, in the place of the screen before. Return 0 to go on."""
    if as_json:
        return show(_text(found, as_json=True))
    count = len(found.jobs)
    head = f"{time.strftime('%H:%M:%S')}  {count} job{'s' * (count != 1)}, every {every:g} s, Ctrl-C ends"
    text = "" if found.jobs else "; ".join(found.unreadable) or _no_job(found, target)
    if not sys.stdout.isatty():
        return show(f"{head}\n\n{text or _text(found, as_json=False)}\n")
    if text:
        return show(f"{CLEAR}{head}\n\n{text}")
    size = shutil.get_terminal_size()
    shown = watched(found.jobs, head, size.columns, size.lines)
    return show(CLEAR + (painted(shown) if shows_colours(STDOUT, os.environ) else shown))


def _text(found: Found, as_json: bool) -> str:
    if as_json:
        return json.dumps({"v": FORMAT} | asdict(found))
    return painted(screen(found.jobs)) if shows_colours(STDOUT, os.environ) else screen(found.jobs)


def _kept_warm() -> str:
    """Return a line for each fork server of this user that waits for a command, which takes memory."""
    with suppress(OSError, keep_warm.NotWarm):
        return "".join(f"\nkept warm: {line(server)}; elastirun warm stop ends it" for server in keep_warm.servers())
    return ""


def _none(found: Found, target: Target) -> StartError | NothingFound:
    return StartError("; ".join(found.unreadable)) if found.unreadable else NothingFound(_no_job(found, target))


def _no_job(found: Found, target: Target) -> str:
    """Return a line that names the endpoints that were asked, why no job was found there, and the option to give."""
    what = "no job" if target.job is None else f"no job {parse.quote(target.job)}"
    if not target.names:
        if found.problems:  # of the stores that agents here name
            job = "a job" if target.job is None else f"job {parse.quote(target.job)}"
            return f"{job} has agents on this machine, but cannot be shown: {'; '.join(found.problems[:4])}"
        return f"{what} on this machine: no agent of this user runs it; give --rdzv-endpoint=HOST[:PORT], where its nodes meet"
    others = f"the store there has {', '.join(map(parse.quote, found.others[:4]))}" if found.others else ""
    why = "; ".join(found.problems[:4]) or others or "nothing of it is there"
    how = "the endpoint of the launch, or those of several nodes with commas between them, or ask on a node of the job"
    name = "the job's name (--rdzv-id), if its store has moved or is etcd, and " if target.job is None else ""
    return f"{what} at {', '.join(target.names)}: {why}; give {name}{how}"


def options_of_job(more: Sequence[tuple[str, str]] = ()) -> str:
    """Return the part of a help text on the options that say which job is meant, and ``more``."""
    lines = [(f"{BY_DEST[dest].name}={BY_DEST[dest].metavar}", f"as for a launch [{BY_DEST[dest].env}]") for dest in SAME_AS_LAUNCH]
    lines += more
    return "\n".join(f"  {name:36}{text}" for name, text in lines)
