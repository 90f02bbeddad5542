"""Random searches: programs that try something again and again. Tests make a few of the same tries."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Try:
    """What one try has done, and what was wrong afterwards."""

    text: str  # one line for people
    wrong: list[str]  # empty: all is as it should be


def unless(*conditions: tuple[bool, str]) -> list[str]:
    """Return the texts of the conditions that do not hold."""
    return [text for holds, text in conditions if not holds]


def show(number: int, one: Try) -> None:
    """Print a try, or end the program where something was wrong."""
    print(number, one.text, flush=True)
    if one.wrong:
        raise SystemExit("\n".join(one.wrong))


def parser(description: str | None, tries: int, seed: int = 1) -> argparse.ArgumentParser:
    """Return a parser of ``--tries`` and ``--seed``, with these defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tries", type=int, default=tries, metavar="N")
    made.add_argument("--seed", type=int, default=seed)
    return made
