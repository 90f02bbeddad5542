"""File operations in a thread of their own, so that a log disk that is slow, full or hanging never holds up the agent's loop.

Writes are queued behind a limit in bytes. A slow disk holds back the workers that print, as a slow console does. A disk that
answers nothing for ``STALL`` seconds holds back nobody: what does not fit is dropped, and one line says how much.
"""

from __future__ import annotations

import errno
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from elastirun import clock

T = TypeVar("T")

LIMIT = 4 << 20  # bytes queued from which on the log pumps stop reading
STALL = 2.0  # seconds for one operation after which the disk counts as hanging


class DiskThread:
    """Runs operations one after the other. All methods are called by the loop's thread; ``say`` is called there too.

    The thread is started by the first operation. It is a daemon: an operation that never returns does not keep the process.
    """

    def __init__(self, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self._selector, self._say = selector, say
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0  # queued or being written
        self._since: float | None = None  # when the operation that runs now began
        self._notices: deque[str] = deque()  # lines for people
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dropped = 0  # bytes since the disk was last found hanging
        self._waiting: list[Callable[[], None]] = []  # of the loop's thread alone
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._wake, selectors.EVENT_READ, self._ready)

    @property
    def full(self) -> bool:
        """Writers are to hold back. Never true while the disk hangs: then their output is dropped."""
        return self._bytes >= LIMIT and not self.hangs()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when there is room again or the disk hangs. To be asked while ``full``."""
        self._waiting.append(resume)
        self._nudge()  # there may be room by now

    def hangs(self, limit: float | None = None) -> bool:
        """Whether the operation that runs now has taken longer than ``limit`` seconds (None: ``STALL``)."""
        since = self._since
        return since is not None and clock.now() - since > (STALL if limit is None else limit)

    def submit(self, operation: Callable[[], None], size: int = 0) -> None:
        """Queue ``operation``, which must not raise and stands for ``size`` bytes. Dropped when the disk hangs and the queue is full."""
        with self._changed:
            refused = self._closed or not self._started() or (size and self._bytes >= LIMIT and self.hangs())
            if not refused:
                self._queue.append((size, operation))
                self._bytes += size
                self._changed.notify_all()
        if refused and size:
            if not self._dropped:
                self._say("the log disk does not answer; output that it cannot take is lost there, training goes on")
            self._dropped += size

    def call(self, function: Callable[[], T], limit: float, undo: Callable[[T], None] | None = None) -> T:
        """Return what ``function`` returns or raise what it raises.

        Raises TimeoutError, which is an OSError, when that takes longer than ``limit`` seconds; ``undo`` then gets the result when it
        comes. Does not wait while an earlier operation has been hanging for as long.
        """
        call = _Call(function, undo)
        with self._changed:
            if self._closed or not self._started():
                raise OSError(errno.EAGAIN, "no thread can be started for it")
            if self.hangs(limit):
                raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
            self._queue.append((0, call.run))
            self._changed.notify_all()
        return call.result(limit)

    def notice(self, text: str) -> None:
        """Have the loop's thread say ``text``. For operations, in the disk's thread."""
        self._notices.append(text)
        self._nudge()

    def tick(self) -> float | None:
        """Let those go on that wait for a hanging disk. Returns when to be called next, on ``elastirun.clock``; None: not by time."""
        since = self._since
        if not self._waiting or since is None:
            return None
        if self.hangs():
            self._resume()
            return None
        return since + STALL + 0.01

    def drain(self, limit: float) -> None:
        """Wait until all is written, for at most ``limit`` seconds: for the end. A line says what is lost."""
        end = clock.now() + limit
        with self._changed:
            while (self._queue or self._since is not None) and (left := end - clock.now()) > 0:
                self._changed.wait(left)
            lost = self._bytes
        self._tell()
        if lost or self._dropped:
            self._say(f"the log disk did not take everything in time: {lost + self._dropped} bytes of logs are lost")
            self._dropped = 0

    def close(self, limit: float) -> None:
        """Drain, then end the thread. Operations still queued are dropped. Idempotent."""
        if self._closed:
            return
        self.drain(limit)
        with self._changed:
            self._closed = True
            hangs = self._since is not None
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None and not hangs:
            self._thread.join()
        self._resume()
        self._selector.unregister(self._wake)
        if not hangs:  # else the thread may still want to use it
            os.close(self._wake)

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no further thread may be started by this user or in this container
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                size, operation = self._queue.popleft()
                self._since = clock.now()
            operation()
            with self._changed:
                self._bytes -= size
                self._since = None
                self._changed.notify_all()
                wake = self._waiting and self._bytes <= LIMIT // 2 or self._dropped and not self._queue
            if wake:
                self._nudge()

    def _nudge(self) -> None:
        with suppress(BlockingIOError):  # the loop has been woken often enough
            os.eventfd_write(self._wake, 1)

    def _ready(self, mask: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._tell()
        if self._dropped and not self._bytes:
            self._say(f"the log disk answers again; {self._dropped} bytes of output were lost")
            self._dropped = 0
        if not self.full:
            self._resume()

    def _tell(self) -> None:
        while self._notices:
            self._say(self._notices.popleft())

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class _Call(Generic[T]):
    """A function whose result another thread waits for, up to a limit."""

    _result: T

    def __init__(self, function: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self._function, self._undo = function, undo
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        with self._lock:
            late = self._abandoned
            self._over.set()
        if late and self._error is None and self._undo is not None:
            self._undo(self._result)

    def result(self, limit: float) -> T:
        self._over.wait(limit)
        with self._lock:
            self._abandoned = not self._over.is_set()
        if self._abandoned:
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        if self._error is not None:
            raise self._error
        return self._result
