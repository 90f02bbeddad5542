"""The meeting of the nodes of a check, at the store where the job will meet, under keys of its own.

One node leads: the first that has written the key ``lead``. It writes down who has come (the roster), collects what all have measured, and
writes the result. The others read a key or two until that is there. Keys of a check whose nodes were killed may be left in etcd: a lead
that does not count any more is followed by another, which deletes them. Errors of all methods: ``StoreError``.
"""

from __future__ import annotations

import re
import secrets
import urllib.parse
import zlib
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from elastirun import clock
from elastirun.agent.check.records import Arrival, Measured, Result, Roster, Turn
from elastirun.agent.host import net
from elastirun.errors import BadRecord, StoreError
from elastirun.rendezvous.progress import Wait
from elastirun.rendezvous.stores.base import Store
from elastirun.rendezvous.wire.codec import Codec, clip, decompressed

PAUSE = 0.1  # seconds between two reads of a node that waits
STALE = 20.0  # seconds without a count of the lead, or a sign of life of another node, after which it is taken for dead
LIFE = 5.0  # seconds between two signs of life of a node, so that the lead does not wait for one that has died
END_LIMIT = 120.0  # seconds until a check is over that has begun without this node
STRANGERS_READ = 1.0  # seconds for nodes whose rows cannot be read to learn that: they cannot read the roster either
SLACK = 5.0  # seconds that a node waits longer for the lead than the lead waits for the nodes
GOODBYE_LIMIT = 15.0  # seconds that the lead and the host of the store wait until all that have measured have read the result

MOST_PORTS = 16  # of one node
MOST_NAMES = 4  # in a line for people
TOLD = ("read/", "ready/", "go/", "alive/", "measured/", "roster", "result")  # the keys of a check besides ``node/`` and ``lead``

_LEAD = re.compile(rb"[!-~]{1,400} [0-9]{1,12}")  # an id, and a count

T = TypeVar("T")
Pause = Callable[[float], object]


class CheckMeeting:
    """The part of one node in the meeting. Used by one thread. ``say`` gets lines for people about long waits."""

    def __init__(
        self, store: Store, prefix: str, codec: Codec, arrival: Arrival, pause: Pause, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._store, self._prefix, self._codec, self.arrival, self._pause = store, f"{prefix}check/", codec, arrival, pause
        self._say, self._wait = say, Wait(clock.now())
        self.unreadable: list[str] = []  # lines on rows of other nodes that could not be read
        self._count = 0  # of the lead
        self.leads = False  # this node leads
        self._seen: tuple[bytes, float] = b"", clock.now()  # the last value of ``lead``, and when it was read first
        self._sign: bytes | None = None  # the last sign of life of this node
        self._sign_due = 0.0  # when to write the next one
        self._signs: dict[str, tuple[bytes | None, float]] = {}  # for the lead, by node: the last sign, and when it was read first
        self._look_due: dict[str, float] = {}  # by node: when to look for its next one

    def assemble(self, least: int, most: int, limit: float, last_call: float) -> Roster:
        """Return the roster: as soon as ``most`` nodes are there, at the latest after ``limit`` seconds.

        ``last_call``: seconds without another node, once ``least`` are there, after which no more are waited for.
        """
        me, known, arrivals = self.arrival.id, 0, dict[str, Arrival]()
        came = began = changed = clock.now()
        own = self._put(f"node/{me}", self.arrival)
        while True:
            found = self._store.get([self._key("lead"), self._key("roster"), self._key(f"node/{me}")])
            if self._key(f"node/{me}") not in found:  # another lead has taken over, and has deleted what was there
                self._store.put_if(self._key(f"node/{me}"), None, own)
            followed = self.leads
            self._follow(found.get(self._key("lead")))
            if self.leads and not followed:  # its own row may be among those of an earlier check, which it has deleted
                self._store.put_if(self._key(f"node/{me}"), None, own)
                began = changed = clock.now()
            if self.leads:
                arrivals = self._all("node/", Arrival)
                if len(arrivals) != known:
                    known, changed = len(arrivals), clock.now()
                quiet = len(arrivals) >= least and clock.now() - changed >= last_call
                if len(arrivals) >= most or quiet or clock.now() - began >= limit:
                    return self._write_roster(arrivals)
            elif (written := found.get(self._key("roster"))) is not None and not self._is_stale:
                return self._decode("roster", written, Roster)
            elif clock.now() - came >= 2 * limit + STALE:  # twice, for a lead that has followed another
                raise StoreError(f"{self._key('lead')} is counted up, but no node has said who takes part; a stranger may write there")
            self._pause_saying(self._who_has_come(arrivals, least, most))

    def _write_roster(self, arrivals: dict[str, Arrival]) -> Roster:
        """Write down, as the lead, that these nodes take part."""
        ids = tuple(sorted(arrivals, key=lambda id: _order(arrivals[id])))
        meet, hosted = tuple(id for id in ids if arrivals[id].meet), any(one.hosting for one in arrivals.values())
        roster = Roster(ids, secrets.token_hex(16), meet, hosted)
        self._put("roster", roster)
        return roster

    def _who_has_come(self, arrivals: dict[str, Arrival], least: int, most: int) -> str:
        """Return in words what is waited for while nodes come. Only the lead knows the ``arrivals``."""
        if not self.leads:
            return f"waiting until {self._lead} has found all nodes of the check"
        enough = str(most) if least >= most else f"{least} to {most}"
        return f"{len(arrivals)} of {enough} nodes have come to the check: {_named(arrivals)}"

    def arrivals(self, ids: Collection[str]) -> dict[str, Arrival]:
        """Return those of the nodes ``ids``, by id, as far as they can be read."""
        return self._parsed("node/", Arrival, self._store.get([self._key(f"node/{id}") for id in ids]))

    def meanwhile(self, done: Callable[[], bool], limit: float) -> None:
        """Wait until ``done``, for ``limit`` seconds at most, and go on counting if this node leads."""
        until = clock.now() + limit
        while not done() and clock.now() < until:
            if self.leads:
                self._beat()
            self._rest(pause=PAUSE / 5)

    def await_all(self, turn: int, ids: Collection[str], limit: float) -> tuple[str, ...]:
        """Wait until all nodes of ``ids`` are at ``turn``, for ``limit`` seconds at most. Return those that are, as the lead finds.

        Only the lead reads who is there: the keys of all nodes, read by all of a thousand, are a million.
        """
        me, name, until = self.arrival.id, f"go/{turn}", clock.now() + limit
        if me in ids:
            self._store.put_if(self._key(f"ready/{turn}/{me}"), None, b"1")
        if not self.leads:
            until += PAUSE + SLACK
            while (written := (found := self._store.get([self._key(name), self._key("lead")])).get(self._key(name))) is None:
                self._note_lead(found.get(self._key("lead")))
                if self._is_stale or clock.now() >= until:
                    return ()
                self._rest(f"waiting for {self._lead} to begin an all-reduce")
            return self._decode(name, written, Turn).ids
        keys = {id: self._key(f"ready/{turn}/{id}") for id in ids}
        while True:
            found = self._store.get(keys.values())
            here = Turn(tuple(id for id, key in keys.items() if key in found))
            missing = {*ids} - {*here.ids}
            if not self._may_come(missing) or clock.now() >= until:
                break
            self._beat()
            self._rest(f"waiting for {_named(missing)} to begin an all-reduce")
        self._put(name, here)
        return here.ids

    def collect(self, roster: Roster, own: Measured, limit: float) -> dict[str, Measured]:
        """Hand in what this node has measured. For the lead: return what all have, as far as it comes within ``limit`` seconds."""
        self._put(f"measured/{own.id}", own)
        if not self.leads:
            return {}
        until = clock.now() + limit
        while True:
            found = self._all("measured/", Measured)
            missing = {*roster.ids} - found.keys()
            if not self._may_come(missing) or clock.now() >= until:
                return found
            self._beat()
            self._rest(f"waiting for what {_named(missing)} measured")

    def publish(self, result: Result) -> None:
        """Write the result. It has a row for each node, which all nodes read: they are much alike, so it is compressed."""
        self._put("result", result, zlib.compress)

    def result(self, limit: float) -> Result:
        """Return the result, which the lead writes within ``limit`` seconds."""
        until, keys = clock.now() + limit, [self._key("result"), self._key("lead")]
        while (written := (found := self._store.get(keys)).get(keys[0])) is None:
            self._note_lead(found.get(keys[1]))
            if self._is_stale or clock.now() >= until:
                raise StoreError("the node that leads the check has written no result; it may have ended")
            self._rest(f"waiting for the result from {self._lead}")
        return self._decode("result", decompressed(written), Result)

    def part(self) -> None:
        """Say that this node has read the result. Whoever leads or hosts the store waits until all have; the lead deletes all keys."""
        with suppress(StoreError):
            until = clock.now() + GOODBYE_LIMIT
            self._store.put_if(self._key(f"read/{self.arrival.id}"), None, b"1")
            while (self.leads or self.arrival.hosting) and clock.now() < until:
                if len(self._store.under(self._key("read/"))) >= len(self._store.under(self._key("measured/"))):
                    break
                self._pause(PAUSE)
            if self.leads:
                self._pause(STRANGERS_READ if self.unreadable else 0.0)
                self._delete((*TOLD, "node/", "lead"))

    def await_end(self, hosted: bool) -> None:
        """Wait until the store ends with the check, where a node of the check hosts it: the job must not meet in a store that ends."""
        until = clock.now() + END_LIMIT
        with suppress(StoreError):
            while hosted and not self.arrival.hosting and clock.now() < until:
                self._store.get([self._key("lead")])
                self._pause(PAUSE)

    def outlast(self, ids: Collection[str]) -> None:
        """Serve the store, if this node does, until all nodes of a check without it have read the result, or have ended."""
        until = clock.now() + END_LIMIT
        with suppress(StoreError):
            while self.arrival.hosting and clock.now() < until and not self._is_stale:
                lead = self._store.get([self._key("lead")]).get(self._key("lead"))
                if lead is None or len(self._store.under(self._key("read/"))) >= len(ids):
                    break  # the last step of the lead is to delete its keys
                self._note_lead(lead)
                self._pause(PAUSE)

    def _follow(self, lead: bytes | None) -> None:
        """Become the lead if there is none, or none that counts. Count, if this node is it."""
        if self.leads:
            self._beat()
            return
        self._note_lead(lead)
        if lead is None or self._is_stale:
            self.leads = self._store.put_if(self._key("lead"), lead, self._lead_value) == self._lead_value
            if self.leads:  # of an earlier check at a store that is still there
                self._delete((*TOLD, *(["node/"] if lead is not None else [])))

    def _note_lead(self, lead: bytes | None) -> None:
        if lead != self._seen[0]:
            self._seen = lead or b"", clock.now()

    @property
    def _is_stale(self) -> bool:
        return bool(self._seen[0]) and clock.now() - self._seen[1] > STALE

    @property
    def _lead_value(self) -> bytes:
        return f"{self.arrival.id} {self._count}".encode()

    def _beat(self) -> None:
        key, before = self._key("lead"), self._lead_value
        self._count += 1
        if self._store.put_if(key, before, self._lead_value) == self._lead_value:
            return
        found = self._store.get([key]).get(key)
        other = found is not None and _LEAD.fullmatch(found)  # else a stranger has written or deleted it
        if other or self._store.put_if(key, found, self._lead_value) != self._lead_value:
            raise StoreError("another node leads the check now: this one stood still for too long")

    @property
    def _lead(self) -> str:
        """The name of the node that leads, for people."""
        return _named([self._seen[0].decode("ascii", "replace").rpartition(" ")[0]])

    def _pause_saying(self, text: str, pause: float = PAUSE) -> None:
        """Wait between two reads. ``text``: what for, in words."""
        if line := self._wait.line(text, clock.now(), at_once=False):
            self._say(line)
        self._pause(pause)

    def _rest(self, text: str = "", pause: float = PAUSE) -> None:
        """Wait as ``_pause_saying`` does, and show that this node lives."""
        if clock.now() >= self._sign_due:
            self._sign_due = clock.now() + LIFE
            self._sign = self._store.put_if(self._key(f"alive/{self.arrival.id}"), self._sign, secrets.token_hex(4).encode())
        self._pause_saying(text, pause)

    def _may_come(self, missing: Collection[str]) -> bool:
        """Return whether one of the ``missing`` nodes may still bring what the lead waits for: it has shown a sign of life lately."""
        now = clock.now()
        if due := [id for id in missing if now >= self._look_due.get(id, 0.0)]:
            found = self._store.get([self._key(f"alive/{id}") for id in due])
            for id in due:
                self._look_due[id], sign = now + LIFE, found.get(self._key(f"alive/{id}"))
                if id not in self._signs or self._signs[id][0] != sign:
                    self._signs[id] = sign, now
        return any(now - self._signs[id][1] <= STALE for id in missing)

    def _delete(self, names: tuple[str, ...]) -> None:
        for name in names:
            for key in self._store.under(self._key(name)) if name.endswith("/") else (self._key(name),):
                self._store.delete(key)

    def _all(self, below: str, kind: type[T]) -> dict[str, T]:
        """Return the records below a key, by id."""
        return self._parsed(below, kind, self._store.under(self._key(below)))

    def _parsed(self, below: str, kind: type[T], values: dict[str, bytes]) -> dict[str, T]:
        """Return the records of ``values``, by id. Of each that cannot be read there is a line in ``unreadable``."""
        found: dict[str, T] = {}
        for key, value in values.items():
            try:
                id, record = key.removeprefix(self._key(below)), self._codec.decode(key, value, kind)
                if not _belongs(record, id):
                    raise BadRecord(f"{key}: not the record of a node of that name")
                found[id] = record
            except BadRecord as error:
                if (line := str(error)) not in self.unreadable and len(self.unreadable) < 100:
                    self.unreadable.append(line)
        return found

    def _put(self, name: str, record: object, packed: Callable[[bytes], bytes] = bytes) -> bytes:
        value = packed(self._codec.encode(self._key(name), record))
        if self._store.put_if(self._key(name), None, value) != value:
            raise StoreError(f"another node has written {self._key(name)}")
        return value

    def _decode(self, name: str, value: bytes, kind: type[T]) -> T:
        try:
            return self._codec.decode(self._key(name), value, kind)
        except BadRecord as error:
            raise StoreError(str(error)) from None

    def _key(self, name: str) -> str:
        return self._prefix + name


def _named(ids: Collection[str]) -> str:
    """Return the names in the ids of nodes, for people; of many only MOST_NAMES."""
    names = sorted(urllib.parse.unquote(id.rpartition("-")[0] or id) for id in ids)
    more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return clip(", ".join(names[:MOST_NAMES]) + more)


def _belongs(record: Any, id: str) -> bool:
    """Tell whether a record that parses is that of the node ``id``, and can be worked with: anybody may have written it."""
    ports = (*record.ports, record.meet or 1) if isinstance(record, Arrival) else ()
    addressed = net.is_number(record.address) if isinstance(record, Arrival) else True
    return bool(record.id == id and addressed and len(ports) <= MOST_PORTS and all(0 < port < 1 << 16 for port in ports))


def _order(arrival: Arrival) -> tuple[bool, int, str, str]:
    """Return what the nodes are sorted by: the host of the store first, then rank and name."""
    return not arrival.hosting, arrival.rank if arrival.rank is not None else 1 << 20, arrival.name, arrival.id
