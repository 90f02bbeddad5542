"""One node's part of the rendezvous, at work: the machine, its exchanges with the store, and the store for the workers.

Two loops drive a session: the agent's (``agent/agent.py``), and that of a simulated node (``tests/sim/world.py``). Whoever drives it starts
and stops the workers. What does I/O, and the clock, are handed to the session.

See docs/agent.md.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from elastirun import clock
from elastirun.agent.store.choose_store import store_access
from elastirun.agent.store.store_access import StoreAccess, new_store_id, rules
from elastirun.agent.store.worker_store import RendezvousStoreForWorkers, WorkerStore
from elastirun.config import LaunchConfig
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.store_thread import StoreThread
from elastirun.rendezvous.wire.actions import Action, Reconnect, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Event, FoundAtStart, Leave, Reachable, StoodStill, Synced, Tick
from elastirun.rendezvous.wire.exchanges import Exchanges
from elastirun.rendezvous.wire.records import NodeRow, Status
from elastirun.rendezvous.wire.sync import SyncProtocol

STANDSTILL = 2.0  # seconds; a loop that goes on so much later than it wanted to has stood still


@dataclass(eq=False)
class Session:
    """Feeds events to the machine, one at a time, and carries out what the machine asks of the store.

    All calls happen in one thread, that of the loop. Register the session with the loop's selector: it is readable when ``receive``
    has something to do. ``now`` is the clock. ``worker_store_failed`` gets a line for people, in another thread.
    """

    machine: Machine
    _exchanges: Exchanges[Any]
    access: StoreAccess
    _worker_store_failed: Callable[[str], None]
    _now: Callable[[], float] = clock.now

    def __post_init__(self) -> None:
        self.worker_store: WorkerStore | RendezvousStoreForWorkers | None = None  # None until the store was reached
        self._events: deque[Event] = deque()
        self._checked_at = 0.0  # when the loop was last known to run

    @classmethod
    def of(cls, config: LaunchConfig, row: NodeRow, worker_store_failed: Callable[[str], None]) -> Session:
        """Return a session with the store that ``config`` names. ``row`` is how this node introduces itself."""
        access = store_access(config)
        access.me = row.id
        protocol = SyncProtocol(access.key_prefix, row.id, Codec(config.token), clock.now)
        thread = StoreThread(access.connect, protocol, access.exchange_limit)
        return cls(Machine(rules(config, access), row, clock.now(), new_store_id()), thread, access, worker_store_failed)

    def begin(self, prepares: bool = False) -> None:
        """The loop begins. ``prepares``: see ``Machine.begin``."""
        self._checked_at = self._now()
        self.machine.begin(self._checked_at, prepares)
        self.post(Tick(self._checked_at))

    def close(self) -> None:
        self._exchanges.close()
        self.access.close()

    def fileno(self) -> int:
        return self._exchanges.fileno()

    def describe_store(self, **more: Any) -> str:
        """Return as a line of JSON where the job meets, and ``more`` about this node, for ``own_agents.ask``."""
        config = self.access.config
        endpoints = (config.endpoint, *config.other_endpoints, *(config.etcd.endpoints if config.etcd else ()))
        store = self.access.for_status(self.machine.store.place)
        known = {"job": config.run_id, "endpoints": [str(one) for one in endpoints if one], "store": store}
        return json.dumps({**known, **more})

    @property
    def due(self) -> float:
        """The moment at which there is something to do for the session although it is not readable; infinity: none."""
        if self._events:
            return -math.inf
        return min(self.machine.wake, self._exchanges.deadline or math.inf)

    # -- events -------------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Add an event for the machine. May be called in any thread; the loop takes it when it goes round."""
        self._events.append(event)

    def receive(self) -> list[str]:
        """Take in what has come from the store. Returns lines for people."""
        lines = [self.access.notices.popleft() for _ in range(len(self.access.notices))]
        if self.access.host_failure:
            self.post(Leave(self._now(), self.access.host_failure))
        self._events.extend(self._exchanges.answers())
        return lines

    def check_time(self, now: float) -> None:
        """Give up an exchange that takes too long, and tell the machine the time when it wants to know."""
        self._events.extend(self._exchanges.give_up(now))
        if now >= self.machine.wake:
            self.post(Tick(now))

    def check_standstill(self, now: float, waited: float, workers_ended: bool = False) -> float | None:
        """Tell the machine, before any other event, when the loop has stood still. Returns for how many seconds; None: it has not.

        ``waited``: the seconds that the loop meant to wait since the last call. No moment between two calls is left out, so a
        standstill is seen wherever it falls. ``workers_ended``: the guard has ended the workers meanwhile, which is reported too.
        """
        overdue, self._checked_at = now - self._checked_at - waited, now
        if not workers_ended and overdue <= STANDSTILL:
            return None
        seconds = max(0.0, overdue)
        self._events.appendleft(StoodStill(now, seconds, workers_ended))
        return seconds

    def next_event(self) -> Event | None:
        """Return the next event for ``step``; None when all are done."""
        return self._events.popleft() if self._events else None

    # -- the machine --------------------------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        """Give the machine each event. Carry out what it asks of the store; yield the rest, which the caller performs."""
        while event := self.next_event():
            yield from (action for action in self.step(event) if not self.carry_out(action))

    def step(self, event: Event) -> list[Action]:
        """Give the machine an event. Returns what it asks for, in order: each is first offered to ``carry_out``."""
        reachable: list[Action] = []
        standby = self.machine.row.standby
        if isinstance(event, Synced) and self._is_reached_elsewhere():
            self.worker_store = self.worker_store or self.access.worker_store(self._worker_store_failed)
            reachable = self.machine.step(self._reachable(event.now, self.access.node_address.address, self.worker_store))
        actions = reachable + self.machine.step(event)
        self.access.newcomer = self.machine.store.round_known[0] == 0
        self.access.has_moved = self.machine.store.place is not None
        if standby and not self.machine.row.standby:
            self.access.renew_standby()
        if isinstance(event, Synced):
            self.access.forward(self.machine.store.forward, lambda record: self.post(FoundAtStart(self._now(), record)))
        return actions

    def _is_reached_elsewhere(self) -> bool:
        """Return whether the route to the store, and with it our address, is known now, or this agent serves another standby store."""
        return self.worker_store is None or self.access.standby_port not in (0, self.machine.row.standby)

    def carry_out(self, action: Action) -> bool:
        """Perform what concerns the store. False for anything else, which is the caller's business."""
        if isinstance(action, Sync):
            self._exchanges.submit(self._with_clearing(action))
        elif isinstance(action, Reconnect):
            self._exchanges.reconnect()
        else:
            return False
        return True

    def serve_workers(self) -> None:
        """Serve the workers' store of the round that has just started, on node rank 0. Raises StartError when that is impossible."""
        assert self.worker_store is not None
        self.worker_store.serve()
        self.post(self._reachable(self._now(), self.machine.row.address, self.worker_store))

    def _reachable(self, now: float, address: str, worker_store: WorkerStore | RendezvousStoreForWorkers) -> Reachable:
        return Reachable(now, address, worker_store.port, self.access.standby_port)

    def _with_clearing(self, sync: Sync) -> Sync:
        """Let ``sync`` clear the store first where workers use it and node rank 0 is about to say that it is ready for a round."""
        record, put = self.machine.record, sync.put
        if put is None or put.row.status is not Status.READY or self.access.worker_endpoint is None or record is None:
            return sync
        known = put.base is not None and (put.base.status, put.base.round) == (Status.READY, put.row.round)
        return replace(sync, fresh=record.index(put.row.id) == 0 and not known)
