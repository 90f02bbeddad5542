"""The verdict on each node, from the facts and the measurements of all. Pure. The limits are generous: a sound node gets no finding."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from elastirun.agent.check import between, own_findings
from elastirun.agent.check.between import Way
from elastirun.agent.check.records import Arrival, Finding, Measured, NodeReport, Result

OK, WARNING, BAD = "ok", "warning", "bad"
MOST_FINDINGS = 1000  # in a result; a table of a few shows as much


def judge(
    arrivals: Sequence[Arrival],
    measured: Mapping[str, Measured],
    peers: Mapping[str, Sequence[str]],
    least: int,
    unreadable: Sequence[str],
    more: Sequence[Finding] = (),
) -> Result:
    """Return the result of a check.

    ``arrivals``: all nodes in the order of the roster. ``measured``: by id; a node that has ended is missing. ``peers``: the nodes to which
    each was to measure the way. ``least``: how many nodes the job needs. ``unreadable``: lines on nodes whose records cannot be read.
    ``more``: findings that are known before.
    """
    names = Counter(one.name for one in arrivals)
    arrivals = [replace(one, name=f"{one.name} ({one.address})") if names[one.name] > 1 else one for one in arrivals]
    of = {one.id: one for one in arrivals}
    known = {id: found for id, found in measured.items() if id in of and {link.peer for link in found.links} <= of.keys()}
    there = {id: _of_those(found, known.keys()) for id, found in known.items()}  # who has ended is named once
    tried = [Way(id, peer) for id in known for peer in peers.get(id, ()) if peer in known]
    links = [(id, link) for id, found in known.items() for link in found.links]
    offsets = between.clock_offsets(arrivals, links)
    matmuls = {id: max(one.matmul for one in found.collectives) for id, found in known.items() if found.collectives}
    losses = [*between.lossy(of, links, tried)]
    findings = [
        *more,
        *(finding for one in arrivals for finding in own_findings.of_node(one)),
        *own_findings.beside_others(arrivals, matmuls),
        *_absent(arrivals, known, least, unreadable),
        *between.unreached(of, there, tried),
        *losses,
        *between.clocks(of, offsets),
        *between.names(of, known),
        *between.folders(of, known, tried),
        *between.rates(of, links, tried, {name for finding in losses for name in finding.nodes}),
        *between.collectives(of, there),
    ][:MOST_FINDINGS]
    out, doubtful = excluded([one.name for one in arrivals], findings), {name for finding in findings for name in finding.nodes}
    reports = []
    for one in arrivals:
        own = [link for id, link in links if id == one.id]
        reports.append(
            NodeReport(
                id=one.id,
                name=one.name,
                address=one.address,
                verdict=BAD if one.name in out else WARNING if one.name in doubtful else OK,
                facts=one.facts,
                round_trip=_median(link.round_trip for link in own if not link.error),
                rate=_median(link.rate for link in own if link.rate),
                offset=round(offsets.get(one.id, 0.0), 6),
                matmul=matmuls.get(one.id, 0.0),
            )
        )
    return Result(tuple(reports), tuple(findings))


def excluded(names: Sequence[str], findings: Iterable[Finding]) -> set[str]:
    """Return the nodes that should not take part: each that has a bad finding of its own, and of each pair one, as few as possible.

    ``names``: in the order of the roster. Of a pair, the one that comes later goes, so the host of the store is the last to go.
    """
    bad = [finding.nodes for finding in findings if finding.bad and finding.nodes]
    out = {nodes[0] for nodes in bad if len(nodes) == 1}
    while pairs := [nodes for nodes in bad if not out & {*nodes}]:
        count = Counter(name for nodes in pairs for name in nodes)
        out.add(max(count, key=lambda name: (count[name], names.index(name) if name in names else -1)))
    return out


def _absent(arrivals: Sequence[Arrival], measured: Mapping[str, Measured], least: int, unreadable: Sequence[str]) -> Iterator[Finding]:
    """Yield which nodes have not come, or have come and said no more."""
    for line in unreadable:
        yield Finding("unreadable", (), line, "give all nodes the same --token-file, and the same version of elastirun")
    if len(arrivals) < least:
        ranks = {one.rank for one in arrivals}
        which = f" (node rank {', '.join(str(rank) for rank in range(least) if rank not in ranks)})" if None not in ranks else ""
        count = least - len(arrivals)
        here = f"here {'is' if len(arrivals) == 1 else 'are'} {', '.join(one.name for one in arrivals[:8])}"
        text = f"{count} of {least} nodes {'has' if count == 1 else 'have'} not come{which}; {here}"
        yield Finding("missing", (), text, "start elastirun check there, too; its lines say why if it cannot come")
    for one in arrivals:
        if one.id not in measured:
            yield Finding("silent", (one.name,), "it has come, and then sent nothing more", "look at its output")


def _of_those(found: Measured, ids: Collection[str]) -> Measured:
    """Return what was measured of the nodes ``ids``, and of this node itself."""
    reduced = tuple(one for one in found.collectives if not one.peer or one.peer in ids)
    return replace(found, links=tuple(link for link in found.links if link.peer in ids), collectives=reduced)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 3) if found else 0.0
