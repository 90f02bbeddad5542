"""This machine's network: its own addresses and interfaces, sockets to listen on, and probes of other listeners.

Other machines are given numeric addresses, never names: a name may resolve to something else there, or not at all.
Sockets are bound to one address, not to every interface, where that is possible: see ``open_host_socket`` and ``listen_on``.

See SECURITY.md.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from elastirun import clock
from elastirun.config import Endpoint
from elastirun.errors import StartError
from elastirun.rendezvous.stores import tcp_wire

PORT_RANGE = "--port-range"
BACKLOG = max(1024, socket.SOMAXCONN)  # connections; a whole cluster connects at once. The kernel lowers it to net.core.somaxconn

_NOT_OURS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV}  # errors of bind for an address of another machine
_LOCALHOST = {"localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
_CONTAINER_INTERFACES = ("docker", "br-", "virbr", "cni", "flannel", "kube-")  # prefixes; other machines do not reach these networks
_FAR_AWAY = ("203.0.113.1", "2001:db8::1")  # addresses for documentation: they take the default route, and nothing is sent to them


def resolve(host: str) -> tuple[str, ...]:
    """Return the numeric addresses of ``host``: IPv4 first, each once, in a fixed order; empty if the name does not resolve.

    If /etc/hosts maps this machine's name to 127.0.1.1, return the machine's real addresses, by which the other nodes
    know it. Only ``localhost`` and numeric addresses stand for the loopback. May block for as long as DNS does.
    """
    return _look_up(host)[0]


def open_host_socket(endpoint: Endpoint, is_host: bool | None, option: str = "--rdzv-endpoint") -> socket.socket | None:
    """Return the listening socket for the store if this machine owns an address of ``endpoint``; None if this node is a client.

    ``is_host`` None: host if this machine owns an address and no other process has the port. True: host, on every interface
    when the address is not ours (a service address that is translated). False: client. Port 0 is any free port.

    One address is bound. But a name that /etc/hosts maps to the loopback (see ``resolve``) needs every interface: which of
    our addresses the other nodes get for that name cannot be known here.

    ``option`` is the option that gave the port, for messages. Raises StartError when the port may not be used, or when
    ``is_host`` is True and the port is in use.
    """
    if is_host is False:
        return None
    try:
        listener = _listen_as(endpoint.host, endpoint.port)
        if listener is None and is_host:
            listener = _listen_everywhere(resolve(endpoint.host), endpoint.port)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE and is_host is None:
            return None
        raise StartError(_why_not(error, option)) from error


def listen_on(address: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that listens on a free port of ``address``; on every interface when that address is not ours.

    An address that is not ours is translated to one of ours on the way (NAT). ``ports``: the first and the last port that may be used;
    None: any. Raises StartError when nothing can be bound.
    """
    for port in _from_anywhere(*ports) if ports else (0,):
        try:
            listener = _listen_as(address, port)
            return listener if listener is not None else _listen_everywhere(resolve(address), port)
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise StartError(_why_not(error, PORT_RANGE if ports else "--rdzv-endpoint")) from error
    assert ports is not None
    where = f"no port from {ports[0]} to {ports[1]} of {address} is free"
    raise StartError(f"cannot listen: {where}; widen {PORT_RANGE}, or end what listens there")


def _from_anywhere(first: int, last: int) -> Iterator[int]:
    """Yield all ports from ``first`` to ``last``, beginning at a random one: the ports of two rounds in a row should differ."""
    start = random.randint(first, last)
    yield from (*range(start, last + 1), *range(first, start))


def host_address(endpoint: Endpoint, is_host: bool | None) -> str | None:
    """Return the address that ``open_host_socket`` would listen on: "" for every interface, None for a client."""
    if is_host is False:
        return None
    addresses, hidden = _look_up(endpoint.host)
    own = "" if hidden else next((address for address in addresses if is_own(address)), None)
    return "" if own is None and is_host else own


def local_address(host: str) -> str:
    """Return the first address of ``host`` that is ours, else the loopback."""
    return next((address for address in resolve(host) if is_own(address)), "127.0.0.1")


def open_local_socket(endpoint: Endpoint, option: str) -> socket.socket:
    """Return the listening socket for a job of one node: on the first address of ``endpoint`` that is ours, else on the loopback.

    Raises StartError when the port may not be used.
    """
    try:
        if (listener := _listen(local_address(endpoint.host), endpoint.port)) is not None:
            return listener
    except OSError as error:
        raise StartError(_why_not(error, option)) from error
    raise StartError(f"cannot listen on {endpoint}: this machine has no such address, and no loopback")


def open_port(endpoint: Endpoint, option: str) -> socket.socket:
    """Return a socket that listens on the first address of ``endpoint`` that is ours, or on every interface if its host is empty.

    ``option`` gave the endpoint, for messages. Raises StartError.
    """
    try:
        listener = _listen_as(endpoint.host, endpoint.port) if endpoint.host else _listen_everywhere((), endpoint.port)
    except OSError as error:
        raise StartError(_why_not(error, option)) from error
    if listener is None:
        why = "is no address of this machine" if resolve(endpoint.host) else "does not resolve on this machine"
        raise StartError(f"{option}: {endpoint.host} {why}; give an address of it, or the port alone for every interface")
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the numeric address on which the socket listens, a link-local one with its interface."""
    return tcp_wire.numeric(listener.getsockname())


def listens_everywhere(listener: socket.socket) -> bool:
    """Return whether the socket listens on every interface."""
    return ipaddress.ip_address(address_of(listener)).is_unspecified


def advertised_address(store_address: str, port: int) -> str:
    """Return the address under which other nodes reach this one: the source address of the route to the store.

    Without a route: the source address of the default route, then any real address, then 127.0.0.1. No packet is sent.
    """
    return _route_source(store_address, port) or (*_real_addresses(), "127.0.0.1")[0]


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address`` (numeric or a name), for GLOO_SOCKET_IFNAME; None when no interface has it."""
    for number in resolve(address):
        wanted = ipaddress.ip_address(number)
        for name, own in _interfaces():
            if _same(wanted, own) or (wanted.is_loopback and own.is_loopback):
                return name
    return None


def own_names(hosts: Path = Path("/etc/hosts")) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return this machine's names and addresses. Names: the host name, its short form, then those in the file ``hosts``.

    Asks no name server. Leaves out loopback and link-local addresses, unless there are no others.
    """
    name = socket.gethostname()
    addresses = tuple(_real_addresses()) or tuple(str(own) for _, own in _interfaces())
    names = [name, name.split(".")[0], *_hosts_names(hosts, {name, *addresses})]
    return tuple(dict.fromkeys(n for n in names if n and not _is_localhost(n))) or (name,), addresses


def explain_no_host(endpoint: Endpoint, names: Iterable[str], addresses: Iterable[str], option: str = "--rdzv-endpoint") -> str:
    """Return one line for people when no node hosts the store. ``names``, ``addresses``: this machine's, see ``own_names``."""
    host = endpoint.host
    found = resolve(host)
    own = f"{_two_of(names) or 'nameless'} with {_two_of(addresses) or 'no address'}"
    if not found:
        return f"{host} does not resolve on this machine, {own}; correct {option}"
    return (
        f"nobody hosts the store at {endpoint}{'' if found == (host,) else f': {host} is ' + ', '.join(found)}; "
        f"this machine is {own}; start the node that owns the endpoint, "
        f"or correct {option} (behind NAT or a service: --rdzv-conf=is_host=1 and --local-addr there)"
    )


def _two_of(texts: Iterable[str]) -> str:
    """Join the first two, and say how many more there are: the line is printed every 10 s, so it must be short."""
    all_texts = list(texts)
    return ", ".join(all_texts[:2]) + (f" and {len(all_texts) - 2} more" if len(all_texts) > 2 else "")


def probe(address: str, port: int, timeout: float) -> str | None:
    """Return None if a process listens at ``address``:``port``, else the reason why not. Takes at most ``timeout`` seconds, and DNS."""
    numbers = resolve(address)
    if not numbers:
        return "name does not resolve"
    deadline = clock.now() + timeout
    reasons = []
    for i, number in enumerate(numbers):
        left = max(0.001, (deadline - clock.now()) / (len(numbers) - i))  # a silent address must leave time for the other addresses
        reason = _probe_one(number, port, left)
        if reason is None:
            return None
        reasons.append(reason or f"no answer within {timeout:g} s")
    return ", ".join(dict.fromkeys(reasons))


# --- names and numbers


def _look_up(host: str) -> tuple[tuple[str, ...], bool]:
    """Return the addresses of ``host``, and whether these are our real addresses in place of the loopback (see ``resolve``)."""
    try:
        found = {tcp_wire.numeric(sockaddr) for *_, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):  # ValueError: not a host name (a label too long, a NUL)
        return (), False
    # DNS may rotate its answer. The order is fixed, because two agents on one machine must try to host on the same address.
    addresses = tuple(sorted(found, key=_order))
    if _is_localhost(host) or is_number(host):
        return addresses, False
    outside = tuple(a for a in addresses if not ipaddress.ip_address(a).is_loopback)
    if outside or not addresses:
        return outside, False
    real = _real_addresses()
    return (real, True) if real else (addresses, False)


def _order(address: str) -> tuple[int, bool, int, str]:
    number = ipaddress.ip_address(address)
    return number.version, number.is_link_local, int(number), address


def _is_localhost(host: str) -> bool:
    name = host.lower().rstrip(".")
    return name.split(".")[0] in _LOCALHOST or name.endswith(".localhost")


def is_number(host: str) -> bool:
    with suppress(OSError, ValueError):
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    return False


def _hosts_names(hosts: Path, ours: set[str]) -> Iterator[str]:
    """Yield the names in those lines of a hosts file that contain one of our names or addresses."""
    with suppress(OSError):
        for line in hosts.read_text(errors="replace").splitlines():
            words = line.split("#")[0].split()
            if ours.intersection(words):
                yield from words[1:]


# --- own addresses and interfaces

_Number = ipaddress.IPv4Address | ipaddress.IPv6Address


def _interfaces() -> list[tuple[str, _Number]]:
    """Return (interface, address) for every address of this machine."""
    return [
        (name, ipaddress.ip_address(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _real_addresses() -> tuple[str, ...]:
    """Return our addresses that another machine may reach: IPv4 first, and in each family the address of the default route first."""
    stats = psutil.net_if_stats()
    up = {name for name, stat in stats.items() if stat.isup}
    default = {_route_source(address, 9) for address in _FAR_AWAY}
    real = {
        str(own)
        for name, own in _interfaces()
        if name.split(":")[0] in up and not own.is_loopback and not own.is_link_local and not name.startswith(_CONTAINER_INTERFACES)
    }
    return tuple(sorted(real, key=lambda a: (ipaddress.ip_address(a).version, a not in default, _order(a))))


def is_own(address: str) -> bool:
    """Return whether an interface has ``address``. All of 127/8 is ours, although interfaces do not list it."""
    number = ipaddress.ip_address(address)
    return number.is_loopback or number.is_unspecified or any(_same(number, own) for _, own in _interfaces())


def _same(wanted: _Number, own: _Number) -> bool:
    """Return whether both are equal, or differ only by a scope that ``wanted`` does not have: fe80::1 is fe80::1%eth0."""
    return own == wanted or str(own).split("%")[0] == str(wanted)


def _route_source(address: str, port: int) -> str | None:
    """Return the source address of our route to ``address``; None without a route. Connecting a datagram socket sends nothing."""
    try:
        family, sockaddr = _sockaddr(address, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect(sockaddr)
            return tcp_wire.numeric(probe_socket.getsockname())
    except OSError:
        return None


# --- sockets

_PROGRAMS = {b"SSH-": "an ssh server", b"etcdserver": "an etcd server (--rdzv-backend=etcd meets there)", b"HTTP/": "a web server"}


def _sockaddr(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]:
    family, *_, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return family, sockaddr


def _listen_as(host: str, port: int) -> socket.socket | None:
    """Listen on the first address of ``host`` that is ours; return None when none is ours. Raises OSError."""
    addresses, hidden = _look_up(host)
    if hidden:
        return _listen_everywhere(addresses, port)
    listeners = (_listen(address, port) for address in addresses)
    return next((listener for listener in listeners if listener is not None), None)


def _listen_everywhere(addresses: Sequence[str], port: int) -> socket.socket:
    """Listen on every interface: with IPv4 only if all ``addresses`` are IPv4, else with both families. Raises OSError."""
    only_v4 = bool(addresses) and all(ipaddress.ip_address(a).version == 4 for a in addresses)
    listener = (None if only_v4 else _listen("::", port)) or _listen("0.0.0.0", port)
    if listener is None:
        raise OSError(errno.EADDRNOTAVAIL, "no interface to listen on", str(Endpoint("0.0.0.0", port)))
    return listener


def _listen(address: str, port: int) -> socket.socket | None:
    """Listen on ``address`` alone; return None when it is not ours. Raises OSError, with address and port as its file name."""
    listener = None
    try:
        family, sockaddr = _sockaddr(address, port)
        if _nonlocal_bind(family) and not is_own(address):
            return None
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(sockaddr)
        listener.listen(BACKLOG)  # with SO_REUSEADDR two processes may have bound the port, but only one can listen
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        # IPv6 checks the port before the address, so "permission denied" may also come for an address that is not ours.
        if error.errno in _NOT_OURS or (isinstance(error, PermissionError) and not is_own(address)):
            return None
        raise OSError(error.errno, error.strerror, str(Endpoint(address, port))) from error


def _nonlocal_bind(family: socket.AddressFamily) -> bool:
    """Return whether the kernel lets us bind addresses that we do not have, as on many load balancers: then bind proves nothing."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    with suppress(OSError):
        return Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() != "0"
    return False


def _why_not(error: OSError, option: str) -> str:
    where = error.filename or "this machine"
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: another process has that port; end it, or choose another with {option}"
    if isinstance(error, PermissionError):
        return f"cannot listen on {where}: not permitted; ports below 1024 need privileges, choose a higher one with {option}"
    return f"cannot listen on {where}: {error.strerror}; check the address in {option} or --local-addr"


def who_answers(address: str, port: int, timeout: float, again: bool = True) -> str | None:
    """Return None if a TCPStore listens at ``address``:``port``, else a few words on what listens there.

    Sends what torch's client sends: a check of the version, and a ping. Takes about ``timeout`` seconds at most. ``again``: a program that
    does not answer this is asked for its name, which takes as long again.
    """
    nonce = os.urandom(4)
    answer = _ask(address, port, tcp_wire.hello(nonce), timeout)
    if answer == nonce:
        return None
    if not answer and again:  # etcd waits for the rest of an unknown request; other programs hang up
        answer = _ask(address, port, b"GET /version HTTP/1.0\r\n\r\n", timeout)
    if answer is None:
        return "accepts connections but does not answer: an agent that is starting or stands still, or another program"
    if answer == b"":
        return "hangs up at once: an agent that is ending, or another program"
    for start, what in _PROGRAMS.items():
        if start in answer:
            return f"is {what}, not an agent's store; choose another port, or end it"
    return "is another program, not an agent's store; choose another port, or end it"


def _ask(address: str, port: int, question: bytes, timeout: float) -> bytes | None:
    """Return the first bytes of the answer; b"" if the other side hangs up, None if it is silent."""
    try:
        with socket.create_connection((address, port), timeout) as connection:
            connection.sendall(question)
            return connection.recv(512)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _probe_one(address: str, port: int, timeout: float) -> str | None:
    """Return None if a process listens, "" if there is no answer in time, else the reason."""
    try:
        with socket.create_connection((address, port), timeout) as connection:
            # The kernel may pick the very port as the source port. TCP then connects the socket to itself.
            itself = connection.getsockname() == connection.getpeername()
            return "connection refused" if itself else None
    except TimeoutError:
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()
