"""Warns where another agent of the same job, on the same machine, starts its workers on the same GPUs: two terminals, one mistake."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from elastirun.agent.part import NodeRound, Part
from elastirun.agent.status import own_agents
from elastirun.rendezvous.wire.records import Member
from elastirun.threads import start_thread

GPU = "/dev/nvidia0"  # there is one on this machine
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALL = "all"


def devices(environ: Mapping[str, str]) -> str:
    """Return which GPUs the workers see, as the variable lists them; ``ALL`` without it. Empty, or -1: none."""
    return environ.get(VISIBLE, ALL)


def overlap(some: str, others: str) -> bool:
    """Return whether two agents' workers see the same GPU, by what ``devices`` says of each."""
    a, b = ({one for one in map(str.strip, given.split(",")) if one not in ("", "-1")} for given in (some, others))
    return bool(a and b) and (ALL in a | b or not a.isdisjoint(b))


class TwinWarning(Part):
    """Warns, by ``say``, of another agent of ``job`` on this machine whose workers see GPUs that the workers here see, too.

    ``own`` and ``mine``: this agent's socket, and its ``devices``. Other agents may take a second to answer: a thread of its own asks them.
    """

    def __init__(self, job: str, own: str, mine: str, say: Callable[[str], None]) -> None:
        self._job, self._own, self._mine, self._say = job, own, mine, say
        self._asked = False

    def round_starts(self, round: NodeRound) -> None:
        members = round.record.members
        me = members[round.node_rank]
        twins = [member for member in members if _machine(member) == _machine(me)]
        if not self._asked and len(twins) > 1 and os.path.exists(GPU):
            start_thread("shared-devices", _ask, self._job, self._own, self._mine, self._say)
        self._asked = True


def _machine(member: Member) -> tuple[str, str]:
    return member.name.partition("#")[0], member.address  # the agents of a job on one host are numbered, see NodeName


def _ask(job: str, own: str, mine: str, say: Callable[[str], None]) -> None:
    for path in own_agents.sockets():
        other = own_agents.ask(path) if path != own else None
        if other is not None and other.job == job and overlap(mine, other.devices):
            what = "another agent of this job on this machine starts its workers on the same GPUs"
            say(f"warning: {what}; give each its own ({VISIBLE}=0,1 and 2,3), or start one agent with all workers")
            return
