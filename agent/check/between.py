"""Findings on the ways between the nodes. A node is named where all its ways are concerned, else the pair. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastirun.agent.check.records import Arrival, Finding, Link, Measured

SLOW_RATE = 0.05  # of the median rate over TCP; nodes share switches and processors, and all measure at the same time
CLOCK_LIMIT = 5.0  # seconds; dates in logs and certificates may differ by so much without harm
LOSS, LEAST_LOST = 0.01, 3  # part of the packets that TCP sends again, and how many at least
MOST_SHOWN = 3  # names or ports in one line


@dataclass(frozen=True)
class Way:
    """A way from one node to another, by their ids. ``why``: what is wrong with it."""

    start: str
    end: str
    why: str = ""


@dataclass(frozen=True)
class SharedFault:
    """Ways with a fault in common. ``side``: they lead to ``node`` ("end"), come from it ("start"), either; or are of one "pair"."""

    side: str
    node: str
    ways: tuple[Way, ...]


def blame(faulty: Sequence[Way], tried: Sequence[Way], sides: tuple[str, ...], share: float) -> list[SharedFault]:
    """Return who has the faults: nodes with at least ``share`` of their ways faulty, to two others or more; then pairs.

    The node with the most faulty ways comes first, and its ways say nothing about the others any more.
    """
    left, rest, found = list(faulty), list(tried), []
    while True:
        best = SharedFault("", "", ())
        for side in sides:
            for node in dict.fromkeys(id for way in left for id in _of(way, side)):
                ways = [way for way in left if node in _of(way, side)]
                of_all = sum(node in _of(way, side) for way in rest)
                others = {id for way in ways for id in (way.start, way.end)} - {node}
                if len(others) > 1 and len(ways) >= share * of_all and len(ways) > len(best.ways):
                    best = SharedFault(side, node, tuple(ways))
        if not best.ways:
            break
        found.append(best)
        left = [way for way in left if best.node not in _of(way, best.side)]
        rest = [way for way in rest if best.node not in _of(way, best.side)]
    pairs: dict[frozenset[str], list[Way]] = {}
    for way in left:
        pairs.setdefault(frozenset((way.start, way.end)), []).append(way)
    return [*found, *(SharedFault("pair", "", tuple(ways)) for ways in pairs.values())]


def unreached(of: Mapping[str, Arrival], measured: Mapping[str, Measured], tried: Sequence[Way]) -> Iterator[Finding]:
    """Yield which ports are not reached, and from where."""
    faulty = [Way(id, peer, why) for id, found in measured.items() for peer, why in _errors(found.links).items()]
    for one in blame(faulty, tried, ("end", "start"), 1.0):
        start, end, why = of[one.ways[0].start], of[one.ways[0].end], one.ways[0].why
        ports = f"open the ports of {end.name} in its firewall (--port-range says which the job uses)"
        if one.side == "end":
            text, advice = f"no other node reaches {end.name} at {end.address}", f"{ports}; is that the right address (--local-addr)?"
            yield Finding("unreached", (end.name,), f"{text}: {why}", advice)
        elif one.side == "start":
            text = f"{start.name} reaches none of {_some([of[way.end].name for way in one.ways])}: {why}"
            yield Finding("unreached", (start.name,), text, "look at its routes, and its firewall's rules for what goes out")
        else:
            text = f"{start.name} does not reach {end.name} at {end.address}, but {end.name} reaches {start.name}"
            advice = f"{ports} for {start.address}"
            if len(one.ways) > 1:
                text, advice = f"{start.name} and {end.name} do not reach each other", "look at the firewalls and routes between them"
            yield Finding("unreached", (start.name, end.name), f"{text}: {why}", advice)


def lossy(of: Mapping[str, Arrival], links: Sequence[tuple[str, Link]], tried: Sequence[Way]) -> Iterator[Finding]:
    """Yield where packets are lost. ``links``: each with the node that has measured it."""
    lost = [(id, link) for id, link in links if link.sent and link.lost >= max(LEAST_LOST, LOSS * link.sent)]
    faulty = [Way(id, link.peer, f"{100 * link.lost / link.sent:.0f} % of the packets had to be sent again") for id, link in lost]
    advice = "look at the cable, the switch port, the MTU and the errors of the interface (ip -s link)"
    return _faults("loss", of, faulty, tried, "packets are lost", advice)


def clock_offsets(arrivals: Sequence[Arrival], links: Sequence[tuple[str, Link]]) -> dict[str, float]:
    """Return by how many seconds each clock is ahead of the first node's, as far as measured ways lead there."""
    steps = [(id, link.peer, link.offset) for id, link in links if not link.error]
    steps += [(peer, id, -offset) for id, peer, offset in steps]
    offsets = {one.id: 0.0 for one in arrivals[:1]}
    while new := {peer: offsets[id] + offset for id, peer, offset in steps if id in offsets and peer not in offsets}:
        offsets |= new
    return offsets


def clocks(of: Mapping[str, Arrival], offsets: Mapping[str, float]) -> Iterator[Finding]:
    """Yield whose clock differs. The round trips within which offsets were measured are much shorter than the limit."""
    usual = statistics.median_low(offsets.values()) if len(offsets) > 2 else 0.0
    for id, offset in offsets.items():
        if abs(offset - usual) > CLOCK_LIMIT:
            first = next(other for other, its in offsets.items() if abs(its - usual) <= CLOCK_LIMIT)
            names = (of[id].name,) if len(offsets) > 2 else (of[first].name, of[id].name)
            text = f"the clock of {of[id].name} is {abs(offset - usual):.0f} s {'ahead' if offset > usual else 'behind'}"
            text += f" of {'most others' if len(offsets) > 2 else of[first].name}"
            yield Finding("clock", names, text, "start chrony or ntpd there", bad=False)


def names(of: Mapping[str, Arrival], measured: Mapping[str, Measured]) -> Iterator[Finding]:
    """Yield which host names lead elsewhere. Nodes connect by address, so it is a warning; users' scripts may use names."""
    for id, found in measured.items():
        for wrong in found.names:
            if id in of and wrong.peer in of:
                peer, here = of[wrong.peer], of[id]
                text = f"on {here.name} the name {peer.host} leads to {_some(wrong.found)}, and {peer.name} has {_some(peer.addresses)}"
                yield Finding("name", (here.name, peer.name), text, f"correct /etc/hosts of {here.name}, or its name server", bad=False)


def folders(of: Mapping[str, Arrival], measured: Mapping[str, Measured], tried: Sequence[Way]) -> Iterator[Finding]:
    """Yield which nodes have another folder than the others."""
    for path in dict.fromkeys(folder.path for one in of.values() for folder in one.facts.folders):
        failed = {one.id for one in of.values() for folder in one.facts.folders if folder.error and folder.path == path}
        ways = [way for way in tried if not {way.start, way.end} & failed]
        unseen = {(id, peer) for id, found in measured.items() for each in found.unseen if each.path == path for peer in each.peers}
        faulty = [way for way in ways if (way.start, way.end) in unseen]
        yield from _faults("folder", of, faulty, ways, f"{path} is not the same folder", "mount the same file system there on all nodes")


def rates(of: Mapping[str, Arrival], links: Sequence[tuple[str, Link]], tried: Sequence[Way], lossy_nodes: set[str]) -> Iterator[Finding]:
    """Yield which ways are much slower than the others. ``lossy_nodes``: names; ways to them are slow for that reason."""
    usual = statistics.median_low([link.rate for _, link in links if link.rate] or [0.0])
    slow = [(id, link) for id, link in links if 0 < link.rate < SLOW_RATE * usual and not {of[id].name, of[link.peer].name} & lossy_nodes]
    faulty = [Way(id, link.peer, f"{link.rate:.3g} MB/s, the median is {usual:.3g}") for id, link in slow]
    advice = "look at the speed of the interface (ethtool) and at what else uses it"
    return _faults("rate", of, faulty, tried, "the network is slow", advice, bad=False)


def collectives(of: Mapping[str, Arrival], measured: Mapping[str, Measured]) -> Iterator[Finding]:
    """Yield whose all-reduces fail. Ways on which not even a port is reached are left out: there is a finding on these."""
    closed = {frozenset((id, link.peer)) for id, found in measured.items() for link in found.links if link.error}
    done = [(id, one) for id, found in measured.items() for one in found.collectives]
    inside = {id: one.error for id, one in done if one.error and not one.peer}
    advice = "look at GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and the firewall; NCCL_DEBUG=INFO says more"
    for id, error in inside.items():
        yield Finding("collective", (of[id].name,), f"an all-reduce among the workers of this node fails: {error}", advice)
    out = {*inside, *(one.id for one in of.values() if not one.facts.torch)}
    ways = [Way(id, one.peer, one.error) for id, one in done if one.peer in of and not {id, one.peer} & out]
    ways = [way for way in ways if frozenset((way.start, way.end)) not in closed]
    yield from _faults("collective", of, [way for way in ways if way.why], ways, "an all-reduce fails", advice, share=0.9)


def _faults(
    kind: str,
    of: Mapping[str, Arrival],
    faulty: Sequence[Way],
    tried: Sequence[Way],
    what: str,
    advice: str,
    share: float = 0.6,
    bad: bool = True,
) -> Iterator[Finding]:
    """Yield a finding for each node or pair with these ways, whatever their direction."""
    for one in blame(faulty, tried, ("either",), share):
        names = (of[one.node].name,) if one.node else (of[one.ways[0].start].name, of[one.ways[0].end].name)
        why = f": {one.ways[0].why}" if one.ways[0].why else ""
        yield Finding(kind, names, f"{what} between {' and '.join((*names, 'most others')[:2])}{why}", advice, bad)


def _of(way: Way, side: str) -> tuple[str, ...]:
    return (way.start,) if side == "start" else (way.end,) if side == "end" else (way.start, way.end)


def _errors(links: Sequence[Link]) -> dict[str, str]:
    """Return by peer why its ports are not reached, in words."""
    found: dict[str, dict[str, list[int]]] = {}
    for link in links:
        if link.error:
            found.setdefault(link.peer, {}).setdefault(link.error, []).append(link.port)
    lines = {peer: [f"port {_some(list(map(str, ports)))}: {error}" for error, ports in errors.items()] for peer, errors in found.items()}
    return {peer: "; ".join(errors) for peer, errors in lines.items()}


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:MOST_SHOWN]) + (f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else "")
