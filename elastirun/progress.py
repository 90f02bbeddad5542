"""``progress``: a worker tells its agent that training goes on (``--hang-timeout``), by a stamp in shared memory. Needs no torch.

What else a worker tells is for the account of its node (docs/account.md): the number of its step, and when a save holds training up.
"""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import index
from time import monotonic_ns

from elastirun.worker.progress_page import (
    AT,
    BUSY,
    CAUGHT_UP,
    FARTHEST,
    FIRST,
    FOREVER,
    HEADER,
    LONGEST,
    MAGIC,
    MEDIAN,
    NS,
    PARTS,
    PID,
    SAMPLED,
    SAVING,
    SHOWS,
    SIGNAL,
    STAMPED,
    STEPS,
    TOTAL,
    VARIABLE,
    WITHIN,
    WORK,
)

LARGEST_STEP = 1 << 53  # as in the name of a checkpoint

_SIGNALS = range(signal.SIGRTMAX - 4, signal.SIGRTMIN + 8, -1)  # candidates for "write your stacks"; programs seldom use these

EXIT_LIMIT = 600  # seconds for the exit of the interpreter: torch and CUDA end threads, and free memory and connections
MOST_WORK = 1e15  # units in a step: so many thousandths fit into 64 bits
LONGEST_STEP = 1e6  # seconds; so many steps of that length fit into the number of nanoseconds

_words: memoryview | None = None  # the numbers of the page; None: this process stamps none
_steps = _stamped = _longest = 0  # what the page says of them
_look: Callable[[], int] = int  # called behind the step number ``_look_at``
_look_at = 0
_announced = False  # the script has announced the pause before the next step
_fd: int | None = None  # of the page; None: there was none yet
_tried = False  # the page was opened, or cannot be
_by_script = False  # the script stamps its steps, so those of its optimizers are not counted beside them


def progress(within: float | None = None, *, step: int | None = None, work: float | None = None, total: int | None = None) -> None:
    """Tell the agent that this worker has made a step. Call it once per step, on every rank; it takes half a microsecond.

    ``within``: the next call comes within this many seconds, although ``--hang-timeout`` is shorter: for an evaluation, a checkpoint, the
    end of the training. ``math.inf``: there is no limit until the next call. ``step``: the number of this step in the whole training,
    which goes back where a new round begins from a checkpoint; so the agent can tell which steps are done again. ``work``: how much there
    was to compute in this step on this rank, in any unit, such as the tokens of a batch. Where every rank tells it, stragglers are judged
    by their time for a unit and not for a step (with torch's DistributedDataParallel). ``total``: the steps of the whole training, with
    which ``step`` becomes a percentage for Kubeflow Trainer; to tell it once in a round is enough. Does nothing without an agent of
    elastirun, and in forks of this process. Raises TypeError for seconds or work below 0 and for what is no number.
    """
    global _by_script
    if within is None:  # a script that only announces its pauses still has its optimizers counted
        _by_script = True
    elif not (hasattr(within, "__float__") and within >= 0):
        raise TypeError(f"progress(): within must be seconds, 0 or more, not {within!r}")
    if work is not None:
        _add_work(work)
    _stamp(within)
    if step is not None:
        at_step(step)
    if total is not None:
        total = _whole("total", total)
        if (words := _page()) is not None:
            words[TOTAL] = total


def _add_work(work: float) -> None:
    """Count the work of a step."""
    if not (hasattr(work, "__float__") and 0 <= work <= MOST_WORK):
        raise TypeError(f"progress(): work must be a number from 0 to {MOST_WORK:g}, not {work!r}")
    words = _page()
    if words is not None:
        words[WORK] = (words[WORK] + int(work * PARTS)) & FOREVER


def at_step(step: int) -> None:
    """Tell the agent that ``step`` is the last step that training has made, without a stamp. ``Checkpointer`` does it."""
    number = _whole("step", step) + 1
    words = _page()
    if words is None:
        return
    words[AT] = number
    if words[FARTHEST] and not words[CAUGHT_UP] and number >= words[FARTHEST]:
        words[CAUGHT_UP] = monotonic_ns()


def _whole(name: str, value: int) -> int:
    """Return a number of steps, within what the page holds."""
    try:
        return min(max(0, index(value)), LARGEST_STEP)
    except TypeError:
        raise TypeError(f"progress(): {name} must be a whole number, not {value!r}") from None


@contextmanager
def saving() -> Iterator[None]:
    """Tell the agent that a save of a checkpoint holds training up while the block runs."""
    begun = monotonic_ns()
    try:
        yield
    finally:
        words = _page()
        if words is not None:
            words[SAVING] += monotonic_ns() - begun


def step_of_optimizer() -> None:
    """Stamp a step that an optimizer of torch has made, in a script that does not call ``progress``, see worker/optimizer_steps.py."""
    if not _by_script:
        _stamp(None)


def computed(seconds: float, median: float) -> None:
    """Tell the agent for how long this rank has computed in a step, without waiting for others, and for how long the median rank has."""
    words = _words
    if words is not None and 0.0 <= seconds < LONGEST_STEP and 0.0 <= median < LONGEST_STEP:  # else they are not of this world: NaN
        words[BUSY] += int(seconds * NS)
        words[MEDIAN] += int(median * NS)


def sampled(seconds: float) -> None:
    """Tell the agent for how long this rank has computed in one of its steps, without waiting for others."""
    words = _words
    if words is not None and 0.0 < seconds < LONGEST_STEP:
        words[BUSY] += int(seconds * NS)
        words[SAMPLED] += 1


def _stamp(within: float | None) -> None:
    """Stamp a step. Written for speed: after each step of a training it finds its code and its data outside of the processor's caches."""
    global _stamped, _steps, _announced
    words = _words
    if words is None:
        words = _page()
        if words is None:
            return
    now = monotonic_ns()
    if now - _stamped > _longest:
        _note_pause(words, now)
    if within is not None or _announced:
        _announced = within is not None
        words[WITHIN] = 0 if within is None else _nanoseconds(within)
    words[STAMPED] = _stamped = now
    words[STEPS] = _steps = _steps + 1
    if _steps == _look_at:
        _call_look()


def look_after(steps: int, look: Callable[[], int]) -> None:
    """Call ``look`` behind the step that is so many ``steps`` ahead. It returns after how many more to call it again; 0: never."""
    global _look, _look_at
    _look, _look_at = look, _steps + steps


def _call_look() -> None:
    global _look_at
    _look_at = _steps + _look()


def _note_pause(words: memoryview, now: int) -> None:
    """Note the longest time between two steps so far. A pause that was announced does not count."""
    global _longest
    if not _steps:
        words[FIRST] = now
    elif not _announced:
        words[LONGEST] = _longest = now - _stamped


def _nanoseconds(seconds: float) -> int:
    return int(min(max(1.0, seconds * NS), float(1 << 63))) if seconds < 1 << 32 else FOREVER


def _page() -> memoryview | None:
    """Return the numbers of the page, which is opened at the first call. None: this process stamps none."""
    return _words if _words is not None or _tried else _open()


def _open() -> memoryview | None:
    """Open the page that the environment names, and have the Python stacks written there at a signal. None: no page for this process."""
    global _fd, _tried, _words, _steps, _stamped, _longest, _announced, _look_at
    _tried = True
    path = os.environ.get(VARIABLE)
    if not path or sys.byteorder != "little":
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(fd, HEADER)
    except (OSError, ValueError):  # of another user, another pid namespace, or no page
        return None
    words = memoryview(memory).cast("Q")
    if memory[: len(MAGIC)] != MAGIC or words[PID] not in (0, os.getpid()):  # another process of this worker stamps it already
        os.close(fd)
        return None
    before, _fd = _fd, fd
    words[SIGNAL] = _write_stacks_at_a_signal(fd)
    words[PID] = words[SHOWS] = os.getpid()
    if before is None:
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_ask_for_time_to_exit)
    else:
        os.close(before)
    _look_at += words[STEPS] - _steps
    _words, _steps, _stamped, _longest, _announced = words, words[STEPS], words[STAMPED], words[LONGEST], bool(words[WITHIN])
    return words


def begin_round() -> None:
    """Stamp the page that the environment names now: this process goes on in another round (docs/elastic.md)."""
    global _tried, _words
    _tried, _words = False, None


def _write_stacks_at_a_signal(fd: int) -> int:
    """Let a signal that this program does not use write all Python stacks to ``fd``. Return its number; 0: there is none.

    The signal is ignored before and after, so that it does no harm when it comes after the interpreter has taken its handlers away.
    """
    for signum in _SIGNALS:
        if (before := signal.getsignal(signum)) in (signal.SIG_DFL, signal.SIG_IGN):
            try:
                os.lseek(fd, HEADER, os.SEEK_SET)
                if before is signal.SIG_DFL:
                    with suppress(ValueError):  # not in the main thread
                        signal.signal(signum, signal.SIG_IGN)
                faulthandler.register(signum, file=fd, all_threads=True)
            except (OSError, RuntimeError, ValueError):
                break
            return int(signum)
    return 0


def _ask_for_time_to_exit() -> None:
    """Let the agent wait for the exit of the interpreter, which makes no step and writes no stack."""
    if _words is not None:
        _words[WITHIN] = max(_words[WITHIN], monotonic_ns() - _words[STAMPED] + EXIT_LIMIT * NS)


def _forget() -> None:
    """Stamp nothing in a fork: its steps are not those of the worker."""
    global _words
    _words = None
