"""Access to etcd with TLS, certificates and users, and one clear line for each wrong setting."""

from __future__ import annotations

import concurrent.futures
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous.stores.etcd import client, diagnosis
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.store import EtcdStore, connector
from tests.support.certificates import Authority
from tests.support.cluster import PATIENCE, free_port
from tests.support.etcd_server import Etcd, ask, etcd, needs_etcd
from tests.support.relay import something_else

PASSWORD, PREFIX = "S3cret!", "/team/"


@pytest.fixture(autouse=True)
def quick_to_try_again_and_slow_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once and wait long: no test here is about time, and the machine may be busy."""
    monkeypatch.setattr(client, "PAUSE", 0.01)
    for module, name in ((client, "FIRST_CONTACT"), (client, "ATTEMPT"), (diagnosis, "LIMIT"), (diagnosis, "ALERT_WAIT")):
        monkeypatch.setattr(module, name, PATIENCE)


# -- servers -----------------------------------------------------------------------------------------------------------------------


@dataclass
class Servers:
    """Every kind of server. Each starts when it is first asked for."""

    folder: Path
    stack: ExitStack

    def __post_init__(self) -> None:
        self.ca, self.other_ca = Authority(self.folder / "ca"), Authority(self.folder / "other")
        self.cert, self.key = self.ca.issue("good")
        self._running: dict[str, Etcd] = {}

    def __getitem__(self, kind: str) -> Etcd:
        if kind not in self._running:
            self._running[kind] = getattr(self, f"_{kind}")()
        return self._running[kind]

    def _start(self, *options: str, scheme: str = "http") -> Etcd:
        return self.stack.enter_context(etcd(scheme=scheme, options=("--bcrypt-cost=4", *options)))

    def _plain(self) -> Etcd:
        return self._start()

    def _tls(self) -> Etcd:
        return self._start(f"--cert-file={self.cert}", f"--key-file={self.key}", scheme="https")

    def _mtls(self) -> Etcd:
        wants = ("--client-cert-auth", f"--trusted-ca-file={self.ca.cert}")
        return self._start(f"--cert-file={self.cert}", f"--key-file={self.key}", *wants, scheme="https")

    def _expired(self) -> Etcd:
        cert, key = self.ca.issue("expired", days=-1)
        return self._start(f"--cert-file={cert}", f"--key-file={key}", scheme="https")

    def _users(self) -> Etcd:
        server = self._start()
        administer(server)
        return server

    def endpoint(self, kind: str) -> str:
        """Return the endpoint of a kind of server, or of something that is no etcd."""
        if kind == "nobody":
            return f"127.0.0.1:{free_port()}"
        return self[kind].endpoints[0]


def administer(server: Etcd) -> None:
    """Make the users: "root", "me" with rights under PREFIX, and "nobody" without any."""
    steps: list[tuple[str, dict[str, object]]] = [("UserAdd", {"name": who, "password": PASSWORD}) for who in ("root", "me", "nobody")]
    permission = {"permType": 2, "key": PREFIX.encode(), "range_end": PREFIX[:-1].encode() + b"0"}
    steps += [("RoleAdd", {"name": "root"}), ("RoleAdd", {"name": "team"}), ("RoleGrantPermission", {"name": "team", "perm": permission})]
    steps += [("UserGrantRole", {"user": "root", "role": "root"}), ("UserGrantRole", {"user": "me", "role": "team"}), ("AuthEnable", {})]
    store = connector(server.endpoints)()
    for method, fields in steps:
        ask(store, f"Auth/{method}", **fields)
    store.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("etcd"), stack)


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return str(path)


@pytest.fixture
def me(password_file: str) -> Access:
    return Access(user="me", password_file=password_file)


def works(store: EtcdStore) -> bool:
    key = f"elastirun/{os.urandom(4).hex()}/node/a"
    return store.put_if(key, None, b"1") == b"1" and store.get([key]) == store.under(key) == {key: b"1"}


# -- who is let in -----------------------------------------------------------------------------------------------------------------


def test_credentials_in_relative_paths_are_found_from_another_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of an agent runs in another one."""
    monkeypatch.chdir(tmp_path)
    found = Access(tls=True, cacert="ca", cert="/etc/cert", user="me", password_file="../password").anywhere()
    assert found == Access(True, f"{tmp_path}/ca", "/etc/cert", None, "me", f"{tmp_path.parent}/password")


@needs_etcd
def test_by_tls_and_by_a_certificate_of_ours(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(tls=True, cacert=servers.ca.cert)
    assert works(connector([servers.endpoint("tls")], access)())
    assert works(connector([servers.endpoint("tls").replace("127.0.0.1", "localhost")], access)())
    assert works(connector([servers.endpoint("mtls")], replace(access, cert=servers.cert, key=servers.key))())
    monkeypatch.setenv("SSL_CERT_FILE", servers.ca.cert)
    assert works(connector([servers.endpoint("tls")], Access(tls=True))()), "a CA that this machine trusts"


@needs_etcd
def test_by_user_and_password(servers: Servers, me: Access) -> None:
    connect = connector([servers.endpoint("users")], me, PREFIX)
    store = connect()
    assert works(store) and works(connect())
    token = store._client.cluster.token
    assert token and connect()._client.cluster.token == token, "asked for once: checking a password is meant to be slow"
    assert works(connector([servers.endpoint("plain")], me)()), "where no users are known, anybody is welcome"


@needs_etcd
def test_a_token_that_is_not_valid_any_more_is_renewed(me: Access) -> None:
    with etcd(options=("--bcrypt-cost=4",)) as server:
        store = connector(server.endpoints, me, PREFIX)()
        assert works(store) and store._client.cluster.token == ""
        administer(server)
        assert works(store), "users are asked for since"
        store._client.cluster.token = "expired.1"
        assert works(store)
        assert store._client.cluster.token not in ("", "expired.1")
        heard = threading.Semaphore(0)
        store.watch("elastirun/round", heard.release)
        assert heard.acquire(timeout=PATIENCE)
        store._client.cluster.token = "expired.1"
        store._client.abandon(store._client.channel())
        assert works(store) and store.put_if("elastirun/round", None, b"1") == b"1"
        assert heard.acquire(timeout=PATIENCE), "a watch uses the token that an operation has got"
        Path(me.password_file).unlink()
        assert works(store), "the password is read when it is needed"


@needs_etcd
def test_a_proxy_is_not_asked(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert works(connector([servers.endpoint("plain")])())


@needs_etcd
def test_one_member_whose_certificate_has_expired_is_passed_over(servers: Servers) -> None:
    endpoints = [servers.endpoint("expired"), servers.endpoint("tls")]
    assert all(works(connector(endpoints, Access(tls=True, cacert=servers.ca.cert))()) for _ in range(4))


# -- who is not --------------------------------------------------------------------------------------------------------------------


def refused(connect: Callable[[], EtcdStore], *, final: bool = True) -> str:
    """Return the message of the refusal: one line, without the password."""
    with pytest.raises(StoreError) as caught:
        works(connect())
    assert isinstance(caught.value, StoreRefused) is final, caught.value
    said = str(caught.value)
    assert said.isprintable() and len(said) < 300 and PASSWORD not in said
    return said


@needs_etcd
@pytest.mark.parametrize(
    ("kind", "access", "words"),
    [
        ("nobody", Access(), "connection refused"),
        ("tls", Access(tls=True, cacert="other"), "its certificate is not from a CA that is trusted here: cacert= names the right one"),
        ("tls", Access(tls=True), "its certificate is not from a CA that is trusted here"),
        ("expired", Access(tls=True, cacert="ca"), "its certificate has expired"),
        ("tls by name", Access(tls=True, cacert="ca"), f"its certificate is not for {socket.gethostname()}"),
        ("tls", Access(), "it speaks TLS there: write https://127.0.0.1:"),
        ("plain", Access(tls=True, cacert="ca"), "it speaks no TLS there: write http://127.0.0.1:"),
        ("mtls", Access(tls=True, cacert="ca"), "it wants a certificate of ours: give cert= and key="),
        ("mtls", Access(tls=True, cacert="ca", cert="other"), "it does not accept the certificate in cert="),
        ("users", Access(), "it requires a user: give user= and password_file="),
        ("users", Access(user="me", password_file="wrong"), "wrong user or password"),
        ("users", Access(user="stranger", password_file="right"), "wrong user or password"),
        ("users", Access(user="nobody", password_file="right"), "user nobody has no permission there: its role needs readwrite on the"),
    ],
)
def test_whoever_is_not_let_in_is_told_why(
    servers: Servers, kind: str, access: Access, words: str, password_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    server, _, by_name = kind.partition(" ")
    endpoint = servers.endpoint(server)
    if by_name:
        endpoint = endpoint.replace("127.0.0.1", socket.gethostname())
    if access.cacert:
        access = replace(access, cacert={"ca": servers.ca.cert, "other": servers.other_ca.cert}[access.cacert])
    if access.cert:
        cert, key = servers.other_ca.issue("stranger")
        access = replace(access, cert=cert, key=key)
    if access.user:
        Path(password_file).write_text(PASSWORD if access.password_file == "right" else "guessed\n")
        access = replace(access, password_file=password_file)
    said = refused(connector([endpoint], access, PREFIX), final=kind != "nobody")
    assert said.startswith(f"etcd at {'https://' if access.tls else ''}{endpoint}: {words}"), said


@needs_etcd
def test_outside_of_its_prefix_a_user_has_no_permission(servers: Servers, me: Access) -> None:
    assert "user me has no permission" in refused(connector([servers.endpoint("users")], me, "/elsewhere/"))


@pytest.mark.parametrize("name", ["cacert", "cert", "password_file"])
@pytest.mark.parametrize("problem", ["missing", "empty", "garbage", "pipe"])
def test_files_that_are_no_good_are_named(name: str, problem: str, tmp_path: Path) -> None:
    if (name, problem) == ("password_file", "garbage"):
        return  # any bytes may be a password
    path = tmp_path / name
    if problem == "pipe":
        os.mkfifo(path)
    elif problem != "missing":
        path.write_bytes(b"\xff\x00garbage" if problem == "garbage" else b"")
    files = {"cert": {"cert": str(path), "key": str(path)}, "password_file": {"user": "me", name: str(path)}}.get(name, {name: str(path)})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        said = refused(connector([endpoint], Access("cert" in name, **files)))
    assert f"{name}={path}" in said and {"missing": "No such file", "pipe": "is a pipe"}.get(problem, "") in said


def test_endpoints_with_different_troubles_are_all_named() -> None:
    ports = [free_port(), free_port()]
    endpoints = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", "nowhere.invalid:1"]
    said = refused(connector(endpoints), final=False)
    assert "connection refused" in said and "the name nowhere.invalid does not resolve" in said
    assert all(endpoint in said for endpoint in endpoints)


@pytest.mark.parametrize(
    ("reply", "words", "final"),
    [
        (b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n", "does not speak etcd's v3 API .* an etcd 2", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what answers there is not etcd", True),
        (b"", "it hangs up", False),
    ],
    ids=["http/1", "ssh", "hangs up"],
)
def test_something_else_at_that_port(reply: bytes, words: str, final: bool) -> None:
    with something_else(reply) as (address, port):
        said = refused(connector([f"{address}:{port}"]), final=final)
    assert re.search(words, said), said


def test_another_service_behind_grpc() -> None:
    """A gRPC server that lacks etcd's methods gets a clear message."""
    messages = client.load()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = messages.grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            assert "does not have etcd's v3 API" in refused(connector([f"127.0.0.1:{port}"]))
        finally:
            server.stop(None).wait()
