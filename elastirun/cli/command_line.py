"""Reads the command line with click: argv -> the text of each option given, and the script with its arguments.

Names may be written with ``_`` for ``-`` and cut short, as with argparse, which torchrun uses. click itself reads values, flags and short
options. This file adds abbreviations, and messages that say what to do.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from elastirun.agent.failures import exit_codes
from elastirun.cli.options import BY_DEST, FIRST, GROUPS, KEYS, OPTIONS, RUN, Option
from elastirun.cli.parse import nearest, quote
from elastirun.errors import UsageError

_HELP_COLUMN = 32  # characters for an option and its value
_HELP_WIDTH = 100  # characters in a line of the help text, at most

_EXAMPLES = """\
Starts SCRIPT as a set of workers on one or more nodes, with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT in their environment. A drop-in for torchrun.

One node, one worker per GPU:
  elastirun --nproc-per-node=auto train.py --lr 0.1

One to three nodes, elastic; the same command on each node, whenever it comes up:
  elastirun --nnodes=1:3 --nproc-per-node=8 --rdzv-id=job7 --rdzv-endpoint=node0 train.py

Two nodes with fixed ranks; on the other node the same with --node-rank=1:
  elastirun --nnodes=2 --node-rank=0 --master-addr=node0 --nproc-per-node=8 train.py

Whether nodes and the network between them are fit for a job; the same options on each node:
  elastirun check --nnodes=2 --rdzv-endpoint=node0 train.py

How a job stands, on a node of the job or from elsewhere:
  elastirun status --rdzv-endpoint=node0

How many nodes it is to have from now on, within its --nnodes=MIN:MAX:
  elastirun scale 4

What happened in a job, as a page for a browser, from the events that --log-dir keeps:
  elastirun report DIR

Whether a running job of yours goes on after kills and freezes, on one of its nodes:
  elastirun chaos --for=10m

Checkpoints of elastirun.train; a launcher that calls torchrun from inside; more about each command:
  elastirun checkpoint ls DIR
  elastirun takeover accelerate launch train.py
  elastirun help status
"""
_SHORT_NOTES = """\
Options come before SCRIPT. In [brackets]: the default. Nearly every option is also a variable, such
as PET_NNODES. --dry-run shows where each value came from.
"""
_NOTES = """\
Options come before SCRIPT. What follows SCRIPT is passed to it; ${local_rank} there becomes the
worker's local rank. Names may be written with _ for - and abbreviated where that is unambiguous.
In [brackets]: the environment variable that sets the same option, and its default. The command line
takes precedence over the environment, and the environment over what is detected (--detect).
--dry-run shows where each value came from.
"""


def parse(argv: Sequence[str], more: Sequence[Option] = ()) -> tuple[dict[str, str], list[str]]:
    """Split argv into the options, by dest as text and a flag as "1", and the script with its arguments, which stay untouched.

    The dest "help" stands for --help. ``more``: options besides those of a launch.
    Raises ``UsageError`` for an option that does not exist, that is ambiguous, that lacks its value, or
    that is a flag and has one.
    """
    params: list[click.Parameter] = [click.Option(["help", "-h", *_beginnings("--help")], is_flag=True)]
    for option in (*OPTIONS, *more):
        names = [option.dest, *_beginnings(option.name, option.new), *([f"-{option.short}"] if option.short else [])]
        params.append(click.Option(names, is_flag=True) if option.flag else click.Option(names, callback=_last_value, multiple=True))
    params.append(click.Argument(["script"], nargs=-1, type=click.UNPROCESSED))
    command = click.Command("elastirun", params=params, add_help_option=False)
    settings: dict[str, Any] = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
    try:
        found = command.make_context("elastirun", list(argv), obj=argv, **settings).params
    except click.NoSuchOption as error:
        raise UsageError(_unknown(error.option_name, argv)) from None
    except click.BadOptionUsage as error:
        (option,) = (
            option for option in (*OPTIONS, *more) if error.option_name in (f"-{option.short}", *_beginnings(option.name, option.new))
        )
        what = "it is a flag and takes no value" if option.flag else f"the value is missing; write {option.name}={option.metavar}"
        raise UsageError(f"{option.name}: {what}") from None
    script = list(found.pop("script"))
    return {dest: "1" if value is True else value for dest, value in found.items() if value not in (None, False)}, script


def help_text() -> str:
    """Return the text of --help: examples, and the options that a person needs first."""
    last = f"elastirun --help-all shows all {len(OPTIONS) + 1} options."
    return _text_of([option for option in OPTIONS if option.dest in FIRST], f"{_SHORT_NOTES}\n{last}", with_variables=False)


def full_help_text() -> str:
    """Return the text of --help-all: examples, every option by purpose, and the exit codes."""
    return _text_of(list(BY_DEST.values()), f"{_NOTES}\n{textwrap.fill(exit_codes.help_text(), _HELP_WIDTH)}", with_variables=True)


def _text_of(shown: Sequence[Option], notes: str, with_variables: bool) -> str:
    formatter = click.HelpFormatter(max_width=_HELP_WIDTH)
    formatter.write_usage("elastirun", "[OPTIONS] SCRIPT [ARGS]...")
    formatter.write(f"\n{_EXAMPLES}")
    for title, options in GROUPS.items():
        rows = [_help_of(option, with_variables) for option in options if option in shown]
        rows += [("-h, --help".ljust(_HELP_COLUMN), "Show the options that one needs first.")] if title == RUN else []
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_HELP_COLUMN)
    formatter.write(f"\n{notes}\n")
    return formatter.getvalue().rstrip("\n")


def _help_of(option: Option, with_variable: bool) -> tuple[str, str]:
    names = f"-{option.short}, {option.name}" if option.short else option.name
    names = f"  {names.removeprefix('--set ')}={option.metavar}" if option.key else f"{names} {option.metavar}"
    variable = option.env if with_variable and not option.key else None
    known = "=".join(filter(None, (variable, option.default)))
    return names.ljust(_HELP_COLUMN), f"{option.help} [{known}]" if known else option.help


def _beginnings(name: str, new: bool = False) -> list[str]:
    """Return ``name`` and its abbreviations: the beginnings that no other option shares.

    A new option does not make an abbreviation ambiguous that torchrun accepts.
    """
    others = [option.name for option in OPTIONS if option.name != name and (new or not option.new)] + ["--help"] * new
    abbreviations = [name[:end] for end in range(len("--x"), len(name))]
    return [name, *(text for text in abbreviations if not any(other.startswith(text) for other in others))]


def _last_value(ctx: click.Context, param: click.Parameter, values: Sequence[str] | None) -> str | None:
    """Return the value that was given last; of --set all values, joined by commas, without empty ones.

    Refuses an option as the value of the option before it, as argparse does; click takes any next word as the value.
    """
    for value in values or ():
        if value in ctx.obj and re.match("-[^0-9.]", value) and " " not in value:
            raise click.BadOptionUsage(param.opts[0], "the value is missing")
    if not values:
        return None
    text = ",".join(filter(str.strip, values)) if param.name == "set" else values[-1]
    return text.removeprefix("=") if any(len(name) == len("-x") for name in param.opts) else text  # -r=3: click's value is "=3"


def _unknown(typed: str, argv: Sequence[str]) -> str:
    """Return the message for a name that is no option: it is ambiguous, or misspelt."""
    could_be = [option.name for option in OPTIONS if option.name.startswith(typed)]
    if could_be:
        return f"{typed} could be any of {', '.join(could_be)}; write it in full"
    if len(typed) == len("-x"):  # click names -n when -nnodes was typed
        typed = next((word for word in argv if word.startswith(typed)), typed)
    name = "--" + typed.lstrip("-").partition("=")[0].replace("_", "-")
    for key, option in KEYS.items():
        if len(name) > len("--x") and f"--{key}".startswith(name):
            return f"--{key} is a key of --set; write --set {key}={option.metavar}"
    close = [option.name for option in OPTIONS if option.name.startswith(name[:-1])]  # --nprocs: alike but for the last letter
    hint = f" (did you mean {close[0]}?)" if len(close) == 1 else nearest(name, [option.name for option in OPTIONS])
    return f"no option {quote(typed)}{hint}; options of the script go after the script"
