"""``--keep-warm``: what an earlier command has imported serves the next one, and nothing else of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastirun.agent.processes import proc
from elastirun.agent.processes.preload import keep_warm, warm_server
from elastirun.config import Preload
from tests.support.cluster import Cluster, dies
from tests.support.images import open_files
from tests.support.until import PATIENCE, until
from tests.system.test_preload import PROBE
from tests.system.warm_launches import PLAIN, compare

MODULE = """
import os
PID = os.getpid()
"""
SHOWS = r"""
import json, os, sys
import warm_module
command = sys.stdin.readline() if "stdin" in sys.argv else ""
entries = open("/proc/self/environ").read().split("\0")
own = {"environ": [entry for entry in entries if entry], "importer": warm_module.PID, "pid": os.getpid(), "parent": os.getppid()}
own |= {"cwd": os.getcwd(), "argv": sys.argv, "stdin": command}
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
        nodes.env |= {
            "XDG_RUNTIME_DIR": str(self.folder),
            "TEST_MODULES": str(self.module.parent),
            "PYTHONPATH": os.pathsep.join((str(self.module.parent), *sys.path[:1])),
        }
        for name in ("PET_PRELOAD", "PET_KEEP_WARM"):
            nodes.env.pop(name, None)

    def words(self, *options: str, shell: str = ":") -> list[str]:
        """Return the command line. ``shell``: what a shell does before."""
        own = ("-m", "elastirun", "--keep-warm=1m", "--preload=warm_module", *options, str(self.script))
        return ["bash", "-c", f'{shell}; exec "$@"', "-", sys.executable, *own]

    def command(self, *options: str, shell: str = ":", cwd: str | Path | None = None) -> subprocess.CompletedProcess[str]:
        words = self.words(*options, shell=shell)
        return subprocess.run(words, env=self.nodes.env, text=True, capture_output=True, timeout=PATIENCE, cwd=cwd)

    def shown(self, *options: str, **more: Any) -> dict[str, Any]:
        ended = self.command(*options, **more)
        assert ended.returncode == 0, ended.stderr
        return dict(json.loads(ended.stdout))

    def servers(self) -> list[int]:
        return [server.pid for server in self._in_folder(keep_warm.servers)]

    def files(self) -> set[str]:
        folder = self.folder / keep_warm.FOLDER
        return set(os.listdir(folder)) if folder.exists() else set()

    def until_idle(self, server: int) -> None:
        """Wait until the server has no job, so that it has nothing open but what it began with."""
        own = ["/dev/null"] * 3 + [str(self.folder / keep_warm.FOLDER), "socket"]
        until(
            lambda: sorted(path.partition(":")[0] for path in open_files(server)) == own,
            "the job's pipe to be closed",
            state=lambda: str(open_files(server)),
        )

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


def test_who_looks_for_servers_makes_no_folder(warm: Warm) -> None:
    assert warm.servers() == [] and not list(warm.folder.iterdir())


def test_the_next_command_starts_with_what_the_one_before_has_imported(warm: Warm) -> None:
    first = warm.shown()
    (server,) = warm.servers()
    second = warm.shown()
    assert first["importer"] == second["importer"] == server != first["pid"] != second["pid"]
    assert first["parent"] != second["parent"]
    assert [one["ELASTIRUN_AGENT"].split("-")[0] for one in (first, second)] == [str(one["parent"]) for one in (first, second)]
    assert "ELASTIRUN_WARM" not in second
    assert {f"{name}={second[name]}" for name in ("ELASTIRUN_AGENT", "TORCHELASTIC_RUN_ID", "PATH")} <= set(second["environ"])


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


WAYS = {  # name -> what a shell does before
    "environment": "export TEST_OTHER=1",
    "limit": "ulimit -Sn 200",
    "umask": "umask 077",
    "signal": "trap '' HUP",
    "oom": "echo 500 > /proc/self/oom_score_adj",
    "nice": "renice -n 5 $$ > /dev/null",
    "cpus": "taskset -cp 0 $$ > /dev/null",
    "namespace": 'unshare --uts true 2> /dev/null && set -- unshare --uts "$@" || export TEST_OTHER=1',
    "package": "mkdir -p $TEST_MODULES/other.dist-info",
    "modules": 'set -- "${@:1:5}" --preload=warm_module,json "${@:6}"',
}


@pytest.mark.daily(6)
@pytest.mark.parametrize("shell", WAYS.values(), ids=WAYS)
def test_a_command_that_is_started_in_another_way_gets_another_server(warm: Warm, shell: str) -> None:
    if "taskset" in shell and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one CPU")
    first, others = warm.shown(), [warm.shown(shell=shell) for _ in range(2)]
    assert first["importer"] not in (others[0]["importer"], others[1]["importer"])
    assert others[0]["importer"] == others[1]["importer"] or "unshare" in shell


def test_a_search_path_that_depends_on_the_folder_is_that_of_the_command(warm: Warm, tmp_path: Path) -> None:
    """An empty entry is the working folder, as in PYTHONPATH=$PYTHONPATH:/modules where there was none."""
    warm.nodes.env["PYTHONPATH"] = f":{warm.nodes.env['PYTHONPATH']}"
    first, second = warm.shown(cwd="/"), warm.shown(cwd=tmp_path)
    assert first["importer"] != second["importer"] == warm.shown(cwd=tmp_path)["importer"]


def test_what_a_module_changes_in_the_environment_is_changed_in_each_worker(warm: Warm) -> None:
    """As torch._dynamo sets TORCHINDUCTOR_CACHE_DIR, which processes that the script starts need."""
    sets = "os.environ['TEST_NEW'], os.environ['TEST_GIVEN'] = 'new', 'changed'\ndel os.environ['TEST_GONE']\n"
    warm.module.write_text(f"{MODULE}\n{sets}")
    warm.nodes.env |= {"TEST_GIVEN": "given", "TEST_GONE": "gone", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    for options in (["--keep-warm=off"], [], []):
        shown = warm.shown(*options)
        assert [shown.get(f"TEST_{name}") for name in ("NEW", "GIVEN", "GONE")] == ["new", "changed", None]
        assert shown["PYTORCH_NVML_BASED_CUDA_CHECK"] == "0"
        assert (shown["PYTHONPATH"], "TEST_NEW" in shown) == (warm.nodes.env["PYTHONPATH"], True)


def test_a_warning_is_written_once(warm: Warm) -> None:
    warm.nodes.env["PET_NPROC_PER_NODES"] = "1"
    for options in ([], ["--keep-warm=off"]):
        assert warm.command(*options).stderr.count("PET_NPROC_PER_NODES has no effect") == 1


def test_a_worker_of_another_job_leaves_no_server_for_which_that_job_would_wait(warm: Warm) -> None:
    ended = warm.command(shell="export ELASTIRUN_AGENT=1-2-3-a")
    assert (ended.returncode, "a worker of another elastirun" in ended.stderr, warm.servers()) == (0, True, [])


def test_a_file_that_only_the_command_can_open_is_read_by_an_agent_in_its_place(warm: Warm) -> None:
    (warm.nodes.tmp_path / "token").write_text("0123456789abcdef" * 4)
    ended = warm.command("--token-file=/dev/fd/9", shell=f"exec 9< {warm.nodes.tmp_path}/token")
    assert (ended.returncode, "only this process has" in ended.stderr) == (0, True), ended.stderr


@pytest.mark.parametrize("name", ["tqdm.utils", "other.utils"])
def test_a_module_that_goes_through_the_whole_environment_may_keep_values_of_it_unless_it_is_known_not_to(warm: Warm, name: str) -> None:
    """tqdm looks for TQDM_..., and torch imports it where it is installed."""
    package = warm.module.parent / name.partition(".")[0]
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("import os\nOWN = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}\n")
    warm.module.write_text(f"{MODULE}\nimport {name}\n")
    ended = warm.command()
    assert ("warm_module reads" in ended.stderr, ended.returncode, len(warm.servers())) == (
        (True, 0, 0) if name[0] == "o" else (False, 0, 1)
    )


def test_what_has_changed_since_it_was_imported_is_imported_anew(warm: Warm) -> None:
    first = warm.shown()
    warm.module.write_text(f"{MODULE}\n# changed\n")
    second = warm.shown()
    assert first["importer"] != second["importer"] == warm.shown()["importer"]
    assert dies(first["importer"])
    assert len(warm.servers()) == 1


def test_a_library_that_has_changed_since_it_was_loaded_is_loaded_anew(warm: Warm) -> None:
    library, new = (warm.nodes.tmp_path / name for name in ("library", "new"))
    library.write_text("a file that is mapped")
    new.write_text("another one")
    warm.module.write_text(f"{MODULE}\nimport mmap\nwith open({str(library)!r}) as file:\n    KEPT = mmap.mmap(file.fileno(), 0, prot=1)\n")
    first = warm.shown()
    assert first["importer"] == warm.shown()["importer"]
    new.replace(library)
    assert first["importer"] != warm.shown()["importer"]


def test_the_server_keeps_nothing_of_a_job(warm: Warm) -> None:
    """No value of a variable, no descriptor, no folder: whoever dumps its memory finds no secret of yours."""
    secret = os.urandom(8).hex()
    warm.nodes.env["TEST_SECRET"] = f"begins-{secret}"
    assert warm.shown()["TEST_SECRET"] == f"begins-{secret}"
    warm.shown()
    (server,) = warm.servers()
    assert not Path(f"/proc/{server}/environ").read_bytes().strip(b"\0")
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    warm.until_idle(server)
    assert secret.encode() not in memory_of(server)


def test_nor_does_the_process_that_has_made_it_to_try_modules(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is then its child, and it waits for the server's end."""
    secret = os.urandom(8).hex()
    (warm.module.parent / "tried_module.py").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(warm.folder))
    folder = keep_warm.open_folder(make=True)
    environment = {**warm.nodes.env, "TEST_SECRET": f"begins-{secret}"}
    keep_warm._start_server(folder, "0000000a", Preload(("warm_module",), ("tried_module",), keep_warm=60.0), environment)
    os.close(folder)
    (server,) = warm.servers()
    found = proc.look(server)
    assert found
    above = found.parent
    assert Path(f"/proc/{above}/cmdline").read_bytes().startswith(b"elastirun-warm")
    for pid in (above, server):
        until(partial(is_at_root, pid), "the values to be forgotten, and then the folder")
        assert not Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0")
        assert secret.encode() not in memory_of(pid)
    warm.stop()
    assert dies(above)


def is_at_root(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/cwd") == "/"


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


@pytest.mark.parametrize("who", ["agent", "waiter"])
def test_the_command_ends_as_its_agent_ends_and_the_agent_with_the_process_above_it(warm: Warm, who: str) -> None:
    warm.script.write_text(warm.nodes.script.read_text().replace("import json", "import warm_module, json", 1))
    words = warm.words()
    command = warm.nodes.launch(1, *words[words.index("--keep-warm=1m") :])
    (worker,) = warm.nodes.round(1)
    agent = int(worker.env["ELASTIRUN_AGENT"].split("-")[0])
    above = proc.look(agent)
    assert above is not None
    os.kill(above.parent if who == "waiter" else agent, signal.SIGKILL)
    assert warm.nodes.ends(command) == -signal.SIGKILL
    assert dies(agent) and dies(worker.pid)


def test_a_user_has_four_servers_at_most(warm: Warm) -> None:
    pids = [warm.shown(shell=f"export TEST_NUMBER={number}")["importer"] for number in (0, 1, 2, 3, 0, 4)]
    assert pids[0] == pids[4]
    assert dies(pids[1])
    assert sorted(warm.servers()) == sorted({*pids} - {pids[1]})


def test_it_stays_for_as_long_as_it_was_asked_to(warm: Warm) -> None:
    first = warm.shown("--keep-warm=1s")
    assert dies(first["importer"])
    assert warm.files() == {"key"}
    warm.shown("--keep-warm=720h")  # longer than poll() can wait
    (server,) = warm.servers()
    warm.until_idle(server)
    assert warm.shown()["importer"] == server
    warm.stop()
    assert warm.files() == {"key"}


def test_a_server_that_is_stopped_keeps_no_command_and_no_reader_of_its_output_waiting(warm: Warm) -> None:
    server = warm.shown()["importer"]
    os.kill(server, signal.SIGSTOP)
    ended = warm.command()
    assert (ended.returncode, "does not answer" in ended.stderr) == (0, True)
    os.kill(server, signal.SIGCONT)
    assert warm.shown()["importer"] == server


def test_a_command_that_is_stopped_while_it_starts_a_server_keeps_no_other_waiting_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_warm, "START_LIMIT", 0.1)
    name, path = "0000000a", tmp_path / "key"
    path.touch()
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX, 1, 10); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() and other.stdin
        folder = os.open(tmp_path, os.O_RDONLY)
        with path.open("r+") as file:
            assert not warm_server.nobody_comes(folder, name), "one that waits for the server's answer"
            with pytest.raises(keep_warm.NotWarm, match="another command"):
                keep_warm._lock(file.fileno(), name)
            other.stdin.close()
            other.wait()
            keep_warm._lock(file.fileno(), name)
            assert warm_server.nobody_comes(folder, name)
        os.close(folder)


def test_a_command_that_is_killed_while_modules_are_imported_leaves_the_server_for_the_next(warm: Warm) -> None:
    begun = warm.nodes.tmp_path / "begun"
    os.mkfifo(begun)
    warm.module.write_text(f"{MODULE}\nopen({str(begun)!r}, 'w').close()\nopen({str(begun)!r}).close()\n")
    with subprocess.Popen(warm.words(), env=warm.nodes.env) as command:
        begun.open().close()
        command.kill()
    begun.open("w").close()
    (server,) = until(warm.servers, "the server")
    assert warm.shown()["importer"] == server


def test_an_agent_that_has_ended_already_is_not_started_a_second_time() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert keep_warm.StartedAgent(()).begin({"agent": ended.pid})


def test_a_full_disk_leaves_no_half_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError

    folder = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError):
        keep_warm._open_key(folder)
    monkeypatch.undo()
    assert not os.listdir(folder)
    os.close(folder)


def test_a_variable_that_was_meant_for_another_process_ends_none(warm: Warm) -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        ours.close()
        env = {**warm.nodes.env, "ELASTIRUN_WARM": f"{theirs.fileno()},{stranger.pid}"}
        ended = subprocess.run(warm.words("--max-restarts=1"), env=env, pass_fds=[theirs.fileno()], capture_output=True, timeout=PATIENCE)
        assert (ended.returncode, stranger.poll()) == (0, None)
        stranger.kill()
    theirs.close()


def test_where_other_users_look_like_this_one_nothing_is_kept(warm: Warm) -> None:
    """In a user namespace without a map each user is nobody, also the owner of a folder that somebody else has made."""
    apart = ["unshare", "--user"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    ended = subprocess.run([*apart, *warm.words()], env=warm.nodes.env, text=True, capture_output=True, timeout=PATIENCE)
    assert "shows other users as this one" in ended.stderr, ended.stderr
    assert not warm.files()


@pytest.mark.parametrize("how", ["mode", "link", "killed", "setgid"])
def test_a_folder_that_others_may_use_is_not_used_and_what_a_dead_server_has_left_stands_in_nobodys_way(warm: Warm, how: str) -> None:
    folder = warm.folder / keep_warm.FOLDER
    if how == "killed":
        os.kill(warm.shown()["importer"], signal.SIGKILL)
    elif how in ("mode", "setgid"):
        folder.mkdir()
        folder.chmod(0o755 if how == "mode" else 0o2700)
    else:
        warm.module.parent.chmod(0o700)
        folder.symlink_to(warm.module.parent)
    ended = warm.command()
    assert ended.returncode == 0
    assert ("--keep-warm has no effect" in ended.stderr) == (how in ("mode", "link"))
    assert len(ended.stderr.splitlines()) == (how in ("mode", "link"))
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
    numbers = (b'"a"', b"1e999", b"NaN", b"9" * 400, b"-1")
    for packet in (b"", b"x" * 5000, b"null", b"[" * 4000, *(b'{"seconds": %s}' % each for each in numbers)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"/proc/self/fd/{at}/{path.name}")
            if packet:
                socket.send_fds(connection, [packet], [at] * 5)
                connection.recv(1)  # HELLO
                with suppress(ConnectionError):
                    connection.recv(1)
        warm.until_idle(first["importer"])
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["folder", "XDG_RUNTIME_DIR", "server", "effective group"])
def test_what_belongs_to_another_user_is_not_used(warm: Warm, what: str) -> None:
    folder = warm.folder / keep_warm.FOLDER
    folder.mkdir(mode=0o700)
    command = warm.words()[4:]  # a shell would give up the user
    if what == "folder":
        os.chown(folder, 65534, -1)
    elif what == "XDG_RUNTIME_DIR":
        os.chown(warm.folder, 65534, -1)
    elif what == "server":
        warm.shown()
        (name,) = warm.files() - {"key"}
        warm.stop()
        (folder / name).unlink(missing_ok=True)
        words, pipe = [sys.executable, "-c", LISTENS, name], subprocess.PIPE
        with subprocess.Popen(words, cwd=folder, stdout=pipe, stdin=pipe) as other:
            assert other.stdout and other.stdout.readline()
            ended = warm.command()
            assert other.stdin
            other.stdin.close()
        (folder / name).unlink()
    else:
        command = [sys.executable, "-c", f"import os; os.setresgid(65534, 0, 0); os.execvp({command[0]!r}, {command!r})"]
    if what != "server":
        ended = subprocess.run(command, env=warm.nodes.env, text=True, capture_output=True, timeout=PATIENCE)
    os.chown(folder, 0, -1)
    os.chown(warm.folder, 0, -1)
    assert ended.returncode == 0, ended.stderr
    assert "--keep-warm has no effect" in ended.stderr
    assert what != "server" or "another user" in ended.stderr


LISTENS = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.setuid(65534)
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def test_commands_that_start_together_share_one_server(warm: Warm) -> None:
    commands = [
        subprocess.Popen(warm.words(), env=warm.nodes.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)
    ]
    ended = [command.communicate(timeout=PATIENCE) for command in commands]
    assert len({json.loads(stdout)["importer"] for stdout, _ in ended}) == 1
    assert not any("--keep-warm" in stderr for _, stderr in ended)


def test_the_server_does_not_grow_and_each_script_does_what_it_does_without_it(nodes: Cluster) -> None:
    """``python -m tests.stress warm-launches`` makes many more launches, also with torch."""
    few = ("plain", "module beside", "changes itself")
    assert compare(nodes, {name: PLAIN[name] for name in few}, "json", launches=6, seed=1) == []
