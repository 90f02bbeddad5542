"""The agent's word on which ranks have a state: it comes however late the workers' store does, and not after the round."""

from __future__ import annotations

import socket
import threading

from elastirun.agent.workers import live_states
from elastirun.rendezvous.stores import tcp_server
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.worker.live_messages import store_prefix
from tests.support.cluster import PATIENCE
from tests.support.until import until


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "live states"]


def test_the_word_comes_as_soon_as_there_is_a_store() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    live_states.announce_states("127.0.0.1", port, 7, 3, {4: 6, 2: 6}, lambda: True)
    listening.settimeout(PATIENCE)
    first, _ = listening.accept()
    first.close()
    server = tcp_server.serve(listening)
    store, key = TcpStore("127.0.0.1", port), f"{store_prefix(7)}/node/3"
    assert until(lambda: store.get([key]), "the word of this node")[key] == b"[[2, 6], [4, 6]]"
    store.close()
    for thread in threads():
        thread.join(PATIENCE)
    del server


def test_nothing_is_said_of_a_round_that_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    over = threading.Event()
    live_states.announce_states("127.0.0.1", port, 7, 3, {}, lambda: not over.is_set())
    over.set()
    for thread in threads():
        thread.join(PATIENCE)
    assert not threads()
