"""Every duration of the rendezvous, what follows from ``beat`` and ``expire``, and the order in which the durations must lie.

All values are seconds. No clock of another machine is ever compared: each node measures durations on its own monotonic clock,
and the fractions below leave room for clocks that run up to 10 % too fast or too slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastirun.errors import UsageError

# Seconds for each operation of an exchange with the store, before the exchange counts as failed. On a slow network each answer is progress.
EXCHANGE_LIMIT = 3.0  # TCPStore; less than the default ``expire``, so that one exchange that hangs does not make this node lost
ETCD_LIMIT = 10.0  # etcd; an election of a new leader is waited for, and each endpoint is tried

# Fractions of ``expire``, counted from the last acknowledged keep-alive. A single-node round starts to stop at LONE_LIMIT and must
# be gone LONE_GRACE later; the remaining 0.2 absorbs clock drift (docs/decisions/0006).
LONE_LIMIT, LONE_GRACE = 0.6, 0.2
# Of ``store_grace`` and twice ``expire``: after that much silence no member can still be training, however its clock runs.
CLOCK_DRIFT = 1.25

# Fractions of ``expire`` at etcd, see ``Lease``: the time to live of a row's lease, and the least time that the row must stay away.
LEASE_TTL, ABSENCE = 0.6, 0.4
SHORTEST_LEASE = 2  # seconds; etcd grants none that is shorter
SURE = 0.8  # of a lease's time to live: by any clock the lease lasts longer

SLOW_ANSWER = 0.3  # of ``expire``, see ``Timing.slow_answer``
LATE = 2.5  # beats without a sign of life after which a member may be lost, and perhaps its neighbours with it; one beat may be missed
PROOF = 2.0  # beats in which a living node changes its row before our eyes
SHORTEST_GUARD_LEASE = 10.0  # seconds; a starved machine holds up a healthy agent for some seconds
LINGER = 2.0  # seconds beyond ``expire`` that the store's host waits for the last reads of the others
RECONNECT_SPREAD = 5.0  # seconds; after an outage of etcd, or of the host of a store, nodes reconnect at different times
GOODBYE = 2.0  # seconds for which a node tries to write that it has left
MARKING = 0.5  # of these for naming it in the round record, too, where its store may be gone soon: many leave at once, and all write there
JUST_AFTER = 0.01  # seconds; a read must start later than the moment at which a node could be found silent


@dataclass(frozen=True)
class Lease:
    """Time for which a row at etcd outlives its keep-alive. ``ttl + absence`` is never less than ``expire``. See docs/decisions/0006."""

    ttl: int  # seconds of the row's lease, whole ones as etcd wants them
    absence: float  # seconds without the row; a living node whose lease was over, or was revoked by mistake, has written it anew by then

    @staticmethod
    def of(expire: float) -> Lease:
        """Return the lease for a job with ``expire``."""
        ttl = max(SHORTEST_LEASE, math.floor(LEASE_TTL * expire))
        return Lease(ttl, max(expire - ttl, ABSENCE * expire))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The durations that a job can be given, and those that follow from them. ``beat`` and ``expire`` decide how fast a loss is noticed."""

    join_timeout: float = 600.0  # give up when no round has formed for this long; torchrun's default
    last_call: float = 5.0  # the first round waits this long after the latest join for more nodes
    debounce: float = 1.0  # newcomers to a running round are admitted together once none has come for this long, or they fill it
    beat: float = 0.5  # interval at which an agent renews its row and reads the round; a tenth of expire, so that several may fail
    expire: float = 5.0  # a node whose row has not changed for this long is lost
    store_grace: float = 60.0  # workers go on for this long while the store is unreachable: a restart of the store fits in
    grace: float = 30.0  # SIGTERM to SIGKILL at a planned stop (resize, drain, signal); torchrun's default
    failure_grace: float = 5.0  # the same after a worker failed: collectives are dead, so there is little to save
    restart_pause: float = 10.0  # longest pause before a restart; pauses grow when rounds fail quickly one after the other; 0: no pause

    # -- keep-alives ----------------------------------------------------------------------------------------------------

    @property
    def lasting_beat(self) -> float:
        """Interval of keep-alives at a store that outlives its jobs, which announces changes by itself and is shared by many nodes."""
        return max(self.beat, min(2 * self.beat, self.expire / 5))

    @property
    def late(self) -> float:
        """Silence of a watched member after which it may be lost: all rows are read from then on."""
        return LATE * self.beat

    @property
    def proof(self) -> float:
        """Time in which a newcomer that lives has changed its row."""
        return PROOF * self.beat

    @property
    def slow_exchange(self) -> float:
        """Length of an exchange beyond which the store is in trouble: no silence of other nodes until its end counts."""
        return self.expire / 2

    @property
    def slow_answer(self) -> float:
        """Length of an exchange beyond which keep-alives, of which several may fail within ``expire``, come too seldom."""
        return SLOW_ANSWER * self.expire

    @property
    def row_lease(self) -> Lease:
        """The lease of a row at etcd."""
        return Lease.of(self.expire)

    # -- a single-node round, counted from its last acknowledged keep-alive -----------------------------------------------

    @property
    def lone_limit(self) -> float:
        """Time at which a single-node round that is cut off starts to stop."""
        return LONE_LIMIT * self.expire

    @property
    def lone_grace(self) -> float:
        """Time that its workers have to stop."""
        return LONE_GRACE * self.expire

    @property
    def lone_lease(self) -> float:
        """Time at which the guard ends its workers, whatever the agent does."""
        return (LONE_LIMIT + LONE_GRACE) * self.expire

    # -- longer waits -----------------------------------------------------------------------------------------------------

    @property
    def guard_lease(self) -> float:
        """Standstill of an agent after which the guard ends its workers; by then the other nodes have replaced this one."""
        return max(SHORTEST_GUARD_LEASE, 2 * self.expire)

    @property
    def doubt(self) -> float:
        """Silence of the store after which its members doubt that its host lives, and a majority may go on without it."""
        return 2 * self.expire

    @property
    def replacement(self) -> float:
        """Age of a round before which no newcomer is excluded whose fixed rank is taken: it may replace a node that is not missed yet."""
        return 2 * self.expire

    @property
    def host_lingers(self) -> float:
        """Time that the store's host stays, after the job is closed, for the last reads of the other nodes."""
        return self.expire + LINGER

    @property
    def unreadable_limit(self) -> float:
        """Time after which a round record that a newcomer cannot read is not of an earlier run: that one's host would have gone."""
        return 2 * self.expire + LINGER

    @property
    def longest_alone(self) -> float:
        """Silence of a whole round after which none of its members can still be training, whatever the difference of the clocks."""
        return CLOCK_DRIFT * (self.store_grace + 2 * self.expire)

    def validate(self) -> None:
        """Refuse durations that break a rule which the rendezvous relies on. Errors: ``UsageError``, one sentence about the first."""
        if not self.beat > 0:
            raise UsageError(f"the time between two keep-alives ({self.beat:g} s) must be longer than 0 s; change --expire={self.expire:g}")
        order = (
            (self.beat, "the time between two keep-alives", EXCHANGE_LIMIT, "the limit of an exchange with the store"),
            (self.late, f"{LATE:g} times the time between two keep-alives", self.expire, "--expire"),
            (self.lasting_beat, "the time between two keep-alives at etcd", SURE * self.row_lease.ttl, "the safe part of a row's lease"),
            (self.lasting_beat, "the time between two keep-alives", self.lone_limit, "the time after which a single-node round stops"),
            (self.lone_limit + self.lone_grace, "the time in which a single-node round stops", self.expire, "--expire"),
            (self.expire, "--expire", self.guard_lease, "the lease of the guard"),
            (self.expire, "--expire", self.longest_alone, "the time in which a round that lost the store stops"),
        )
        for shorter, what, longer, than in order:
            if not shorter < longer:
                raise UsageError(f"{what} ({shorter:g} s) must be shorter than {than} ({longer:g} s); change --expire={self.expire:g}")
