"""The one clock for durations: seconds since boot, including the time during which the machine was suspended.

``time.monotonic()`` stands still while a machine is suspended (clock_gettime(2)), so a resumed node would not notice that the
other nodes went on without it. A paused virtual machine whose own clocks stand still cannot notice it either way.
"""

import time


def now() -> float:
    """Seconds since boot (CLOCK_BOOTTIME). Comparable only within one machine, and only as a difference."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
