"""Parts of the agent, and how they hear of rounds. A new observer of a job is one such class, and a line in ``assemble.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastirun.rendezvous.wire.actions import Stop
from elastirun.rendezvous.wire.records import RoundRecord


@dataclass(frozen=True)
class NodeRound:
    """A round as this node runs it."""

    record: RoundRecord
    node_rank: int
    parked: Mapping[int, int]  # by local rank: the pids of workers that go on in the processes of the last round

    @property
    def number(self) -> int:
        return self.record.round

    @property
    def alone(self) -> bool:
        """Return whether no other node takes part."""
        return len(self.record.members) == 1

    @property
    def ranks(self) -> range:
        """The ranks of the workers here."""
        first = sum(member.slots for member in self.record.members[: self.node_rank])
        return range(first, first + self.record.members[self.node_rank].slots)

    @property
    def kept(self) -> list[int]:
        """The ranks of the workers that go on in the processes of the last round."""
        return [self.ranks[local_rank] for local_rank in sorted(self.parked)]


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker."""

    local_rank: int
    rank: int
    pid: int
    code: int  # exit status; minus the signal number when a signal ended it
    after: float  # seconds since the start of the round's workers, less the pause of this worker
    killed_by_us: bool  # the worker was alive when the agent signalled it
    catches_term: bool = False  # the worker failed with an exit code, and had a handler for SIGTERM


class Part:
    """Takes notice of rounds. The agent's loop calls the methods in its thread, so none may block.

    Of each round: ``round_starts``, ``workers_started``, ``worker_ended`` for each worker, ``worker_failed`` at each failure,
    ``round_stops`` if the workers are stopped, ``idle``. The methods here do nothing: a part has those that it needs.
    """

    def see(self, record: RoundRecord | None, now: float) -> None:
        """An exchange with the store has brought ``record``."""

    def round_starts(self, round: NodeRound) -> None:
        """The workers of ``round`` are about to be started."""

    def workers_started(self, round: NodeRound) -> None:
        """The workers of ``round`` run."""

    def worker_ended(self, end: WorkerExit) -> None:
        """A worker has ended, or was given up."""

    def worker_failed(self) -> None:
        """A worker has failed or hangs, while the others were not told to stop: the round is about to end."""

    def round_stops(self, stop: Stop, grace: float) -> None:
        """The workers are about to be told to stop, or to park. They have ``grace`` seconds."""
        self.stop_watching()

    def idle(self) -> None:
        """The last worker of the round has ended or is parked. Called again if the round is stopped when its workers have ended already."""
        self.stop_watching()

    def stop_watching(self) -> None:
        """The workers step no more: they are about to be told to stop, or have ended. Called by ``round_stops`` and ``idle``."""

    def leaves(self) -> None:
        """This node is to leave the job: it was signalled, or cannot run workers."""

    @property
    def holds(self) -> bool:
        """Return whether the rendezvous must not hear yet that the stopped workers have ended, so that this node takes part in no round."""
        return False

    def tick(self, now: float) -> float:
        """Do what is due at ``now``. Returns when to call again, on ``elastirun.clock``; infinity: not by time."""
        return math.inf

    def close(self) -> None:
        """Let go of what is open. A part that has something open is given to the stack of ``assemble``."""
