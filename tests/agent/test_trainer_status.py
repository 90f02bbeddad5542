"""The progress of a TrainJob, posted by real agents to a real HTTPS server that plays Kubeflow Trainer's, and to bad ones."""

from __future__ import annotations

import json
import os
import queue
import socketserver
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from elastirun.agent.observe.account import Totals
from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status import health
from elastirun.agent.status.trainer_status import (
    CA_CERT,
    EVERY,
    LIMIT,
    MOST_TOKEN,
    TOKEN,
    URL,
    VARIABLE,
    StatusServer,
    TrainerStatus,
    status_server,
    trainer_status,
)
from elastirun.errors import StartError
from tests.agent import test_health
from tests.deploy import models
from tests.support.certificates import Authority
from tests.support.cluster import PATIENCE, WORKER, Cluster, free_port

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/digits/status"
SECRET = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOlsidHJhaW5lciJdfQ.c2lnbmF0dXJl"
STEPPING = f"""
from elastirun.progress import progress
for step in range(3):
    progress(step=step, total=12)
{WORKER}"""
# Python's SSLContext.wrap_socket leaves a server's socket open where the client has reset the connection before the handshake.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
NOW = replace(
    test_health.NOW,
    node_rank=0,
    nodes=("node0", "node1"),
    restarts={"failure": 1, "lost": 1},
    steps=(WorkerSteps(0, 0, 120, 0.5, 2.0), WorkerSteps(1, 1, 121, 0.25, None)),
    account=Totals(100.0, 0.81239, {"training": 80.0}, {"failure": 20.0}, {"failure": 2}, True),
)


@dataclass(frozen=True)
class Post:
    """One request, as the server got it."""

    path: str
    token: str
    status: dict[str, Any]
    metrics: dict[str, str]


class Trainer(ThreadingHTTPServer):
    """Takes the posts, and checks each against the model of Trainer's API and the limits that its schema names."""

    daemon_threads = True

    def __init__(self, authority: Authority, code: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("server"))
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.code, self.posts = code, queue.SimpleQueue[Post]()

    def post(self) -> Post:
        return self.posts.get(timeout=PATIENCE)


class Take(BaseHTTPRequestHandler):
    server: Trainer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scheme, _, token = self.headers["Authorization"].partition(" ")
        assert scheme == "Bearer" and self.headers["Content-Type"] == "application/json"
        self.server.posts.put(posted(self.path, token, body))
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def posted(path: str, token: str, body: dict[str, Any]) -> Post:
    assert models.invalid(body, TrainerV1alpha1UpdateTrainJobStatusRequest) == []
    status = body["trainerStatus"]
    assert "lastUpdatedTime" in status and len(status["metrics"]) <= 256
    assert all(1 <= len(text) <= 64 for metric in status["metrics"] for text in (metric["name"], metric["value"]))
    assert 0 <= status.get("progressPercentage", 0) <= 100 and 0 <= status.get("estimatedRemainingSeconds", 0) < 1 << 31
    return Post(path, token, status, {metric["name"]: metric["value"] for metric in status["metrics"]})


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "ca")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET)
    return path


def serving(server: socketserver.BaseServer) -> Iterator[Any]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def trainer(authority: Authority) -> Iterator[Trainer]:
    yield from serving(Trainer(authority))


def variables(port: int, authority: Authority, token: Path) -> dict[str, str]:
    """Return what Trainer sets in the containers of a TrainJob."""
    return {URL: f"https://127.0.0.1:{port}{PATH}", CA_CERT: authority.cert, TOKEN: str(token)}


@pytest.fixture
def job(nodes: Cluster, trainer: Trainer, authority: Authority, token: Path) -> Cluster:
    nodes.env |= variables(trainer.server_port, authority, token)
    nodes.script.write_text(STEPPING)
    return nodes


# -- real agents -----------------------------------------------------------------------------------------------------------------


def test_rank_0_posts_at_the_start_and_at_the_end_and_takes_the_new_token(job: Cluster, trainer: Trainer, token: Path) -> None:
    for i in (1, 2):
        job.agent(i, nnodes="2")
    workers = job.round(2)
    first = trainer.post()
    assert (first.path, first.token) == (PATH, SECRET)
    assert (first.metrics["round"], first.metrics["nodes"], first.metrics["world_size"]) == ("1", "2", "2")
    token.write_text("another.token\n")
    for worker in workers:
        worker.tell("exit 0")
    last = trainer.post()
    assert (last.status["progressPercentage"], last.status["estimatedRemainingSeconds"], last.token) == (100, 0, "another.token")
    assert (last.metrics["step"], last.metrics["total_steps"], last.metrics["steps"]) == ("2", "12", "3")
    assert [job.ends(agent) for agent in job.agents] == [0, 0]
    assert trainer.posts.empty(), "only rank 0 posts"
    assert SECRET not in job.everything() and "warning" not in job.everything()


def test_a_job_that_fails_ends_with_the_progress_that_it_has_made(job: Cluster, trainer: Trainer) -> None:
    job.launch(1, "--standalone", str(job.script))
    (worker,) = job.round(1)
    trainer.post()
    worker.tell("exit 1")
    last = trainer.post()
    assert (last.status["progressPercentage"], last.metrics["failures"]) == (25, "1")
    assert job.ends(job.agents[0]) == 1


def test_another_node_posts_when_rank_0_is_lost(job: Cluster, trainer: Trainer) -> None:
    for i in (1, 2):
        job.agent(i, nnodes="1:2", host=2)
    job.round(2)
    assert trainer.post().metrics["round"] == "1"
    job.agents[0].kill()
    (worker,) = job.round(1, after=1)
    now = trainer.post().metrics
    assert (now["round"], now["nodes"], now["restarts"]) == ("2", "1", "1")
    worker.tell("exit 0")
    assert trainer.post().status["progressPercentage"] == 100
    assert job.ends(job.agents[1]) == 0


def test_a_script_may_report_by_itself(job: Cluster, trainer: Trainer) -> None:
    job.env[VARIABLE] = "off"
    job.launch(1, "--standalone", str(job.script))
    (worker,) = job.round(1)
    worker.tell("exit 0")
    assert job.ends(job.agents[0]) == 0 and trainer.posts.empty()


class Bad(socketserver.ThreadingTCPServer):
    """Does something bad to each connection, over TLS if there is a certificate."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, does: Callable[[Any], None], certificate: tuple[str, str] | None) -> None:
        self.does, self.context, self.connections = does, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), 0
        if certificate:
            self.context.load_cert_chain(*certificate)
        self.secure = certificate is not None
        super().__init__(("127.0.0.1", 0), TreatBadly)


class TreatBadly(socketserver.BaseRequestHandler):
    server: Bad

    def handle(self) -> None:
        self.server.connections += 1
        with suppress(OSError):
            if not self.server.secure:
                self.server.does(self.request)
                return
            with self.server.context.wrap_socket(self.request, server_side=True) as connection:
                request = b""
                while not request.endswith(b"}}"):  # else the agent's system may drop the answer
                    request += connection.recv(65536)
                self.server.does(connection)


def wait_for_its_end(connection: Any) -> None:
    connection.settimeout(PATIENCE)
    while connection.recv(65536):
        pass


def send_without_end(connection: Any, first: bytes, piece: bytes) -> None:
    connection.sendall(first)
    while True:
        connection.sendall(piece)


BAD: dict[str, tuple[bool, Callable[[Any], None], str]] = {  # by what it does: over TLS, how, and what the agent says
    "hangs": (False, wait_for_its_end, "timed out"),
    "hangs in the answer": (True, wait_for_its_end, "timed out"),
    "no TLS": (False, lambda c: c.sendall(b"HTTP/1.0 200 OK\r\n\r\n"), "SSL"),
    "garbage": (True, lambda c: c.sendall(b"\x00\x1b[2J garbage\r\n\r\n"), "it does not speak HTTP (BadStatusLine)"),
    "hangs up": (True, lambda c: c.close(), "without response"),
    "a line without end": (True, lambda c: send_without_end(c, b"HTTP/1.1 ", b"2" * 65536), "it does not speak HTTP (LineTooLong)"),
    "headers without end": (True, lambda c: send_without_end(c, b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 999), "it does not speak HTTP ("),
    "a body without end": (True, lambda c: send_without_end(c, b"HTTP/1.1 200 OK\r\n\r\n", b"{" * 65536), ""),
    "403": (True, lambda c: c.sendall(b"HTTP/1.1 403 \x1b[2J\r\nContent-Length: 0\r\n\r\n"), "it answers 403 Forbidden (said once)"),
    "redirect": (True, lambda c: c.sendall(b"HTTP/1.1 307 x\r\nLocation: http://127.0.0.1/\r\n\r\n"), "it answers 307 Temporary Redirect"),
    "unknown code": (True, lambda c: c.sendall(b"HTTP/1.1 599 x\r\n\r\n"), "it answers 599 (said once)"),
}


@pytest.mark.daily(2)
@pytest.mark.parametrize("does", BAD)
def test_a_bad_server_is_one_line_and_the_job_succeeds(nodes: Cluster, authority: Authority, token: Path, does: str) -> None:
    secure, how, said = BAD[does]
    for server in serving(Bad(how, authority.issue("bad") if secure else None)):
        nodes.env |= variables(server.server_address[1], authority, token)
        ends_well(nodes, said)
        assert server.connections >= 1


def ends_well(nodes: Cluster, said: str) -> None:
    """Run a job to its end: it succeeds, and what it says of the posts is one line with ``said``."""
    nodes.launch(1, "--standalone", str(nodes.script))
    (worker,) = nodes.round(1)
    if said:
        nodes.says(1, "warning: no progress for Kubeflow Trainer: ")
    worker.tell("exit 0")
    assert nodes.ends(nodes.agents[0]) == 0, nodes.everything()
    lines = [line for line in nodes.out(1).splitlines() if "Kubeflow" in line]
    assert len(lines) == bool(said) and all(said in line and line.isprintable() for line in lines), lines
    assert SECRET not in nodes.everything() and "Traceback" not in nodes.everything()


def test_a_server_that_is_away_or_of_another_authority_is_one_line(
    nodes: Cluster, trainer: Trainer, authority: Authority, token: Path, tmp_path: Path
) -> None:
    nodes.env |= variables(free_port(), authority, token)
    ends_well(nodes, "Connection refused")
    nodes.out_path(1).unlink()
    nodes.agents.clear()
    nodes.env |= variables(trainer.server_port, Authority(tmp_path / "other"), token)
    ends_well(nodes, "CERTIFICATE_VERIFY_FAILED")
    assert trainer.posts.empty()


@pytest.mark.daily(3)
@pytest.mark.parametrize("text", [None, "", "two words", "a pipe", f"{SECRET}\nX-Injected: 1", SECRET * 1000, "\x00"])
def test_a_token_that_is_none_is_not_sent(nodes: Cluster, trainer: Trainer, authority: Authority, token: Path, text: str | None) -> None:
    token.unlink() if text in (None, "a pipe") else token.write_text(text or "")
    if text == "a pipe":
        os.mkfifo(token)
    nodes.env |= variables(trainer.server_port, authority, token)
    why = {None: ": No such file or directory", "a pipe": ": not a file"}.get(text, " holds no token")
    ends_well(nodes, f"{token}{why} (said once)")
    assert trainer.posts.empty() and len(SECRET * 1000) > MOST_TOKEN


@pytest.mark.parametrize("kind", ["missing", "pipe", "folder", "garbage"])
def test_a_certificate_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, trainer: Trainer, authority: Authority, token: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "ca.crt"
    {"missing": lambda: None, "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "garbage": lambda: path.write_bytes(b"\xff")}[kind]()
    one = part(monkeypatch, variables(trainer.server_port, authority, token) | {CA_CERT: str(path)})
    one._send()
    one._wait()
    (line,) = one._parts.session.access.notices
    why = {"missing": ": No such file or directory", "pipe": ": not a file", "folder": ": Is a directory"}
    assert f"{path}{why.get(kind, ' holds no certificate')} (said once)" in line and trainer.posts.empty()


# -- the part alone ----------------------------------------------------------------------------------------------------------------


def part(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> TrainerStatus:
    """Return the part of an agent whose snapshot is always ``NOW``."""
    monkeypatch.setattr(health, "snapshot", lambda parts, now: NOW)
    session = SimpleNamespace(access=SimpleNamespace(notices=deque[str]()), machine=SimpleNamespace(record=None))
    pages = SimpleNamespace(read_all=list)
    return TrainerStatus(cast(Any, SimpleNamespace(session=session)), cast(Any, pages), environ)


def test_it_posts_again_and_again(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, authority: Authority, token: Path) -> None:
    one = part(monkeypatch, variables(trainer.server_port, authority, token))
    assert one.tick(5.0) == float("inf"), "there is no round yet"
    one.workers_started(cast(Any, SimpleNamespace(node_rank=0)))
    begun = one._post_at
    assert one.tick(begun) == begun + EVERY
    assert trainer.post().token == SECRET
    one.tick(begun + EVERY - 1)
    one._wait()
    assert trainer.posts.empty()
    token.write_text("another.token")
    one.tick(begun + EVERY)
    assert trainer.post().token == "another.token"
    monkeypatch.setattr(health, "snapshot", lambda parts, now: replace(NOW, node_rank=None))
    one.tick(begun + 2 * EVERY)
    one._wait()
    assert trainer.posts.empty(), "it is a spare now"
    one.workers_started(cast(Any, SimpleNamespace(node_rank=1)))
    assert one.tick(begun + 5 * EVERY) == float("inf")


def test_a_refusal_is_said_once(monkeypatch: pytest.MonkeyPatch, authority: Authority, token: Path) -> None:
    for server in serving(Trainer(authority, code=403)):
        one = part(monkeypatch, variables(server.server_port, authority, token))
        for _ in range(3):
            one._send()
            one._wait()
        (line,) = one._parts.session.access.notices
        assert line == f"warning: no progress for Kubeflow Trainer: 127.0.0.1:{server.server_port}: it answers 403 Forbidden (said once)"
        assert [server.post().token for _ in range(3)] == [SECRET] * 3, "it is tried again"


def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, authority: Authority, token: Path) -> None:
    """It comes byte by byte, so that no limit for a piece of it is ever reached."""
    dripping = threading.Event()

    def slowly(connection: Any) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\na: ")
        dripping.set()
        while True:
            connection.sendall(b"b")
            time.sleep(LIMIT / 10)

    for server in serving(Bad(slowly, authority.issue("bad"))):
        one = part(monkeypatch, variables(server.server_address[1], authority, token))
        one.workers_started(cast(Any, SimpleNamespace(node_rank=0)))
        one.tick(one._post_at)
        assert dripping.wait(PATIENCE) and one._thread is not None and one._thread.is_alive()
        one.tick(one._post_at)
        one._thread.join(PATIENCE)
        assert not one._thread.is_alive() and server.connections == 1
        one.tick(one._post_at)
        assert server.connections <= 2


@pytest.mark.parametrize(
    ("at", "total", "percentage", "seconds"), [(1, 1000, 0, 500), (500, 1000, 50, 250), (1001, 1000, 99, 0), (7, 0, None, None)]
)
def test_progress_is_known_with_the_number_of_steps(at: int, total: int, percentage: int | None, seconds: int | None) -> None:
    found = posted("", "", trainer_status(NOW, 121, at, total, False, 1764523845.6))
    assert (found.status.get("progressPercentage"), found.status.get("estimatedRemainingSeconds")) == (percentage, seconds)
    assert found.status["lastUpdatedTime"] == "2025-11-30T17:30:45Z"
    wanted = {"steps": "121", "step": str(at - 1), "steps_per_second": "2.0", "goodput": "0.8124", "round": "3", "nodes": "2"}
    wanted |= {"world_size": "16", "restarts": "2", "failures": "1"} | ({"total_steps": str(total)} if total else {})
    assert found.metrics == wanted


def test_what_is_not_known_is_left_out_and_large_numbers_fit() -> None:
    silent = posted("", "", trainer_status(replace(NOW, steps=()), 0, 0, 0, False, 0.0))
    assert silent.metrics.keys() & {"steps", "step", "total_steps", "steps_per_second"} == set() and silent.status.keys() == {
        "lastUpdatedTime",
        "metrics",
    }
    steps = (WorkerSteps(0, 0, 1, 0.5, 0.001),)
    assert (
        posted("", "", trainer_status(replace(NOW, steps=steps), 1, 1, 1 << 53, False, 0.0)).status["estimatedRemainingSeconds"]
        == 2**31 - 1
    )


def test_the_server_is_that_of_the_variables() -> None:
    asked = {URL: f"https://trainer.kubeflow.svc:8082{PATH}", CA_CERT: "/ca.crt", TOKEN: "/token"}
    assert status_server(asked) == StatusServer("trainer.kubeflow.svc", 8082, PATH, "/ca.crt", "/token")
    for not_asked in ({}, {**asked, URL: ""}, {**asked, TOKEN: ""}, {**asked, VARIABLE: "off"}, {**asked, "ELASTIRUN_AGENT": "a:1"}):
        assert status_server(not_asked) is None
    for wrong in (f"http://trainer{PATH}", "trainer", "https://", "https://trainer:port/", "https://[::1/"):
        with pytest.raises(StartError, match="no https address"):
            status_server({**asked, URL: wrong})
