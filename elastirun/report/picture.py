"""The picture of a report, by plotly: world size, a lane per agent, step rates, over one time axis."""

from __future__ import annotations

from datetime import datetime, timezone
from html import escape
from typing import Any

from elastirun.agent.observe.node_states import WORDS, NodeState
from elastirun.report.story import Lane, Story
from elastirun.report.words import clean, seconds

BUTTONS = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]  # one of plotly's others sends the data to its makers
MOST_SEGMENTS = 30_000  # bars; a browser draws them in seconds
MOST_RATES = 50_000  # points of step rates
MOST_LANES = 400  # lanes that are drawn
LANE, MARGIN, PART = 26, 190, 130  # pixels: height of a lane, of titles, and of the other two parts


def draw(story: Story) -> tuple[str, list[str]]:
    """Return the picture as HTML with the library in it, and what it leaves out, for people. Raises ImportError without plotly."""
    import plotly.graph_objects as go
    import plotly.io
    from plotly.subplots import make_subplots

    lanes, left_out = _drawn(story)
    rows = sorted({_row(lane) for lane in lanes})
    height = max(3, len(rows)) * LANE
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=40 / (height + MARGIN + 2 * PART),
        row_heights=[PART, height, PART],
        subplot_titles=("workers of the running round", "agents", "steps per second"),
    )
    _add_world_size(figure, go, story)
    _add_lanes(figure, go, lanes, rows)
    for lane in lanes:
        figure.add_trace(_rates(go, lane), row=3, col=1)
    figure.update_layout(
        height=height + MARGIN + 2 * PART,
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        plot_bgcolor="white",
        margin={"l": 160, "r": 20, "t": 50, "b": 100},
        legend={"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom"},
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_xaxes(type="date", gridcolor="#eeeeee", range=[_date(story.begin), _date(story.end)])
    figure.update_yaxes(gridcolor="#eeeeee", rangemode="tozero", row=1, col=1)
    names = [escape(clean(f"{name} ({number + 1})" if number else name, 28)) for name, number in rows]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=names, autorange="reversed", row=2, col=1)
    figure.update_yaxes(gridcolor="#eeeeee", rangemode="tozero", row=3, col=1)
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [BUTTONS]}
    return plotly.io.to_html(figure, include_plotlyjs=True, full_html=False, config=config, div_id="timeline"), left_out


def _row(lane: Lane) -> tuple[str, int]:
    return lane.name, lane.number


def _drawn(story: Story) -> tuple[list[Lane], list[str]]:
    """Return the lanes that fit into the limits."""
    lanes: list[Lane] = []
    segments = rates = 0
    for lane in story.lanes:
        segments, rates = segments + len(lane.segments), rates + len(lane.rates)
        if len(lanes) == MOST_LANES or segments > MOST_SEGMENTS or rates > MOST_RATES:
            break
        lanes.append(lane)
    missing = len(story.lanes) - len(lanes)
    return lanes, [f"The picture shows the first {len(lanes)} agents; the tables have all."] if missing else []


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")


def _add_world_size(figure: Any, go: Any, story: Story) -> None:
    """Add the number of workers over time, and a mark for each fault."""
    times, sizes = [_date(story.begin)], [0]
    for one in story.rounds:
        times += [_date(one.begin), _date(one.begin), _date(one.end), _date(one.end)]
        sizes += [0, one.world_size, one.world_size, 0]
    figure.add_trace(
        go.Scatter(x=times, y=sizes, mode="lines", fill="tozeroy", line={"color": "#0072b2", "width": 1}, name="workers", showlegend=False),
        row=1,
        col=1,
    )
    texts = [f"{clean(one.cause)} in round {one.round}: {clean(one.reason)}; cost {seconds(one.seconds)}" for one in story.faults]
    figure.add_trace(
        go.Scatter(
            x=[_date(one.at) for one in story.faults],
            y=[0] * len(story.faults),
            mode="markers",
            marker={"symbol": "triangle-up", "size": 11, "color": WORDS[NodeState.RESTARTING].color},
            hovertext=[escape(text) for text in texts],
            hoverinfo="text",
            name="end of a round",
        ),
        row=1,
        col=1,
    )


def _add_lanes(figure: Any, go: Any, lanes: list[Lane], rows: list[tuple[str, int]]) -> None:
    """Add the states of all agents: one trace per state, so that the legend has each once."""
    places = {row: place for place, row in enumerate(rows)}
    for state, its in WORDS.items():
        found = [(lane, one) for lane in lanes for one in lane.segments if one.state == state]
        if not found:
            continue
        rounds = [f", round {one.round}" if one.round else "" for _, one in found]
        texts = [
            f"{clean(lane.name)}: {its.title} {seconds(one.seconds)}{number}. {its.means}"
            for (lane, one), number in zip(found, rounds, strict=True)
        ]
        figure.add_trace(
            go.Bar(
                orientation="h",
                base=[_date(one.begin) for _, one in found],
                x=[1000 * one.seconds for _, one in found],  # milliseconds on an axis of dates
                y=[places[_row(lane)] for lane, _ in found],
                marker={"color": its.color, "line": {"width": 0}},
                hovertext=[escape(text) for text in texts],
                hoverinfo="text",
                name=its.title,
            ),
            row=2,
            col=1,
        )
    gone = [lane for lane in lanes if not lane.outcome]
    figure.add_trace(
        go.Scatter(
            x=[_date(lane.end) for lane in gone],
            y=[places[_row(lane)] for lane in gone],
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": "black"},
            hovertext=[escape(f"{clean(lane.name)}: no further event") for lane in gone],
            hoverinfo="text",
            name="no further event",
            showlegend=bool(gone),
        ),
        row=2,
        col=1,
    )


def _rates(go: Any, lane: Lane) -> Any:
    times, rates = [_date(at) for at, _ in lane.rates], [rate for _, rate in lane.rates]
    return go.Scatter(x=times, y=rates, mode="lines+markers", name=escape(clean(lane.name, 28)), showlegend=False)
