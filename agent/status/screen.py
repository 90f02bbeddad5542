"""The text of ``elastirun status``: aligned, at most WIDTH characters wide, and as long as a screen. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from elastirun.agent.observe.step_rates import WorkerSteps
from elastirun.agent.status.job_status import JobStatus, NodeStatus
from elastirun.rendezvous.wire.codec import clip

WIDTH = 100  # characters
MOST_NODES = 16  # lines about nodes; --json has all of them
MOST_CELLS = 16  # lines about the mesh
LONGEST_NAME = 28  # characters
_END, _BOLD, _DIM, _RED, _GREEN, _YELLOW = (f"\x1b[{code}m" for code in (0, 1, 2, 31, 32, 33))
COLORS = {  # of the states of jobs and of nodes
    **dict.fromkeys(("running", "finishing", "succeeded"), _GREEN),
    **dict.fromkeys(("forming", "starting", "restarting", "joining", "stopping", "sitting_out"), _YELLOW),
    **dict.fromkeys(("failed", "lost", "absent"), _RED),
    **dict.fromkeys(("spare", "left"), _DIM),
}
_JOB_LINE = re.compile(r"(job       )(.*): (\w+)")
_NODE_LINE = re.compile(r"((?:\d+|-) +(?:[\d-]+) +)(\w+)")
_TITLE = re.compile(r"[a-z]+ +(?<=^.{10})")
_HEAD = ("NODE", "RANKS", "STATE", "HOST", "ADDRESS")


def screen(jobs: Sequence[JobStatus]) -> str:
    """Return the text for all ``jobs``, with a line between two of them."""
    return "\n\n".join("\n".join(_job(one)) for one in jobs)


def watched(jobs: Sequence[JobStatus], head: str, columns: int, lines: int) -> str:
    """Return the text for a terminal of this size: ``head``, and as many of the ``jobs`` as fit, the first ones first.

    The cursor stands in the line below the text, which therefore has one line less than the terminal.
    """
    blocks, left = [_job(one) for one in jobs], max(1, lines - 2)
    while len(blocks) > 1 and sum(len(block) + 1 for block in blocks) + (2 if len(blocks) < len(jobs) else 0) > left:
        blocks.pop()
    hidden = jobs[len(blocks) :]
    shown = [line for block in blocks for line in ("", *block)]
    room = left - (2 if hidden else 0)
    if len(shown) > room:  # one job, which is taller than the terminal
        cut = max(0, room - 1)
        shown = [*shown[:cut], f"and {len(shown) - cut} more lines (a taller window shows more)"]
    if hidden:
        names = ", ".join(f"{one.job or 'without a name'} {one.state}" for one in hidden)
        shown += ["", f"and {len(hidden)} more job{'s' * (len(hidden) > 1)}: {names}"]
    return "\n".join(clip(line, columns) for line in [head, *shown][: max(1, lines - 1)])


def painted(text: str) -> str:
    """Return the text of a screen in colours: the name of each job bold, states by how the job or node is, titles dim."""
    return "\n".join(_painted(line) for line in text.split("\n"))


def _painted(line: str) -> str:
    if found := _JOB_LINE.fullmatch(line):
        return f"{_DIM}{found[1]}{_END}{_BOLD}{found[2]}{_END}: {_state(found[3])}"
    if found := _NODE_LINE.match(line):
        return f"{found[1]}{_state(found[2])}{line[found.end() :]}"
    if (found := _TITLE.match(line)) or line.startswith(("NODE ", "and ")):
        end = found.end() if found else len(line)
        return f"{_DIM}{line[:end]}{_END}{line[end:]}"
    return line


def _state(state: str) -> str:
    color = COLORS.get(state, "")
    return f"{color}{state}{_END}" if color else state


def _job(job: JobStatus) -> list[str]:
    lines = [
        ("job", f"{job.job or 'without a name'}: {job.state}"),
        ("store", job.store),
        ("round", f"{job.round}{f': {job.reason}' if job.reason else ''}" if job.round else "none has formed yet"),
        ("ended", job.ended),
        ("nodes", _nodes(job)),
        ("wanted", f"{job.wanted} node{'s' * (job.wanted != 1)} (elastirun scale)" if job.wanted else ""),
        ("mesh", job.mesh),
        ("restarts", f"{job.failures} of {job.max_restarts} used" if job.max_restarts else ""),
        ("waiting", job.waiting or ("" if job.ended else "for nobody")),
        ("steps", _steps(job.steps)),
        *(("slow", f"rank {one.rank} computes for {one.times_median:.1f} times as long as the median rank") for one in _slow(job.steps)),
        ("live", f"{len(job.live)} here (rank {_range(job.live)}), which keep their processes when others are lost" if job.live else ""),
        ("finished", f"rank {', '.join(map(str, job.finished))} here has ended with 0" if job.finished else ""),
        *(("event", line) for line in job.events),
        *(("ignored", line) for line in job.ignored),
    ]
    return (
        [clip(f"{title:9} {text}", WIDTH) for title, text in lines if text]
        + (["", *_table(job.nodes)] if job.nodes else [])
        + _cells(job.cells)
    )


def _cells(cells: Sequence[str]) -> list[str]:
    """Return the picture of the mesh, as far as there is room."""
    more = [f"and {len(cells) - MOST_CELLS} more (--json lists all)"] if len(cells) > MOST_CELLS else []
    return ["", *(clip(line, WIDTH) for line in cells[:MOST_CELLS]), *more] if cells else []


def _nodes(job: JobStatus) -> str:
    members = sum(node.node_rank is not None for node in job.nodes)
    others = len(job.nodes) - members
    allowed = "" if job.min_nodes is None else f" (--nnodes={job.min_nodes}:{job.max_nodes})"
    if not members:
        return f"{others} here{allowed}"
    workers = f"{job.world_size} worker{'s' * (job.world_size != 1)}"
    return f"{members} in the round, {workers}{f', {others} beside it' if others else ''}{allowed}"


def _steps(workers: Sequence[WorkerSteps]) -> str:
    """Return a line about the workers on this machine that stamp their steps; empty: none does."""
    if not workers:
        return ""
    counts, ranks = [one.steps for one in workers], [one.rank for one in workers]
    rates = [one.steps_per_second for one in workers if one.steps_per_second is not None]
    rate = f", {min(rates):.3g} a second" if rates else ""
    since = min(one.seconds_since_step for one in workers)
    return f"{_range(counts)} here (rank {_range(ranks)}){rate}, the last one {since:.1f} s ago"


def _slow(workers: Sequence[WorkerSteps]) -> list[WorkerSteps]:
    return [one for one in workers if one.times_median is not None]


def _range(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _table(nodes: Sequence[NodeStatus]) -> list[str]:
    """Return the lines about nodes: all of them, or those that are not in the state of most others, and as many more as there is room."""
    usual = Counter(node.state for node in nodes).most_common(1)[0][0]
    order = sorted(range(len(nodes)), key=lambda i: (_is_usual(nodes[i], usual), i))
    shown = sorted(order[:MOST_NODES])
    rows = [_HEAD, *(_row(nodes[i]) for i in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [clip("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip(), WIDTH) for row in rows]
    hidden = Counter(nodes[i].state for i in order[MOST_NODES:])
    more = ", ".join(f"{count} {state}" for state, count in hidden.most_common())
    return [*lines, f"and {hidden.total()} more: {more} (--json lists all)"] if more else lines


def _is_usual(node: NodeStatus, usual: str) -> bool:
    return node.state == usual and not node.quiet and not node.hosts_store


def _row(node: NodeStatus) -> tuple[str, ...]:
    ranks = "-" if node.first_rank is None else str(node.first_rank)
    if node.first_rank is not None and node.workers > 1:
        ranks += f"-{node.first_rank + node.workers - 1}"
    state = f"{node.state}, silent {node.quiet:.0f} s" if node.quiet else node.state
    rank = "-" if node.node_rank is None else str(node.node_rank)
    return rank, ranks, state, clip(node.name, LONGEST_NAME), f"{node.address}{' (store)' if node.hosts_store else ''}"
