"""The way from given options to the configuration: torchrun's rules, derived values, warnings and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elastirun.cli import command_line
from elastirun.cli.detect.detected import Host
from elastirun.cli.given_options import GivenOptions, MachineFacts
from elastirun.cli.options import OPTIONS
from elastirun.cli.resolve import STARTED_ONCE, resolve
from elastirun.config import Command, Endpoint, Etcd, LaunchConfig, LogPolicy, Preload, Std, StdMap, Timing
from elastirun.errors import StartError, UsageError

NOBODY: Mapping[str, str] = {}
LAPTOP = Host("laptop", ("laptop.example.org",))


def imports(command: Command) -> Preload:
    """Return what a script imports on that machine: those whose names begin with t import torch and numpy."""
    return Preload(("torch",), ("numpy",), "text") if command.script.startswith("t") else Preload(why="no torch")


def resolved(line: str, environ: Mapping[str, str] = NOBODY, host: Host = LAPTOP) -> tuple[LaunchConfig, GivenOptions]:
    """Resolve a command line on a made-up machine with 6 CPUs, 2 GPUs and 3 devices of another kind."""
    given, script = command_line.parse(line.split())
    devices = {"gpu": 2, "auto": 2, "xpu": 0, "npu": 3}
    options = GivenOptions(given, environ)
    return resolve(options, script, MachineFacts(lambda: 6, devices.get, lambda: "new-id", lambda: host, imports)), options


def config_of(line: str, environ: Mapping[str, str] = NOBODY, warnings: int = 0) -> LaunchConfig:
    config, options = resolved(line, environ)
    assert len(options.warnings) == warnings, options.warnings
    return config


def warning_of(line: str, environ: Mapping[str, str] = NOBODY) -> str:
    _, options = resolved(line, environ)
    (warning,) = options.warnings
    assert warning.isprintable()
    return warning


def error_of(line: str, environ: Mapping[str, str] = NOBODY) -> str:
    with pytest.raises((UsageError, StartError)) as caught:
        resolved(line, environ)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_plain_case() -> None:
    command = Command("train.py", ("--lr", "0.1"))
    preload = Preload(why=STARTED_ONCE)
    config = LaunchConfig(command=command, min_nodes=1, max_nodes=1, nproc=1, run_id="new-id", endpoint=None, preload=preload)
    assert config_of("train.py --lr 0.1") == config


# --- the endpoint of the rendezvous


@pytest.mark.parametrize(
    ("line", "endpoint", "static"),
    [
        ("t.py", None, False),
        ("--standalone t.py", None, False),
        ("--standalone --nnodes=1 t.py", None, False),
        ("--standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0 t.py", None, False),
        ("--rdzv-backend=c10d t.py", None, False),
        ("--rdzv-backend=static t.py", None, False),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 t.py", None, False),
        ("--master-addr=10.0.0.1 t.py", None, False),  # torchrun ignores it too when there is no port
        ("--master-port=0 t.py", None, False),
        ("--master-port=1234 t.py", Endpoint("127.0.0.1", 1234), True),
        ("--rdzv-endpoint=localhost:7 t.py", Endpoint("localhost", 7), True),
        ("--rdzv-endpoint=h --rdzv-backend=c10d t.py", Endpoint("h", 29400), False),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-backend=c10d t.py", Endpoint("h", 29400), False),
        ("--nnodes=1:3 --rdzv-id=a --rdzv-endpoint=h t.py", Endpoint("h", 29400), False),
        ("--nnodes=3 --rdzv-id=a --rdzv-endpoint=h t.py", Endpoint("h", 29400), False),
        ("--nnodes=1:3 --rdzv-id=a --master-addr=h t.py", Endpoint("h", 29500), False),
        ("--nnodes=2 --rdzv-id=a --rdzv-backend=c10d --master-addr=h --master-port=9 t.py", Endpoint("h", 9), False),
        ("--nnodes=2 --node-rank=1 --rdzv-endpoint=h:7 t.py", Endpoint("h", 7), True),
        ("--nnodes=2 --node-rank=1 --rdzv-endpoint=h t.py", Endpoint("h", 29400), True),
        ("--nnodes=2 --node-rank=1 --rdzv-backend=static --rdzv-endpoint=h t.py", Endpoint("h", 29500), True),
        ("--nnodes=2 --node-rank=0 --master-addr=10.0.0.1 t.py", Endpoint("10.0.0.1", 29500), True),
        ("--nnodes=2 --node-rank=0 --master-addr=[fd00::1] --master-port=8 t.py", Endpoint("fd00::1", 8), True),
    ],
)
def test_meeting_place(line: str, endpoint: Endpoint | None, static: bool) -> None:
    config = config_of(line)
    assert (config.endpoint, config.fixed_ranks) == (endpoint, static)


@pytest.mark.parametrize(
    ("line", "shared", "alone"),
    [
        ("t.py", False, True),
        ("--master-port=7 t.py", True, True),
        ("--rdzv-endpoint=h:7 t.py", True, True),
        ("--rdzv-endpoint=h:7 --rdzv-conf=is_host=0 t.py", True, False),
        ("--rdzv-endpoint=h:7 --rdzv-backend=c10d t.py", False, False),
        ("--nnodes=2 --node-rank=1 --master-addr=h t.py", True, False),
        ("--nnodes=2 --node-rank=1 --rdzv-endpoint=h t.py", True, False),
        ("--nnodes=1:2 --rdzv-id=j --master-addr=h t.py", True, False),
        ("--nnodes=1:2 --rdzv-id=j --rdzv-endpoint=h t.py", False, False),
    ],
)
def test_where_workers_meet_and_whether_others_can_come(line: str, shared: bool, alone: bool) -> None:
    config = config_of(line)
    assert (config.meet_at_endpoint, config.standalone) == (shared, alone)
    assert not config_of(line, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}).meet_at_endpoint


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("t.py", "new-id"),
        ("--rdzv-id=job t.py", "job"),
        ("--standalone --rdzv-id=job t.py", "job"),
        ("--rdzv-id=none --rdzv-endpoint=h t.py", "new-id"),
        ("--nnodes=2 --rdzv-id=job --rdzv-endpoint=h t.py", "job"),
        ("--nnodes=2 --node-rank=1 --master-addr=h t.py", "none"),
    ],
)
def test_run_id(line: str, run_id: str) -> None:
    assert config_of(line).run_id == run_id


def test_jobs_without_a_name_are_warned_of() -> None:
    assert "give all nodes of a job one name" in warning_of("--nnodes=2 --rdzv-endpoint=h t.py")
    assert "random name" in warning_of("--rdzv-id= t.py")
    assert error_of("--nnodes=2 --rdzv-endpoint=h t.py", {"PET_RDZV_ID": ""}).startswith("PET_RDZV_ID: it is empty")


@pytest.mark.parametrize(
    ("line", "rank", "host"),
    [
        ("t.py", None, None),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h t.py", None, None),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-backend=c10d --node-rank=1 t.py", 1, None),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-conf=is_host=1 t.py", None, True),
        ("--nnodes=2 --node-rank=0 --master-addr=h t.py", 0, True),
        ("--nnodes=2 --node-rank=1 --master-addr=h t.py", 1, False),
        ("--nnodes=2 --node-rank=1 --master-addr=h --rdzv-conf=is_host=t t.py", 1, True),
        ("--nnodes=2 --rdzv-conf=rank=1 --master-addr=h t.py", 1, False),
        ("--master-port=7 t.py", 0, True),
    ],
)
def test_node_rank_and_host(line: str, rank: int | None, host: bool | None) -> None:
    config = config_of(line)
    assert (config.node_rank, config.is_host) == (rank, host)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--standalone --rdzv-endpoint=h:1 t.py", "--rdzv-endpoint is ignored"),
        ("--standalone --rdzv-backend=etcd-v2 t.py", "--rdzv-backend is ignored"),
        ("--standalone --rdzv-backend=etcd t.py", "to try etcd, start one and give its --rdzv-endpoint in place of --standalone"),
        ("--rdzv-backend=etcd-v2 --rdzv-endpoint=h t.py", "version 3 of its API"),
        ("--rdzv-backend=etcd --rdzv-endpoint=h --rdzv-conf=user=u,password_file=f t.py", "goes over the network as it is"),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-conf=cacert=f t.py", "cacert has no effect"),
        ("--standalone --nnodes=1:4 t.py", "this node runs alone"),
        ("--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 t.py", "no other node can join with --rdzv-endpoint=localhost:0"),
        ("--nnodes=1:2 --rdzv-backend=static --node-rank=0 --master-addr=h t.py", "waits for all 2 nodes"),
        ("--nnodes=2 --master-addr=h t.py", "--node-rank is not given, so this is node 0"),
        ("--node-rank=1 t.py", "is --nnodes missing?"),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-backend=c10d --node-rank=2 t.py", "no such place among 2"),
        ("--nnodes=2 --node-rank=1 --master-addr=h --rdzv-conf=rank=0 t.py", "rank=0 is ignored"),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --master-addr=k t.py", "--master-addr is ignored"),
        ("--nnodes=2 --rdzv-conf=rank=2 --master-addr=h t.py", "--rdzv-conf rank=2 is ignored"),
        ("--rdzv-conf=cacert=/x t.py", "cacert has no effect"),
        ("--log-dir=/dev/null -r 3 t.py", "--redirects is ignored"),
        ("--duplicate-stdout-filters=a t.py", "add --tee=3"),
        ("-t 4:1 --nproc-per-node=4 t.py", "no local rank 4 among 4"),
        ("--local-ranks-filter=0,9 t.py", "no local rank 9"),
        ("--show=0,-1,-3,2-5 --nproc-per-node=2 t.py", "--show: there is no rank -3, 2 among 2"),
        ("--log-limit=1M t.py", "--log-limit has no effect"),
        ("--log-limit=1M -t 3 --log-dir=/dev/null t.py", "--log-limit has no effect"),
        ("--signals-to-handle=SIGTERM,SIGFOO t.py", "no signal 'SIGFOO'"),
        ("--store-succession=proof t.py", "--store-succession has no effect: there is no other node"),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-backend=etcd --store-succession=proof t.py", "etcd survives any node"),
        ("--nnodes=2 --node-rank=0 --master-addr=h --store-succession=proof t.py", "the job needs node 0"),
        ("--nnodes=2 --rdzv-id=a --rdzv-backend=c10d --master-addr=h --store-succession=proof t.py", "the job needs node 0"),
        ("--run-path --no-python t.py", "--no-python is ignored"),
        ("--run-path --module t.py", "--module is ignored"),
        ("--rdzv-conf=use_libuv=0 t.py", "--rdzv-conf: 'use_libuv' has no effect: elastirun has no such key"),
        ("--rdzv-conf=join_timout=5 t.py", "'join_timout' (did you mean join_timeout?) has no effect"),
        ("--nnodes=2 --rdzv-id=a --rdzv-endpoint=h --rdzv-backend=c10d --rdzv-conf=timeout=9 t.py", "timeout has no effect with c10d"),
    ],
)
def test_what_torchrun_ignores_silently_is_warned_of(line: str, part: str) -> None:
    assert part in warning_of(line)


def test_the_store_moves_where_that_is_asked_for_and_possible() -> None:
    given = [f"--store-succession={how}" for how in ("proof", "majority", "off")]
    found = [config_of(f"--nnodes=2 --rdzv-id=a --rdzv-endpoint=h {option} t.py") for option in ("", *given)]
    assert [config.store_succession for config in found] == ["majority", "proof", "majority", "off"]
    assert [config.succession for config in found] == [True, True, True, False]
    assert resolved("--store-succession=proof t.py", NOBODY)[0].store_succession == "off"


def test_a_list_of_endpoints_is_for_a_store_that_moves() -> None:
    line = "--nnodes=2 --rdzv-id=a --rdzv-endpoint=h,k:7 {} t.py"
    moving = config_of(line.format("--store-succession=proof"))
    assert (moving.endpoint, moving.other_endpoints) == (Endpoint("h", 29400), (Endpoint("k", 7),))
    variables = {"PET_RDZV_ENDPOINT": "h,k:7", "PET_STORE_SUCCESSION": "proof"}
    assert config_of("--nnodes=2 --rdzv-id=a t.py", variables).other_endpoints == (Endpoint("k", 7),)
    plain = config_of(line.format("--store-succession=off"), warnings=1)
    assert (plain.endpoint, plain.other_endpoints) == (Endpoint("h", 29400), ())
    warning = "--rdzv-endpoint: only h:29400 is used; the others are for --store-succession"
    assert warning_of(line.format("--store-succession=off")) == warning
    shown = [resolved(line.format(option))[1].rows() for option in ("", "--store-succession=off")]
    whole, first = (next((row.value, row.source) for row in rows if row.option == "--rdzv-endpoint") for rows in shown)
    assert whole == ("h:29400,k:7", "derived: --rdzv-endpoint, with c10d's port")
    assert first == ("h:29400", "derived: the first of the list")


def test_the_static_backend_takes_one_endpoint() -> None:
    for backend in ("--rdzv-backend=static", ""):
        error = error_of(f"--nnodes=2 --node-rank=0 {backend} --store-succession=proof --rdzv-endpoint=h,k t.py")
        assert "names several endpoints" in error


def test_ignored_node_numbers_leave_one_node() -> None:
    config = config_of("--standalone --nnodes=1:4 t.py", warnings=1)
    assert (config.min_nodes, config.max_nodes) == (1, 1)
    config = config_of("--nnodes=1:2 --rdzv-backend=static --node-rank=0 --master-addr=h t.py", warnings=1)
    assert (config.min_nodes, config.max_nodes) == (2, 2)


def test_variables_that_an_operator_sets_on_every_pod_are_no_noise() -> None:
    pod = {"PET_NNODES": "1:4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "k", "PET_MASTER_PORT": "1"}
    line = "--rdzv-backend=c10d --rdzv-id=j --rdzv-endpoint=h:29400 t.py"
    assert config_of(line, pod).endpoint == Endpoint("h", 29400)


def test_etcd() -> None:
    conf = "ca_cert=/ca,cert=/c,ssl_cert_key=/k,user=u,password_file=/p,etcd_prefix=jobs"
    config = config_of(f"--nnodes=1:4 --rdzv-id=j --rdzv-backend=etcd --rdzv-endpoint=https://a,https://b:7 --rdzv-conf={conf} t.py")
    assert config.etcd == Etcd((Endpoint("a", 2379), Endpoint("b", 7)), True, "/ca", "/c", "/k", "u", "/p", "/jobs/")
    assert (config.endpoint, config.standalone, config.min_nodes, config.max_nodes) == (None, False, 1, 4)
    assert config_of("--rdzv-backend=etcd --rdzv-endpoint=a --rdzv-conf=protocol=https t.py").etcd == Etcd((Endpoint("a", 2379),), True)
    assert config_of("--rdzv-backend=static --rdzv-endpoint=a t.py").etcd is None


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--nnodes=2 t.py", ["--nnodes: 2 nodes", "--rdzv-endpoint=HOST", "--master-addr=HOST"]),
        ("--nnodes=1:2 --rdzv-backend=c10d t.py", ["--nnodes: 2 nodes", "--rdzv-endpoint=HOST"]),
        ("--nnodes=2 --master-port=1 t.py", ["--master-addr=HOST"]),
        ("--standalone --nnodes=2 t.py", ["--nnodes", "--standalone"]),
        ("--nnodes=2 --rdzv-endpoint=h:0 t.py", ["--nnodes", "--rdzv-endpoint=h:0"]),
        ("--nnodes=2 --node-rank=2 --master-addr=h t.py", ["--node-rank", "0 to 1", "--nnodes"]),
        ("--rdzv-backend=etcd-v2 t.py", ["--rdzv-backend: etcd runs apart", "--rdzv-endpoint=HOST:2379"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=a,https://b t.py", ["--rdzv-endpoint", "mixes"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=a --rdzv-conf=cert=c t.py", ["--rdzv-conf: cert is given without key"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=a --rdzv-conf=cert=c,key=k t.py", ["cert is for https", "https://HOST"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=http://a --rdzv-conf=protocol=https t.py", ["protocol='https'", "--rdzv-endpoint"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=a --rdzv-conf=user=u t.py", ["user is given without password_file"]),
        ("--rdzv-backend=etcd --rdzv-endpoint=a --rdzv-conf=prefix=/ t.py", ["prefix=''"]),
        ("--module --no-python t", ["--module and --no-python"]),
        ("--rdzv-backend=mine t.py", ["--rdzv-backend: 'mine' is not one of c10d", "plug-ins (torchrun.handlers)", "give c10d or etcd"]),
        ("--grace=5 --shutdown-timeout=6 t.py", ["--grace and --shutdown-timeout"]),
        ("--join-timeout=5 --rdzv-conf=join_timeout=6 t.py", ["--join-timeout and --rdzv-conf join_timeout"]),
        ("--join-timeout=5 --rdzv-conf=timeout=6 t.py", ["--join-timeout and --rdzv-conf timeout"]),
        ("--last-call=5 --rdzv-conf=last_call_timeout=6 t.py", ["--last-call and --rdzv-conf last_call_timeout"]),
        ("--expire=5 --rdzv-conf=keep_alive_interval=6 t.py", ["--expire and --rdzv-conf keep_alive"]),
        ("--rdzv-conf=keep_alive_interval=.1,keep_alive_max_attempt=2 t.py", ["--rdzv-conf", "0.2 seconds"]),
        ("--nproc-per-node=xpu t.py", ["--nproc-per-node: torch can use no xpu"]),
        ("--nproc-per-node=foo t.py", ["--nproc-per-node: torch knows no kind of device 'foo'"]),
    ],
)
def test_what_cannot_be(line: str, parts: list[str]) -> None:
    message = error_of(line)
    assert [part for part in parts if part not in message] == [], message


def test_the_variable_is_named_when_the_value_came_from_it() -> None:
    assert error_of("t.py", {"PET_NNODES": "two"}).startswith("PET_NNODES: 'two'")
    assert error_of("t.py", {"PET_STANDALONE": "perhaps"}).startswith("PET_STANDALONE: 'perhaps'")
    assert error_of("t.py", {"PET_START_METHOD": "thread"}).startswith("PET_START_METHOD: 'thread'")
    assert error_of("--module t", {"PET_NO_PYTHON": "1"}).startswith("--module and PET_NO_PYTHON")
    assert error_of("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}).startswith("TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'x'")


def test_the_command_line_goes_before_the_environment() -> None:
    environ = {"PET_NNODES": "nonsense", "PET_STANDALONE": "0", "PET_ROLE": "env", "PET_MAX_RESTARTS": "3"}
    config = config_of("--nnodes=1 --role=line t.py", environ)
    assert (config.role, config.max_restarts) == ("line", 3)
    assert config_of("--grace=5 t.py", {"PET_SHUTDOWN_TIMEOUT": "6", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}).timing.grace == 5.0


def test_an_empty_variable_is_not_given_unless_that_means_something() -> None:
    empty = {str(option.env): i % 2 * " " for i, option in enumerate(OPTIONS) if not option.flag}
    means = ("PET_RDZV_ID", "PET_ROLE", "PET_SIGNALS_TO_HANDLE", "PET_TOKEN_FILE")
    assert config_of("t.py", {name: text for name, text in empty.items() if name not in means}) == config_of("t.py")
    config = config_of("t.py", {"PET_ROLE": "", "PET_SIGNALS_TO_HANDLE": ""})
    assert (config.role, config.signals) == ("", ())
    assert error_of("--nnodes= t.py").startswith("--nnodes: ''")


# --- the rest


@pytest.mark.parametrize(("value", "count"), [("4", 4), ("cpu", 6), ("gpu", 2), ("auto", 2), ("npu", 3)])
def test_workers(value: str, count: int) -> None:
    assert config_of(f"--nproc-per-node={value} t.py").nproc == count


@pytest.mark.parametrize(("name", "hint"), [("PET_NNODE", "PET_NNODES"), ("PET_MAX_RESTART", "PET_MAX_RESTARTS"), ("PET_X", "")])
def test_a_variable_of_no_option_is_named(name: str, hint: str) -> None:
    found = f" (did you mean {hint}?)" if hint else ""
    assert warning_of("t.py", {name: "2"}) == f"{name} has no effect: no option has this variable{found}"
    config_of("t.py", {"PETS": "2", "pet_nnode": "2"})


@pytest.mark.parametrize("key", ["restart-pause", "strikes-cooldown", "log-mode", "first-step-timeout"])
def test_a_variable_that_is_a_key_of_set_is_named(key: str) -> None:
    name = f"PET_{key.upper().replace('-', '_')}"
    warning = warning_of("t.py", {name: "640"})
    assert warning.startswith(f"{name} has no effect: {key} is a key of --set; write PET_SET={key}=")


def test_keys_of_set_come_from_the_command_line_and_the_environment() -> None:
    environ = {"PET_SET": "restart-pause=1,strikes_cooldown=7"}
    config = config_of("--set=restart-pause=2 --set first-step-timeout=9,restart_pause=3 t.py", environ)
    assert (config.timing.restart_pause, config.strikes_cooldown, config.first_step_timeout) == (3.0, 7.0, 9.0)
    assert config_of("--set= t.py", {"PET_SET": " "}) == config_of("t.py")
    assert config_of("--set= --set=restart-pause=2 --set= t.py").timing.restart_pause == 2.0
    assert config_of("--set=restart-pause=1,restart_pause=2,restart-pause=3 t.py").timing.restart_pause == 3.0
    assert error_of("t.py", {"PET_SET": "restart-pause=x"}).startswith("PET_SET restart-pause: 'x' is not a number of seconds")


@pytest.mark.parametrize(
    ("line", "late"),
    [
        ("train.py --nnodes=2", "--nnodes"),
        ("train.py --lr 1 --nproc_per_node 2", "--nproc-per-node"),
        ("--nnodes=1 train.py --nnodes=2 --max-restarts=3", "--max-restarts"),
        ("--nnodes=1 train.py --nnodes=2", ""),  # the script has such an option, too
        ("train.py -- --nnodes=2", ""),
        ("train.py --log-dir=x --module --node-rank=0 --nnode=2", ""),
    ],
)
def test_an_option_after_the_script_is_warned_of(line: str, late: str) -> None:
    where = "stands after 'train.py', so the script gets it and elastirun does not; put it before the script"
    _, options = resolved(line)
    assert options.warnings == ([f"{late} {where}"] if late else [])


def test_auto_counts_cpus_where_there_is_no_accelerator() -> None:
    options = GivenOptions({"nproc_per_node": "auto"}, {})
    assert resolve(options, ["t.py"], MachineFacts(lambda: 6, lambda kind: 0, lambda: "id", lambda: LAPTOP, imports)).nproc == 6


def test_times() -> None:
    assert config_of("t.py").timing == Timing()
    given = config_of("--join-timeout=1 --last-call=0 --expire=3 --store-grace=4 --grace=2.5 t.py").timing
    assert given == Timing(join_timeout=1, last_call=0, beat=0.5, expire=3, store_grace=4, grace=2.5, failure_grace=2.5)
    conf = "join_timeout=7,last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=1"
    given = config_of(f"--rdzv-conf={conf} --shutdown-timeout=0 t.py").timing
    assert given == Timing(join_timeout=7, last_call=8, beat=0.25, expire=1, grace=0, failure_grace=0)
    assert config_of("--grace=60 t.py").timing.failure_grace == 60, "one grace on every path, when it is asked for"
    assert config_of("--shutdown-timeout=30 t.py").timing.failure_grace == 30
    assert config_of("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).timing.failure_grace == 9
    assert config_of("--grace=60 --failure-grace=3 --set=restart-pause=0 t.py").timing == Timing(grace=60, failure_grace=3, restart_pause=0)
    assert config_of("--rdzv-conf=keep_alive_interval=2 t.py").timing.expire == 6.0
    assert config_of("--rdzv-conf=keep_alive_max_attempt=2 t.py").timing.expire == 10.0
    assert config_of("--join-timeout=7 --rdzv-conf=join_timeout=7 t.py").timing.join_timeout == 7.0
    assert config_of("--join-timeout=7 t.py", {"PET_RDZV_CONF": "join_timeout=8"}).timing.join_timeout == 7.0
    assert config_of("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).timing.grace == 9.0
    assert config_of("--nnodes=2 --node-rank=0 --master-addr=h t.py").timing.join_timeout == 900.0


def test_timeout_of_rdzv_conf_counts_where_torch_reads_it() -> None:
    """Torch reads the key for static, which is its default, and for etcd."""
    nodes = "--nnodes=2 --rdzv-id=a --rdzv-endpoint=h"

    def join_timeout(line: str, warnings: int = 0) -> float:
        return config_of(f"{line} t.py", warnings=warnings).timing.join_timeout

    assert join_timeout("--nnodes=2 --node-rank=0 --master-addr=h --rdzv-conf=timeout=9") == 9
    assert join_timeout(f"{nodes} --rdzv-conf=timeout=9") == join_timeout(f"{nodes} --rdzv-backend=etcd --rdzv-conf=timeout=9") == 9
    assert join_timeout(f"{nodes} --rdzv-conf=timeout=9,join_timeout=7") == 7
    assert join_timeout(f"{nodes} --rdzv-backend=c10d --rdzv-conf=timeout=9", warnings=1) == Timing.join_timeout
    assert join_timeout("--standalone --rdzv-conf=timeout=9") == Timing.join_timeout


@pytest.mark.parametrize("name", ["TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"])
def test_variables_of_torchrun_s_agent_without_effect_are_warned_of(name: str) -> None:
    assert warning_of("t.py", {name: "9"}).startswith(f"{name} has no effect: ")


@pytest.mark.parametrize("line", ["--logs-specs=default t.py", "--logs-specs= t.py"])
def test_the_default_layout_of_logs_may_be_named(line: str) -> None:
    assert config_of(line) == config_of("t.py")


@pytest.mark.parametrize("line", ["", "--expire=1", "--expire=1.9", "--rdzv-conf=keep_alive_interval=0.4", "--expire=900"])
def test_a_node_beats_often_enough_not_to_be_lost(line: str) -> None:
    timing = config_of(f"{line} t.py").timing
    assert timing.expire >= 4 * timing.beat > 0


def test_logs() -> None:
    line = "-r 1:2 -t 3 --log-dir=/x --local-ranks-filter=0 --duplicate-stdout-filters=a,b --duplicate-stderr-filters=c --nproc-per-node=2"
    config = config_of(f"{line} --event-log-handler=console t.py", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}"})
    redirects = StdMap(Std.NONE, ((1, Std.ERR),))
    assert config.logs == LogPolicy(Path("/x"), redirects, StdMap(Std.ALL), frozenset({0}), ("a", "b"), ("c",), "${rank}", "console")


def test_the_prefix_of_teed_lines_comes_from_the_option_then_from_its_variable_then_from_torchruns_older_one() -> None:
    older, variable = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "older"}, {"PET_LOG_LINE_PREFIX_TEMPLATE": "variable"}
    line = "-t 3 --log-line-prefix-template"
    assert config_of(f"{line}=${{hostname}}> t.py", older | variable).logs.prefix_template == "${hostname}>"
    assert config_of("-t 3 t.py", older | variable).logs.prefix_template == "variable"
    assert config_of(f"{line}= t.py", older | variable).logs.prefix_template == "older"
    assert config_of("-t 3 t.py", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}).logs.prefix_template is None
    assert "--log-line-prefix-template has no effect" in warning_of("--log-line-prefix-template=x t.py")


def test_what_is_shown_and_how_much_is_kept() -> None:
    logs = config_of("--show -1,0 --log-limit=2M -r 3 t.py").logs  # a value that begins with - may stand by itself
    assert (logs.show, logs.limit) == (((-1, -1), (0, 0)), 2 << 20)
    assert config_of("--nnodes=2 --rdzv-endpoint=h --rdzv-id=j t.py", {"PET_SHOW": "99"}).logs.show == ((99, 99),)
    assert (config_of("t.py").logs.show, config_of("t.py").logs.limit) == (None, 0)


def test_the_command() -> None:
    assert config_of("-m pkg.mod -m").command == Command("pkg.mod", ("-m",), module=True)
    assert config_of("--no-python ./run.sh").command == Command("./run.sh", no_python=True)
    assert config_of("--run-path --module t.py", warnings=1).command == Command("t.py", run_path=True)


def test_the_rest_is_taken_over() -> None:
    line = "--local-addr=[fd00::1] --role=a --max-restarts=2 --signals-to-handle=USR1 --numa-binding=core-complex --virtual-local-rank t.py"
    config = config_of(line)
    assert (config.local_addr, config.role, config.max_restarts, config.signals) == ("fd00::1", "a", 2, ("SIGUSR1",))
    assert (config.numa_binding, config.virtual_local_rank) == ("core-complex", True)
    assert config_of("t.py", {"PET_LOCAL_ADDR": "", "PET_LOG_DIR": ""}).local_addr is None


def test_the_ports_that_this_node_may_listen_on() -> None:
    assert config_of("--port-range=29600:29699 t.py").port_range == config_of("t.py", {"PET_PORT_RANGE": " 29600:29699"}).port_range
    assert config_of("--port-range=7:7 t.py").port_range == (7, 7)
    assert config_of("t.py", {"PET_PORT_RANGE": ""}).port_range is None
    assert "has no effect: the workers meet at the port of --master-port" in warning_of("--port-range=1:2 --master-port=7 t.py")
    assert config_of("--port-range=1:2 --nnodes=2 --rdzv-id=j --rdzv-endpoint=h t.py").port_range == (1, 2)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("29600", "give FIRST:LAST, such as 29600:29699"),
        ("29600-29699", "give FIRST:LAST"),
        ("1:99999", "ports are from 1 to 65535"),
        ("0:10", "ports are from 1 to 65535"),
        ("20:10", "did you mean 10:20?"),
        ("a:b", "give FIRST:LAST"),
    ],
)
def test_what_is_no_range_of_ports(text: str, hint: str) -> None:
    assert error_of("t.py", {"PET_PORT_RANGE": text}).startswith("PET_PORT_RANGE: ")
    assert hint in error_of(f"--port-range={text} t.py")


def test_where_the_health_port_is() -> None:
    assert config_of("t.py", {"PET_HEALTH_PORT": ""}).health is None
    assert config_of("t.py", {"PET_HEALTH_PORT": "8080"}).health == Endpoint("", 8080)
    assert config_of("--health-port=[::1]:1 t.py", {"PET_HEALTH_PORT": "8080"}).health == Endpoint("::1", 1)
    assert error_of("t.py", {"PET_HEALTH_PORT": "tcp://10.0.0.1:80"}).startswith("PET_HEALTH_PORT: ")


def test_a_second_agent_in_a_container_goes_on_without_the_port_of_the_first() -> None:
    variable = {"PET_HEALTH_PORT": "8080"}
    assert config_of("--standalone t.py", variable).health_optional
    assert not config_of("t.py", variable).health_optional
    assert not config_of("t.py", {**variable, "PET_STANDALONE": "1"}).health_optional
    assert not config_of("--standalone --health-port=8080 t.py", variable).health_optional


def test_a_worker_that_is_a_launcher_leaves_the_health_port_of_its_agent_alone() -> None:
    environ = {"PET_HEALTH_PORT": "8080", "ELASTIRUN_AGENT": "a:1"}
    assert config_of("t.py", environ, warnings=1).health is None
    assert warning_of("t.py", environ).startswith("PET_HEALTH_PORT is ignored")
    assert config_of("--health-port=8081 t.py", environ).health == Endpoint("", 8081)


def test_what_is_preloaded() -> None:
    for line, environ in (
        ("--preload=off --max-restarts=1 t.py", {"PET_PRELOAD": "torch"}),
        ("--max-restarts=1 t.py", {"PET_PRELOAD": "off"}),
        ("--preload= --max-restarts=1 t.py", {}),
    ):
        assert config_of(line, environ).preload == Preload()
    assert config_of("--preload=torch t.py", {"PET_PRELOAD": "json"}).preload == Preload(("torch",))
    assert config_of("-m m", {"PET_PRELOAD": "torch, transformers.models,torch"}).preload == Preload(("torch", "transformers.models"))
    for environ in NOBODY, {"PET_PRELOAD": ""}, {"PET_PRELOAD": "auto"}:
        assert config_of("--max-restarts=1 t.py", environ).preload == Preload(("torch",), ("numpy",), "text")
    assert config_of("--preload=json,auto --max-restarts=1 t.py").preload == Preload(("json", "torch"), ("numpy",), "text")
    assert config_of("--max-restarts=1 s.py").preload == Preload(why="no torch")
    for text in ("torch,", "a b", "./t.py", "-m", "a..b"):
        assert error_of("t.py", {"PET_PRELOAD": text}).startswith("PET_PRELOAD: ")


def test_what_the_text_of_a_script_decides_is_shown() -> None:
    for line, shown in (
        ("--nproc-per-node=2 t.py", ("torch; if possible also numpy", "derived: text")),
        ("--nproc-per-node=2 s.py", ("off", "derived: no torch")),
        ("t.py", ("off", f"derived: {STARTED_ONCE}")),
    ):
        _, options = resolved(line)
        assert [(row.value, row.source) for row in options.rows() if row.option == "--preload"] == [shown]


@pytest.mark.parametrize("options", ["--nproc-per-node=2", "--max-restarts=1", "--nnodes=1:2 --rdzv-id=a --rdzv-endpoint=h"])
def test_what_is_started_more_than_once_is_worth_a_fork_server(options: str) -> None:
    assert config_of("--preload=auto t.py").preload == Preload(why=STARTED_ONCE)
    assert config_of("--keep-warm=10m t.py").preload == Preload(("torch",), ("numpy",), "text", keep_warm=600.0), "the next job needs it"
    assert config_of("--keep-warm=10m s.py").preload == Preload(why="no torch"), "there is nothing to keep"
    assert config_of("--preload=json,auto t.py").preload == Preload(("json",), why=STARTED_ONCE)
    assert config_of("--preload=torch t.py").preload == Preload(("torch",))
    assert config_of(f"{options} t.py").preload.modules == ("torch",)


@pytest.mark.parametrize(
    ("line", "environ", "name"),
    [
        ("--no-python ./run.sh", {}, "--no-python"),
        ("--run-path t.py", {}, "--run-path"),
        ("--numa-binding=node t.py", {}, "--numa-binding"),
        ("t.py", {"PET_VIRTUAL_LOCAL_RANK": "1"}, "PET_VIRTUAL_LOCAL_RANK"),
        ("t.py", {"PYTHON_EXEC": "/usr/bin/python3"}, "PYTHON_EXEC"),
    ],
)
def test_where_nothing_can_be_preloaded_it_is_said(line: str, environ: dict[str, str], name: str) -> None:
    for value in ("torch", "auto"):
        why = f"with {name} workers are executed"
        assert config_of(f"--preload={value} {line}", environ, warnings=1).preload == Preload(why=why)
        assert warning_of(f"--preload={value} {line}", environ) == f"--preload has no effect: {why}"
    assert config_of(line, environ).preload == Preload(why=f"with {name} workers are executed"), "by default without a warning"


def test_virtual_local_ranks_need_a_gpu_each() -> None:
    line = "--virtual-local-rank --nproc-per-node=2 t.py"
    assert "CUDA_VISIBLE_DEVICES lists 1" in error_of(line, {"CUDA_VISIBLE_DEVICES": "3"})
    for visible in ("3,4", ""):
        assert config_of(line, {"CUDA_VISIBLE_DEVICES": visible}).nproc == 2
    assert config_of(line).nproc == 2, "as many as GPUs"
    assert "3 workers need a GPU each, this node has 2" in error_of(line.replace("node=2", "node=3"))


def test_rows_say_where_each_value_came_from() -> None:
    _, options = resolved(
        "--nnodes=2 --rdzv-endpoint=h --nproc-per-node=cpu t.py", {"PET_ROLE": "x", "PET_RDZV_ID": "j", "PET_LOG_DIR": "a\nb"}
    )
    rows = {row.option: (row.value, row.source) for row in options.rows()}
    assert rows["--nnodes"] == ("2", "command line")
    assert rows["--rdzv-endpoint"] == ("h:29400", "derived: --rdzv-endpoint, with c10d's port")
    assert rows["--rdzv-backend"] == ("c10d", "derived: an endpoint and no --node-rank")
    assert rows["--role"] == ("x", "environment PET_ROLE")
    assert rows["--log-dir"] == (r"'a\nb'", "environment PET_LOG_DIR")
    assert rows["--nproc-per-node"] == ("6", "derived: usable CPUs")
    assert rows["--monitor-interval"] == ("0.1", "default")
    assert rows["--module"] == ("no", "default")


def test_variables_that_name_two_places_to_meet_are_said() -> None:
    both = {"PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "j", "PET_NNODES": "2", "PET_MASTER_PORT": "1"}
    config_of("t.py", both | {"PET_MASTER_ADDR": "h"})
    config_of("--rdzv-endpoint=k:1 t.py", both | {"PET_MASTER_ADDR": "h"})  # the command line goes before variables
    assert warning_of("t.py", both | {"PET_MASTER_ADDR": "k"}) == "PET_MASTER_ADDR is ignored: PET_RDZV_ENDPOINT goes before it"


def test_signals_to_pass_on() -> None:
    assert config_of("--forward-signals=USR1,sigusr2 t.py").forward_signals == ("SIGUSR1", "SIGUSR2")
    assert config_of("t.py").forward_signals == ()
    assert "--forward-signals and --signals-to-handle contradict" in error_of("--forward-signals=HUP --signals-to-handle=TERM,HUP t.py")


def test_which_failures_count() -> None:
    config = config_of("--restart-window=90 --fail-fast --exit-code-from-worker t.py")
    assert (config.restart_window, config.fail_fast, config.exit_code_from_worker) == (90.0, True, True)
    assert [config_of(text).hang_timeout for text in ("t.py", "--hang-timeout=auto t.py", "--hang-timeout=90 t.py")] == [None, 0.0, 90.0]
    assert [config_of(text).first_step_timeout for text in ("t.py", "--set=first-step-timeout=90 t.py")] == [None, 90.0]
    assert (config_of("t.py").restart_window, config_of("t.py").fail_fast) == (0.0, False)


def test_a_mesh_and_a_unit_of_nodes() -> None:
    where = "--nnodes=1:4 --nproc-per-node=4 --rdzv-endpoint=h --rdzv-id=j"
    config = config_of(f"{where} --mesh=dp=auto,pp=2,tp=4 t.py")
    assert (config.mesh, config.mesh_of_rounds, config.node_unit) == ("dp=auto,pp=2,tp=4", "dp=auto,pp=2,tp=4", 1)
    config = config_of(f"{where} --node-unit=2 t.py")
    assert (config.mesh, config.mesh_of_rounds) == ("", "dp=auto,node=2,worker=4")
    assert config_of(f"{where} --node-unit=1 t.py").mesh_of_rounds == config_of("t.py").mesh_of_rounds == ""
    assert config_of("--nproc-per-node=4 t.py", {"PET_MESH": "dp=auto,tp=2"}).mesh == "dp=auto,tp=2"
    assert "4 of the workers of 4 nodes like this one are never started" in warning_of(f"{where} --mesh=dp=auto,tp=3 t.py")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--mesh=dp=2,tp=2", "--mesh: exactly one dimension has the size auto; write it as in dp=auto,pp=2,tp=4"),
        (
            "--mesh=dp=auto,tp=8",
            "form no round: one replica of dp=auto,tp=8 needs 8 workers on nodes of at least 8, and 0 are here",
        ),
        (
            "--mesh=dp=auto,pp=8,tp=4",
            "form no round: one replica of dp=auto,pp=8,tp=4 needs 32 workers",
        ),
        ("--mesh=dp=auto,tp=4 --node-unit=2", "--mesh and --node-unit exclude each other; leave one of them out"),
        ("--node-unit=5", "--node-unit: 4 nodes like this one, the most that --nnodes allows, form no round: one replica"),
        ("--node-unit=70000", "--node-unit: 'node=70000' is no dimension of a mesh"),
        ("--nnodes=3 --mesh=dp=auto,pp=2,tp=4", "form no round: the mesh takes 2 of them, and --nnodes wants at least 3"),
        (
            "--nnodes=1 --mesh=pp=2,dp=auto,tp=2",
            "form no round: pp=2,dp=auto,tp=2 needs 2 or more nodes",
        ),
        ("--node-unit=0", "--node-unit: 0 is out of range; give a whole number of at least 1"),
        ("--rdzv-backend=static --node-rank=0 --mesh=dp=auto", "and static fixes them; give --rdzv-backend=c10d"),
    ],
)
def test_a_mesh_that_no_round_could_have(options: str, error: str) -> None:
    assert error in error_of(f"--nnodes=1:4 --nproc-per-node=4 --rdzv-endpoint=h --rdzv-id=j {options} t.py")


def test_how_often_a_node_may_fail() -> None:
    assert (config_of("t.py").strikes, config_of("t.py").strikes_cooldown) == (0, 600.0)
    config = config_of("--strikes=3 --set=strikes-cooldown=60 t.py")
    assert (config.strikes, config.strikes_cooldown) == (3, 60.0)
    assert config_of("t.py", {"PET_STRIKES": "2"}).strikes == 2
