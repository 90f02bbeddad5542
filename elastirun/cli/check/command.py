"""The command ``elastirun check``: checks nodes and the network between them before a job. See docs/check.md.

It reads the options of a launch as a launch does, so that the nodes meet as those of the job would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import uuid
from collections.abc import Sequence
from dataclasses import replace

from elastirun import standard_streams
from elastirun.agent.check import table
from elastirun.agent.check.records import Result
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.host.cpus import usable_cpus
from elastirun.cli import command_line
from elastirun.cli.given_options import GivenOptions, MachineFacts
from elastirun.cli.main import check_command, count_devices, this_host
from elastirun.cli.options import Option
from elastirun.cli.parse import quote
from elastirun.cli.resolve import resolve
from elastirun.cli.secret_files import read_token
from elastirun.cli.subcommands import show
from elastirun.config import Preload
from elastirun.errors import UsageError

LIMIT = 60.0  # seconds for the nodes to come, without --join-timeout: whoever checks starts all of them at once


def _own(dest: str, metavar: str, help: str) -> Option:
    return Option(dest, metavar, None, help, new=True, in_environment=False)


OWN = (
    _own("json", "", "one JSON object in place of the table"),
    _own("torch", "on|off", "whether all-reduces of torch are tried, which takes some seconds [on]"),
    _own("shared", "FOLDER,...", "folders that all nodes should share, such as that of the checkpoints"),
)
_HELP = """\
usage: elastirun check [OPTIONS] [SCRIPT] [ARGS]...

Checks nodes and the network between them before a job. Give it the options of the job, on each node;
the script is not started. Each node prints the same table: one row per node, and one line with what
to do for each finding.

  elastirun check --nnodes=3 --rdzv-id=job7 --rdzv-endpoint=node0 --shared=/data/checkpoints

elastirun --check ... train.py does the same before a job, and a node that should not take part ends.

Exit status: 0 this node may take part; 2 wrong use; 3 the script is not here; 201 too few nodes came, or
the check broke off; 202 this node should not take part, or does not reach the place where the nodes meet.
"""


def main(argv: Sequence[str]) -> int:
    """Check what ``argv`` asks for. Return the exit code; does not return where a check was made. Raises UsageError and StartError."""
    given, script = command_line.parse(argv, OWN)
    if "help" in given or "help_all" in given:
        return show(f"{_HELP}\n" + "\n".join(f"  {f'{one.name}={one.metavar}'.rstrip('='):24}{one.help}" for one in OWN))
    shared = _folders(given.pop("shared")) if "shared" in given else ()
    if (torch := given.pop("torch", "on")) not in ("on", "off"):
        raise UsageError(f"--torch: {quote(torch)} is neither on nor off")
    as_json = given.pop("json", None) is not None
    before_job = "check" in given  # by PET_CHECK alone nobody asks for a job here
    options = GivenOptions(given, dict(os.environ))
    facts = MachineFacts(usable_cpus, count_devices, lambda: str(uuid.uuid4()), this_host, lambda command: Preload())
    config = replace(resolve(options, script or ["-"], facts), token=read_token(options))
    if before_job:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process dies with the launcher
    elif script:
        check_command(config.command, os.environ.get("PYTHON_EXEC"))
    for warning in () if before_job else options.warnings:
        _say(f"warning: {warning}")
    from elastirun.agent.check import run  # slow imports

    limit = config.timing.join_timeout if before_job or options.is_given("join_timeout") else LIMIT
    checked = run.check(config, run.Asked(shared, limit, torch == "on", before_job), _say)
    written = _report(checked.result, checked.seconds, config.run_id, as_json, before_job)
    if checked.code == ExitCode.SICK:
        _say(f"{checked.name} should not take part")
    standard_streams.flush()
    os._exit(checked.code or written)  # a normal exit would wait for, or abort on, threads that are still inside torch's store


def _report(result: Result, seconds: float, job: str, as_json: bool, before_job: bool) -> int:
    """Print the result. Return the exit code if it could not be written, else 0."""
    if as_json:
        return show(table.json_of(job, result, seconds))
    if not before_job:
        return show(table.text_of(result, seconds))
    for line in [*table.finding_lines(result.findings), table.summary(result, seconds)]:
        _say(line)
    return 0


def _folders(text: str) -> tuple[str, ...]:
    """Parse --shared. Raises UsageError."""
    found = tuple(filter(None, (path.strip() for path in text.split(","))))
    if not found:
        raise UsageError("--shared: it names no folder (is a variable unset?)")
    if relative := next((path for path in found if not os.path.isabs(path)), ""):
        raise UsageError(f"--shared: {quote(relative)} is no absolute path; give one that is the same on all nodes")
    return found


def _say(text: str) -> None:
    standard_streams.write("stderr", f"elastirun check: {' '.join(text.splitlines())}\n")
