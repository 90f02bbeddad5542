"""Where, with how many and in which order the nodes meet: torchrun's rules for --nnodes, --rdzv-* and --master-*, and etcd's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastirun.cli import parse
from elastirun.cli.given_options import COMMAND_LINE, Facts, Reading
from elastirun.config import Endpoint, Etcd, LaunchConfig
from elastirun.errors import UsageError

C10D_PORT, STATIC_PORT = 29400, 29500
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's: "1" gives the workers a store and a port of their own


@dataclass(frozen=True)
class Meeting:
    low: int
    high: int
    endpoint: Endpoint | None
    etcd: Etcd | None
    endpoint_option: str
    meet_at_endpoint: bool
    static: bool
    node_rank: int | None
    is_host: bool | None
    run_id: str


def meeting(r: Reading, conf: parse.RdzvConf, facts: Facts) -> Meeting:
    low, high = asked = r.read("nnodes", parse.nodes)
    etcd: Etcd | None = None
    endpoint: Endpoint | None = None
    if r.flag("standalone"):
        backend, why = _alone_backend(r), r.label("standalone")
        etcd = Etcd(()) if backend == "etcd" else None
    elif (backend := _backend(r, low, high)) == "etcd":
        etcd, why = _etcd(r, conf), ""
    else:
        endpoint, why = _endpoint(r, backend, high)
    if endpoint is None and not (etcd and etcd.endpoints):
        low, high = _alone(r, low, high, why)
    static = backend == "static" and endpoint is not None
    if static and low < high:
        r.warn(f"{r.label('nnodes')}: {backend} always waits for all {high} nodes; for {low} to {high} use --rdzv-backend=c10d")
        low = high
    if (low, high) != asked:
        r.derive("nnodes", f"{low}:{high}", why if endpoint is None else "the static backend")
    for key, _ in () if etcd else conf.etcd:
        r.warn(f"{r.label('rdzv_conf')}: {key} has no effect, it is for etcd")
    node_rank = _node_rank(r, conf, static, high)
    is_host = node_rank == 0 if conf.is_host is None and static else conf.is_host
    where = ", ".join(map(str, etcd.endpoints)) if etcd else str(endpoint)
    option = "rdzv_endpoint" if (r.text("rdzv_endpoint") or "").strip() else "master_port"
    at_endpoint = endpoint is not None and (static or option == "master_port") and r.environ.get(OWN_STORE) != "1"
    run_id = _run_id(r, high, where, static, facts)
    given_with = r.label(option) if endpoint else LaunchConfig.endpoint_option
    return Meeting(low, high, endpoint, etcd, given_with, at_endpoint, static, node_rank, is_host, run_id)


def _alone_backend(r: Reading) -> str:
    """c10d, or etcd if that is asked for. What else is given torchrun ignores without a word."""
    standalone = r.label("standalone")
    given, endpoint = r.text("rdzv_backend"), r.text("rdzv_endpoint")
    if endpoint and not endpoint.strip().endswith(":0"):
        r.warn(f"{r.label('rdzv_endpoint')} is ignored: {standalone} is for this node alone")
    backend = "etcd" if given == "etcd" else "c10d"
    if given != backend and r.level("rdzv_backend"):
        r.warn(f"{r.label('rdzv_backend')} is ignored: {standalone} is for this node alone")
    r.derive("rdzv_backend", backend, standalone)
    r.derive("rdzv_endpoint", "private", standalone)
    return backend


def _alone(r: Reading, low: int, high: int, why: str) -> tuple[int, int]:
    if low > 1:
        raise UsageError(f"{r.label('nnodes')}: {low} nodes cannot meet with {why}; give all the same --rdzv-endpoint=HOST instead")
    if high > 1:
        r.warn(f"{r.label('nnodes')}: no other node can join with {why}; this node runs alone")
    return 1, 1


def _backend(r: Reading, low: int, high: int) -> str:
    backend = r.read("rdzv_backend", parse.choice("c10d", "static", "etcd", "etcd-v2"))
    if backend == "etcd-v2":
        r.warn(f"{r.label('rdzv_backend')}: etcd-v2 is the same as etcd here: version 3 of its API, the only one that etcd still has")
        r.derive("rdzv_backend", "etcd", r.label("rdzv_backend"))
        return "etcd"
    if r.level("rdzv_backend") or high == 1:
        return backend
    if low < high:
        r.derive("rdzv_backend", "c10d", "MIN:MAX nodes")
        return "c10d"
    if (r.text("rdzv_endpoint") or "").strip() and not r.level("node_rank"):
        r.derive("rdzv_backend", "c10d", "an endpoint and no --node-rank")
        return "c10d"
    return backend


def _endpoint(r: Reading, backend: str, high: int) -> tuple[Endpoint | None, str]:
    """Where the nodes meet, or None for a private place, and why."""
    master = r.level("master_addr") if high > 1 else backend == "static" and r.level("master_port")
    if (r.text("rdzv_endpoint") or "").strip():
        port = STATIC_PORT if backend == "static" and r.level("rdzv_backend") else C10D_PORT
        endpoint = r.read("rdzv_endpoint", lambda text: parse.endpoint(text, port))
        why = f"{r.label('rdzv_endpoint')}={endpoint}"
        if str(endpoint) != r.text("rdzv_endpoint"):
            r.derive("rdzv_endpoint", endpoint, f"{r.label('rdzv_endpoint')}, with {backend}'s port")
        for dest, own in (("master_addr", endpoint.host), ("master_port", str(endpoint.port))):
            if r.level(dest) == COMMAND_LINE and r.text(dest) != own:
                r.warn(f"{r.label(dest)} is ignored: {r.label('rdzv_endpoint')} goes before it")
    elif master:
        number = r.optional("master_port", parse.integer(0, 65535))
        endpoint = Endpoint(r.read("master_addr", parse.host), STATIC_PORT if number is None else number)
        why = f"{r.label('master_port')}={number}"
        r.derive("rdzv_endpoint", endpoint, "--master-addr and --master-port")
    elif high > 1:
        how = "--rdzv-endpoint=HOST:29400, or --master-addr=HOST and each its own --node-rank"
        raise UsageError(f"{r.label('nnodes')}: {high} nodes need a place to meet; give all the same {how}")
    else:
        r.derive("rdzv_endpoint", "private", "one node without an endpoint")
        return None, "one node"
    if endpoint.port:
        return endpoint, why
    r.derive("rdzv_endpoint", "private", f"port 0 of {why}")
    return None, why


def _etcd(r: Reading, conf: parse.RdzvConf) -> Etcd:
    label, given = r.label("rdzv_conf"), dict(conf.etcd)
    if not (r.text("rdzv_endpoint") or "").strip():
        how = f"--rdzv-endpoint=HOST:{parse.ETCD_PORT},HOST:{parse.ETCD_PORT} (its servers, the same on every node)"
        raise UsageError(f"{r.label('rdzv_backend')}: etcd runs apart from the job; give {how}")
    https, endpoints = r.read("rdzv_endpoint", parse.etcd_endpoints)
    protocol = given.get("protocol")
    if protocol not in (None, "http", "https") or (protocol and https is not None and https != (protocol == "https")):
        raise UsageError(f"{label}: protocol={parse.quote(protocol)} does not go with {r.label('rdzv_endpoint')}; give https://HOST there")
    tls = https or protocol == "https"
    for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")):
        if one in given and other not in given:
            raise UsageError(f"{label}: {one} is given without {other}; give both, or neither")
    for key in ("cacert", "cert"):
        if key in given and not tls:
            raise UsageError(f"{label}: {key} is for https; write {r.label('rdzv_endpoint')}=https://HOST:{parse.ETCD_PORT}")
    if "user" in given and not tls:
        r.warn(f"{label}: without https the password goes over the network as it is")
    prefix = given.get("prefix", Etcd.prefix).strip("/")
    if not re.fullmatch(r"[!-~]{1,200}", prefix):
        raise UsageError(f"{label}: prefix={parse.quote(prefix)} is not 1 to 200 printable ASCII characters without blanks")
    return Etcd(
        endpoints,
        tls,
        ca_cert=given.get("cacert"),
        cert=given.get("cert"),
        key=given.get("key"),
        user=given.get("user"),
        password_file=given.get("password_file"),
        prefix=f"/{prefix}/",
    )


def _node_rank(r: Reading, conf: parse.RdzvConf, static: bool, high: int) -> int | None:
    label = r.label("node_rank")
    rank = r.read("node_rank", parse.integer(0)) if r.level("node_rank") else None
    if rank is None and conf.rank is not None:
        rank, label = conf.rank, f"{r.label('rdzv_conf')} rank"
        r.derive("node_rank", rank, label)
    elif rank is not None and conf.rank not in (None, rank):
        r.warn(f"{r.label('rdzv_conf')}: rank={conf.rank} is ignored, {label}={rank} goes before it")
    if rank is None:
        if not static:
            r.derive("node_rank", "-", "ranks are given as nodes join")
        elif high > 1:
            r.warn("--node-rank is not given, so this is node 0; with the static backend each node needs its own")
        return 0 if static else None
    if rank < high:
        return rank
    if static and r.level("node_rank"):
        raise UsageError(f"{label}: there is no node {rank} among {high}; give 0 to {high - 1}, or raise --nnodes")
    places = f"there is no such place among {high}" if high > 1 else "this node runs alone"
    r.warn(f"{label}={rank} is ignored: {places}" + ("" if r.level("nnodes") else "; is --nnodes missing?"))
    r.derive("node_rank", 0 if static else "-", places)
    return 0 if static else None


def _run_id(r: Reading, high: int, where: str, static: bool, facts: Facts) -> str:
    run_id, label = r.read("rdzv_id", parse.name), r.label("rdzv_id")
    if not run_id.strip():
        if high > 1:
            raise UsageError(f"{label}: it is empty, and nodes need a common name to meet; give all nodes of the job the same")
        r.warn(f"{label}: it is empty; a random name is taken")
    elif run_id != "none":
        return run_id
    elif high > 1:
        if not static:
            r.warn(f"--rdzv-id is not given: jobs without one that use {where} are taken for one job; give all nodes of a job one name")
        return run_id
    run_id = facts.new_id()
    r.derive("rdzv_id", run_id, "random, for one node")
    return run_id
