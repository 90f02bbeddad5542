"""One connection to an etcd cluster: its endpoints in turn, until one answers.

``etcd3``'s own client knows one endpoint, never leaves a silent one, never renews its token and lets gRPC's errors through;
so of that package only the messages are used (``messages.py``), and this is ours.

What gRPC really does (grpcio 1.85, tried out), and what follows:

- A channel to a server that is stopped stays as it is: its kernel accepts, nobody answers. So every try has a limit, and
  what did not answer is left for the next endpoint.
- Channels to one address share a connection, the silent one too, unless each has a pool of its own.
- ``grpc.keepalive_timeout_ms`` has no effect without ``grpc.http2.ping_timeout_ms``. etcd hangs up on who pings more
  often than every 5 s, or while nothing is asked.
- A password as call credentials is refused on a channel without TLS; the token as metadata is not.

A process that has a channel must not fork: gRPC's threads are not in the child, their locks are. What ``subprocess`` does without
``preexec_fn`` is safe. So whatever the agent forks, it forks before it connects; its workers it starts by ``subprocess``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastirun import clock
from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous.codec import clip
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.diagnosis import diagnose
from elastirun.rendezvous.stores.etcd.messages import load

TRY = 2.0  # seconds for one try
# The same in the first round, when there is another endpoint to go to: a stopped one looks like a slow one, and a node
# is lost after five. Less for one that has not answered yet.
SHORT_TRY, FIRST_TRY = 1.5, 1.0
ROUNDS = 3  # over all endpoints
DEADLINE = 8.0  # seconds for one operation, however many tries
RENEWALS = 2  # of the token, for one operation
PAUSE, LONGEST_PAUSE = 0.2, 1.0  # seconds between two rounds, doubled each time
LARGEST = 64 << 20  # bytes of an answer

OPTIONS = {
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.min_reconnect_backoff_ms": int(TRY * 1000),  # which is also how long connecting may take
    "grpc.max_receive_message_length": LARGEST,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_http_proxy": 0,
    "grpc.enable_retries": 0,  # we do it ourselves, elsewhere
}
RENEW = "RENEW"
FULL = (
    "its database is full (mvcc: database space exceeded) and takes no writes from anybody until its administrator runs "
    "`etcdctl compact REVISION`, `etcdctl defrag` and `etcdctl alarm disarm`; --auto-compaction-retention=1h keeps it from filling up"
)
NOT_ETCD = "UNIMPLEMENTED"  # gRPC's code for a method that the server has not
STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
ELSEWHERE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED")  # another endpoint may do better

T = TypeVar("T")
Metadata = Sequence[tuple[str, str]]
Act = Callable[[Any, float, Metadata], T]  # with a channel and seconds


class LeaseNotFound(StoreError):
    """The lease is over, and with it what was written under it."""


class Cluster:
    """What all connections of one agent share: which endpoint is in use, how to get in, the token.

    ``endpoints``: each ``host:port``. ``deadline``: seconds for one operation.
    """

    def __init__(self, endpoints: Sequence[str], access: Access | None = None, deadline: float = DEADLINE) -> None:
        self.endpoints = tuple(endpoints)
        self.access = access or Access()
        self.deadline = deadline
        self.token: str | None = None  # empty: etcd asks for none
        self.position = random.randrange(len(self.endpoints))  # the agents of a job spread over the members
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.name(*self.endpoints)

    def name(self, *endpoints: str) -> str:
        """What to call some of the endpoints in a message."""
        return "etcd at " + ", ".join(f"https://{endpoint}" if self.access.tls else endpoint for endpoint in endpoints)

    def leave(self, position: int) -> None:
        """The endpoint at ``position`` does not answer: the next is to be used, if it is not already."""
        with self._lock:
            if self.position == position:
                self.position = (position + 1) % len(self.endpoints)


@dataclass
class Link:
    """A channel to one of the endpoints."""

    position: int
    channel: Any
    answered: bool = False  # on this channel


class Client:
    """Calls etcd's methods. Used by one thread, and by those of its watches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.messages = load()
        self._certificates = cluster.access.certificates() if cluster.access.tls else (None, None, None)
        self.closed = threading.Event()
        self._link: Link | None = None
        self._lock = threading.Lock()

    def call(self, name: str, request: Any) -> Any:
        """etcd's answer to ``request`` by its method ``name``.

        A write may have been carried out by a try whose answer was lost. Errors: ``StoreError``.
        """

        def act(channel: Any, limit: float, metadata: Metadata) -> Any:
            return self.messages.method(channel, name)(request, timeout=limit, metadata=metadata)

        return self.attempt(act)

    def call_stream(self, name: str, request: Any) -> Any:
        """The first answer of a method that takes and gives streams. Errors: ``StoreError``."""

        def act(channel: Any, limit: float, metadata: Metadata) -> Any:
            answers = self.messages.method(channel, name)(iter([request]), timeout=limit, metadata=metadata)
            try:
                return next(answers)
            finally:
                answers.cancel()

        return self.attempt(act)

    def attempt(self, act: Act[T]) -> T:
        """The result of ``act`` at the first endpoint that answers. Errors: ``StoreError``, after the last try."""
        end = clock.now() + self.cluster.deadline
        count = len(self.cluster.endpoints)
        problems: dict[int, tuple[str, str]] = {}  # by position: gRPC's code, and words
        renewals = 0
        for tried in range(1, ROUNDS * count + 1):
            link = self.link()
            hurried = SHORT_TRY if link.answered and count > 1 else TRY if link.answered else FIRST_TRY
            limit = hurried if tried <= count else TRY
            limit = max(0.1, min(limit, end - clock.now()))
            try:
                metadata = self._metadata(link.channel, limit)
                result = act(link.channel, limit, metadata)
                link.answered = True
                return result
            except (self.messages.grpc.RpcError, ValueError, StopIteration) as error:
                code, details = self._judge(error, limit)
                if code == RENEW and renewals < RENEWALS:
                    self.cluster.token, renewals = None, renewals + 1
                    continue
                problems[link.position] = code, details
                self.leave(link)
            if clock.now() >= end:
                break
            if tried % count == 0:
                pause = min(PAUSE * 2 ** (tried // count - 1), LONGEST_PAUSE)
                self.closed.wait(pause * random.uniform(0.5, 1.0))
        raise self._gave_up(problems)

    def link(self) -> Link:
        """The channel to the endpoint in use, made if need be. Errors: ``StoreError`` when this connection is closed."""
        with self._lock:
            if self.closed.is_set():
                raise StoreError(f"{self.cluster}: this connection is closed")
            if self._link is None:
                position = self.cluster.position
                self._link = Link(position, self._dial(self.cluster.endpoints[position]))
            return self._link

    def leave(self, link: Link) -> None:
        """Close a channel that is no good, with whatever else is under way on it; the next one goes elsewhere."""
        with self._lock:
            if self._link is not link:
                return  # another thread was faster
            self._link = None
            self.cluster.leave(link.position)
        link.channel.close()

    @property
    def endpoint(self) -> str:
        """Where this connection is, or would be made next."""
        link = self._link
        return self.cluster.endpoints[link.position if link else self.cluster.position]

    def close(self) -> None:
        """End all calls. Never raises."""
        with self._lock:
            self.closed.set()
            link, self._link = self._link, None
        if link is not None:
            link.channel.close()

    def _dial(self, endpoint: str) -> Any:
        grpc, options = self.messages.grpc, list(OPTIONS.items())
        if not self.cluster.access.tls:
            return grpc.insecure_channel(endpoint, options)
        return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(*self._certificates), options)

    def _metadata(self, channel: Any, limit: float) -> Metadata:
        """The token, asked for when there is none yet. Errors: gRPC's, and ``StoreRefused``."""
        access = self.cluster.access
        if access.user and self.cluster.token is None:
            request = self.messages.AuthenticateRequest(name=access.user, password=access.password())
            try:
                answer = self.messages.method(channel, "Auth/Authenticate")(request, timeout=limit)
                self.cluster.token = str(answer.token)
            except self.messages.grpc.RpcError as error:
                if "authentication is not enabled" not in (error.details() or ""):
                    raise
                self.cluster.token = ""  # whoever comes may do anything there; so may we
        return self.token()

    def token(self) -> Metadata:
        """The token that is known, if any."""
        return (("token", self.cluster.token),) if self.cluster.token else ()

    def _judge(self, error: BaseException, limit: float) -> tuple[str, str]:
        """gRPC's code for a try that failed, and why; RENEW for a token that is not valid.

        Errors: ``StoreError`` for what does not get better by trying again.
        """
        if not isinstance(error, self.messages.grpc.RpcError):
            return "CANCELLED", "the connection was closed"  # a ValueError of gRPC's: by another thread, before the call began
        code, details = error.code().name, clip((error.details() or "").rpartition("last error: ")[2], 200)
        where, user = self.cluster.name(self.endpoint), self.cluster.access.user
        if "lease not found" in details:
            raise LeaseNotFound(f"{where}: {details}") from None
        if "user name is empty" in details and not user:
            raise StoreRefused(f"{where}: it asks who we are: give user= and password_file=") from None
        if "authentication failed" in details:
            raise StoreRefused(f"{where}: wrong user or password (user={user}, {self.cluster.access.password_file})") from None
        if code == "PERMISSION_DENIED":
            who = f"user {user}" if user else "this certificate's user"
            raise StoreRefused(f"{where}: {who} has no permission there: its role needs readwrite on the prefix of the keys") from None
        if code == "UNAUTHENTICATED" or any(words in details for words in STALE_TOKEN):
            return RENEW, details
        if code == NOT_ETCD:
            return code, f"what answers there does not have etcd's v3 API: {details}"
        if code == "DEADLINE_EXCEEDED" and "etcdserver" not in details:
            return code, f"no answer within {limit:.1f} s"
        if code in ELSEWHERE or "too many requests" in details:
            return code, details or code.lower()
        raise StoreError(f"{where}: {FULL if 'database space exceeded' in details else details or code}") from None

    def _gave_up(self, problems: dict[int, tuple[str, str]]) -> StoreError:
        """What to say of the endpoints after the last try: for those that could not be connected to, what is wrong there."""
        by_words: dict[str, list[str]] = {}
        in_vain = []
        for position, (code, details) in problems.items():
            endpoint, access = self.cluster.endpoints[position], self.cluster.access
            context = access.context() if access.tls else None
            words, final = diagnose(endpoint, context, bool(access.cert)) if code == "UNAVAILABLE" else ("", code == NOT_ETCD)
            by_words.setdefault(words or details, []).append(endpoint)
            in_vain.append(final)
        text = "; ".join(f"{self.cluster.name(*endpoints)}: {words}" for words, endpoints in by_words.items())
        return (StoreRefused if all(in_vain) else StoreError)(text)
