"""The end of an agent: its last lines, its exit code, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from elastirun import clock
from elastirun.agent import termination_log
from elastirun.agent.failures import classify, report
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.output.agent_lines import Level
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import END_LIMIT, RunLogs
from elastirun.agent.session import Session
from elastirun.agent.store import shared_store
from elastirun.agent.workers.workers import Workers
from elastirun.config import LaunchConfig
from elastirun.errors import StoreError
from elastirun.rendezvous.wire.actions import Finish, Outcome
from elastirun.rendezvous.wire.records import ExitRecord, NodeRow, RoundRecord

SHORT_WAIT = 0.5  # seconds in which processes that a worker left running usually end; a longer wait is announced
FLUSH = 5.0  # seconds in which the last lines must reach the console

_EXIT_CODES = {
    Outcome.SUCCEEDED: ExitCode.OK,
    Outcome.FAILED: ExitCode.FAILED,
    Outcome.LEFT: ExitCode.SICK,  # without a signal
    Outcome.TIMEOUT: ExitCode.RENDEZVOUS,
    Outcome.STORE_LOST: ExitCode.RENDEZVOUS,
    Outcome.DISAGREES: ExitCode.ENVIRONMENT,
    Outcome.EXCLUDED: ExitCode.EXCLUDED,
}


@dataclass(frozen=True)
class Ending:
    """The end of the job for this node: all that the exit code and the last lines depend on."""

    finish: Finish
    record: RoundRecord | None  # the last one that was read
    began: float | None  # when workers of the last round were started on this node, seconds since the epoch; None: they were not
    signum: int  # the signal that told the agent to leave; 0: none
    sick: bool  # a worker hangs in the kernel, or none can be started
    started: bool  # workers have run on this node
    took_part: bool  # this node was in a round
    node: str  # this node's name
    done: tuple[str, ...] = ()  # names of members of the last round whose workers had all ended with 0

    def exit_code(self, from_worker: bool) -> int:
        """Return the agent's exit code. ``from_worker``: ``--exit-code-from-worker``."""
        finish = self.finish
        if finish.outcome is Outcome.FAILED and finish.closed and from_worker:
            return classify.exit_code(finish.closed.failures)
        if self.sick:
            return ExitCode.SICK
        if finish.outcome is Outcome.LEFT and self.signum:
            return ExitCode.signalled(self.signum)
        return ExitCode.PEERS_LOST if finish.outcome is Outcome.TIMEOUT and self.took_part else _EXIT_CODES[finish.outcome]

    def verdict(self, code: int) -> str:
        """Return the end of this node in a word, for programs. ``code``: the agent's exit code."""
        if code == ExitCode.SICK and (self.sick or self.finish.outcome is Outcome.LEFT):
            return "sick"
        return self.finish.outcome.name.lower()

    def write_termination_log(self, code: int, console: Console) -> None:
        """Write the termination message of Kubernetes, where there is a file for it."""
        failures = self.finish.closed.failures if self.finish.closed else ()
        number = self.record.round if self.record else 0
        fields = termination_log.message(self.verdict(code), code, self.finish.reason, number, self.node, failures)
        if trouble := termination_log.write(fields):
            console.warn(trouble)

    def tell(self, config: LaunchConfig, console: Console, logs: RunLogs, error_file: str | None) -> None:
        """Print the failure report, or a line when there is something to say; write ``error_file`` when the job did not succeed."""
        finish = self.finish
        records = finish.closed.failures if finish.closed else ()
        if finish.outcome is Outcome.FAILED:
            assert self.record is not None
            number, used = self.record.round, f"{self.record.failures - 1} of {config.max_restarts}"
            text = report.report(config.command.script, finish.reason, records, number, used, self.began, logs.directory, self.done)
            console.report(text)
            _write_error_file(error_file, finish.reason, records, console, logs)
        elif finish.outcome is Outcome.SUCCEEDED and not self.started:
            console.say("the job succeeded; no worker ran on this node")
        elif finish.outcome is not Outcome.SUCCEEDED and not self.signum:
            console.say(f"giving up: {finish.reason}", Level.ERROR)
            _write_error_file(error_file, finish.reason, (), console, logs)


def done(record: RoundRecord, rows: Mapping[str, NodeRow]) -> tuple[str, ...]:
    """Return the names of the members whose workers have all succeeded in the round of the record."""
    return tuple(m.name for m in record.members if (row := rows.get(m.id)) and row.succeeded == record.round > 0)


def _write_error_file(path: str | None, reason: str, records: tuple[ExitRecord, ...], console: Console, logs: RunLogs) -> None:
    """Write TORCHELASTIC_ERROR_FILE for the launcher or scheduler that named it; None: nobody did."""
    if path:
        try:
            logs.disk.call(partial(report.write_error_file, path, reason, records), END_LIMIT)
        except OSError as error:
            console.warn(f"cannot write TORCHELASTIC_ERROR_FILE {path}: {error.strerror}")


def wait_for_left_running(
    workers: Workers, grace: float, turn: Callable[[float], None], signalled: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Let what the workers left running, such as an upload, end by itself for ``grace`` seconds. A signal to the agent ends the wait.

    ``turn(until)`` lets the loop go round once, until that moment at the latest.
    """
    began = clock.now()
    until = min(began + SHORT_WAIT, began + grace)
    while workers.left_running and not signalled() and clock.now() < until:
        turn(until)
        if clock.now() >= until and until < began + grace and (count := workers.left_running):
            say(f"waiting up to {grace:g} s for {processes(count)} that the workers left running")
            until = began + grace


def stay_for_other_jobs(session: Session, job: str, pause: Callable[[float], bool], console: Console) -> None:
    """Keep the store up that this agent hosts while other jobs use it. ``pause`` waits for some seconds; True ends the wait."""
    try:
        shared_store.wait_for_other_jobs(session.access.connect(None), job, pause, console.say)
    except StoreError as error:
        console.say(f"cannot look whether other jobs need this store: {error}")
    console.flush(FLUSH)


def processes(count: int) -> str:
    """Return "1 process", "2 processes"."""
    return f"{count} process{'es' if count > 1 else ''}"
