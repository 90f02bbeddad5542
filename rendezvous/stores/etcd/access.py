"""What lets us in: certificates, user and password."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from elastirun.errors import StoreRefused

# Where the distributions keep the CAs that a machine trusts: Debian, Red Hat, SUSE, Alpine.
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem")


@dataclass(frozen=True)
class Access:
    """What lets us in. All but ``tls`` and ``user`` are paths, of PEM files and of the password's; None: not used.

    ``cacert`` has the CA of etcd's certificate; without it, it must be one that this machine trusts. ``cert`` and ``key`` are ours.
    """

    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None

    def password(self) -> str:
        """Errors: ``StoreRefused``."""
        first = _read("password_file", self.password_file or "").decode(errors="replace").partition("\n")[0].rstrip("\r")
        if not first:
            raise StoreRefused(f"etcd: password_file={self.password_file} is empty")
        return first

    def certificates(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, private key and certificate, as gRPC takes them. Errors: ``StoreRefused`` when they are missing or no such thing."""
        named = {"cacert": self.cacert, "cert": self.cert, "key": self.key}
        found = {name: _read(name, path) for name, path in named.items() if path}
        self.context()
        return found.get("cacert") or _trusted_here(), found.get("key"), found.get("cert")

    def context(self) -> ssl.SSLContext:
        """The same for the standard library, which says what is wrong where gRPC does not. Errors: ``StoreRefused``."""
        try:
            made = ssl.create_default_context(cafile=self.cacert)
        except (OSError, ValueError):  # SSLError is an OSError
            raise StoreRefused(f"etcd: cacert={self.cacert} holds no certificate in PEM form") from None
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the default since Python 3.13, but not gRPC's
        try:
            if self.cert:
                made.load_cert_chain(self.cert, self.key, password=lambda: b"")  # without this, it would ask on the terminal
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or "not in PEM form").replace("_", " ").lower()
            raise StoreRefused(f"etcd: cert={self.cert} and key={self.key} are no certificate and its unencrypted key: {why}") from None
        made.set_alpn_protocols(["h2"])
        return made


def _trusted_here() -> bytes | None:
    """The CAs that this machine trusts. None: gRPC has a list of its own."""
    for path in (ssl.get_default_verify_paths().cafile, *BUNDLES):
        if path and Path(path).is_file():
            return _read("the machine's CAs", path)
    return None


def _read(name: str, path: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe must not block
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise StoreRefused(f"etcd: {name}={path} is a pipe, which can be read only once; give a file")
            return file.read()
    except OSError as error:
        raise StoreRefused(f"etcd: cannot read {name}={path}: {error.strerror}") from None
