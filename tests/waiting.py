"""For what happens in another process or thread, and tells nobody when."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LONG_S", "comes"]

LONG_S = 120.0
"""Far more than anything here takes, however busy the machine is."""


def comes(condition: Callable[[], object]) -> bool:
    """Whether it comes true within `LONG_S`."""
    give_up = time.monotonic() + LONG_S
    while not (found := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(found)
