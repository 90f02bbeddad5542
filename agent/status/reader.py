"""Reads the status of jobs from the stores where their nodes meet, for ``elastirun status``, and writes how many nodes are wanted, for
``elastirun scale``. Needs no torch.

The endpoints, and the stores that this user's agents on this machine name, are asked at the same time. A store that has moved is followed
to where it is. Of several stores that hold the same job the one with the highest term is in use: an earlier one may still answer when its
host was cut off.
"""

from __future__ import annotations

import math
import queue
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastirun import clock
from elastirun.agent.host import net
from elastirun.agent.status import own_agents
from elastirun.agent.status.job_status import JobStatus, judge
from elastirun.agent.status.own_agents import OwnAgent
from elastirun.agent.store import shared_store
from elastirun.agent.store.at_once import ask_each, at_once
from elastirun.agent.store.discovery import MOST_ADDRESSES, MOST_ASKED, NAMES_LIMIT
from elastirun.agent.store.locations import ASK_LIMIT, CopyOf, StoreAt, TcpAt, at_etcd, described, standby
from elastirun.agent.wanted_nodes import write_wanted
from elastirun.config import Endpoint, Etcd
from elastirun.errors import StartError, StoreError, UnreadableMembers, UnreadableRound
from elastirun.rendezvous.peers.liveness import Liveness
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.wire.actions import Sync
from elastirun.rendezvous.wire.codec import Codec, clip
from elastirun.rendezvous.wire.events import Synced
from elastirun.rendezvous.wire.records import Place, RoundRecord
from elastirun.rendezvous.wire.sync import OWNER, SyncProtocol, execute

LOOK_LIMIT = 3.0  # seconds for one look at all endpoints
LATER_LIMIT = 0.2  # seconds for the others to answer, once one of them has shown the job: machines that are down never do
MOST_HOPS = 4  # stores that are followed one after the other; each is that of a node that has taken over
TRIES = 4  # reads of a round record whose members were deleted meanwhile, because the next round has formed
MOST_JOBS = 64  # that are read from one store
UNNAMED = "none"  # the name of a job without --rdzv-id


@dataclass(frozen=True)
class Target:
    """The endpoints to look at, and the job to look for; None: each job on the list of the store. ``token``: signs the records."""

    endpoints: tuple[Endpoint, ...] = ()
    job: str | None = None
    token: bytes | None = None
    etcd: Etcd | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The endpoints as they are spelled in messages; none: only agents on this machine are asked."""
        return tuple(map(str, (*self.endpoints, *(self.etcd.endpoints if self.etcd else ()))))


@dataclass(frozen=True)
class Found:
    """The outcome of one look. ``problems``: stores without an answer. ``unreadable``: jobs whose record does not parse.

    ``jobs``: those with agents on this machine, the newest first, and then the others by name.
    """

    jobs: tuple[JobStatus, ...] = ()
    problems: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # names of jobs in the stores that were asked, when there is none with the name that was looked for


@dataclass(frozen=True)
class _Sight:
    """The records of one job in one store."""

    job: str
    store: str
    synced: Synced
    at: StoreAt

    @property
    def watched(self) -> tuple[str, str]:
        """The job, and the id of its store."""
        record = self.synced.round
        return self.job, "" if record is None else record.store_id

    @property
    def newness(self) -> tuple[bool, int, int]:
        """The sort key of stores that hold the same job: the last one is in use."""
        record = self.synced.round
        return (False, -1, -1) if record is None else (record.round > 0, record.term, record.version)


@dataclass
class _Answer:
    """The word of one store about jobs, and the stores to which it leads."""

    sights: list[_Sight] = field(default_factory=list)
    moved: list[tuple[str, Place]] = field(default_factory=list)  # job, and where its store is instead
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    agents: list[OwnAgent] = field(default_factory=list)  # those here that name the store


class StatusReader:
    """Looks at the jobs of a target, once or again and again. Connections are kept, because each new one costs the store a name lookup."""

    def __init__(self, target: Target, find_agents: Callable[[], list[str]] = own_agents.sockets) -> None:
        self._target = target
        self._find_agents = find_agents
        self._sources: dict[StoreAt, _Source] = {}
        self._lock = threading.Lock()  # of ``_sources``, and of their ``users`` and ``look``
        self._looks = 0
        self._best: dict[str, _Sight] = {}  # by job, of the last look
        self._watched: dict[tuple[str, str], Liveness] = {}  # by job and name of its store: rows, as they were seen to change

    def look(self) -> Found:
        """Return what is found now."""
        target, problems = self._target, list[str]()
        self._looks += 1
        starts = self._addresses(problems)[:MOST_ASKED]
        starts += [at_etcd(target.etcd)] if target.etcd is not None else []
        questions = {str(at): partial(self._follow, at, target.job) for at in starts}
        questions |= {f"the agent at {path}": partial(self._ask_agent, path) for path in self._find_agents()}
        best: dict[str, _Sight] = {}
        unreadable, others, agents = list[str](), list[str](), list[OwnAgent]()
        for answer in _answers(questions, LOOK_LIMIT if target.job is None else LATER_LIMIT):
            for sight in answer.sights:
                if sight.job not in best or best[sight.job].newness < sight.newness:
                    best[sight.job] = sight
            problems += answer.problems
            unreadable += answer.unreadable
            others += answer.others
            agents += answer.agents
        self._drop_unused()
        self._best = best
        shown = {sight.watched for sight in best.values()}
        self._watched = {key: rows for key, rows in self._watched.items() if key in shown}
        own = {job: [one for one in agents if one.job == job] for job in best}
        newest = sorted(best, key=lambda job: (-min((one.began for one in own[job]), default=0.0), job))
        return Found(
            tuple(self._judge(best[job], own[job]) for job in newest),
            *(tuple(dict.fromkeys(lines)) for lines in (problems, unreadable, others)),
        )

    def scale(self, job: str, wanted: int) -> None:
        """Want ``wanted`` nodes in a job that the last look has found; 0: as many as --nnodes allows. Raises StoreError."""
        at = self._best[job].at
        if isinstance(at, CopyOf):
            raise StoreError("it is a job of one node, which no other can join")
        with self._lock:
            source = self._sources.setdefault(at, _Source(at))
        source.scale(job, self._target.token, wanted)

    def _addresses(self, problems: list[str]) -> list[StoreAt]:
        """Return the stores at all addresses of the endpoints. Adds to ``problems`` what does not resolve."""
        endpoints = self._target.endpoints
        hosts = list(dict.fromkeys(one.host for one in endpoints))
        known = at_once(net.resolve, hosts, NAMES_LIMIT)
        problems += [f"{host} does not resolve" for host in hosts if not known.get(host)]
        found: list[StoreAt] = [TcpAt(a, one.port) for one in endpoints for a in known.get(one.host, ())[:MOST_ADDRESSES]]
        return list(dict.fromkeys(found))

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _drop_unused(self) -> None:
        """Close the connections that the last look did not need, but for those that a slow thread still uses."""
        with self._lock:
            unused = [at for at, source in self._sources.items() if source.look < self._looks and not source.users]
            dropped = [self._sources.pop(at) for at in unused]
        for source in dropped:
            source.close()

    def _ask_agent(self, path: str) -> _Answer:
        """Return what the store says that an agent on this machine names, if that agent runs a job of the target."""
        agent, names = own_agents.ask(path), self._target.names
        if agent is None or self._target.job not in (None, agent.job) or (names and not _have_common_place(names, agent.endpoints)):
            return _Answer()
        try:
            answer = self._follow(described(agent.store), agent.job)
        except StoreError as error:
            return _Answer(problems=[f"job {clip(agent.job, 80)!r}: {error}"])
        answer.agents = [agent]
        return answer

    def _follow(self, at: StoreAt, job: str | None) -> _Answer:
        """Return what the store ``at`` says of a job, and the stores to which it leads."""
        found = self._ask(at, job)
        for _ in range(MOST_HOPS):
            moved, found.moved = found.moved[:MOST_JOBS], []
            for name, place in moved:
                there = self._ask(standby(place), name)
                found.sights += there.sights
                found.moved += there.moved
                found.problems += [f"the store of job {clip(name, 80)!r} has moved there, but {line}" for line in there.problems]
                found.unreadable += there.unreadable
        return found

    def _ask(self, at: StoreAt, job: str | None) -> _Answer:
        with self._lock:
            source = self._sources.setdefault(at, _Source(at)) if not isinstance(at, CopyOf) else _Source(at)
            source.users, source.look = source.users + 1, self._looks
        try:
            return source.read(job, self._target.token)
        except (StoreError, StartError) as error:
            return _Answer(problems=[str(error)])
        finally:
            with self._lock:
                source.users -= 1

    def _judge(self, sight: _Sight, agents: Sequence[OwnAgent]) -> JobStatus:
        """Return the status of a job. ``agents``: those of this machine that run it."""
        synced = sight.synced
        record = synced.round or RoundRecord("")
        liveness = self._watched.setdefault(sight.watched, Liveness(math.inf))
        if sight.at.rows_change:
            liveness.observe({i: row.seq for i, row in synced.rows.items()}, synced.started, synced.now)
        liveness.forget_unless(synced.rows.__contains__)
        steps = tuple(sorted({one for agent in agents for one in agent.steps}, key=lambda one: one.rank))
        live = {rank for agent in agents for rank in agent.live}
        finished = {rank for agent in agents for rank in agent.finished}
        view = View("", record, synced.rows, liveness, synced.now)
        return judge(sight.job, sight.store, view, synced.ignored, steps, tuple(sorted(live)), tuple(sorted(finished)))


class _Source:
    """The connection to one store. Used by one thread at a time.

    ``users``: the threads that read, or wait for their turn. ``look``: the number of the last look that asked this store.
    """

    def __init__(self, at: StoreAt) -> None:
        self.users = self.look = 0
        self._at = at
        self._store: Any = None
        self._one_reads = threading.Lock()

    def read(self, job: str | None, token: bytes | None) -> _Answer:
        """Return what this store says of ``job``; None: of each job on its list. Errors: ``StoreError``."""
        if not self._one_reads.acquire(timeout=ASK_LIMIT / 2):  # an agent and an endpoint, or two agents, may name one store
            raise StoreError(f"{self._at}: no answer of the store: timed out")
        try:
            if self._store is None:
                self._store = self._at.open()
            return self._read(self._store, job, token)
        except StoreError as error:
            self.close()
            text = str(error)
            raise StoreError(text if str(self._at) in text else f"{self._at}: {text}") from None
        finally:
            self._one_reads.release()

    def scale(self, job: str, token: bytes | None, wanted: int) -> None:
        """Write how many nodes are wanted. Errors: ``StoreError``."""
        with self._one_reads:
            self._store = self._store or self._at.open()
            write_wanted(self._store, self._at.prefix(job), token, wanted)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _read(self, store: Any, job: str | None, token: bytes | None) -> _Answer:
        if self._at.owner and store.get([OWNER]).get(OWNER) != self._at.owner.encode():
            raise StoreError("the node that served the store there has ended")
        answer, listed = _Answer(), _listed(store) if self._at.lists_jobs else []
        for name in [job] if job is not None else listed or [UNNAMED]:
            try:
                found = _read_job(store, self._at.prefix(name), token)
            except (UnreadableRound, UnreadableMembers) as error:
                answer.unreadable.append(f"{self._at}: {error}")
                continue
            if isinstance(found, Place):
                answer.moved.append((name, found))
            elif found.round is not None or found.rows or found.ignored:
                answer.sights.append(_Sight(name, str(self._at), found, self._at))
        if not answer.sights:
            answer.others += [name for name in listed if name != job]
        return answer


def _read_job(store: Any, prefix: str, token: bytes | None) -> Synced | Place:
    """Return the records of the job whose keys begin with ``prefix``, or where its store is instead. Errors: ``StoreError``."""
    left = TRIES
    while True:
        left -= 1
        record: RoundRecord | None
        moved: Place | None
        protocol: SyncProtocol = execute(SyncProtocol(prefix, "", Codec(token), clock.now).here(), store)
        try:
            record, moved = execute(protocol.find_job(), store)
            if record is not None and record.moved is not None:  # said instead of a first round, or of a store whose host was cut off
                return record.moved
            if moved is not None and (record is None or record.round == 0):
                return moved
            synced: Synced = protocol.carry_out(store, Sync(), clock.now())
            return synced
        except UnreadableMembers:
            if not left:
                raise


def _have_common_place(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether one of the endpoints ``ours`` is one of ``theirs``: it is spelled alike, or has the same address and port."""
    if {*ours} & {*theirs}:
        return True
    split = {text: text.rpartition(":")[::2] for text in (*ours, *theirs)}
    known = at_once(net.resolve, list(dict.fromkeys(host.strip("[]") for host, _ in split.values())), NAMES_LIMIT)

    def places(endpoints: Sequence[str]) -> set[tuple[str, str]]:
        return {(a, port) for host, port in map(split.__getitem__, endpoints) for a in known.get(host.strip("[]"), ())}

    return bool(places(ours) & places(theirs))


def _listed(store: Any) -> list[str]:
    """Return the names on the list of jobs of a store, which is empty where a store has taken over."""
    return [urllib.parse.unquote(key.rpartition("/")[2]) for key in sorted(store.under(shared_store.LIST))[:MOST_JOBS]]


def _answers(questions: Mapping[str, Callable[[], _Answer]], later: float) -> Iterator[_Answer]:
    """Yield the answers as they come, until all have, and then a word on those that did not come within LOOK_LIMIT.

    ``later``: the most seconds to wait after the first answer that shows a job.
    """
    results = ask_each("status", lambda name: questions[name](), questions)
    until = limit = clock.now() + LOOK_LIMIT
    waiting = dict.fromkeys(questions)
    with suppress(queue.Empty):
        while waiting:
            name, answer = results.get(timeout=max(0.001, until - clock.now()))
            del waiting[name]
            until = min(until, clock.now() + later) if answer.sights else until
            yield answer
    if until == limit:
        yield _Answer(problems=[f"{name}: no complete answer within {LOOK_LIMIT:g} s" for name in waiting])
