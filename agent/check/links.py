"""Measures the ways from this node to others: whether a port is reached, by address and by name; round trips, loss, rate, clock."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Sequence

from elastirun import clock
from elastirun.agent.check.probe_server import BULK, receive, sent_again
from elastirun.agent.check.records import Arrival, Link, WrongName
from elastirun.agent.host import net
from elastirun.agent.store.at_once import at_once
from elastirun.rendezvous.wire.codec import clip

CONNECT_LIMIT = 3.5  # seconds; Linux sends the first packet again after 1 s and 3 s, so one or two may be lost
ANSWER_LIMIT = 6.0  # seconds for each answer
PINGS, PING_TIME = 200, 1.5  # small messages, and the seconds after which no more are sent
LIMIT = 9.0  # seconds for all links of a node, which are measured at the same time
FAR_FUTURE = 1e11  # seconds since 1970; no clock shows more
NAMES_LIMIT = 2.0  # seconds for looking up the names of the peers: a slow name server must not hold up the check


def measure(peers: Sequence[Arrival], secret: str) -> tuple[Link, ...]:
    """Return the links to all ports of ``peers``. Takes LIMIT seconds at most."""
    targets = [(peer, port) for peer in peers for port in peer.ports]
    found = at_once(lambda target: _measure(*target, secret), targets, LIMIT)
    late = f"no answer within {LIMIT:g} s"
    return tuple(found.get((peer, port), Link(peer.id, port, late)) for peer, port in targets)


def look_up(peers: Sequence[Arrival]) -> tuple[WrongName, ...]:
    """Return the host names of ``peers`` that lead elsewhere. Names that are unknown here do not count: nodes use addresses."""
    hosts = [peer.host for peer in peers if not net.is_number(peer.host)]
    found = at_once(net.resolve, list(dict.fromkeys(hosts)), NAMES_LIMIT)
    wrong = [
        WrongName(peer.id, tuple(addresses[:4]))
        for peer in peers
        if (addresses := found.get(peer.host, ())) and not {*addresses} & {peer.address, *peer.addresses}
    ]
    return tuple(wrong)


def _measure(peer: Arrival, port: int, secret: str) -> Link:
    began = clock.now()
    try:
        with socket.create_connection((peer.address, port), CONNECT_LIMIT) as connection:
            connection.settimeout(ANSWER_LIMIT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret.encode())
            (length,) = struct.unpack("<H", receive(connection, 2))
            if (other := receive(connection, length)) != peer.id.encode():
                return Link(peer.id, port, f"another node answers there: {clip(other.decode(errors='replace'), 100)}")
            return _measured(connection, peer.id, port, whole=port == peer.ports[0])
    except TimeoutError:
        return Link(peer.id, port, f"no answer within {clock.now() - began:.1f} s")
    except OSError as error:
        return Link(peer.id, port, clip((error.strerror or str(error)).lower(), 200))


def _measured(connection: socket.socket, peer: str, port: int, whole: bool) -> Link:
    """Return what the connection shows. ``whole``: also loss and rate, which one port per peer shows."""
    trips: list[tuple[float, float]] = []  # seconds there and back, and by how much the peer's clock is ahead
    until = clock.now() + PING_TIME
    while len(trips) < (PINGS if whole else 3) and (clock.now() < until or not trips):
        began, date = clock.now(), time.time()
        connection.sendall(b"p")
        (there,) = struct.unpack("<d", receive(connection, 8))
        if not abs(there) < FAR_FUTURE:  # also: not a number
            raise OSError("another program answers there")
        took = clock.now() - began
        trips.append((took, there - date - took / 2))
    lost, rate = 0, 0.0
    if whole:
        connection.sendall(b"l")
        lost = sent_again(connection) + struct.unpack("<I", receive(connection, 4))[0]
        began = clock.now()
        connection.sendall(b"b" + bytes(BULK))
        receive(connection, 1)
        rate = BULK / 1e6 / max(1e-6, clock.now() - began)
    shortest, offset = min(trips)
    middle = 1000 * statistics.median(took for took, _ in trips)
    return Link(peer, port, "", round(middle, 3), round(rate, 1), round(offset, 6), round(shortest / 2, 6), 2 * len(trips), lost)
