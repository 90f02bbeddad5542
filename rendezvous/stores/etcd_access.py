"""Where etcd is, and what lets us in: endpoints, certificates, user and password."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastirun.errors import StoreRefused, UsageError

PORT = 2379
_ENDPOINT = re.compile(r"(?:(?P<scheme>[^:/]*)://)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?/?", re.ASCII)


@dataclass(frozen=True)
class Endpoint:
    """One of etcd's addresses for clients. ``host`` is a name or a numeric address; IPv6 without brackets."""

    host: str
    port: int = PORT
    tls: bool = False

    @property
    def target(self) -> str:
        """As gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"https://{self.target}" if self.tls else self.target


def parse_endpoint(text: str) -> Endpoint:
    """``host``, ``host:port``, ``http://host:port`` or ``https://host:port``. Errors: ``UsageError``."""
    if "@" in text:  # not shown: there is a password in it
        raise UsageError("an etcd endpoint names no user and no password: give user= and password_file= in --rdzv-conf")
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None or found["scheme"] not in (None, "http", "https") or int(found["port"] or PORT) not in range(1, 1 << 16):
        raise UsageError(f"etcd endpoint {text!r}: expected host:port, http://host:port or https://host:port")
    return Endpoint(found["host"].strip("[]"), int(found["port"] or PORT), found["scheme"] == "https")


@dataclass(frozen=True)
class Access:
    """What lets us in. Paths of PEM files and of the password's, all but ``user``; what is empty is not used.

    Without ``cacert``, etcd's certificate must come from one of the public CAs that gRPC brings.
    """

    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    def check(self, endpoints: Sequence[Endpoint]) -> None:
        """Raises ``UsageError`` for what cannot be meant. Reads no file."""
        plain = [str(endpoint) for endpoint in endpoints if not endpoint.tls]
        if not endpoints:
            raise UsageError("etcd needs an endpoint: host:port, more than one with commas between")
        if plain and (self.cacert or self.cert):
            raise UsageError(f"a certificate is given, but {plain[0]} would be spoken to without TLS: write https://{plain[0]}")
        if bool(self.cert) != bool(self.key):
            raise UsageError("cert= and key= go together: our certificate and its private key")
        if bool(self.user) != bool(self.password_file):
            raise UsageError("user= and password_file= go together: the password is the first line of the file")

    def password(self) -> str:
        """Errors: ``StoreRefused``."""
        first, *_ = _read("password_file", self.password_file).decode(errors="replace").splitlines() or [""]
        if not first:
            raise StoreRefused(f"etcd: password_file={self.password_file} is empty")
        return first

    def certificates(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, private key and certificate, as gRPC takes them. Errors: ``StoreRefused`` when they are missing or no such thing."""
        ca, cert, key = (_read(name, getattr(self, name)) if getattr(self, name) else None for name in ("cacert", "cert", "key"))
        self.context()
        return ca, key, cert

    def context(self) -> ssl.SSLContext:
        """The same for the standard library, which says what is wrong where gRPC does not. Errors: ``StoreRefused``."""
        try:
            made = ssl.create_default_context(cafile=self.cacert or None)
        except (OSError, ValueError):  # SSLError is an OSError
            raise StoreRefused(f"etcd: cacert={self.cacert} holds no certificate in PEM form") from None
        try:
            if self.cert:
                made.load_cert_chain(self.cert, self.key, password=lambda: b"")  # without this, it would ask on the terminal
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or "not in PEM form").replace("_", " ").lower()
            raise StoreRefused(f"etcd: cert={self.cert} and key={self.key} are no certificate and its unencrypted key: {why}") from None
        made.set_alpn_protocols(["h2"])
        return made


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StoreRefused(f"etcd: cannot read {name}={path}: {error.strerror}") from None
