"""Reads from /proc why a process makes no progress: its state, whether a debugger traces it, where it waits."""

from __future__ import annotations

from dataclasses import dataclass

from elastirun.agent.processes import proc


@dataclass(frozen=True)
class State:
    """The state of a process's main thread."""

    stopped: bool  # by a signal, such as SIGSTOP
    traced: bool  # by a debugger
    waits_in: str  # the kernel's function; empty: unknown, or in none


def state(pid: int) -> State:
    """Return the state of the process ``pid``. One that has ended, or cannot be read, is neither stopped nor traced."""
    status = proc.content(f"/proc/{pid}/status")
    waits_in = proc.content(f"/proc/{pid}/wchan").strip()
    return State(_value(status, "State").startswith("T"), _value(status, "TracerPid") not in ("", "0"), "" if waits_in == "0" else waits_in)


def _value(status: str, name: str) -> str:
    return status.partition(f"\n{name}:")[2].partition("\n")[0].strip()
