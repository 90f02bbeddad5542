"""The agent of one node: one loop over signals, workers, output and the store. The machine decides, the agent performs.

All state belongs to the thread of the loop. Other threads (those of the store, of the workers' store, of the disks) hand over what
they have through a descriptor that the loop waits for. Only the answers to two rare questions to all nodes are polled: ``GLANCE`` of
quarantine.py and ``LISTEN`` of hangs/watch.py. The agent tells its parts (``part.py``, made by ``assemble.py``) what happens to rounds.
See docs/agent.md.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
from contextlib import ExitStack
from dataclasses import replace

from elastirun import clock
from elastirun.agent import ending
from elastirun.agent.assemble import assemble
from elastirun.agent.host import name_servers
from elastirun.agent.observe import account, events
from elastirun.agent.output.agent_lines import Level
from elastirun.agent.output.logs import END_LIMIT
from elastirun.agent.part import NodeRound, WorkerExit
from elastirun.agent.processes.preload.server_start import StartedServer
from elastirun.agent.processes.process import require_pidfds
from elastirun.agent.session import STANDSTILL
from elastirun.config import LaunchConfig
from elastirun.errors import StartError
from elastirun.mesh import Mesh
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.wire.actions import Action, Finish, Outcome, Say, Start, Stop
from elastirun.rendezvous.wire.events import Gathered, Leave, Prepared, Synced, SyncFailed, WorkersFailed, WorkersStopped, WorkersSucceeded
from elastirun.rendezvous.wire.records import Blame

SECOND_SIGNAL_GRACE = 5.0  # seconds left to the workers after the agent was signalled twice


def run(config: LaunchConfig, given: StartedServer | None = None) -> int:
    """Run this node's part of the job to its end. Returns the exit code (``ExitCode``). ``given``: a fork server that was started before.

    From then on this process serves the agent alone: the agent handles its signals, and torch cannot be imported in it any more.
    """
    require_pidfds()
    torch_class.store_only()
    environ = dict(os.environ)
    name_servers.only_python_asks()
    with ExitStack() as stack:
        try:
            agent = Agent(with_a_store_for_workers(config, torch_class.torch_version()), environ, stack, given)
        except OSError as error:  # no descriptor, no space, no folder for temporary files
            raise StartError(f"cannot start here: {error}") from error
        return agent.run()


def with_a_store_for_workers(config: LaunchConfig, torch: str) -> LaunchConfig:
    """Return the configuration with a store of the workers' own where that of this version of torch cannot be cleared between rounds."""
    return config if torch_class.lists_keys(torch) else replace(config, meet_at_endpoint=False)


class Agent:
    """Runs this node's part of one job. ``environ``: for the workers. ``stack`` closes what the agent opens."""

    def __init__(self, config: LaunchConfig, environ: dict[str, str], stack: ExitStack, given: StartedServer | None = None) -> None:
        self._config, self._environ = config, environ
        self._selector = stack.enter_context(selectors.PollSelector())
        self._finish: Finish | None = None
        self._round: NodeRound | None = None  # the round whose workers run here, or ran last
        self._stopped: WorkersStopped | None = None  # what the machine has to hear when no part holds it any more
        self._signum = 0  # the first signal that the agent got; 0: none
        self._sick = False  # a worker hangs in the kernel, or none can be started
        self._made = made = assemble(config, environ, self, self._selector, stack, given)
        self._console, self._session, self._workers, self._parts = made.console, made.session, made.workers, made.parts
        self._tracker, self._live, self._hangs, self._forks = made.tracker, made.live, made.hangs, made.forks

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
            self._console.say("internal error, see below; stopping the workers here", Level.ERROR)
        self._workers.stop(self._config.timing.grace)
        self._console.start_dropping()
        while self._workers.running:
            self._turn()

    def _turn(self, until: float = math.inf) -> None:
        """Handle signals, workers, output and the guard once, at ``until`` at the latest. The machine takes no part."""
        now = clock.now()
        due = min(until, now + 0.5, self._made.logs.tick(now), self._workers.deadline or math.inf)
        for key, mask in self._selector.select(max(0.0, due - now)):
            key.data(mask)
        self._made.lease.renew(clock.now())
        self._workers.tick(clock.now())

    def _loop(self) -> int:
        self._made.accounting.join()
        prepares = self._forks.loading  # the last module is imported while the other nodes take notice of this one
        self._session.begin(prepares)
        while True:
            if prepares and not self._forks.loading:
                prepares = False
                self._session.post(Prepared(clock.now()))
            self._tell_machine_of_stop()
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
        over = self._made.lease.is_over(now)
        if over:
            self._forks.drop()  # the guard may be killing them; none of them may become a worker meanwhile
        ended = bool(self._workers.running) and over
        seconds = self._session.check_standstill(now, waited, ended)
        if seconds is not None:
            if ended or (self._config.max_nodes > 1 and seconds > self._config.timing.expire / 2):
                short = seconds < STANDSTILL
                what = "the others may take this node for lost" if short else f"this agent stood still for {seconds:.0f} s"
                self._console.warn(what + ("; its workers were ended" if ended else ""))
            self._made.lease.stood_still(ended)
            self._made.log.write(events.StoodStill(round(seconds, 3), ended))
        self._made.lease.renew(now)

    def _time_to_wait(self) -> float | None:
        """Return the seconds until something must be done although no descriptor is ready; None: there is nothing."""
        now = clock.now()
        ticks = [part.tick(now) for part in self._parts]
        self._tell_machine_of_stop()
        due = min(self._session.due, self._tracker.report_at, self._workers.deadline or math.inf, *ticks)  # a tick may bring a report
        return None if due == math.inf else max(0.0, due - clock.now())

    def _tell_machine_of_stop(self) -> None:
        """Tell the machine that the workers have been stopped, unless a part holds that back. Until then no round includes this node."""
        if self._stopped is not None and not any(part.holds for part in self._parts):
            self._session.post(replace(self._stopped, now=clock.now()))
            self._stopped = None

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
                self._made.log.write(events.Failure.of(self._round.number if self._round else 0, record))
            self._session.post(WorkersFailed(now, failures))
        self._session.check_time(now)

    def _handle_events(self) -> None:
        machine = self._session.machine
        while True:
            self._check_standstill(0.0)  # before each event, so that the machine does not mistake the time for one without contact
            event = self._session.next_event()
            if event is None:
                return
            if isinstance(event, Synced | SyncFailed) and not machine.store.looking:
                self._made.round_check.settle(event, lambda: machine.store.may_be_replaced)
            actions = self._session.step(event)
            if isinstance(event, Synced):
                self._made.lease.brief()
            for part in self._parts:
                part.see(machine.record, event.now)
            for action in actions:
                if not self._session.carry_out(action):
                    self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Stop):
            self._stop(action)
        elif isinstance(action, Say):
            self._console.say(action.text)
        elif isinstance(action, Finish):
            self._finish = action

    # -- what the agent hears of its parts ----------------------------------------------------------------------------------

    def store_readable(self, mask: int) -> None:
        for line in self._session.receive():
            self._console.say(line)

    def store_failed(self, why: str) -> None:
        """Leave: the workers' store is gone. Called in another thread: the loop takes the event when it goes round, within a beat."""
        self._session.post(Leave(clock.now(), why))

    def signalled(self, signum: int, count: int) -> None:
        """Leave at the first signal, leave the workers ``SECOND_SIGNAL_GRACE`` at the second, kill them at the third."""
        name = signal.Signals(signum).name
        self._made.log.write(events.Signal(name, count))
        if count == 1:
            self._signum = signum
            self._tracker.agent_signalled()
        if self._finish:  # no worker runs any more, only what they have left running
            self._stop_left_running(SECOND_SIGNAL_GRACE if count < 3 else 0.0)
        elif count == 1:
            grace, second = self._config.timing.grace, min(self._config.timing.grace, SECOND_SIGNAL_GRACE)
            limits = f"; its workers have {grace:g} s, after a second signal {second:g} s" if self._workers.running else ""
            self._console.say(f"{name}: this node leaves{limits}")
            self._leave(name)
        elif self._workers.running:
            grace = SECOND_SIGNAL_GRACE if count == 2 else 0.0
            self._console.say(f"{name}: its workers have {grace:g} s")
            self._workers.stop(grace)

    def child_ended(self) -> None:
        self._made.tree.reap_orphans((*self._workers.pids, *self._forks.pids))

    def worker_ended(self, end: WorkerExit) -> None:
        before = self._tracker.victims
        for part in self._parts:
            part.worker_ended(end)
        if end.code and not self._tracker.stopped:
            self._worker_failed()
        self._tracker.record_end(end)
        if self._tracker.victims and not before and not self._tracker.stopped:
            self._hangs.stacks.ask()  # they are there when the failure is reported

    def _worker_failed(self) -> None:
        for part in self._parts:
            part.worker_failed()

    def runs(self, round: int) -> bool:
        """Return whether the workers of ``round`` are those here. May be called in any thread."""
        return self._round is not None and self._round.number == round and self._finish is None

    def gathered(self, round: int) -> None:
        """Let the guard's lease be the usual one: no worker here trains without the other nodes any more."""
        record = self._session.machine.record
        if self._round is not None and self._round.number == round and record is not None and record.round == round:
            self._made.lease.gathered(len(record.members))
            self._session.post(Gathered(clock.now(), round))

    def peers_lost(self, pid: int, round: int) -> None:
        """End the round: a live worker has lost peers, and no agent has seen a failure. It keeps its state, and parks with the others."""
        if self._round is None or round != self._round.number or self._tracker.stopped:
            return
        for local_rank, process in self._workers.processes.items():
            if process.pid == pid and (end := self._workers.end_by_kill(local_rank)):
                self._tracker.lost_peers(end)

    def worker_hung(self, local_rank: int, blame: Blame, note: str, stack: list[str], seconds: float) -> None:
        """Report a worker that has made no progress for ``seconds``. It is killed when the workers are stopped, see ``_judge_before_stop``.

        Its peers may fail as soon as it ends, and should not be reported before it.
        """
        if end := self._workers.end_by_kill(local_rank):
            self._worker_failed()
            self._tracker.worker_hung(end, blame, note, stack, seconds)

    def worker_stuck(self, text: str) -> None:
        """Leave: a worker that SIGKILL does not end keeps its GPU, so this node cannot run another round."""
        self._console.warn(text)
        self._leave_sick("a worker hangs in the kernel")

    def _leave_sick(self, why: str) -> None:
        self._sick = True
        self._leave(why)

    def _leave(self, why: str) -> None:
        self._session.post(Leave(clock.now(), why))
        for part in self._parts:
            part.leaves()

    def sits_out(self) -> None:
        """End the workers that wait for a next round: there is none for a while."""
        if self._stopped is not None:
            self._stopped = replace(self._stopped, kept=False)
        if self._workers.parked:
            self._workers.stop(self._config.timing.failure_grace)

    def workers_idle(self) -> None:
        if self._stopped is not None:  # those that were parked have ended, while this node sits out
            return
        tracker, parked = self._tracker, [process.pid for process in self._workers.parked.values()]
        if tracker.stopped or self._finish:
            self._made.tree.kill_left_behind(parked)
        for part in self._parts:
            part.idle()
        if tracker.stopped:
            self._stopped = WorkersStopped(clock.now(), tracker.failures, any(map(self._live.settled, parked)))
            self._tell_machine_of_stop()
        elif not tracker.failures:  # else the machine hears of the failures, and asks for a stop
            self._session.post(WorkersSucceeded(clock.now()))

    # -- what the machine asks for ----------------------------------------------------------------------------------------

    def _start(self, action: Start) -> None:
        record = action.record
        if self._round is not None and not self._tracker.stopped:
            self._end_left_running()
        parked = {local_rank: process.pid for local_rank, process in self._workers.parked.items()}
        self._round = round = NodeRound(record, action.node_rank, parked)
        pause = self._session.machine.pause_of_new if self._tracker.failures else 0.0
        for part in self._parts:
            part.round_starts(round)
        self._say_start(round)
        try:
            pages = self._made.pages.renew(len(round.ranks), self._made.accounting.farthest)
            self._made.start.start(round, pages, pause)
            for part in self._parts:
                part.workers_started(round)
            self._made.start.serve_workers(round)
        except (OSError, StartError) as error:  # a command that cannot be executed ends as a worker
            self._leave_sick(f"cannot start workers here: {error}")

    def _say_start(self, round: NodeRound) -> None:
        if self._config.max_nodes > 1 or round.number > 1:
            nodes, workers, ranks = len(round.record.members), round.record.world_size, round.ranks
            here = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
            size = f"{nodes} node{'s' * (nodes > 1)}, {workers} worker{'s' * (workers > 1)}"
            size += f", {Mesh.parse(self._config.mesh).described(workers)}" if self._config.mesh else ""
            kept = len(round.parked)
            them = "" if kept == len(round.ranks) else f"{kept} of them "
            same = f", {them}in the same process{'es' * (kept > 1)} as before" if kept else ""
            self._console.say(f"round {round.number}: {size}; here {here}{same} ({round.record.reason})")

    def _end_left_running(self) -> None:
        """End what the workers of the last round left running, also when they succeeded: it must not disturb the next round."""
        if count := self._workers.end_left_running():
            self._console.say(f"ended {ending.processes(count)} that the workers of the last round had left running")
        self._made.tree.kill_left_behind()

    def _stop(self, action: Stop) -> None:
        if self._tracker.stopped:  # the second request for the same round: the stop must be shorter
            self._workers.stop(action.within or 0.0)
            return
        self._judge_before_stop(action.victim)
        pids = [process.pid for process in self._workers.processes.values()]
        asked = [] if self._signum or self._round is None else self._live.park(pids, self._round.number)
        all_asked = bool(asked) and len(asked) == len(pids)
        grace = self._grace(action, saves=not all_asked)
        for part in self._parts:
            part.round_stops(action, grace)
        if not self._workers.running and not self._workers.left_running:
            self.workers_idle()
            return
        if self._config.max_nodes > 1 and not self._signum:
            level = Level.INFO if action.planned else Level.WARNING
            self._console.say(f"{'parking' if asked else 'stopping'} the workers here: {action.reason}", level)
        self._workers.stop(grace, self._stop_signal(), asked)
        if not all_asked:
            self._console.start_dropping()  # after the signal, so that there is room for their last output

    def _grace(self, action: Stop, saves: bool) -> float:
        """Return the seconds that the workers have. ``saves``: some are not parked, and may save a checkpoint at a planned stop."""
        timing = self._config.timing
        grace = timing.grace if action.planned and saves else timing.failure_grace
        return grace if action.within is None else min(grace, action.within)

    def _judge_before_stop(self, victim: bool) -> None:
        """Note what the workers show before the stop changes it, and kill those that were found to hang. ``victim``: as in ``Stop``."""
        if victim and not any(map(self._live.is_live, self._workers.pids)):
            self._look_whom_others_missed()
        self._tracker.before_stop(self._workers.alive)
        for local_rank in self._tracker.hung:
            self._workers.kill(local_rank)

    def _look_whom_others_missed(self) -> None:
        """Take the stacks of the workers here before they are stopped: peers have failed, probably for having waited for one of them."""
        victims = self._tracker.victims
        if not victims:
            self._hangs.stacks.ask()
        self._hangs.stacks.wait()
        self._tracker.note_missed(self._hangs.stacks.elsewhere(victims))

    def _stop_signal(self) -> int:
        """Return the signal that stops workers: the first that the agent got, or SIGTERM.

        A shell that runs the training (``--no-python run.sh``) leaves SIGINT to its child and waits for the child, so it gets SIGTERM.
        """
        shell = self._signum == signal.SIGINT and self._config.command.no_python
        return signal.SIGTERM if shell or not self._signum else self._signum

    # -- the end --------------------------------------------------------------------------------------------------------

    def _end(self, finish: Finish) -> int:
        """Say how it ended. Returns the exit code."""
        made, config, machine = self._made, self._config, self._session.machine
        to_hand_over = made.lease.end(job_goes_on=finish.closed is None)
        self._tracker.tell_victims()
        made.memory.close()  # this node runs no further round, but its agent may stay for other jobs
        self._wait_for_left_running(finish.outcome is Outcome.SUCCEEDED)
        record, row = machine.record, machine.row
        began = self._tracker.began if record and self._round and record.round == self._round.number else None
        done = ending.done(record, machine.store.rows) if record else ()
        started = self._round is not None
        ended = ending.Ending(finish, record, began, self._signum, self._sick, started, bool(row.round), row.name, done)
        code = ended.exit_code(config.exit_code_from_worker)
        ended.write_termination_log(code, self._console)  # first: whoever signals this agent may be about to kill it
        totals = made.accounting.end(finish.closed is not None or finish.outcome is Outcome.LEFT)
        made.log.write(events.End(finish.outcome.value, finish.reason, int(code)))
        if record and record.index(row.id) == 0 and (config.max_nodes > 1 or record.round > 1 or totals.total > account.LONG):
            for line in account.lines(row.name, totals):
                self._console.say(line)
        ended.tell(config, self._console, made.logs, self._environ.get("TORCHELASTIC_ERROR_FILE"))
        made.logs.disk.drain(END_LIMIT)
        self._console.flush(ending.FLUSH)
        if self._session.access.serves_jobs and to_hand_over is None and not self._signum:
            ending.stay_for_other_jobs(self._session, config.run_id, self._pause, self._console)
        if to_hand_over is not None:
            made.lease.hand_over(to_hand_over)
        return code

    def _pause(self, seconds: float) -> bool:
        """Wait for so long, or for a signal. Returns whether the agent was signalled."""
        until = clock.now() + seconds
        while clock.now() < until and not self._signum:
            self._turn(until)
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
