"""The one clock for durations: seconds since boot, including the time during which the machine was suspended.

``time.monotonic()`` stops while a machine is suspended (clock_gettime(2)). With it, a resumed node would not notice that the other
nodes have gone on. While a virtual machine is paused, all of its clocks may stop; no clock inside shows that time.
"""

import time


def now() -> float:
    """Return the seconds since boot (CLOCK_BOOTTIME). Only differences on one machine have a meaning."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


STARTED = now()  # when this process imported the module; that of an agent does so at its start, and its account begins then
