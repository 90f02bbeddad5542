"""Hosts on a network that is a thread of this process: each packet passes through it, and can be dropped, lost or held up there.

Each host is a network namespace whose eth0 is a TUN device that this process holds. So no kernel module for loss and delay is
needed, a cut can be in one direction only, and when this process ends, in whatever way, everything is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.support.hosts import NET, Space
from tests.support.hosts import missing as missing_namespaces

TUN = Path("/dev/net/tun")
TUNSETIFF, TUNSETCARRIER = 0x400454CA, 0x400454E2
IFF_TUN_NO_PI = 0x0001 | 0x1000
CLONE_NEWNET = 0x40000000
BATCH = 64  # packets taken from one host before the others have their turn
FIRST = 10  # the last byte of the address of host 0


class Host(Space):
    """One host and its end of the wire. ``number`` counts from 0."""

    def __init__(self, number: int, hosts_file: Path) -> None:
        self.number = number
        self.name, self.address = f"h{number}", f"{NET}.{FIRST + number}"
        self.plugged = True
        super().__init__(self.name, hosts_file)
        try:
            self.wire = self._open_wire()
            self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        """All processes that run here, except the one that holds the namespace."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if int(process.name) != self.holder.pid and os.readlink(process / "ns/net") == self.inode:
                    found.append(int(process.name))
        return found

    def signal(self, signum: signal.Signals) -> None:
        """To all that runs here: with SIGSTOP the whole host stands still."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def carrier(self, up: bool) -> None:
        """Plug the cable in, or out. The host's kernel may act on it up to a second later (its link watch); packets stop at once."""
        self.plugged = up
        fcntl.ioctl(self.wire, TUNSETCARRIER, struct.pack("i", up))

    def _open_wire(self) -> int:
        """In a thread of its own: it changes into the namespace, and that is for one thread alone."""
        found: list[int | OSError] = []

        def open_it() -> None:
            try:
                space = os.open(f"/proc/{self.holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(space)
                wire = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN_NO_PI))
                found.append(wire)
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=open_it)
        thread.start()
        thread.join()
        (wire,) = found
        if isinstance(wire, OSError):
            raise wire
        return wire


class Network:
    """``count`` hosts. What goes wrong between them is changed at any time; ``seed`` decides which packets are lost."""

    def __init__(self, count: int, folder: Path, seed: int = 0) -> None:
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{NET}.{FIRST + i} h{i}\n" for i in range(count)))
        self.hosts: list[Host] = []
        self.dropped: set[tuple[int, int]] = set()  # from, to
        self.noisy: dict[int, tuple[float, float]] = {}  # the share that is lost, and the longest delay in seconds
        self._random = random.Random(seed)
        self._held: list[tuple[float, int, int, bytes]] = []  # (time due, serial number, receiving host, packet)
        self._count = 0
        self._open = True
        try:
            for i in range(count):
                self.hosts.append(Host(i, names))
        except BaseException:
            for host in self.hosts:
                host.close()
            raise
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for host in self.hosts:
            host.close()
            os.close(host.wire)

    def _carry(self) -> None:
        poller = select.poll()
        by_wire = {host.wire: host.number for host in self.hosts}
        for wire in by_wire:
            poller.register(wire, select.POLLIN)
        while self._open:
            due = self._held[0][0] - time.monotonic() if self._held else 0.2
            for wire, _ in poller.poll(max(0.0, min(due, 0.2)) * 1000):
                self._take(wire, by_wire[wire])
            while self._held and self._held[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._held)
                self._give(to, packet)

    def _take(self, wire: int, sender: int) -> None:
        for _ in range(BATCH):
            try:
                packet = os.read(wire, 65536)
            except OSError:  # nothing more
                return
            to = packet[19] - FIRST if packet[0] >> 4 == 4 else -1
            if not 0 <= to < len(self.hosts) or (sender, to) in self.dropped or not self.hosts[sender].plugged:
                continue
            noise = [self.noisy[i] for i in (sender, to) if i in self.noisy]
            if any(self._random.random() < loss for loss, _ in noise):
                continue
            delay = sum(self._random.random() * longest for _, longest in noise)
            if delay:
                self._count += 1
                heapq.heappush(self._held, (time.monotonic() + delay, self._count, to, packet))
            else:
                self._give(to, packet)

    def _give(self, to: int, packet: bytes) -> None:
        if not self.hosts[to].plugged:
            return
        with suppress(OSError):  # its queue is full: the packet is lost
            os.write(self.hosts[to].wire, packet)


def missing() -> str:
    """Why such a network cannot be made on this machine, in words; empty when it can."""
    if reason := missing_namespaces():
        return reason
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"{TUN} cannot be used: {error.strerror}"
    return ""
