"""Progress of a TrainJob for Kubeflow Trainer, posted where Trainer's variables ask for it (docs/kubernetes.md#progress-of-a-trainjob).

The protocol is that of https://github.com/kubeflow/trainer/blob/master/docs/proposals/2779-trainjob-progress/README.md.
"""

from __future__ import annotations

import json
import math
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from socket import SHUT_RDWR
from threading import Thread
from typing import Any

from elastirun import clock, linux
from elastirun.agent.observe.progress_pages import ProgressPages
from elastirun.agent.part import NodeRound, Part
from elastirun.agent.processes import marks
from elastirun.agent.status import health
from elastirun.agent.status.health import Snapshot
from elastirun.errors import StartError
from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Verdict
from elastirun.threads import start_thread

URL, CA_CERT, TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
VARIABLE = "ELASTIRUN_TRAINER_STATUS"  # off: the script reports by itself, and each post replaces the one before
EVERY = 15.0  # seconds between two posts, each of which is a write to the cluster's API server
LIMIT = 3.0  # seconds to connect, and for each piece of the answer; also for the last post, at the end of the agent
MOST_TOKEN = 16384  # bytes; that of a service account has about 1000
MOST_CERTIFICATES = 1 << 20  # bytes; one has about 2000
MOST_SECONDS = (1 << 31) - 1  # that Trainer takes as remaining


@dataclass(frozen=True)
class StatusServer:
    """The server of Trainer for one TrainJob. ``ca_cert``, ``token``: paths of files that Kubernetes renews; ``ca_cert`` may be empty."""

    host: str
    port: int
    path: str
    ca_cert: str
    token: str


def status_server(environ: Mapping[str, str]) -> StatusServer | None:
    """Return the server that wants the progress; None: none does, or the agent above this launcher posts. Raises StartError."""
    url, token = environ.get(URL, ""), environ.get(TOKEN, "")
    if not (url and token) or environ.get(marks.VARIABLE) or environ.get(VARIABLE) == "off":
        return None
    with suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "https" and parts.hostname:
            return StatusServer(parts.hostname, parts.port or 443, parts.path or "/", environ.get(CA_CERT, ""), token)
    raise StartError(f"{URL} is no https address with a host, and a port if it has one")


def trainer_status(shown: Snapshot, steps: int, at: int, total: int, succeeded: bool, now: float) -> dict[str, Any]:
    """Return the body of a post. ``steps``: in this round; ``at``, ``total``: as in ``Page``. ``now``: in seconds since the epoch. Pure."""
    rate = max((one.steps_per_second for one in shown.steps if one.steps_per_second), default=None)
    status: dict[str, Any] = {"lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))}
    if succeeded:
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif total:
        status["progressPercentage"] = min(99, 100 * at // total)
        if rate:
            status["estimatedRemainingSeconds"] = min(MOST_SECONDS, math.ceil(max(0, total - at) / rate))
    metrics = {
        "steps": steps or None,
        "step": at - 1 if at else None,
        "total_steps": total or None,
        "steps_per_second": rate,
        "goodput": round(shown.account.goodput, 4),
        "round": shown.round,
        "nodes": len(shown.nodes),
        "world_size": shown.world_size,
        "restarts": sum(shown.restarts.values()),
        "failures": shown.failures,
    }
    status["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items() if value is not None]
    return {"trainerStatus": status}


class TrainerStatus(Part):
    """Posts the progress of the job while this node has rank 0. A thread posts, so a server that is slow or away delays nothing."""

    def __init__(self, parts: health.Parts, pages: ProgressPages, environ: Mapping[str, str]) -> None:
        self._parts, self._pages = parts, pages
        self._server: StatusServer | None = None
        self._post_at = math.inf
        self._thread: Thread | None = None  # of the last post
        self._connection: Any = None  # of that thread
        self._warned = False
        try:
            self._server = status_server(environ)
        except StartError as error:
            self._warn(str(error))

    def workers_started(self, round: NodeRound) -> None:
        self._post_at = clock.now() if self._server is not None and round.node_rank == 0 else math.inf

    def tick(self, now: float) -> float:
        if now >= self._post_at:
            self._post_at = now + EVERY
            self._send()
        return self._post_at

    def close(self) -> None:
        """Post how the job has ended, if it has. Called when the loop is over."""
        record = self._parts.session.machine.record
        if self._post_at < math.inf and record is not None and record.closed is not None:
            self._wait()
            self._send(record.closed.verdict is Verdict.SUCCEEDED)
            self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(LIMIT)

    def _send(self, succeeded: bool = False) -> None:
        shown = health.snapshot(self._parts, clock.now())
        if self._server is None or shown.node_rank != 0:
            return
        if self._thread is not None and self._thread.is_alive():  # a server that sends its answer byte by byte, or a slow name server
            with suppress(OSError, AttributeError):
                self._connection.sock.shutdown(SHUT_RDWR)
            return
        pages = self._pages.read_all()
        steps, at, total = (max((getattr(page, name) for page in pages), default=0) for name in ("steps", "at", "total"))
        body = json.dumps(trainer_status(shown, steps, at, total, succeeded, time.time())).encode()
        self._thread = start_thread("trainer-status", self._post, self._server, body)

    def _post(self, server: StatusServer, body: bytes) -> None:
        """Post ``body``, in a thread. The texts of other errors than those of the system may hold what the server sent, or the token."""
        import ssl  # slow, and seldom needed
        from http.client import HTTPSConnection, responses

        try:
            headers = {"Authorization": f"Bearer {_token(server.token)}", "Content-Type": "application/json"}
            context = ssl.create_default_context(cadata=_certificates(server.ca_cert) if server.ca_cert else None)
            self._connection = connection = HTTPSConnection(server.host, server.port, timeout=LIMIT, context=context)
            with closing(connection):
                connection.request("POST", server.path, body, headers)
                code = connection.getresponse().status  # the body of the answer is not read
            why = "" if 200 <= code < 300 else f"it answers {code} {responses.get(code, '')}".rstrip()
        except (OSError, StartError) as error:
            why = str(error)
        except Exception as error:
            why = f"it does not speak HTTP ({type(error).__name__})"
        if why:
            self._warn(f"{server.host}:{server.port}: {why}")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._parts.session.access.notices.append(f"warning: no progress for Kubeflow Trainer: {clip(why, 300)} (said once)")


def _token(path: str) -> str:
    """Return the token in the file. Raises StartError."""
    token = _read(path, MOST_TOKEN + 1).decode("ascii", "replace").strip()
    if len(token) > MOST_TOKEN or not token.isascii() or not token.isprintable() or not token or " " in token:
        raise StartError(f"{path} holds no token")
    return token


def _certificates(path: str) -> str:
    """Return the certificates in the file, whose comments may be in any language. Raises StartError."""
    text = _read(path, MOST_CERTIFICATES).decode("ascii", "ignore")
    if "BEGIN CERTIFICATE" not in text:
        raise StartError(f"{path} holds no certificate")
    return text


def _read(path: str, most: int) -> bytes:
    """Return at most ``most`` bytes of the file. Raises StartError."""
    try:
        with linux.open_regular(path) as file:
            return file.read(most)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error
