"""Scalars for TensorBoard from the events of a job: world size, goodput and restarts of the job, and the step rate of each node. Pure.

The files are written without TensorBoard's packages: a record is a length, a message of protocol buffers with three fields, and their
checksums. See docs/decisions/0026.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastirun.report.clocks import AgentEvents
from elastirun.report.story import RUNNING, Story

RUN = "elastirun"  # the folder below that of the user's runs
MOST_POINTS = 100_000  # of one scalar
MOST_RUNS = 400  # nodes whose rates are written
VERSION = b"brain.Event:2"


@dataclass(frozen=True)
class Point:
    """One value of one scalar. ``at``: seconds since the epoch."""

    tag: str
    at: float
    value: float


class Clock:
    """Gives each moment its place on TensorBoard's axis of steps.

    That is the number of the last training step made by then, where the script numbers its steps; else whole seconds since the beginning.
    """

    def __init__(self, agents: Sequence[AgentEvents], begin: float) -> None:
        made = ((one.at, one.event.number("step")) for agent in agents for one in agent.events if one.event.kind == "steps")
        self._made = sorted((at, int(step)) for at, step in made if step is not None)
        self._begin = begin

    def steps(self, points: Iterable[Point]) -> Iterator[tuple[Point, int]]:
        """Yield the points by time, each with its step. Steps never go back, also where training did: TensorBoard might drop points."""
        made, highest = iter(self._made), 0
        following = next(made, None)
        for point in sorted(points, key=lambda point: point.at):
            while following is not None and following[0] <= point.at:
                highest, following = max(highest, following[1]), next(made, None)
            yield point, highest if self._made else max(0, int(point.at - self._begin))


def runs(story: Story, agents: Sequence[AgentEvents]) -> dict[str, bytes]:
    """Return the file of each run, by its folder below that of the user's runs."""
    clock, found = Clock(agents, story.begin), {RUN: [*_world_sizes(story), *_goodput(story), *_restarts(story)]}
    for lane in story.lanes:
        name = f"{RUN}/{_folder(lane.name)}" + (f"_{lane.number + 1}" if lane.number else "")
        if lane.rates and (name in found or len(found) <= MOST_RUNS):
            found.setdefault(name, []).extend(Point("elastirun/steps_per_second", at, rate) for at, rate in lane.rates)
    return {name: _file(story.begin, clock.steps(points)) for name, points in found.items()}


def file_name(story: Story) -> str:
    """Return the name of each file, the same each time that the same job is read."""
    return f"events.out.tfevents.{int(story.begin)}.{RUN}"


def _folder(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]|^\.+", "_", name)[:100] or "node"


# -- scalars -------------------------------------------------------------------------------------------------------------------


def _world_sizes(story: Story) -> list[Point]:
    found = []
    for one in story.rounds:
        found.append(Point("elastirun/world_size", one.begin, one.world_size))
        if one.end < story.end:  # else it may go on
            found.append(Point("elastirun/world_size", one.end, 0))
    return found[:MOST_POINTS]


def _restarts(story: Story) -> list[Point]:
    return [Point("elastirun/rounds_ended_early", fault.at, number) for number, fault in enumerate(story.faults, 1)][:MOST_POINTS]


def _goodput(story: Story) -> list[Point]:
    """Return the part of all nodes' time so far that was training that counted, at the end of each time of training."""
    changes = [(lane.begin, 1, 0) for lane in story.lanes] + [(lane.end, -1, 0) for lane in story.lanes]
    for segment in (segment for lane in story.lanes for segment in lane.segments if segment.state == RUNNING):
        changes += [(segment.begin, 0, 1), (segment.end, 0, -1)]
    found, last, nodes, training, total, counted = list[Point](), story.begin, 0, 0, 0.0, 0.0
    for at, node, trains in sorted(changes):
        total, counted, last = total + nodes * (at - last), counted + training * (at - last), at
        nodes, training = nodes + node, training + trains
        if trains < 0 and total > 0:
            found.append(Point("elastirun/goodput", at, counted / total))
    return found[:MOST_POINTS]


# -- the format ----------------------------------------------------------------------------------------------------------------


def _file(begin: float, points: Iterable[tuple[Point, int]]) -> bytes:
    """Return a file of events: records one after the other, the first of which says the version."""
    first = b"\x09" + struct.pack("<d", begin) + _text(3, VERSION)
    return _record(first) + b"".join(_record(_event(point, step)) for point, step in points)


def _event(point: Point, step: int) -> bytes:
    """Return the message ``Event`` with one scalar: wall_time = 1, step = 2, summary = 5."""
    value = _text(1, point.tag.encode()) + b"\x15" + struct.pack("<f", point.value)  # Summary.Value: tag = 1, simple_value = 2
    return b"\x09" + struct.pack("<d", point.at) + b"\x10" + _varint(step) + _text(5, _text(1, value))


def _text(number: int, data: bytes) -> bytes:
    """Return a field that has a length."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C of ``data``, masked as in TensorFlow's records, so that a checksum of checksums is no special case."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli, which Python's standard library lacks."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _entry(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_TABLE = tuple(map(_entry, range(256)))
