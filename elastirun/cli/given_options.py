"""The options as they were given, on the command line or in the environment, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from elastirun.cli import parse
from elastirun.cli.options import BY_DEST, OPTIONS
from elastirun.errors import UsageError

T = TypeVar("T")

DEFAULT, ENVIRONMENT, COMMAND_LINE = range(3)  # how close to the user a value was given
DEFAULT_SOURCE = "default"  # ``Row.source`` of an option that nobody gave


@dataclass(frozen=True)
class Facts:
    """What only the machine can tell."""

    cpus: Callable[[], int]  # CPUs this process may use
    devices: Callable[[str], int | None]  # how many of "gpu", "xpu", "auto" or another kind; None: no such kind; ValueError: cannot tell
    new_id: Callable[[], str]  # a name that nobody else has


@dataclass(frozen=True)
class Row:
    """One line of ``--dry-run``."""

    option: str
    value: str
    source: str


class Reading:
    """The options as they were given, and what became of them: warnings, and values that were derived."""

    def __init__(self, given: Mapping[str, str], environ: Mapping[str, str]) -> None:
        """``given``: dest -> text from the command line, "1" for a flag."""
        self.given = given
        self.environ = environ
        self.warnings: list[str] = []
        self._derived: dict[str, tuple[str, str]] = {}

    def level(self, dest: str) -> int:
        if dest in self.given:
            return COMMAND_LINE
        env = BY_DEST[dest].env
        return ENVIRONMENT if env is not None and env in self.environ else DEFAULT

    def label(self, dest: str) -> str:
        """The name under which the value was given: ``--nnodes`` or ``PET_NNODES``."""
        option = BY_DEST[dest]
        return option.env if option.env and self.level(dest) == ENVIRONMENT else option.name

    def text(self, dest: str) -> str | None:
        option = BY_DEST[dest]
        if dest in self.given:
            return self.given[dest]
        return self.environ.get(option.env, option.default) if option.env else option.default

    def read(self, dest: str, parser: Callable[[str], T]) -> T:
        try:
            return parser(self.text(dest) or "")
        except ValueError as error:
            raise UsageError(f"{self.label(dest)}: {error}") from None

    def optional(self, dest: str, parser: Callable[[str], T]) -> T | None:
        return None if self.text(dest) is None else self.read(dest, parser)

    def flag(self, dest: str) -> bool:
        return bool(self.optional(dest, parse.boolean))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def derive(self, dest: str, value: object, why: str) -> None:
        """``--dry-run`` shows this in place of what was given."""
        self._derived[dest] = (str(value), f"derived: {why}")

    def rows(self) -> list[Row]:
        found = []
        for option in OPTIONS:
            level = self.level(option.dest)
            source = (f"environment {option.env}", "command line")[level - 1] if level else DEFAULT_SOURCE
            text = self.text(option.dest)
            shown = ("yes" if self.flag(option.dest) else "no") if option.flag else text or "-"
            value, source = self._derived.get(option.dest, (shown, source))
            found.append(Row(option.name, value if value.isprintable() else parse.quote(value), source))
        return found
