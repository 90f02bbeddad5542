"""The death notice of an agent, at the edge: the agent names the store in time, and its guard opens that store when the agent has died.

The store of the agent that hosts it has died with it. For that agent, and where the store cannot be reached, the guard writes a vote into
the standby stores of the others.
The guard imports this module when it gets the first notice. See docs/decisions/0019 and 0020.
"""

from __future__ import annotations

import importlib
import json
import select
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from elastirun import clock
from elastirun.errors import StoreError
from elastirun.rendezvous.death_notice import write_notice
from elastirun.rendezvous.failover.succession import standbys
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import Place, Vote
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from elastirun.threads import start_thread

PAUSES = (0.1, 0.4, 1.0)  # seconds between tries: a store that is away for longer is found too late to be of use
STANDBY_LIMIT = 1.0  # seconds for a standby store to accept a connection, and for each of its answers
TELL_LIMIT = 2.5  # seconds for all of them; those that have not answered by then are tried again


@dataclass(frozen=True)
class Notice:
    """All that a death notice needs. ``store``: as ``StoreAccess.for_guard`` describes it; None: the agent serves it.
    ``since``: a moment, see ``elastirun.clock``.
    """

    store: dict[str, Any] | None
    job: str  # prefix of the job's keys
    me: str  # id of the agent's row
    token: bytes | None
    round: int  # the last round that the agent knew
    since: float  # from when on
    vote: str = ""  # for the standby stores, if the store cannot be reached: a ``Vote`` as the codec spells it

    def encode(self) -> bytes:
        token = None if self.token is None else self.token.hex()
        return json.dumps({**vars(self), "token": token}).encode("ascii")

    @staticmethod
    def decode(data: bytes) -> Notice:
        fields = json.loads(data)
        return Notice(**{**fields, "token": None if fields["token"] is None else bytes.fromhex(fields["token"])})


def prepare(data: bytes) -> None:
    """Import what ``write`` will need for the notice that ``data`` describes, but for etcd's client, which is large."""
    importlib.import_module("elastirun.rendezvous.stores.tcp")
    _vote_of(Notice.decode(data))


def write(data: bytes, died: float) -> bool:
    """Write the notice that ``data`` describes, of an agent that died at the moment ``died``. Return whether it is done.

    Stores that cannot be reached leave the others to find the silence.
    """
    notice = Notice.decode(data)
    told: set[str] = set()
    for pause in (*PAUSES, None):
        with suppress(StoreError):
            if notice.store and _carry_out(notice, notice.store, died):
                return True
        if tell_standbys(notice, told):
            return True
        if pause is not None:
            select.select([], [], [], pause)
    return False


def encode_vote(vote: Vote, token: bytes | None) -> str:
    """Return the vote for ``Notice.vote``."""
    return Codec(token).encode("", vote).decode("ascii")


def _vote_of(notice: Notice) -> Vote | None:
    return Codec(notice.token).decode("", notice.vote.encode(), Vote) if notice.vote else None


def tell_standbys(notice: Notice, told: set[str]) -> bool:
    """Write the vote of ``notice`` into the standby stores that may take over, all at the same time. Return whether all have it now.

    ``told``: the nodes whose stores have it; those that get it now are added. One that is dead or silent does not delay the others.
    """
    if (vote := _vote_of(notice)) is None:
        return False
    places = {place.id: place for place in standbys(vote.record) if place.id != notice.me}
    until = clock.now() + TELL_LIMIT
    threads = []
    for place in (places[i] for i in places.keys() - told):
        if (thread := start_thread("death notice", _tell, notice, vote, place, told)) is not None:
            threads.append(thread)
        else:
            _tell(notice, vote, place, told)
    for thread in threads:
        thread.join(max(0.0, until - clock.now()))
    return told >= places.keys()


def _tell(notice: Notice, vote: Vote, place: Place, told: set[str]) -> None:
    """Write the vote into the standby store at ``place``, unless nothing answers there."""
    from elastirun.rendezvous.stores.tcp import TcpStore

    protocol = SyncProtocol(notice.job, notice.me, Codec(notice.token, place.name), clock.now)
    with suppress(StoreError), closing(TcpStore(place.address, place.port, STANDBY_LIMIT, protocol.vote_keys)) as store:
        if execute(protocol.put_vote(vote), store):
            told.add(place.id)


def _carry_out(notice: Notice, where: dict[str, Any], died: float) -> bool:
    with closing(_connect(where)) as store:
        protocol = SyncProtocol(notice.job, notice.me, Codec(notice.token, where.get("owner", "")), lambda: died)
        return bool(execute(write_notice(protocol, notice.me, notice.round, died - notice.since), store))


def _connect(store: dict[str, Any]) -> Any:
    """Open the store. Errors: ``StoreError``."""
    if store["kind"] == "tcp":
        from elastirun.rendezvous.stores.tcp import TcpStore

        return TcpStore(store["address"], store["port"])
    sys.path += [folder for folder in store["path"] if folder not in sys.path]  # the guard runs without the folders of packages
    from elastirun.rendezvous.stores.etcd import store as etcd
    from elastirun.rendezvous.stores.etcd.access import Access

    return etcd.connector(store["endpoints"], Access(**store["access"]), store["prefix"], store["expire"])()
