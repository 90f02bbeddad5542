"""Looking at jobs in their stores: real TCPStores, one that has moved, stores that do not answer, and nothing that is written."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status import own_agents
from elastirun.agent.status import reader as status_reader
from elastirun.agent.status.own_agents import OwnAgent
from elastirun.agent.status.reader import Found, StatusReader, Target
from elastirun.agent.store import locations as status_stores
from elastirun.agent.store import shared_store
from elastirun.cli import parse
from elastirun.config import Endpoint
from elastirun.config import Etcd as EtcdConfig
from elastirun.rendezvous.peers.ranks import member
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.store import connector as etcd_connector
from elastirun.rendezvous.stores.memory import MemoryStore
from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.wire.actions import Change, Put, Sync
from elastirun.rendezvous.wire.codec import Codec
from elastirun.rendezvous.wire.records import NodeRow, Place, RoundRecord, Status
from elastirun.rendezvous.wire.sync import OWNER, SyncProtocol, execute
from tests.rendezvous.test_stores import Server, new_server
from tests.support.cluster import PATIENCE
from tests.support.etcd_server import Etcd
from tests.support.torch_client import torch_client

TOKEN = b"the token of this job"
SETTINGS = ("--nnodes=1:1024", "--max-restarts=0")


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    made = new_server(), new_server()
    yield made
    for one in made:
        one.served = None


def rows(count: int, **fields: Any) -> list[NodeRow]:
    address = "10.0.{}.{}"
    running = {"status": Status.RUNNING, "round": 1, **fields}
    return [NodeRow(f"n{i}", f"host-{i}", address.format(i // 250, i % 250 + 1), 1000, 8, **running) for i in range(count)]


def fill(server: Server, job: str, nodes: list[NodeRow], token: bytes | None = None, owner: str = "", **fields: Any) -> None:
    """Write the records of a job whose round 1 runs on ``nodes``, as their agents do. ``owner``: the node whose standby store it is."""
    name = f"{owner}:{server.port}" if owner else ""
    with closing(server.connect()) as store:
        if owner:
            store.put_if(OWNER, None, name.encode())
        else:
            shared_store.register(store, job)
        record = RoundRecord("store", 2, 1, tuple(map(member, nodes)), "the first round", settings=SETTINGS, **fields)
        for sync in (*(Sync(put=Put(None, row), rows=()) for row in nodes), Sync(change=Change(None, record), rows=())):
            me = sync.put.row.id if sync.put else ""
            SyncProtocol(shared_store.prefix(job), me, Codec(token, name), clock.now).carry_out(store, sync, 0.0)


def moved(server: Server, job: str, to: Place, first: RoundRecord | None = None) -> None:
    """Say in the store of ``server`` that the job is at ``to``: in its round record, or beside the records of a standby store."""
    protocol = SyncProtocol(shared_store.prefix(job), "", Codec(), clock.now)
    with closing(TcpStore(server.address, server.port, creates=(protocol.moved_key, protocol.round_key))) as store:
        execute(protocol.put_place(to) if first is None else protocol.put_moved(to, first), store)


def endpoint(server: Server) -> Endpoint:
    return Endpoint(server.address, server.port)


def look(*endpoints: Endpoint, job: str | None = None, token: bytes | None = None) -> Found:
    reader = StatusReader(Target(endpoints, job, token), list)
    with closing(reader):
        return reader.look()


def contents(server: Server) -> dict[str, bytes]:
    with closing(server.connect()) as store:
        return {key: store.get([key]).get(key, b"") for key in torch_client(store).list_keys()}


def test_a_job_is_found_by_its_name_or_on_the_list_and_nothing_is_written(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "job 7/ä", rows(3))
    fill(servers[0], "other", rows(2))
    before = contents(servers[0])
    (one,) = look(endpoint(servers[0]), job="job 7/ä").jobs
    assert (one.job, one.state, one.store, len(one.nodes)) == ("job 7/ä", "running", str(endpoint(servers[0])), 3)
    assert [(job.job, len(job.nodes)) for job in look(endpoint(servers[0])).jobs] == [("job 7/ä", 3), ("other", 2)]
    found = look(endpoint(servers[0]), job="third")
    assert (found.jobs, set(found.others)) == ((), {"job 7/ä", "other"})
    assert contents(servers[0]) == before


def test_a_job_without_a_name(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "none", rows(1))
    assert [job.job for job in look(endpoint(servers[0])).jobs] == ["none"]
    assert look(endpoint(servers[1])) == Found()


@pytest.mark.parametrize("in_record", [False, True])
def test_a_store_that_has_moved_is_followed(servers: tuple[Server, Server], in_record: bool) -> None:
    first, second = servers
    fill(second, "job", rows(2), owner="n1", term=1, host="n1")
    moved(first, "job", Place("n1", second.address, second.port), RoundRecord("new") if in_record else None)
    found = look(endpoint(first), job="job")
    assert [(job.store, job.state, [node.hosts_store for node in job.nodes]) for job in found.jobs] == [
        (str(endpoint(second)), "running", [False, True])
    ]


def test_an_earlier_store_whose_host_was_cut_off_is_left(servers: tuple[Server, Server]) -> None:
    """Its rounds stand there still. The newcomer that looks knows no other endpoint."""
    first, second = servers
    fill(second, "job", rows(2), owner="n1", term=1, host="n1")
    fill(first, "job", rows(3), host="n0", moved=Place("n1", second.address, second.port))
    assert [job.store for job in look(endpoint(first), job="job").jobs] == [str(endpoint(second))]


def test_a_store_that_says_where_it_was_once_and_where_it_is_now(servers: tuple[Server, Server]) -> None:
    """A standby store had said where the store is, and has taken over from that one."""
    fill(servers[0], "job", rows(2), owner="n1", term=1, host="n1")
    moved(servers[0], "job", Place("n9", "127.0.0.1", 1))
    (one,) = look(endpoint(servers[0]), job="job").jobs
    assert one.store == str(endpoint(servers[0]))


def test_the_store_at_the_place_must_be_that_nodes(servers: tuple[Server, Server]) -> None:
    first, second = servers
    fill(second, "job", rows(2), owner="n1", term=1, host="n1")
    moved(first, "job", Place("n0", second.address, second.port))
    found = look(endpoint(first), job="job")
    assert found.jobs == () and "has moved there, but" in found.problems[0] and "has ended" in found.problems[0]


def test_of_two_stores_the_one_with_the_higher_term_counts(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_reader, "LATER_LIMIT", status_reader.LOOK_LIMIT)  # the machine may be busy
    fill(servers[0], "job", rows(3))
    fill(servers[1], "job", rows(2), owner="n1", term=1, host="n1")
    for endpoints in ((0, 1), (1, 0)):
        found = look(*(endpoint(servers[i]) for i in endpoints), job="job")
        assert [len(job.nodes) for job in found.jobs] == [2]


def test_two_stores_that_lead_to_each_other_are_left(servers: tuple[Server, Server]) -> None:
    for here, there in (servers, servers[::-1]):
        moved(here, "job", Place("", there.address, there.port))
    assert look(endpoint(servers[0]), job="job").jobs == ()


def test_signed_records_need_the_token(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "job", rows(2), TOKEN)
    assert len(look(endpoint(servers[0]), token=TOKEN).jobs[0].nodes) == 2
    for token, text in ((None, "give the job's --token-file"), (b"another token of 16", "is --token-file the same on every node?")):
        found = look(endpoint(servers[0]), token=token)
        assert found.jobs == () and text in found.unreadable[0]


def test_rows_that_do_not_parse_are_told_of(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "job", rows(2))
    with closing(servers[0].connect()) as store:
        key = f"{shared_store.prefix('job')}node/n1"
        store.put_if(key, store.get([key])[key], b"garbage")
    (one,) = look(endpoint(servers[0])).jobs
    assert [node.state for node in one.nodes] == ["running", "absent"] and "n1" in one.ignored[0]


class Replaced(TcpStore):
    """A connection that does not find the members of a round at first, as when the next round has just formed."""

    misses = 0

    def get(self, keys: Any) -> dict[str, bytes]:
        wanted = list(keys)
        if any("/members/" in key for key in wanted) and Replaced.misses:
            Replaced.misses -= 1
            return {}
        return super().get(wanted)


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stores, "TcpStore", Replaced)
    fill(servers[0], "job", rows(2))
    Replaced.misses = status_reader.TRIES - 1
    assert len(look(endpoint(servers[0])).jobs) == 1
    Replaced.misses = 2 * status_reader.TRIES
    found = look(endpoint(servers[0]))
    assert found.jobs == () and "the members are missing" in found.unreadable[0]


def test_stores_that_do_not_answer_delay_no_answer_and_are_named_when_there_is_none(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "job", rows(2))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = Endpoint(*mute.getsockname())
        began = time.monotonic()
        found = look(silent, endpoint(servers[0]), job="job")
        assert len(found.jobs) == 1 and found.problems == ()
        assert time.monotonic() - began < status_stores.ASK_LIMIT, "the silent one was not waited for"
        found = look(silent)
    assert found.jobs == () and str(silent) in found.problems[0] and "no answer" in found.problems[0]
    assert "refused" in look(Endpoint("127.0.0.1", 1)).problems[0]
    assert look(Endpoint("no-such-host.invalid", 1)).problems == ("no-such-host.invalid does not resolve",)


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(status_reader, "NAMES_LIMIT", 0.1)
    monkeypatch.setattr(net, "resolve", lambda host: (go.wait(PATIENCE), ())[1])
    began = time.monotonic()
    assert look(Endpoint("node-a", 1)).problems == ("node-a does not resolve",)
    assert time.monotonic() - began < PATIENCE / 2
    go.set()


def test_a_store_that_has_not_finished_its_answer_is_named(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(servers[0], "job", rows(2))
    monkeypatch.setattr(status_reader, "LOOK_LIMIT", 0.3)
    done = threading.Event()
    read = status_reader._read_job
    monkeypatch.setattr(status_reader, "_read_job", lambda *args: done.wait(PATIENCE) and read(*args))
    slow = endpoint(servers[0])
    assert look(slow) == Found(problems=(f"{slow}: no complete answer within 0.3 s",))
    done.set()
    assert len(look(slow).jobs) == 1


def test_one_connection_serves_all_looks_unless_it_is_lost(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(TcpStore):
        def __init__(self, *args: Any) -> None:
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(status_stores, "TcpStore", Counted)
    fill(servers[0], "job", rows(2))
    with closing(StatusReader(Target((endpoint(servers[0]),)), list)) as reader:
        for _ in range(3):
            assert len(reader.look().jobs) == 1
        assert len(made) == 1
        made[0].close()
        assert reader.look().jobs == ()
        assert len(reader.look().jobs) == 1 and len(made) == 2


def test_nothing_is_kept_of_a_job_that_has_ended(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {job: OwnAgent(job, (), at(server)) for job, server in zip("ab", servers, strict=True)}
    for job, server in zip("ab", servers, strict=True):
        fill(server, job, rows(2))
    running = ["a", "b"]
    monkeypatch.setattr(own_agents, "ask", agents.get)
    with closing(StatusReader(Target(), lambda: running)) as reader:
        assert [job.job for job in reader.look().jobs] == ["a", "b"]
        source = reader._sources[status_stores.described(at(servers[0]))]
        running.remove("a")
        source.users += 1  # as a thread that is slow does
        assert [job.job for job in reader.look().jobs] == ["b"]
        assert source._store is not None and list(reader._watched) == [("b", "store")]
        source.users -= 1
        reader.look()
        assert source._store is None and list(reader._sources) == [status_stores.described(at(servers[1]))]


def test_rows_that_do_not_change_between_two_looks_are_silent_but_at_etcd_a_lease_is_renewed(
    servers: tuple[Server, Server], server: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, key = rows(2), "job/"
    fill(servers[0], "job", nodes)
    record = RoundRecord("store", 2, 1, tuple(map(member, nodes)), settings=SETTINGS)
    etcd = EtcdConfig(tuple(parse.endpoint(one, 0) for one in server.endpoints), prefix=f"/{os.urandom(4).hex()}/")
    with closing(etcd_connector(server.endpoints, prefix=etcd.prefix)()) as store:
        for sync in (*(Sync(put=Put(None, row), rows=()) for row in nodes), Sync(change=Change(None, record), rows=())):
            SyncProtocol(key, sync.put.row.id if sync.put else "", Codec(), clock.now).carry_out(store, sync, 0.0)
        real = clock.now
        for target, quiet in ((Target((endpoint(servers[0]),), "job"), 10.0), (Target(job="job", etcd=etcd), 0.0)):
            with closing(StatusReader(target, list)) as reader:
                reader.look()
                with monkeypatch.context() as patch:
                    patch.setattr(clock, "now", lambda: real() + 10)
                    (one,) = reader.look().jobs
            assert [node.quiet for node in one.nodes] == [pytest.approx(quiet, abs=2.0)] * 2


def test_hundreds_of_nodes_are_read_soon(servers: tuple[Server, Server]) -> None:
    fill(servers[0], "job", rows(256))
    began = time.monotonic()
    (one,) = look(endpoint(servers[0])).jobs
    assert time.monotonic() - began < 5.0, "ten times what it may take"
    assert (len(one.nodes), one.world_size, one.state) == (256, 2048, "running")


def test_while_rounds_form_each_look_shows_one_of_them(servers: tuple[Server, Server]) -> None:
    nodes = rows(16)
    fill(servers[0], "job", nodes)
    stop = threading.Event()

    def form(store: TcpStore) -> None:
        protocol = SyncProtocol(shared_store.prefix("job"), "", Codec(), clock.now)
        while not stop.is_set():
            record = protocol.carry_out(store, Sync(rows=()), 0.0).round
            some = tuple(map(member, nodes[: 1 + record.round % 16]))
            following = RoundRecord("store", record.version + 1, record.round + 1, some, settings=SETTINGS)
            protocol.carry_out(store, Sync(change=Change(record, following), rows=()), 0.0)

    with closing(servers[0].connect()) as store, closing(StatusReader(Target((endpoint(servers[0]),)), list)) as reader:
        thread = threading.Thread(target=form, args=(store,))
        thread.start()
        try:
            rounds = []
            while len(set(rounds)) < 20:
                found = reader.look()
                assert found.jobs or "members are missing" in found.unreadable[0], found
                rounds += [job.round for job in found.jobs]
        finally:
            stop.set()
            thread.join()
    assert rounds == sorted(rounds)


# --- agents on this machine


def with_agents(monkeypatch: pytest.MonkeyPatch, target: Target, *agents: OwnAgent | None) -> Found:
    """Look where these agents run on this machine."""
    monkeypatch.setattr(own_agents, "ask", {f"socket {number}": one for number, one in enumerate(agents)}.get)
    with closing(StatusReader(target, lambda: [f"socket {number}" for number in range(len(agents))])) as reader:
        return reader.look()


def at(server: Server, **more: object) -> dict[str, object]:
    return {"kind": "tcp", "address": server.address, "port": server.port, **more}


def test_an_agent_leads_to_the_store_of_its_job(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(servers[0], "a", rows(2))
    fill(servers[1], "b", rows(3), owner="n1", term=1, host="n1")
    agents = OwnAgent("a", ("node0:1",), at(servers[0])), OwnAgent("b", ("node1:1",), at(servers[1], owner=f"n1:{servers[1].port}")), None

    def names(*endpoints: Endpoint, job: str | None = None) -> list[str]:
        return [one.job for one in with_agents(monkeypatch, Target(endpoints, job), *agents).jobs]

    assert names() == ["a", "b"]
    assert names(job="b") == ["b"] and names(job="c") == []
    dead = Endpoint("127.0.0.1", 1)
    assert names(dead) == [], "the agents run jobs that meet elsewhere"
    agents = (*agents, OwnAgent("b", (str(dead), "node7:1"), at(servers[1], owner=f"n1:{servers[1].port}")))
    assert names(dead) == names(dead, job="b") == ["b"], "where the job was started nobody answers any more"


def test_an_endpoint_may_be_spelled_in_another_way_than_in_the_launch(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(servers[0], "a", rows(2), owner="n1", term=1, host="n1")
    agent = OwnAgent("a", ("127.0.0.1:1", "[::1]:2"), at(servers[0], owner=f"n1:{servers[0].port}"))
    monkeypatch.setattr(net, "_look_up", lambda host: (("127.0.0.1",) if host == "name" else (host,), False))
    for host, port, jobs in (("name", 1, ["a"]), ("name", 3, []), ("127.0.0.2", 1, []), ("::1", 2, ["a"])):
        assert [one.job for one in with_agents(monkeypatch, Target((Endpoint(host, port),), "a"), agent).jobs] == jobs


def test_an_agent_says_the_steps_of_its_workers_and_which_are_live(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(servers[0], "a", rows(2))
    fill(servers[0], "b", rows(2))
    steps = (WorkerSteps(0, 0, 10, 0.5, None), WorkerSteps(1, 1, 11, 0.25, 2.5))
    agent = OwnAgent("a", (str(endpoint(servers[0])),), at(servers[0]), steps[::-1], (1, 0), (3, 2))
    with closing(StatusReader(Target((endpoint(servers[0]),)), lambda: ["socket"])) as reader:
        monkeypatch.setattr(own_agents, "ask", {"socket": agent}.get)
        a, b = reader.look().jobs
        assert (a.steps, b.steps) == (steps, ()) and (a.live, b.live, a.finished) == ((0, 1), (), (2, 3))


def test_a_job_of_one_node_is_shown_from_the_copy_that_its_agent_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,), store, key = rows(1), MemoryStore(), shared_store.prefix("a")
    record = RoundRecord("store", 2, 1, (member(row),), settings=SETTINGS)
    sync = Sync(put=Put(None, row), change=Change(None, record))
    SyncProtocol(key, row.id, Codec(), clock.now).carry_out(store, sync, 0.0)
    memory = {"kind": "memory", "data": {name: value.decode() for name, value in store.under("").items()}}
    (one,) = with_agents(monkeypatch, Target(), OwnAgent("a", (), memory)).jobs
    assert (one.job, one.state, one.store) == ("a", "running", "in the memory of the agent on this machine")


def test_two_agents_whose_jobs_share_a_store_are_asked_one_after_the_other(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(TcpStore):
        def get(self, keys: Any) -> dict[str, bytes]:
            time.sleep(0.01)
            return super().get(keys)

    monkeypatch.setattr(status_stores, "TcpStore", Slow)
    for job in ("a", "b"):
        fill(servers[0], job, rows(2))
    found = with_agents(monkeypatch, Target(), *(OwnAgent(job, (), at(servers[0])) for job in ("a", "b")))
    assert [job.job for job in found.jobs] == ["a", "b"] and found.problems == ()


def test_the_newest_job_comes_first_and_jobs_of_other_machines_last(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in "abcd":
        fill(servers[0], job, rows(2))
    began = {"b": (100.0, 500.0), "c": (300.0,), "d": ()}  # a second agent of b was started later
    agents = [OwnAgent(job, (), at(servers[0]), began=one) for job, times in began.items() for one in times]
    found = with_agents(
        monkeypatch, Target(endpoints=(endpoint(servers[0]),)), *[replace(one, endpoints=(str(endpoint(servers[0])),)) for one in agents]
    )
    assert [job.job for job in found.jobs] == ["c", "b", "a", "d"]


@pytest.mark.parametrize(
    "store", [{"kind": "none"}, {"kind": "tcp"}, {"kind": "tcp", "address": "a", "port": "b"}, {}, {"kind": "memory", "data": 1}]
)
def test_an_agent_that_knows_no_store_is_a_problem(monkeypatch: pytest.MonkeyPatch, store: dict[str, object]) -> None:
    found = with_agents(monkeypatch, Target(), OwnAgent("a", (), store))
    assert found.jobs == () and found.problems[0].startswith("job 'a': the agent there")


# --- etcd


def test_a_job_at_etcd(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, key = rows(3), shared_store.prefix("job 7").removeprefix(shared_store.JOBS)
    record = RoundRecord("store", 2, 1, tuple(map(member, nodes)), settings=SETTINGS)
    with closing(etcd_connector(server.endpoints)()) as store:
        for row in nodes[:2]:
            SyncProtocol(key, row.id, Codec(), clock.now).carry_out(store, Sync(put=Put(None, row), rows=()), 0.0)
        SyncProtocol(key, "", Codec(), clock.now).carry_out(store, Sync(change=Change(None, record), rows=()), 0.0)
        before = store.under("")
        etcd = EtcdConfig(tuple(parse.endpoint(one, 0) for one in server.endpoints))
        guard = {"kind": "etcd", "endpoints": server.endpoints, "access": vars(Access()), "prefix": etcd.prefix, "expire": 5.0, "path": []}
        for target, agents in ((Target(job="job 7", etcd=etcd), ()), (Target(), (OwnAgent("job 7", (), guard),))):
            (one,) = with_agents(monkeypatch, target, *agents).jobs
            assert [node.state for node in one.nodes] == ["running", "running", "absent"] and one.store.startswith("etcd at ")
        assert with_agents(monkeypatch, Target(etcd=etcd)).jobs == ()
        assert store.under("") == before
