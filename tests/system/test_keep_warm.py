"""``--keep-warm``: what an earlier command has imported serves the next one, and nothing else of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.processes.preload import keep_warm
from tests.support.cluster import Cluster, dies
from tests.support.until import until
from tests.system.test_preload import PROBE

MODULE = """
import os
PID = os.getpid()
"""
SHOWS = """
import json, os, sys
import warm_module
command = sys.stdin.readline() if "stdin" in sys.argv else ""
own = {"importer": warm_module.PID, "pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd(), "argv": sys.argv, "stdin": command}
print(json.dumps({**os.environ, **own}), flush=True)
sys.exit(int(os.environ.get("TEST_EXIT", "0")))
"""


class Warm:
    """Commands with ``--keep-warm`` that preload a module of the test's own, and what they print."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes, self.count = nodes, 0
        self.folder = nodes.tmp_path / "run"
        self.folder.mkdir(mode=0o700)
        self.module = nodes.tmp_path / "modules" / "warm_module.py"
        self.module.parent.mkdir()
        self.module.write_text(MODULE)
        self.script = nodes.tmp_path / "shows.py"
        self.script.write_text(SHOWS)
        nodes.env |= {"XDG_RUNTIME_DIR": str(self.folder), "PYTHONPATH": os.pathsep.join((str(self.module.parent), *sys.path[:1]))}
        for name in ("PET_PRELOAD", "PET_KEEP_WARM"):
            nodes.env.pop(name, None)

    def words(self, *options: str, shell: str = ":") -> list[str]:
        """Return the command line. ``shell``: what a shell does before."""
        own = ("-m", "elastirun", "--keep-warm=1m", "--preload=warm_module", *options, str(self.script))
        return ["bash", "-c", f'{shell}; exec "$@"', "-", sys.executable, *own]

    def command(self, *options: str, shell: str = ":", cwd: str | Path | None = None) -> subprocess.CompletedProcess[str]:
        words = self.words(*options, shell=shell)
        return subprocess.run(words, env=self.nodes.env, text=True, capture_output=True, timeout=100, cwd=cwd)

    def shown(self, *options: str, **more: Any) -> dict[str, Any]:
        ended = self.command(*options, **more)
        assert ended.returncode == 0, ended.stderr
        return dict(json.loads(ended.stdout))

    def servers(self) -> list[int]:
        return [server.pid for server in self._in_folder(keep_warm.servers)]

    def stop(self) -> None:
        pids = self.servers()
        for server in self._in_folder(keep_warm.servers):
            server.stop()
        assert all(map(dies, pids))

    def _in_folder(self, function: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(self.folder))
            return function()


@pytest.fixture
def warm(nodes: Cluster) -> Iterator[Warm]:
    warm = Warm(nodes)
    yield warm
    warm.folder.chmod(0o700)
    warm.stop()


def test_the_next_command_starts_with_what_the_one_before_has_imported(warm: Warm) -> None:
    first = warm.shown()
    (server,) = warm.servers()
    second = warm.shown()
    assert first["importer"] == second["importer"] == server != first["pid"] != second["pid"]
    assert first["parent"] != second["parent"]
    assert [one["ELASTIRUN_AGENT"].split("-")[0] for one in (first, second)] == [str(one["parent"]) for one in (first, second)]
    assert "ELASTIRUN_WARM" not in second


def test_a_command_gets_its_own_folder_variables_of_the_shell_and_exit_status(warm: Warm, tmp_path: Path) -> None:
    first = warm.shown(cwd="/")
    warm.nodes.env |= {"WINDOWID": "7"}
    second = warm.shown("--max-restarts=1", cwd=tmp_path)
    assert first["importer"] == second["importer"]
    assert (second["cwd"], second["WINDOWID"], "WINDOWID" in first) == (str(tmp_path), "7", False)
    warm.script.write_text("import warm_module, sys; sys.exit(3)")
    assert warm.command().returncode == 1
    assert warm.command("--exit-code-from-worker").returncode == 3
    assert warm.command("--nnodes=0").returncode == 2
    assert len(warm.servers()) == 1


@pytest.mark.parametrize("shell", ["export TEST_OTHER=1", "ulimit -Sn 200", "umask 077", "trap '' HUP"])
def test_a_command_that_is_started_in_another_way_gets_another_server(warm: Warm, shell: str) -> None:
    first, others = warm.shown(), [warm.shown(shell=shell) for _ in range(2)]
    assert first["importer"] != others[0]["importer"] == others[1]["importer"]
    assert len(warm.servers()) == 2


def test_what_has_changed_since_it_was_imported_is_imported_anew(warm: Warm) -> None:
    first = warm.shown()
    warm.module.write_text(f"{MODULE}\n# changed\n")
    second = warm.shown()
    assert first["importer"] != second["importer"] == warm.shown()["importer"]
    assert dies(first["importer"])
    assert len(warm.servers()) == 1


def test_the_server_keeps_nothing_of_a_job(warm: Warm) -> None:
    """No value of a variable, no descriptor, no folder: whoever dumps its memory finds no secret of yours."""
    secret = os.urandom(8).hex()
    warm.nodes.env["TEST_SECRET"] = f"begins-{secret}"
    assert warm.shown()["TEST_SECRET"] == f"begins-{secret}"
    warm.shown()
    (server,) = warm.servers()
    assert not Path(f"/proc/{server}/environ").read_bytes().strip(b"\0")
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    own = ["/dev/null"] * 3 + [str(warm.folder / keep_warm.FOLDER), "socket"]
    until(lambda: opened_by(server) == own, "the job's pipe to be closed", state=lambda: str(opened_by(server)))
    assert secret.encode() not in memory_of(server)


def opened_by(pid: int) -> list[str]:
    return sorted(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> bytes:
    """Return the memory of a process that it can write to."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            begin, end = (int(text, 16) for text in place.split("-"))
            if rights.startswith("rw"):
                memory.seek(begin)
                found.append(memory.read(end - begin))
    return b"".join(found)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_command_is_for_its_agent(warm: Warm, signum: int) -> None:
    """Also the one that nobody can handle: then the kernel kills the agent, and the guard the workers."""
    warm.script.write_text(warm.nodes.script.read_text().replace("import json", "import warm_module, json", 1))
    words = warm.words("--max-restarts=1")
    command = warm.nodes.launch(1, *words[words.index("--keep-warm=1m") :])
    (worker,) = warm.nodes.round(1)
    agent = int(worker.env["ELASTIRUN_AGENT"].split("-")[0])
    assert agent != command.pid
    command.send_signal(signum)
    assert warm.nodes.ends(command) == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert dies(agent) and dies(worker.pid)
    if signum != signal.SIGKILL:
        assert f"{signal.Signals(signum).name}: this node leaves" in warm.nodes.out(1)
    assert len(warm.servers()) == 1


def test_the_command_ends_as_its_agent_ends(warm: Warm) -> None:
    warm.script.write_text(warm.nodes.script.read_text().replace("import json", "import warm_module, json", 1))
    words = warm.words()
    command = warm.nodes.launch(1, *words[words.index("--keep-warm=1m") :])
    (worker,) = warm.nodes.round(1)
    os.kill(int(worker.env["ELASTIRUN_AGENT"].split("-")[0]), signal.SIGKILL)
    assert warm.nodes.ends(command) == -signal.SIGKILL
    assert dies(worker.pid)


def test_a_user_has_four_servers_at_most(warm: Warm) -> None:
    pids = [warm.shown(shell=f"export TEST_NUMBER={number}")["importer"] for number in (0, 1, 2, 3, 0, 4)]
    assert pids[0] == pids[4]
    assert dies(pids[1])
    assert sorted(warm.servers()) == sorted({*pids} - {pids[1]})


def test_it_stays_for_as_long_as_it_was_asked_to(warm: Warm) -> None:
    first = warm.shown("--keep-warm=1s")
    assert dies(first["importer"])
    assert set(os.listdir(warm.folder / keep_warm.FOLDER)) == {"key"}


@pytest.mark.parametrize("how", ["mode", "link", "killed"])
def test_a_folder_that_others_may_use_is_not_used_and_what_a_dead_server_has_left_stands_in_nobodys_way(warm: Warm, how: str) -> None:
    folder = warm.folder / keep_warm.FOLDER
    if how == "killed":
        os.kill(warm.shown()["importer"], signal.SIGKILL)
    elif how == "mode":
        folder.mkdir(mode=0o755)
    else:
        folder.symlink_to(warm.module.parent)
    ended = warm.command()
    assert ended.returncode == 0
    assert ("--keep-warm has no effect" in ended.stderr) == (how != "killed")
    assert len(ended.stderr.splitlines()) == (how != "killed")
    if how == "link":
        folder.unlink()
        folder.mkdir(mode=0o700)
    folder.chmod(0o700)


OTHER_USER = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect(f"/proc/self/fd/{sys.argv[1]}/{sys.argv[2]}")
    socket.send_fds(connection, [b'{"seconds": 9}'], [0] * 5)
    print(connection.recv(100))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_this_user_reaches_the_server(warm: Warm) -> None:
    """Even one who has got a descriptor of the folder, or could enter it."""
    warm.shown()
    folder = warm.folder / keep_warm.FOLDER
    (path,) = (path for path in folder.iterdir() if path.name != "key")
    at = os.open(folder, os.O_PATH)

    def other_user() -> str:
        return subprocess.run([sys.executable, "-c", OTHER_USER, str(at), path.name], text=True, capture_output=True, pass_fds=[at]).stdout

    assert other_user() == "Permission denied\n"
    folder.chmod(0o711)
    path.chmod(0o777)
    assert other_user() in ("b''\n", "Connection reset by peer\n", "Broken pipe\n")
    folder.chmod(0o700)
    os.close(at)
    assert len(warm.servers()) == 1


def test_a_stranger_to_the_protocol_takes_nothing_from_the_server(warm: Warm) -> None:
    first = warm.shown()
    (path,) = (path for path in (warm.folder / keep_warm.FOLDER).iterdir() if path.name != "key")
    at = os.open(path.parent, os.O_PATH)
    for packet in (b"", b"x" * 5000, b"null", b'{"seconds": "a"}', b'{"seconds": 1e999}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"/proc/self/fd/{at}/{path.name}")
            if packet:
                socket.send_fds(connection, [packet], [at] * 5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"/proc/self/fd/{at}/{path.name}")
        assert warm.shown()["importer"] == first["importer"]
    os.close(at)


def test_a_script_sees_the_same_process_as_when_nothing_is_kept(warm: Warm) -> None:
    warm.script.write_text(PROBE.replace("import atexit", "import warm_module, asyncio, multiprocessing.pool, atexit", 1))
    warm.nodes.env |= {"TEST_OUT": str(warm.nodes.tmp_path / "seen.json"), "OMP_NUM_THREADS": "1"}
    seen = []
    for options in (["--keep-warm=off"], [], []):
        ended = warm.command(*options, "--preload=warm_module,asyncio,multiprocessing.pool", "--max-restarts=1")
        assert "LookupError: of the script" in ended.stderr
        seen.append(json.loads(Path(warm.nodes.env["TEST_OUT"]).read_text()))
    assert len(warm.servers()) == 1
    for one in seen:
        one.pop("forked")
    for one in seen[1:]:
        assert {key: (seen[0][key], one[key]) for key in one if one[key] != seen[0][key]} == {}
