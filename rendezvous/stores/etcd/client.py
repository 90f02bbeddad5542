"""A connection to an etcd cluster, which tries its endpoints in turn until one answers.

``etcd3``'s own client knows one endpoint, never leaves a silent one, never renews its token and lets gRPC's errors through.
Only the messages of that package are used (``messages.py``); this client replaces the rest (decision 0007).

How gRPC behaves (grpcio 1.85, measured), and what follows:

- A channel to a stopped server stays open: the server's kernel accepts, and nobody answers. So every attempt has a time limit, and an
  endpoint that did not answer is left for the next one.
- Channels to one address share a connection, even a silent one, unless each has its own subchannel pool.
- ``grpc.keepalive_timeout_ms`` has no effect without ``grpc.http2.ping_timeout_ms``. etcd closes a connection that pings more
  often than every 5 s, or while no call is active.
- gRPC refuses a password as call credentials on a channel without TLS, but accepts the token as metadata.

A process that has a channel must not fork: the child would have the locks of gRPC's threads, but not the threads. ``subprocess`` without
``preexec_fn`` is safe. So the agent forks before it connects, and starts its workers by ``subprocess``.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastirun import clock
from elastirun.errors import StoreError, StoreRefused
from elastirun.rendezvous.stores.etcd.access import Access
from elastirun.rendezvous.stores.etcd.diagnosis import diagnose
from elastirun.rendezvous.stores.etcd.messages import load
from elastirun.rendezvous.wire.codec import clip

# Limits in seconds of one attempt. In the first round over several endpoints they are short: a stopped member looks like a slow one, and a
# node is lost after 5 s of silence. A member that has not answered on this channel yet gets least.
ATTEMPT, FIRST_ROUND_ATTEMPT, FIRST_CONTACT = 2.0, 1.5, 1.0
LEAST_ATTEMPT = 0.1  # seconds of the last attempt before the deadline: less would fail on a healthy network
ROUNDS = 3  # over all endpoints, for one operation
DEADLINE = 8.0  # seconds of one operation, over all attempts
RENEWALS = 2  # of the token, for one operation: etcd may expire it again at once, but not for ever
PAUSE, LONGEST_PAUSE = 0.2, 1.0  # seconds between two rounds: doubled each time, so that an election can end
LARGEST = 64 << 20  # bytes of an answer; far above what the largest job writes

OPTIONS = {
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.min_reconnect_backoff_ms": int(ATTEMPT * 1000),  # also the limit for connecting
    "grpc.max_receive_message_length": LARGEST,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_http_proxy": 0,
    "grpc.enable_retries": 0,  # this client retries itself, at another endpoint
}
FULL = (
    "its database is full (mvcc: database space exceeded) and accepts no writes until its administrator runs "
    "`etcdctl compact REVISION`, `etcdctl defrag` and `etcdctl alarm disarm`; --auto-compaction-retention=1h keeps it from filling up"
)
NOT_ETCD = "UNIMPLEMENTED"  # gRPC's code for a method that the server lacks
STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")  # etcd's words
MAY_PASS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED", NOT_ETCD)  # another endpoint may do better

T = TypeVar("T")
Metadata = Sequence[tuple[str, str]]
Call = Callable[[Any, float, Metadata], T]  # with gRPC's channel and the limit in seconds


class LeaseNotFound(StoreError):
    """The lease has expired, and what was written under it is gone."""


class Cluster:
    """The state that all connections of one agent share: the endpoint in use, the credentials, the token.

    ``endpoints``: each ``host:port``. ``deadline``: seconds of one operation.
    """

    def __init__(self, endpoints: Sequence[str], access: Access | None = None, deadline: float = DEADLINE) -> None:
        self.endpoints = tuple(endpoints)
        self.access = access or Access()
        self.deadline = deadline
        self.token: str | None = None  # None: not asked for yet; empty: etcd needs none
        self.position = random.randrange(len(self.endpoints))  # at random, so that the agents of a job use all members
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.name(*self.endpoints)

    def name(self, *endpoints: str) -> str:
        """Return the name of some of the endpoints for a message."""
        return "etcd at " + ", ".join(f"https://{endpoint}" if self.access.tls else endpoint for endpoint in endpoints)

    def move_on(self, position: int) -> None:
        """Make the next endpoint the one in use, unless another thread has left the one at ``position`` already."""
        with self._lock:
            if self.position == position:
                self.position = (position + 1) % len(self.endpoints)


@dataclass
class Channel:
    """gRPC's channel to the endpoint at ``position``."""

    position: int
    grpc: Any
    answered: bool = False  # whether an attempt on this channel succeeded


@dataclass(frozen=True)
class Problem:
    """The reason why an attempt failed: gRPC's code, and the words of etcd or gRPC."""

    code: str
    details: str

    @property
    def stale_token(self) -> bool:
        """Return whether another token would help."""
        return self.code == "UNAUTHENTICATED" or any(words in self.details for words in STALE_TOKEN)

    @property
    def may_pass(self) -> bool:
        """Return whether another attempt may succeed."""
        return self.code in MAY_PASS or self.stale_token or "too many requests" in self.details

    def words(self, limit: float) -> str:
        """Return the problem in words. ``limit``: seconds of the attempt."""
        if self.code == NOT_ETCD:
            return f"what answers there does not have etcd's v3 API: {self.details}"
        if self.code == "DEADLINE_EXCEEDED" and "etcdserver" not in self.details:
            return f"no answer within {limit:.1f} s"
        return self.details or self.code.lower()


class Client:
    """Calls etcd's methods over one channel at a time. Used by one thread, and by the threads of its watches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.messages = load()
        self._certificates = cluster.access.certificates() if cluster.access.tls else (None, None, None)
        self.closed = threading.Event()
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def call(self, name: str, request: Any) -> Any:
        """Return etcd's answer to ``request`` by its method ``name``.

        An attempt whose answer was lost may have carried out a write. Errors: ``StoreError``.
        """

        def once(channel: Any, limit: float, metadata: Metadata) -> Any:
            return self.messages.method(channel, name)(request, timeout=limit, metadata=metadata)

        return self.attempt(once)

    def call_stream(self, name: str, request: Any) -> Any:
        """Return the first answer of a method whose requests and answers are streams. Errors: ``StoreError``."""

        def once(channel: Any, limit: float, metadata: Metadata) -> Any:
            answers = self.messages.method(channel, name)(iter([request]), timeout=limit, metadata=metadata)
            try:
                return next(answers)
            finally:
                answers.cancel()

        return self.attempt(once)

    def attempt(self, call: Call[T]) -> T:
        """Return the result of ``call`` from the first endpoint that answers. Errors: ``StoreError``, after the last attempt."""
        end = clock.now() + self.cluster.deadline
        count = len(self.cluster.endpoints)
        failed: dict[int, tuple[Problem, float]] = {}  # by position: the last problem there, and the limit of the attempt
        renewals = 0
        for number in range(1, ROUNDS * count + 1):
            channel = self.channel()
            limit = max(LEAST_ATTEMPT, min(self._limit(channel, first_round=number <= count), end - clock.now()))
            try:
                result = call(channel.grpc, limit, self._metadata(channel.grpc, limit))
                channel.answered = True
                return result
            except (self.messages.grpc.RpcError, ValueError, StopIteration) as error:
                problem = self._problem(error)
            self._raise_if_final(problem)
            if problem.stale_token and renewals < RENEWALS:
                self.cluster.token, renewals = None, renewals + 1
                continue
            failed[channel.position] = problem, limit
            self.abandon(channel)
            if clock.now() >= end:
                break
            if number % count == 0:
                pause = min(PAUSE * 2 ** (number // count - 1), LONGEST_PAUSE)
                self.closed.wait(pause * random.uniform(0.5, 1.0))
        raise self._unreachable(failed)

    def channel(self) -> Channel:
        """Return the channel to the endpoint in use, opened if need be. Errors: ``StoreError`` when this client is closed."""
        with self._lock:
            if self.closed.is_set():
                raise StoreError(f"{self.cluster}: this connection is closed")
            if self._channel is None:
                position = self.cluster.position
                self._channel = Channel(position, self._open(self.cluster.endpoints[position]))
            return self._channel

    def abandon(self, channel: Channel) -> None:
        """Close a channel, with all calls on it, and move on to the next endpoint."""
        with self._lock:
            if self._channel is not channel:
                return  # another thread was faster
            self._channel = None
            self.cluster.move_on(channel.position)
        channel.grpc.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the next one to be used."""
        channel = self._channel
        return self.cluster.endpoints[channel.position if channel else self.cluster.position]

    def close(self) -> None:
        """End all calls. Never raises."""
        with self._lock:
            self.closed.set()
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.grpc.close()

    def token(self) -> Metadata:
        """Return the metadata with the token, if one is known."""
        return (("token", self.cluster.token),) if self.cluster.token else ()

    def _open(self, endpoint: str) -> Any:
        grpc, options = self.messages.grpc, list(OPTIONS.items())
        if not self.cluster.access.tls:
            return grpc.insecure_channel(endpoint, options)
        return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(*self._certificates), options)

    def _limit(self, channel: Channel, first_round: bool) -> float:
        """Return the seconds for an attempt on ``channel``."""
        if not first_round:
            return ATTEMPT
        if not channel.answered:
            return FIRST_CONTACT
        return FIRST_ROUND_ATTEMPT if len(self.cluster.endpoints) > 1 else ATTEMPT

    def _metadata(self, channel: Any, limit: float) -> Metadata:
        """Return the metadata of a call, with a new token if none is known. Errors: gRPC's, and ``StoreRefused``."""
        access = self.cluster.access
        if access.user and self.cluster.token is None:
            request = self.messages.AuthenticateRequest(name=access.user, password=access.password())
            try:
                answer = self.messages.method(channel, "Auth/Authenticate")(request, timeout=limit)
                self.cluster.token = str(answer.token)
            except self.messages.grpc.RpcError as error:
                if "authentication is not enabled" not in (error.details() or ""):
                    raise
                self.cluster.token = ""
        return self.token()

    def _problem(self, error: BaseException) -> Problem:
        if not isinstance(error, self.messages.grpc.RpcError):  # another thread closed the channel, which gRPC reports as ValueError
            return Problem("CANCELLED", "the connection was closed")
        return Problem(error.code().name, clip((error.details() or "").rpartition("last error: ")[2], 200))

    def _raise_if_final(self, problem: Problem) -> None:
        """Raise the ``StoreError`` of a problem that no further attempt would solve."""
        access, details = self.cluster.access, problem.details
        where = self.cluster.name(self.endpoint)
        if "lease not found" in details:
            raise LeaseNotFound(f"{where}: {details}")
        if "user name is empty" in details and not access.user:
            raise StoreRefused(f"{where}: it requires a user: give user= and password_file=")
        if "authentication failed" in details:
            raise StoreRefused(f"{where}: wrong user or password (user={access.user}, {access.password_file})")
        if problem.code == "PERMISSION_DENIED":
            who = f"user {access.user}" if access.user else "this certificate's user"
            raise StoreRefused(f"{where}: {who} has no permission there: its role needs readwrite on the prefix of the keys")
        if not problem.may_pass:
            raise StoreError(f"{where}: {FULL if 'database space exceeded' in details else details or problem.code}")

    def _unreachable(self, failed: dict[int, tuple[Problem, float]]) -> StoreError:
        """Return the error after the last attempt. It says what is wrong with each endpoint, and the same words once.

        It is a ``StoreRefused`` when waiting would help at none of them.
        """
        access = self.cluster.access
        context = access.context() if access.tls else None
        endpoints_by_words: dict[str, list[str]] = defaultdict(list)
        lasting = []
        for position, (problem, limit) in failed.items():
            endpoint = self.cluster.endpoints[position]
            words, lasts = problem.words(limit), problem.code == NOT_ETCD
            if problem.code == "UNAVAILABLE":  # gRPC's own words often name no cause
                diagnosis, lasts = diagnose(endpoint, context, bool(access.cert))
                words = diagnosis or words
            endpoints_by_words[words].append(endpoint)
            lasting.append(lasts)
        text = "; ".join(f"{self.cluster.name(*endpoints)}: {words}" for words, endpoints in endpoints_by_words.items())
        return (StoreRefused if all(lasting) else StoreError)(text)
