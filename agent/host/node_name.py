"""The name of this node, for people: the host name, or that of ``--node-name``. Several agents of a job on one host are numbered."""

from __future__ import annotations

import hashlib
import os
import re
import socket

from elastirun.rendezvous.wire.codec import clip

LONGEST = 120  # characters, so that a number fits behind it
MOST = 64  # agents of one job on a host that get a number; others are called as the host is


class NodeName:
    """The name of one agent's node: ``node-a``, or ``node-a#2`` for the second agent of ``job`` that runs on this host.

    An abstract unix socket holds the number: the kernel frees it when the agent has ended, in whatever way. ``job`` names the job and the
    place where it meets. ``numbered``: the job may have other nodes.
    """

    def __init__(self, given: str, job: str, numbered: bool) -> None:
        host = clip(given or re.sub(r"[^\w.:@-]", "_", socket.gethostname(), flags=re.ASCII) or "localhost", LONGEST)
        self.text = host
        self._holds = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if numbered else None
        if self._holds is None:
            return
        digest = hashlib.sha256(f"{host}\0{job}".encode(errors="replace")).hexdigest()[:32]
        for number in range(1, MOST + 1):
            try:
                self._holds.bind(f"\0elastirun-node-{os.getuid()}-{digest}-{number}")
            except OSError:  # an agent has this number
                continue
            self.text = host if number == 1 else f"{host}#{number}"
            return
        self.text = f"{host}#pid-{os.getpid()}"  # another user of this host may have taken all numbers

    def close(self) -> None:
        """Give the number back."""
        if self._holds is not None:
            self._holds.close()
