"""Description of the addresses on which this node will listen, for ``--dry-run``."""

from __future__ import annotations

from elastirun.agent.host import net
from elastirun.agent.store.discovery import Search
from elastirun.config import Endpoint, LaunchConfig

EVERYWHERE = "every interface of this machine"
_ROUTE = "the address that leads to the other nodes"


def describe(config: LaunchConfig) -> list[str]:
    """Return one line for each socket of this node's agent. Resolves the endpoint's name, which may take as long as DNS takes."""
    return [*_stores(config), *_health(config)]


def _health(config: LaunchConfig) -> list[str]:
    if config.health is None:
        return []
    host, port = config.health.host, config.health.port
    own = net.host_address(config.health, None) if host else ""
    if own is None:
        where = f"nowhere, {host} is no address of this machine"
    elif own and port:
        where = str(Endpoint(own, port))
    else:
        where = f"{f'port {port}' if port else 'a free port'} of {own or EVERYWHERE}"
    return [f"the health port: {where}"]


def _stores(config: LaunchConfig) -> list[str]:
    ports = config.port_range
    free = f"a free port from {ports[0]} to {ports[1]}" if ports else "a free port"
    if config.standalone:
        local = config.endpoint and net.local_address(config.endpoint.host)
        return [f"the workers' store: {Endpoint(local, config.endpoint.port) if local and config.endpoint else f'{free} of 127.0.0.1'}"]
    own = config.local_addr
    free_port = f"{free} of {f'{own}, on {EVERYWHERE} if that is no address of it' if own else _ROUTE}"
    if config.endpoint is None:
        return ["the rendezvous store: not here, it is etcd", f"the workers' store: {free_port}, while this node has rank 0"]
    where, port = net.host_address(config.endpoint, config.is_host), config.endpoint.port
    if where is None:
        store = f"not here, {config.endpoint.host} is no address of this machine" if config.is_host is None else "not here"
    else:
        store = f"port {port} of {EVERYWHERE}" if where == "" else str(Endpoint(where, port))
        store += " if no other agent does" if config.is_host is None else ""
    if config.meet_at_endpoint:
        return [f"the rendezvous store: {store}", "the workers' store: the same"]
    stores = [f"the rendezvous store: {store}", f"the workers' store: {free_port}, while this node has rank 0"]
    return [*stores, f"the standby store: {_standby(config, config.endpoint, free_port)}"] if config.succession else stores


def _standby(config: LaunchConfig, first: Endpoint, free_port: str) -> str:
    """Return where the standby store would listen, by the rule of ``endpoint_access.py``. ``first``: the endpoint where the job starts."""
    if config.port_range and config.port_range[0] == config.port_range[1]:
        return f"not here, the workers' store needs port {config.port_range[0]}"
    address = config.local_addr or net.advertised_address(next(iter(net.resolve(first.host)), first.host), first.port)
    number = next(iter(net.resolve(address)), address)
    ports = [f"port {port}, else " for port, _ in Search(config, first).standby_ports(number)]
    return f"{''.join(ports)}{free_port}"
