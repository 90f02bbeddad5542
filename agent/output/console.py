"""The agent's standard output and error, written without ever blocking the loop.

Lines of the agent and worker output go into a bounded buffer, which is written as fast as the reader takes it. When the buffer
is full (a terminal stopped with ^S, an idle ``| less``, a file on a disk that hangs), the workers that print have to wait, as they
would without the agent; the agent never waits. While workers are stopping they must not spend their grace period waiting for
a reader, so output that does not fit is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import selectors
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elastirun import clock
from elastirun.agent.host.descriptors import ready
from elastirun.agent.output.agent_lines import Level, LineFormat

_CHUNK = 4096  # bytes (PIPE_BUF); a pipe that polls writable takes so much in one piece
BUFFER_LIMIT = 1 << 20  # bytes; while a buffer holds more, the agent reads no more worker output for it


class FileWriter:
    """Writes to a regular file in a thread, because a write to a disk that hangs cannot be made non-blocking.

    Data reaches the thread through a pipe; ``pipe`` is its non-blocking end to write to. Raises RuntimeError when no thread can be started.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read, self.pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        self._added, self._done = 0, 0  # bytes put into the pipe; bytes written or lost
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._read)
            os.close(self.pipe)
            raise

    def added(self, count: int) -> None:
        """Note that the caller has put ``count`` more bytes into the pipe."""
        with self._changed:
            self._added += count

    def wait(self, until: float) -> bool:
        """Wait until everything is written, but not beyond ``until``. Returns whether everything is written."""
        with self._changed:
            while self._done < self._added and (left := until - clock.now()) > 0:
                self._changed.wait(left)
            return self._done >= self._added

    def close(self) -> None:
        """Let the thread write the rest and end; wait for that for a second at most."""
        os.close(self.pipe)
        self._thread.join(1.0)

    def _run(self) -> None:
        while data := os.read(self._read, 1 << 16):
            view = memoryview(data)
            with suppress(OSError):  # the disk is full or gone: the rest of this piece is lost
                while view:
                    view = view[os.write(self._fd, view) :]
            with self._changed:
                self._done += len(data)
                self._changed.notify_all()
        os.close(self._read)


class Stream:
    """One descriptor with its buffer. A write is never refused and never fails; ``full`` asks the callers to wait.

    ``dropping``: nobody is asked to wait; worker output that does not fit is dropped. ``dropped``: how many bytes were.
    """

    def __init__(self, selector: selectors.BaseSelector, fd: int) -> None:
        self._selector = selector
        self._buffer = bytearray()
        self._line_open = False  # the last byte in the buffer, or written, was not a newline
        self._waiting: list[Callable[[], None]] = []  # callbacks of ``when_room``
        self.dropping = False
        self.dropped = 0  # bytes
        self._fd, self._own, self._dead = fd, False, False
        self._file: FileWriter | None = None
        try:
            self._fd, self._own = _nonblocking_descriptor(fd)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                with suppress(RuntimeError):  # no further thread can be started: write to the file directly
                    self._file = FileWriter(fd)
                    self._fd = self._file.pipe
        except OSError:  # the descriptor is closed; never use its number, which may belong to another file later
            self._dead = True
        # Chunks to write each time the descriptor polls writable. Only a non-blocking one may get more than the one that surely fits.
        self._burst = 16 if self._own or self._file else 1

    @property
    def full(self) -> bool:
        """Return whether the pumps of worker output have to wait."""
        return len(self._buffer) >= BUFFER_LIMIT and not self.dropping

    @property
    def pending(self) -> bool:
        """Return whether the buffer holds data."""
        return bool(self._buffer)

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once, when half of the buffer is free or ``start_dropping`` is called. Call this only while ``full``."""
        self._waiting.append(resume)

    def start_dropping(self) -> None:
        """Let nobody wait from now on. Also enlarges a full pipe, for workers that write to it directly."""
        self.dropping = True
        if not self._dead and not ready([self._fd], 0, select.POLLOUT):
            with suppress(OSError):  # not a pipe, or this user may not have a larger one
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, BUFFER_LIMIT)
        self._resume()

    def write_output(self, data: bytes) -> None:
        """Write a worker's output, or drop it if the buffer is full and nobody may wait."""
        if self.dropping and len(self._buffer) >= BUFFER_LIMIT:
            self.dropped += len(data)
        else:
            self.write(data)

    def write(self, data: bytes) -> None:
        """Append ``data`` in one piece."""
        if self._dead or not data:
            return
        if not self._buffer:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self._ready)
        self._buffer += data
        self._line_open = not data.endswith(b"\n")

    def write_line(self, text: str) -> None:
        """Write ``text`` on a line of its own, even if a worker has left its last line unfinished."""
        self.write((b"\n" if self._line_open else b"") + text.encode(errors="backslashreplace") + b"\n")

    def write_some(self) -> bool:
        """Write one chunk, and return whether more can be written now.

        The chunk ends at the end of a line where it can, so that output of other programs in the same pipe splits no line of ours.
        """
        chunk = bytes(self._buffer[:_CHUNK])
        chunk = chunk[: chunk.rfind(b"\n") + 1] or chunk
        try:
            done = os.write(self._fd, chunk)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):  # EPIPE, EIO: nobody will ever read from it
                self._discard()
                return False
            done = len(self._buffer)  # drop the buffer; a full disk may have room again later
        if self._file is not None:
            self._file.added(done)
        del self._buffer[:done]
        if not self._buffer:
            self._selector.unregister(self._fd)
        if len(self._buffer) <= BUFFER_LIMIT // 2:
            self._resume()
        return bool(self._buffer)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def wait_for_file(self, until: float) -> bool:
        """Wait until a regular file holds all that was written, but not beyond ``until``. Returns whether it does (else True)."""
        return self._file is None or self._file.wait(until)

    def close(self) -> None:
        """Drop what is not written. Leaves the descriptor that was given open."""
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


_PLAIN = LineFormat()


class Console:
    """Standard output and error of the agent. ``close`` leaves both descriptors open."""

    def __init__(self, selector: selectors.BaseSelector, out_fd: int = 1, err_fd: int = 2, form: LineFormat = _PLAIN) -> None:
        self._form = form
        self.out = Stream(selector, out_fd)
        self.err = Stream(selector, err_fd)

    def start_dropping(self) -> None:
        """Let no worker wait for a console that nobody reads, until ``stop_dropping``. To be called when the workers are stopping."""
        self.out.start_dropping()
        self.err.start_dropping()

    def stop_dropping(self) -> None:
        """Let workers wait again while the console is full. Says how many bytes were dropped meanwhile."""
        for name, stream in (("stdout", self.out), ("stderr", self.err)):
            if stream.dropped:
                self.say(f"nobody read {name} while the workers were stopping; {stream.dropped} bytes of their output were dropped there")
            stream.dropping, stream.dropped = False, 0

    def say(self, text: str, level: Level = Level.INFO) -> None:
        """Write a line of the agent's own to standard error, see ``LineFormat.line``."""
        self.err.write_line(self._form.line(text, level, time.time()))

    def warn(self, text: str) -> None:
        """Write a line on something that a person should look at."""
        self.say(text, Level.WARNING)

    def report(self, text: str) -> None:
        """Write several lines as they are; as JSON one object."""
        self.err.write_line(self._form.as_json(text, Level.ERROR, time.time()) if self._form.kind == "json" else text.removesuffix("\n"))

    def flush(self, timeout: float) -> bool:
        """Block until all is written, for at most ``timeout`` seconds. Returns whether all is written.

        For the end of the agent, when no loop runs any more.
        """
        end = clock.now() + timeout
        while pending := [s for s in (self.out, self.err) if s.pending]:
            writable = ready([s.fileno() for s in pending], max(0.0, end - clock.now()), select.POLLOUT)
            if not writable:
                return False
            for stream in pending:
                if stream.fileno() in writable:
                    stream.write_some()
        return self.out.wait_for_file(end) and self.err.wait_for_file(end)

    def close(self) -> None:
        """Close both streams; call ``flush`` before."""
        self.out.close()
        self.err.close()


def _nonblocking_descriptor(fd: int) -> tuple[int, bool]:
    """Return a non-blocking descriptor of the file behind ``fd``, and True if it is a new one, which the caller closes.

    O_NONBLOCK on ``fd`` itself would also change the descriptors of the shell and of the workers. A terminal or pipe can be
    opened a second time. Anything else, or a file of another user, is used as it is: a write may then block, but only if another
    program fills the pipe between our poll and our write. Raises OSError when ``fd`` is closed.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), True
    return fd, False
