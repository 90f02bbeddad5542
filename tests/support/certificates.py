"""Certificates for tests, made with openssl's command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.until import PATIENCE


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def _new_key(folder: Path, name: str, subject: str, *how: str) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(folder, "req", "-new", *how, *curve, "-keyout", f"{name}.key", "-subj", f"/CN={subject}")


class Authority:
    """A certificate authority with its certificate in ``folder``/ca.pem. It issues pairs of files, ``name.pem`` and ``name.key``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.cert = str(folder / "ca.pem")
        _new_key(folder, "ca", "test CA", "-x509", "-days", "2", "-out", "ca.pem")

    def issue(self, name: str, days: int = 2) -> tuple[str, str]:
        """Issue a certificate for 127.0.0.1 and localhost, for servers and clients, and its key. ``days`` below 0: it has expired."""
        _new_key(self.folder, name, name, "-out", f"{name}.csr")
        (self.folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
        issuer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "ext")
        _openssl(self.folder, "x509", "-req", "-in", f"{name}.csr", *issuer, "-out", f"{name}.pem")
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")
