"""Failures of workers: which one is the root cause, what makes two of them the same, and one line for people about each."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from elastirun.rendezvous.wire.codec import clip
from elastirun.rendezvous.wire.records import Blame, ExitRecord

LONGEST_WORDS = 120  # characters of an exception
# Not indented, unlike the frames above it; torch puts the rank in front. The modules of its name are left out.
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Lost|Failed)\b.*)")
_SOURCE = re.compile(r"\[\S+\.(?:cc|cpp|h):\d+\] ?")  # a line of gloo's or torch's source in a message


def root_cause(failures: Iterable[ExitRecord]) -> tuple[ExitRecord, ...]:
    """Return the failures, most likely root cause first: by blame, then by seconds since the start of the round."""
    return tuple(sorted(failures, key=lambda f: (f.blame, f.after, f.rank)))


def may_have_lost_peers(failure: ExitRecord) -> bool:
    """Return whether the worker failed probably for having lost its peers, so that another one may be the cause."""
    return failure.blame == Blame.VICTIM


def signature(failure: ExitRecord) -> str:
    """Return what stays the same when the same failure happens again: its exit code and last line, without the numbers in it."""
    last = failure.lines[-1] if failure.lines else ""
    return clip(f"{failure.code} {re.sub(r'0x[0-9a-fA-F]+|[0-9]+', '0', last)}", 200)


def describe(failure: ExitRecord) -> str:
    """Return one line for people about the failure."""
    if failure.blame == Blame.KILLED_BY_US:  # it did not fail
        return clip(f"rank {failure.rank} on {failure.node} {failure.note}")
    how = f"exit code {failure.code}" if failure.code >= 0 else signal_name(-failure.code)
    perhaps = ", perhaps for having lost its peers" if may_have_lost_peers(failure) else ""
    note = f", {failure.note.partition(' (')[0]}" if failure.note else ""
    words = exception(failure.lines) if failure.code > 0 and not note else ""
    return clip(f"rank {failure.rank} on {failure.node} failed ({how}{note}){perhaps}{f': {words}' if words else ''}")


def exception(lines: Sequence[str]) -> str:
    """Return the last exception in the last lines of a worker, as ``ValueError: no data``; empty: there is none."""
    found = next(filter(None, map(_EXCEPTION.match, reversed(lines))), None)
    return clip(_SOURCE.sub("", found[1]), LONGEST_WORDS) if found else ""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGSEGV``; ``signal 40`` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
