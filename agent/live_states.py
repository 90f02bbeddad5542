"""Tells the live workers of a round, on all nodes, which ranks of this node have a state (docs/elastic.md): through the workers' store.

Rows have no field for this, so the round record cannot carry it. Workers wait until every node has told. So each agent tells in each round
but the first, in which nobody has a state: with and without live workers of its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elastirun.errors import StoreError
from elastirun.live_messages import store_prefix
from elastirun.rendezvous.stores.tcp_plain import PlainTcpStore

AGAIN = 0.05  # seconds between two attempts: the agent of node rank 0 may still be importing torch, to serve the store


def tell(address: str, port: int, round: int, node_rank: int, states: Mapping[int, int], goes_on: Callable[[], bool]) -> None:
    """Write the word of this node into the workers' store at ``address:port``, in a thread, which ends when the round does not ``goes_on``.

    ``states``: ranks that have a state, each with the round in which the ranks agreed upon it.
    """

    def write() -> None:
        key, value = f"{store_prefix(round)}/node/{node_rank}", json.dumps(sorted(states.items())).encode()
        while goes_on():
            with suppress(StoreError):
                store = PlainTcpStore(address, port, creates=(key,))
                try:
                    store.put_if(key, None, value)
                    return
                finally:
                    store.close()
            time.sleep(AGAIN)

    with suppress(RuntimeError):  # no thread can be started: the workers wait, and end with their timeout
        threading.Thread(target=write, name="live states", daemon=True).start()
