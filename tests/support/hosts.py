"""Makes hosts of network namespaces on one switch. Each has its own address, name and /etc/hosts, and its link can be cut.

The namespaces have no names: each is held by a process that ends when this one does, so nothing can be left behind, and nothing of the
machine's own network is touched. Needs root and Debian's iproute2 (see ``missing``).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

NET = "10.77.0"
PREPARE = """
mount --make-rprivate /
hostname "$1"
[ -z "$2" ] || mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
exec cat
"""


class Space:
    """A network namespace with its own mounts and host name."""

    def __init__(self, name: str, hosts_file: Path | None = None) -> None:
        command = ["unshare", "--net", "--mount", "--uts", "sh", "-ec", PREPARE, "sh", name, str(hosts_file or "")]
        self.inode = ""
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "ready\n":
            self.close()
            raise OSError(f"the namespace of {name} could not be prepared")
        self.inode = os.readlink(f"/proc/{self.holder.pid}/ns/net")

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on this host. The started process becomes that command by exec."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts", f"--wd={os.getcwd()}", *command]

    def run(self, *command: str) -> None:
        """Run ``command`` to its end. Raises CalledProcessError."""
        subprocess.run(self.inside(*command), check=True)

    def close(self) -> None:
        """Kill every process in the namespace. All of them were started by this test."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended meanwhile
                if int(process.name) != self.holder.pid and os.readlink(process / "ns/net") == self.inode:
                    os.kill(int(process.name), signal.SIGKILL)
        self.holder.communicate()


S = TypeVar("S", bound=Space)


class Host(Space):
    """One host. ``number`` counts from 0."""

    def __init__(self, number: int, hosts_file: Path) -> None:
        self.number = number
        self.name, self.address = f"h{number}", f"{NET}.{10 + number}"
        super().__init__(self.name, hosts_file)


class Hosts:
    """Make ``count`` hosts and a switch. Each /etc/hosts names all of them; with ``debian`` a host's own name is 127.0.1.1 there."""

    def __init__(self, count: int, folder: Path, debian: bool = False) -> None:
        self._made: list[Space] = []
        try:
            self._switch = self._keep(Space("switch"))
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            self.hosts = [self._keep(Host(i, _hosts_file(folder, i, count, debian))) for i in range(count)]
            for host in self.hosts:
                self._plug_in(host)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def cut(self, number: int) -> None:
        """Take the link down. The others receive nothing, not even the end of a connection."""
        self._switch.run("ip", "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        self._switch.run("ip", "link", "set", f"port{number}", "up")

    def close(self) -> None:
        for space in reversed(self._made):
            space.close()

    def _keep(self, space: S) -> S:
        self._made.append(space)
        return space

    def _plug_in(self, host: Host) -> None:
        port, there, here = f"port{host.number}", str(self._switch.holder.pid), str(host.holder.pid)
        subprocess.run(["ip", "link", "add", port, "netns", there, "type", "veth", "peer", "name", "eth0", "netns", here], check=True)
        self._switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")


def _hosts_file(folder: Path, number: int, count: int, debian: bool) -> Path:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{'127.0.1.1' if debian and i == number else f'{NET}.{10 + i}'} h{i}" for i in range(count)]
    path = folder / f"hosts{number}"
    path.write_text("\n".join(lines) + "\n")
    return path


def missing() -> str:
    """Return why this machine cannot make such hosts; empty when it can."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is missing (Debian: iproute2, util-linux)"
    trial = "mount --make-rprivate / && hostname trial && ip link add trial0 type bridge && ip link add trial1 type veth"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "sh", "-ec", trial], capture_output=True, text=True, timeout=60)
    return re.sub(r"\s+", " ", tried.stderr).strip() or "not permitted" if tried.returncode else ""


@contextmanager
def made(count: int, folder: Path, debian: bool = False) -> Iterator[Hosts]:
    hosts = Hosts(count, folder, debian)
    try:
        yield hosts
    finally:
        hosts.close()
