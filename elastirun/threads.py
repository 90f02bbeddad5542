"""Start threads where a user's or a container's limit of processes may be reached: then the work is done here, later, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

NONE_LEFT = "no thread can be started (see ulimit -u, or pids.max of the control group)"


def start_thread(name: str, function: Callable[..., object], *args: object) -> threading.Thread | None:
    """Start a daemon thread that calls ``function(*args)``, and return it; None: the limit of processes is reached."""
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
