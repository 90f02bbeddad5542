"""Kills leftovers of dead agents on this machine: processes of the same job. Removes the empty control groups of any job."""

import os
from pathlib import Path

from elastirun.agent.processes import control_group, kills, marks, proc

NO_JOB = "none"  # the run id of every job without --rdzv-id; such jobs cannot be told apart
SUBREAPERS = ("systemd",)  # programs that adopt orphans besides process 1: a user's service manager
GROUP_TIMEOUT = 0.2  # seconds for killed members to leave a control group; after that the next agent removes the group


class Sweep:
    """Kills the leftovers of ``job``. ``count``: how many processes; ``agents``: the pids of the dead agents that they belonged to.

    ``inherited``: the value of ELASTIRUN_AGENT in our own environment. Processes of the agents that it names are left alone: one of
    their workers started or submitted the script that started us, and other processes of that script look just like leftovers.
    """

    def __init__(self, job: str, inherited: str, own_group: Path | None) -> None:
        self.agents: set[int] = set()
        self.count = 0
        self._job = job
        self._inherited = {mark.text for mark in marks.of(inherited)}
        self._namespace = proc.pid_namespace()
        around = proc.ancestors(os.getpid())
        self._ourselves = {process.pid for process in around}
        self._outside = {process.session for process in around}
        # Process 1 or a subreaper adopts orphans; the kernel does not show which processes are subreapers. Any other ancestor may be
        # a scheduler that itself started a process with a mark, because a worker asked for it.
        self._parents = {1: 0, **{process.pid: process.started for process in around[1:] if proc.name(process.pid) in SUBREAPERS}}
        for group in own_group.glob(f"{control_group.PREFIX}*") if own_group else ():
            self._remove_group(str(group))
        if job != NO_JOB:
            self.count += len(kills.kill_all(self._find, twice=True))

    def _remove_group(self, group: str) -> None:
        owner, _, digest = os.path.basename(group)[len(control_group.PREFIX) :].rpartition("-")
        mark = marks.parse(owner)
        if mark is None or not self._is_dead(mark) or not control_group.is_ours(group):
            return
        found = set(control_group.members(group))
        if found and (self._job == NO_JOB or digest != control_group.digest(self._job) or found & self._ourselves):
            return
        if found:
            control_group.kill(group)
            self.agents.add(mark.pid)
            self.count += len(found)
        control_group.remove(group, GROUP_TIMEOUT if found else 0.0)

    def _find(self) -> list[proc.ProcessStat]:
        table = proc.everything()
        tops = [process for process in table.values() if process.parent in self._parents and process.session not in self._outside]

        def is_left(top: proc.ProcessStat, ours: kills.Table) -> bool:
            owner = self._owner(top) if kills.has_own_session(top, table, ours) else None
            self.agents |= {owner.pid} if owner else set()
            return owner is not None

        return list(kills.closure(table, tops, is_left, {}).values())

    def _owner(self, orphan: proc.ProcessStat) -> marks.Mark | None:
        """Return the mark of the dead agent of this job that the process belongs to; None when there is no such agent."""
        if not proc.is_of_our_user(orphan.pid) or proc.pid_namespace(orphan.pid) != self._namespace:
            return None
        environment = proc.environment(orphan.pid)
        found = marks.in_environment(environment)
        if not found or proc.value_of("TORCHELASTIC_RUN_ID", environment) != self._job:
            return None
        adopted = self._parents[orphan.parent] <= found[-1].started <= orphan.started
        return found[-1] if adopted and self._is_dead(found[-1]) else None

    def _is_dead(self, mark: marks.Mark) -> bool:
        return mark.text not in self._inherited and mark.is_dead()
