"""The agent's standard output and error, written without ever blocking the loop.

Everything the agent says and every worker stream that passes through it goes into a bounded buffer that is written as the
other side takes it. A terminal stopped with ^S, an idle ``| less`` or a file on a disk that hangs thus holds up the workers
that print, as it would without us, and never the agent. Once the workers are to stop, the console may not cost them their
time: output that does not fit is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import selectors
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

from elastirun import clock

_CHUNK = 4096  # PIPE_BUF: a pipe that polls writable takes so much at once, and whole
LIMIT = 1 << 20  # bytes in a buffer from which on the log pumps stop reading


class FileWriter:
    """Writes what comes through a pipe to a regular file, in a thread: a write to a disk that hangs cannot be made non-blocking.

    ``pipe`` is the non-blocking end to write to. Raises RuntimeError when no thread can be started.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read, self.pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        self._handed, self._done = 0, 0  # bytes put into the pipe, and written or lost
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._read)
            os.close(self.pipe)
            raise

    def handed(self, count: int) -> None:
        """That many more bytes are in the pipe."""
        with self._changed:
            self._handed += count

    def wait(self, until: float) -> bool:
        """Wait until everything is written, but not beyond ``until``. False when something is left."""
        with self._changed:
            while self._done < self._handed and (left := until - clock.now()) > 0:
                self._changed.wait(left)
            return self._done >= self._handed

    def close(self) -> None:
        """End the thread, once it has written the rest or a second is over."""
        os.close(self.pipe)
        self._thread.join(1.0)

    def _run(self) -> None:
        while data := os.read(self._read, 1 << 16):
            view = memoryview(data)
            with suppress(OSError):  # a full disk, or one that is gone: the rest of this piece is lost
                while view:
                    view = view[os.write(self._fd, view) :]
            with self._changed:
                self._done += len(data)
                self._changed.notify_all()
        os.close(self._read)


class Stream:
    """One descriptor with its buffer. A write is never refused and never fails; ``full`` asks the writer to hold back."""

    def __init__(self, selector: selectors.BaseSelector, fd: int) -> None:
        self._selector = selector
        self._buffer = bytearray()
        self._line_open = False  # the last byte written was not a newline
        self._waiting: list[Callable[[], None]] = []
        self.hurried = False  # nobody is asked to hold back
        self.dropped = 0  # bytes
        self._fd, self._own, self._dead = fd, False, False
        self._file: FileWriter | None = None
        try:
            self._fd, self._own = _private_descriptor(fd)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                with suppress(RuntimeError):  # no further thread: write to the file directly
                    self._file = FileWriter(fd)
                    self._fd = self._file.pipe
        except OSError:  # closed; the number may mean something else tomorrow
            self._dead = True
        self._burst = 16 if self._own or self._file else 1  # chunks for one look whether the other side takes some: those never block

    @property
    def full(self) -> bool:
        return len(self._buffer) >= LIMIT and not self.hurried

    @property
    def pending(self) -> bool:
        return bool(self._buffer)

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when half of the buffer is free again or nobody is to wait. To be asked while ``full``."""
        self._waiting.append(resume)

    def hurry(self) -> None:
        """From now on nobody waits. Who writes to a full pipe without us finds some room there, too."""
        self.hurried = True
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        if not self._dead and not poller.poll(0):
            with suppress(OSError):  # not a pipe, or no larger one for this user
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, LIMIT)
        self._resume()

    def pass_on(self, data: bytes) -> None:
        """A worker's output: written, or dropped when there is no room and nobody waits."""
        if self.hurried and len(self._buffer) >= LIMIT:
            self.dropped += len(data)
        else:
            self.write(data)

    def write(self, data: bytes) -> None:
        """Append ``data``; it stays in one piece among what others write here."""
        if self._dead or not data:
            return
        if not self._buffer:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self._ready)
        self._buffer += data
        self._line_open = not data.endswith(b"\n")

    def write_line(self, text: str) -> None:
        """``text`` and a newline, on a line of its own even when a worker has left one unfinished."""
        self.write((b"\n" if self._line_open else b"") + text.encode(errors="backslashreplace") + b"\n")

    def write_some(self) -> bool:
        """Write one chunk: up to the last end of line in it, so that other writers of the same pipe tear no line of ours.

        False when there is nothing more to write now.
        """
        chunk = bytes(self._buffer[:_CHUNK])
        chunk = chunk[: chunk.rfind(b"\n") + 1] or chunk
        try:
            done = os.write(self._fd, chunk)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):  # EPIPE, EIO: nobody will ever read it
                self._discard()
                return False
            done = len(self._buffer)  # a full disk may have room again later
        if self._file is not None:
            self._file.handed(done)
        del self._buffer[:done]
        if not self._buffer:
            self._selector.unregister(self._fd)
        if len(self._buffer) <= LIMIT // 2:
            self._resume()
        return bool(self._buffer)

    def fileno(self) -> int:
        return self._fd

    def settle(self, until: float) -> bool:
        """Wait until a file has what was written, but not beyond ``until``. False when something is left."""
        return self._file is None or self._file.wait(until)

    def close(self) -> None:
        if not self._dead:
            self._discard()
            if self._own:
                os.close(self._fd)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ready(self, mask: int) -> None:
        for _ in range(self._burst):
            if not self._buffer or not self.write_some():
                return

    def _discard(self) -> None:
        if self._buffer:
            self._selector.unregister(self._fd)
        self._dead = True
        self._buffer.clear()
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class Console:
    """Standard output and error of the agent. Closing leaves the descriptors given open."""

    def __init__(self, selector: selectors.BaseSelector, out_fd: int = 1, err_fd: int = 2) -> None:
        self.out = Stream(selector, out_fd)
        self.err = Stream(selector, err_fd)

    def hurry(self) -> None:
        """The workers are to stop: from now on, until ``relax``, none of them waits for a console that nobody reads."""
        self.out.hurry()
        self.err.hurry()

    def relax(self) -> None:
        """Workers hold back again for a full console. A line says how many bytes were dropped meanwhile."""
        for name, stream in (("stdout", self.out), ("stderr", self.err)):
            if stream.dropped:
                self.say(f"nobody read {name} while the workers were stopping; {stream.dropped} bytes of their output were dropped there")
            stream.hurried, stream.dropped = False, 0

    def write_err(self, data: bytes) -> None:
        self.err.write(data)

    def say(self, text: str) -> None:
        """The agent's own line on standard error: ``elastirun: text``."""
        self.err.write_line(f"elastirun: {text}")

    def flush(self, timeout: float) -> bool:
        """Block until all is written, for at most ``timeout`` seconds: for the end, when no loop runs any more.

        False when something is left unwritten.
        """
        end = clock.now() + timeout
        while pending := [s for s in (self.out, self.err) if s.pending]:
            poller = select.poll()
            streams = {s.fileno(): s for s in pending}
            for fd in streams:
                poller.register(fd, select.POLLOUT)
            ready = poller.poll(max(0.0, end - clock.now()) * 1000)
            if not ready:
                return False
            for fd, _ in ready:
                streams[fd].write_some()
        return self.out.settle(end) and self.err.settle(end)

    def close(self) -> None:
        self.out.close()
        self.err.close()


def _private_descriptor(fd: int) -> tuple[int, bool]:
    """A non-blocking descriptor for what ``fd`` writes to, and whether it is a new one that we must close.

    O_NONBLOCK on ``fd`` itself would also change the shell's and the workers' descriptor. A terminal or pipe can be
    opened a second time; anything else (or one that belongs to another user) is used as it is: then only a writer that
    fills a pipe between our poll and our write can make us wait. Raises OSError when ``fd`` is closed.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), True
    return fd, False
