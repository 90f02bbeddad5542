"""The mark ``[rankN]:`` that torch puts before each line of an uncaught exception, for processes whose default group changes.

``torch.distributed.init_process_group`` wraps ``sys.excepthook`` each time, with the rank of that moment: after a hundred worlds each line
would begin with a hundred marks, most of them of another rank, and after a thousand no traceback could be written.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

_marks = False  # whether this process marks its exceptions


@contextmanager
def one_mark() -> Iterator[None]:
    """Let the default group be made, and have one mark of the rank that this process has when an exception ends it."""
    global _marks
    before = sys.excepthook
    yield
    sys.excepthook = before if _marks else partial(_marked, before)
    _marks = True


def _marked(hook: Callable[..., object], *error: Any) -> None:
    """Let ``hook`` write an exception, each line after the rank that the launcher has given this process last."""
    with redirect_stderr(io.StringIO()) as written:
        hook(*error)
    mark = f"[rank{os.environ.get('RANK', '0')}]: "
    sys.stderr.write("".join(f"{mark}{line}" if line.strip() else line for line in written.getvalue().splitlines(keepends=True)))
    sys.stderr.flush()
