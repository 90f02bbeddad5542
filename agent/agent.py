"""The agent of one node: one loop over signals, workers, output and the store. The machine decides, the agent performs.

All state belongs to the thread of the loop. Other threads (those of the store, of the workers' store, of the disks) hand over what
they have through a descriptor that the loop waits for. Only the answers to two rare questions to all nodes are polled: ``GLANCE`` of
quarantine.py and ``LISTEN`` of hangs/watch.py. See docs/agent.md.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial

from elastirun import clock
from elastirun.agent import ending
from elastirun.agent.failures.tracker import FailureTracker
from elastirun.agent.hangs.watch import HangWatch
from elastirun.agent.host import cpus, descriptors, name_servers
from elastirun.agent.observe import account, events, tracing
from elastirun.agent.observe.accounting import Accounting
from elastirun.agent.output.console import Console
from elastirun.agent.output.logs import END_LIMIT, RunLogs
from elastirun.agent.processes.death_notice import Notice, encode_vote, tell_standbys
from elastirun.agent.processes.preload.forkserver import ROUND_NAMES
from elastirun.agent.processes.preload.parked_forks import ParkedForks
from elastirun.agent.processes.process import require_pidfds
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.signals import Signals
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.quarantine import Quarantine
from elastirun.agent.session import STANDSTILL, Session
from elastirun.agent.status import health
from elastirun.agent.status.shared_devices import devices, warn_of_twins
from elastirun.agent.store.node_reports import Meeting
from elastirun.agent.store.store_access import new_row
from elastirun.agent.workers import live_states
from elastirun.agent.workers.checkpoint_memory import CheckpointMemory
from elastirun.agent.workers.live_workers import LiveWorkers
from elastirun.agent.workers.round_check import RoundCheck
from elastirun.agent.workers.spec import NodeEnvironment, cpu_sets, worker_like, worker_specs
from elastirun.agent.workers.workers import WorkerExit, Workers
from elastirun.config import LaunchConfig
from elastirun.errors import StartError
from elastirun.rendezvous.rules import QUICK
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.wire.actions import Action, Finish, Outcome, Say, Start, Stop
from elastirun.rendezvous.wire.events import Changed, Gathered, Leave, Prepared, Synced, SyncFailed, WorkersFailed, WorkersSucceeded
from elastirun.rendezvous.wire.records import Blame, NodeRow, RoundRecord

SECOND_SIGNAL_GRACE = 5.0  # seconds left to the workers after the agent was signalled twice
LARGEST_VOTE = 48 << 10  # bytes of a vote in the notice of a member; a pipe to the guard holds 64 KiB without asking for more
LOGS_LIMIT = 2.0  # seconds to open a round's log files, at most 0.4 of ``expire``; the loop waits, and must not seem to stand still


def run(config: LaunchConfig) -> int:
    """Run this node's part of the job to its end. Returns the exit code (``ExitCode``).

    From then on this process serves the agent alone: the agent handles its signals, and torch cannot be imported in it any more.
    """
    require_pidfds()
    torch_class.store_only()
    environ = dict(os.environ)
    name_servers.only_python_asks()
    with ExitStack() as stack:
        try:
            agent = Agent(config, environ, stack)
        except OSError as error:  # no descriptor, no space, no folder for temporary files
            raise StartError(f"cannot start here: {error}") from error
        return agent.run()


class Agent:
    """Runs this node's part of one job. ``environ``: for the workers. ``stack`` closes what the agent opens."""

    def __init__(self, config: LaunchConfig, environ: Mapping[str, str], stack: ExitStack) -> None:
        self._config = config
        self._selector = stack.enter_context(selectors.PollSelector())
        files = descriptors.raise_limit()
        bound_to = cpu_sets(config, environ)
        self._finish: Finish | None = None
        self._round = 0  # the number of the round whose workers run here, or ran last
        self._signum = 0  # the first signal that the agent got; 0: none
        self._lone = False  # the workers here train without another node, and another agent could take this node's place
        self._briefed: tuple[object, Notice | None] = (None, None)  # what the death notice is made of, and the notice
        self._sick = False  # a worker hangs in the kernel, or none can be started
        self._console = Console(self._selector)
        stack.callback(self._console.close)
        row = new_row(config)
        self._signals = Signals(config.signals, config.forward_signals, self._selector, self._on_signal, self._on_forward, self._on_child)
        stack.callback(self._signals.close)
        # No other node goes on without the only node of a job, so its guard needs no lease; but see ``_lone``.
        lease = 0.0 if config.max_nodes == 1 else config.timing.guard_lease
        self._tree = tree = ProcessTree(config.run_id, lease, self._selector, self._console.say)
        stack.callback(self._tree.close)
        self._round_check = RoundCheck(row.id, self._selector, self._read_store_soon, self._describe_store)
        stack.callback(self._round_check.close)
        if self._round_check.folder:
            self._tree.remove_folder_at_end(self._round_check.folder)
        else:
            self._console.say(self._round_check.trouble)
        self._live = stack.enter_context(closing(self._live_workers()))
        self._node = NodeEnvironment(
            environ, cpu_sets=bound_to, mark=tree.mark, live=self._live.name, socket=self._round_check.path, group=tree.group, files=files
        )  # completed for each round
        logs_limit = min(LOGS_LIMIT, 0.4 * config.timing.expire)
        self._logs = RunLogs(config.logs, config.run_id, row.name, self._console, self._selector, logs_limit)
        stack.callback(self._logs.close)
        self._events_log = self._event_log(row, environ, stack)  # which may make a temporary folder
        if self._logs.temporary:
            self._tree.remove_folder_at_end(self._logs.temporary)
        self._round_events = events.RoundEvents(self._events_log, row.id)
        self._memory = CheckpointMemory(self._round_check.folder, self._selector, self._events_log.write, self._console.say)
        stack.callback(self._memory.close)
        self._tracker = FailureTracker(row.name, self._logs)
        like = worker_like(config, replace(self._node, cpus=cpus.usable_cpus()))
        self._forks = ParkedForks(config.preload, like, config.nproc, self._selector, self._tree, self._console.say)
        stack.callback(self._forks.close)
        callbacks = (self._on_worker_exit, self._on_workers_idle, self._on_stuck, self._tree.owns, self._tree.worker_reaped)
        self._workers = Workers(self._selector, *callbacks, starts=self._forks.spawn)
        limits = config.hang_timeout, config.first_step_timeout
        self._hangs = HangWatch(*limits, self._workers, self._events_log.write, self._console.say, self._on_hung)
        stack.callback(self._hangs.close)
        self._accounting = Accounting(self._hangs.pages, self._events_log.write)
        self._session = Session.of(config, row, self._worker_store_failed)
        stack.callback(self._session.close)
        self._selector.register(self._session, selectors.EVENT_READ, self._on_store)
        self._quarantine = Quarantine(config, self._session, self._accounting, self._events_log.write, self._console.say, self._end_parked)
        parts = health.Parts(
            config, self._session, self._workers, self._round_events, self._memory, self._hangs, self._accounting, self._quarantine
        )
        stack.callback(health.serve(parts, self._selector, self._console.say))

    def _event_log(self, row: NodeRow, environ: Mapping[str, str], stack: ExitStack) -> events.EventLog:
        """Return the log of events, which ``stack`` closes."""
        also = self._console.say if self._config.logs.event_log == "console" else None
        spans = tracing.begin(environ, self._config.run_id, row.name, self._logs.disk.notice)
        if spans is not None:
            stack.callback(spans.close)
        log = events.EventLog(row.id, row.name, self._logs.events_file(), also, spans.take if spans is not None else None)
        stack.callback(log.close)
        return log

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        try:
            while self._forks.loading and not self._forks.nearly_loaded and not self._signum:
                self._turn()
            if self._forks.loading:
                torch_class.import_ahead()  # workers that need not import come to their store at once
            return self._loop()
        except Exception:
            self._stop_after_a_bug()
            raise

    def _stop_after_a_bug(self) -> None:
        """Stop the workers with their whole grace, without the machine."""
        self._selector.unregister(self._session)
        if self._workers.running:
            self._console.say("internal error, see below; stopping the workers here")
        self._workers.stop(self._config.timing.grace)
        self._console.start_dropping()
        while self._workers.running:
            self._turn()

    def _turn(self, until: float = math.inf) -> None:
        """Handle signals, workers, output and the guard once, at ``until`` at the latest. The machine takes no part."""
        now = clock.now()
        due = min(until, now + 0.5, self._logs.tick(now), self._workers.deadline or math.inf)
        for key, mask in self._selector.select(max(0.0, due - now)):
            key.data(mask)
        self._renew(clock.now())
        self._workers.tick(clock.now())

    def _loop(self) -> int:
        self._accounting.join()
        prepares = self._forks.loading  # the last module is imported while the other nodes take notice of this one
        self._session.begin(prepares)
        while True:
            if prepares and not self._forks.loading:
                prepares = False
                self._session.post(Prepared(clock.now()))
            self._handle_events()
            if self._finish is not None:
                return self._end(self._finish)
            wait = self._time_to_wait()
            ready = self._selector.select(wait)
            self._check_standstill(math.inf if wait is None else wait)
            for key, mask in ready:
                key.data(mask)
            self._on_time(clock.now())

    def _check_standstill(self, waited: float) -> None:
        """Report a standstill to the machine before any other event: a worker that the guard has killed meanwhile did not fail."""
        now = clock.now()
        over = self._tree.lease_is_over(now)
        if over:
            self._forks.drop()  # the guard may be killing them; none of them may become a worker meanwhile
        ended = bool(self._workers.running) and over
        seconds = self._session.check_standstill(now, waited, ended)
        if seconds is not None:
            if ended or seconds > self._config.timing.expire / 2:
                short = seconds < STANDSTILL
                what = "the others may take this node for lost" if short else f"this agent stood still for {seconds:.0f} s"
                self._console.say(what + ("; its workers were ended" if ended else ""))
            self._lone = self._lone and not ended
            self._events_log.write(events.StoodStill(round(seconds, 3), ended))
        self._renew(now)

    def _renew(self, now: float) -> None:
        """Renew the guard's lease.

        Where workers train without another node it ends when these may consider this node lost, even if it is healthy: decision 0006.
        """
        if self._lone:
            self._tree.end_lease_at(self._session.machine.store.kept_alive + self._config.timing.lone_lease, now)
        else:
            self._tree.renew(now)

    def _time_to_wait(self) -> float | None:
        """Return the seconds until something must be done although no descriptor is ready; None: there is nothing."""
        now = clock.now()
        parts = self._logs, self._round_check, self._memory, self._live, self._hangs, self._accounting, self._quarantine
        ticks = [part.tick(now) for part in parts]
        times = (self._session.due, self._tracker.report_at, self._workers.deadline, *ticks)  # a tick may bring a report
        first = min(moment for moment in times if moment is not None)
        return None if first == math.inf else max(0.0, first - clock.now())

    def _on_time(self, now: float) -> None:
        """Do what is due."""
        deadline = self._workers.deadline
        if deadline is not None and now >= deadline:
            self._workers.tick(now)
        if now >= self._tracker.report_at:
            if victims := self._tracker.victims:
                self._tracker.note_missed(self._hangs.stacks.elsewhere(victims))
            failures = self._tracker.take_report()
            for record in failures:
                self._events_log.write(events.Failure.of(self._round, record))
            self._session.post(WorkersFailed(now, failures))
        self._session.check_time(now)

    def _handle_events(self) -> None:
        while True:
            self._check_standstill(0.0)  # before each event, so that the machine does not mistake the time for one without contact
            event = self._session.next_event()
            if event is None:
                return
            machine = self._session.machine
            if isinstance(event, Synced | SyncFailed) and not machine.store.looking:
                self._round_check.settle(event, self._may_be_replaced)
            actions = self._session.step(event)
            if isinstance(event, Synced):
                self._brief_guard()
            self._round_events.see(machine.record, event.now, machine.store.quiet)
            self._accounting.see(machine.record)
            self._quarantine.see(machine.record)
            for action in actions:
                if not self._session.carry_out(action):
                    self._perform(action)

    def _brief_guard(self) -> None:
        """Tell the guard where to write this agent's death notice, and which round that would be about.

        A store that is served here ends with this agent. Then the guard votes in the standby stores of the others. That of another member
        does so where the store cannot be reached, except in a job so large that the vote could keep the notice from fitting into the pipe.
        """
        machine, access = self._session.machine, self._session.access
        words = machine.last_words
        vote = words[1] if words else None
        store = None if machine.hosting else access.for_guard(machine.store.place)
        known = (machine.store.round_known, store, vote)
        if known != self._briefed[0]:
            notice = None
            if store or vote:
                spelled = encode_vote(vote, self._config.token) if vote else ""
                if store and len(spelled) > LARGEST_VOTE:
                    spelled = ""
                notice = Notice(store, access.key_prefix, machine.row.id, self._config.token, *machine.store.round_known, spelled)
            self._briefed = known, notice
            self._tree.write_notice_with(notice.encode() if notice else b"")

    def _perform(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Stop):
            self._stop(action)
        elif isinstance(action, Say):
            self._console.say(action.text)
        elif isinstance(action, Finish):
            self._finish = action

    # -- callbacks ------------------------------------------------------------------------------------------------------

    def _read_store_soon(self) -> None:
        self._session.post(Changed(clock.now()))

    def _may_be_replaced(self) -> bool:
        return self._session.machine.store.may_be_replaced

    def _describe_store(self) -> str:
        live = [process.spec.rank for process in self._workers.processes.values() if self._live.is_live(process.pid)]
        steps = [asdict(one) for one in self._hangs.steps(clock.now())]
        finished = sorted(self._workers.finished)
        return self._session.describe_store(steps=steps, live=sorted(live), finished=finished, devices=devices(self._node.environ))

    def _on_store(self, mask: int) -> None:
        for line in self._session.receive():
            self._console.say(line)

    def _on_signal(self, signum: int, count: int) -> None:
        """Leave at the first signal, leave the workers ``SECOND_SIGNAL_GRACE`` at the second, kill them at the third."""
        name = signal.Signals(signum).name
        self._events_log.write(events.Signal(name, count))
        if count == 1:
            self._signum = signum
            self._tracker.agent_signalled()
        if self._finish:  # no worker runs any more, only what they have left running
            self._stop_left_running(SECOND_SIGNAL_GRACE if count < 3 else 0.0)
        elif count == 1:
            grace, second = self._config.timing.grace, min(self._config.timing.grace, SECOND_SIGNAL_GRACE)
            limits = f"; its workers have {grace:g} s, after a second signal {second:g} s" if self._workers.running else ""
            self._console.say(f"{name}: this node leaves{limits}")
            self._session.post(Leave(clock.now(), name))
            self._quarantine.end()
        elif self._workers.running:
            grace = SECOND_SIGNAL_GRACE if count == 2 else 0.0
            self._console.say(f"{name}: its workers have {grace:g} s")
            self._workers.stop(grace)

    def _on_forward(self, signum: int) -> None:
        self._workers.forward(signum)

    def _on_child(self) -> None:
        self._tree.reap_orphans((*self._workers.pids, *self._forks.pids))

    def _on_worker_exit(self, end: WorkerExit) -> None:
        self._live.worker_ended(end.pid, end.code)
        self._events_log.write(events.WorkerExit(end.rank, end.local_rank, end.pid, end.code, end.after))
        if end.code and not self._tracker.stopped:
            self._accounting.worker_failed()
        before = self._tracker.victims
        self._tracker.worker_ended(end)
        if self._tracker.victims and not before and not self._tracker.stopped:
            self._hangs.stacks.ask()  # they are there when the failure is reported

    def _live_workers(self) -> LiveWorkers:
        heard = self._on_parked, self._on_lost, self._on_gathered
        return LiveWorkers(self._selector, self._is_worker, *heard, self._runs)

    def _runs(self, round: int) -> bool:
        """Return whether the workers of ``round`` are those here. May be called in any thread."""
        return self._round == round and self._finish is None

    def _is_worker(self, pid: int) -> bool:
        return pid in self._workers.pids

    def _on_parked(self, pid: int) -> None:
        self._workers.park(pid)

    def _on_gathered(self, round: int) -> None:
        """Let the guard's lease be the usual one: no worker here trains without the other nodes any more."""
        record = self._session.machine.record
        if round == self._round and record is not None and record.round == round:
            self._lone = self._lone and len(record.members) == 1
            self._session.post(Gathered(clock.now(), round))

    def _on_lost(self, pid: int, round: int) -> None:
        """End the round: a live worker has lost peers, and no agent has seen a failure. It keeps its state, and parks with the others."""
        if round != self._round or self._tracker.stopped:
            return
        for local_rank, process in self._workers.processes.items():
            if process.pid == pid and (end := self._workers.end_by_kill(local_rank)):
                self._tracker.lost_peers(end)

    def _on_hung(self, local_rank: int, blame: Blame, note: str, stack: list[str], seconds: float) -> None:
        """Report a worker that has made no progress for ``seconds``. It is killed when the workers are stopped, see ``_stop``.

        Its peers may fail as soon as it ends, and should not be reported before it.
        """
        if end := self._workers.end_by_kill(local_rank):
            self._accounting.worker_failed()
            self._tracker.worker_hung(end, blame, note, stack, seconds)

    def _on_stuck(self, text: str) -> None:
        """Leave: a worker that SIGKILL does not end keeps its GPU, so this node cannot run another round."""
        self._console.say(text)
        self._leave_sick("a worker hangs in the kernel")

    def _leave_sick(self, why: str) -> None:
        self._sick = True
        self._session.post(Leave(clock.now(), why))

    def _end_parked(self) -> None:
        """End the workers that wait for a next round: there is none for a while."""
        if self._workers.parked:
            self._workers.stop(self._config.timing.failure_grace)

    def _on_workers_idle(self) -> None:
        if self._quarantine.out:  # these were parked when their round ended
            return
        self._hangs.stop()
        self._lone = False
        if self._tracker.stopped or self._finish:
            self._tree.kill_left_behind([process.pid for process in self._workers.parked.values()])
        self._round_events.stopped(self._round, clock.now())
        self._accounting.end_round()
        if self._tracker.stopped:
            leaving = bool(self._signum or self._sick or self._finish)
            kept = any(self._live.settled(process.pid) for process in self._workers.parked.values())
            self._quarantine.workers_stopped(self._round, self._tracker.failures, kept, self._hangs.stragglers, leaving)
        elif not self._tracker.failures:  # else the machine hears of the failures, and asks for a stop
            self._session.post(WorkersSucceeded(clock.now()))

    def _worker_store_failed(self, why: str) -> None:
        self._session.post(Leave(clock.now(), why))  # in another thread: the loop takes it when it goes round, within a beat

    # -- what the machine asks for ----------------------------------------------------------------------------------------

    def _start(self, action: Start) -> None:
        record, node_rank = action.record, action.node_rank
        store = self._session.worker_store
        assert store is not None
        self._accounting.start_round(record.round)
        self._round = record.round
        self._lone = (len(record.members) == 1 or self._session.machine.trains_apart) and not self._config.standalone
        self._renew(clock.now())
        if self._round_events.started_at is not None and not self._tracker.stopped:
            self._end_left_running()
        self._round_check.stopping = "no"
        pause = self._session.machine.pause_of_new if self._tracker.failures else 0.0
        self._tracker.start_round(record.round - 1, alone=record.world_size == 1)
        parked = {local_rank: process.pid for local_rank, process in self._workers.parked.items()}
        self._node = replace(self._node, pages=self._hangs.pages.renew(record.members[node_rank].slots, self._accounting.farthest))
        try:
            specs = self._specs(record, node_rank)
            self._announce(record, node_rank, specs, [spec.rank for spec in specs if spec.local_rank in parked])
            logs = self._logs.open_round(record.round - 1, specs, record.world_size, parked)
            if not self._logs.error_file(record.round - 1, 0):
                specs = self._specs(record, node_rank)  # without error files, which could not be made
            store.end_round()
            if parked and node_rank == 0:  # those who go on need it first; torch is imported
                self._session.serve_workers()
            self._tell_states(record.round, node_rank, specs, parked)
            if pause:
                specs = self._hold_new(specs, parked, pause, record.quick)
            self._workers.start(specs, logs, partial(self._resume, record.round, [spec for spec in specs if spec.local_rank in parked]))
            self._accounting.workers_started()
            self._hangs.start(partial(self._meeting, record, node_rank) if len(record.members) > 1 else None)
            self._tree.add_workers(self._workers.pids)
            self._forks.refill()
            if not parked and node_rank == 0:  # after the workers: importing torch would delay them, and the kernel keeps their connections
                self._session.serve_workers()
        except (OSError, StartError) as error:  # a command that cannot be executed ends as a worker
            self._leave_sick(f"cannot start workers here: {error}")

    def _meeting(self, record: RoundRecord, node_rank: int) -> Meeting:
        access, place = self._session.access, self._session.machine.store.place
        return Meeting(access.for_status(place), access.key_prefix, self._config.token, record.fence, node_rank, len(record.members))

    def _tell_states(self, round: int, node_rank: int, specs: list[WorkerSpec], parked: Mapping[int, int]) -> None:
        """Tell the live workers of all nodes which ranks here have a state. In the first round nobody has, and nobody asks."""
        if round > 1:
            env = specs[0].env
            states = {spec.rank: self._live.settled(parked[spec.local_rank]) for spec in specs if spec.local_rank in parked}
            having = {rank: settled for rank, settled in states.items() if settled}
            live_states.announce_states(env["MASTER_ADDR"], int(env["MASTER_PORT"]), round, node_rank, having, lambda: self._round == round)

    def _hold_new(
        self, specs: list[WorkerSpec], parked: Mapping[int, int], pause: float, quick: int
    ) -> list[WorkerSpec]:
        """Return the workers; those in place of failed ones begin after ``pause`` seconds.

        ``quick``: as in the round record.
        """
        if held := ", ".join(str(spec.rank) for spec in specs if spec.local_rank not in parked):
            why = f"{quick} rounds in a row failed within {QUICK:g} s of their start"
            when = f"the new worker of rank {held} starts after {pause:.1f} s"
            self._console.say(f"{why}; {when}, the others go on")
        return [spec if spec.local_rank in parked else replace(spec, pause=pause) for spec in specs]

    def _resume(self, round: int, specs: list[WorkerSpec]) -> None:
        """Let the workers of ``specs``, which were parked, take part in the round. One that cannot be told is ended, and so has failed."""
        for spec in specs:
            process = self._workers.processes.get(spec.local_rank)
            env = {name: spec.env[name] for name in ROUND_NAMES if name in spec.env}
            if process is not None and not self._live.resume(process.pid, round, env):
                process.kill_group()

    def _end_left_running(self) -> None:
        """End what the workers of the last round left running, also when they succeeded: it must not disturb the next round."""
        if count := self._workers.end_left_running():
            self._console.say(f"ended {ending.processes(count)} that the workers of the last round had left running")
        self._tree.kill_left_behind()

    def _specs(self, record: RoundRecord, node_rank: int) -> list[WorkerSpec]:
        access = self._session.access
        interface, loopback = access.node_address.interface, access.node_address.loopback
        node = replace(self._node, cpus=cpus.usable_cpus(), interface=interface, loopback=loopback, store=access.worker_endpoint)
        return worker_specs(self._config, record, node_rank, node, lambda local: self._logs.error_file(record.round - 1, local))

    def _announce(self, record: RoundRecord, node_rank: int, specs: list[WorkerSpec], kept: list[int]) -> None:
        if self._round_events.started_at is None:
            mine, notices = devices(self._node.environ), self._session.access.notices
            warn_of_twins(record.members, node_rank, self._config.run_id, self._round_check.path, mine, notices.append)
        nodes, workers = len(record.members), record.world_size
        self._round_events.start(record, node_rank, [spec.rank for spec in specs], kept, clock.now())
        if self._config.max_nodes > 1 or record.round > 1:
            here = f"ranks {specs[0].rank}-{specs[-1].rank}" if len(specs) > 1 else f"rank {specs[0].rank}"
            size = f"{nodes} node{'s' * (nodes > 1)}, {workers} worker{'s' * (workers > 1)}"
            same = f", {len(kept)} in {'the process' if len(kept) == 1 else 'processes'} of the last round" if kept else ""
            self._console.say(f"round {record.round}: {size}; here {here}{same} ({record.reason})")

    def _stop(self, action: Stop) -> None:
        if self._tracker.stopped:  # the second request for the same round: the stop must be shorter
            self._workers.stop(action.within or 0.0)
            return
        if action.victim and not any(map(self._live.is_live, self._workers.pids)):
            self._look_whom_others_missed()
        self._end_round(action.planned)
        asked = [] if self._signum else self._live.park([process.pid for process in self._workers.processes.values()], self._round)
        all_asked = bool(asked) and len(asked) == len(self._workers.processes)
        timing = self._config.timing
        grace = timing.grace if action.planned and not all_asked else timing.failure_grace
        grace = grace if action.within is None else min(grace, action.within)
        self._round_events.stop(self._round, action.planned, action.reason, grace, clock.now())
        if not self._workers.running and not self._workers.left_running:
            self._on_workers_idle()
            return
        if self._config.max_nodes > 1 and not self._signum:
            self._console.say(f"{'parking' if asked else 'stopping'} the workers here: {action.reason}")
        self._workers.stop(grace, self._stop_signal(), asked)
        if not all_asked:
            self._console.start_dropping()  # after the signal, so that there is room for their last output

    def _look_whom_others_missed(self) -> None:
        """Take the stacks of the workers here before they are stopped: peers have failed, probably for having waited for one of them."""
        victims = self._tracker.victims
        if not victims:
            self._hangs.stacks.ask()
        self._hangs.stacks.wait()
        self._tracker.note_missed(self._hangs.stacks.elsewhere(victims))

    def _end_round(self, planned: bool) -> None:
        """Note that the round is over here. Workers that were found to hang are killed now, see ``_on_hung``."""
        self._hangs.stop()
        self._accounting.stop()
        self._tracker.before_stop(self._workers.alive)
        for local_rank in self._tracker.hung:
            self._workers.kill(local_rank)
        self._round_check.stopping = "planned" if planned else "failure"

    def _stop_signal(self) -> int:
        """Return the signal that stops workers: the first that the agent got, or SIGTERM.

        A shell that runs the training (``--no-python run.sh``) leaves SIGINT to its child and waits for the child, so it gets SIGTERM.
        """
        shell = self._signum == signal.SIGINT and self._config.command.no_python
        return signal.SIGTERM if shell or not self._signum else self._signum

    # -- the end --------------------------------------------------------------------------------------------------------

    def _end(self, finish: Finish) -> int:
        """Say how it ended. Returns the exit code."""
        needed = self._briefed[1] if self._session.machine.last_words and finish.closed is None else None  # by others, who go on
        if needed is None:
            self._tree.write_notice_with(b"")  # this node has left, so nobody waits for it
        self._memory.close()  # this node runs no further round, but its agent may stay for other jobs
        self._wait_for_left_running(finish.outcome is Outcome.SUCCEEDED)
        config, record, row = self._config, self._session.machine.record, self._session.machine.row
        began = self._tracker.began if record and record.round == self._round else None
        started = self._round_events.started_at is not None
        rows = self._session.machine.store.rows
        done = ending.done(record, rows) if record else ()
        ended = ending.Ending(finish, record, began, self._signum, self._sick, started, bool(row.round), row.name, done)
        code = ended.exit_code(config.exit_code_from_worker)
        ended.write_termination_log(code, self._console)  # first: whoever signals this agent may be about to kill it
        totals = self._accounting.end(finish.closed is not None or finish.outcome is Outcome.LEFT)
        self._events_log.write(events.End(finish.outcome.value, finish.reason, int(code)))
        if record and record.index(row.id) == 0 and (config.max_nodes > 1 or record.round > 1 or totals.total > account.LONG):
            for line in account.lines(row.name, totals):
                self._console.say(line)
        ended.tell(config, self._console, self._logs, self._node.environ.get("TORCHELASTIC_ERROR_FILE"))
        self._logs.disk.drain(END_LIMIT)
        self._console.flush(ending.FLUSH)
        if self._session.access.serves_jobs and needed is None and not self._signum:
            ending.stay_for_other_jobs(self._session, config.run_id, self._pause, self._console)
        if needed is not None:
            self._hand_over(needed)
        return code

    def _hand_over(self, notice: Notice) -> None:
        """Tell the standby stores of the others that this node has ended, with the store that it served. Else the guard tells them."""
        self._session.close()
        self._session.access.end_store()
        if tell_standbys(notice, set()):
            self._tree.write_notice_with(b"")

    def _pause(self, seconds: float) -> bool:
        """Wait for signals and output. Returns whether the agent was signalled."""
        for key, mask in self._selector.select(seconds):
            key.data(mask)
        return bool(self._signum)

    def _wait_for_left_running(self, succeeded: bool) -> None:
        """Wait until nothing runs any more that the workers left running.

        When the job succeeded, an upload may end by itself within the grace; a signal to the agent ends this wait. After anything but
        success what is left gets the stop signal at once.
        """
        timing = self._config.timing
        if self._workers.parked:  # there is no next round for them
            self._workers.stop(timing.failure_grace)
        if succeeded and not self._signum:
            ending.wait_for_left_running(self._workers, timing.grace, self._turn, lambda: bool(self._signum), self._console.say)
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
            self._console.say(f"{name} to {ending.processes(count)} that the workers had left running, SIGKILL after {grace:g} s")
            self._workers.stop(grace, signum)
