"""Tells the commands ``elastirun status`` and ``elastirun report`` from scripts with these names, which torchrun would start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastirun.cli.options import BY_DEST


def is_asked(word: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the command line asks for the command ``word``, and not for a script with this name."""
    if list(argv[:1]) != [word] or os.path.isfile(word) or os.path.isfile(os.path.join(word, "__main__.py")):
        return False
    return not any(environ.get(str(BY_DEST[dest].env), "0").strip() not in ("", "0") for dest in ("module", "no_python"))
