"""The addresses that this node listens on, as --dry-run describes them, and the line about listening on every interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastirun.agent.host import net
from elastirun.agent.store.endpoint_access import why_everywhere
from elastirun.agent.store.listening import describe
from elastirun.config import Endpoint
from tests.cli.test_resolve import config_of
from tests.support.cluster import cluster

FOREIGN = "203.0.113.250"  # an address for documentation, which no machine has
PRIVATE = "the workers' store: a free port of 127.0.0.1"
ETCD = "the rendezvous store: not here, it is etcd"
STANDBY = "the standby store: a free port of the address that leads to the other nodes"
BY_ROUTE = "the workers' store: a free port of the address that leads to the other nodes, while this node has rank 0"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("", ["the workers' store: a free port of 127.0.0.1"]),
        ("--master-port=7", ["the workers' store: 127.0.0.1:7"]),
        (f"--rdzv-endpoint={FOREIGN}:7", ["the workers' store: 127.0.0.1:7"]),
        (
            "--nnodes=2 --node-rank=0 --master-addr=127.0.0.3 --master-port=7",
            ["the rendezvous store: 127.0.0.3:7", "the workers' store: the same"],
        ),
        ("--nnodes=2 --node-rank=1 --master-addr=127.0.0.3", ["the rendezvous store: not here", "the workers' store: the same"]),
        (
            f"--nnodes=2 --rdzv-id=j --rdzv-endpoint={FOREIGN}",
            [f"the rendezvous store: not here, {FOREIGN} is no address of this machine", BY_ROUTE, STANDBY],
        ),
        (
            f"--nnodes=2 --rdzv-id=j --rdzv-endpoint={FOREIGN}:7 --rdzv-conf=is_host=1",
            ["the rendezvous store: port 7 of every interface of this machine", BY_ROUTE, STANDBY],
        ),
        (
            "--nnodes=2 --rdzv-id=j --rdzv-endpoint=127.0.0.3:7 --store-succession=off",
            ["the rendezvous store: 127.0.0.3:7 if no other agent does", BY_ROUTE],
        ),
        (
            "--nnodes=2 --rdzv-id=j --rdzv-endpoint=127.0.0.3:7",
            ["the rendezvous store: 127.0.0.3:7 if no other agent does", BY_ROUTE, STANDBY],
        ),
        ("--rdzv-backend=etcd --rdzv-endpoint=h", [ETCD, BY_ROUTE]),
        ("--port-range=7:9", ["the workers' store: a free port from 7 to 9 of 127.0.0.1"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=h --port-range=7:9", [ETCD, BY_ROUTE.replace("free port", "free port from 7 to 9")]),
        ("--health-port=8080", [PRIVATE, "the health port: port 8080 of every interface of this machine"]),
        ("--health-port=0", [PRIVATE, "the health port: a free port of every interface of this machine"]),
        ("--health-port=127.0.0.3:8080", [PRIVATE, "the health port: 127.0.0.3:8080"]),
        ("--health-port=[::1]:0", [PRIVATE, "the health port: a free port of ::1"]),
        (f"--health-port={FOREIGN}:80", [PRIVATE, f"the health port: nowhere, {FOREIGN} is no address of this machine"]),
    ],
)
def test_a_dry_run_says_where_this_node_would_listen(line: str, lines: list[str]) -> None:
    assert describe(config_of(f"{line} t.py")) == lines


def test_every_interface_is_not_listened_on_without_a_word(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        where = (f"--rdzv-endpoint={FOREIGN}:{nodes.port}", "--rdzv-conf=is_host=1", f"--local-addr={FOREIGN}")
        agent = nodes.launch(1, "--nnodes=1:2", "--last-call=0", "--rdzv-id=j", *where, str(nodes.script))
        (worker,) = nodes.round(1)
        assert worker.env["GLOO_SOCKET_IFNAME"] == net.interface_of("127.0.0.1"), "gloo has sockets of its own, and no other node"
        worker.tell("exit 0")
        assert nodes.ends(agent) == 0
        for store in ("rendezvous", "workers'"):
            assert nodes.out(1).count(f"warning: the {store} store listens on every interface of this machine") == 1, nodes.out(1)


def test_a_name_that_is_hidden_behind_the_loopback_is_described_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts maps the name to 127.0.1.1, so this node cannot know which of its addresses the others get for it."""
    monkeypatch.setattr(net, "_look_up", lambda host: (("127.0.0.3",), True))
    store, *_ = describe(config_of("--nnodes=2 --rdzv-id=j --rdzv-endpoint=hidden:7 t.py"))
    assert store == "the rendezvous store: port 7 of every interface of this machine if no other agent does"
    listener = net.open_host_socket(Endpoint("hidden", 0), None)
    assert listener is not None and net.listens_everywhere(listener)
    listener.close()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ("", "port 7, else port 9, else a free port of the address that leads to the other nodes"),
        ("--local-addr=127.0.0.3", "port 9, else a free port of 127.0.0.3"),  # the job starts at port 7
        ("--local-addr=127.0.0.5", "port 9, else port 7, else a free port of 127.0.0.5"),
        ("--local-addr=127.0.0.5 --port-range=20:29", "port 9, else port 7, else a free port from 20 to 29 of 127.0.0.5"),
        ("--port-range=20:20", "not here, the workers' store needs port 20"),
    ],
)
def test_with_a_list_of_endpoints_the_standby_store_listens_where_newcomers_look(options: str, where: str) -> None:
    line = f"--nnodes=2 --rdzv-id=j --rdzv-endpoint=127.0.0.3:7,127.0.0.4:7,127.0.0.5:9 {options} t.py"
    *_, found = describe(config_of(line))
    assert found.replace(", on every interface of this machine if that is no address of it", "") == f"the standby store: {where}"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ((), "h does not resolve here; give an address of this machine"),
        (("127.0.0.3",), "/etc/hosts hides h behind a loopback address; give 127.0.0.3"),
        ((FOREIGN,), "h is no address of this machine (is_host=1)"),
    ],
)
def test_the_warning_says_why_and_what_to_do(found: tuple[str, ...], why: str) -> None:
    assert why_everywhere(Endpoint("h", 7), found).startswith(why)
