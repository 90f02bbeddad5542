"""What reaches the console and the files of real agents, and a console that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agent_lines import without_heads
from tests.support.cluster import PATIENCE, WORKER, Cluster
from tests.support.left_behind import own_files

ROOT = Path(__file__).parents[2]
RANKS, LINES, SIZE = 4, 10_000, 2000

TALKER = f"""
import os, sys
rank, stream = os.environ["RANK"], sys.argv[1]
body = "abcd"[int(rank)] * {SIZE}
file = getattr(sys, stream)
for i in range({LINES}):
    print(rank, i, body, sep=":", file=file, flush=True)  # a line that is begun and goes on after half a second makes two
"""

# Fills the console until nobody takes any more, says so, and goes on writing; SIGTERM tells it to save its work.
STUCK = """
import os, select, signal, socket, sys
fd, size = int(sys.argv[1]), int(sys.argv[3])

def save(signum, frame):
    for _ in range(size):
        os.write(fd, b"saving\\n" * 1000)
    with open(sys.argv[2], "w") as file:
        file.write("saved")
    os.write(fd, b"saved\\n" * 1000)
    os._exit(0)

s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["TEST_SOCKET"])
if os.environ["RANK"] == "1":
    s.sendall(b'{"RANK": "1"}\\n')
    s.recv(1)
    sys.exit("rank 1 is broken")
signal.signal(signal.SIGTERM, save)
poller = select.poll()
poller.register(fd, select.POLLOUT)
while poller.poll(500):
    os.write(fd, b"x" * 999 + b"\\n")
s.sendall(b'{"RANK": "0"}\\n')
while True:
    os.write(fd, b"y" * 999 + b"\\n")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "elastirun", *arguments]


def run(nodes: Cluster, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), cwd=ROOT, env=nodes.env, capture_output=True, timeout=5 * PATIENCE, umask=0)


def script(nodes: Cluster, code: str) -> str:
    nodes.script.write_text(code)
    return str(nodes.script)


def one_run(folder: Path) -> dict[str, str]:
    """Every log file of the latest run below ``folder``."""
    (latest,) = (folder / ".latest").iterdir()
    return {str(path.relative_to(latest)): path.read_text() for path in latest.rglob("*.log*")}


# ---- lines


@pytest.mark.parametrize(
    ("options", "stream", "prefix"),
    [
        (["--tee=3"], "stdout", True),
        (["--tee=3", "--log-dir=/dev/null"], "stdout", True),
        ([], "stderr", False),
    ],
    ids=["teed", "console alone", "plain stderr"],
)
def test_no_line_is_torn_and_each_rank_keeps_its_order(nodes: Cluster, options: list[str], stream: str, prefix: bool) -> None:
    host = os.uname().nodename
    done = run(nodes, f"--nproc-per-node={RANKS}", *options, script(nodes, TALKER), stream)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = without_heads(getattr(done, stream).decode()).splitlines()
    lines = [line for line in lines if not line.startswith("elastirun: ")]
    assert len(lines) == RANKS * LINES
    for rank in range(RANKS):
        before = f"{host}:{rank}> " if prefix else ""
        body = "abcd"[rank] * SIZE
        mine = [line for line in lines if line.startswith(f"{before}{rank}:")]
        assert mine == [f"{before}{rank}:{i}:{body}" for i in range(LINES)]


def test_a_line_that_is_only_begun_is_shown_in_time(nodes: Cluster) -> None:
    agent = nodes.launch(1, script(nodes, "import os\nos.write(2, b'Loading...')\n" + WORKER))
    worker = nodes.worker()
    nodes.says(1, "Loading...")
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0 and nodes.out(1).endswith("Loading...")


# ---- who is shown


def test_the_first_and_the_last_rank_of_the_job_are_shown_and_all_are_kept(nodes: Cluster) -> None:
    hello = "import os, sys\nfor file in (sys.stdout, sys.stderr): print(file.name, os.environ['RANK'], file=file, flush=True)\n"
    script(nodes, hello + WORKER)
    options = ("--show=0,-1", "--redirects=0", "--tee=1")
    agents = [nodes.agent(i, *options, f"--log-dir={nodes.tmp_path}/logs{i}", nnodes="2", nproc=2) for i in (1, 2)]
    nodes.round(4)[1].tell("raise rank 1 is broken")
    assert [nodes.ends(agent) for agent in agents] == [1, 1]
    console = nodes.out(1) + nodes.out(2)
    for name in ("> <stdout>", "\n<stderr>"):
        assert [f"{name} {rank}\n" in "\n" + console for rank in range(4)] == [True, False, False, True]
    kept = "".join(text for i in (1, 2) for text in one_run(nodes.tmp_path / f"logs{i}").values())
    assert all(f"<stdout> {rank}\n" in kept for rank in range(4))
    for i in (1, 2):
        assert "rank 1 is broken" in nodes.out(i), "the report is for all"


# ---- files


def test_nothing_is_left_where_nothing_was_asked_for(nodes: Cluster) -> None:
    before = {*own_files(nodes.tmp_path), nodes.script.name}
    done = run(nodes, script(nodes, "print('done')"))
    assert (done.returncode, done.stdout) == (0, b"done\n")
    assert set(own_files(nodes.tmp_path)) == before


@pytest.mark.parametrize("option", ["--redirects=1", "--tee=0:1"])
def test_where_the_logs_are_is_said_when_no_folder_was_named(nodes: Cluster, option: str) -> None:
    done = run(nodes, option, script(nodes, "print('done')"))
    (folder,) = nodes.tmp_path.glob("elastirun_*")
    assert f"elastirun: no --log-dir given: the workers' logs are kept in {folder}\n" in done.stderr.decode()
    assert (folder / "attempt_0" / "0" / "stdout.log").read_text() == "done\n"


def test_logs_are_for_the_owner_alone_and_each_round_has_its_own(nodes: Cluster) -> None:
    code = "import os, sys\nprint(os.environ['ELASTIRUN_ROUND'])\nsys.exit(os.environ['ELASTIRUN_ROUND'] == '1')"
    folder = nodes.tmp_path / "new" / "logs"
    nodes.env["PET_LOG_LIMIT"] = "64K"
    done = run(nodes, "--max-restarts=1", "-r3", f"--log-dir={folder}", script(nodes, code))
    assert done.returncode == 0, done.stderr
    kept = one_run(folder)
    assert (kept["attempt_0/0/stdout.log"], kept["attempt_1/0/stdout.log"]) == ("1\n", "2\n")
    assert (folder / ".latest" / os.uname().nodename / "events.jsonl").exists()
    for path in [folder.parent, folder, *folder.rglob("*")]:
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_logs_may_be_for_the_group_and_keep_the_folders_group(nodes: Cluster) -> None:
    folder = nodes.tmp_path / "logs"
    folder.mkdir(mode=0o2750)
    folder.chmod(0o2750)
    line = command("-r3", "--set=log-mode=640", f"--log-dir={folder}", script(nodes, "print(1)"))
    done = subprocess.run(line, cwd=ROOT, env=nodes.env, umask=0o077, timeout=PATIENCE)
    assert done.returncode == 0
    for path in folder.rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o7777 == (0o2750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("option", ["--redirects=3", "--tee=3"])
def test_no_stream_takes_more_than_twice_the_limit(nodes: Cluster, option: str) -> None:
    code = """
import sys
for i in range(4000):
    print("line", i, "x" * 80, file=sys.stderr)
sys.exit("the last words")
"""
    folder = nodes.tmp_path / "logs"
    done = run(nodes, option, f"--log-dir={folder}", "--log-limit=100K", script(nodes, code))
    kept = one_run(folder)
    now, before = kept["attempt_0/0/stderr.log"], kept["attempt_0/0/stderr.log.1"]
    assert max(len(now), len(before)) <= 100 << 10
    *lines, last = (before + now).splitlines()
    assert last == "the last words" and len(lines) > 1000
    assert lines == [f"line {i} {'x' * 80}" for i in range(4000 - len(lines), 4000)]
    report = done.stderr.decode()
    assert done.returncode == 1 and "line 3990 " in report and report.rindex("the last words") > report.rindex("FAILED")


# ---- a console that nobody reads


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("end", "fd", "options"),
    [("signal", 1, ["--tee=3"]), ("signal", 1, []), ("signal", 2, []), ("failure", 1, []), ("failure", 2, ["--tee=3"])],
)
def test_a_worker_can_save_its_work_although_nobody_reads_the_console(nodes: Cluster, end: str, fd: int, options: list[str]) -> None:
    """The console is a pipe. The agent passes on what workers say and drops it; to stdout without tee they write themselves."""
    dropped = fd == 2 or bool(options)
    saved, log = nodes.tmp_path / "saved", nodes.tmp_path / "agent0.out"
    nobody, pipe = os.pipe()
    with open(log, "w") as file:
        streams = {"stdout": pipe if fd == 1 else file, "stderr": file if fd == 1 else pipe}
        arguments = [*options, "--log-dir=/dev/null", "--grace=30", "--nproc-per-node=2", script(nodes, STUCK), str(fd)]
        arguments += [str(saved), "500" if dropped else "5"]
        agent = subprocess.Popen(command(*arguments), cwd=ROOT, env=nodes.env, text=True, **streams)  # type: ignore[call-overload]
    os.close(pipe)
    nodes.agents.append(agent)
    workers = {worker.rank: worker for worker in (nodes.worker(), nodes.worker())}
    if end == "signal":
        agent.send_signal(signal.SIGTERM)
    else:
        workers[1].tell("break")
    workers[0].await_death()
    assert saved.read_text() == "saved"
    assert nodes.ends(agent) == (143 if end == "signal" else 1)
    if fd == 1 and dropped:
        assert "elastirun: nobody read stdout while the workers were stopping; " in log.read_text()
    os.close(nobody)
