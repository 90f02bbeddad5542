"""A simulated world with one real node; the rows and rounds of all others are written by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastirun.rendezvous import updates
from elastirun.rendezvous.peers import ranks
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.wire.actions import Action, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Cause, NodeRow, RoundRecord, Status
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.sim.world import Node, World, read_round, write_round

ME = "n0-0"


class Stage(World):
    """A world with one real node, ``me``. The others are puppets: they send keep-alives, and do what the test says."""

    def __init__(self, hosted: bool = False, **rules: object) -> None:
        super().__init__(hosted=hosted, **{"min_nodes": 1, "max_nodes": 3, **rules})
        self.puppets: dict[str, NodeRow] = {}
        self.actions: list[Action] = []
        self.under_way = 0
        self.most_under_way = 0

    def enter(self) -> Node:
        self.me = self.add()
        step = self.me.machine.step

        def watched(event: Any) -> list[Action]:
            self.under_way -= type(event).__name__ in ("Synced", "SyncFailed")
            found = step(event)
            self.under_way += sum(isinstance(action, Sync) for action in found)
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.actions += found
            return found

        self.me.machine.step = watched  # type: ignore[method-assign]
        self.under_way = 1  # the first read of the store
        return self.me

    def puppet(self, i: str, beats: bool = True, **fields: Any) -> None:
        """Write the row of puppet ``i``; from its first time on it is written every half second, unless ``beats`` is false."""
        new = i not in self.puppets
        before = self.puppets.get(i, NodeRow(i, f"name-{i}", f"10.0.1.{ord(i[0])}", 1000, 2, seq=0))
        self.puppets[i] = replace(before, seq=before.seq + 1, **fields)
        self.data[f"job/node/{i}"] = Codec().encode(f"job/node/{i}", self.puppets[i])
        if new and beats and not self.rules.lasting:  # where rows have leases, a row that stays is a sign of life
            self._beat(i)

    def _beat(self, i: str) -> None:
        def again() -> None:
            if i in self.puppets:
                if self.store_up:
                    self.puppet(i)
                self._beat(i)

        self.at(0.5, again)

    def silence(self, i: str) -> None:
        """Let the puppet send no more keep-alives. Its row vanishes with its lease, where it has one, but not while the store is down."""
        del self.puppets[i]
        if self.rules.lasting:
            self.at(self.rules.row_lease.ttl, lambda: self._end_lease_of(i))

    def _end_lease_of(self, i: str) -> None:
        if not self.store_up:
            self.at(0.5, lambda: self._end_lease_of(i))
        elif i not in self.puppets:
            self.data.pop(f"job/node/{i}", None)

    @property
    def record(self) -> RoundRecord:
        found = read_round(self.data)
        assert found is not None
        return found

    def write(self, record: RoundRecord) -> None:
        write_round(self.data, record)

    @property
    def mine(self) -> NodeRow:
        """The real node's row as it stands in the store."""
        key = f"job/node/{self.me.id}"
        return Codec().decode(key, self.data[key], NodeRow)

    def form(self, *ids: str, number: int = 1) -> None:
        """Write the round of ``ids``, as one of the puppets would."""
        rows = {**self.puppets, self.me.id: self.me.machine.row}
        members = tuple(ranks.member(rows[i]) for i in ids)
        self.write(replace(self.record, version=self.record.version + 1, round=number, members=members, broken=None))
        for i in ids:
            if i in self.puppets:
                self.puppet(i, status=Status.RUNNING, round=number)

    def break_up(self, cause: Cause, by: str = "b", **fields: Any) -> None:
        self.write(replace(updates.break_up(self.record, cause, f"because of {cause.value}", by, 0.0), **fields))


def met(hosted: bool = False, **rules: object) -> Stage:
    """Return a stage on which the real node has met the store and waits."""
    stage = Stage(hosted, **{"min_nodes": 3, **rules})
    stage.write(RoundRecord("s"))
    stage.enter()
    assert stage.run(5, lambda: f"job/node/{ME}" in stage.data)
    return stage


def slow_answers(stage: Stage, seconds: float) -> None:
    """Delay every answer of the store by ``seconds`` from now on."""

    def slowly(node: Node, sync: Sync) -> None:
        started = node.now
        carry_out = SyncProtocol("job/", node.id, Codec(), lambda: node.now).carry_out
        stage.at(seconds, lambda: node.feed(lambda now: replace(carry_out(MemoryStore(stage.data), sync, started), now=now)))

    stage.begin = slowly  # type: ignore[method-assign]


def running(*others: str, **rules: object) -> Stage:
    """Return a stage on which the real node runs round 1 with ``others``."""
    stage = met(**rules)
    for i in others:
        stage.puppet(i)
    stage.form(ME, *others)
    assert stage.run(5, lambda: stage.me.working is not None)
    return stage


def count(stage: Stage, kind: Callable[[Action], bool], seconds: float) -> int:
    stage.actions.clear()
    stage.run(seconds)
    return sum(kind(action) for action in stage.actions)
