"""Measures how the cost of the rendezvous grows with the number of nodes: elastirun's and torch's over a real store.

    python -m benchmarks.rendezvous_scale [--nodes 8 32 128 512 1024] [--repeat 1] [--limit 120] [--sides elastirun torch etcd parsed-once]

N nodes without workers, in eight processes, meet over one real TCPStore in another process. elastirun: the machine, its store thread and
the sync protocol as in the agent. The rest of the agent is left out: Start has no effect, and workers stop at once. torch: its
``DynamicRendezvousHandler`` with the c10d backend in one thread per node, which checks for waiting nodes once a second as torchrun's agent
does. All nodes are connected before the clock starts, and then join at once. Then ten seconds of a running round are counted. Then one node
falls silent, and its peers' workers are assumed to fail at that moment (torch's handler reports no lost node, so all survivors join again).

The TCPStore client counts in the same way for both: one call is one operation, and the bytes are those of its keys and values in both
directions.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fleet import Fleet, Plan, Rows, report, split
from benchmarks.rendezvous_counts import Remembering, Tally, node_row, rules
from elastirun.rendezvous.machine import Machine
from elastirun.rendezvous.rules import Rules
from elastirun.rendezvous.store_thread import StoreThread
from elastirun.rendezvous.stores import tcp
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.stores.etcd import store
from elastirun.rendezvous.stores.tcp_server import serve
from elastirun.rendezvous.stores.torch_class import tcp_store_class
from elastirun.rendezvous.timing import ETCD_LIMIT, EXCHANGE_LIMIT
from elastirun.rendezvous.wire.actions import Finish, Reconnect, Start, Stop, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.events import Event, Tick, WorkersStopped
from elastirun.rendezvous.wire.records import NodeRow
from elastirun.rendezvous.wire.sync import SyncProtocol
from tests.support import etcd_server

SETTLE, WINDOW = 3.0, 10.0  # seconds before the count of a running round begins, and its length
LOOK = 1.0  # seconds between two checks of torch's agent for waiting nodes; its monitor checks more often, but at a local copy


# -- counting ---------------------------------------------------------------------------------------------------------


class Counted:
    """A TCPStore client that counts its calls. One thread at a time uses it."""

    def __init__(self, store: Any, tally: Tally) -> None:
        self.raw = store
        self.tally = tally

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        answer: bytes = self.raw.compare_set(key, expected, value)
        self.tally.count(key, expected, value, answer)
        return answer

    def get(self, key: str) -> bytes:
        answer: bytes = self.raw.get(key)
        self.tally.count(key, answer)
        return answer

    def append(self, key: str, value: str) -> None:
        self.raw.append(key, value)
        self.tally.count(key, value)

    def check(self, keys: list[str]) -> bool:
        self.tally.count(*keys)
        return bool(self.raw.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        answer: list[bytes] = self.raw.multi_get(keys)
        self.tally.count(*keys, *answer)
        return answer


class CountedStore(tcp.TcpStore):
    """Our client, which counts the keys that it writes and reads."""

    def __init__(self, tally: Tally, *where: Any) -> None:
        self.tally = tally
        super().__init__(*where)

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        found = super().get(wanted)
        self.tally.count(*wanted, *found.values(), operations=len(wanted))
        return found

    def has(self, key: str) -> bool:
        self.tally.count(key)
        return super().has(key)

    def put_if(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        found = super().put_if(key, expected, value)
        self.tally.count(key, expected, value, found)
        return found

    def put_if_and_get(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> tuple[bytes | None, dict[str, bytes]]:
        if self._beat(key, expected, value, keys) is None:
            return self.put_if(key, expected, value), self.get(keys) if keys else {}
        now, found = super().put_if_and_get(key, expected, value, keys)
        self.tally.count(key, expected, value, now, *keys, *found.values(), operations=1 + len(keys))
        return now, found

    def ask(self, key: str, expected: bytes | None, value: bytes, keys: Sequence[str]) -> int | None:
        if (begun := super().ask(key, expected, value, keys)) is not None:
            self.tally.count(key, expected, value, *keys, operations=1 + len(keys))
        return begun

    def answer(self) -> tuple[bytes | None, dict[str, bytes]] | None:
        if (found := super().answer()) is not None:
            self.tally.count(found[0], *found[1].values(), operations=0)
        return found


# -- the nodes of one process -------------------------------------------------------------------------------------------


@dataclass
class Node:
    """One node of elastirun."""

    index: int
    machine: Machine
    driver: StoreThread
    tally: Tally
    lost: bool = False
    armed: int = 0


class Elastirun:
    """The elastirun nodes of one process: their machines in one loop, as in the agent, with a store thread for each."""

    codec, limit, lasting = Codec(), EXCHANGE_LIMIT, False

    def __init__(self, plan: Plan, main: Connection) -> None:
        self._main = main
        self._selector = selectors.DefaultSelector()
        self._selector.register(main, selectors.EVENT_READ)
        self._heap: list[tuple[float, int, int]] = []
        self._lag = 0.0
        self._nodes = {i: self._node(plan, i) for i in plan.mine}

    def _connector(self, endpoint: str, tally: Tally) -> Callable[[], Store]:
        return lambda: CountedStore(tally, *split(endpoint), tcp.HANG_LIMIT, tcp.ANY_KEY)

    def _node(self, plan: Plan, index: int) -> Node:
        tally = Tally()
        row = node_row(index, os.getpid())
        connect = self._connector(plan.endpoint, tally)
        ready = [connect()]
        protocol = SyncProtocol("job/", row.id, self.codec, time.monotonic)
        driver = StoreThread(lambda at: ready.pop() if ready else connect(), protocol, self.limit)
        node = Node(index, self._machine(replace(rules(plan.nodes), lasting=self.lasting), row, index), driver, tally)
        self._selector.register(driver, selectors.EVENT_READ, node)
        return node

    @staticmethod
    def _machine(rules: Rules, row: NodeRow, index: int) -> Machine:
        return Machine(rules, row, time.monotonic(), f"store-of-{index}")

    def run(self) -> None:
        self._main.send(("connected",))
        looked = 0.0
        while True:
            wait_for = None if not self._heap else max(0.0, min(self._heap[0][0] - time.monotonic(), 0.5))
            for key, _ in self._selector.select(wait_for):
                if key.fileobj is self._main:
                    self._carry_out(*self._main.recv())
                else:
                    for answer in key.data.driver.answers():
                        self._feed(key.data, answer)
            now = time.monotonic()
            while self._heap and self._heap[0][0] <= now:
                due, index, armed = heapq.heappop(self._heap)
                if armed == self._nodes[index].armed:
                    self._lag = max(self._lag, now - due)
                    self._feed(self._nodes[index], Tick(time.monotonic()))
            if now - looked > 0.5:
                looked = now
                for node in self._nodes.values():
                    for failed in node.driver.give_up(now):
                        self._feed(node, failed)

    def _carry_out(self, command: str, index: int = -1) -> None:
        if command == "go":
            for node in self._nodes.values():
                node.machine = self._machine(node.machine.rules, node.machine.row, node.index)  # created now: connecting is not counted
                self._feed(node, Tick(time.monotonic()))
            self._main.send(("gone", time.monotonic()))
        elif command == "tally":
            self._main.send(("tally", sum((n.tally for n in self._nodes.values()), Tally()), self._lag))
            self._lag = 0.0
        elif command == "lose" and index in self._nodes:
            node = self._nodes[index]
            node.lost = True
            self._selector.unregister(node.driver)
            node.driver.close()
        elif command == "end":
            os._exit(0)

    def _feed(self, node: Node, event: Event) -> None:
        if node.lost:
            return
        stop = False
        for action in node.machine.step(event):
            if isinstance(action, Sync):
                node.driver.submit(action)
            elif isinstance(action, Start):
                self._main.send(("round", node.index, len(action.record.members), time.monotonic()))
            elif isinstance(action, Stop):
                self._main.send(("stopped", node.index, action.reason))
                stop = True
            elif isinstance(action, Reconnect):
                node.driver.reconnect()
            elif isinstance(action, Finish):
                self._main.send(("ended", node.index, f"{action.outcome.value}: {action.reason}"))
        node.armed += 1
        if node.machine.wake < 1e12:
            heapq.heappush(self._heap, (node.machine.wake, node.index, node.armed))
        if stop:
            self._feed(node, WorkersStopped(time.monotonic()))


class ParsedOnce(Elastirun):
    codec = Remembering()


class AtEtcd(Elastirun):
    """The same with an etcd of one member. One call of etcd's API is one operation. Watches count neither operations nor bytes."""

    limit, lasting = ETCD_LIMIT, True

    def _connector(self, endpoint: str, tally: Tally) -> Callable[[], Store]:
        open_store = store.connector([endpoint])

        def connect() -> Store:
            store = open_store()
            call = store._client.call

            def counted(name: str, request: Any) -> Any:
                answer = call(name, request)
                tally.count(bytes(request.ByteSize()), bytes(answer.ByteSize()))
                return answer

            store._client.call = counted  # type: ignore[method-assign]
            return store

        return connect


class Torch:
    """The torch nodes of one process, with a thread for each."""

    def __init__(self, plan: Plan, main: Connection) -> None:
        self._plan = plan
        self._main = main
        self._sending = threading.Lock()
        self._stores = {i: Counted(self._client(), Tally()) for i in plan.mine}
        self._again = {i: threading.Event() for i in plan.mine}
        self._lost = -1

    def _client(self) -> Any:
        return tcp_store_class()(*split(self._plan.endpoint), is_master=False, wait_for_workers=False)

    def run(self) -> None:
        import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend  # noqa: F401 (not on the clock)

        logging.disable(logging.CRITICAL)
        self._send("connected")
        while True:
            command, *rest = self._main.recv()
            if command == "go":
                for i in self._plan.mine:
                    threading.Thread(target=self._live, args=(i,), daemon=True).start()
                self._send("gone", time.monotonic())
            elif command == "tally":
                self._send("tally", sum((store.tally for store in self._stores.values()), Tally()), 0.0)
            elif command == "lose":
                self._lost = rest[0]
                for again in self._again.values():
                    again.set()
            elif command == "end":
                os._exit(0)

    def _send(self, *message: object) -> None:
        with self._sending:
            self._main.send(message)

    def _live(self, index: int) -> None:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

        store, nodes = self._stores[index], self._plan.nodes
        backend = C10dRendezvousBackend(store, "job")  # type: ignore[arg-type]
        handler = DynamicRendezvousHandler.from_backend("job", store.raw, backend, max(1, nodes - 1), nodes, local_addr="127.0.0.1")
        try:
            while True:
                world = handler.next_rendezvous().world_size
                self._send("round", index, world, time.monotonic())
                while handler.num_nodes_waiting() == 0 and not self._again[index].wait(LOOK):
                    pass
                if self._lost == index:
                    handler._stop_heartbeats()
                    return
                self._again[index].clear()
        except Exception as error:
            self._send("ended", index, f"{type(error).__name__}: {error}")


SIDES: dict[str, type[Elastirun] | type[Torch]] = {"elastirun": Elastirun, "torch": Torch, "parsed-once": ParsedOnce, "etcd": AtEtcd}


def run_nodes(side: str, plan: Plan, main: Connection) -> None:
    threading.stack_size(256 << 10)
    SIDES[side](plan, main).run()


def run_store(main: Connection) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    store = serve(listening)
    main.send(port)
    main.recv()
    del store
    os._exit(0)


# -- one measurement --------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The result of one measurement. Times are in seconds; None: not within the limit. Tallies are sums over all nodes."""

    formed: float | None = None
    forming: Tally = field(default_factory=Tally)
    running: Tally = field(default_factory=Tally)
    reformed: float | None = None
    reforming: Tally = field(default_factory=Tally)
    lag: float = 0.0  # longest delay of a timer, seconds; above one this machine is too slow for so many nodes
    notes: list[str] = field(default_factory=list)


class OneStore(Fleet):
    """The processes of one measurement: the store in one, the nodes in others."""

    def __init__(self, side: str, nodes: int) -> None:
        super().__init__(nodes)
        self.lag = 0.0
        self._stack = ExitStack()
        if side == "etcd":
            (endpoint,) = self._stack.enter_context(etcd_server.etcd()).endpoints
        else:
            _, self._store = self.start(run_store)
            endpoint = f"127.0.0.1:{self._store.recv()}"
        self.start_nodes(run_nodes, endpoint, side)
        self.answers("connected")

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def lose(self, index: int) -> float:
        self.tell("lose", index)
        self.sizes.pop(index, None)
        return time.monotonic()

    def tally(self) -> Tally:
        self.tell("tally")
        answers = self.answers("tally")
        self.lag = max([self.lag, *(answer[1] for answer in answers)])
        return sum((answer[0] for answer in answers), Tally())


def measure(side: str, nodes: int, limit: float) -> Measured:
    found = Measured()
    with OneStore(side, nodes) as fleet:
        found.notes = fleet.notes
        before = fleet.tally()
        begun = fleet.go()
        at = fleet.in_round(nodes, limit)
        found.forming = fleet.tally() - before
        if at is not None:
            found.formed = at - begun
            fleet.rest(SETTLE)
            before = fleet.tally()
            fleet.rest(WINDOW)
            found.running = fleet.tally() - before
            before = fleet.tally()
            lost_at = fleet.lose(nodes // 2)
            at = fleet.in_round(nodes - 1, limit)
            found.reforming = fleet.tally() - before
            found.reformed = None if at is None else at - lost_at
        found.lag = fleet.lag
    return found


# -- words ------------------------------------------------------------------------------------------------------------

EXPIRE = {"elastirun": 5.0, "parsed-once": 5.0, "etcd": 5.0, "torch": 15.0}  # seconds of silence after which a node counts as lost
HEAD = ["nodes", "", "formed, s", "op / node", "MB in all", "running: op/s / node", "kB/s / node"]
HEAD += ["re-formed, s", "after expiry", "MB in all", "lag, s", "load"]


def row(nodes: int, side: str, found: Measured, load: float) -> list[str]:
    def at(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds:.2f}"

    def mb(tally: Tally) -> str:
        return f"{tally.size / 1e6:.1f}"

    after = None if found.reformed is None else found.reformed - EXPIRE[side]
    running = [f"{found.running.operations / nodes / WINDOW:.2f}", f"{found.running.size / nodes / WINDOW / 1e3:.1f}"]
    formed = [at(found.formed), f"{found.forming.operations / nodes:.1f}", mb(found.forming)]
    return [str(nodes), side, *formed, *running, at(found.reformed), at(after), mb(found.reforming), f"{found.lag:.2f}", f"{load:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=["elastirun", "torch"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds each for forming and for re-forming")
    chosen = parser.parse_args()

    def rows() -> Rows:
        for nodes, _, side in itertools.product(chosen.nodes, range(chosen.repeat), chosen.sides):
            load = os.getloadavg()[0]
            found = measure(side, nodes, chosen.limit)
            yield row(nodes, side, found, load), found.notes

    report(HEAD, rows())


if __name__ == "__main__":
    main()
