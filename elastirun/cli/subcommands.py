"""Tells the commands ``elastirun status`` and ``elastirun report`` from scripts with these names, which torchrun would start."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from elastirun.cli.options import BY_DEST

MODULES = {name: f"elastirun.cli.{name}_command" for name in ("status", "report")}


def asked_for(argv: Sequence[str], environ: Mapping[str, str]) -> Any:
    """Return the module of the command that the command line asks for; None: for none, so it starts a script.

    A launch does without the imports of the commands, which are slow.
    """
    name = argv[0] if argv else ""
    if name not in MODULES or os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py")):
        return None
    if any(environ.get(str(BY_DEST[dest].env), "0").strip() not in ("", "0") for dest in ("module", "no_python")):
        return None
    return importlib.import_module(MODULES[name])
