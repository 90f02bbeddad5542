"""Every node reports the failure that caused the others, whichever worker ended first.

Set BLAME_TRIES to repeat what depends on chance more often than the suite does.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import time
from pathlib import Path

import pytest

from elastirun.agent.failures.missing_module import explain_missing_module
from elastirun.agent.processes.process import Process
from elastirun.agent.processes.spawn import WorkerSpec
from tests.support.cluster import Cluster, Worker

TRIES = int(os.environ.get("BLAME_TRIES", "0"))

FAILING = """
import ctypes, os, signal, sys
if os.environ["RANK"] not in {culprits}:
    signal.pause()
{failure}
"""
WRAPPER = """#!/bin/bash
case $RANK in
    {culprits}) exec cat /no/such/weights ;;
    *) exec sleep 600 ;;
esac
"""
KINDS = {  # the failing code, and the lines that the report must have
    "raise": ('raise ValueError("the true cause")', "    ValueError: the true cause", "(exit code 1)"),
    "exit": ('print("the true cause", file=sys.stderr)\nsys.exit(3)', "    the true cause", "(exit code 3)"),
    "segfault": ("ctypes.string_at(0)", "  how       : killed by SIGSEGV (signal 11)", "(SIGSEGV)"),
    "abort": ("os.abort()", "  how       : killed by SIGABRT (signal 6)", "(SIGABRT)"),
    "import": ("import no_such_module", "    ModuleNotFoundError: No module named 'no_such_module'", "(exit code 1, a module is missing)"),
    "wrapper": ("", "    cat: /no/such/weights: No such file or directory", "(exit code 1)"),
}


CULPRITS = {(0,): "first rank", (3,): "last rank", (0, 3): "both nodes"}
CASES = [(kind, culprits) for kind in KINDS for culprits in CULPRITS if culprits == (3,) or kind in ("raise", "segfault")]


@pytest.mark.daily(5)
@pytest.mark.parametrize(("kind", "culprits"), CASES, ids=[f"{kind}-{CULPRITS[culprits]}" for kind, culprits in CASES])
def test_forty_lines_of_every_node_have_the_cause_and_the_rank(nodes: Cluster, kind: str, culprits: tuple[int, ...]) -> None:
    failure, cause, code = KINDS[kind]
    if kind == "wrapper":
        nodes.script.write_text(WRAPPER.format(culprits="|".join(map(str, culprits))))
        nodes.script.chmod(0o700)
    else:
        nodes.script.write_text(FAILING.format(culprits=[str(rank) for rank in culprits], failure=failure))
    options = ("--no-python",) if kind == "wrapper" else ()
    agents = [nodes.agent(i, *options, nnodes="2", nproc=2) for i in (1, 2)]
    assert [nodes.ends(agent) for agent in agents] == [1, 1]
    tails = [nodes.out(i).splitlines()[-40:] for i in (1, 2)]
    verdicts = [next(line for line in tail[-10:] if line.startswith("  reason    : ")) for tail in tails]
    assert verdicts[0] == verdicts[1], "the same verdict everywhere"
    for tail in tails:
        assert cause in tail and code in verdicts[0] and "  restarts used: 0 of 0" in tail
        ranks = [
            rank for rank in culprits if f"  rank      : {rank} (local_rank: {rank % 2})" in tail and f": rank {rank} on " in verdicts[0]
        ]
        assert len(ranks) == 1, "\n".join(tail)


@pytest.mark.parametrize(
    ("left", "shown"),
    [
        (
            '{"message": {"message": "m", "extraInfo": {"py_callstack": "Traceback\\nValueError: kept", "timestamp": "1"}}}',
            "ValueError: kept",
        ),
        ('{"message": {"message": "m", "extraInfo": {"py_callst', "said on stderr"),
        ("[" * 3_000_000, "said on stderr"),
    ],
    ids=["record", "torn", "huge"],
)
def test_the_error_file_is_shown_when_it_is_whole(nodes: Cluster, left: str, shown: str) -> None:
    nodes.script.write_text(f"""
import os, sys
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write({left!r})
sys.exit("said on stderr")
""")
    assert nodes.ends(nodes.agent(1, nnodes="1")) == 1
    assert f"    {shown}" in nodes.out(1).splitlines()[-10:] and "elastirun/agent" not in nodes.out(1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#!/no/such/shell -e", "its interpreter '/no/such/shell', named in its first line, does not exist"),
        ("#! /bin/sh\r", r"its interpreter '/bin/sh\r', named in its first line, does not exist"),  # it comes from Windows
        ("#!/bin/sh", "Permission denied"),
        (None, "No such file or directory"),
    ],
)
@pytest.mark.parametrize("on_path", [False, True])
def test_a_script_whose_interpreter_is_missing_is_told_apart(tmp_path: Path, line: str | None, words: str, on_path: bool) -> None:
    script = tmp_path / "start"
    if line is not None:
        script.write_text(f"{line}\nexit 0\n")
        script.chmod(0o600 if words == "Permission denied" else 0o700)
    env = {**os.environ, "PATH": f"/no/such/folder:{tmp_path}"}
    command = "start" if on_path else str(script)
    codes: list[int] = []
    with selectors.PollSelector() as selector, open(tmp_path / "stderr", "w") as stderr:
        spec = WorkerSpec(0, 0, (command,), env)
        process = Process(spec, selector, lambda _, code: codes.append(code), stderr=stderr.fileno())
        while not codes:
            for key, mask in selector.select():
                key.data(mask)
        process.reap()
    assert (tmp_path / "stderr").read_text() == f"elastirun: cannot run {command}: {words}\n"
    assert codes == [126 if words == "Permission denied" else 127]


# ---- victims that end before their culprit

ACTOR = """
import json, os, signal, socket, sys, time
def interrupted(signum, frame):
    raise ValueError("this came of the agent's signal")
signal.signal(signal.SIGTERM, interrupted)
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
s.sendall(json.dumps({**os.environ, "pid": os.getpid()}).encode() + b"\\n")
when, part = s.makefile().readline().split()
time.sleep(max(0.0, float(when) - time.monotonic()))
class DistNetworkError(RuntimeError): ...
if part == "gloo":
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5343")
if part == "reset":
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5343: Connection reset by peer")
if part == "store":
    raise DistNetworkError("recvValue failed on SocketImpl(fd=3): Failed to recv, got 0 bytes. Connection was likely closed.")
if part == "socket":
    raise ConnectionResetError(104, "Connection reset by peer")
if part == "watchdog":
    print("[rank2]:[E ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
    os.abort()
if part == "culprit":
    raise ValueError("the true cause")
if part == "lingerer":
    import atexit, time
    atexit.register(time.sleep, 600)  # pause would end at the signal for stacks
    raise ValueError("the true cause")
if part == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
"""
VICTIMS = ("gloo", "reset", "store", "socket", "watchdog")
BESIDE = {"same node": lambda rank, other: rank // 2 == other // 2, "other node": lambda rank, other: rank // 2 != other // 2}


@pytest.fixture
def stage(nodes: Cluster) -> Cluster:
    """Start two nodes with two workers each, which are restarted after every failure. The test chooses how each worker fails."""
    nodes.script.write_text(ACTOR)
    for i in (1, 2):
        nodes.agent(i, "--max-restarts=1000", "--set=restart-pause=0", nnodes="2", nproc=2)
    return nodes


def play(stage: Cluster, workers: list[Worker], parts: dict[int, tuple[float, str]]) -> tuple[str, list[Worker]]:
    """Let each rank fail in the given way after the given seconds. Returns the reason for the next round, and its workers."""
    begin = time.monotonic() + 0.05
    for rank, (after, part) in parts.items():
        workers[rank].tell(f"{begin + after} {part}")
    following = stage.round(4, after=workers[0].round)
    return following[0].env["ELASTIRUN_ROUND_REASON"], following


def test_a_victim_that_dies_20_ms_before_its_culprit_is_never_blamed(stage: Cluster) -> None:
    workers = stage.round(4)
    for number in range(TRIES or 6):
        culprit = number % 4
        others = [rank for rank in range(4) if rank != culprit]
        if number % 3:
            others = [rank for rank in others if (rank // 2 == culprit // 2) == (number % 3 == 1)]
        parts = {rank: (0.0, VICTIMS[number % len(VICTIMS)]) for rank in others}
        parts[culprit] = (0.02, "crash" if number % 5 == 4 else "culprit")
        reason, workers = play(stage, workers, parts)
        told = rf"rank {culprit} on \S+ failed \(\S.*\)(: ValueError: the true cause)?"
        assert re.fullmatch(told, reason), f"try {number}, {parts}: {reason}\n{stage.everything()}"


def test_a_culprit_that_lingers_after_its_traceback_is_blamed(stage: Cluster) -> None:
    """Its agent stops it like the workers that did not fail."""
    workers = stage.round(4)
    for culprit, victim in ((3, 2), (0, 3)):
        reason, workers = play(stage, workers, {culprit: (0.0, "lingerer"), victim: (0.02, "gloo")})
        assert f"rank {culprit} on " in reason and "after it had shown an exception of its own" in reason, stage.everything()


def test_what_a_worker_says_after_our_signal_is_not_held_against_it(stage: Cluster) -> None:
    """Every worker here raises an exception when it gets SIGTERM."""
    workers = stage.round(4)
    reason, workers = play(stage, workers, {2: (0.0, "gloo")})
    assert reason.startswith("rank 2 on ") and "perhaps for having lost its peers" in reason, "a victim, for want of anybody else"
    for agent in stage.agents:
        agent.send_signal(signal.SIGTERM)


# ---- the same failure again and again


@pytest.mark.parametrize(
    ("options", "rounds", "words"),
    [
        (("--max-restarts=2",), 3, ("restarts used: 2 of 2", "--max-restarts=2 is spent", "it was the same failure 3 times in a row")),
        (("--max-restarts=5", "--fail-fast"), 2, ("restarts used: 1 of 5", "--fail-fast: ", "it was the same failure 2 times in a row")),
    ],
)
def test_the_report_says_how_often_it_was_the_same_failure(
    nodes: Cluster, options: tuple[str, ...], rounds: int, words: tuple[str, ...]
) -> None:
    agents = [nodes.agent(i, *options, "--set=restart-pause=0", nnodes="2") for i in (1, 2)]
    last = 0
    for _ in range(rounds):
        workers = nodes.round(2, after=last)
        last = workers[0].round
        workers[1].tell("raise no such data")
    assert [nodes.ends(agent) for agent in agents] == [1, 1]
    for i in (1, 2):
        last_words = "\n".join(nodes.out(i).splitlines()[-10:])
        assert [text for text in words if text not in last_words] == [], last_words


# ---- with a real process group

REAL = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, culprit = dist.get_rank(), int(os.environ["ELASTIRUN_ROUND"]) % 2
tensor = torch.ones(1000)
dist.all_reduce(tensor)
if rank == culprit:
    raise ValueError(f"the true cause is rank {rank}")
while True:
    dist.all_reduce(tensor)
"""


def test_a_real_process_group_blames_who_raised(nodes: Cluster) -> None:
    pytest.importorskip("torch")
    nodes.script.write_text(REAL)
    rounds = min(TRIES, 10) or 1
    agent = nodes.agent(1, f"--max-restarts={rounds - 1}", "--set=restart-pause=0", nnodes="1", nproc=2)
    assert nodes.ends(agent, timeout=60.0 + 30 * rounds) == 1
    blamed = re.findall(r"^elastirun: round \d+: .*\(rank (\d) on .*\)$", nodes.out(1), re.MULTILINE)
    assert blamed == [str(number % 2) for number in range(1, rounds)]
    last_words = nodes.out(1).splitlines()[-20:]  # torch may add an abort of its own to a traceback
    assert f"    [rank{rounds % 2}]: ValueError: the true cause is rank {rounds % 2}" in last_words, nodes.everything()


PYTHON, ACTIVE = "/venv/bin/python", "/other"
ONE = f"a module is missing (for {PYTHON})"
OTHER = f"a module is missing (for {PYTHON}, not of the active environment {ACTIVE} ({{}}): set PYTHON_EXEC={ACTIVE}/bin/python)"


@pytest.mark.parametrize(
    ("words", "environ", "note"),
    [
        ("ModuleNotFoundError: No module named 'peft'", {}, ONE),
        (f"{PYTHON}: No module named peft", {}, ONE),
        (f"{PYTHON}: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')", {}, ONE),
        (f"{PYTHON}: No module named json.__main__; 'json' is a package and cannot be directly executed", {}, ""),
        ("ValueError: no data", {"VIRTUAL_ENV": ACTIVE}, ""),
        ("ModuleNotFoundError: No module named 'peft'", {"VIRTUAL_ENV": "/venv/"}, ONE),
        ("ModuleNotFoundError: No module named 'peft'", {"VIRTUAL_ENV": ACTIVE}, OTHER.format("VIRTUAL_ENV")),
        ("ModuleNotFoundError: No module named 'peft'", {"CONDA_PREFIX": ACTIVE}, OTHER.format("CONDA_PREFIX")),
        ("ModuleNotFoundError: No module named 'peft'", {"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": ACTIVE}, ONE),
    ],
)
def test_a_missing_module_names_the_interpreter_and_the_active_environment(words: str, environ: dict[str, str], note: str) -> None:
    assert explain_missing_module([words], PYTHON, environ) == note


@pytest.mark.parametrize("python_exec", [False, True])
def test_the_report_names_the_python_that_lacks_a_module(nodes: Cluster, python_exec: bool) -> None:
    python = sys.executable
    nodes.env |= {"VIRTUAL_ENV": "/no/such/env"}
    if python_exec:
        python = str(nodes.tmp_path / "python")
        os.symlink(sys.executable, python)
        nodes.env |= {"PYTHON_EXEC": python}
    assert nodes.ends(nodes.launch(1, "-m", "nosuch.module")) == 1
    assert f"  how       : exit code 1, a module is missing (for {python}, not of the active environment /no/such/env" in nodes.out(1)
