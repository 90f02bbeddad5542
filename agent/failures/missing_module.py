"""The note on a worker that lacks a module: which Python ran the worker, and which environment is active. Pure.

The usual cause is another environment: elastirun of one is started while another is active.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastirun.agent.failures.classify import last_words

ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")  # what sets each names the active environment; the first that is set counts
_NO_PROGRAM = "cannot be directly executed"  # ends Python's message about a package that is there and has no __main__


def explain_missing_module(lines: Sequence[str], python: str, environ: Mapping[str, str]) -> str:
    """Return the note (``ExitRecord.note``) on a worker of ``python`` with these last words; empty if no module is missing.

    ``python``: the path of the interpreter. ``environ``: of the agent.
    """
    words = last_words(lines)
    if "No module named " not in words or _NO_PROGRAM in words:
        return ""
    # Not the real path of the interpreter: that of an environment is a link.
    own = os.path.realpath(os.path.dirname(os.path.dirname(python)))
    active = [(name, environ[name]) for name in ACTIVE if environ.get(name)]
    if not active or own in (os.path.realpath(folder) for _, folder in active):
        return f"a module is missing (for {python})"
    name, folder = active[0]
    return f"a module is missing (for {python}, not of the active environment {folder} ({name}): set PYTHON_EXEC={folder}/bin/python)"
