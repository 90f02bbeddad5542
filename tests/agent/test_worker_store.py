"""The workers' store with ``--port-range``: it leaves the range never, and needs one port of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref

import pytest

from elastirun.agent.host import net
from elastirun.agent.store.worker_store import WorkerStore
from elastirun.errors import StartError
from elastirun.rendezvous.stores import tcp_server
from elastirun.rendezvous.stores.tcp import connect
from tests.support.cluster import free_port


class Server:
    """Stands in for torch's, which takes no weak reference."""


def rounds(store: WorkerStore, count: int) -> set[int]:
    """Serve so many rounds; each must have an empty store. Return the ports."""
    seen = set()
    for i in range(count):
        seen.add(port := store.port)
        store.serve()
        client = connect("127.0.0.1", port)
        assert client.get([str(i - 1)]) == {} and client.put_if(str(i), None, b"x") == b"x"
        client.close()
    store.end_round()
    store._listening.close()
    return seen


def two_ports() -> tuple[int, int]:
    """Return two neighbouring ports that are free now."""
    while True:
        port = free_port()
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port + 1))
            return port, port + 1


def test_a_port_of_the_range_that_is_taken_is_passed_over() -> None:
    first, second = two_ports()
    with contextlib.closing(net.listen_on("127.0.0.1", (first, first))):
        for _ in range(16):  # each begins at a random port
            with net.listen_on("127.0.0.1", (first, second)) as listening:
                assert listening.getsockname()[1] == second


def test_rounds_take_turns_among_the_ports_of_the_range() -> None:
    ports = two_ports()
    assert rounds(WorkerStore("127.0.0.1", print, ports=ports), 4) == {*ports}


def test_the_only_port_of_a_range_serves_each_round() -> None:
    port = free_port()
    assert rounds(WorkerStore("127.0.0.1", print, ports=(port, port)), 3) == {port}


def test_a_round_that_ends_while_its_server_comes_up_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listening socket may be that of the next round, too."""
    up, gate = threading.Event(), threading.Event()
    made: list[weakref.ref[Server]] = []

    def serve(listening: socket.socket) -> Server:
        made.append(weakref.ref(server := Server()))
        up.set()
        gate.wait()
        return server

    monkeypatch.setattr(tcp_server, "serve", serve)
    store = WorkerStore("127.0.0.1", print)
    store.serve()
    up.wait()
    left: list[object] = []
    ending = threading.Thread(target=lambda: (store.end_round(), left.append(made[0]())))  # type: ignore[func-returns-value]
    ending.start()
    ending.join(0.1)  # it waits for the server
    gate.set()
    ending.join()
    assert left == [None]
    store._listening.close()


def test_a_range_without_a_free_port_is_one_line() -> None:
    with contextlib.closing(net.listen_on("127.0.0.1")) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"no port from {port} to {port} of 127.0.0.1 is free; widen --port-range") as error:
            WorkerStore("127.0.0.1", print, ports=(port, port))
        assert "\n" not in str(error.value)
