"""Checks of what a script gives to the training core. Each raises WrongUse with one line: the mistake, and what to write instead."""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import nn

from elastirun.train.errors import WrongType, WrongUse

SHOWN = 60  # characters of a value in a message


def whole(name: str, value: Any, least: int | None = 1) -> int:
    """Return ``value``, the argument called ``name``, if it is a whole number, and not below ``least`` (None: any)."""
    number = as_whole(value)
    if number is None or (least is not None and number < least):
        raise WrongUse(f"{name} must be a whole number{'' if least is None else f', {least} or more'}, not {shown(value)}")
    return number


def as_whole(value: Any) -> int | None:
    """Return ``value`` if it is a whole number, which True and False are not, else None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def shown(value: Any) -> str:
    """Return how a message shows ``value``: plain values as they are written, of others the class."""
    text = repr(value)
    return text if not isinstance(value, type) and len(text) <= SHOWN and text.isprintable() and " at 0x" not in text else named(value)


def named(value: Any) -> str:
    """Return the name of the class of ``value``, and whether it is torch's: two of torch's classes have the names of ours."""
    if value is None:
        return "None"
    kind = value if isinstance(value, type) else type(value)
    article = "the" if kind is value else "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    whose = "torch's" if kind.__module__.partition(".")[0] == "torch" else article
    return f"{whose} {'class ' * (kind is value)}{kind.__name__}"


def verify_type(value: Any, kinds: Any, name: str, wanted: str) -> None:
    """Raise WrongType unless ``value``, the argument called ``name``, is one of ``kinds``, which are ``wanted``."""
    if not isinstance(value, kinds):
        raise WrongType(f"{name} must be {wanted}, not {shown(value)}")


def verify_module(module: Any, user: str) -> None:
    """Raise WrongType unless ``user`` can take ``module``: a module that reduces nothing yet."""
    verify_type(module, nn.Module, f"the module of {user}", "a torch.nn.Module")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise WrongUse(f"{user} takes the module itself, and this is {named(module)} already: give its .module")


def verify_callable(function: Any, arguments: int, name: str, instead: str) -> None:
    """Raise WrongType unless ``function`` can be called with so many ``arguments``. ``instead``: an example of what to give."""
    if not callable(function):
        raise WrongType(f"{name} must be callable, not {shown(function)}: give {instead}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise WrongType(f"{name} must take {arguments} arguments ({error}): give {instead}") from None
