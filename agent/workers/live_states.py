"""Tells the live workers of a round, on all nodes, what only agents know: through the workers' store (docs/elastic.md).

Which ranks of this node have a state: rows have no field for this, so the round record cannot carry it. Workers
wait until every node has told. So each agent tells in each round but the first, in which nobody has a state: with
and without live workers of its own.
That training has ended: a worker that cannot reach the store cannot say so itself, nor one that ends by ``os._exit``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.threads import start_thread
from elastirun.worker.live_messages import store_prefix

AGAIN = 0.05  # seconds between two attempts: the agent of node rank 0 may still be importing torch, to serve the store


def announce_states(address: str, port: int, round: int, node_rank: int, states: Mapping[int, int], goes_on: Callable[[], bool]) -> None:
    """Write the word of this node into the workers' store at ``address:port``, in a thread, which ends when the round does not ``goes_on``.

    ``states``: ranks that have a state, each with the round in which the ranks agreed upon it.
    """
    value = json.dumps(sorted(states.items())).encode()
    _write(address, port, f"{store_prefix(round)}/node/{node_rank}", value, goes_on)


def tell_over(address: str, port: int, round: int, goes_on: Callable[[], bool]) -> None:
    """Write that training has ended, as ``announce_states`` does: workers that wait to be taken in end with code 0."""
    _write(address, port, f"{store_prefix(round)}/over", b"1", goes_on)


def _write(address: str, port: int, key: str, value: bytes, goes_on: Callable[[], bool]) -> None:
    def write() -> None:
        while goes_on():
            with suppress(StoreError), closing(TcpStore(address, port, creates=(key,))) as store:
                store.put_if(key, None, value)
                return
            time.sleep(AGAIN)

    start_thread("live states", write)  # if none can be started, the workers wait, and end with their timeout
