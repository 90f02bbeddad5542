"""ELASTIRUN_AGENT: the identities of the agents that a process belongs to, innermost last, separated by commas.

An identity is PID-STARTTIME-NAMESPACE-RANDOM: the agent's pid and start time, the inode of its pid namespace, and 16 hexadecimal
digits. Anyone may put anything into an environment, so nothing else is ever taken for one.
"""

import os

from elastirun.agent.processes import proc

VARIABLE = "ELASTIRUN_AGENT"
DEEPEST = 32  # marks passed on; jobs that submit their successors would add one each time
_RANDOM = 16  # hexadecimal digits


class Mark:
    """The identity of one agent. Its text is what stands in the environment."""

    def __init__(self, pid: int, started: int, namespace: int, random: str) -> None:
        self.pid, self.started, self.namespace = pid, started, namespace
        self.text = f"{pid}-{started}-{namespace}-{random}"

    def __str__(self) -> str:
        return self.text

    def is_dead(self) -> bool:
        """True only if this agent ran in our pid namespace and does not any more. Of another namespace nothing is known."""
        if not self.namespace or self.namespace != proc.pid_namespace():
            return False
        found = proc.look(self.pid)
        return found is None or found.started != self.started or not found.alive


def own() -> Mark:
    """A new identity for this process."""
    found = proc.look(os.getpid())
    assert found is not None
    return Mark(found.pid, found.started, proc.pid_namespace(), os.urandom(_RANDOM // 2).hex())


def parse(text: str) -> Mark | None:
    """The mark that ``text`` is; None for anything but a well-formed one."""
    *numbers, random = text.split("-")
    if len(numbers) != 3 or len(random) != _RANDOM or not set(random) <= set("0123456789abcdef"):
        return None
    if not all(number.isascii() and number.isdecimal() and len(number) <= 20 for number in numbers):
        return None
    pid, started, namespace = map(int, numbers)
    mark = Mark(pid, started, namespace, random)
    return mark if pid and mark.text == text else None


def of(value: str) -> list[Mark]:
    """The well-formed marks in a value of ELASTIRUN_AGENT."""
    return [mark for text in value.split(",") if (mark := parse(text))]


def in_environment(environment: bytes) -> list[Mark]:
    """The well-formed marks in the environment of a process."""
    return of(proc.value_of(VARIABLE, environment))
