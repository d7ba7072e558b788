"""For what happens in another process or thread, and tells nobody when; and how long work takes on a busy machine."""

from __future__ import annotations

import socket
import time
import timeit
from collections.abc import Callable

__all__ = ["LONG_S", "comes", "free_port", "takes_linear_time"]

LONG_S = 120.0
"""Far more than anything here takes, however busy the machine is."""


def comes(condition: Callable[[], object]) -> bool:
    """Whether it comes true within `LONG_S`."""
    give_up = time.monotonic() + LONG_S
    while not (found := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(found)


def free_port() -> int:
    """A port of this machine that nobody listens to, for a server that is about to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def takes_linear_time(work: Callable[[int], object]) -> bool:
    """Whether eight times as much takes ``work`` some eight times as long, of this thread's own time; in quadratic time it is 64 times."""
    short, long = (min(timeit.repeat(lambda n=n: work(n), timer=time.thread_time, number=1, repeat=3)) for n in (5_000, 40_000))
    return long < 24 * short + 0.05
