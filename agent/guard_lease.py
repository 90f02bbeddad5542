"""The guard's orders: how long the workers may outlive the agent, and what to tell the other nodes at its death."""

from __future__ import annotations

from elastirun import clock
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.processes.death_notice import Notice, encode_vote, tell_standbys
from elastirun.agent.processes.process_tree import ProcessTree
from elastirun.agent.session import Session
from elastirun.config import LaunchConfig

LARGEST_VOTE = 48 << 10  # bytes of a vote in the notice of a member; a pipe to the guard holds 64 KiB without asking for more


class GuardLease(Part):
    """Renews the guard's lease, and keeps the death notice up to date."""

    def __init__(self, config: LaunchConfig, tree: ProcessTree, session: Session) -> None:
        self._config, self._tree, self._session = config, tree, session
        self._lone = False  # the workers here train without another node, and another agent could take this node's place
        self._known: object = None  # what the notice is made of
        self._notice: Notice | None = None

    def round_starts(self, round: NodeRound) -> None:
        self._lone = (round.alone or self._session.machine.trains_apart) and not self._config.standalone
        self.renew(clock.now())

    def gathered(self, members: int) -> None:
        """All workers of the round train together, so those here do not train without the other nodes."""
        self._lone = self._lone and members == 1

    def stood_still(self, workers_ended: bool) -> None:
        self._lone = self._lone and not workers_ended

    def idle(self) -> None:
        self._lone = False

    def is_over(self, now: float) -> bool:
        """Return whether the guard may have ended the workers."""
        return self._tree.lease_is_over(now)

    def renew(self, now: float) -> None:
        """Renew the lease.

        Where workers train without another node it ends when these may consider this node lost, even if it is healthy: decision 0006.
        """
        if self._lone:
            self._tree.end_lease_at(self._session.machine.store.kept_alive + self._config.timing.lone_lease, now)
        else:
            self._tree.renew(now)

    def brief(self) -> None:
        """Tell the guard where to write this agent's death notice, and which round that would be about.

        A store that is served here ends with this agent. Then the guard votes in the standby stores of the others. That of another member
        does so where the store cannot be reached, except in a job so large that the vote could keep the notice from fitting into the pipe.
        """
        machine, access = self._session.machine, self._session.access
        words = machine.last_words
        vote = words[1] if words else None
        store = None if machine.hosting else access.for_guard(machine.store.place)
        known = (machine.store.round_known, store, vote)
        if known == self._known:
            return
        self._known, self._notice = known, None
        if store or vote:
            spelled = encode_vote(vote, self._config.token) if vote else ""
            if store and len(spelled) > LARGEST_VOTE:
                spelled = ""
            self._notice = Notice(store, access.key_prefix, machine.row.id, self._config.token, *machine.store.round_known, spelled)
        self._tree.write_notice_with(self._notice.encode() if self._notice else b"")

    def end(self, job_goes_on: bool) -> Notice | None:
        """Return what ``hand_over`` has to tell: this node has served the store, and the job goes on without it. None: nothing.

        Else this node has left already, so nobody waits for it, and the guard need not tell its end.
        """
        if self._session.machine.last_words and job_goes_on and self._notice is not None:
            return self._notice
        self._tree.write_notice_with(b"")
        return None

    def hand_over(self, notice: Notice) -> None:
        """Tell the standby stores of the others that this node has ended, with the store that it served. Else the guard tells them."""
        self._session.close()
        self._session.access.end_store()
        if tell_standbys(notice, set()):
            self._tree.write_notice_with(b"")
