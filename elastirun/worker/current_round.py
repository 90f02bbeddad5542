"""``is_current``: ask the agent of this node whether the round of this worker is still the current one.

See docs/worker.md.
"""

from __future__ import annotations

import os
import time

from elastirun.errors import RoundUnknown
from elastirun.worker.agent_socket import VARIABLE, ask

FENCE = "ELASTIRUN_FENCE"  # set by the agent
PAUSE = 0.2  # seconds between two questions while the agent cannot tell


def is_current(timeout: float = 10.0) -> bool:
    """Return whether the round that this process was started for is still the current one. Call it just before you publish a file.

    True: the rendezvous store still named this round in a read that *began after* this call. The next round forms only when every
    node of this one has ended its workers, or was silent for ``--expire`` (5 s); so write everything first, ask, and publish at once,
    by a rename. True also while the workers are being stopped, so that a checkpoint can be saved in the grace period.
    False: another round has taken its place, or the store has lost the job. Publish nothing; the agent is about to end this process.

    Without an agent of elastirun (under torchrun, or alone) there is nobody to ask: True.

    It takes one exchange with the store: a few milliseconds. ``timeout`` (seconds): for how long to ask again while the agent cannot
    tell, for example because the store does not answer. Raises ``RoundUnknown`` after that.
    """
    fence = os.environ.get(FENCE)
    if not fence:
        return True
    path = os.environ.get(VARIABLE)
    if not path:
        raise RoundUnknown("the agent has no socket to ask at; its own output says why")
    deadline = time.monotonic() + timeout
    why = ""  # the agent's own words count more than that it was slow to repeat them
    while True:
        try:
            answer, _ = ask(path, f"current {fence}", max(0.001, deadline - time.monotonic()))
        except OSError as error:
            answer = ""
            why = why or f"the agent does not answer at {path}: {error.strerror or error}"
        if answer in ("yes", "no"):
            return answer == "yes"
        why = answer.removeprefix("unknown ") or why or "the agent hung up"
        left = deadline - time.monotonic()
        if left <= 0:
            raise RoundUnknown(f"within {timeout:g} s nobody could tell whether this round is current: {why}")
        time.sleep(min(PAUSE, left))
