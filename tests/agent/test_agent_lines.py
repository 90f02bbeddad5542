"""Tests of agent/output/agent_lines.py and agent/host/node_name.py."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing

from elastirun.agent.host.node_name import NodeName
from elastirun.agent.output.agent_lines import Level, LineFormat, shows_colours
from tests.support.agent_lines import HEAD, without_heads

MOMENT = 1_795_000_000.25


def test_a_line_has_level_time_and_node() -> None:
    form = LineFormat("node-a#2", "job")
    levels = [("round 1", Level.INFO), ("stopping", Level.WARNING), ("warning: x", Level.INFO), ("x", Level.ERROR)]
    for (text, level), letter in zip(levels, "IWWE", strict=True):
        line = form.line(text, level, MOMENT)
        found = HEAD.match(line)
        assert found and found[0][0] == letter and found[1] == "node-a#2" and without_heads(line) == f"elastirun: {text}"
    assert LineFormat().line("round 1", Level.INFO, MOMENT) == "elastirun: round 1"


def test_a_line_is_an_object_in_json() -> None:
    line = LineFormat("n", "j", "json", coloured=True).line("warning: Ärger\n\x1b[2J", Level.INFO, MOMENT)
    fields = {"time": "2026-11-18T11:06:40.250Z", "level": "warning", "job": "j", "node": "n", "message": "Ärger\n\x1b[2J"}
    assert json.loads(line) == fields and "\n" not in line and "\x1b" not in line


def test_colours_are_for_terminals_alone_and_no_color_turns_them_off() -> None:
    ours, theirs = os.openpty()
    read, write = os.pipe()
    try:
        assert [shows_colours(theirs, env) for env in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"})] == [True, False, False]
        assert not shows_colours(write, {})
    finally:
        for fd in (ours, theirs, read, write):
            os.close(fd)
    assert LineFormat("n", coloured=True).line("x", Level.ERROR, MOMENT).startswith("\x1b[31mE")


def test_agents_of_one_job_on_one_host_are_numbered_and_a_number_becomes_free() -> None:
    host, job = socket.gethostname(), os.urandom(8).hex()
    with closing(NodeName("", job, numbered=True)) as first, closing(NodeName("", job, numbered=True)) as second:
        assert (first.text, second.text) == (host, f"{host}#2")
        with closing(NodeName("", f"{job}x", numbered=True)) as other, closing(NodeName("gpu-7", job, numbered=True)) as named:
            assert (other.text, named.text) == (host, "gpu-7")
        with closing(NodeName("", job, numbered=False)) as alone:
            assert alone.text == host
        first.close()
        with closing(NodeName("", job, numbered=True)) as third:
            assert third.text == host
