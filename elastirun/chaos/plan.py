"""The plan: a fault every so often, drawn from a seed, and the process that each is done to. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastirun.chaos.watch import RunningAgent

WORKER, AGENT, NODE, FREEZE, HOST, LEAVE = KINDS = ("worker", "agent", "node", "freeze", "host", "leave")
DEEDS = {  # in words
    WORKER: "SIGKILL to a worker",
    AGENT: "SIGKILL to an agent",
    NODE: "SIGKILL to an agent, its guard and its workers at once",
    FREEZE: "SIGSTOP to a worker, SIGCONT later",
    HOST: "SIGKILL to the agent that hosts the store",
    LEAVE: "SIGTERM to an agent: a planned stop",
}
OF_WORKERS = (WORKER, FREEZE)
INIT = 1  # pid of the first process of a container; the kernel keeps SIGKILL from within away from it


@dataclass(frozen=True)
class PlannedFault:
    """``after``: seconds from the start of the command. ``draw``: from 0 to below 1, which of the processes that may be chosen."""

    after: float
    kind: str
    draw: float


@dataclass(frozen=True)
class FaultTarget:
    """``pid``: of the agent, or of the worker below ``agent``."""

    agent: RunningAgent
    pid: int
    name: str


def draw(seed: int, kinds: Sequence[str], every: float, lasts: float) -> tuple[PlannedFault, ...]:
    """Return a fault each ``every`` seconds for as long as it ``lasts``. No kind comes again before each of the others has come."""
    chance, bag, faults = random.Random(seed), list[str](), list[PlannedFault]()
    while len(faults) * every < lasts:
        bag = bag or chance.sample(list(kinds), len(kinds))
        faults.append(PlannedFault(len(faults) * every, bag.pop(), chance.random()))
    return tuple(faults)


def missing(agents: Sequence[RunningAgent]) -> str:
    """Return the name of a node here that is still to join the round, before another agent may be ended; empty: none, or no room."""
    return next((agent.node for agent in agents if not agent.training and agents[0].members < agent.max_nodes), "")


def all_train(agents: Sequence[RunningAgent]) -> bool:
    """Return whether each agent here that is in the round has a worker that steps, and some are: no round is just beginning."""
    members = [agent for agent in agents if agent.node_rank is not None]
    return bool(members) and all(agent.training for agent in members)


def choose(fault: PlannedFault, agents: Sequence[RunningAgent], comes_back: bool) -> FaultTarget | str:
    """Return the process that the fault hits, or why the fault is left out. ``comes_back``: an agent that ends is started again.

    A worker or an agent that does not train is never chosen: nobody could see that the others go on. ``host`` is the kind for the host
    of the store, so the other kinds choose among the other agents, where there are some.
    """
    training = [agent for agent in agents if agent.training]
    if not training:
        return "no worker here has made a step in this round"
    if fault.kind in OF_WORKERS:
        workers = [(agent, pid) for agent in training for pid in agent.training]
        agent, pid = workers[int(fault.draw * len(workers))]
        rank = agent.ranks.get(pid)
        return FaultTarget(agent, pid, f"{'a worker' if rank is None else f'rank {rank}'} on {agent.node}, pid {pid}")
    hosts = [agent for agent in training if agent.hosts_store]
    able = hosts if fault.kind == HOST else [agent for agent in training if agent not in hosts] or training
    if not able:
        return "no agent here that trains hosts the store"
    agent = able[int(fault.draw * len(able))]
    if waiting := missing(agents):
        return f"{waiting} is not in a round yet"
    if agent.process.pid == INIT:
        return "the agent is process 1 of this container, which ends with it; delete the pod from outside"
    if not comes_back and agent.members <= agent.min_nodes:
        return f"it would leave {agent.members - 1} of at least {agent.min_nodes} nodes; see --restart and --supervised"
    if not comes_back and len(training) == 1:
        return "no other agent of the job is here, whose steps could be seen; see --restart and --supervised"
    return FaultTarget(agent, agent.process.pid, f"the agent on {agent.node}, pid {agent.process.pid}")
