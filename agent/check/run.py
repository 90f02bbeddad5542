"""One node's part of a check, from its facts to the result. The only module of the folder that performs all of it."""

from __future__ import annotations

import os
import secrets
import socket
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from elastirun import clock
from elastirun.agent.check import collectives, facts, links, plan
from elastirun.agent.check.meeting import CheckMeeting
from elastirun.agent.check.probe_server import ProbeServer
from elastirun.agent.check.records import Arrival, Collective, Facts, Finding, Measured, Result, Roster, Unseen
from elastirun.agent.check.verdict import BAD, judge
from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.agent.host import name_servers, net
from elastirun.agent.host.node_name import NodeName
from elastirun.agent.store.choose_store import store_access
from elastirun.agent.store.discovery import Search
from elastirun.agent.store.store_access import StoreAccess
from elastirun.config import LaunchConfig
from elastirun.errors import StartError, StoreError, StoreMoved, StoreRefused
from elastirun.rendezvous.stores import torch_class
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.wire.codec import Codec
from elastirun.threads import start_thread

T = TypeVar("T")
RETRY = 0.2  # seconds between two attempts to reach the store
SAY_AFTER = 5.0  # seconds without the store; then a line says what the check waits for
AGAIN = "start the check again on all nodes"
RESULTS_LIMIT = 15.0  # seconds that the lead waits for the slowest node after it has measured itself: machines may be busy
MEASURE_LIMIT = links.LIMIT + links.NAMES_LIMIT + 2.0  # seconds for all that a node measures; a shared folder may hang


@dataclass(frozen=True)
class Asked:
    """A request for a check, besides the configuration of the job."""

    folders: tuple[str, ...] = ()  # that all nodes should share
    limit: float = 60.0  # seconds for the nodes to come
    torch: bool = True  # also measure with torch, where it is installed
    before_job: bool = False  # the job meets at the same place as soon as the check is over


@dataclass(frozen=True)
class Checked:
    """The outcome on this node. Where it could not meet the others, ``result`` is of this node alone, with a finding that says why."""

    code: ExitCode
    name: str
    result: Result
    seconds: float


def check(config: LaunchConfig, asked: Asked, say: Callable[[str], None]) -> Checked:
    """Check this node, and the ways to the other nodes of the job. ``say`` gets lines for people while it lasts. Raises nothing of ours.

    From then on torch cannot be imported in this process.
    """
    began, environ = clock.now(), dict(os.environ)
    torch_class.store_only()
    name_servers.only_python_asks()
    found = facts.find_facts(config, asked.folders, environ)
    with ExitStack() as stack:
        named = NodeName(config.node_name, f"check of {config.run_id} at {config.endpoint}", numbered=not config.standalone)
        stack.callback(named.close)
        node = _Node(config, asked, found, named.text, environ, stack)
        try:
            result = node.take_part(say)
        except (StoreError, StartError) as error:
            code, advice = (ExitCode.RENDEZVOUS, AGAIN) if node.met else (ExitCode.SICK, _advice(config))
            if asked.before_job and isinstance(error, StoreError):  # the job would end as well, or can do without a check
                code = ExitCode.OK if node.met else ExitCode.RENDEZVOUS
            why = Finding("store", (named.text,), str(error), advice, bad=not node.met)
            return Checked(code, named.text, node.alone(why), clock.now() - began)
    own = next((one.verdict for one in result.nodes if one.id == node.id), "")
    few = len(result.nodes) < config.min_nodes
    code = ExitCode.SICK if own == BAD else ExitCode.RENDEZVOUS if few else ExitCode.OK
    return Checked(code, named.text, result, clock.now() - began)


class _Node:
    """This node. ``stack`` closes what is opened. Errors: ``StoreError``, ``StartError``."""

    def __init__(self, config: LaunchConfig, asked: Asked, found: Facts, name: str, environ: dict[str, str], stack: ExitStack) -> None:
        self._config, self._asked, self._facts, self._name, self._stack = config, asked, found, name, stack
        self.id = f"{urllib.parse.quote(name, safe='')}-{secrets.token_hex(4)}"
        self._environ = environ
        self._probe: collectives.TorchProbe | None = None
        self.met = False  # the store was reached

    def arrival(self, address: str, ports: tuple[int, ...], meet: int = 0, hosting: bool = False) -> Arrival:
        config = self._config
        rank = config.node_rank if config.fixed_ranks else None
        own = net.own_names()[1]
        return Arrival(self.id, self._name, rank, socket.gethostname(), address, own, ports, meet, config.nproc, hosting, self._facts)

    @property
    def _limit(self) -> float:
        return MEASURE_LIMIT + (self._probe.limit if self._probe else 0.0)

    def alone(self, *findings: Finding) -> Result:
        """Return the result of this node without the others."""
        return judge([self.arrival("", ())], {self.id: Measured(self.id, (), (), ())}, {}, 1, (), findings)

    def take_part(self, say: Callable[[str], None]) -> Result:
        """Meet the others, measure the ways to them, and return the result of all."""
        config, asked = self._config, self._asked
        if asked.torch and self._facts.torch:
            self._probe = collectives.TorchProbe(self._environ, config.nproc, len(self._facts.gpus))
            self._stack.callback(self._probe.close)
        access = store_access(config)
        access.serves_standby = False
        self._stack.callback(access.end_store)
        store = self._connect(access, say)
        self.met = True
        if store is None or (asked.before_job and store.get([f"{access.key_prefix}round"])):
            say("the job has begun already, so only this node is checked")
            return self.alone()
        self._stack.callback(store.close)
        listening = _listen(config, access)
        server = ProbeServer(self.id, listening)
        self._stack.callback(server.close)
        ports = tuple(dict.fromkeys(one.getsockname()[1] for one in listening))
        meet = 0
        with suppress(StartError):  # no other port of --port-range is free: then there are no all-reduces with other nodes
            with net.listen_on(access.node_address.number, config.port_range) as free:
                meet = free.getsockname()[1] if self._probe is not None else 0
        arrival = self.arrival(access.node_address.number, ports, meet, store.hosting)
        for path in (facts.mark(folder.path, self.id) for folder in self._facts.folders):
            with suppress(OSError):
                path.touch()
                self._stack.callback(path.unlink, missing_ok=True)
        meeting = CheckMeeting(store, access.key_prefix, Codec(config.token), arrival, time.sleep, say)
        roster = meeting.assemble(config.min_nodes, config.max_nodes, asked.limit, config.timing.last_call)
        peers = plan.peers(roster.ids, roster.secret)
        near = roster.ids if meeting.leads else [one for one in (*peers.get(self.id, ()), *self._partners(roster)) if one]
        arrivals = meeting.arrivals(near)
        if self.id not in roster.ids or not {*near} <= arrivals.keys():
            meeting.outlast(roster.ids)
            meeting.await_end(asked.before_job and roster.hosted)
            raise StoreError("the check of the others had begun when this node came")
        server.answer(roster.secret)
        measured = self._measure(meeting, roster, [arrivals[id] for id in peers[self.id]], arrivals)
        limit = RESULTS_LIMIT + (self._probe.spread if self._probe else 0.0)
        found = meeting.collect(roster, measured, limit)
        if meeting.leads:
            result = judge([arrivals[id] for id in roster.ids], found, peers, config.min_nodes, meeting.unreadable)
            meeting.publish(result)
        else:
            result = meeting.result(self._limit + limit)
        meeting.part()
        meeting.await_end(asked.before_job and roster.hosted)
        return result

    def _connect(self, access: StoreAccess, say: Callable[[str], None]) -> Store | None:
        """Return the store where the nodes meet; None: the job has moved to another one."""
        began, said = clock.now(), False
        while True:
            try:
                return access.connect(None)
            except StoreMoved:
                return None
            except StoreError as error:
                waited = clock.now() - began
                if isinstance(error, StoreRefused) or access.host_failure or waited >= self._asked.limit:
                    raise StoreError(f"cannot reach the place where the nodes meet: {error}") from None
                if waited >= SAY_AFTER and not said:
                    said = True
                    say(f"waits for the store: {error}")
            time.sleep(RETRY)

    def _measure(self, meeting: CheckMeeting, roster: Roster, peers: Sequence[Arrival], arrivals: dict[str, Arrival]) -> Measured:
        def measure() -> Measured:
            ways = links.measure(peers, roster.secret)
            names, unseen = links.look_up(peers), self._unseen(peers)
            return Measured(self.id, ways, names, unseen, (self._probe.inside(),) if self._probe else ())

        measured = self._beside(meeting, measure)
        return replace(measured, collectives=(*measured.collectives, *self._reduce(meeting, roster, arrivals)))

    def _reduce(self, meeting: CheckMeeting, roster: Roster, arrivals: dict[str, Arrival]) -> list[Collective]:
        """Reduce with neighbours. All begin each turn together: a node has one port for that, where its next partner must not call yet."""
        found: list[Collective] = []
        here = roster.meet
        for turn, partner in enumerate(self._partners(roster)):
            if not here or not (self.id in here or meeting.leads):
                break
            here = meeting.await_all(turn, here, collectives.TOGETHER_LIMIT)
            if self._probe is not None and self.id in here and partner is not None and partner in here:
                found.append(self._beside(meeting, partial(self._probe.across, meeting.arrival, arrivals[partner])))
        return found

    def _partners(self, roster: Roster) -> tuple[str | None, ...]:
        return plan.turns(roster.ids, self.id) if self.id in roster.ids else ()

    def _beside(self, meeting: CheckMeeting, what: Callable[[], T]) -> T:
        """Return what ``what`` returns, in a thread, while this one takes part in the meeting."""
        found: list[T] = []
        if start_thread("check measures", lambda: found.append(what())) is None:
            raise StartError("no thread can be started here")
        meeting.meanwhile(lambda: bool(found), self._limit)
        if not found:
            raise StoreError("this node could not measure the ways to the others in time; a shared folder or a name server may hang")
        return found[0]

    def _unseen(self, peers: Sequence[Arrival]) -> tuple[Unseen, ...]:
        paths = [folder.path for folder in self._facts.folders if not folder.error]
        return tuple(Unseen(path, tuple(one.id for one in peers if not facts.mark(path, one.id).exists())) for path in paths)


def _advice(config: LaunchConfig) -> str:
    if config.endpoint is None:
        return "correct --rdzv-endpoint, or the settings of etcd"
    where = f"the node that owns {config.endpoint.host} has begun, and lets port {config.endpoint.port} in"
    return f"see that {where}, and that the name has the same address on all nodes"


def _listen(config: LaunchConfig, access: StoreAccess) -> list[socket.socket]:
    """Return sockets at ports where this node may listen in the job: a free one, the ends of --port-range, those of the endpoints."""
    number, ports = access.node_address.number, config.port_range
    listening = [net.listen_on(number, ports)]
    wanted = list(ports) if ports else []
    if config.succession and config.endpoint:
        wanted += [port for port, here in Search(config, config.endpoint).standby_ports(number) if here]
    for port in dict.fromkeys(wanted):
        with suppress(StartError):  # another process listens there
            listening.append(net.listen_on(number, (port, port)))
    return listening
