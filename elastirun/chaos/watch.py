"""The agents of one job on this machine: the answer of each, and the progress pages of its workers, read in the agent's process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from elastirun.agent.processes import marks, proc
from elastirun.agent.processes.proc import ProcessStat
from elastirun.agent.status import own_agents
from elastirun.cli.parse import quote
from elastirun.errors import NothingFound, StartError, UsageError
from elastirun.worker import agent_socket
from elastirun.worker.progress_page import HEADER, NS, Page

PAGE = "/memfd:elastirun-progress"  # how the target of a page's descriptor begins in /proc/PID/fd


@dataclass(frozen=True)
class RunningAgent:
    """One agent at one moment. ``pages``: of the workers of its round, by inode: each round has new ones."""

    process: ProcessStat
    job: str
    node: str
    node_rank: int | None  # None: it waits for a round
    state: str  # as in /status
    members: int  # nodes in the round
    min_nodes: int
    max_nodes: int
    failures: int
    max_restarts: int
    hosts_store: bool
    ranks: Mapping[int, int] = field(default_factory=dict)  # by the pid of the worker
    pages: Mapping[int, Page] = field(default_factory=dict)

    @property
    def training(self) -> tuple[int, ...]:
        """The pids of the processes here that have stamped a step in this round."""
        return tuple(sorted(page.pid for page in self.pages.values() if page.pid and page.steps))


@dataclass(frozen=True)
class SeenStep:
    """The first step after a fault. ``at``: in nanoseconds of CLOCK_MONOTONIC; ``seconds``: from the fault, or from the end of a freeze."""

    at: int
    seconds: float
    lost: int | None  # steps that were made again; None: the workers do not number theirs


def next_step(
    before: Iterable[RunningAgent], now: Iterable[RunningAgent], since: int, thawed: tuple[int, int] | None = None
) -> SeenStep | None:
    """Return the first step of a round that began after the fault; None: there is none yet. Pure.

    ``before``: the agents when the fault began, which was at ``since``. ``thawed``: pid of a worker that was frozen, and when it was
    continued: its next step counts although it is of the same round.
    """
    old = {inode: page for agent in before for inode, page in agent.pages.items()}
    pages = {inode: page for agent in now for inode, page in agent.pages.items() if page.steps}
    if thawed is not None:
        pid, continued = thawed
        for page in (page for inode, page in pages.items() if inode in old and page.pid == pid and page.stamped > continued):
            return SeenStep(page.stamped, (page.stamped - continued) / NS, 0)
    new = [(page.first or page.stamped, page) for inode, page in pages.items() if inode not in old]
    at, first = min((one for one in new if one[0] > since), key=lambda one: one[0], default=(0, None))
    if first is None:
        return None
    farthest = max((*(max(page.at, page.farthest) for page in old.values()), *(page.farthest for _, page in new)))
    again = farthest - (first.at - first.steps)  # ``at`` is one more than the number of the last step, and the steps follow each other
    return SeenStep(at, (at - since) / NS, max(0, again) if first.at and farthest else None)


def last_stamp(agents: Iterable[RunningAgent]) -> int:
    """Return when the last step was stamped, in nanoseconds of CLOCK_MONOTONIC; 0: none was."""
    return max((page.stamped for agent in agents for page in agent.pages.values()), default=0)


def look(job: str | None = None, also: Iterable[int] = ()) -> tuple[RunningAgent, ...]:
    """Return the agents here that run ``job``, None: any job, and those with the pids ``also``. The first rank comes first."""
    found = [agent for path in own_agents.sockets() if (agent := _ask(path)) and (job in (None, agent.job) or agent.process.pid in also)]
    return tuple(sorted(found, key=lambda one: (one.job, one.node_rank is None, one.node_rank or 0, one.process.pid)))


def find(job: str | None) -> str:
    """Return the name of the job that the agents here run. Errors: ``NothingFound``; ``UsageError``: there are several; ``StartError``."""
    agents = look(job)
    if not agents:
        what = "no job" if job is None else f"no job {quote(job)}"
        raise NothingFound(f"{what} on this machine: no agent of this user runs it; start it, or ask on one of its nodes as its user")
    jobs = sorted({agent.job for agent in agents})
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs run on this machine: {', '.join(map(quote, jobs))}; name one")
    above = {process.pid for process in proc.ancestors(os.getpid())}
    if above & {agent.process.pid for agent in agents}:
        raise StartError("this command runs below an agent of the job, and would end with it; start it from outside")
    if not any(agent.training for agent in agents):
        raise StartError(
            f"job {quote(jobs[0])}: no worker here has stamped a step yet, so nobody could see how it goes on; "
            "wait for the first one, or call elastirun.progress.progress() after each (docs/worker.md)"
        )
    return jobs[0]


def _ask(path: str) -> RunningAgent | None:
    """Return the agent with this socket; None: it does not answer, is of another version, or its processes have other numbers here."""
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        told = json.loads(agent_socket.ask(path, own_agents.SNAPSHOT, own_agents.ASK_LIMIT)[0])
        mark = marks.of(str(told["mark"]))[-1]
        process = proc.look(mark.pid) if mark.namespace == proc.pid_namespace() and proc.is_of_our_user(mark.pid) else None
        if process is None or process.started != mark.started:
            return None
        rank = told["node_rank"]
        return RunningAgent(
            *(process, str(told["job"]), str(told["node"]), None if rank is None else int(rank), str(told["state"]), len(told["nodes"])),
            *(int(told["min_nodes"]), int(told["max_nodes"]), int(told["failures"]), int(told["max_restarts"]), bool(told["hosts_store"])),
            ranks={int(pid): int(rank) for rank, pid in told["pids"].items()},
            pages=_pages(process.pid),
        )
    return None


def _pages(agent: int) -> dict[int, Page]:
    """Return the progress pages that the agent has open, by inode."""
    found: dict[int, Page] = {}
    folder = f"/proc/{agent}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):  # closed meanwhile: a round has ended
            if os.readlink(path).startswith(PAGE):
                with open(path, "rb") as file:
                    page, inode = Page.parse(file.read(HEADER)), os.fstat(file.fileno()).st_ino
                found |= {} if page is None else {inode: page}
    return found
