"""Addresses, hosts and interfaces: real sockets on 127.0.0.x, and a made-up machine in a network namespace."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.host.net import (
    advertised_address,
    explain_no_host,
    interface_of,
    listen_on,
    open_host_socket,
    own_names,
    probe,
    resolve,
    who_answers,
)
from elastirun.config import Endpoint
from elastirun.errors import StartError
from elastirun.rendezvous.stores import tcp_server
from tests.support.until import PATIENCE

FOREIGN = "203.0.113.250"  # an address for documentation, which no machine has
NO_NAME = "no-such-host.invalid"


@contextmanager
def reserved(address: str) -> Iterator[int]:
    """Reserve a port that no other test gets: bound with SO_REUSEADDR but not listened on, so that a test can still bind it by number."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


@contextmanager
def hosting(address: str, port: int = 0, is_host: bool | None = None) -> Iterator[socket.socket]:
    found = open_host_socket(Endpoint(address, port), is_host)
    assert found is not None
    with closing(found):
        yield found


# --- resolve


@pytest.mark.parametrize("host", ["127.0.0.7", "::1", "10.1.2.3"])
def test_a_number_is_itself(host: str) -> None:
    assert resolve(host) == (host,)


def test_localhost_is_the_loopback_ipv4_first() -> None:
    assert resolve("localhost")[0] == "127.0.0.1"


@pytest.mark.parametrize("host", [NO_NAME, "", "a..b", "x" * 300, "a\0b", "no good"])
def test_what_does_not_resolve_is_empty(host: str) -> None:
    assert resolve(host) == ()


# --- the store's socket


def test_hosts_on_the_owned_address_alone() -> None:
    with hosting("127.0.0.3") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.3"
        assert probe(address, port, 10) is None
        assert probe("127.0.0.4", port, 10) == "connection refused"


def test_ipv6() -> None:
    if interface_of("::1") is None:
        pytest.skip("this machine has no IPv6 loopback")
    with hosting("::1") as listener:
        assert listener.getsockname()[0] == "::1"
        assert probe("::1", listener.getsockname()[1], 10) is None


def test_the_second_agent_is_a_client() -> None:
    with hosting("127.0.0.3") as first:
        assert open_host_socket(Endpoint("127.0.0.3", first.getsockname()[1]), None) is None


def test_of_many_agents_at_once_one_hosts() -> None:
    with reserved("127.0.0.3") as port, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_host_socket(Endpoint("127.0.0.3", port), None), range(32)))
        hosts = [s for s in found if s is not None]
        for listener in hosts:
            listener.close()
    assert len(hosts) == 1


def test_told_to_host_where_the_port_is_taken() -> None:
    with hosting("127.0.0.3") as first:
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.3:{port}: another process has that port.*another with --rdzv-endpoint"):
            open_host_socket(Endpoint("127.0.0.3", port), True)


@pytest.mark.parametrize("host", [FOREIGN, NO_NAME])
def test_somebody_elses_address(host: str) -> None:
    assert open_host_socket(Endpoint(host, 0), None) is None
    with hosting(host, is_host=True) as listener:  # the address is translated, as the user has said
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
        assert probe("127.0.0.1", listener.getsockname()[1], 10) is None


def test_told_not_to_host() -> None:
    assert open_host_socket(Endpoint("127.0.0.1", 0), False) is None


def test_one_of_several_addresses_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the name server's answer is made up, because there is no name server here."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in ("203.0.113.251", "127.0.0.5", FOREIGN, FOREIGN)]
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: answer if host == "localhost" else real(host, *a, **k))
    assert resolve("localhost") == ("127.0.0.5", FOREIGN, "203.0.113.251")
    with hosting("localhost") as listener:
        assert listener.getsockname()[0] == "127.0.0.5"


# --- the socket for the workers' store


def test_listen_on_takes_a_free_port_of_that_address() -> None:
    with closing(listen_on("127.0.0.6")) as first, closing(listen_on("127.0.0.6")) as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.6"
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize("address", [FOREIGN, NO_NAME])
def test_listen_on_a_translated_address(address: str) -> None:
    with closing(listen_on(address)) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


# --- addresses for other nodes


def test_advertised_address() -> None:
    assert advertised_address("127.0.0.1", 29500) == "127.0.0.1"
    assert resolve(advertised_address("no-address", 29500))  # without a route it is still numeric


def test_interface_of() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.9.9.9") == interface_of("localhost") == "lo"
    assert interface_of(FOREIGN) is None
    assert interface_of(NO_NAME) is None


def test_own_names_and_addresses(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    name = socket.gethostname()
    hosts.write_text(f"127.0.0.1 localhost\n# 127.0.1.1 {name} no\n127.0.1.1 {name} alias.example # {name} no\n{FOREIGN} other\n")
    names, addresses = own_names(hosts)
    assert names[0] == name and "alias.example" in names and not {"no", "other", "localhost"} & set(names)
    assert addresses and all(resolve(a) == (a,) for a in addresses)
    assert own_names(tmp_path / "none")[0][0] == name


def test_explanation_is_one_line_with_all_three() -> None:
    line = explain_no_host(Endpoint("localhost", 29500), ("me", "me.example"), ("10.0.0.1", "fd00::1"))
    assert "\n" not in line
    for part in ("localhost:29500", "localhost is 127.0.0.1", "me, me.example", "10.0.0.1, fd00::1", "is_host=1", "--local-addr"):
        assert part in line
    many = [f"a-rather-long-name-of-this-machine-{i}" for i in range(20)]
    line = explain_no_host(Endpoint("localhost", 29500), many, many)
    assert len(line) < 420 and line.count("-1 and 18 more") == 2
    assert f"{NO_NAME} does not resolve" in explain_no_host(Endpoint(NO_NAME, 1), ("me",), ())
    assert "[fd00::9]:29500; this machine is me with no address" in explain_no_host(Endpoint("fd00::9", 29500), ("me",), ())


# --- probe


def test_probe_says_why() -> None:
    with reserved("127.0.0.3") as port:
        assert probe("127.0.0.3", port, 10) == "connection refused"
    assert probe(NO_NAME, 1, 10) == "name does not resolve"


def test_probe_gives_up_in_time() -> None:
    """Linux drops the handshake when a listener's backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.3", 0))
        listener.listen(0)
        with closing(socket.create_connection(listener.getsockname())):
            assert probe("127.0.0.3", listener.getsockname()[1], 0.3) == "no answer within 0.3 s"


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is an ssh server"),
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "is a web server"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"etcdserver":"3.4.1"}', "is an etcd server"),
        (b"220 mail\r\n", "is another program"),
        (b"", "hangs up at once"),
        (None, "does not answer"),
    ],
)
def test_a_foreign_program_at_the_stores_port_is_named(answer: bytes | None, what: str) -> None:
    with hosting("127.0.0.3") as listener, ThreadPoolExecutor(1) as pool, closing(socket.socket()) as end:
        kept = [end]

        def serve() -> None:
            for _ in range(1 if answer else 2):
                connection, _ = listener.accept()
                kept.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        served = pool.submit(serve)
        found = who_answers("127.0.0.3", listener.getsockname()[1], 0.3 if answer is None else 10)
        served.result(10)
        for connection in kept[1:]:
            connection.close()
    assert found is not None and what in found


def test_a_tcpstore_is_known_by_its_answer() -> None:
    with hosting("127.0.0.3") as listener:
        port = listener.getsockname()[1]
        server = tcp_server.serve(listener.dup())
        assert who_answers("127.0.0.3", port, 10) is None
        del server


def test_probe_does_not_take_itself_for_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener, a connection from a port to the same port succeeds. The kernel rarely picks that port; here it must."""

    class Same(socket.socket):
        def connect(self, address: Any) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            super().connect(address)

    with reserved("127.0.0.3") as port:
        monkeypatch.setattr(socket, "socket", Same)
        assert probe("127.0.0.3", port, 10) == "connection refused"


# --- a made-up machine: two networks, a container bridge, its own name hidden behind 127.0.1.1, an IPv6-only name

HOSTS = """127.0.0.1 localhost
127.0.1.1 hidden.example hidden
10.78.0.1 second-nic
10.78.0.9 neighbour
fd77::1 six
"""
MACHINE = """
ip link set lo up
for nic in docker0:172.17.0.1/16 fast:10.78.0.1/24 main:10.79.0.1/24; do
    ip link add ${nic%%:*} type veth peer name far-${nic%%:*}
    ip address add ${nic#*:} dev ${nic%%:*}
    ip link set ${nic%%:*} up
    ip link set far-${nic%%:*} up
done
ip address add fd77::1/64 dev main nodad
ip address add fe80::77/64 dev main nodad
ip route add default via 10.79.0.254
mount --bind "$1" /etc/hosts
exec "$2" -c "$3"
"""
QUESTIONS = """
import json, psutil
from pathlib import Path
from elastirun.agent.host.net import *
from elastirun.config import Endpoint
from elastirun.rendezvous.stores.tcp_server import ServedStore

def host(name, is_host=None):
    found = open_host_socket(Endpoint(name, 0), is_host)
    return found and found.getsockname()[0]

link_local = next(a.address for a in psutil.net_if_addrs()["main"] if a.address.startswith("fe80"))
served = ServedStore(open_host_socket(Endpoint("fe80::77%main", 0), None))
names = ("hidden", "second-nic", "neighbour", "six", "fd77::2")
facts = {
    "resolve": {n: resolve(n) for n in names},
    "host": {n: host(n) for n in names},
    "advertise": {n: advertised_address(resolve(n)[0], 29500) for n in (*names, "8.8.8.8")},
    "interface": {n: interface_of(n) for n in ("hidden", "10.78.0.1", "second-nic", "fd77::1", "172.17.0.1", "neighbour")},
    "link_local": [interface_of(link_local), interface_of(link_local.split("%")[0])],
    "link_local_store": served.connect().put_if("a", None, b"1").decode(),
    "whoami": own_names()[1],
    "unreachable": probe("fd99::1", 5, 10),
}
for version in ("ipv4", "ipv6"):
    Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").write_text("1")
facts["nonlocal"] = {n: host(n) for n in (*names, "127.0.0.9", "::1")}
print(json.dumps(facts))
"""


TRIAL = "ip link add v0 type veth; mount --bind /dev/null /etc/hosts; echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"


def cannot_unshare(*options: str, trial: str = "true") -> str:
    """Return why ``trial`` fails in such a namespace on this machine; empty when it works."""
    if shutil.which("unshare") is None:
        return "unshare is missing"
    tried = subprocess.run(["unshare", *options, "sh", "-ec", trial], capture_output=True, text=True, timeout=PATIENCE)
    return tried.stderr.strip() if tried.returncode else ""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answers on the made-up machine. Its namespaces have no names and end with the process."""
    options = ("--map-root-user", "--net", "--mount")
    if reason := cannot_unshare(*options, trial=TRIAL):
        pytest.skip(f"no network namespace: {reason}")
    hosts = tmp_path_factory.mktemp("etc") / "hosts"
    hosts.write_text(HOSTS)
    command = ["unshare", *options, "sh", "-ec", MACHINE, "sh", str(hosts), sys.executable, QUESTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_names_on_a_machine_with_two_networks(facts: dict[str, Any]) -> None:
    assert facts["resolve"] == {
        "hidden": ["10.79.0.1", "10.78.0.1", "fd77::1"],  # the address of the default route first; no address of a container network
        "second-nic": ["10.78.0.1"],
        "neighbour": ["10.78.0.9"],
        "six": ["fd77::1"],
        "fd77::2": ["fd77::2"],
    }
    assert facts["whoami"] == facts["resolve"]["hidden"]


def test_hosts_any_address_it_owns(facts: dict[str, Any]) -> None:
    assert facts["host"] == {"hidden": "::", "second-nic": "10.78.0.1", "neighbour": None, "six": "fd77::1", "fd77::2": None}


def test_advertises_the_source_of_the_route(facts: dict[str, Any]) -> None:
    assert facts["advertise"] == {
        "hidden": "10.79.0.1",
        "second-nic": "10.78.0.1",
        "neighbour": "10.78.0.1",
        "six": "fd77::1",
        "fd77::2": "fd77::1",
        "8.8.8.8": "10.79.0.1",
    }


def test_interfaces(facts: dict[str, Any]) -> None:
    assert facts["interface"] == {
        "hidden": "main",
        "10.78.0.1": "fast",
        "second-nic": "fast",
        "fd77::1": "main",
        "172.17.0.1": "docker0",
        "neighbour": None,
    }
    assert facts["link_local"] == ["main", "main"]


def test_a_link_local_address_serves_a_store(facts: dict[str, Any]) -> None:
    """The address is none without its interface: fe80::77%main."""
    assert facts["link_local_store"] == "1"


def test_nonlocal_bind_does_not_make_every_address_ours(facts: dict[str, Any]) -> None:
    assert facts["nonlocal"] == facts["host"] | {"127.0.0.9": "127.0.0.9", "::1": "::1"}


def test_no_route(facts: dict[str, Any]) -> None:
    assert facts["unreachable"] == "network is unreachable"


def test_ports_below_1024_need_privileges() -> None:
    """Root of a new user namespace has no rights over the network of its parent."""
    if reason := cannot_unshare("--map-root-user"):
        pytest.skip(f"no user namespace: {reason}")
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1:
        pytest.skip("ports below 1024 need no privileges here")
    question = (
        "from elastirun.agent.host.net import open_host_socket; from elastirun.config import Endpoint\n"
        f"assert open_host_socket(Endpoint('{FOREIGN}', 1), None) is None\n"
        "assert open_host_socket(Endpoint('2001:db8::250', 1), None) is None\n"
        "open_host_socket(Endpoint('127.0.0.3', 1), None)"
    )
    command = ["unshare", "--map-root-user", sys.executable, "-c", question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=Path(__file__).parents[2])
    assert "StartError: cannot listen on 127.0.0.3:1: not permitted; ports below 1024 need privileges" in done.stderr, done.stderr
