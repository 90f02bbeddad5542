"""The failure report for people, and the error files of torch's ``@record``: reads a worker's, writes the launcher's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from elastirun import linux
from elastirun.agent.failures.classify import describe_code, limit_lines
from elastirun.rendezvous.failures import root_cause, signal_name
from elastirun.rendezvous.wire.records import Blame, ExitRecord

_BLAME_WORDS: dict[int, str] = {Blame.VICTIM: ", probably for having lost its peers", Blame.KILLED_BY_US: ", stopped by its agent"}
_MAX_ERROR_FILE = 1 << 20  # bytes that are read of an error file; a traceback is far shorter
_MAX_OTHERS = 16  # other failures that get a line, so that the report stays below 50 lines
_MAX_MISSED, _MAX_STACK = 2, 4  # workers that others have missed and that get lines; lines of such a worker's stack
_WIDTH = 80  # characters of a ruler, as in torchrun's report


def report(
    script: str,
    reason: str,
    records: Iterable[ExitRecord],
    round: int = 0,
    used: str = "",
    began: float | None = None,
    logs: str | None = None,
    done: Sequence[str] = (),
) -> str:
    """Return the failure report that every node prints last, in torchrun's layout. Ends with a newline.

    One line for each failure but the root cause comes first, then the root cause with its last lines of stderr, then the
    verdict: the last ten lines say what happened, the last forty hold all of the root cause. Characters of worker
    output that cannot be printed become escapes.

    ``reason``: the verdict in one line. ``round``: the round that failed. ``used``: restarts, as in "2 of 3".
    ``began``: when this node started that round's workers, in seconds since the epoch (None: it did not).
    ``logs``: the folder of this node's log files. ``done``: nodes whose workers had all ended with 0.
    """
    rule, thin = "=" * _WIDTH, "-" * _WIDTH
    lines = [rule, f"{script} FAILED", thin]
    causes = root_cause(records)
    missed = [record for record in causes if record.blame == Blame.KILLED_BY_US]
    causes = tuple(record for record in causes if record not in missed) or causes
    if causes[1:]:
        lines += [f"Other failures ({len(causes) - 1}):", *(_other(record) for record in causes[1 : 1 + _MAX_OTHERS])]
        more = len(causes) - 1 - _MAX_OTHERS
        lines += [f"  ... and {more} more", thin] if more > 0 else [thin]
    if causes:
        lines += ["Root Cause (first observed failure):", "[0]:", *_root(causes[0], round, began), thin]
    if causes and causes[0].blame == Blame.VICTIM and missed:
        shown = [line for record in missed[:_MAX_MISSED] for line in _missed(record)]
        lines += ["Missed by the others, so probably the cause:", *shown, thin]
    lines += [f"  ended     : all workers of {', '.join(done[:_MAX_OTHERS])} had ended with 0"] if done else []
    lines += [f"  logs      : {logs} (on this node)"] if logs is not None else []
    lines += [f"  restarts used: {used}"] if used else []
    return "".join(f"{_printable(line)}\n" for line in [*lines, f"  reason    : {reason}", rule])


def _root(record: ExitRecord, round: int, began: float | None) -> list[str]:
    """Return the lines on the root cause. ``time`` is by this node's clock: ``began`` plus the seconds that the worker ran."""
    time_line = [f"  time      : {_date(began + record.after)}"] if began is not None else []
    name = f" ({signal_name(-record.code)})" if record.code < 0 else ""
    how = _how(record)
    return [
        *time_line,
        f"  host      : {record.node}",
        f"  rank      : {record.rank} (local_rank: {record.local_rank})",
        f"  exitcode  : {record.code} (pid: {record.pid}){name}",
        *([f"  how       : {how}"] if how != f"exit code {record.code}" else []),
        f"  when      : {record.after:.1f} s after the start of round {round}",
        "  traceback : its last words (stderr, or what @record kept)",
        *(f"    {line}" for line in record.lines or ("(nothing)",)),
    ]


def _missed(record: ExitRecord) -> list[str]:
    """Return the lines on a worker that had not failed, with the innermost part of its stack."""
    return [f"  {_where(record)} {record.note}", *(f"    {line}" for line in record.lines[-_MAX_STACK:])]


def _date(seconds: float) -> str:
    with suppress(ValueError, OverflowError, OSError):  # another node wrote the record, so the number may be anything
        return datetime.fromtimestamp(int(seconds)).isoformat(sep="_")
    return "unknown"


def _other(record: ExitRecord) -> str:
    return f"  {_where(record)}: {_how(record)}; {record.after:.1f} s after the start"


def _where(record: ExitRecord) -> str:
    return f"rank {record.rank} ({record.node}, local_rank {record.local_rank}, pid {record.pid})"


def _how(record: ExitRecord) -> str:
    return describe_code(record.code) + _BLAME_WORDS.get(record.blame, "") + (f", {record.note}" if record.note else "")


def _printable(line: str) -> str:
    text = line.replace("\t", "    ")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# -- error files --------------------------------------------------------------------------------------------------------------


def read_error_file(path: str) -> tuple[str, ...] | None:
    """Return the traceback (or message) that torch's ``@record`` left at ``path``, at most 30 lines. Never raises.

    None when there is no such file, or when it has another format: the worker owns it and may write anything.
    """
    try:
        with linux.open_regular(path) as file:
            data = json.loads(file.read(_MAX_ERROR_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    text = _error_text(data)
    return limit_lines(text.splitlines()) if text else None


def write_error_file(path: str, reason: str, records: Iterable[ExitRecord]) -> None:
    """Write the root cause to ``path`` as torch's ``@record`` does, for the scheduler or launcher that started this one.

    ``errorCode`` is the exit code of the worker to blame, and missing when no worker failed. Overwrites the file. Raises OSError.
    """
    causes = root_cause(records)
    lines = causes[0].lines if causes else ()
    last = next((line.strip() for line in reversed(lines) if line.strip()), reason)  # the exception, when there is a traceback
    extra = {"py_callstack": "\n".join(lines or [reason]), "timestamp": str(int(time.time()))}
    message = {"message": last, "extraInfo": extra} | ({"errorCode": causes[0].code} if causes else {})
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def _error_text(data: Any) -> str | None:
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = callstack if isinstance(callstack, str) and callstack.strip() else message.get("message")
    return message if isinstance(message, str) else None
