"""Finds out why an endpoint of etcd cannot be used. gRPC's own words change from release to release and often name no cause.

It runs only after all attempts have failed. The endpoint may be any kind of server.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from elastirun.rendezvous.wire.codec import clip

LIMIT = 1.0  # seconds for each step: the attempts before had several
ALERT_WAIT = 0.3  # seconds in which a server's TLS alert is awaited; a server rejects our certificate only after the handshake
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the client's preface of HTTP/2 and empty SETTINGS
EXPIRED, NOT_YET_VALID, OTHER_NAME, OTHER_ADDRESS = 10, 9, 62, 64  # OpenSSL's X509_V_ERR_ numbers

Diagnosis = tuple[str, bool]  # what is wrong, empty when nothing was found; whether it lasts, so that waiting does not help
WELL: Diagnosis = ("", False)


def diagnose(endpoint: str, context: ssl.SSLContext | None, has_cert: bool) -> Diagnosis:
    """Return what is wrong with ``endpoint``, ``host:port``. ``context`` None: no TLS. ``has_cert``: it has a client certificate."""
    try:
        with _connect(endpoint) as connection:
            if context is not None:
                return _with_tls(endpoint, connection, context, has_cert)
            reply = _reply(connection)
    except socket.gaierror:
        return f"the name {_host(endpoint)} does not resolve", False
    except TimeoutError:
        return "no answer", False
    except OSError as error:
        reply = b""
        if error.errno is not None and not isinstance(error, ConnectionResetError):
            return (error.strerror or str(error)).lower(), False
    if _is_http2(reply):
        return WELL
    if _speaks_tls(endpoint):
        return f"it speaks TLS there: write https://{endpoint}", True
    return _something_else(reply)


def _with_tls(endpoint: str, connection: socket.socket, context: ssl.SSLContext, has_cert: bool) -> Diagnosis:
    try:
        with context.wrap_socket(connection, server_hostname=_host(endpoint)) as secured:
            secured.settimeout(ALERT_WAIT)
            with suppress(TimeoutError):  # data sent now could lose the server's alert together with the connection
                return _something_else(secured.recv(64))
            secured.settimeout(LIMIT)
            reply = _reply(secured)
            return WELL if _is_http2(reply) else _something_else(reply)
    except ssl.SSLCertVerificationError as error:
        return _about_certificate(endpoint, error), True
    except TimeoutError:
        return "no answer to the TLS handshake", False
    except OSError as error:
        reason = str(getattr(error, "reason", "") or "")
        if "ALERT" in reason:  # the server ended the handshake
            what = "it does not accept the certificate in cert=" if has_cert else "it wants a certificate of ours: give cert= and key="
            return f"{what} ({reason.lower().replace('_', ' ')})", True
        if _speaks_http2(endpoint):
            return f"it speaks no TLS there: write http://{endpoint}", True
        return f"the TLS handshake failed: {clip(reason or error.strerror or type(error).__name__, 100)}", False


def _about_certificate(endpoint: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == EXPIRED:
        return "its certificate has expired"
    if error.verify_code == NOT_YET_VALID:
        return "its certificate is not valid yet (is the clock of this machine right?)"
    if error.verify_code in (OTHER_NAME, OTHER_ADDRESS):
        return f"its certificate is not for {_host(endpoint)}"
    return f"its certificate is not from a CA that is trusted here: cacert= names the right one? ({error.verify_message})"


def _something_else(reply: bytes) -> Diagnosis:
    """Return the diagnosis of a server that did not answer with HTTP/2."""
    if reply.startswith(b"HTTP/1"):
        return "what answers there does not speak etcd's v3 API (HTTP/2), but HTTP/1: another server, or an etcd 2", True
    return ("it hangs up" if not reply else "what answers there is not etcd"), bool(reply)


def _connect(endpoint: str) -> socket.socket:
    return socket.create_connection((_host(endpoint), int(endpoint.rpartition(":")[2])), LIMIT)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _reply(connection: socket.socket) -> bytes:
    """Return the first bytes of the answer to HTTP/2's preface."""
    connection.sendall(HELLO)
    return connection.recv(64)


def _is_http2(reply: bytes) -> bool:
    return reply[3:4] == b"\x04" and not reply.startswith(b"HTTP")  # a SETTINGS frame


def _speaks_http2(endpoint: str) -> bool:
    try:
        with _connect(endpoint) as connection:
            return _is_http2(_reply(connection))
    except OSError:
        return False


def _speaks_tls(endpoint: str) -> bool:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # safe: nothing is sent or read
    try:
        with _connect(endpoint) as connection, anybody.wrap_socket(connection):
            return True
    except OSError:
        return False
