"""An etcd server for this agent alone (``--standalone --rdzv-backend=etcd``): to try a job with the store it will meet at later."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from elastirun.agent import exec_worker
from elastirun.config import Endpoint
from elastirun.errors import StartError, StoreError

BINARY = "ELASTIRUN_ETCD_BINARY"  # names etcd's program where it is not on PATH
PEER = "http://127.0.0.1:2380"  # what the only member calls itself; nobody listens there


class PrivateEtcd:
    """Listens on a free port of the loopback, and dies with this thread; ``folder`` holds its data."""

    def __init__(self) -> None:
        binary = os.environ.get(BINARY) or shutil.which("etcd")
        if not binary or not os.access(binary, os.X_OK):
            what = f"{BINARY}={binary} cannot be run" if binary else f"etcd is not on PATH, and {BINARY} does not name it"
            raise StartError(f"--standalone --rdzv-backend=etcd starts a server, but {what}; install etcd, or leave the backend out")
        self.folder = tempfile.mkdtemp(prefix="elastirun_etcd_")
        self._log = Path(self.folder, "log")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.endpoint = Endpoint("127.0.0.1", free.getsockname()[1])
        url = f"http://{self.endpoint}"
        command = [binary, "--data-dir", f"{self.folder}/data", "--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", "http://127.0.0.1:0", "--initial-advertise-peer-urls", PEER]
        command += ["--initial-cluster", f"default={PEER}", "--heartbeat-interval=10", "--election-timeout=100", "--unsafe-no-fsync"]
        ties = [sys.executable, "-I", "-S", exec_worker.__file__, str(os.getpid()), "-", "-"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen([*ties, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ``StoreError`` with its last words when it has ended."""
        code = self._process.poll()
        if code is not None:
            words = self._log.read_bytes()[-2000:].decode(errors="replace").splitlines() if self._log.exists() else []
            raise StoreError(f"the private etcd has ended with exit code {code}: {words[-1] if words else 'it said nothing'}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
