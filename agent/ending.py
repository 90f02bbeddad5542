"""How an agent ends: its exit code, its last lines, and the files it leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastirun.agent import shared_store
from elastirun.agent.exit_codes import ExitCode
from elastirun.agent.failures import classify, report
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import END_LIMIT, RunLogs
from elastirun.agent.session import Session
from elastirun.config import LaunchConfig
from elastirun.errors import StoreError
from elastirun.rendezvous.actions import Finish, Outcome
from elastirun.rendezvous.records import ExitRecord, RoundRecord

FLUSH = 5.0  # seconds in which the last lines must reach the console

_EXIT_CODES = {
    Outcome.SUCCEEDED: ExitCode.OK,
    Outcome.FAILED: ExitCode.FAILED,
    Outcome.LEFT: ExitCode.ENVIRONMENT,  # without a signal: something is missing on this machine
    Outcome.TIMEOUT: ExitCode.RENDEZVOUS,
    Outcome.STORE_LOST: ExitCode.RENDEZVOUS,
    Outcome.DISAGREES: ExitCode.ENVIRONMENT,
    Outcome.EXCLUDED: ExitCode.EXCLUDED,
}


def exit_code(finish: Finish, from_worker: bool, signum: int, sick: bool, took_part: bool) -> int:
    """Return the agent's exit code. Pure.

    ``from_worker``: ``--exit-code-from-worker``. ``signum``: the signal that told the agent to leave, or 0. ``sick``: a worker hangs in
    the kernel. ``took_part``: this node was in a round.
    """
    if finish.outcome is Outcome.FAILED and finish.closed and from_worker:
        return classify.exit_code(finish.closed.failures)
    if sick:
        return ExitCode.SICK
    if finish.outcome is Outcome.LEFT and signum:
        return ExitCode.signalled(signum)
    return ExitCode.PEERS_LOST if finish.outcome is Outcome.TIMEOUT and took_part else _EXIT_CODES[finish.outcome]


def report_failure(
    config: LaunchConfig, finish: Finish, record: RoundRecord, began: float | None, console: Console, logs: RunLogs, error_file: str | None
) -> None:
    """Print the failure report, and write ``error_file``. ``began``: when the workers of the failed round were started, if they were."""
    records = finish.closed.failures if finish.closed else ()
    used = f"{record.failures - 1} of {config.max_restarts}"
    text = report.report(config.command.script, finish.reason, records, record.round, used, began, logs.directory)
    console.write_err(text.encode())
    write_error_file(error_file, finish.reason, records, console, logs)


def write_error_file(path: str | None, reason: str, records: tuple[ExitRecord, ...], console: Console, logs: RunLogs) -> None:
    """Write TORCHELASTIC_ERROR_FILE for the launcher or scheduler that named it; None: nobody did."""
    if path:
        try:
            logs.disk.call(partial(report.write_error_file, path, reason, records), END_LIMIT)
        except OSError as error:
            console.say(f"cannot write TORCHELASTIC_ERROR_FILE {path}: {error.strerror}")


def stay_for_other_jobs(session: Session, job: str, pause: Callable[[float], bool], console: Console) -> None:
    """Keep the store up that this agent hosts while other jobs use it. ``pause`` waits for some seconds; True ends the wait."""
    try:
        shared_store.wait_for_other_jobs(session.access.connect(), job, pause, console.say)
    except StoreError as error:
        console.say(f"cannot look whether other jobs need this store: {error}")
    console.flush(FLUSH)
