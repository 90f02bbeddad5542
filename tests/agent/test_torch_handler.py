"""Plain torchrun over elastirun's rendezvous at etcd: the installed torchrun, and the handler alone where that tells more."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastirun.agent import torch_handler
from elastirun.agent.torch_handler import TorchrunNode
from elastirun.config import Endpoint
from elastirun.errors import UsageError
from elastirun.rendezvous.stores.etcd.store import connector
from elastirun.torch_plugin import MOST_RESTARTS, configuration
from tests.support.cluster import PATIENCE, Cluster, Worker, free_port, kill
from tests.support.etcd_server import Etcd
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
SOON = "keep_alive_interval=1,keep_alive_max_attempt=2"  # a node is lost after 2 s
NEVER = "keep_alive_interval=600"


# -- the installed torchrun


@pytest.fixture
def nodes(nodes: Cluster, tmp_path: Path) -> Cluster:
    """With what an installation of this source tree would tell torchrun, whether it is installed or not."""
    found = re.search(r'^\[project\.entry-points\."torchrun\.handlers"\]\n((?:.+\n)+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    installed = tmp_path / "installed" / "elastirun-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: elastirun\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torchrun.handlers]\n" + found[1].replace('"', ""))
    nodes.env |= {"PYTHONPATH": f"{installed.parent}:{ROOT}", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    return nodes


def torchrun(nodes: Cluster, endpoint: str, i: int, nnodes: str, conf: str, restarts: int = 0) -> subprocess.Popen[str]:
    where = ["--rdzv-backend=elastirun-etcd", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={nodes.tmp_path.name}", f"--rdzv-conf={conf}"]
    own = [f"--nnodes={nnodes}", f"--local-addr=127.0.0.{i}", f"--max-restarts={restarts}"]
    return nodes.launch(i, *where, *own, str(nodes.script), program=("-m", "torch.distributed.run"))


def a_round(nodes: Cluster, size: int) -> list[Worker]:
    """The workers of the next complete round of ``size`` nodes, in rank order; they have its address and port in common."""
    rounds: dict[str, list[Worker]] = {}
    while True:
        worker = nodes.worker()
        met = rounds.setdefault(worker.env["MASTER_ADDR"] + worker.env["MASTER_PORT"], [])
        met.append(worker)
        if len(met) == size and worker.env["WORLD_SIZE"] == str(size):
            assert sorted(one.rank for one in met) == list(range(size))
            return sorted(met, key=lambda one: one.rank)


def all_succeed(nodes: Cluster, workers: list[Worker], agents: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents] == [0] * len(agents), nodes.everything()


def round_record(server: Etcd, job: str) -> bytes:
    store = connector(server.endpoints)()
    try:
        return store.get([f"{job}/round"])[f"{job}/round"]
    finally:
        store.close()


def test_two_nodes_meet_start_anew_when_a_worker_fails_and_succeed(nodes: Cluster, server: Etcd) -> None:
    agents = [torchrun(nodes, server.endpoints[0], i, "2", NEVER, restarts=1) for i in (1, 2)]
    before = a_round(nodes, 2)
    assert {worker.env["GROUP_WORLD_SIZE"] for worker in before} == {"2"}
    before[1].tell("exit 3")
    after = a_round(nodes, 2)
    assert after[0].env["MASTER_ADDR"] == before[0].env["MASTER_ADDR"]
    for worker in before:
        worker.await_death()
    all_succeed(nodes, after, agents)
    assert "round 2: 2 nodes, here node rank 0 (rank 1 on" in nodes.everything()
    assert b'"verdict":"succeeded"' in round_record(server, nodes.tmp_path.name)
    assert "Traceback" not in nodes.everything() and "terminate" not in nodes.everything()


def test_a_third_node_is_taken_in_and_a_killed_one_left_behind(nodes: Cluster, server: Etcd) -> None:
    conf = f"last_call_timeout=0.5,{SOON}"
    agents = {i: torchrun(nodes, server.endpoints[0], i, "2:3", conf) for i in (1, 2)}
    a_round(nodes, 2)
    agents[3] = torchrun(nodes, server.endpoints[0], 3, "2:3", conf)
    whole = a_round(nodes, 3)
    assert "joined" in nodes.everything()
    (first,) = (i for i in agents if whole[0].env["MASTER_ADDR"] == f"127.0.0.{i}")
    kill(agents.pop(first))
    whole[0].tell(f"kill {signal.SIGKILL.value}")
    rest = a_round(nodes, 2)
    assert "silent for 2 s" in nodes.everything()
    all_succeed(nodes, rest, list(agents.values()))


def test_a_node_that_is_told_to_stop_says_so_and_the_other_goes_on(nodes: Cluster, server: Etcd) -> None:
    agents = [torchrun(nodes, server.endpoints[0], i, "1:2", f"last_call_timeout=30,{NEVER}") for i in (1, 2)]
    both = a_round(nodes, 2)
    agents.pop().send_signal(signal.SIGTERM)
    (other,) = a_round(nodes, 1)
    assert "leaves: its torchrun ended" in nodes.out(1)
    assert both[1].env["RANK"] == "1"
    all_succeed(nodes, [other], agents)


def test_no_etcd_is_one_clear_error(nodes: Cluster) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    assert nodes.ends(torchrun(nodes, endpoint, 1, "2", "join_timeout=3")) == 1
    (line,) = (line for line in nodes.out(1).splitlines() if "RendezvousConnectionError: " in line)
    assert "no round within 3 s: waiting for the rendezvous store: etcd" in line and f"{endpoint}: connection refused" in line
    assert "bug" not in nodes.out(1) and "During handling" not in nodes.out(1)


# -- the handler alone, with two nodes in this process

Found = tuple[int, int]  # the number of a round, and this node's rank in it
Reach = Callable[[Any, int, Callable[[], bool]], Found]


class Node:
    """A node, and a thread for what torchrun's does."""

    def __init__(self, endpoint: str, job: str, conf: str = NEVER, reach: Reach = lambda record, rank, is_on: (record.round, rank)) -> None:
        config, _ = configuration(parameters(endpoint, job, conf))
        self.handler = TorchrunNode(config, reach, lambda name, why: RuntimeError(f"{name}: {why}"))
        self._pool = ThreadPoolExecutor(1)

    def joins(self) -> Future[Found]:
        return self._pool.submit(self.handler.next_rendezvous)

    def succeeds(self) -> Future[bool]:
        return self._pool.submit(self.handler.shutdown)

    def fails(self) -> bool:
        """torch calls it while the exception is on its way."""
        try:
            raise RuntimeError("a worker failed, and no restart is left")
        except RuntimeError:
            return self.handler.shutdown()

    def hears_that_it_is_over(self) -> None:
        until(self.handler.num_nodes_waiting, "the end of the round", pause=0.05)  # torchrun asks ten times a second

    def close(self) -> None:
        self.fails()
        self._pool.shutdown()


def parameters(endpoint: str, job: str, conf: str, nnodes: tuple[int, int] = (2, 2), local_addr: str | None = None) -> Any:
    """As torch hands them over."""
    low, high = nnodes
    config = dict(item.split("=") for item in conf.split(",")) | {"timeout": 900}
    return SimpleNamespace(endpoint=endpoint, run_id=job, min_nodes=low, max_nodes=high, local_addr=local_addr, config=config)


def ranks_of(nodes: Iterable[Node]) -> list[Found]:
    """All ask for the next round, and get it."""
    waits = [node.joins() for node in nodes]
    return [wait.result(PATIENCE) for wait in waits]


@pytest.fixture
def pair(server: Etcd, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """Two nodes that run round 1, in rank order."""
    made = [Node(server.endpoints[0], request.node.name) for _ in range(2)]
    try:
        found = dict(zip(ranks_of(made), made, strict=True))
        assert sorted(found) == [(1, 0), (1, 1)]
        yield [found[1, 0], found[1, 1]]
    finally:
        for node in made:
            node.close()


def test_a_round_in_which_a_worker_failed_is_over_for_both(pair: list[Node]) -> None:
    assert [node.handler.num_nodes_waiting() for node in pair] == [0, 0]
    again = pair[1].joins()
    pair[0].hears_that_it_is_over()
    assert pair[0].joins().result(PATIENCE) == (2, 0)
    assert again.result(PATIENCE) == (2, 1)
    assert [node.handler.num_nodes_waiting() for node in pair] == [0, 0]


def test_a_round_that_is_over_before_its_store_is_reached_is_kept_from_torchrun(server: Etcd) -> None:
    reached = threading.Event()

    def reach(record: Any, rank: int, is_on: Callable[[], bool]) -> Found:
        if (record.round, rank) == (1, 1):
            assert reached.wait(PATIENCE)
        return record.round, rank

    made = [Node(server.endpoints[0], "out of reach", reach=reach) for _ in range(2)]
    try:
        waits = [node.joins() for node in made]
        done, (waiting,) = wait(waits, PATIENCE, FIRST_COMPLETED)
        assert [one.result() for one in done] == [(1, 0)]
        first, second = sorted(made, key=lambda node: waits[made.index(node)] is waiting)
        assert first.joins().result(PATIENCE) == (2, 0)
        assert waiting.result(PATIENCE) == (2, 1)
        reached.set()
        assert ranks_of([second, first]) == [(3, 1), (3, 0)]
    finally:
        reached.set()
        for node in made:
            node.close()


def test_the_job_is_closed_when_all_have_succeeded(pair: list[Node]) -> None:
    assert [ended.result(PATIENCE) for ended in [node.succeeds() for node in pair]] == [True, True]
    assert [node.handler.is_closed() for node in pair] == [True, True]
    for _ in range(2):  # however often it is asked for
        with pytest.raises(RuntimeError, match="^Closed: "):
            pair[0].joins().result(PATIENCE)


def test_who_has_succeeded_need_not_stay(pair: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_handler, "CLOSE_LIMIT", 0.5)
    assert pair[0].handler.shutdown()
    assert (pair[1].handler.num_nodes_waiting(), pair[1].handler.is_closed()) == (0, False)
    assert pair[1].handler.shutdown()
    assert pair[1].handler.is_closed()


def test_who_has_failed_leaves_and_closes_nothing(pair: list[Node], request: pytest.FixtureRequest, server: Etcd) -> None:
    assert pair[0].fails()
    pair[1].hears_that_it_is_over()
    again = pair[1].joins()
    replacement = Node(server.endpoints[0], request.node.name)
    try:
        assert [wait.result(PATIENCE)[0] for wait in (replacement.joins(), again)] == [2, 2]
        assert not pair[1].handler.is_closed()
    finally:
        replacement.close()


def test_closed_by_one_is_closed_for_all(pair: list[Node]) -> None:
    pair[1].handler.set_closed()
    for node in pair:
        node.hears_that_it_is_over()
        with pytest.raises(RuntimeError, match="^Closed: closed by"):
            node.handler.next_rendezvous()
        assert node.handler.is_closed()


def test_too_few_nodes_is_a_timeout(server: Etcd) -> None:
    node = Node(server.endpoints[0], "too few", "join_timeout=4")
    with pytest.raises(RuntimeError, match="^Timeout: no round within 4 s: 1 of 2 nodes joined"):
        node.joins().result(PATIENCE)
    node.close()


def test_what_is_given_to_torchrun_is_read_as_for_elastirun() -> None:
    given = parameters("https://a,https://b:2380", "job7", "cacert=/ca,join_timeout=9,keep_alive_interval=1", (1, 3), "10.0.0.1")
    config, warnings = configuration(given)
    assert config.etcd is not None and config.etcd.endpoints == (Endpoint("a", 2379), Endpoint("b", 2380))
    assert (config.etcd.tls, config.etcd.ca_cert, config.local_addr, config.run_id) == (True, "/ca", "10.0.0.1", "job7")
    assert (config.min_nodes, config.max_nodes, config.timing.join_timeout, config.timing.expire) == (1, 3, 9, 3)
    assert (config.max_restarts, config.timing.restart_pause, config.nproc, warnings) == (MOST_RESTARTS, 0, 1, [])


@pytest.mark.parametrize(
    ("endpoint", "conf", "says"),
    [
        ("a:2379", "join_timeuot=9", "--rdzv-conf: no key 'join_timeuot' (did you mean join_timeout?)"),
        ("a:2379", "cacert=/ca", "--rdzv-conf: cacert is for https"),
        ("a:port", "is_host=1", "--rdzv-endpoint: 'a:port' has no port number"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_connected(endpoint: str, conf: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        configuration(parameters(endpoint, "job7", conf))
    assert says in str(caught.value)


def test_torch_can_look_for_the_handler_at_no_cost() -> None:
    """It does so in every process that imports its elastic package."""
    costly = {"torch", "psutil", "grpc", "elastirun.cli.resolve", "elastirun.agent.torch_handler"}
    code = f"import elastirun.torch_plugin as plugin, sys; plugin.etcd(); print({costly} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True).stdout == "set()\n"
