"""A wanted number of nodes: written into the round record, for ``elastirun scale`` and for an annotation of Kubernetes.

The kubelet writes the annotation into a file of each pod. See docs/decisions/0042.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from threading import Thread
from typing import Any

from elastirun import clock, linux
from elastirun.agent import termination_log
from elastirun.agent.part import Part
from elastirun.agent.session import Session
from elastirun.agent.store.locations import described
from elastirun.config import LaunchConfig
from elastirun.errors import StartError, StoreError
from elastirun.rendezvous.wire.codec import Codec, clip
from elastirun.rendezvous.wire.records import RoundRecord
from elastirun.rendezvous.wire.sync import SyncProtocol, execute
from elastirun.threads import start_thread

MAX = "max"  # as many as --nnodes allows
WRITES = 50  # tries to write a record that others write, too
FILE = "/etc/elastirun/nodes"  # deploy/kubernetes has the annotation elastirun.io/nodes there
VARIABLE = "ELASTIRUN_NODES_FILE"  # another path, on a local file system: the agent's loop reads it; empty: there is none
LOOK_EVERY = 2.0  # seconds between two looks at the file; the kubelet itself needs some seconds
NEWS = 30.0  # seconds in which a change is carried out, also by the next node of rank 0, or when the store answers again
MOST_TEXT = 64  # bytes


def count_of(text: str) -> int | None:
    """Return the number of nodes that ``text`` asks for, 0 for ``MAX``; None: it is no number of nodes."""
    if text == MAX:
        return 0
    count = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
    return count or None


def why_not(wanted: int, job: str, low: int, high: int) -> str:
    """Return in words why ``job`` cannot have ``wanted`` nodes (0: ``MAX``); empty: --nnodes allows them."""
    if not wanted or low <= wanted <= high:
        return ""
    allowed = f"{low} node{'s' * (low > 1)}" if low == high else f"{low} to {high} nodes"
    return f"{wanted} node{'s' * (wanted > 1)}: {job} was started with --nnodes={low}:{high}, which allows {allowed}"


def write_wanted(store: Any, prefix: str, token: bytes | None, wanted: int) -> None:
    """Write how many nodes are wanted into the record of the job whose keys begin with ``prefix``. Blocks. Errors: ``StoreError``."""
    for _ in range(WRITES):
        protocol: SyncProtocol = execute(SyncProtocol(prefix, "", Codec(token), clock.now).here(), store)
        record = execute(protocol.scale(wanted), store)
        if record is None or record.closed is not None:
            raise StoreError("the job has ended" if record else "the store has no record of the job any more")
        if record.wanted == wanted:
            return
    raise StoreError(f"{WRITES} times another write was first")


class WantedNodes(Part):
    """Carries out what the file of the annotation asks for: a change, or the number at the start of a job. A thread writes the record.

    Before the first round each node does so, later that of rank 0 alone: the kubelets bring a change at different moments, and one that
    is late must not undo what ``elastirun scale`` has said meanwhile. ``say``, ``warn``: lines for people.
    """

    def __init__(
        self,
        config: LaunchConfig,
        session: Session,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._session, self._say, self._warn = config, session, say, warn
        path = termination_log.path_in_pod(environ, VARIABLE, FILE)
        self._path = path if path and (VARIABLE in environ or os.path.exists(path)) else None
        self._look_at = math.inf if self._path is None else 0.0
        if self._path is not None and not os.path.isfile(self._path):
            warn(f"{VARIABLE}: there is no file {self._path}; correct the path, or make the file, from which a number of nodes is read")
        self._text = ""  # in the file at the last look
        self._at_start = self._path is not None  # this agent has not seen the round record yet
        self._news_until = -math.inf  # until then ``_text`` is to be carried out
        self._thread: Thread | None = None
        self._error = ""  # why the last write of ``_text`` failed
        self._written: int | None = None  # the number of nodes that was written for ``_text``

    def see(self, record: RoundRecord | None, now: float) -> None:
        if self._at_start and record is not None:
            self._look_at = now  # what the file says later is a change

    def tick(self, now: float) -> float:
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            record = self._session.machine.record
            if record is not None and record.closed is None:
                self._look(record, now)
        return self._look_at

    def _look(self, record: RoundRecord, now: float) -> None:
        text = self._read()
        if text != self._text:
            is_old = self._at_start and (record.round > 0 or record.wanted > 0)  # this agent is newer than the number
            self._text, self._news_until = text, -math.inf if is_old else now + NEWS
            self._error, self._written = "", None
        self._at_start = False
        if text and now < self._news_until:
            self._carry_out(text, record, not record.members or record.index(self._session.machine.row.id) == 0)

    def _read(self) -> str:
        """Return the text in the file. One that is not there, also for a moment while the kubelet replaces it, says what it said before."""
        assert self._path is not None
        with suppress(OSError), linux.open_regular(self._path) as file:
            return file.read(MOST_TEXT).decode("ascii", "replace").strip()
        return self._text

    def _carry_out(self, text: str, record: RoundRecord, decides: bool) -> None:
        config, wanted = self._config, count_of(text)
        why = f"{text!r} is no number of nodes" if wanted is None else why_not(wanted, "the job", config.min_nodes, config.max_nodes)
        if why or wanted is None:
            self._news_until = -math.inf
            if decides:
                self._warn(f"{self._path}: {why}")
        elif wanted in (record.wanted, self._written) or config.min_nodes == config.max_nodes:
            self._news_until = -math.inf
        elif decides and (self._thread is None or not self._thread.is_alive()):
            if not self._error:
                self._say(f"{self._path}: {text} node{'s' * (wanted != 1)} wanted")
            self._thread = start_thread("wanted-nodes", self._write, wanted)

    def _write(self, wanted: int) -> None:
        access = self._session.access
        try:
            with closing(described(access.for_status(self._session.machine.store.place)).open()) as store:
                write_wanted(store, access.key_prefix, self._config.token, wanted)
                self._written = wanted
        except (StoreError, StartError) as error:
            if not self._error:
                access.notices.append(f"warning: the wanted number of nodes cannot be written: {clip(str(error), 300)}")
            self._error = str(error)
