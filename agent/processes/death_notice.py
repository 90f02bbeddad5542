"""The death notice of an agent, at the edge: the agent names the store in time, and its guard opens that store when the agent has died.

The guard imports this module when all else is done. See docs/decisions/0019.
"""

from __future__ import annotations

import json
import select
import sys
from dataclasses import dataclass
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.codec import Codec
from elastirun.rendezvous.death_notice import write_notice
from elastirun.rendezvous.sync import SyncProtocol, execute

PAUSES = (0.1, 0.4, 1.0)  # seconds between tries: a store that is away for longer is found too late to be of use


@dataclass(frozen=True)
class Notice:
    """All that a death notice needs. ``store``: as ``StoreAccess.for_guard`` describes it. ``since``: a moment, see ``elastirun.clock``."""

    store: dict[str, Any]
    job: str  # prefix of the job's keys
    me: str  # id of the agent's row
    token: bytes | None
    round: int  # the last round that the agent knew
    since: float  # from when on

    def encode(self) -> bytes:
        token = None if self.token is None else self.token.hex()
        return json.dumps({**vars(self), "token": token}).encode("ascii")

    @staticmethod
    def decode(data: bytes) -> Notice:
        fields = json.loads(data)
        return Notice(**{**fields, "token": None if fields["token"] is None else bytes.fromhex(fields["token"])})


def write(data: bytes, died: float) -> bool:
    """Write the notice that ``data`` describes, of an agent that died at the moment ``died``. Return whether the store says it now.

    A store that cannot be reached, such as one that the dead agent has served, leaves the others to find the silence.
    """
    notice = Notice.decode(data)
    for pause in (*PAUSES, None):
        try:
            if _carry_out(notice, died):
                return True
        except StoreError:
            pass
        if pause is not None:
            select.select([], [], [], pause)
    return False


def _carry_out(notice: Notice, died: float) -> bool:
    store = _connect(notice.store)
    try:
        protocol = SyncProtocol(notice.job, notice.me, Codec(notice.token), lambda: died)
        return bool(execute(write_notice(protocol, notice.me, notice.round, died - notice.since), store))
    finally:
        store.close()


def _connect(store: dict[str, Any]) -> Any:
    """Open the store. Errors: ``StoreError``."""
    if store["kind"] == "tcp":
        from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore

        return PlainTcpStore(store["address"], store["port"])
    sys.path += [folder for folder in store["path"] if folder not in sys.path]  # the guard runs without the folders of packages
    from elastirun.rendezvous.stores.etcd import store as etcd
    from elastirun.rendezvous.stores.etcd.access import Access

    return etcd.connector(store["endpoints"], Access(**store["access"]), store["prefix"], store["expire"])()
