"""The texts of a report: the paragraph at the top, and times and names in a form for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from elastirun.agent.observe.node_states import NodeState
from elastirun.report.clocks import DELAY
from elastirun.report.story import Fault, Loss, Story

MOST = 300  # characters of one text on the page


def clean(text: str, most: int = MOST) -> str:
    """Return the text in printable characters, cut to ``most``."""
    shown = "".join(one if one.isprintable() else " " for one in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def seconds(value: float) -> str:
    """Return a duration, for example 12.3 s, 5 min 12 s, 7 h 5 min."""
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "0 %"


def moment(at: float) -> str:
    """Return a date and time in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def summary(story: Story) -> list[str]:
    """Return the paragraph at the top, in sentences."""
    nodes, took = len(story.lanes), story.end - story.begin
    jobs = len({lane.job for lane in story.lanes})
    agents = f"{nodes} agent{'s' * (nodes > 1)}" + (f", which had no round in common: {jobs} jobs" if jobs > 1 else "")
    known = "" if story.repeats_known else "At most "
    unknown = story.spent.get(NodeState.UNKNOWN, 0.0)
    killed = f"; of {share(unknown, story.total)}, of which no event tells, this is not known" if unknown else ""
    found = [
        f"{moment(story.begin)} to {moment(story.end)} UTC, {seconds(took)}; {agents}.",
        f"{clean(story.outcome)}.",
        f"{known}{share(story.goodput, 1.0)} of the nodes' time ({seconds(story.total)} in all) was training that counted{killed}.",
        worst(story),
    ]
    return found


def worst(story: Story) -> str:
    """Return a sentence that names the largest loss."""
    if not story.losses:
        return "No time was lost."
    loss = story.losses[0]
    cost = f"{seconds(loss.seconds)} of the nodes' time ({share(loss.seconds, story.total)})"
    if loss.count is None or loss.longest is None:
        return f"Most was lost to: {loss.what}, {cost}."
    longest = f"the costliest at {moment(loss.longest.at)[11:]}, {seconds(loss.longest.seconds)}: {clean(loss.longest.reason)}"
    return f"Most was lost because {loss.what}, {times(loss.count)}: {cost}; {longest}."


def notes(story: Story, left_out: Sequence[str]) -> list[str]:
    """Return what a reader must know to judge the numbers."""
    found = [f"Not read: {one}" for one in left_out]
    for lane in story.lanes:
        if lane.shifted:
            by = f"{abs(lane.shifted):.1f} s {'behind' if lane.shifted > 0 else 'ahead'}"
            found.append(f"The clock of {lane.name} is {by}; its events were moved to where its rounds began on the others.")
    killed = sum(not lane.outcome for lane in story.lanes)
    if killed:
        found.append(f"{killed} of {len(story.lanes)} agents wrote no last event: they were killed, or still run.")
    if not story.recorded:
        found.append("Some agents recorded no states, as those of earlier versions do: their lanes are not accounted.")
    if not story.steps_known:
        found.append("The workers stamp no steps: their start and steps done again count as training.")
    elif not story.repeats_known:
        found.append("The workers do not tell the numbers of their steps: steps done again count as training.")
    found.append(f"Machines whose clocks differ by less than {DELAY:g} s at the start of a round that they share are not moved.")
    found.append("A node that was missing costs nothing here.")
    return found


def loss_row(loss: Loss, story: Story) -> list[str]:
    """Return the cells of a loss."""
    count = "" if loss.count is None else str(loss.count)
    longest = f"{seconds(loss.longest.seconds)} at {moment(loss.longest.at)[11:]}" if loss.longest else ""
    return [loss.what, count, seconds(loss.seconds), share(loss.seconds, story.total), longest]


def fault_row(fault: Fault) -> list[str]:
    """Return the cells of a fault."""
    columns = ((NodeState.STOPPING, NodeState.RESTARTING), (NodeState.STARTING,), (NodeState.REPEATED,))
    parts = [fault.seconds, *(sum(fault.cost.get(state, 0.0) for state in states) for states in columns)]
    return [moment(fault.at)[11:], str(fault.round), fault.cause, clean(fault.reason), *map(seconds, parts), str(fault.nodes)]
