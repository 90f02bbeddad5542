"""The command line as people and scripts use it: names, bad input, ``--help``, ``--dry-run``, and the agent it would start."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.cli import command_line, main, parse
from elastirun.cli.detect.detected import Host
from elastirun.cli.options import GROUPS, KEYS, OPTIONS
from elastirun.config import Command, LaunchConfig
from elastirun.errors import BadCommand, StartError, UsageError
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SECRET = "correct horse battery staple"

Elastirun = Callable[..., SimpleNamespace]


@pytest.fixture
def elastirun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Elastirun:
    """Run ``main`` in a folder with a script ``t.py``. A stand-in for the agent records its configuration. No torch, no device."""
    seen: list[LaunchConfig] = []

    def run(config: LaunchConfig, given: object) -> int:
        seen.append(config)
        return 7

    agent = ModuleType("elastirun.agent.agent")
    agent.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elastirun.agent.agent", agent)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(main, "count_devices", {"gpu": 0, "auto": 0, "xpu": 0}.get)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")

    def call(*argv: str, **environ: str) -> SimpleNamespace:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as exit_:
            main.main(argv)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=exit_.value.code, out=out, err=err, config=seen[-1] if seen else None)

    return call


# --- the table of options


FROZEN = """
module m PET_MODULE flag
no-python - PET_NO_PYTHON flag
preload - PET_PRELOAD auto
keep-warm - PET_KEEP_WARM off
check - PET_CHECK flag
dry-run - PET_DRY_RUN flag
version - - flag
help-all - - flag
print-completion - - None
nnodes - PET_NNODES 1:1
nproc-per-node - PET_NPROC_PER_NODE 1
mesh - PET_MESH ''
node-unit - PET_NODE_UNIT 1
standalone - PET_STANDALONE flag
node-name - PET_NODE_NAME ''
node-rank - PET_NODE_RANK 0
rdzv-endpoint - PET_RDZV_ENDPOINT ''
rdzv-id - PET_RDZV_ID none
rdzv-backend - PET_RDZV_BACKEND static
master-addr - PET_MASTER_ADDR 127.0.0.1
master-port - PET_MASTER_PORT None
local-addr - PET_LOCAL_ADDR None
port-range - PET_PORT_RANGE None
join-timeout - PET_JOIN_TIMEOUT 600
last-call - PET_LAST_CALL 5
expire - PET_EXPIRE 5
store-grace - PET_STORE_GRACE 60
store-succession - PET_STORE_SUCCESSION majority
token-file - PET_TOKEN_FILE None
rdzv-conf - PET_RDZV_CONF ''
detect - PET_DETECT auto
max-restarts - PET_MAX_RESTARTS 0
restart-window - PET_RESTART_WINDOW 0
fail-fast - PET_FAIL_FAST flag
hang-timeout - PET_HANG_TIMEOUT off
stacks - PET_STACKS on
strikes - PET_STRIKES 0
exit-code-from-worker - PET_EXIT_CODE_FROM_WORKER flag
grace - PET_GRACE 30
failure-grace - PET_FAILURE_GRACE None
signals-to-handle - PET_SIGNALS_TO_HANDLE SIGTERM,SIGINT,SIGHUP,SIGQUIT
forward-signals - PET_FORWARD_SIGNALS ''
log-dir - PET_LOG_DIR None
redirects r PET_REDIRECTS 0
tee t PET_TEE 0
show - PET_SHOW ''
log-limit - PET_LOG_LIMIT None
log-format - PET_LOG_FORMAT text
event-log-handler - PET_EVENT_LOG_HANDLER null
health-port - PET_HEALTH_PORT None
set - PET_SET ''
run-path - PET_RUN_PATH flag
role - PET_ROLE default
shutdown-timeout - PET_SHUTDOWN_TIMEOUT None
log-line-prefix-template - PET_LOG_LINE_PREFIX_TEMPLATE ''
local-ranks-filter - PET_LOCAL_RANKS_FILTER ''
duplicate-stdout-filters - PET_DUPLICATE_STDOUT_FILTERS ''
duplicate-stderr-filters - PET_DUPLICATE_STDERR_FILTERS ''
numa-binding - PET_NUMA_BINDING None
virtual-local-rank - PET_VIRTUAL_LOCAL_RANK flag
monitor-interval - PET_MONITOR_INTERVAL 0.1
start-method - PET_START_METHOD spawn
logs-specs - PET_LOGS_SPECS None
"""


def test_names_short_forms_variables_and_defaults_do_not_change() -> None:
    table = [
        f"{o.name[2:]} {o.short or '-'} {o.env or '-'} {'flag' if o.flag else repr('') if o.default == '' else o.default}" for o in OPTIONS
    ]
    assert table == FROZEN.strip().splitlines()
    keys = {"first-step-timeout": "off", "strikes-cooldown": "600", "restart-pause": "10", "log-mode": "600"}
    assert {name: key.default for name, key in KEYS.items()} == keys


SINCE_2_14 = {"log_line_prefix_template", "print_completion"}  # options that an older torchrun does not have


def test_every_option_of_torchrun_is_here_with_its_short_form_variable_and_default() -> None:
    code = """
import json
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser
actions = [a for a in get_args_parser()._actions if a.option_strings]
print(json.dumps([(a.dest, a.option_strings, isinstance(a, (env, check_env)), a.nargs == 0, a.default, a.choices) for a in actions]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    theirs = {dest: rest for dest, *rest in json.loads(answer) if dest != "help"}
    ours = {option.dest: option for option in OPTIONS if not option.new}
    assert set(theirs) <= set(ours)
    version = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    if version < (2, 13):
        pytest.skip("the options are those of torchrun 2.13, and some that are newer")
    assert set(ours) - set(theirs) == (SINCE_2_14 if version == (2, 13) else set())
    for dest, (names, in_environment, flag, default, choices) in theirs.items():
        option = ours[dest]
        assert set(names) == {option.name, "--" + dest} | ({"-" + option.short} if option.short else set())
        assert option.flag == flag
        assert option.env == f"PET_{dest.upper()}" or not in_environment
        assert flag or (option.default or None) == (str(default) if default not in (None, [], "") else None)
        for value in choices or ():
            assert value in option.metavar + option.help


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--nproc_per_node=2 t.py", {"nproc_per_node": "2"}),
        ("--nproc-per_node 2 t.py", {"nproc_per_node": "2"}),
        ("--nproc 2 t.py", {"nproc_per_node": "2"}),
        ("--redirect=3 t.py", {"redirects": "3"}),
        ("--rdzv_e a_b:1 t.py", {"rdzv_endpoint": "a_b:1"}),
        ("--rdzv-conf=a=b t.py", {"rdzv_conf": "a=b"}),
        ("--role= t.py", {"role": ""}),
        ("--role=-x t.py", {"role": "-x"}),
        ("--max-restarts -1 t.py", {"max_restarts": "-1"}),
        ("--show -1,0 t.py", {"show": "-1,0"}),
        ("-r 3 -t3 -r=0:1 t.py", {"redirects": "0:1", "tee": "3"}),
        ("-m t.py", {"module": "1"}),
        ("-mr3 t.py", {"module": "1", "redirects": "3"}),
        ("--standa t.py", {"standalone": "1"}),
        ("--t 3 t.py", {"tee": "3"}),  # not --token-file, which torchrun does not have
        ("--v t.py", {"virtual_local_rank": "1"}),
        ("--e null t.py", {"event_log_handler": "null"}),
        ("--vers t.py", {"version": "1"}),
        ("--help-a t.py", {"help_all": "1"}),
        ("--set a=1 --set=b=2,c=3 t.py", {"set": "a=1,b=2,c=3"}),
        ("-h t.py", {"help": "1"}),
        ("--he t.py", {"help": "1"}),
        ("--h t.py", {"help": "1"}),
        ("--hea 8080 t.py", {"health_port": "8080"}),
        ("-- t.py", {}),
    ],
)
def test_names_may_be_abbreviated_and_written_with_underscores(line: str, given: dict[str, str]) -> None:
    assert command_line.parse(line.split()) == (given, ["t.py"])


@pytest.mark.parametrize(
    "tail", ["--nnodes=2", "--help", "--", "-- --x", "-m", "--bad_option a", "''", "--nproc_per_node", "${local_rank} --version"]
)
def test_what_follows_the_script_is_left_alone(elastirun: Elastirun, tail: str) -> None:
    args = [word.replace("''", "") for word in tail.split()]
    assert command_line.parse(["--nnodes=1", "t.py", *args]) == ({"nnodes": "1"}, ["t.py", *args])
    assert elastirun("t.py", *args).config.command == Command("t.py", tuple(args))


# --- bad input


BAD = [
    # (command line, what the line must name)
    ("", "no script"),
    ("--nnodes=1", "no script"),
    ("--", "no script"),
    ("--nnodes", "--nnodes: the value is missing; write --nnodes=N|MIN:MAX"),
    ("--nnodes= t.py", "--nnodes"),
    ("--nnodes --standalone t.py", "--nnodes: the value is missing"),
    ("--nnodes=a t.py", "--nnodes"),
    ("--nnodes=0 t.py", "--nnodes"),
    ("--nnodes=3:2 t.py", "2:3"),
    ("--nnodes=1:2:3 t.py", "--nnodes"),
    ("--nnodes=2 t.py", "--rdzv-endpoint"),
    ("--nproc-per-node=0 t.py", "--nproc-per-node"),
    ("--nproc-per-node=-1 t.py", "--nproc-per-node"),
    ("--nproc-per-node=1.5 t.py", "--nproc-per-node"),
    ("--nproc-per-node=99999 t.py", "--nproc-per-node"),
    ("--nproc-per-node=foo t.py", "'foo'"),
    ("--nproc-per-nodes=2 t.py", "did you mean --nproc-per-node"),
    ("-nnodes=2 t.py", "did you mean --nnodes"),
    ("-x t.py", "'-x'"),
    ("-f t.py", "no option '-f'"),
    ("--log=a t.py", "--log-dir, --log-limit, --log-format, --log-line-prefix-template, --logs-specs"),
    ("--rdzv=a t.py", "--rdzv-endpoint, --rdzv-id"),
    ("--standalone=1 t.py", "--standalone: it is a flag and takes no value"),
    ("--standa=1 t.py", "--standalone: it is a flag and takes no value"),
    ("--log-dir -r 3 t.py", "--log-dir: the value is missing; write --log-dir=FOLDER"),
    ("-r", "--redirects: the value is missing"),
    ("--standalone --nnodes=2 t.py", "--standalone"),
    ("--rdzv-backend=nope t.py", "c10d, static"),
    ("--rdzv-backend=etcd --nnodes=2 t.py", "--rdzv-endpoint=HOST:2379"),
    ("--nprocs=2 t.py", "did you mean --nproc-per-node"),
    ("--rdzv-endpoint=h:99999 t.py", "there is no port 99999; give one from 1 to 65535"),
    ("--rdzv-endpoint=h:x t.py", "no port number"),
    ("--set=log-mode=755 t.py", "640 (and the group)"),
    ("--set=log-mode=400 t.py", "elastirun: --set log-mode: "),
    ("--set=log-mode t.py", "is not KEY=VALUE; give KEY=VALUE"),
    (
        "--set=restart-pauses=0 t.py",
        "(did you mean restart-pause?); the keys are first-step-timeout, strikes-cooldown, ",
    ),
    ("--set --standalone t.py", "--set: the value is missing"),
    ("--restart-pause=0 t.py", "--restart-pause is a key of --set; write --set restart-pause=SECONDS"),
    ("--log_mode 640 t.py", "--log-mode is a key of --set; write --set log-mode=MODE"),
    ("--first-step=9 t.py", "--first-step-timeout is a key of --set; write --set first-step-timeout=off|SECONDS"),
    ("--strikes-cooldown t.py", "write --set strikes-cooldown=SECONDS"),
    ("--rdzv-endpoint=a:1,b:2 t.py", "--rdzv-endpoint"),
    ("--rdzv-endpoint=http://h:1 t.py", "--rdzv-endpoint"),
    ("--rdzv-conf=a t.py", "--rdzv-conf"),
    ("--rdzv-conf=is_host=perhaps t.py", "is_host"),
    ("--rdzv-conf=store_type=file t.py", "store_type"),
    ("--rdzv-id=" + "x" * 201 + " t.py", "--rdzv-id"),
    ("--node-rank=x t.py", "--node-rank"),
    ("--nnodes=2 --node-rank=2 --master-addr=h t.py", "--node-rank"),
    ("--master-port=x t.py", "--master-port"),
    ("--master-port=70000 t.py", "--master-port"),
    ("--nnodes=2 --master-addr=h:1 t.py", "--master-addr"),
    ("--local-addr=a/b t.py", "--local-addr"),
    ("--max-restarts=-1 t.py", "--max-restarts"),
    ("--monitor-interval=0 t.py", "--monitor-interval"),
    ("--start-method=thread t.py", "spawn"),
    ("--event-log-handler=mine t.py", "--event-log-handler"),
    ("--module --no-python t", "--module and --no-python"),
    ("--log-dir=t.py t.py", "--log-dir"),
    ("--log-dir=t.py/below t.py", "is not a folder"),
    ("-r 4 t.py", "--redirects"),
    ("-t 0:1,1 t.py", "--tee"),
    ("--local-ranks-filter=a t.py", "--local-ranks-filter"),
    ("--show=0,x t.py", "--show"),
    ("--show=3-1 t.py", "--show"),
    ("--log-limit=lots t.py", "--log-limit"),
    ("--log-limit=63K t.py", "65536 bytes or more"),
    ("--numa-binding=everywhere t.py", "core-complex"),
    ("--signals-to-handle=SIGKILL t.py", "SIGKILL"),
    ("--shutdown-timeout=-1 t.py", "--shutdown-timeout"),
    ("--grace=inf t.py", "--grace"),
    ("--failure-grace=-1 t.py", "--failure-grace"),
    ("--hang-timeout=0 t.py", "--hang-timeout"),
    ("--hang-timeout=on t.py", "off, auto"),
    ("--set=first-step-timeout=auto t.py", "or off"),
    ("--strikes=-1 t.py", "at least 0"),
    ("--set=strikes-cooldown=0 t.py", "above 0"),
    ("--event-log-handler=jsonl t.py", "--log-dir"),
    ("--grace=1 --shutdown-timeout=2 t.py", "--grace and --shutdown-timeout"),
    ("--expire=0.5 t.py", "--expire"),
    ("--join-timeout=0 t.py", "--join-timeout"),
    ("--last-call=-1 t.py", "--last-call"),
    ("--store-grace=soon t.py", "--store-grace"),
    ("--token-file=nowhere t.py", "--token-file"),
    ("--token-file=. t.py", "--token-file"),
    ("--token-file=t.py t.py", "16 to 4096 bytes"),
    ("--token-file=/dev/zero t.py", "too long"),
]


@pytest.mark.parametrize(("line", "part"), BAD)
def test_bad_input_is_one_line_and_status_2(elastirun: Elastirun, line: str, part: str) -> None:
    assert_bad(elastirun(*line.split()), part)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PET_STANDALONE", "perhaps"),
        ("PET_STANDALONE", ""),
        ("PET_NNODES", "1:"),
        ("PET_NPROC_PER_NODE", "x"),
        ("PET_MAX_RESTARTS", "many"),
        ("PET_START_METHOD", "thread"),
        ("PET_MASTER_PORT", "-"),
        ("PET_RDZV_CONF", "a\nb"),
        ("PET_RDZV_ID", "a\nb"),
        ("PET_TEE", "all"),
        ("PET_TOKEN_FILE", ""),
        ("PET_DRY_RUN", "x"),
        ("PET_SET", "restart=0"),
        ("PET_SET", "restart-pause"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x"),
    ],
)
def test_a_bad_variable_is_named(elastirun: Elastirun, variable: str, value: str) -> None:
    assert_bad(elastirun("--local-ranks-filter=9", "t.py", **{variable: value}), f"elastirun: {variable}: ")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("nowhere.py", "'nowhere.py'"),
        (".", "__main__.py"),
        ("--no-python no-such-program-here", "no program 'no-such-program-here'; give its path, or a name that is in PATH"),
        ("--no-python ./t.py", "chmod +x"),
    ],
)
def test_a_script_that_is_missing_here_is_one_line_and_status_3(elastirun: Elastirun, line: str, part: str) -> None:
    assert_bad(elastirun(*line.split()), part, ExitCode.ENVIRONMENT)


def test_an_interpreter_or_a_torch_that_is_missing_here_too(elastirun: Elastirun, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without_torch:
        without_torch.setattr("importlib.util.find_spec", lambda name: None)
        assert_bad(elastirun("t.py"), "elastirun: torch is not installed for ", ExitCode.ENVIRONMENT)
    assert_bad(elastirun("t.py", PYTHON_EXEC="/no/such/python"), "elastirun: PYTHON_EXEC: ", ExitCode.ENVIRONMENT)


def test_what_another_machine_may_have_is_status_202(elastirun: Elastirun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_bad(elastirun("--nproc-per-node=gpu", "t.py"), "torch can use no gpu here", ExitCode.SICK)
    broken = "no driver"

    def ask(kind: str) -> int:
        raise ValueError(broken)

    monkeypatch.setattr(main, "count_devices", ask)
    for option in (("--nproc-per-node=gpu",), ("--nproc-per-node=2", "--virtual-local-rank")):
        assert_bad(elastirun(*option, "t.py"), f"{option[-1].split('=')[0]}: {broken}", ExitCode.SICK)


def assert_bad(result: SimpleNamespace, part: str, status: ExitCode = ExitCode.USAGE) -> None:
    assert result.status == status
    assert result.err.startswith("elastirun: ") and result.err.count("\n") == 1, result.err
    assert part in result.err
    assert (result.out, result.config) == ("", None)


def test_folders_without_permission(elastirun: Elastirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root every access is allowed
    assert_bad(elastirun("--log-dir=below/here", "--module", "t"), "cannot be written to", ExitCode.SICK)
    assert_bad(elastirun("t.py"), "'t.py' cannot be read", ExitCode.ENVIRONMENT)


def test_the_working_folder_is_gone(elastirun: Elastirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_bad(elastirun("/bin/sh"), "the working folder is gone")


# --- valid command lines


def test_the_agent_gets_the_configuration_and_its_status_is_ours(elastirun: Elastirun) -> None:
    result = elastirun("--nproc-per-node=3", "t.py", PET_MAX_RESTARTS="2")
    assert (result.status, result.out, result.err) == (7, "", "")
    assert (result.config.nproc, result.config.max_restarts) == (3, 2)


@pytest.mark.parametrize("value", ["1", "yes", "TRUE", " 1 "])
def test_flags_from_the_environment(elastirun: Elastirun, value: str) -> None:
    assert elastirun("os", PET_MODULE=value).config.command.module is True
    assert elastirun("t.py", PET_MODULE="0").config.command.module is False


def test_warnings_are_one_line_each(elastirun: Elastirun) -> None:
    result = elastirun("--node-rank=1", "--log-dir=/dev/null", "-r3", "t.py")
    assert result.status == 7
    assert re.fullmatch(r"(elastirun: warning: [^\n]+\n){2}", result.err)
    assert elastirun("--show=3", "t.py").err.endswith("there is no rank 3 among 1 worker\n")


@pytest.mark.parametrize(
    ("nodes", "arguments", "warned"),
    [(3, "--expire=30", True), (3, "--expire=28", False), (2, "--expire=30", False), (3, "--expire=30 --store-succession=proof", False)],
)
def test_a_store_grace_in_which_the_store_cannot_move_is_warned_of(elastirun: Elastirun, nodes: int, arguments: str, warned: bool) -> None:
    result = elastirun(f"--nnodes={nodes}", "--rdzv-endpoint=127.0.0.1:29400", *arguments.split(), "--log-dir=/dev/null", "t.py")
    assert ("--store-grace=60 is too short" in result.err) is warned, result.err


def test_programs_folders_and_per_rank_names_are_found(elastirun: Elastirun, tmp_path: Path) -> None:
    assert elastirun("--no-python", "sh", "-c", "true").config.command == Command("sh", ("-c", "true"), no_python=True)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    assert elastirun("app").status == 7
    assert elastirun("train_${local_rank}.py").status == 7
    assert elastirun("--log-dir=new/folder", "t.py").config.logs.log_dir == Path("new/folder")
    assert not (tmp_path / "new").exists()  # the agent makes it


def test_a_token(elastirun: Elastirun, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"\n {SECRET}\n")
    file.chmod(0o600)
    result = elastirun("--token-file=token", "t.py")
    assert (result.config.token, result.err) == (SECRET.encode(), "")
    assert SECRET not in repr(result.config)
    file.chmod(0o640)
    assert "chmod 600" in elastirun("--token-file=token", "t.py").err


@pytest.mark.parametrize(("conf", "scheme"), [("user=me,password_file=secret", ""), ("cert=t.py,key=secret", "https://")])
def test_a_secret_for_etcd_that_others_can_read_is_warned_of(elastirun: Elastirun, tmp_path: Path, conf: str, scheme: str) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    line = ("--nnodes=2", "--rdzv-id=j", "--rdzv-backend=etcd", f"--rdzv-endpoint={scheme}h", f"--rdzv-conf={conf}", "t.py")
    for mode, warned in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        result = elastirun(*line)
        assert (result.status, "='secret': others on this machine can read it; chmod 600 it" in result.err) == (7, warned), result.err
    file.unlink()
    os.mkfifo(file)
    assert "others" not in elastirun(*line).err, "and it is not opened"


def test_dry_run_shows_all_and_starts_nothing(elastirun: Elastirun, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "token").chmod(0o600)
    line = "--dry-run --nnodes=1:3 --rdzv-endpoint=node0 --rdzv-id=j --token-file=token --nproc-per-node=2 --set=log-mode=640 t.py --name"
    result = elastirun(*line.split(), "a b", PET_ROLE="trainer", PET_SET="restart-pause=0,log-mode=600")
    assert (result.status, result.err, result.config) == (0, "", None)
    assert SECRET not in result.out
    for row in (
        r"--nnodes +1:3 +command line",
        r"--role +trainer +environment PET_ROLE",
        r"--rdzv-backend +c10d +derived: MIN:MAX nodes",
        r"--rdzv-endpoint +node0:29400 +derived: .*",
        r"--token-file +token +command line",
        r"--set log-mode +640 +command line",
        r"--set restart-pause +0 +environment PET_SET restart-pause",
    ):
        assert re.search(rf"^  {row}$", result.out, re.MULTILINE), row
    assert f"2 workers would each run: {sys.executable} -u t.py --name 'a b'\nNothing was started.\n" in result.out
    assert "\n1 worker would run: " in elastirun("--dry-run", "t.py").out
    assert re.search("^listens: the rendezvous store: not here, ", result.out, re.MULTILINE)
    assert re.search("^live: workers whose script calls elastirun.train.elastic", result.out, re.MULTILINE)
    assert "--set strikes-cooldown" not in result.out
    assert "--expire" not in result.out and " default" not in result.out.replace("its default;", ""), "only what was given or derived"


def options_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_is_short_and_says_where_the_rest_is(elastirun: Elastirun, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = elastirun("--nnodes=nonsense", "--help", PET_STANDALONE="nonsense")  # nothing else need be right
    assert (result.status, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 101
    names = options_in(result.out)
    assert len(names) <= 20 and {"--help", "--help-all", "--nnodes", "--rdzv-endpoint", "--max-restarts", "--log-dir"} <= {*names}
    assert result.out.splitlines()[-1] == f"elastirun --help-all shows all {len(OPTIONS) + 1} options."


def test_help_all_has_every_option_and_key(elastirun: Elastirun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = elastirun("--nnodes=nonsense", "--help-all", PET_STANDALONE="nonsense")  # nothing else need be right
    assert (result.status, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 101
    places = [
        result.out.index(text) for text in ("auto train.py", "--nnodes=1:3", "--master-addr=node0", *(f"{title}:" for title in GROUPS))
    ]
    assert places == sorted(places)
    assert sorted(options_in(result.out)) == sorted(["--help", *(option.name for option in OPTIONS)])
    assert [*GROUPS][-1] == "From torchrun" and not any(option.new for option in GROUPS["From torchrun"])
    text = " ".join(result.out.split())
    for option in OPTIONS:
        shown = f"[{option.env}={option.default}]" if option.default else f"[{option.env}]"
        assert option.env is None or shown in text.replace("= ", "=")
    for name, key in KEYS.items():
        assert re.search(rf" {name}={re.escape(key.metavar)} [^\]]*\[{key.default}\]", text), name


def test_the_shell_completes_options_and_then_files(elastirun: Elastirun) -> None:
    complete = 'COMP_WORDS=(elastirun "$1") COMP_CWORD=1; _elastirun; echo "${COMPREPLY[@]}"; complete -p elastirun'

    def press_tab(word: str) -> list[str]:
        script = elastirun("--print-completion", "bash").out + complete
        return subprocess.run(
            ["bash", "-c", script, "-", word], capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout.splitlines()

    assert press_tab("--log-l") == ["--log-limit --log-line-prefix-template", "complete -o default -F _elastirun elastirun"]
    assert set(press_tab("--")[0].split()) == {"--help", *(option.name for option in OPTIONS)}
    assert press_tab("tr")[0] == ""
    for shell in ("zsh", "tcsh"):
        words = re.findall(r"[\w-]+", elastirun("--print_completion", shell).out)
        assert {option.name.removeprefix("--") for option in OPTIONS} <= {word.removeprefix("--") for word in words}
    refused = elastirun("--print-completion=fish")
    assert (refused.status, refused.err) == (2, "elastirun: --print-completion: 'fish' is not one of bash, zsh, tcsh\n")


def test_the_examples_of_the_help_work(elastirun: Elastirun) -> None:
    (Path("train.py")).touch()
    examples = re.findall(r"^  elastirun (--.*train\.py.*)$", elastirun("--help").out, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        result = elastirun(*example.split())
        assert (result.status, result.err) == (7, ""), example


def test_the_page_for_those_who_come_from_torchrun_names_every_option_and_key() -> None:
    page = (ROOT / "docs" / "torchrun.md").read_text()
    assert [name for name in (*(option.name for option in OPTIONS), *KEYS) if f"`{name}`" not in page] == []
    keys = page.partition("## Keys of")[2].partition("\n## ")[0]
    documented = {key for row in re.findall(r"^\|([^|]*`[^|]*)\|", keys, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert documented == {*parse.KEYS, *parse.KEYS_WITHOUT_EFFECT, *parse.ETCD_KEYS, *parse.ETCD_ALIASES}


def test_the_full_name_of_a_pod_is_read_from_its_hosts_file(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("train-1", "train-1.train.team.svc.cluster.local", "train-10.other")
    monkeypatch.setattr(socket, "gethostname", lambda: "train-1")
    monkeypatch.setattr("elastirun.agent.host.net.own_names", lambda: (names, ()))
    assert main.this_host() == Host("train-1", names[1:2])
    monkeypatch.setattr("elastirun.agent.host.net.own_names", lambda: (names[:1], ()))
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.example.org")
    assert main.this_host() == Host("train-1", ("train-1.example.org",))


def test_dry_run_says_what_was_detected_and_why(elastirun: Elastirun) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    result = elastirun("--dry-run", "t.py", SLURM_STEP_NODELIST="n[1-2]", **step)
    assert (result.status, result.err) == (0, "")
    assert re.search(r"^  --node-rank +1 +detected: SLURM_NODEID=1$", result.out, re.MULTILINE)
    assert "\ndetected: a Slurm step with one task on each of 2 nodes (SLURM_STEP_ID=0 of SLURM_JOB_ID=7)\n" in result.out
    assert "\ndetected: nothing; not looked for, --standalone is given\n" in elastirun("--dry-run", "--standalone", "t.py").out


def test_version(elastirun: Elastirun) -> None:
    assert re.fullmatch(r"elastirun \d+\.\d+\S*\n", elastirun("--version").out)


# --- a real process


def process(*argv: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "elastirun", *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    result = process("--nnodes=a", "t.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "elastirun: --nnodes: 'a' is not a number of nodes; give N or MIN:MAX, such as 2 or 1:4\n"
    result = process("--dry-run", "--standalone", "t.py", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert process("t.py", cwd=tmp_path, PET_STANDALONE="perhaps").returncode == 2


def test_stdout_that_cannot_be_written_to_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-m", "elastirun", "--version"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-m", "elastirun", "--help"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def fake_torch(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_devices_are_counted_by_asking_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from types import SimpleNamespace as new
def kind(count):
    return new(is_available=lambda: count > 0, device_count=lambda: count)
cuda, xpu, npu, accelerator = kind(8), kind(0), kind(4), kind(8)
_C = new(_get_privateuse1_backend_name=lambda: "npu")
print("noise")
"""
    fake_torch(tmp_path, source, monkeypatch)
    assert [main.count_devices(kind) for kind in ("gpu", "xpu", "npu", "auto", "foo")] == [8, 0, 4, 8, None]


def test_no_torch_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, "raise ImportError('no such luck')", monkeypatch)
    with pytest.raises(ValueError, match=r"ImportError: no such luck\); give a number"):
        main.count_devices("gpu")


@pytest.mark.parametrize(
    ("error", "status", "err"),
    [
        (UsageError("two\nlines"), ExitCode.USAGE, "elastirun: two lines\n"),
        (StartError("port 1 is taken"), ExitCode.SICK, "elastirun: port 1 is taken\n"),
        (BadCommand("no torch"), ExitCode.ENVIRONMENT, "elastirun: no torch\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_agent(
    error: BaseException, status: int, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_with(error, monkeypatch) == status
    assert capsys.readouterr().err == err


def test_a_bug_is_called_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(ZeroDivisionError(), monkeypatch) == ExitCode.BUG
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and err.splitlines()[-1].startswith("elastirun: this is a bug")


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> object:
    def fail(argv: object, warn: bool) -> int:
        raise error

    monkeypatch.setattr(main, "_prepare", fail)
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    return exit_.value.code
