"""Resolves --nnodes, --rdzv-*, --master-* and --node-rank: the store where the nodes meet, how many nodes, and the rank of this one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastirun.cli import parse
from elastirun.cli.detect.detected import Detected, nothing
from elastirun.cli.detect.schedulers import detect
from elastirun.cli.given_options import GivenOptions, MachineFacts, Origin
from elastirun.config import Endpoint, Etcd, RendezvousConfig
from elastirun.errors import UsageError

C10D_PORT, STATIC_PORT = 29400, 29500  # torchrun's defaults
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's variable: "1" gives the workers a store and a port of their own


@dataclass(frozen=True)
class _Store:
    """The store where the nodes meet. With neither endpoint nor etcd it is private to this agent."""

    endpoint: Endpoint | None = None
    others: tuple[Endpoint, ...] = ()  # of the list, where the store may be once it has moved
    etcd: Etcd | None = None
    why_private: str = ""  # in words, for messages

    @property
    def private(self) -> bool:
        return self.endpoint is None and self.etcd is None

    def __str__(self) -> str:
        return ", ".join(map(str, self.etcd.endpoints)) if self.etcd else str(self.endpoint)


def resolve_rendezvous(options: GivenOptions, conf: parse.RdzvConf, facts: MachineFacts) -> RendezvousConfig:
    """Apply torchrun's rules, and first detect what is missing. Raises ``UsageError``; adds to the warnings of ``options``."""
    options.detected = _detected(options, facts)
    asked = options.read("nnodes", parse.nodes)
    backend = _backend(options, *asked)
    store = _store(options, conf, backend, max_nodes=asked[1])
    static = backend == "static" and store.endpoint is not None
    min_nodes, max_nodes = _node_limits(options, store, static, *asked)
    _warn_of_conf(options, conf, store, max_nodes)
    node_rank = _node_rank(options, conf, static, max_nodes)
    port_option = "rdzv_endpoint" if options.has_text("rdzv_endpoint") else "master_port"
    meet_at_endpoint = store.endpoint is not None and (static or port_option == "master_port") and options.environ.get(OWN_STORE) != "1"
    succession = _succession(options, store, static or meet_at_endpoint, max_nodes)
    return RendezvousConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        endpoint=store.endpoint,
        other_endpoints=_other_endpoints(options, store, succession != "off"),
        etcd=store.etcd,
        endpoint_option=options.label(port_option) if store.endpoint else RendezvousConfig.endpoint_option,
        meet_at_endpoint=meet_at_endpoint,
        fixed_ranks=static,
        node_rank=node_rank,
        is_host=conf.is_host if conf.is_host is not None else node_rank == 0 if static else options.detected.is_host,
        run_id=_run_id(options, facts, store, static, max_nodes),
        store_succession=succession,
    )


def _warn_of_conf(options: GivenOptions, conf: parse.RdzvConf, store: _Store, max_nodes: int) -> None:
    """Warn of keys of --rdzv-conf without effect. torchrun ignores them silently."""
    label = options.label("rdzv_conf")
    for key, _ in () if store.etcd else conf.etcd:
        options.warn(f"{label}: {key} has no effect, it is for etcd")
    if conf.timeout is not None and max_nodes > 1 and not reads_timeout(options):
        options.warn(f"{label}: timeout has no effect with c10d, as under torchrun; write join_timeout for how long to wait for nodes")
    for key in conf.unknown:
        options.warn(f"{label}: {key} has no effect: elastirun has no such key")


def reads_timeout(options: GivenOptions) -> bool:
    """Tell whether the key ``timeout`` of --rdzv-conf counts. Torch reads it for static, its default, and for etcd, but not for c10d."""
    return not (options.flag("standalone") or options.is_given("rdzv_backend") and options.text("rdzv_backend") == "c10d")


# --- detection


def _detected(options: GivenOptions, facts: MachineFacts) -> Detected:
    """Return what a scheduler says; nothing where the command says by itself how this node meets others, or that it meets none."""
    named = [dest for dest in ("rdzv_endpoint", "master_addr", "master_port") if options.is_given(dest) and options.has_text(dest)]
    named += ["standalone"] if options.flag("standalone") else []
    asked = options.read("nnodes", parse.nodes)
    several = asked[1] > 1
    if options.is_given("nnodes") and not several:
        named.append("nnodes")
    if options.is_given("rdzv_backend") and options.text("rdzv_backend") != "c10d":  # static has fixed ranks; etcd is not of the job
        named.append("rdzv_backend")
    if options.read("detect", parse.choice("auto", "off")) == "off":
        named = ["detect"]
    if named:
        return nothing(f"not looked for, {options.label(named[0])} is given")
    found = detect(options.environ, facts.host, several)
    if "last_call" in found.values and asked[1] > parse.nodes(found.values["nnodes"][0])[1]:  # the rest do not come
        found = replace(found, values={dest: value for dest, value in found.values.items() if dest != "last_call"})
    if found.warning and not several:
        options.warn(found.warning)
    return found


# --- the store


def _backend(options: GivenOptions, min_nodes: int, max_nodes: int) -> str:
    """Return "c10d", "static" or "etcd". Several nodes get c10d by default where the static backend cannot work for them."""
    if options.flag("standalone"):
        return _standalone_backend(options)
    backend = options.read("rdzv_backend", _backend_name)
    if backend == "etcd-v2":
        label = options.label("rdzv_backend")
        options.warn(f"{label}: etcd-v2 is the same as etcd here: version 3 of its API, the only one that etcd still has")
        options.derive("rdzv_backend", "etcd", label)
        return "etcd"
    why = ""
    if options.detected.where:
        why = "the endpoint was detected"
    elif min_nodes < max_nodes:
        why = "MIN:MAX nodes"
    elif max_nodes > 1 and options.has_text("rdzv_endpoint") and not options.is_given("node_rank"):
        why = "an endpoint and no --node-rank"
    if options.is_given("rdzv_backend") or not why:
        return backend
    options.derive("rdzv_backend", "c10d", why)
    return "c10d"


def _backend_name(text: str) -> str:
    try:
        return parse.choice("c10d", "static", "etcd", "etcd-v2")(text)
    except ValueError as error:
        why = "plug-ins (torchrun.handlers) form rounds of their own, and elastirun's agents form theirs"
        raise ValueError(f"{error}; {why}: give c10d or etcd") from None


def _standalone_backend(options: GivenOptions) -> str:
    """Return c10d. torchrun ignores the other options without a word."""
    standalone = options.label("standalone")
    given, endpoint = options.text("rdzv_backend"), options.text("rdzv_endpoint")
    if endpoint and not endpoint.strip().endswith(":0"):
        options.warn(f"{options.label('rdzv_endpoint')} is ignored: {standalone} is for this node alone")
    if given != "c10d" and options.is_given("rdzv_backend"):
        advice = "; to try etcd, start one and give its --rdzv-endpoint in place of --standalone" if given == "etcd" else ""
        options.warn(f"{options.label('rdzv_backend')} is ignored: {standalone} is for this node alone{advice}")
    options.derive("rdzv_backend", "c10d", standalone)
    options.derive("rdzv_endpoint", "private", standalone)
    return "c10d"


def _store(options: GivenOptions, conf: parse.RdzvConf, backend: str, max_nodes: int) -> _Store:
    others: list[Endpoint] = []
    if options.flag("standalone"):
        return _Store(why_private=options.label("standalone"))
    if backend == "etcd":
        return _Store(etcd=etcd_of(options, conf))
    if options.has_text("rdzv_endpoint"):
        (endpoint, *others), given_as = _rdzv_endpoints(options, backend)
    elif _has_master(options, backend, max_nodes):
        endpoint, given_as = _master_endpoint(options)
    elif max_nodes > 1:
        how = "--rdzv-endpoint=HOST:29400, or --master-addr=HOST and each its own --node-rank"
        found = f" ({options.detected.why})" if options.detected.warning else ""
        raise UsageError(f"{options.label('nnodes')}: {max_nodes} nodes need a place to meet; give all the same {how}{found}")
    else:
        options.derive("rdzv_endpoint", "private", "one node without an endpoint")
        return _Store(why_private="one node")
    if endpoint.port == 0:
        options.derive("rdzv_endpoint", "private", f"port 0 of {given_as}")
        return _Store(why_private=given_as)
    return _Store(endpoint, tuple(others))


def _rdzv_endpoints(options: GivenOptions, backend: str) -> tuple[tuple[Endpoint, ...], str]:
    """Return the endpoints of --rdzv-endpoint, with c10d one or more, and how they were given."""
    label = options.label("rdzv_endpoint")
    port = STATIC_PORT if backend == "static" and options.is_given("rdzv_backend") else C10D_PORT
    one = backend == "static"
    found = options.read("rdzv_endpoint", lambda text: (parse.endpoint(text, port),) if one else parse.endpoints(text, port))
    spelled = ",".join(map(str, found))
    if spelled != options.text("rdzv_endpoint"):
        options.derive("rdzv_endpoint", spelled, f"{label}, with {backend}'s port")
    for dest, same in (("master_addr", found[0].host), ("master_port", str(found[0].port))):
        # An operator may set the variables of one, and the command names the other.
        if options.is_given(dest) and options.origin(dest) >= options.origin("rdzv_endpoint") and options.text(dest) != same:
            options.warn(f"{options.label(dest)} is ignored: {label} goes before it")
    return found, f"{label}={spelled}"


def _has_master(options: GivenOptions, backend: str, max_nodes: int) -> bool:
    """Tell whether --master-addr and --master-port name the store. A single node needs them only for a fixed MASTER_PORT."""
    return options.is_given("master_addr") if max_nodes > 1 else backend == "static" and options.is_given("master_port")


def _master_endpoint(options: GivenOptions) -> tuple[Endpoint, str]:
    """Return the endpoint of --master-addr and --master-port, and how its port was given."""
    port = options.optional("master_port", parse.integer(0, 65535))
    endpoint = Endpoint(options.read("master_addr", parse.host), STATIC_PORT if port is None else port)
    options.derive("rdzv_endpoint", endpoint, "--master-addr and --master-port")
    return endpoint, f"{options.label('master_port')}={port}"


def etcd_of(options: GivenOptions, conf: parse.RdzvConf) -> Etcd:
    """Return the cluster of --rdzv-endpoint, with the settings of --rdzv-conf."""
    label, given = options.label("rdzv_conf"), dict(conf.etcd)
    if not options.has_text("rdzv_endpoint"):
        how = f"--rdzv-endpoint=HOST:{parse.ETCD_PORT},HOST:{parse.ETCD_PORT} (its servers, the same on every node)"
        raise UsageError(f"{options.label('rdzv_backend')}: etcd runs apart from the job; give {how}")
    https, endpoints = options.read("rdzv_endpoint", parse.etcd_endpoints)
    protocol = given.pop("protocol", None)
    if protocol not in (None, "http", "https") or (protocol and https is not None and https != (protocol == "https")):
        where = options.label("rdzv_endpoint")
        raise UsageError(f"{label}: protocol={parse.quote(protocol)} does not go with {where}; give https://HOST there")
    tls = https or protocol == "https"
    _check_credentials(options, given, tls)
    prefix = given.pop("prefix", Etcd.prefix).strip("/")
    if not re.fullmatch(r"[!-~]{1,200}", prefix):
        raise UsageError(f"{label}: prefix={parse.quote(prefix)} is not 1 to 200 printable ASCII characters without blanks")
    return Etcd(endpoints, tls, given.pop("cacert", None), prefix=f"/{prefix}/", **given)


def _check_credentials(options: GivenOptions, given: Mapping[str, str], tls: bool) -> None:
    """Refuse one half of a pair and certificates without TLS; warn of a password without TLS."""
    label = options.label("rdzv_conf")
    for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")):
        if one in given and other not in given:
            raise UsageError(f"{label}: {one} is given without {other}; give both, or neither")
    if tls:
        return
    for key in ("cacert", "cert"):
        if key in given:
            raise UsageError(f"{label}: {key} is for https; write {options.label('rdzv_endpoint')}=https://HOST:{parse.ETCD_PORT}")
    if "user" in given:
        options.warn(f"{label}: without https the password goes over the network as it is")


# --- how many nodes, which rank, which name


def _node_limits(options: GivenOptions, store: _Store, static: bool, min_nodes: int, max_nodes: int) -> tuple[int, int]:
    """Return MIN and MAX of --nnodes as the store allows them: one node with a private store, exactly MAX with the static backend."""
    label = options.label("nnodes")
    if store.private:
        if min_nodes > 1:
            why = f"{min_nodes} nodes cannot meet with {store.why_private}"
            raise UsageError(f"{label}: {why}; give all the same --rdzv-endpoint=HOST instead")
        if max_nodes > 1:
            options.warn(f"{label}: no other node can join with {store.why_private}; this node runs alone")
            options.derive("nnodes", "1:1", store.why_private)
        return 1, 1
    if static and min_nodes < max_nodes:
        how = f"for {min_nodes} to {max_nodes} use --rdzv-backend=c10d"
        options.warn(f"{label}: static always waits for all {max_nodes} nodes; {how}")
        options.derive("nnodes", f"{max_nodes}:{max_nodes}", "the static backend")
        return max_nodes, max_nodes
    return min_nodes, max_nodes


def _node_rank(options: GivenOptions, conf: parse.RdzvConf, static: bool, max_nodes: int) -> int | None:
    """Return this node's rank, as --node-rank or --rdzv-conf's key gives it; None: any, as nodes join."""
    default = 0 if static else None
    rank, label = _given_rank(options, conf)
    if rank is None:
        if not static:
            options.derive("node_rank", "-", "ranks are given as nodes join")
        elif max_nodes > 1:
            options.warn("--node-rank is not given, so this is node 0; with the static backend each node needs its own")
        return default
    if rank < max_nodes:
        return rank
    if static and options.is_given("node_rank"):
        raise UsageError(f"{label}: there is no node {rank} among {max_nodes}; give 0 to {max_nodes - 1}, or raise --nnodes")
    why = f"there is no such place among {max_nodes}" if max_nodes > 1 else "this node runs alone"
    if conf.rank is None and options.origin("node_rank") == Origin.DETECTED:
        options.warn(f"{label}: {options.label('nnodes')} allows {max_nodes} nodes; this one is a spare until there is room")
    else:
        options.warn(f"{label}={rank} is ignored: {why}" + ("" if options.is_given("nnodes") else "; is --nnodes missing?"))
    options.derive("node_rank", "-" if default is None else default, why)
    return default


def _given_rank(options: GivenOptions, conf: parse.RdzvConf) -> tuple[int | None, str]:
    """Return the rank that was given, if any, and the name under which it was given."""
    label, in_conf = options.label("node_rank"), f"{options.label('rdzv_conf')} rank"
    rank = options.read("node_rank", parse.integer(0)) if options.is_given("node_rank") else None
    if rank is None:
        if conf.rank is not None:
            options.derive("node_rank", conf.rank, in_conf)
        elif options.origin("node_rank") == Origin.DETECTED:
            return options.read("node_rank", parse.integer(0)), options.detected.values["node_rank"][1]
        return conf.rank, in_conf
    if conf.rank not in (None, rank):
        options.warn(f"{options.label('rdzv_conf')}: rank={conf.rank} is ignored, {label}={rank} goes before it")
    return rank, label


def _succession(options: GivenOptions, store: _Store, fixed: bool, max_nodes: int) -> str:
    """Return when another node takes over the store of a host that is gone. ``fixed``: the workers or the ranks are bound to that host."""
    asked, label = options.read("store_succession", parse.choice("proof", "majority", "off")), options.label("store_succession")
    why = "there is no other node" if max_nodes == 1 else "etcd survives any node" if store.etcd else ""
    why = why or ("with --master-port or the static backend the job needs node 0" if fixed else "")
    if not why:
        return asked
    if asked != "off" and options.is_given("store_succession"):
        options.warn(f"{label} has no effect: {why}")
    options.derive("store_succession", "off", why)
    return "off"


def _other_endpoints(options: GivenOptions, store: _Store, succession: bool) -> tuple[Endpoint, ...]:
    """Return the endpoints after the first one. They are of use only where the store can move."""
    if store.others and not succession:
        options.warn(f"{options.label('rdzv_endpoint')}: only {store.endpoint} is used; the others are for --store-succession")
        options.derive("rdzv_endpoint", store.endpoint, "the first of the list")
    return store.others if succession else ()


def _run_id(options: GivenOptions, facts: MachineFacts, store: _Store, static: bool, max_nodes: int) -> str:
    """Return the job's name: --rdzv-id, or a random one for a single node."""
    run_id, label = options.read("rdzv_id", parse.name), options.label("rdzv_id")
    if not run_id.strip():
        if max_nodes > 1:
            raise UsageError(f"{label}: it is empty, and nodes need a common name to meet; give all nodes of the job the same")
        options.warn(f"{label}: it is empty; a random name is taken")
    elif run_id != "none":
        return run_id
    elif max_nodes > 1:
        if not static:
            why = f"jobs without one that use {store} are taken for one job"
            options.warn(f"--rdzv-id is not given: {why}; give all nodes of a job one name")
        return run_id
    run_id = facts.new_id()
    options.derive("rdzv_id", run_id, "random, for one node")
    return run_id
