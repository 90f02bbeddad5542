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
from elastirun.cli.options import GROUPS, OPTIONS, RUN, Option
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

How a job stands, on a node of the job or from elsewhere; elastirun status --help:
  elastirun status --rdzv-endpoint=node0

What happened in a job, as a page for a browser, from the events that --log-dir keeps:
  elastirun report DIR
"""
_NOTES = """\
Options come before SCRIPT. What follows SCRIPT is passed to it; ${local_rank} there becomes the
worker's local rank. Names may be written with _ for - and abbreviated where that is unambiguous.
In [brackets]: the environment variable that sets the same option, and its default. The command line
takes precedence over the environment, and the environment over what is detected (--detect).
--dry-run shows where each value came from.
"""


def parse(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split argv into the options, by dest as text and a flag as "1", and the script with its arguments, which stay untouched.

    The dest "help" stands for --help. Raises ``UsageError`` for an option that does not exist, that is ambiguous, that lacks its value, or
    that is a flag and has one.
    """
    params: list[click.Parameter] = [click.Option(["help", "-h", *_beginnings("--help")], is_flag=True)]
    for option in OPTIONS:
        names = [option.dest, *_beginnings(option.name, option.new), *([f"-{option.short}"] if option.short else [])]
        params.append(click.Option(names, is_flag=True) if option.flag else click.Option(names, callback=_check_value))
    params.append(click.Argument(["script"], nargs=-1, type=click.UNPROCESSED))
    command = click.Command("elastirun", params=params, add_help_option=False)
    settings: dict[str, Any] = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
    try:
        found = command.make_context("elastirun", list(argv), obj=argv, **settings).params
    except click.NoSuchOption as error:
        raise UsageError(_unknown(error.option_name, argv)) from None
    except click.BadOptionUsage as error:
        (option,) = (option for option in OPTIONS if error.option_name in (f"-{option.short}", *_beginnings(option.name, option.new)))
        what = "it is a flag and takes no value" if option.flag else f"the value is missing; write {option.name}={option.metavar}"
        raise UsageError(f"{option.name}: {what}") from None
    script = list(found.pop("script"))
    return {dest: "1" if value is True else value for dest, value in found.items() if value not in (None, False)}, script


def help_text() -> str:
    """Return the text of --help: examples first, then the options by purpose."""
    formatter = click.HelpFormatter(max_width=_HELP_WIDTH)
    formatter.write_usage("elastirun", "[OPTIONS] SCRIPT [ARGS]...")
    formatter.write(f"\n{_EXAMPLES}")
    for title, options in GROUPS.items():
        with formatter.section(title):
            rows = [_help_of(option) for option in options]
            rows += [("-h, --help".ljust(_HELP_COLUMN), "Show this text.")] if title == RUN else []
            formatter.write_dl(rows, col_max=_HELP_COLUMN)
    formatter.write(f"\n{_NOTES}\n{textwrap.fill(exit_codes.help_text(), _HELP_WIDTH)}\n")
    return formatter.getvalue().rstrip("\n")


def _help_of(option: Option) -> tuple[str, str]:
    names = f"-{option.short}, {option.name}" if option.short else option.name
    default = f"={option.default}" if option.default else ""
    text = f"{option.help} [{option.env}{default}]" if option.env else option.help
    return f"{names} {option.metavar}".ljust(_HELP_COLUMN), text


def _beginnings(name: str, new: bool = False) -> list[str]:
    """Return ``name`` and its abbreviations: the beginnings that no other option shares.

    A new option does not make an abbreviation ambiguous that torchrun accepts.
    """
    others = [option.name for option in OPTIONS if option.name != name and (new or not option.new)] + ["--help"] * new
    abbreviations = [name[:end] for end in range(len("--x"), len(name))]
    return [name, *(text for text in abbreviations if not any(other.startswith(text) for other in others))]


def _check_value(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an option as the value of the option before it, as argparse does; click takes any next word as the value."""
    if value is None:
        return None
    if value in ctx.obj and re.match("-[^0-9.]", value) and " " not in value:
        raise click.BadOptionUsage(param.opts[0], "the value is missing")
    return value.removeprefix("=") if any(len(name) == len("-x") for name in param.opts) else value  # -r=3: click's value is "=3"


def _unknown(typed: str, argv: Sequence[str]) -> str:
    """Return the message for a name that is no option: it is ambiguous, or misspelt."""
    could_be = [option.name for option in OPTIONS if option.name.startswith(typed)]
    if could_be:
        return f"{typed} could be any of {', '.join(could_be)}; write it in full"
    if len(typed) == len("-x"):  # click names -n when -nnodes was typed
        typed = next((word for word in argv if word.startswith(typed)), typed)
    name = "--" + typed.lstrip("-").partition("=")[0].replace("_", "-")
    close = [option.name for option in OPTIONS if option.name.startswith(name[:-1])]  # --nprocs: alike but for the last letter
    hint = f" (did you mean {close[0]}?)" if len(close) == 1 else nearest(name, [option.name for option in OPTIONS])
    return f"no option {quote(typed)}{hint}; options of the script go after the script"
