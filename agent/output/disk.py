"""File operations in a thread of their own, so that a slow, full or hanging log disk never blocks the agent's loop.

The queue of writes is limited in bytes. While it is full, the workers that print have to wait, as they have to for a slow
console. If one operation takes longer than STALL seconds, the disk counts as hanging and nobody waits for it: output that does not
fit is dropped, and one line says how much.

See docs/torchrun.md.
"""

from __future__ import annotations

import errno
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from elastirun import clock
from elastirun.threads import start_thread

T = TypeVar("T")

QUEUE_LIMIT = 4 << 20  # bytes; while more are queued, the agent reads no more worker output for the disk
STALL = 2.0  # seconds for one operation, after which the disk counts as hanging; a slow network disk answers sooner


class DiskThread:
    """Runs operations one after the other. All methods but ``notice`` are called by the loop's thread, and call ``say`` there.

    The first operation starts the thread. It is a daemon, so an operation that never returns does not keep the process alive.
    """

    def __init__(self, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self._selector, self._say = selector, say
        self._changed = threading.Condition()  # guards the attributes from here to ``_closed``
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0  # queued or being written
        self._began: float | None = None  # when the operation that runs now began; None: none runs
        self._notices: deque[str] = deque()  # lines for people
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dropped = 0  # bytes since the disk was last found hanging
        self._waiting: list[Callable[[], None]] = []  # callbacks of ``when_room``; only the loop's thread changes it
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._wake, selectors.EVENT_READ, self._ready)

    @property
    def full(self) -> bool:
        """Return whether the pumps of worker output have to wait. False while the disk hangs: their output is dropped then."""
        return self._bytes >= QUEUE_LIMIT and not self.hangs()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when there is room again or the disk hangs. Call this only while ``full``."""
        self._waiting.append(resume)
        self._wake_loop()  # there may be room by now

    def hangs(self, limit: float | None = None) -> bool:
        """Return whether the operation that runs now has taken longer than ``limit`` seconds (None: ``STALL``)."""
        began = self._began
        return began is not None and clock.now() - began > (STALL if limit is None else limit)

    def submit(self, operation: Callable[[], None], size: int = 0) -> None:
        """Queue ``operation``, which writes ``size`` bytes. Drops it if the disk hangs and the queue is full. Says it if it raises."""
        with self._changed:
            refused = self._closed or not self._started() or (size and self._bytes >= QUEUE_LIMIT and self.hangs())
            if not refused:
                self._queue.append((size, operation))
                self._bytes += size
                self._changed.notify_all()
        if refused and size:
            if not self._dropped:
                self._say("the log disk does not answer; output that it cannot take is lost there, training goes on")
            self._dropped += size

    def call(self, function: Callable[[], T], limit: float, undo: Callable[[T], None] | None = None) -> T:
        """Run ``function`` in the thread and wait for it. Returns its result, or raises its exception.

        Raises TimeoutError, which is an OSError, after ``limit`` seconds; when the result comes later, ``undo`` gets it. Does not
        wait if an earlier operation has been running for longer than ``limit``.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            if self._closed or not self._started():
                raise OSError(errno.EAGAIN, "no thread can be started for it")
            if self.hangs(limit):
                raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
            self._queue.append((0, run))
            self._changed.notify_all()
        if not wait((future,), limit).done:
            future.add_done_callback(lambda late: undo(late.result()) if undo and not late.exception() else None)
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        return future.result()

    def notice(self, text: str) -> None:
        """Let the loop's thread say ``text``. Operations call this in the disk's thread."""
        self._notices.append(text)
        self._wake_loop()

    def tick(self) -> float | None:
        """Resume the pumps that wait for a hanging disk. Returns when to call it next, on ``elastirun.clock``; None: at no fixed time."""
        began = self._began
        if not self._waiting or began is None:
            return None
        if self.hangs():
            self._resume()
            return None
        return began + STALL + 0.01

    def drain(self, limit: float) -> None:
        """Wait until all is written, for at most ``limit`` seconds, at the end of the agent. Says how many bytes are lost."""
        end = clock.now() + limit
        with self._changed:
            while (self._queue or self._began is not None) and (left := end - clock.now()) > 0:
                self._changed.wait(left)
            lost = self._bytes
        self._say_notices()
        if lost or self._dropped:
            self._say(f"the log disk did not take everything in time: {lost + self._dropped} bytes of logs are lost")
            self._dropped = 0

    def close(self, limit: float) -> None:
        """Drain, then end the thread. Drops the operations that are still queued. Idempotent."""
        if self._closed:
            return
        self.drain(limit)
        with self._changed:
            self._closed = True
            hangs = self._began is not None
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None and not hangs:
            self._thread.join()
        self._resume()
        self._selector.unregister(self._wake)
        if not hangs:  # a hanging thread may still use it later
            os.close(self._wake)

    def _started(self) -> bool:
        if self._thread is None:
            self._thread = start_thread("disk", self._run)
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                size, operation = self._queue.popleft()
                self._began = clock.now()
            try:
                operation()
            except Exception as error:  # all later logs need this thread
                self.notice(f"an operation on the log disk has failed: {error!r}")
            with self._changed:
                self._bytes -= size
                self._began = None
                self._changed.notify_all()
                wake = self._waiting and self._bytes <= QUEUE_LIMIT // 2 or self._dropped and not self._queue
            if wake:
                self._wake_loop()

    def _wake_loop(self) -> None:
        with suppress(BlockingIOError):  # the counter is full, so the loop will wake up anyway
            os.eventfd_write(self._wake, 1)

    def _ready(self, mask: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._say_notices()
        if self._dropped and not self._bytes:
            self._say(f"the log disk answers again; {self._dropped} bytes of output were lost")
            self._dropped = 0
        if not self.full:
            self._resume()

    def _say_notices(self) -> None:
        while self._notices:
            self._say(self._notices.popleft())

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()
