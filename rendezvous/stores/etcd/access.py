"""Credentials for etcd: certificates, user and password."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from elastirun.errors import StoreRefused

# Files with the CAs that a machine trusts, by distribution: Debian, Red Hat, SUSE, Alpine.
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem")


@dataclass(frozen=True)
class Access:
    """Credentials for etcd. All but ``tls`` and ``user`` are paths of files, PEM except for the password; None: not used.

    ``cacert`` holds the CA of etcd's certificate; None: a CA that this machine trusts. ``cert`` and ``key`` are the client's own.
    """

    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None

    def anywhere(self) -> Access:
        """Return the same credentials for a process with another working directory."""
        files = {name: os.path.abspath(path) for name in ("cacert", "cert", "key", "password_file") if (path := getattr(self, name))}
        return replace(self, **files)

    def password(self) -> str:
        """Return the first line of the password file. Errors: ``StoreRefused``."""
        first = _read("password_file", self.password_file or "").decode(errors="replace").partition("\n")[0].rstrip("\r")
        if not first:
            raise StoreRefused(f"etcd: password_file={self.password_file} is empty")
        return first

    def certificates(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return CA, private key and certificate, in gRPC's order. Errors: ``StoreRefused`` when one is missing or invalid."""
        named = {"cacert": self.cacert, "cert": self.cert, "key": self.key}
        found = {name: _read(name, path) for name, path in named.items() if path}
        self.context()
        return found.get("cacert") or _trusted_here(), found.get("key"), found.get("cert")

    def context(self) -> ssl.SSLContext:
        """Return the same for the ``ssl`` module, which names what is wrong where gRPC does not. Errors: ``StoreRefused``."""
        try:
            made = ssl.create_default_context(cafile=self.cacert)
        except (OSError, ValueError):  # SSLError is an OSError
            raise StoreRefused(f"etcd: cacert={self.cacert} holds no certificate in PEM form") from None
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT  # strict is ssl's default since Python 3.13; gRPC is not strict
        try:
            if self.cert:
                made.load_cert_chain(self.cert, self.key, password=lambda: b"")  # without a password ssl would ask on the terminal
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or "not in PEM form").replace("_", " ").lower()
            raise StoreRefused(f"etcd: cert={self.cert} and key={self.key} are no certificate and its unencrypted key: {why}") from None
        made.set_alpn_protocols(["h2"])
        return made


def _trusted_here() -> bytes | None:
    """Return the CAs that this machine trusts. None: unknown, so that gRPC uses its own list."""
    for path in (ssl.get_default_verify_paths().cafile, *BUNDLES):
        if path and Path(path).is_file():
            return _read("the machine's CAs", path)
    return None


def _read(name: str, path: str) -> bytes:
    """Return the content of a file. ``name`` is its key in --rdzv-conf. Errors: ``StoreRefused``."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # O_NONBLOCK: opening a pipe must not block
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise StoreRefused(f"etcd: {name}={path} is a pipe, which can be read only once; give a file")
            return file.read()
    except OSError as error:
        raise StoreRefused(f"etcd: cannot read {name}={path}: {error.strerror}") from None
