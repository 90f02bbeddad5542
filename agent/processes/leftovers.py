"""Finds leftovers of dead agents on this machine: processes of the same job, and empty control groups of any job."""

import os
from pathlib import Path

from elastirun.agent.processes import control_group, kills, marks, proc

NO_JOB = "none"  # the run id of every job that was not given one
SUBREAPERS = ("systemd",)  # a user's service manager
GROUP_PATIENCE = 0.2  # seconds until a group of which all members were killed is left to the next agent


class Sweep:
    """Ends the leftovers of ``job``; ``agents`` are the pids of the dead agents that they belonged to, ``count`` their number.

    ``inherited``: the value of ELASTIRUN_AGENT in our own environment. The agents that it names are left alone: a worker of theirs
    started or submitted the script that started us, and what this script started besides looks just like a leftover.
    """

    def __init__(self, job: str, inherited: str, own_group: Path | None) -> None:
        self.agents: set[int] = set()
        self.count = 0
        self._job = job
        self._spared = {mark.text for mark in marks.of(inherited)}
        self._namespace = proc.pid_namespace()
        around = proc.ancestors(os.getpid())
        self._ourselves = {process.pid for process in around}
        self._outside = {process.session for process in around}
        # Orphans go to process 1 or to a subreaper, which the kernel does not show. Any other ancestor may be a scheduler that
        # started such a process itself, at the request of a worker.
        self._parents = {1: 0, **{process.pid: process.started for process in around[1:] if proc.name(process.pid) in SUBREAPERS}}
        for group in own_group.glob(f"{control_group.PREFIX}*") if own_group else ():
            self._clear(str(group))
        if job != NO_JOB:
            self.count += len(kills.end(self._find, twice=True))

    def _clear(self, group: str) -> None:
        owner, _, digest = os.path.basename(group)[len(control_group.PREFIX) :].rpartition("-")
        mark = marks.parse(owner)
        if mark is None or not self._is_dead(mark) or os.stat(group).st_uid != os.geteuid():
            return
        found = set(control_group.members(group))
        if found and (self._job == NO_JOB or digest != control_group.digest(self._job) or found & self._ourselves):
            return
        if found:
            control_group.kill(group)
            self.agents.add(mark.pid)
            self.count += len(found)
        control_group.remove(group, GROUP_PATIENCE if found else 0.0)

    def _find(self) -> list[proc.Process]:
        table = proc.everything()
        tops = [
            process
            for process in table.values()
            if process.parent in self._parents and process.session not in self._outside
        ]

        def is_left(top: proc.Process, ours: kills.Table) -> bool:
            owner = self._owner(top) if kills.has_own_session(top, table, ours) else None
            self.agents |= {owner.pid} if owner else set()
            return owner is not None

        return list(kills.closure(table, tops, is_left, {}).values())

    def _owner(self, orphan: proc.Process) -> marks.Mark | None:
        """The dead agent of this job that the process belongs to."""
        if not proc.is_of_our_user(orphan.pid) or proc.pid_namespace(orphan.pid) != self._namespace:
            return None
        environment = proc.environment(orphan.pid)
        found = marks.in_environment(environment)
        if not found or proc.value_of("TORCHELASTIC_RUN_ID", environment) != self._job:
            return None
        adopted = self._parents[orphan.parent] <= found[-1].started <= orphan.started
        return found[-1] if adopted and self._is_dead(found[-1]) else None

    def _is_dead(self, mark: marks.Mark) -> bool:
        return mark.text not in self._spared and mark.is_dead()
