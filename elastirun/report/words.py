"""The texts of a report: the paragraph at the top, and times and names in a form for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from elastirun.agent.observe.node_states import NodeState
from elastirun.report.story import Fault, Loss, Story

MOST = 300  # characters of one text on the page
MOST_COMMAND = 1000  # characters of a command
COSTS = ("until the round was over", "until the next start", "until the first step", "steps done again")  # the parts of the cost of a fault


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


def point(at: float, story: Story) -> str:
    """Return a time in UTC, with its day if the job ran on several."""
    one_day = moment(story.begin)[:10] == moment(story.end)[:10]
    return moment(at)[11 if one_day else 5 :]


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def when(story: Story) -> str:
    """Return when the agents ran, and how many."""
    begin, end = moment(story.begin), moment(story.end)
    until = end[11:] if end[:10] == begin[:10] else end
    nodes, jobs = len(story.lanes), len({lane.job for lane in story.lanes})
    agents = f"{nodes} agent{'s' * (nodes > 1)}" + (f", which had no round in common: {jobs} jobs" if jobs > 1 else "")
    return f"{begin} to {until} UTC, {seconds(story.end - story.begin)}; {agents}"


def numbers(story: Story) -> list[tuple[str, str]]:
    """Return the large numbers at the top, each with its label."""
    lost, faults = sum(loss.seconds for loss in story.losses), len(story.faults)
    known = "" if story.repeats_known else "≤ "
    return [
        (f"{known}{share(story.goodput, 1.0)}", "of the nodes' time: training that counted"),
        (seconds(lost), f"lost, of {seconds(story.total)} of all nodes"),
        ("–" if story.steps is None else f"{story.steps:,}", "steps; the workers stamp none" if story.steps is None else "steps"),
        (str(faults), "round ended early" if faults == 1 else "rounds ended early"),
    ]


def summary(story: Story) -> list[str]:
    """Return the paragraph that the command prints, in sentences."""
    job = f"Job {clean(story.about.job)}: " if story.about.job else ""
    known = "" if story.repeats_known else "At most "
    unknown = story.spent.get(NodeState.UNKNOWN, 0.0)
    killed = f"; what {share(unknown, story.total)} was is not known: no event tells of it" if unknown else ""
    return [
        f"{job}{when(story)}.",
        f"{clean(story.outcome)}.",
        f"{known}{share(story.goodput, 1.0)} of the nodes' time ({seconds(story.total)} in all) was training that counted{killed}.",
        worst(story),
    ]


def worst(story: Story) -> str:
    """Return a sentence that names the largest loss."""
    if not story.losses:
        return "No time was lost."
    loss = story.losses[0]
    cost, longest = f"{seconds(loss.seconds)} of the nodes' time ({share(loss.seconds, story.total)})", loss.longest
    if not longest.number:
        where = f"the longest on {clean(longest.why)} at {point(longest.at, story)}, {seconds(longest.seconds)}"
        return f"Most was lost to {loss.what}: {cost}; {where}."
    costliest = f"the costliest at {point(longest.at, story)}, {seconds(longest.seconds)}: {clean(longest.why)}"
    return f"Most was lost because {loss.what}, {times(loss.count)}: {cost}; {costliest}."


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
    return found


def loss_row(loss: Loss, story: Story) -> list[str]:
    """Return the cells of a loss."""
    longest, where = loss.longest, "" if loss.longest.number else f", {clean(loss.longest.why, 60)}"
    return [
        *(loss.what, seconds(loss.seconds), share(loss.seconds, story.total), str(loss.count)),
        f"{seconds(longest.seconds)} at {point(longest.at, story)}{where}",
    ]


def fault_row(fault: Fault, story: Story) -> list[str]:
    """Return the cells of a fault."""
    stopped = sum(fault.cost.get(state, 0.0) for state in (NodeState.HANGING, NodeState.STOPPING, NodeState.RESTARTING))
    others = (fault.cost.get(state, 0.0) for state in (NodeState.STARTING, NodeState.REPEATED))
    parts = [fault.seconds, fault.until_end, stopped - fault.until_end, *others]
    return [point(fault.at, story), str(fault.round), fault.cause, clean(fault.reason), *map(seconds, parts), str(fault.nodes)]
