"""Marks in the variable ELASTIRUN_AGENT: the identities of the agents that a process belongs to, innermost last, separated by commas.

A mark is PID-STARTTIME-NAMESPACE-RANDOM: the agent's pid and start time, the inode of its pid namespace, and 16 hexadecimal
digits. Anyone may put anything into an environment, so text of any other form is ignored.
"""

import os

from elastirun.agent.processes import proc

VARIABLE = "ELASTIRUN_AGENT"
MAX_DEPTH = 32  # marks passed on to workers; a job that submits its own successor would add one each time, without end
_RANDOM = 16  # hexadecimal digits


class Mark:
    """The identity of one agent. ``text`` is its form in the environment."""

    def __init__(self, pid: int, started: int, namespace: int, random: str) -> None:
        self.pid, self.started, self.namespace = pid, started, namespace
        self.text = f"{pid}-{started}-{namespace}-{random}"

    def __str__(self) -> str:
        return self.text

    def is_dead(self) -> bool:
        """Return whether this agent ran in our pid namespace and has ended. False when we cannot see that, as in another namespace."""
        if not self.namespace or self.namespace != proc.pid_namespace():
            return False
        try:
            found = proc.look(self.pid, certain=True)
        except OSError:
            return False
        return found is None or found.started != self.started or not found.alive


def own() -> Mark:
    """Return a new mark for this process."""
    found = proc.look(os.getpid())
    assert found is not None
    return Mark(found.pid, found.started, proc.pid_namespace(), os.urandom(_RANDOM // 2).hex())


def for_workers(inherited: str, own: Mark) -> str:
    """Return ELASTIRUN_AGENT for the workers of the agent ``own``, in whose own environment it is ``inherited``."""
    return ",".join(map(str, [*of(inherited)[-MAX_DEPTH:], own]))


def parse(text: str) -> Mark | None:
    """Return ``text`` as a mark; None when it is not well-formed."""
    *numbers, random = text.split("-")
    if len(numbers) != 3 or len(random) != _RANDOM or not set(random) <= set("0123456789abcdef"):
        return None
    if not all(number.isascii() and number.isdecimal() and len(number) <= 20 for number in numbers):
        return None
    pid, started, namespace = map(int, numbers)
    mark = Mark(pid, started, namespace, random)
    return mark if pid and mark.text == text else None


def of(value: str) -> list[Mark]:
    """Return the well-formed marks in a value of ELASTIRUN_AGENT."""
    return [mark for text in value.split(",") if (mark := parse(text))]


def in_environment(environment: bytes) -> list[Mark]:
    """Return the well-formed marks in the environment of a process."""
    return of(proc.value_of(VARIABLE, environment))
