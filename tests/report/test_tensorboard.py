"""Scalars for TensorBoard: what is written, and that TensorBoard itself reads it, where it is installed."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from elastirun.report import clocks, reader, story, tensorboard
from tests.report.events import NOON, Agent, two_nodes
from tests.report.test_page import Run, run, save

__all__ = ["run"]  # the fixture

Scalars = dict[str, list[tuple[float, int, float]]]  # by tag: time in seconds, step, value


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def message(data: bytes) -> dict[int, bytes | int]:
    """Return the fields of a message of protocol buffers by number; those of 4 and 8 bytes as they are."""
    found: dict[int, bytes | int] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            found[key >> 3], at = varint(data, at)
            continue
        length, at = varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        found[key >> 3], at = data[at : at + length], at + length
    return found


def masked(data: bytes) -> int:
    crc = tensorboard.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def read(data: bytes) -> Scalars:
    """Read a file by the description of the format, and check each checksum."""
    found: Scalars = {}
    at, records = 0, []
    while at < len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        body = data[at + 12 : at + 12 + length]
        assert crc == masked(data[at : at + 8]) and struct.unpack_from("<I", data, at + 12 + length) == (masked(body),)
        records.append(message(body))
        at += length + 16
    assert records[0][3] == b"brain.Event:2"
    for one in records[1:]:
        value = message(message(one[5])[1])  # type: ignore[arg-type]
        moment = struct.unpack("<d", one[1])[0] - NOON  # type: ignore[arg-type]
        found.setdefault(value[1].decode(), []).append((moment, one[2], *struct.unpack("<f", value[2])))  # type: ignore[union-attr, arg-type]
    return found


def scalars(folder: Path, agents: list[Agent]) -> dict[str, Scalars]:
    save(folder, agents)
    aligned = clocks.align(reader.read([str(folder)]).events)
    return {name: read(data) for name, data in tensorboard.runs(story.tell(aligned), aligned).items()}


def test_the_checksum_is_castagnolis() -> None:
    assert (tensorboard.crc32c(b"123456789"), tensorboard.crc32c(b"")) == (0xE3069283, 0)


def test_the_job_and_each_node_are_a_run(tmp_path: Path) -> None:
    found = scalars(tmp_path, two_nodes())
    assert sorted(found) == ["elastirun", "elastirun/a", "elastirun/b"]
    job = found["elastirun"]
    assert [(round(at), value) for at, _, value in job["elastirun/world_size"]][:3] == [(10, 4.0), (50, 0.0), (55, 4.0)]
    assert [value for _, _, value in job["elastirun/rounds_ended_early"]] == [1.0, 2.0, 3.0]
    assert {*found["elastirun/a"]} == {"elastirun/steps_per_second"} and found["elastirun/a"]["elastirun/steps_per_second"][0][2] == 10.0


def test_goodput_is_the_part_of_all_time_so_far_and_at_last_that_of_the_report(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).spent(50, 1, starting=10, training=30).start(60, 2).spent(80, 2, training=20).end(80, 80)
    points = scalars(tmp_path, [a])["elastirun"]["elastirun/goodput"]
    assert [(at, round(value, 4)) for at, _, value in points] == [(50.0, 30 / 50), (80.0, 50 / 80)]


def test_where_steps_are_numbered_they_are_the_axis_and_never_go_back(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1)
    for at, step in ((20, 100), (30, 200), (40, 150), (50, 250)):
        a.at(at, "steps", round=1, steps=step, step=step, steps_per_second=10.0)
    found = scalars(tmp_path, [a.end(60, 60)])["elastirun/a"]["elastirun/steps_per_second"]
    assert [step for _, step, _ in found] == [100, 200, 200, 250]


def test_where_they_are_not_the_axis_is_seconds(tmp_path: Path) -> None:
    a = Agent("a-1", "a").start(10, 1).spent(50, 1, training=30).end(60, 60)
    assert [(at, step) for at, step, _ in scalars(tmp_path, [a])["elastirun/a"]["elastirun/steps_per_second"]] == [(50.0, 50)]


def test_names_of_nodes_stay_below_the_folder(tmp_path: Path) -> None:
    for i, name in enumerate(("../up", "a/b")):
        path = Agent(f"n-{i}", "plain").start(10, 1).spent(50, 1, training=30).end(60, 60).save(tmp_path / str(i)) / "events.jsonl"
        path.write_text(path.read_text().replace('"plain"', f'"{name}"'))
    aligned = clocks.align(reader.read([str(tmp_path)]).events)
    assert sorted(tensorboard.runs(story.tell(aligned), aligned)) == ["elastirun", "elastirun/__up", "elastirun/a_b"]


def test_the_command_writes_runs_and_no_page(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    answer = run("logs", "--tensorboard=runs")
    assert (answer.status, answer.err) == (0, "") and "Written: 3 runs for TensorBoard in 'runs/elastirun'" in answer.out
    files = sorted((tmp_path / "runs").rglob("*"))
    files = [path for path in files if path.is_file()]
    assert [path.parent.relative_to(tmp_path / "runs").as_posix() for path in files] == ["elastirun/a", "elastirun/b", "elastirun"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600} and not (tmp_path / "report.html").exists()
    before = [path.read_bytes() for path in files]
    assert run("logs", "--tensorboard=runs").status == 0
    assert [path.read_bytes() for path in files] == before, "the same events make the same files"


def test_an_empty_place_is_wrong_use(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    for option in ("--tensorboard", "--out"):
        answer = run("logs", f"{option}=")
        said = f"elastirun report: {option} is empty; give a path (see elastirun report --help)\n"
        assert (answer.status, answer.out, answer.err) == (2, "", said)
    assert not (tmp_path / "report.html").exists()


def test_a_place_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "logs")
    (tmp_path / "file").touch()
    answer = run("logs", "--tensorboard=file")
    assert (answer.status, answer.err.count("\n")) == (3, 1) and "give another place with --tensorboard" in answer.err


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_the_same(run: Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save(tmp_path / "logs")
    assert run("logs", "--tensorboard=runs").status == 0
    for path in (path for path in (tmp_path / "runs").rglob("*") if path.is_file()):
        accumulator = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
        accumulator.Reload()
        found = {
            tag: [(one.wall_time - NOON, one.step, one.value) for one in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
        }
        assert found == read(path.read_bytes())
