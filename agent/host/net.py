"""Which address is ours, who listens where, which interface: facts about this machine's network.

What is handed on to other machines is a number, not a name: a name may mean something else there, or nothing.
Sockets are bound to one address, not to every interface; ``open_host_socket`` and ``listen_on`` say when they cannot.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from elastirun import clock
from elastirun.config import Endpoint
from elastirun.errors import StartError

BACKLOG = max(1024, socket.SOMAXCONN)  # a whole cluster connects at once; the kernel lowers it to net.core.somaxconn

_NOT_OURS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV}  # what bind says to somebody else's address
_LOCALHOST = {"localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
_INSIDE = ("docker", "br-", "virbr", "cni", "flannel", "kube-")  # networks of containers inside this machine: nobody outside gets there
_ANYWHERE = ("203.0.113.1", "2001:db8::1")  # documentation addresses: routed like any other, never sent to


def resolve(host: str) -> tuple[str, ...]:
    """The numeric addresses of ``host``: IPv4 first, each once, in a fixed order; empty while the name does not resolve.

    A machine's own name that /etc/hosts maps to 127.0.1.1 stands for the machine's real addresses, because the others
    know it by those; only ``localhost`` and numeric addresses mean the loopback. May block for as long as DNS does.
    """
    return _look_up(host)[0]


def open_host_socket(endpoint: Endpoint, is_host: bool | None, option: str = "--rdzv-endpoint") -> socket.socket | None:
    """The listening socket for the store when this machine owns an address of ``endpoint``; None when we are a client of it.

    ``is_host`` None: host if we own an address and nobody beside us took it. True: host, on every interface when the
    address is not ours (a service address, translated). False: a client. Port 0 is a free port.
    One address is bound; except that a name hidden behind the loopback (see ``resolve``) needs every interface, since
    which of our addresses the others get for it cannot be known here. ``option`` is where the port was given.
    Raises StartError when the port may not be used, or ``is_host`` is True and it is in use.
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


def listen_on(address: str) -> socket.socket:
    """A socket that listens on a free port of ``address``; on every interface when it is not ours, for it is then translated.

    Raises StartError when nothing can be bound.
    """
    try:
        listener = _listen_as(address, 0)
        return listener if listener is not None else _listen_everywhere(resolve(address), 0)
    except OSError as error:
        raise StartError(_why_not(error)) from error


def host_address(endpoint: Endpoint, is_host: bool | None) -> str | None:
    """The address that ``open_host_socket`` would listen on: "" for every interface, None for nowhere."""
    if is_host is False:
        return None
    addresses, hidden = _look_up(endpoint.host)
    own = "" if hidden else next((address for address in addresses if is_own(address)), None)
    return "" if own is None and is_host else own


def local_address(host: str) -> str:
    """The first address of ``host`` that is ours, else the loopback."""
    return next((address for address in resolve(host) if is_own(address)), "127.0.0.1")


def open_local_socket(endpoint: Endpoint, option: str) -> socket.socket:
    """The listening socket for a job of one node: on the first address of ``endpoint`` that is ours, else on the loopback.

    Raises StartError when the port may not be used.
    """
    try:
        if (listener := _listen(local_address(endpoint.host), endpoint.port)) is not None:
            return listener
    except OSError as error:
        raise StartError(_why_not(error, option)) from error
    raise StartError(f"cannot listen on {endpoint}: this machine has no such address, and no loopback")


def is_everywhere(listener: socket.socket) -> bool:
    """Whether the socket listens on every interface."""
    return ipaddress.ip_address(listener.getsockname()[0].split("%")[0]).is_unspecified


def advertised_address(endpoint_addresses: Sequence[str], port: int, local_addr: str | None) -> str:
    """What the other nodes should reach us by: ``local_addr``, else the source address of our route to the endpoint.

    Without a route: the address of the default route, then any real address, then 127.0.0.1. No packet is sent.
    """
    if local_addr:
        return local_addr
    sources = (_route_source(address, port) for address in endpoint_addresses)
    return next((s for s in sources if s), None) or (*_real_addresses(), "127.0.0.1")[0]


def interface_of(address: str) -> str | None:
    """The name of the interface that owns ``address`` (a number or a name); None when none does. For GLOO_SOCKET_IFNAME."""
    for number in resolve(address):
        wanted = ipaddress.ip_address(number)
        for name, own in _interfaces():
            if _same(wanted, own) or (wanted.is_loopback and own.is_loopback):
                return name
    return None


def who_am_i(hosts: Path = Path("/etc/hosts")) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """This machine's names (host name first, then its short form and what ``hosts`` calls us) and its own addresses.

    Asks no name server. Addresses are without the loopback and link-local ones, unless there are no others.
    """
    name = socket.gethostname()
    addresses = tuple(_real_addresses()) or tuple(str(own) for _, own in _interfaces())
    names = [name, name.split(".")[0], *_hosts_names(hosts, {name, *addresses})]
    return tuple(dict.fromkeys(n for n in names if n and not _is_localhost(n))) or (name,), addresses


def explain_no_host(
    endpoint: Endpoint, names: Iterable[str], addresses: Iterable[str], option: str = "--rdzv-endpoint"
) -> str:
    """One line for "nobody hosts the store": what the endpoint is, who we are (see ``who_am_i``), what to do."""

    host = endpoint.host
    found = resolve(host)
    what = f"{host} is {', '.join(found)}" if found else f"{host} does not resolve on this machine"
    return (
        f"nobody hosts the store at {endpoint}{'' if found == (host,) else ': ' + what}; "
        f"this machine is {_few(names) or 'nameless'} with {_few(addresses) or 'no address'}; start the node that owns the endpoint, "
        f"or correct {option} (behind NAT or a service: --rdzv-conf=is_host=1 and --local-addr there)"
    )


def _few(texts: Iterable[str]) -> str:
    """The first two, and how many more there are: the line is said every 10 s."""
    kept = list(texts)
    return ", ".join(kept[:2]) + (f" and {len(kept) - 2} more" if len(kept) > 2 else "")


def probe(address: str, port: int, timeout: float) -> str | None:
    """None when somebody listens at ``address``:``port``; else why not, in words. Takes ``timeout`` seconds at most, and DNS."""
    numbers = resolve(address)
    if not numbers:
        return "name does not resolve"
    deadline = clock.now() + timeout
    reasons = []
    for i, number in enumerate(numbers):
        left = max(0.001, (deadline - clock.now()) / (len(numbers) - i))  # a silent address must not use up the others' time
        reason = _probe_one(number, port, left)
        if reason is None:
            return None
        reasons.append(reason or f"no answer within {timeout:g} s")
    return ", ".join(dict.fromkeys(reasons))


# --- names and numbers


def _look_up(host: str) -> tuple[tuple[str, ...], bool]:
    """The addresses of ``host``, and whether they are ours in place of the loopback address that its name was hidden behind."""
    try:
        found = {_numeric(sockaddr) for *_, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):  # ValueError: not a host name at all (too long a label, a NUL)
        return (), False
    # A fixed order, because two agents on one machine must try to host on the same address: DNS may rotate its answer.
    addresses = tuple(sorted(found, key=_order))
    if _is_localhost(host) or _is_number(host):
        return addresses, False
    outside = tuple(a for a in addresses if not ipaddress.ip_address(a).is_loopback)
    if outside or not addresses:
        return outside, False
    real = _real_addresses()
    return (real, True) if real else (addresses, False)


def _numeric(sockaddr: tuple[str | int | bytes, ...]) -> str:
    """The address in what getaddrinfo and getsockname return, with the scope that a link-local one needs."""
    address = str(sockaddr[0])
    scope = int(sockaddr[3]) if len(sockaddr) == 4 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope and "%" not in address else address


def _order(address: str) -> tuple[int, bool, int, str]:
    number = ipaddress.ip_address(address)
    return number.version, number.is_link_local, int(number), address


def _is_localhost(host: str) -> bool:
    name = host.lower().rstrip(".")
    return name.split(".")[0] in _LOCALHOST or name.endswith(".localhost")


def _is_number(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    except (OSError, ValueError):
        return False


def _hosts_names(hosts: Path, ours: set[str]) -> Iterator[str]:
    """The names on those lines of a hosts file that speak of one of our names or addresses."""
    try:
        text = hosts.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if ours.intersection(words):
            yield from words[1:]


# --- own addresses and interfaces

_Number = ipaddress.IPv4Address | ipaddress.IPv6Address


def _interfaces() -> list[tuple[str, _Number]]:
    """(interface, address) for every address of this machine."""
    return [
        (name, ipaddress.ip_address(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _real_addresses() -> tuple[str, ...]:
    """Our addresses that another machine may reach, IPv4 first, those of the default routes before the others of their kind."""
    stats = psutil.net_if_stats()
    up = {name for name, stat in stats.items() if stat.isup}
    default = {_route_source(address, 9) for address in _ANYWHERE}
    real = {
        str(own)
        for name, own in _interfaces()
        if name.split(":")[0] in up and not own.is_loopback and not own.is_link_local and not name.startswith(_INSIDE)
    }
    return tuple(sorted(real, key=lambda a: (ipaddress.ip_address(a).version, a not in default, _order(a))))


def is_own(address: str) -> bool:
    """Whether an interface has ``address``. All of 127/8 is ours without being listed."""
    number = ipaddress.ip_address(address)
    return number.is_loopback or number.is_unspecified or any(_same(number, own) for _, own in _interfaces())


def _same(wanted: _Number, own: _Number) -> bool:
    """Equal but for a scope that ``wanted`` leaves open: fe80::1 is fe80::1%eth0."""
    return own == wanted or str(own).split("%")[0] == str(wanted)


def _route_source(address: str, port: int) -> str | None:
    """The address we would speak from to ``address``; None without a route. Connecting a datagram socket sends nothing."""
    try:
        family, sockaddr = _sockaddr(address, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect(sockaddr)
            return _numeric(probe_socket.getsockname())
    except OSError:
        return None


# --- sockets

_TCPSTORE = (0x3C85F7CE).to_bytes(4, "little")  # what torch's client begins with
_PROGRAMS = {b"SSH-": "an ssh server", b"etcdserver": "an etcd server (--rdzv-backend=etcd meets there)", b"HTTP/": "a web server"}


def _sockaddr(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]:
    family, *_, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return family, sockaddr


def _listen_as(host: str, port: int) -> socket.socket | None:
    """Listen on the first address of ``host`` that is ours; None when none is. Raises OSError."""
    addresses, hidden = _look_up(host)
    if hidden:
        return _listen_everywhere(addresses, port)
    listeners = (_listen(address, port) for address in addresses)
    return next((listener for listener in listeners if listener is not None), None)


def _listen_everywhere(addresses: Sequence[str], port: int) -> socket.socket:
    """Listen on every interface, in the family of ``addresses``; in both when there are both or none yet. Raises OSError."""
    only_v4 = bool(addresses) and all(ipaddress.ip_address(a).version == 4 for a in addresses)
    listener = (None if only_v4 else _listen("::", port)) or _listen("0.0.0.0", port)
    if listener is None:
        raise OSError(errno.EADDRNOTAVAIL, "no interface to listen on", str(Endpoint("0.0.0.0", port)))
    return listener


def _listen(address: str, port: int) -> socket.socket | None:
    """Listen on ``address`` alone; None when it is not ours. Raises OSError, with address and port as its file name."""
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
        listener.listen(BACKLOG)  # two may have bound the port with SO_REUSEADDR; only one can listen
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        # IPv6 looks at the port before the address, so "permission denied" may speak of somebody else's address.
        if error.errno in _NOT_OURS or (isinstance(error, PermissionError) and not is_own(address)):
            return None
        raise OSError(error.errno, error.strerror, str(Endpoint(address, port))) from error


def _nonlocal_bind(family: socket.AddressFamily, proc: Path = Path("/proc")) -> bool:
    """Whether the system lets us bind addresses that we do not have (common on load balancers): then bind proves nothing."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        return (proc / "sys/net" / version / "ip_nonlocal_bind").read_text().strip() != "0"
    except OSError:
        return False


def _why_not(error: OSError, option: str = "--rdzv-endpoint") -> str:
    where = error.filename or "this machine"
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: another process has that port; end it, or choose another with {option}"
    if isinstance(error, PermissionError):
        return f"cannot listen on {where}: not permitted; ports below 1024 need privileges, choose a higher one with {option}"
    return f"cannot listen on {where}: {error.strerror}; check the address in {option} or --local-addr"


def hurry_names() -> None:
    """Have threads that look up names from now on wait a second for a name server, not ten.

    TCPStore asks for the name of whoever connects, in its only thread. Until the store is reached, names are looked up with
    the machine's own settings: a slow name server is no reason not to find the endpoint.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def who_answers(address: str, port: int, timeout: float) -> str | None:
    """Find out what listens at ``address``:``port`` where a TCPStore is expected: None when it is one, else a few words.

    The store is asked as torch's client asks it: for its version, and for a ping. Takes about twice ``timeout`` seconds at most.
    """
    nonce = os.urandom(4)
    answer = _ask(address, port, b"\0" + _TCPSTORE + b"\x0d" + nonce, timeout)
    if answer == nonce:
        return None
    if not answer:  # etcd waits for more of what it does not know, others hang up
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
    """The first bytes of the answer: none when the other side hangs up, None when it is silent."""
    try:
        family, sockaddr = _sockaddr(address, port)
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(sockaddr)
            connection.sendall(question)
            return connection.recv(512)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _probe_one(address: str, port: int, timeout: float) -> str | None:
    """None: somebody listens; "" no answer in time; else why not."""
    try:
        family, sockaddr = _sockaddr(address, port)
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(sockaddr)
            # A free port of ours may be picked as the source port too: then TCP connects the socket to itself.
            itself = connection.getsockname() == connection.getpeername()
            return "connection refused" if itself else None
    except TimeoutError:
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()
