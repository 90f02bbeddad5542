"""Starts the workers of a round on this node: what each runs, their logs, the store where they meet, those that go on as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from elastirun.agent.host import cpus
from elastirun.agent.output.logs import RunLogs
from elastirun.agent.part import NodeRound
from elastirun.agent.processes.preload.forkserver import ROUND_NAMES
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.processes.spawn import WorkerSpec
from elastirun.agent.session import Session
from elastirun.agent.workers import live_states
from elastirun.agent.workers.live_workers import LiveWorkers
from elastirun.agent.workers.spec import NodeEnvironment, worker_specs
from elastirun.agent.workers.workers import Workers
from elastirun.config import LaunchConfig
from elastirun.rendezvous.rules import QUICK


@dataclass(frozen=True, eq=False)
class RoundStart:
    """Starts one round after the other. ``node``: what is the same in all rounds. ``runs``: as in ``LiveWorkers``. ``say``: for people."""

    _config: LaunchConfig
    _node: NodeEnvironment
    _session: Session
    _workers: Workers
    _live: LiveWorkers
    _logs: RunLogs
    _tree: ProcessTree
    _runs: Callable[[int], bool]
    _say: Callable[[str], None]

    def start(self, round: NodeRound, pages: list[str], pause: float) -> None:
        """Start the workers. Raises OSError or StartError where that is impossible.

        ``pages``: the paths of their progress pages, by local rank. New workers in place of failed ones begin after ``pause`` seconds.
        """
        attempt, store = round.number - 1, self._session.worker_store
        assert store is not None
        specs = self._logs.ask_plug_in(self._specs(round, pages), round.record.world_size)
        logs = self._logs.open_round(attempt, specs, round.record.world_size, round.parked)
        if specs[0].env["TORCHELASTIC_ERROR_FILE"] and not self._logs.error_file(attempt, 0):
            specs = self._specs(round, pages)  # without error files, which could not be made
        store.end_round()
        if round.parked and round.node_rank == 0:  # those who go on need it first; torch is imported
            self._session.serve_workers()
        self._tell_states(round, specs)
        if pause:
            specs = self._hold_new(round, specs, pause)
        self._workers.start(specs, logs, partial(self._resume, round, specs))
        self._tree.add_workers(self._workers.pids)

    def serve_workers(self, round: NodeRound) -> None:
        """Serve the store where new workers meet. After their start: torch is imported for it, and the kernel keeps their connections."""
        if not round.parked and round.node_rank == 0:
            self._session.serve_workers()

    def _specs(self, round: NodeRound, pages: list[str]) -> list[WorkerSpec]:
        access = self._session.access
        interface, loopback = access.node_address.interface, access.node_address.loopback
        node = replace(
            self._node, cpus=cpus.usable_cpus(), interface=interface, loopback=loopback, store=access.worker_endpoint, pages=pages
        )
        return worker_specs(self._config, round.record, round.node_rank, node, partial(self._logs.error_file, round.number - 1))

    def _tell_states(self, round: NodeRound, specs: list[WorkerSpec]) -> None:
        """Tell the live workers of all nodes which ranks here have a state. In the first round nobody has, and nobody asks."""
        if round.number > 1:
            env, number = specs[0].env, round.number
            states = {round.ranks[local_rank]: self._live.settled(pid) for local_rank, pid in round.parked.items()}
            having = {rank: settled for rank, settled in states.items() if settled}
            goes_on = partial(self._runs, number)
            live_states.announce_states(env["MASTER_ADDR"], int(env["MASTER_PORT"]), number, round.node_rank, having, goes_on)

    def _hold_new(self, round: NodeRound, specs: list[WorkerSpec], pause: float) -> list[WorkerSpec]:
        """Return the workers; those in place of failed ones begin after ``pause`` seconds."""
        if held := ", ".join(str(spec.rank) for spec in specs if spec.local_rank not in round.parked):
            why = f"{round.record.quick} rounds in a row failed within {QUICK:g} s of their start"
            when = f"the new worker of rank {held} starts after {pause:.1f} s"
            self._say(f"{why}; {when}, the others go on")
        return [spec if spec.local_rank in round.parked else replace(spec, pause=pause) for spec in specs]

    def _resume(self, round: NodeRound, specs: list[WorkerSpec]) -> None:
        """Let the parked workers take part in the round. One that cannot be told is ended, and so has failed."""
        for spec in specs:
            process = self._workers.processes.get(spec.local_rank)
            env = {name: spec.env[name] for name in ROUND_NAMES if name in spec.env}
            if spec.local_rank in round.parked and process is not None and not self._live.resume(process.pid, round.number, env):
                process.kill_group()
