"""Which processes an agent and its workers started, and their end.

A process belongs to the agent when its chain of parents leads to a *top*: a child of the agent, or of the process that adopts the
agent's orphans, with evidence that a worker started it. Evidence is the session of a worker (a process can leave its session, but
never enter another one, so this holds for process groups, too, and survives any change of title or environment), or the agent's mark
in the environment. A mark alone is not enough: whatever a worker submits elsewhere (Slurm's sbatch exports the environment) carries
it as well, but is the child of another daemon.
"""

import os
from collections.abc import Callable, Iterable
from select import select as _select

from elastirun.agent.processes import control_group, marks, proc

Table = dict[int, proc.Process]  # by pid
Accept = Callable[[proc.Process, Table], bool]

PASSES = 40  # a process may be forking while we look
PAUSE = 0.005  # seconds between two passes; the dead leave /proc when their kernel work is done
FOREVER = float("inf")


class Evidence:
    """Evidence by which the processes of an agent are recognised. Changes while the agent runs.

    ``sessions``: of its workers, with the start time of each worker. ``spared``: pids of child processes of the agent that are no
    workers. ``outside``: sessions of the agent and its ancestors; nothing in them is ever ended. ``strict``: children of the agent
    need evidence, because it may adopt strangers (as process 1) or had children before it became the agent.
    """

    def __init__(self, mark: marks.Mark, group: str, strict: bool) -> None:
        self.mark, self.group, self.strict = mark, group, strict
        self.sessions: dict[int, int] = {}
        self.spared: set[int] = set()
        self.outside = {process.session for process in proc.ancestors(mark.pid)}


def select(evidence: Evidence, table: Table, parent: int, before: float = FOREVER) -> Table:
    """Of ``table`` those that belong to the agent. ``parent``: the agent, or the process that adopts its orphans.

    ``before``: workers that were started after that time, in clock ticks since boot, are left alone with all that is theirs.
    """
    tops = [
        process
        for process in table.values()
        if process.parent == parent and process.pid not in evidence.spared and process.session not in evidence.outside
    ]
    known = {sid: started for sid, started in evidence.sessions.items() if sid not in table or table[sid].started == started}
    trusted = parent == evidence.mark.pid and not evidence.strict

    def is_in_session(top: proc.Process, ours: Table) -> bool:
        return top.session in known and known[top.session] <= before

    def is_marked(top: proc.Process, ours: Table) -> bool:
        if top.session in known or not evidence.mark.started <= top.started <= before:
            return False
        return trusted or (has_own_session(top, table, ours) and evidence.mark.text in map(str, marks_of(top)))

    ours = closure(table, tops, is_in_session, {})
    return closure(table, tops, is_marked, ours)  # last: environments may be slow to read


def closure(table: Table, tops: list[proc.Process], accept: Accept, ours: Table) -> Table:
    """``ours``, the accepted ``tops``, and their descendants; then the tops that are in a session with one of these, and so on."""
    children: dict[int, list[proc.Process]] = {}
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
                sessions |= {process.session} - {0}  # 0: its leader is outside of our pid namespace
                pending += children.get(process.pid, ())


def _joins(top: proc.Process, table: Table, ours: Table, sessions: set[int], accept: Accept) -> bool:
    return (top.session in sessions and has_own_session(top, table, ours)) or accept(top, ours)


def has_own_session(process: proc.Process, table: Table, ours: Table) -> bool:
    """Whether one of ours may have made the session of the process: its living leader is not somebody else."""
    return process.session == process.pid or process.session not in table or process.session in ours


def marks_of(process: proc.Process) -> list[marks.Mark]:
    """Return the marks of a process of our own user; none for another user's process."""
    return marks.in_environment(proc.environment(process.pid)) if proc.is_of_our_user(process.pid) else []


def end(find: Callable[[], Iterable[proc.Process]], twice: bool) -> set[int]:
    """SIGKILL to all that ``find`` returns until it returns nothing. Returns the pids that were hit.

    ``twice``: two looks in a row must find nothing: in the middle of exec a process has no environment for a moment.
    """
    hit: set[int] = set()
    quiet = not twice
    for _ in range(PASSES):
        found = [process.pid for process in find() if proc.kill(process)]
        hit.update(found)
        if not found and quiet:
            break
        quiet = not found or not twice
        _select([], [], [], PAUSE)
    return hit


def end_below_agent(evidence: Evidence, before: float = FOREVER) -> int:
    """End all that the workers have started, while the agent lives. Returns how many processes it hit.

    The agent is the subreaper of its processes, so all of them are its descendants and nothing else need be looked at.
    """
    hit: set[int] = set()
    if evidence.group and before == FOREVER:
        hit.update(control_group.members(evidence.group))
        control_group.kill(evidence.group)
    elif evidence.group:
        hit.update(control_group.kill_members(evidence.group, before))
    agent = evidence.mark.pid
    return len(hit | end(lambda: select(evidence, proc.descendants(agent), agent, before).values(), twice=evidence.strict))


def end_orphans(evidence: Evidence) -> None:
    """End all that the workers have started, now that the agent is gone.

    To be called by a former child of the agent: the process that adopted it has adopted the agent's other orphans, too. A dying agent
    closes its pipes before its children are adopted, one thread after the other, so looks count only once this process has been adopted.
    """
    if evidence.group:
        control_group.kill(evidence.group)
    adopted = False
    while not adopted:
        # An agent that closed the pipe and lives on has ended: nobody adopts its children before it exits.
        adopted = os.getppid() != evidence.mark.pid or not proc.is_exiting(evidence.mark.pid)
        end(lambda: select(evidence, proc.everything(), os.getppid()).values(), twice=True)
        if not adopted:
            _select([], [], [], PAUSE)
