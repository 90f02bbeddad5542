"""The prefix ``[rankN]:`` that torch writes before each line of an uncaught exception, for processes whose default group changes.

``torch.distributed.init_process_group`` wraps ``sys.excepthook`` each time, with the rank of that moment: after a hundred worlds each line
would begin with a hundred prefixes, most of them of another rank, and after a thousand with none, because the hook itself would fail.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

_TORCHS = re.compile(r"^(\[rank\d+\]: ?)+")  # of groups that the script had made before

_installed = False


@contextmanager
def one_prefix() -> Iterator[None]:
    """Keep a single rank prefix on uncaught exceptions while the default group is made."""
    global _installed
    before = sys.excepthook
    try:
        yield
    except BaseException:
        sys.excepthook = before
        raise
    sys.excepthook = before if _installed else partial(_write_prefixed, before)
    _installed = True


def _write_prefixed(hook: Callable[..., object], *error: Any) -> None:
    """Write an exception with ``hook``, each line prefixed with the present ``RANK``."""
    with redirect_stderr(io.StringIO()) as written:
        hook(*error)
    prefix = f"[rank{os.environ.get('RANK', '0')}]: "
    lines = (_TORCHS.sub("", line) for line in written.getvalue().split("\n"))
    sys.stderr.write("\n".join(f"{prefix}{line}" if line else "" for line in lines))
    sys.stderr.flush()
