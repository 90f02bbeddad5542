"""Makes the parts of an agent and connects them. A new part is made here, and takes its place in ``Assembly.parts``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from selectors import EVENT_READ, BaseSelector
from socket import gethostname
from typing import Protocol

from elastirun import clock
from elastirun.agent.failures.missing_module import explain_missing_module
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.guard_lease import GuardLease
from elastirun.agent.hangs.standing import Standing
from elastirun.agent.hangs.straggler_watch import StragglerWatch
from elastirun.agent.hangs.watch import HangWatch
from elastirun.agent.host import cpus, descriptors
from elastirun.agent.host.node_name import NodeName
from elastirun.agent.observe import tracing
from elastirun.agent.observe.accounting import Accounting
from elastirun.agent.observe.events import EventLog, RoundEvents
from elastirun.agent.observe.job_start import start_event
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.output.agent_lines import LineFormat, shows_colours
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import NodeRound, Part, WorkerExit
from elastirun.agent.processes.preload.parked_forks import ParkedForks
from elastirun.agent.processes.preload.server_start import StartedServer
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.signals import Signals
from elastirun.agent.quarantine import Quarantine
from elastirun.agent.round_start import RoundStart
from elastirun.agent.session import Session
from elastirun.agent.status import health, own_agents
from elastirun.agent.status.shared_devices import TwinWarning, devices
from elastirun.agent.status.trainer_status import TrainerStatus
from elastirun.agent.store.node_reports import Meeting
from elastirun.agent.store.other_jobs import OtherJobs
from elastirun.agent.store.store_access import new_row
from elastirun.agent.wanted_nodes import WantedNodes
from elastirun.agent.workers.checkpoint_memory import CheckpointMemory
from elastirun.agent.workers.file_timers import FileTimers
from elastirun.agent.workers.live_workers import LiveWorkers
from elastirun.agent.workers.local_socket import LocalSocket
from elastirun.agent.workers.round_check import RoundCheck
from elastirun.agent.workers.spec import NodeEnvironment, command_line, cpu_sets, worker_like
from elastirun.agent.workers.workers import Workers
from elastirun.config import LaunchConfig
from elastirun.rendezvous.wire.events import Changed
from elastirun.rendezvous.wire.records import Blame, NodeRow

LOGS_LIMIT = 2.0  # seconds to open a round's log files, at most 0.4 of ``expire``; the loop waits, and must not seem to stand still


class Hears(Protocol):
    """The agent, as its parts see it: what it hears of them, in the loop's thread but for ``runs`` and ``store_failed``."""

    def signalled(self, signum: int, count: int) -> None: ...
    def child_ended(self) -> None: ...
    def store_readable(self, mask: int) -> None: ...
    def store_failed(self, why: str) -> None: ...
    def worker_ended(self, end: WorkerExit) -> None: ...
    def workers_idle(self) -> None: ...
    def worker_stuck(self, text: str) -> None: ...
    def worker_hung(self, local_rank: int, blame: Blame, note: str, stack: list[str], seconds: float) -> None: ...
    def peers_lost(self, pid: int, round: int) -> None: ...
    def gathered(self, round: int) -> None: ...
    def runs(self, round: int) -> bool: ...
    def sits_out(self) -> None: ...


@dataclass(frozen=True)
class Assembly:
    """The parts of one agent. ``parts``: all that hear of rounds, in the order in which the agent tells them."""

    console: Console
    tree: ProcessTree
    logs: RunLogs
    log: EventLog
    session: Session
    workers: Workers
    forks: ParkedForks
    live: LiveWorkers
    tracker: FailureTracker
    pages: ProgressPages
    hangs: HangWatch
    accounting: Accounting
    round_check: RoundCheck
    memory: CheckpointMemory
    lease: GuardLease
    start: RoundStart
    parts: tuple[Part, ...]


def assemble(
    config: LaunchConfig, environ: Mapping[str, str], agent: Hears, selector: BaseSelector, stack: ExitStack, given: StartedServer | None
) -> Assembly:
    """Return the parts of ``agent``, which hears of them. ``environ``: for the workers. ``given``: a fork server. ``stack`` closes them."""
    workers: Workers  # parts that are made before these three need them later
    session: Session
    stragglers: StragglerWatch
    bound_to = cpu_sets(config, environ)
    files = descriptors.raise_limit()
    row, console = _named(config, environ, selector, stack)
    say, warn = console.say, console.warn
    signals = Signals(config.signals, config.forward_signals, selector, agent.signalled, lambda n: workers.forward(n), agent.child_ended)
    stack.callback(signals.close)
    # No other node goes on without the only node of a job, so its guard needs no lease; but see ``GuardLease``.
    lease = 0.0 if config.max_nodes == 1 else config.timing.guard_lease
    tree = stack.enter_context(closing(ProcessTree(config.run_id, lease, selector, warn, given)))
    socket = _socket(tree, selector, warn, stack)
    round_check = RoundCheck(
        *(row.id, socket, lambda: session.post(Changed(clock.now()))), lambda: describe_node(session, workers, live, stragglers, environ)
    )
    terminal = os.ttyname(0) if os.isatty(0) else ""
    heard = agent.peers_lost, agent.gathered, agent.runs
    live = stack.enter_context(closing(LiveWorkers(selector, lambda pid: pid in workers.pids, lambda pid: workers.park(pid), *heard)))
    logs, log = _logs(config, environ, row, console, selector, stack)
    if logs.temporary:
        tree.remove_folder_at_end(logs.temporary)
    memory = stack.enter_context(closing(CheckpointMemory(socket, log.write, warn)))
    tracker = FailureTracker(row.name, logs, warn, _missing_module(config, environ))
    timers = stack.enter_context(closing(FileTimers(environ, socket.folder, selector, tree.owns, tracker.expect_end, warn)))
    node = NodeEnvironment(timers.environ, cpu_sets=bound_to, mark=tree.mark, live=live.name, socket=socket.path, group=tree.group)
    node = replace(node, terminal=terminal, files=files)  # completed for each round
    like = worker_like(config, replace(node, cpus=cpus.usable_cpus()))
    forks = stack.enter_context(closing(ParkedForks(config.preload, like, config.nproc, selector, tree, warn, given)))
    callbacks = agent.worker_ended, agent.workers_idle, agent.worker_stuck, tree.owns, tree.worker_reaped
    workers = timers.workers = Workers(selector, *callbacks, starts=forks.spawn)
    session = stack.enter_context(closing(Session.of(config, row, agent.store_failed)))
    selector.register(session, EVENT_READ, agent.store_readable)
    limits, meet = (config.hang_timeout, config.first_step_timeout), partial(meeting, session)
    pages = stack.enter_context(closing(ProgressPages()))
    hangs = stack.enter_context(closing(HangWatch(*limits, workers, pages, meet, log.write, warn, agent.worker_hung)))
    standing = Standing(workers, hangs.stacks, any(limit is not None for limit in limits), say)
    stragglers = StragglerWatch(workers, pages, meet, log.write, warn)
    accounting = Accounting(pages, log.write, row.id)
    rounds = RoundEvents(log, row.id, lambda node: session.machine.store.quiet(node))
    quarantine = Quarantine(config, session, accounting, tracker, stragglers, log.write, warn, agent.sits_out)
    shown = health.Parts(config, session, workers, rounds, memory, stragglers, accounting, quarantine, hangs)
    stack.callback(health.serve(shown, selector, say))
    socket.serve(own_agents.SNAPSHOT, lambda client, rest: socket.answer(client, health.described(shown, tree.mark)))
    guard, trainer = GuardLease(config, tree, session), stack.enter_context(closing(TrainerStatus(shown, pages, environ)))
    twins = TwinWarning(config.run_id, socket.path, devices(environ), session.access.notices.append)
    wanted = WantedNodes(config, session, environ, say, warn)
    parts = (
        *(accounting, guard, tracker, twins, rounds, live, logs, socket, round_check, timers, memory),
        *(forks, hangs, standing, stragglers, quarantine, wanted, trainer, OtherJobs(session.access)),
    )
    start = RoundStart(config, node, session, workers, live, logs, tree, agent.runs, warn)
    return Assembly(
        *(console, tree, logs, log, session, workers, forks, live, tracker),
        *(pages, hangs, accounting, round_check, memory, guard, start, parts),
    )


def _named(config: LaunchConfig, environ: Mapping[str, str], selector: BaseSelector, stack: ExitStack) -> tuple[NodeRow, Console]:
    """Return the row of this node, and the console, whose lines name the node."""
    name = stack.enter_context(closing(NodeName(config.node_name, f"{config.run_id}\0{config.endpoint}", numbered=config.max_nodes > 1)))
    console = Console(selector, form=LineFormat(name.text, config.run_id, config.logs.format, coloured=shows_colours(2, environ)))
    stack.callback(console.close)
    return new_row(config, name.text), console


def _socket(tree: ProcessTree, selector: BaseSelector, say: Callable[[str], None], stack: ExitStack) -> LocalSocket:
    """Return the socket for the workers, whose folder the guard removes if the agent cannot."""
    socket = stack.enter_context(closing(LocalSocket(selector)))
    if socket.folder:
        tree.remove_folder_at_end(socket.folder)
    else:
        say(socket.trouble)
    return socket


def _missing_module(config: LaunchConfig, environ: Mapping[str, str]) -> Callable[[Sequence[str]], str]:
    """Return what explains the last words of a worker that lacks a module. A program without Python has an interpreter of its own."""
    python = None if config.command.no_python else shutil.which(command_line(config.command, environ)[0])
    return partial(explain_missing_module, python=python, environ=environ) if python else lambda lines: ""


def _logs(
    config: LaunchConfig, environ: Mapping[str, str], row: NodeRow, console: Console, selector: BaseSelector, stack: ExitStack
) -> tuple[RunLogs, EventLog]:
    """Return the logs of the workers, and of the events."""
    logs = RunLogs(config.logs, config.run_id, row.name, console, selector, min(LOGS_LIMIT, 0.4 * config.timing.expire))
    stack.callback(logs.close)
    also = console.err.write_line if config.logs.event_log == "console" else None
    spans = tracing.begin(environ, config.run_id, gethostname(), logs.disk.notice)
    if spans is not None:
        stack.callback(spans.close)
    # The file of events may make a temporary folder.
    log = EventLog(row.id, row.name, logs.events_file(), also, spans.take if spans is not None else None)
    stack.callback(log.close)
    log.write(start_event(config))
    return logs, log


def meeting(session: Session, round: NodeRound) -> Meeting:
    """Return where the nodes of a round meet to report to each other."""
    access, place, record = session.access, session.machine.store.place, round.record
    return Meeting(access.for_status(place), access.key_prefix, access.config.token, record.fence, round.node_rank, len(record.members))


def describe_node(session: Session, workers: Workers, live: LiveWorkers, stragglers: StragglerWatch, environ: Mapping[str, str]) -> str:
    """Return as a line of JSON where the job meets, and what the workers here do, for ``own_agents.ask``."""
    ranks = sorted(process.spec.rank for process in workers.processes.values() if live.is_live(process.pid))
    steps = [asdict(one) for one in stragglers.steps(clock.now())]
    return session.describe_store(steps=steps, live=ranks, finished=sorted(workers.finished), devices=devices(environ))
