"""For what happens in another process or thread, and tells nobody when; and how long work takes on a busy machine."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

__all__ = ["LONG_S", "comes", "quickest_s"]

LONG_S = 120.0
"""Far more than anything here takes, however busy the machine is."""


def comes(condition: Callable[[], object]) -> bool:
    """Whether it comes true within `LONG_S`."""
    give_up = time.monotonic() + LONG_S
    while not (found := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(found)


def quickest_s(work: Callable[[], object]) -> float:
    """Seconds of this thread's own time that ``work`` takes, the least of three tries."""
    return min(timeit.repeat(work, timer=time.thread_time, number=1, repeat=3))
