"""Learns of changes to a key from etcd, over any number of lost connections, without asking again and again."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.client import Client, Link

PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds before the next try, doubled with each that brought nothing
HAS_LEADER = ("hasleader", "true")  # a member that is cut off from the others ends the stream, instead of being silent


class Watch:
    """Calls ``changed`` from a thread of its own: once when it begins to watch ``key``, then after each change, or several.

    It goes on from the revision it has come to, so nothing is missed while no member can be reached; when etcd has forgotten the
    revisions since, ``changed`` is called to be safe. It uses the channel of ``client``, follows it to other endpoints, and ends with it.
    Whether a member that answers is good for anything, the operations find out: during an election they wait, it begins again.
    """

    def __init__(self, client: Client, key: bytes, changed: Callable[[], None]) -> None:
        self._client = client
        self._key = key
        self._changed = changed
        self._next = 0  # the first revision that has not been looked at; 0: what is there when the watch begins
        self._fruitless = 0  # tries in a row
        threading.Thread(target=self._run, name="etcd watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                link = self._client.link()
            except StoreError:
                return  # closed
            try:
                self._follow(link)
            except self._client.messages.grpc.RpcError as error:
                if "etcdserver" not in (error.details() or ""):  # the connection is gone, unless an operation has left it already
                    self._client.leave(link)
            except ValueError:
                pass  # the channel was closed before the call began
            self._fruitless += 1
            pause = min(PAUSE * 2 ** min(self._fruitless - 1, 10), LONGEST_PAUSE)
            self._client.closed.wait(pause * random.uniform(0.5, 1.0))

    def _follow(self, link: Link) -> None:
        """Watch over one channel. Returns when etcd ends the watch; raises gRPC's errors."""
        messages = self._client.messages
        create = messages.WatchCreateRequest(key=self._key, start_revision=self._next, progress_notify=True)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(messages.WatchRequest(create_request=create))
        metadata = (HAS_LEADER, *self._client.token())
        answers = messages.method(link.channel, "Watch/Watch")(iter(requests.get, None), metadata=metadata)
        try:
            for answer in answers:
                if answer.compact_revision:
                    self._next = 0
                if answer.canceled or answer.compact_revision:
                    return
                self._fruitless = 0
                self._take(answer)
        finally:
            requests.put(None)  # gRPC waits for it in a thread
            answers.cancel()

    def _take(self, answer: Any) -> None:
        began = answer.created and self._next == 0
        if answer.events:
            self._next = max(event.kv.mod_revision for event in answer.events) + 1
        elif began or not answer.created:  # a word on how far etcd has come, with nothing for us on the way
            self._next = answer.header.revision + 1
        if answer.events or began:
            self._changed()
