"""Recognition of the processes that an agent and its workers started, and their kill.

A process belongs to the agent when its chain of parents leads to a *top*. A top is a child of the agent, or of the process that
adopts the agent's orphans, with evidence that a worker started it. There are two kinds of evidence:

- The process is in a worker's session. A process can leave its session but never enter another one, so this holds for process
  groups too, and does not depend on title or environment.
- The agent's mark is in its environment. The mark alone is not enough: a job that a worker submits elsewhere carries the mark as
  well (Slurm's sbatch exports the environment), but is the child of another daemon.
"""

import os
import select
from collections.abc import Callable, Iterable

from elastirun.agent.processes import control_group, marks, proc

Table = dict[int, proc.ProcessStat]  # by pid
Accept = Callable[[proc.ProcessStat, Table], bool]

PASSES = 40  # looks at the process table at most; processes may fork between two looks
PAUSE = 0.005  # seconds between two looks; a killed process leaves /proc when the kernel has freed its memory
FOREVER = float("inf")


class Traces:
    """Evidence by which the processes of an agent are recognised. Changes while the agent runs.

    ``sessions``: the sessions of its workers, with the start time of each worker.
    ``excluded``: pids of child processes of the agent that are no workers: that of the guard.
    ``outside``: sessions of the agent and its ancestors; no process in them is ever killed.
    ``strict``: children of the agent need evidence too, because the agent may adopt strangers (as process 1) or had children
    before it became the agent.
    """

    def __init__(self, mark: marks.Mark, group: str, strict: bool) -> None:
        self.mark, self.group, self.strict = mark, group, strict
        self.sessions: dict[int, int] = {}
        self.excluded: set[int] = set()
        self.outside = {process.session for process in proc.ancestors(mark.pid)}


def owned(evidence: Traces, table: Table, parent: int, before: float = FOREVER) -> Table:
    """Return the processes of ``table`` that belong to the agent. ``parent``: the agent, or the process that adopts its orphans.

    Leaves out workers that were started after ``before``, in clock ticks since boot, with all that they started.
    """
    tops = _tops(evidence, table, parent)
    known = {sid: started for sid, started in evidence.sessions.items() if sid not in table or table[sid].started == started}
    trusted = parent == evidence.mark.pid and not evidence.strict

    def is_in_session(top: proc.ProcessStat, ours: Table) -> bool:
        return top.session in known and known[top.session] <= before

    def is_marked(top: proc.ProcessStat, ours: Table) -> bool:
        if top.session in known or not evidence.mark.started <= top.started <= before:
            return False
        return trusted or (has_own_session(top, table, ours) and evidence.mark.text in map(str, marks_of(top)))

    ours = closure(table, tops, is_in_session, {})
    return closure(table, tops, is_marked, ours)  # last, because reading an environment may be slow


def _tops(evidence: Traces, table: Table, parent: int) -> list[proc.ProcessStat]:
    """Return the children of ``parent`` that may be the agent's."""
    children = (process for process in table.values() if process.parent == parent)
    return [child for child in children if child.pid not in evidence.excluded and child.session not in evidence.outside]


def closure(table: Table, tops: list[proc.ProcessStat], accept: Accept, ours: Table) -> Table:
    """Return ``ours``, the accepted ``tops`` and their descendants, and repeat this for tops in a session of one of these."""
    children: dict[int, list[proc.ProcessStat]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    ours = dict(ours)
    sessions = {process.session for process in ours.values()} - {0}
    while True:
        pending = [top for top in tops if top.pid not in ours and _joins(top, table, ours, sessions, accept)]
        if not pending:
            return ours
        while pending:
            process = pending.pop()
            if process.pid not in ours:
                ours[process.pid] = process
                sessions |= {process.session} - {0}  # 0: the session's leader is outside of our pid namespace
                pending += children.get(process.pid, ())


def _joins(top: proc.ProcessStat, table: Table, ours: Table, sessions: set[int], accept: Accept) -> bool:
    return (top.session in sessions and has_own_session(top, table, ours)) or accept(top, ours)


def has_own_session(process: proc.ProcessStat, table: Table, ours: Table) -> bool:
    """Return whether one of our processes may have made the session of ``process``: its leader is one of ours, or has ended."""
    return process.session == process.pid or process.session not in table or process.session in ours


def marks_of(process: proc.ProcessStat) -> list[marks.Mark]:
    """Return the marks of a process of our own user; none for another user's process."""
    return marks.in_environment(proc.environment(process.pid)) if proc.is_of_our_user(process.pid) else []


def kill_all(find: Callable[[], Iterable[proc.ProcessStat]], twice: bool) -> set[int]:
    """Kill all that ``find`` returns until it returns nothing. Returns the pids of the killed processes.

    ``twice``: two looks in a row must find nothing, because a process in the middle of exec has no environment for a moment.
    """
    killed: set[int] = set()
    empty_before = not twice
    for _ in range(PASSES):
        found = [process.pid for process in find() if proc.kill(process)]
        killed.update(found)
        if not found and empty_before:
            break
        empty_before = not found or not twice
        select.select([], [], [], PAUSE)
    return killed


def kill_below_agent(evidence: Traces, before: float = FOREVER, whole_group: bool = True) -> int:
    """Kill all that the workers have started, while the agent lives. Returns the number of killed processes.

    ``whole_group``: False if processes in the control group are to be left alone; then only those that are found otherwise are killed.

    The agent is the subreaper of its processes, so they are all its descendants; no other process needs a look.
    """
    killed: set[int] = set()
    if evidence.group and before == FOREVER and whole_group:
        killed.update(control_group.members(evidence.group))
        control_group.kill(evidence.group)
    elif evidence.group and whole_group:
        killed.update(control_group.kill_members(evidence.group, before))
    agent = evidence.mark.pid
    return len(killed | kill_all(lambda: owned(evidence, proc.descendants(agent), agent, before).values(), twice=evidence.strict))


def kill_orphans(evidence: Traces) -> None:
    """Kill all that the workers have started, after the agent has died.

    The caller must be a former child of the agent: the process that adopted the caller has adopted the agent's other orphans too.
    A dying agent closes its pipes before its children are adopted, one thread after the other. So only a look counts that begins
    after the caller was adopted.
    """
    if evidence.group:
        control_group.kill(evidence.group)
    adopted = False
    while not adopted:
        # If the agent closed the pipe but is not exiting, nobody adopts its children before it exits: do not wait for that.
        agent = proc.look(evidence.mark.pid)
        adopted = os.getppid() != evidence.mark.pid or (agent is not None and not agent.exiting)
        kill_all(lambda: owned(evidence, proc.everything(), os.getppid()).values(), twice=True)
        if not adopted:
            select.select([], [], [], PAUSE)


def orphans(evidence: Traces, table: Table, parent: int) -> list[proc.ProcessStat]:
    """Return the children of ``parent``, which has adopted the agent's orphans, that only their environment can show to be the agent's."""
    tops = _tops(evidence, table, parent)
    return [top for top in tops if top.started >= evidence.mark.started and has_own_session(top, table, {})]


def _hides(process: proc.ProcessStat) -> bool:
    """Return whether a process of our user shows no environment.

    The kernel takes the environment of a killed process away first of all, and may be busy with the rest for long. A process in the
    middle of exec has none for a moment, and that of a process that hangs may be unreadable.
    """
    return proc.may_be_of_our_user(process.pid) and not proc.environment(process.pid)


def all_ended(evidence: Traces) -> bool:
    """Return whether the agent has died, and nothing runs any more that its workers have started. For the guard, after ``kill_orphans``.

    A killed process counts as running until the kernel is done with it. Two looks in a row must find nothing, because a process may
    change its parent between two reads of one look.
    """
    for last in (False, True):
        if not evidence.mark.is_dead():
            return False
        try:
            table = proc.everything(certain=True)
        except OSError:  # what cannot be read may live
            return False
        if owned(evidence, table, os.getppid()) or any(map(_hides, orphans(evidence, table, os.getppid()))):
            return False
        if evidence.group and not control_group.is_empty(evidence.group):
            return False
        if not last:
            select.select([], [], [], PAUSE)
    return True
