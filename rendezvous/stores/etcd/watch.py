"""Watches a key at etcd, across any number of lost connections, in place of polling."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from typing import Any

from elastirun.errors import StoreError
from elastirun.rendezvous.stores.etcd.client import Channel, Client
from elastirun.threads import start_thread

PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds before the next attempt: doubled after each that brought nothing, to spare a cluster in trouble
HAS_LEADER = ("hasleader", "true")  # metadata with which a member that is cut off from the others ends the stream instead of going silent


class Watch:
    """Calls ``changed`` from its own thread: once when the watch begins, then after each change of ``key``, or after several.

    A new watch continues from the last revision seen, so no change is missed while no member can be reached. When etcd has compacted the
    revisions in between, ``changed`` is called to be safe. The watch uses the channel of ``client``, follows the client to other endpoints,
    and ends with it. It never leaves a member that answers, even without a leader: the operations decide that.
    """

    def __init__(self, client: Client, key: bytes, changed: Callable[[], None]) -> None:
        self._client = client
        self._key = key
        self._changed = changed
        self._next = 0  # first revision that has not been seen; 0: start with the present one
        self._fruitless = 0  # consecutive attempts without an answer
        start_thread("etcd watch", self._run)  # if none can be started, polls have to do

    def _run(self) -> None:
        while True:
            try:
                channel = self._client.channel()
            except StoreError:
                return  # closed
            try:
                self._follow(channel)
            except self._client.messages.grpc.RpcError as error:
                if "etcdserver" not in (error.details() or ""):  # not etcd's words but gRPC's: the connection is lost
                    self._client.abandon(channel)
            except ValueError:
                pass  # the channel was closed before the call began
            self._fruitless += 1
            pause = min(PAUSE * 2 ** min(self._fruitless - 1, 10), LONGEST_PAUSE)
            self._client.closed.wait(pause * random.uniform(0.5, 1.0))

    def _follow(self, channel: Channel) -> None:
        """Watch over ``channel`` until etcd ends the watch. Raises gRPC's errors."""
        messages = self._client.messages
        create = messages.WatchCreateRequest(key=self._key, start_revision=self._next, progress_notify=True)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(messages.WatchRequest(create_request=create))
        metadata = (HAS_LEADER, *self._client.token())
        answers = messages.method(channel.grpc, "Watch/Watch")(iter(requests.get, None), metadata=metadata)
        try:
            for answer in answers:
                if answer.compact_revision:  # etcd no longer has the revisions since _next
                    self._next = 0
                if answer.canceled or answer.compact_revision:
                    return
                self._fruitless = 0
                self._take(answer)
        finally:
            requests.put(None)  # ends the thread in which gRPC waits for more requests
            answers.cancel()

    def _take(self, answer: Any) -> None:
        """Note the revision of an answer, and call ``changed`` if the key changed or the watch began."""
        began = answer.created and self._next == 0
        if answer.events:
            self._next = max(event.kv.mod_revision for event in answer.events) + 1
        elif began or not answer.created:  # a progress notification: no change of the key up to this revision
            self._next = answer.header.revision + 1
        if answer.events or began:
            self._changed()
