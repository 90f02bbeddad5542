"""Options as they were given, on the command line or in the environment, with where each value came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from elastirun.cli import parse
from elastirun.cli.detect.detected import Detected, Host
from elastirun.cli.options import BY_DEST, KEYS, OPTIONS
from elastirun.config import Command, Preload

T = TypeVar("T")

EMPTY_COUNTS = ("rdzv_id", "role", "signals_to_handle", "token_file")  # an empty variable is a value, or a mistake that must be seen
DEFAULT_SOURCE = "default"  # ``DryRunRow.source`` of an option that was not given


class Origin(IntEnum):
    """The source of the value of an option. The higher one takes precedence."""

    DEFAULT = 0
    DETECTED = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True)
class MachineFacts:
    """Questions to this machine, handed to ``resolve`` so that it stays pure."""

    cpus: Callable[[], int]  # CPUs this process may use
    devices: Callable[[str], int | None]  # number of "gpu", "xpu", "auto" or another kind; None: no such kind; ValueError: unknown
    new_id: Callable[[], str]  # a name that is unique in the world
    host: Callable[[], Host]  # this machine's names; may ask a name server
    imports: Callable[[Command], Preload]  # what is worth preloading, by the text of the script


@dataclass(frozen=True)
class DryRunRow:
    """One line of ``--dry-run``."""

    option: str
    value: str
    source: str


class GivenOptions:
    """The options as they were given. ``resolve`` adds warnings and the values that it derived.

    ``given`` maps the dest of each option on the command line to its text, "1" for a flag. A key of ``--set`` counts as an option
    of its own. Raises ``UsageError`` for a key that does not exist.
    """

    def __init__(self, given: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.warnings: list[str] = []
        self.detected = Detected()  # set once, by ``resolve``
        self._given = dict(given)
        self._variables = {option.dest: environ[option.env] for option in OPTIONS if option.env and option.env in environ}
        for label, texts in (("--set", self._given), ("PET_SET", self._variables)):
            keys = parse.value_of(label, texts.pop("set", ""), lambda text: parse.settings(text, KEYS))
            texts.update({KEYS[key].dest: text for key, text in keys.items()})
        self._derived: dict[str, tuple[str, str]] = {}  # by dest: the value that is used, and its source

    def origin(self, dest: str) -> Origin:
        """Return where the option's value came from. An empty variable counts as not given, apart from flags and ``EMPTY_COUNTS``.

        Where a value was detected, any empty text counts as not given.
        """
        option, detected = BY_DEST[dest], dest in self.detected.values
        if dest in self._given and not (detected and not self._given[dest].strip()):
            return Origin.COMMAND_LINE
        empty_counts = not detected and (option.flag or dest in EMPTY_COUNTS)
        if dest in self._variables and (empty_counts or self._variables[dest].strip()):
            return Origin.ENVIRONMENT
        return Origin.DETECTED if detected else Origin.DEFAULT

    def is_given(self, dest: str) -> bool:
        """Tell whether the option is on the command line or in the environment."""
        return self.origin(dest) > Origin.DETECTED

    def label(self, dest: str) -> str:
        """Return the name under which the value was given: ``--nnodes``, ``PET_NNODES``, ``--set restart-pause``, ..."""
        option = BY_DEST[dest]
        return option.env if option.env and self.origin(dest) == Origin.ENVIRONMENT else option.name

    def text(self, dest: str) -> str | None:
        """Return the option's text as it was given or detected, or its default."""
        option, origin = BY_DEST[dest], self.origin(dest)
        if origin == Origin.COMMAND_LINE:
            return self._given[dest]
        if origin == Origin.ENVIRONMENT:
            return self._variables[dest]
        return self.detected.values[dest][0] if origin == Origin.DETECTED else option.default

    def has_text(self, dest: str) -> bool:
        """Tell whether the option's text is more than white space."""
        return bool((self.text(dest) or "").strip())

    def read(self, dest: str, parser: Callable[[str], T]) -> T:
        """Return the parsed value. Raises ``UsageError`` with the option's label when ``parser`` raises ValueError."""
        return parse.value_of(self.label(dest), self.text(dest) or "", parser)

    def optional(self, dest: str, parser: Callable[[str], T]) -> T | None:
        """Return the parsed value; None when the option was not given and has no default."""
        return None if self.text(dest) is None else self.read(dest, parser)

    def flag(self, dest: str) -> bool:
        """Return the value of a flag."""
        return bool(self.optional(dest, parse.boolean))

    def warn(self, text: str) -> None:
        """Add a warning, which is printed before the agent starts."""
        self.warnings.append(text)

    def derive(self, dest: str, value: object, why: str) -> None:
        """Record that ``value`` is used in place of what was given, for ``--dry-run``."""
        self._derived[dest] = (str(value), f"derived: {why}")

    def rows(self) -> list[DryRunRow]:
        """Return one line of ``--dry-run`` for each option and each key of ``--set``."""
        found = []
        for option in BY_DEST.values():
            source = {
                Origin.DEFAULT: DEFAULT_SOURCE,
                Origin.DETECTED: f"detected: {self.detected.values.get(option.dest, ('', ''))[1]}",
                Origin.ENVIRONMENT: f"environment {option.env}",
                Origin.COMMAND_LINE: "command line",
            }[self.origin(option.dest)]
            text = self.text(option.dest)
            shown = ("yes" if self.flag(option.dest) else "no") if option.flag else text or "-"
            value, source = self._derived.get(option.dest, (shown, source))
            found.append(DryRunRow(option.name, value if value.isprintable() else parse.quote(value), source))
        return found
