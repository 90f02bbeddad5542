"""Jobs that meet at etcd: no node is special, a member of three may go, and without a majority the workers go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from elastirun.agent.store.choose_store import store_access
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.stores.etcd.store import connector
from tests.cli.test_resolve import config_of
from tests.rendezvous.test_etcd_access import PASSWORD, Servers
from tests.support.cluster import Cluster, Worker, dies, free_port, kill
from tests.support.etcd_server import Etcd, ask, etcd, needs_etcd, skip_if_killing_loses_data

FAST = ("--last-call=0.5",)


@pytest.fixture(scope="module")
def three() -> Iterator[Etcd]:
    with etcd(3) as made:
        yield made


def test_the_loss_of_node_0_is_like_any_other(nodes: Cluster, server: Etcd) -> None:
    """The guard tells the others of the loss long before the node counts as silent."""
    nodes.etcd = server.endpoints
    agents = {i: nodes.agent(i, "--last-call=60", "--expire=20", nnodes="1:3") for i in (1, 2, 3)}  # all three are in the first round
    before = nodes.round(3)
    (first,) = [i for i in agents if f"127.0.0.{i}" == before[0].env["MASTER_ADDR"]]
    kill(agents[first])
    assert dies(before[0].pid)
    rest = nodes.round(2, after=before[0].round)
    assert "was lost: its agent died" in rest[0].env["ELASTIRUN_ROUND_REASON"]
    assert rest[0].env["MASTER_ADDR"] == f"127.0.0.{next(i for i in agents if i != first)}"
    agents[first] = nodes.agent(first, "--last-call=60", "--expire=20", nnodes="1:3")
    whole = nodes.round(3, after=rest[0].round)
    for worker in whole:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in agents.values()] == [0, 0, 0]


def test_all_agents_killed_at_once_the_next_run_begins_when_no_worker_of_theirs_can_be_left(nodes: Cluster, server: Etcd) -> None:
    nodes.etcd = server.endpoints
    quick = (*FAST, "--expire=1", "--store-grace=1")
    agents = [nodes.agent(i, *quick, nnodes="2") for i in (1, 2)]
    before = nodes.round(2)
    for agent in agents:
        agent.send_signal(signal.SIGKILL)
    again = [nodes.agent(i, *quick, nnodes="2") for i in (1, 2)]
    after = nodes.round(2)
    assert all(dies(worker.pid, 0) for worker in before) and after[0].env["ELASTIRUN_FENCE"] != before[0].env["ELASTIRUN_FENCE"]
    for worker in after:
        worker.tell("exit 0")
    assert [nodes.ends(agent) for agent in again] == [0, 0]


def at_work(nodes: Cluster, three: Etcd, *options: str) -> list[Worker]:
    nodes.etcd = three.endpoints
    for i in (1, 2):
        nodes.agent(i, *FAST, *options, nnodes="2")
    return nodes.round(2)


def succeed(nodes: Cluster, workers: list[Worker]) -> tuple[list[int], bool]:
    """Have these workers succeed. Return the exit codes of the agents, and whether there was another round than the first."""
    for worker in workers:
        worker.tell("exit 0")
    return [nodes.ends(agent) for agent in nodes.agents], "round 2" in nodes.everything()


UNDISTURBED = ([0, 0], False)  # what ``succeed`` returns when the workers of the first round ran to their end
LONGER_THAN_A_LEASE = 4.5  # seconds; of the rows in these tests, with what etcd takes to notice that it is over


def beats(three: Etcd, nodes: Cluster, seconds: float = LONGER_THAN_A_LEASE) -> None:
    """Both rows have been there for longer than a lease lasts: their agents have renewed it."""
    store = connector(three.endpoints, deadline=30.0)()
    end = time.monotonic() + 60
    since = time.monotonic()
    while time.monotonic() < since + seconds:
        assert time.monotonic() < end, nodes.everything()
        if len(store.under(f"{nodes.tmp_path.name}/node/")) < 2:  # their leases may be over, and new ones to come
            since = time.monotonic()
        time.sleep(0.05)
    store.close()


def test_a_job_that_runs_makes_no_revision(nodes: Cluster) -> None:
    """etcd keeps every revision until somebody compacts, and stops for everyone when its quota is used up."""
    with etcd() as own:
        workers = at_work(nodes, own)
        beats(own, nodes, 1.0)
        store = connector(own.endpoints)()
        before = ask(store, "Maintenance/Status")
        beats(own, nodes)
        after = ask(store, "Maintenance/Status")
        assert after.header.revision == before.header.revision and after.dbSize <= before.dbSize + (64 << 10)
        store.close()
        assert succeed(nodes, workers) == UNDISTURBED, nodes.everything()


@pytest.mark.daily(3)
@pytest.mark.parametrize("what", ["kill -9 of the leader", "kill -9 of a follower", "SIGSTOP of the leader", "SIGSTOP of a follower"])
def test_a_member_of_three_goes_and_no_worker_is_restarted(nodes: Cluster, three: Etcd, what: str) -> None:
    if "kill" in what:
        skip_if_killing_loses_data()
    workers = at_work(nodes, three)
    leader = three.leader()
    member = leader if "leader" in what else next(m for m in three.members if m is not leader)
    if "kill" in what:
        member.kill()
    else:
        member.freeze()
    try:
        beats(three, nodes)
    finally:
        if "kill" in what:
            three.start_one(member)
            member.wait_until_ready()
        else:
            member.thaw()
    beats(three, nodes)
    assert succeed(nodes, workers) == UNDISTURBED, nodes.everything()


def test_all_members_are_restarted_one_after_the_other(nodes: Cluster, three: Etcd) -> None:
    workers = at_work(nodes, three)
    for member in three.members:
        member.kill(signal.SIGTERM)
        three.start_one(member)
        member.wait_until_ready()
        beats(three, nodes, 1.0)
    assert succeed(nodes, workers) == UNDISTURBED, nodes.everything()


def test_without_a_majority_the_workers_go_on(nodes: Cluster, three: Etcd) -> None:
    workers = at_work(nodes, three, "--expire=2")
    with no_majority(three):
        for i in (1, 2):
            nodes.says(i, "the workers go on for up to 60 s")
    beats(three, nodes)
    for i in (1, 2):
        nodes.says(i, "the store is back")
    assert succeed(nodes, workers) == UNDISTURBED, nodes.everything()


def test_without_a_majority_for_longer_than_the_store_grace_every_node_ends_with_a_clear_word(nodes: Cluster, three: Etcd) -> None:
    workers = at_work(nodes, three, "--store-grace=6", "--expire=2")
    with no_majority(three):
        for worker in workers:
            worker.await_death()
        assert [nodes.ends(agent) for agent in nodes.agents] == [201, 201]
    for i in (1, 2):
        assert nodes.out(i).count("giving up: the rendezvous store was away for ") == 1
        assert "round 2" not in nodes.out(i) and "Traceback" not in nodes.out(i)


@contextmanager
def no_majority(three: Etcd) -> Iterator[None]:
    two = three.members[:2]
    for member in two:
        member.freeze()
    try:
        yield
    finally:
        for member in two:
            member.thaw()


def test_a_lease_that_is_over_although_its_agent_lives_is_told_and_replaced(nodes: Cluster, server: Etcd) -> None:
    workers = at_work(nodes, server)
    store = connector(server.endpoints)()
    rows = f"/elastirun/{nodes.tmp_path.name}/node/".encode()
    leases = {kv.lease for kv in ask(store, "KV/Range", key=rows, range_end=rows[:-1] + b"0").kvs}
    assert len(leases) == 2 and 0 not in leases
    for lease in leases:
        ask(store, "Lease/LeaseRevoke", ID=lease)
    beats(server, nodes)
    for i in (1, 2):
        nodes.says(i, "this node's lease at etcd expired")
    assert succeed(nodes, workers) == UNDISTURBED, nodes.everything()


def test_torch_is_loaded_before_the_node_joins(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it holds up the whole agent, on a slow file system for longer than ``expire``."""
    loaded: list[bool] = []
    monkeypatch.setattr(torch_class, "tcp_store_class", lambda: loaded.append(True))
    access = store_access(config_of(f"--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint={server.endpoints[0]} --rdzv-id=x train.py"))
    access.connect(None).close()
    access.close()
    assert loaded


def test_what_cannot_be_reached_is_said_and_waited_for(nodes: Cluster) -> None:
    nodes.etcd = [f"127.0.0.1:{free_port()}"]
    agent = nodes.agent(1, "--join-timeout=3", nnodes="2")
    assert nodes.ends(agent) == 201
    assert nodes.out(1).startswith("elastirun: giving up: no round within 3 s: waiting for the rendezvous store: etcd")
    assert nodes.etcd[0] in nodes.out(1) and "Traceback" not in nodes.out(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("etcd"), stack)


REFUSED = {
    "a CA that is another": ("tls", "https://", "cacert={other}", "not from a CA that is trusted here"),
    "no CA": ("tls", "https://", "", "not from a CA that is trusted here"),
    "an expired certificate": ("expired", "https://", "cacert={ca}", "its certificate has expired"),
    "TLS where there is none": ("plain", "https://", "cacert={ca}", "it speaks no TLS there"),
    "no TLS where there is": ("tls", "", "", "https://"),
    "a wrong password": ("users", "", "user=me,password_file={wrong},prefix=/team", "wrong user or password"),
    "no permission": ("users", "", "user=nobody,password_file={right},prefix=/team", "nobody has no permission"),
    "no user": ("users", "", "", "give user= and password_file="),
}


@needs_etcd
@pytest.mark.parametrize("case", REFUSED)
def test_who_is_not_let_in_ends_at_once_with_one_line(nodes: Cluster, servers: Servers, case: str) -> None:
    kind, scheme, conf, words = REFUSED[case]
    for name, text in (("right", PASSWORD), ("wrong", "not" + PASSWORD)):
        (nodes.tmp_path / name).write_text(text)
    files = {"right": nodes.tmp_path / "right", "wrong": nodes.tmp_path / "wrong", "ca": servers.ca.cert, "other": servers.other_ca.cert}
    nodes.etcd = [scheme + servers.endpoint(kind)]
    began = time.monotonic()
    agent = nodes.agent(1, f"--rdzv-conf={conf.format(**files)}", nnodes="2")
    assert nodes.ends(agent) == 201
    assert time.monotonic() - began < 60  # the join timeout is 600
    lines = [line for line in nodes.out(1).splitlines() if "warning" not in line]
    assert len(lines) == 1 and lines[0].startswith("elastirun: giving up: etcd at ") and words in lines[0], lines
    assert PASSWORD not in nodes.out(1)
