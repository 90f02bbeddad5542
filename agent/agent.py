"""The agent: one loop over signals, workers, output and the store; the machine decides, the agent performs.

All state lives in this thread. What other threads have to say (the store's driver, the workers' store) arrives through a
descriptor the loop waits on; nothing is polled.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from elastirun import clock
from elastirun.agent import events, shared_store
from elastirun.agent.exit_codes import ExitCode
from elastirun.agent.failures import classify, report
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.host import cpus, descriptors, net
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import END_LIMIT, RunLogs
from elastirun.agent.processes.process import require_pidfds
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.signals import Signals
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.processes.workers import WorkerExit, Workers
from elastirun.agent.round_check import RoundCheck
from elastirun.agent.spec import Surroundings, cpu_sets, worker_specs
from elastirun.agent.store_access import Place, introduction, rules
from elastirun.agent.worker_store import SharedStore, WorkerStore
from elastirun.config import LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.actions import Action, Finish, Outcome, Reconnect, Say, Start, Stop, Sync
from elastirun.rendezvous.codec import Codec, clip
from elastirun.rendezvous.events import (
    Changed,
    Event,
    Leave,
    Reachable,
    StoodStill,
    Synced,
    SyncFailed,
    Tick,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.records import ExitRecord, RoundRecord, Status
from elastirun.rendezvous.store_thread import Driver
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.sync import Exchange

SECOND_SIGNAL_GRACE = 5.0  # seconds left to the workers after the agent was signalled twice
SHORT_WAIT = 0.5  # seconds in which processes that a worker left running usually end; a longer wait gets a line
STANDSTILL = 2.0  # seconds later than due, after which the loop says that it did not run
FLUSH = 5.0  # seconds to get the last words out
LOGS_LIMIT = 2.0  # seconds for a round's log files, in which the loop waits; after STANDSTILL the others may miss this node

_EXIT_CODES = {
    Outcome.SUCCEEDED: ExitCode.OK,
    Outcome.FAILED: ExitCode.FAILED,
    Outcome.LEFT: ExitCode.ENVIRONMENT,  # not because of a signal: something is missing on this machine
    Outcome.TIMEOUT: ExitCode.RENDEZVOUS,
    Outcome.STORE_LOST: ExitCode.RENDEZVOUS,
    Outcome.DISAGREES: ExitCode.ENVIRONMENT,
    Outcome.EXCLUDED: ExitCode.EXCLUDED,
}


def run(config: LaunchConfig) -> int:
    """Run this node's part of the job to its end. Returns the exit code (``ExitCode``).

    The process is the agent's from then on: it handles signals, and torch cannot be imported in it any more.
    """
    require_pidfds()
    torch_class.store_only()
    with ExitStack() as stack:
        try:
            agent = Agent(config, stack)
        except OSError as error:  # no descriptor, no space, no folder for temporary files
            raise StartError(f"cannot start here: {error}") from error
        return agent.run()


class Agent:
    """``stack`` closes what the agent opens."""

    def __init__(self, config: LaunchConfig, stack: ExitStack) -> None:
        self._config = config
        self._stack = stack
        self._selector = stack.enter_context(selectors.PollSelector())
        self._environ = dict(os.environ)
        self._files = descriptors.raise_limit()
        self._cpu_sets = cpu_sets(config, self._environ)
        self._events: deque[Event] = deque()
        self._finish: Finish | None = None
        self._started = False  # workers have run here
        self._world_size = 0  # of the running set
        self._attempt = 0  # of the running set: round - 1
        self._address = ""  # what the others reach this node by
        self._signum = 0  # the signal that told us to leave
        self._lone = False  # the workers' round has no other node, and others may want its place
        self._sick = False  # a worker cannot be killed
        self._looked = 0.0  # when the loop last saw that it runs

        self._console = Console(self._selector)
        stack.callback(self._console.close)
        row = introduction(config)
        self._id, self._name = row.id, row.name
        passed_on = config.forward_signals
        self._signals = Signals(config.signals, passed_on, self._selector, self._on_signal, self._on_forward, self._on_child)
        stack.callback(self._signals.close)
        # One node alone has nobody who could go on without it while it stands still; but see ``_start``.
        self._lease = 0.0 if config.max_nodes == 1 else config.timing.guard_lease
        self._tree = ProcessTree(config.run_id, self._lease, self._selector, self._console.say)
        stack.callback(self._tree.close)
        self._round_check = RoundCheck(self._id, self._selector, lambda: self._events.append(Changed(clock.now())))
        stack.callback(self._round_check.close)
        if self._round_check.folder:
            self._tree.remove_folder_at_end(self._round_check.folder)
        else:
            self._console.say(self._round_check.trouble)
        logs_limit = min(LOGS_LIMIT, 0.4 * config.timing.expire)
        self._logs = RunLogs(config.logs, config.run_id, row.name, self._console, self._selector, logs_limit)
        stack.callback(self._logs.close)
        self._events_log = self._open_events()
        stack.callback(self._events_log.close)
        self._round_events = events.RoundEvents(self._events_log, self._id)
        self._tracker = FailureTracker(row.name, self._logs)
        self._workers = Workers(
            self._selector, self._on_worker_exit, self._on_workers_idle, self._on_stuck, self._tree.owns, self._tree.worker_reaped
        )
        self._worker_store: WorkerStore | SharedStore | None = None
        self._machine = Machine(rules(config), row, clock.now())
        codec = Codec(config.token)
        self._place = Place(config)
        stack.callback(self._place.close)
        if self._place.private:
            self._tree.remove_folder_at_end(self._place.private.folder)
            self._tree.exclude(self._place.private.pid)
        exchange = Exchange(self._place.prefix, self._id, codec, clock.now)
        self._driver = Driver(self._place.connect, exchange, self._place.exchange_limit)
        stack.callback(self._driver.close)
        self._selector.register(self._driver, selectors.EVENT_READ, self._on_store)

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _open_events(self) -> events.EventLog:
        policy = self._config.logs
        also = self._console.say if policy.event_log == "console" else None
        return events.EventLog(self._id, self._name, self._logs.events_file(), also)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        try:
            return self._loop()
        except Exception:
            self._stop_after_a_bug()
            raise

    def _stop_after_a_bug(self) -> None:
        """Whatever is wrong with us, the workers have their grace."""
        self._selector.unregister(self._driver)
        if self._workers.running:
            self._console.say("internal error, see below; stopping the workers here")
        self._workers.stop(self._config.timing.grace)
        self._console.hurry()
        while self._workers.running:
            self._turn()

    def _turn(self, until: float = math.inf) -> None:
        """One turn of a loop in which the machine takes no part: signals, workers, output and the guard, no longer than ``until``."""
        now = clock.now()
        due = min(until, now + 0.5, self._logs.tick(now), self._workers.deadline or math.inf)
        for key, mask in self._selector.select(max(0.0, due - now)):
            key.data(mask)
        self._renew(clock.now())
        self._workers.tick(clock.now())

    def _loop(self) -> int:
        self._looked = clock.now()
        self._events.append(Tick(self._looked))
        while True:
            self._work_off()
            if self._finish is not None:
                return self._end(self._finish)
            wait = self._time_to_wait()
            ready = self._selector.select(wait)
            self._look_for_standstill(due=math.inf if wait is None else wait)
            for key, mask in ready:
                key.data(mask)
            self._on_time(clock.now())

    def _look_for_standstill(self, due: float) -> None:
        """Report a standstill to the machine before any other event: a worker that the guard has ended did not fail.

        ``due``: the seconds that may have passed since the last look. Between two looks no moment is left out, so
        that a standstill is seen wherever it falls.
        """
        now = clock.now()
        overdue, self._looked = now - self._looked - due, now
        ended = bool(self._workers.running) and self._tree.lease_is_over(now)
        if ended or overdue > STANDSTILL:
            if ended or overdue > self._config.timing.expire / 2:
                what = "the others may take this node for lost" if overdue < STANDSTILL else f"this agent stood still for {overdue:.0f} s"
                self._console.say(what + ("; its workers were ended" if ended else ""))
            self._lone = self._lone and not ended
            self._events.appendleft(StoodStill(now, overdue, ended))
            self._events_log.write(events.StoodStill(round(overdue, 3), ended))
        self._renew(now)

    def _renew(self, now: float) -> None:
        """The guard lets the workers run on: in a round of one until others may take the node for lost, however well it is."""
        if self._lone:
            self._tree.end_lease_at(self._machine.kept_alive + self._config.timing.lone_lease, now)
        else:
            self._tree.renew(now)

    def _time_to_wait(self) -> float | None:
        """Seconds until something is due without any descriptor telling; None: nothing is."""
        if self._events:
            return 0.0
        now = clock.now()
        ticks = (self._logs.tick(now), self._round_check.tick(now))
        dues = (self._machine.wake, self._workers.deadline, self._driver.deadline, self._tracker.report_at, *ticks)
        due = min(d for d in dues if d is not None)
        return None if due == math.inf else max(0.0, due - clock.now())

    def _on_time(self, now: float) -> None:
        deadline = self._workers.deadline
        if deadline is not None and now >= deadline:
            self._workers.tick(now)
        self._events.extend(self._driver.give_up(now))
        if now >= self._tracker.report_at:
            self._events.append(WorkersFailed(now, self._tracker.take_report()))
        if now >= self._machine.wake:
            self._events.append(Tick(now))

    def _work_off(self) -> None:
        while True:
            self._look_for_standstill(due=0.0)  # before each event: the machine must not mistake the time for one without contact
            if not self._events:
                return
            event = self._events.popleft()
            if isinstance(event, Synced) and self._worker_store is None:
                self._become_reachable(event.now)
            if isinstance(event, Synced | SyncFailed):
                self._round_check.settle(event)
            actions = self._machine.step(event)
            self._round_events.see(self._machine.record, event.now, self._machine.quiet)
            self._perform_all(actions)

    def _perform_all(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Sync):
                self._driver.submit(self._with_clearing(action))
            elif isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Stop):
                self._stop(action)
            elif isinstance(action, Say):
                self._console.say(action.text)
            elif isinstance(action, Reconnect):
                self._driver.reconnect()
            else:
                self._finish = action

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _on_store(self, mask: int) -> None:
        while self._place.notices:
            self._console.say(self._place.notices.popleft())
        if self._place.hopeless:
            self._events.append(Leave(clock.now(), self._place.hopeless))
        self._events.extend(self._driver.answers())

    def _on_signal(self, signum: int, count: int) -> None:
        """The first signal drains this node, the second hurries, the third ends at once."""
        name = signal.Signals(signum).name
        self._events_log.write(events.Signal(name, count))
        if count == 1:
            self._signum = signum
            self._tracker.agent_signalled()
        if self._finish:  # all that still runs are processes which the workers have left
            self._stop_left_running(SECOND_SIGNAL_GRACE if count < 3 else 0.0)
        elif count == 1:
            hurry = f"; its workers have {self._config.timing.grace:g} s, again to hurry" if self._workers.running else ""
            self._console.say(f"{name}: this node leaves{hurry}")
            self._events.append(Leave(clock.now(), name))
        elif self._workers.running:
            grace = SECOND_SIGNAL_GRACE if count == 2 else 0.0
            self._console.say(f"{name}: its workers have {grace:g} s")
            self._workers.stop(grace)

    def _on_forward(self, signum: int) -> None:
        self._workers.forward(signum)

    def _on_child(self) -> None:
        self._tree.reap_orphans(self._workers.pids)

    def _on_worker_exit(self, end: WorkerExit) -> None:
        self._events_log.write(events.WorkerExit(end.rank, end.local_rank, end.pid, end.code, end.after))
        self._tracker.worker_ended(end)

    def _on_stuck(self, text: str) -> None:
        """A worker that SIGKILL does not end holds its GPU, and would hold the next one's: this node is of no use."""
        self._console.say(text)
        self._sick = True
        self._events.append(Leave(clock.now(), "a worker hangs in the kernel"))

    def _on_workers_idle(self) -> None:
        self._lone = False
        if self._tracker.stopped or self._finish:
            self._tree.kill_left_behind()
        self._round_events.stopped(self._attempt + 1, clock.now())
        if self._tracker.stopped:
            self._events.append(WorkersStopped(clock.now(), self._tracker.failures))
        elif not self._tracker.failures:  # else the machine is told, if not yet, and asks to stop
            self._events.append(WorkersSucceeded(clock.now()))

    # -- what is asked for ----------------------------------------------------------------------------------------------

    def _become_reachable(self, now: float) -> None:
        """The store was reached, so the route to it and with it our address are known."""
        net.shorten_name_timeouts()
        self._address = self._place.here.address
        self._worker_store = self._place.worker_store(self._worker_store_failed)
        self._perform_all(self._machine.step(Reachable(now, self._address, self._worker_store.port)))

    def _with_clearing(self, sync: Sync) -> Sync:
        """The exchange, clearing the store first where workers meet on it and node 0 is about to say that it is ready for a round."""
        record, put = self._machine.record, sync.put
        if put is None or put.row.status is not Status.READY or self._place.shared is None or record is None:
            return sync
        known = put.base is not None and (put.base.status, put.base.round) == (Status.READY, put.row.round)
        return replace(sync, fresh=record.index(self._id) == 0 and not known)

    def _worker_store_failed(self, why: str) -> None:
        self._events.append(Leave(clock.now(), why))  # called in another thread: the loop sees it at its next beat

    def _start(self, action: Start) -> None:
        record, node_rank = action.record, action.node_rank
        assert self._worker_store is not None
        self._world_size = record.world_size
        self._attempt = record.round - 1
        self._lone = len(record.members) == 1 and not self._config.standalone
        self._renew(clock.now())
        if self._started and not self._tracker.stopped:
            self._end_left_running()
        self._tracker.start_round(self._attempt, alone=record.world_size == 1)
        try:
            specs = self._specs(record, node_rank)
            self._announce(record, node_rank, specs)
            logs = self._logs.open_round(self._attempt, specs, self._world_size)
            if not self._logs.error_file(self._attempt, 0):
                specs = self._specs(record, node_rank)  # once more, without the error files that could not be made
            if self._logs.temporary:
                self._tree.remove_folder_at_end(self._logs.temporary)
            self._worker_store.end_round()
            self._workers.start(specs, logs)
            self._tree.add_workers(self._workers.pids)
            self._started = True
            if node_rank == 0:  # after them: the import of torch would hold them up, and their first connections can wait
                self._worker_store.serve()
                self._events.append(Reachable(clock.now(), self._address, self._worker_store.port))
        except (OSError, StartError) as error:
            rank = sum(m.slots for m in record.members[:node_rank])
            self._tracker.add(ExitRecord(self._name, rank, 0, 0, 126, 0, 0.0, (clip(str(error)),)))

    def _end_left_running(self) -> None:
        """Nothing of the last round may be in the way of the next one, also when its workers here had succeeded."""
        if count := self._workers.end_left_running():
            self._console.say(f"ended {_processes(count)} that the workers of the last round had left running")
        self._tree.kill_left_behind()

    def _specs(self, record: RoundRecord, node_rank: int) -> list[WorkerSpec]:
        here = Surroundings(
            environ=self._environ,
            cpus=cpus.usable_cpus(),
            interface=self._place.here.interface,
            loopback=self._place.here.loopback,
            store=self._place.shared,
            cpu_sets=self._cpu_sets,
            mark=self._tree.mark,
            socket=self._round_check.path,
        )
        specs = worker_specs(self._config, record, node_rank, here, lambda local: self._logs.error_file(self._attempt, local))
        return [replace(spec, group=self._tree.group, files=self._files) for spec in specs]

    def _announce(self, record: RoundRecord, node_rank: int, specs: list[WorkerSpec]) -> None:
        nodes, workers = len(record.members), record.world_size
        self._round_events.start(record, node_rank, [spec.rank for spec in specs], clock.now())
        if self._config.max_nodes > 1 or record.round > 1:
            here = f"ranks {specs[0].rank}-{specs[-1].rank}" if len(specs) > 1 else f"rank {specs[0].rank}"
            size = f"{nodes} node{'s' * (nodes > 1)}, {workers} worker{'s' * (workers > 1)}"
            self._console.say(f"round {record.round}: {size}; here {here} ({record.reason})")

    def _stop(self, action: Stop) -> None:
        if self._tracker.stopped:  # it is to be quicker
            self._workers.stop(action.within or 0.0)
            return
        self._tracker.before_stop(self._workers.alive)
        timing = self._config.timing
        grace = timing.grace if action.planned else timing.failure_grace
        grace = grace if action.within is None else min(grace, action.within)
        self._round_events.stop(self._attempt + 1, action.planned, action.reason, grace, clock.now())
        if not self._workers.running and not self._workers.left_running:
            self._on_workers_idle()
            return
        if self._config.max_nodes > 1 and not self._signum:
            self._console.say(f"stopping the workers here: {action.reason}")
        self._workers.stop(grace, self._stop_signal())
        self._console.hurry()  # after the signal, so that the room is for what they say at the end

    def _stop_signal(self) -> int:
        """Return the signal that stops workers: the one that the agent was sent, SIGTERM when it was sent none.

        A shell that runs the training (``--no-python run.sh``) takes SIGINT for its child's business, and would wait for the child.
        """
        shell = self._signum == signal.SIGINT and self._config.command.no_python
        return signal.SIGTERM if shell or not self._signum else self._signum

    def _end(self, finish: Finish) -> int:
        """The last words, and the exit code."""
        self._wait_for_left_running(finish.outcome is Outcome.SUCCEEDED)
        code = self._exit_code(finish)
        self._events_log.write(events.End(finish.outcome.value, finish.reason, int(code)))
        if finish.outcome is Outcome.FAILED:
            records = finish.closed.failures if finish.closed else ()
            self._console.write_err(self._report(finish.reason, records).encode())
            self._leave_error_file(finish.reason, records)
        elif finish.outcome is Outcome.SUCCEEDED and not self._started:
            self._console.say("the job succeeded; no worker ran on this node")
        elif finish.outcome is not Outcome.SUCCEEDED and not self._signum:
            self._console.say(f"giving up: {finish.reason}")
            self._leave_error_file(finish.reason, ())
        self._logs.disk.drain(END_LIMIT)
        self._console.flush(FLUSH)
        if self._machine.hosting and not self._config.standalone and not self._signum:
            self._stay_for_lodgers()
        return code

    def _wait_for_left_running(self, succeeded: bool) -> None:
        """An upload that a worker left running when the job succeeded may end by itself within the grace; a signal ends this wait.

        After anything but success there is nothing to wait for, so it has the signal at once.
        """
        timing = self._config.timing
        if succeeded and not self._signum:
            began = clock.now()
            until = min(began + SHORT_WAIT, began + timing.grace)
            while self._workers.left_running and not self._signum and clock.now() < until:
                self._turn(until)
                if clock.now() >= until and until < began + timing.grace and (count := self._workers.left_running):
                    self._console.say(f"waiting up to {timing.grace:g} s for {_processes(count)} that the workers left running")
                    until = began + timing.grace
            if not self._signum:
                self._stop_left_running(min(SECOND_SIGNAL_GRACE, timing.grace))
        else:
            self._stop_left_running(timing.grace if self._signum else timing.failure_grace)
        while self._workers.running:
            self._turn()

    def _stop_left_running(self, grace: float) -> None:
        if count := self._workers.left_running:
            signum = self._stop_signal()
            name = signal.Signals(signum).name
            self._console.say(f"{name} to {_processes(count)} that the workers had left running, SIGKILL after {grace:g} s")
            self._workers.stop(grace, signum)

    def _report(self, reason: str, records: tuple[ExitRecord, ...]) -> str:
        record = self._machine.record
        assert record is not None
        began = self._tracker.began if record.round == self._attempt + 1 else None
        used = f"{record.failures - 1} of {self._config.max_restarts}"
        return report.report(self._config.command.script, reason, records, record.round, used, began, self._logs.directory)

    def _stay_for_lodgers(self) -> None:
        def pause(seconds: float) -> bool:
            for key, mask in self._selector.select(seconds):
                key.data(mask)
            return bool(self._signum)

        try:
            shared_store.wait_for_lodgers(self._place.connect(), self._config.run_id, pause, self._console.say)
        except StoreError as error:
            self._console.say(f"cannot look whether other jobs need this store: {error}")
        self._console.flush(FLUSH)

    def _leave_error_file(self, reason: str, records: tuple[ExitRecord, ...]) -> None:
        if path := self._environ.get("TORCHELASTIC_ERROR_FILE"):
            try:
                self._logs.disk.call(partial(report.write_error_file, path, reason, records), END_LIMIT)
            except OSError as error:
                self._console.say(f"cannot write TORCHELASTIC_ERROR_FILE {path}: {error.strerror}")

    def _exit_code(self, finish: Finish) -> int:
        outcome = finish.outcome
        if outcome is Outcome.FAILED and finish.closed and self._config.exit_code_from_worker:
            return classify.exit_code(finish.closed.failures)
        if self._sick:
            return ExitCode.SICK
        if outcome is Outcome.LEFT and self._signum:
            return ExitCode.signalled(self._signum)
        return ExitCode.PEERS_LOST if outcome is Outcome.TIMEOUT and self._machine.row.round else _EXIT_CODES[outcome]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
