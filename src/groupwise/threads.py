"""CPU threads that give way to other programs.

A parallel operation ends when its slowest thread does. Where another program keeps one of the cores busy, the thread on that core waits
for its turn, for milliseconds, at the end of each of thousands of small operations a second, and every other thread waits with it: a step
on two cores then takes many times as long, while one thread alone would take at most twice as long. So the time that other programs take
is read twice a second, and the number of threads follows. On the CPU tried that changes nothing in bfloat16, but the rounding of some
products of few rows in float32 (docs/how-to/resuming.md): only a fixed number repeats such a run bit for bit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import psutil
import torch

__all__ = ["adapt_threads", "fix_threads", "threads_in_use"]

_EVERY_S = 0.5
_TOLERATED = 0.35
"""Cores that others may use before a thread is given up: every machine has programs that wake now and then."""


class Watch:
    """The number of threads that are worth having, from the time that other programs use.

    Args:
        most: threads where no other program is busy.
        busy_s: seconds that this process's cores have been busy, all of them together, and those of them that were its own.
    """

    def __init__(self, most: int, cores: int, busy_s: Callable[[], tuple[float, float]]) -> None:
        self.most, self.cores, self.busy_s = most, cores, busy_s
        self.threads, self.at, self.seen = most, time.monotonic(), busy_s()
        self._free_before = False

    def look(self, now: float) -> int:
        """Threads to use from ``now`` on. Fewer at the first sign of another program, more again at the second of its end."""
        if now - self.at < _EVERY_S:
            return self.threads
        seen = self.busy_s()
        busy, own = (late - early for late, early in zip(seen, self.seen, strict=True))
        others = max(0.0, busy - own) / (now - self.at)
        wanted = min(self.most, max(1, math.floor(self.cores - others + _TOLERATED)))
        if wanted < self.threads or (wanted > self.threads and self._free_before):
            self.threads = wanted
        self._free_before = wanted > self.threads
        self.at, self.seen = now, seen
        return self.threads


_watch: Watch | None = None
_fixed = False


def adapt_threads() -> None:
    """Use fewer threads while other programs keep cores busy. For loops over work of milliseconds to call; mostly reads a clock.

    Does nothing in one of several processes, which would take each other for strangers, and after ``fix_threads``.
    """
    global _watch
    if _watch is None:
        if _fixed or torch.get_num_threads() == 1 or os.environ.get("WORLD_SIZE", "1") != "1":
            return
        cores = (
            sorted(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else range(psutil.cpu_count() or 1)
        )
        _watch = Watch(torch.get_num_threads(), len(cores), lambda: _busy_s(cores))
    before = torch.get_num_threads()
    wanted = _watch.look(time.monotonic())
    if wanted != before:
        torch.set_num_threads(wanted)


def fix_threads(threads: int | None = None) -> Callable[[], None]:
    """Compute with ``threads`` of them from now on, whatever other programs do; by default as many as where none is busy.

    What is returned sets number and adaptation back to what they were.
    """
    global _watch, _fixed
    most, fixed_before = threads_in_use()[1], _fixed
    if threads is None and _watch is not None:  # it may have fewer at this moment
        threads = most
    _watch, _fixed = None, True
    if threads is not None:
        torch.set_num_threads(threads)

    def undo() -> None:
        global _watch, _fixed
        _watch, _fixed = None, fixed_before
        torch.set_num_threads(most)

    return undo


def threads_in_use() -> tuple[int, int]:
    """Threads now, and where no other program is busy."""
    return torch.get_num_threads(), _watch.most if _watch is not None else torch.get_num_threads()


def _busy_s(cores: list[int] | range) -> tuple[float, float]:
    """Seconds in which ``cores`` did something, and those in which they worked for this process."""
    own = time.process_time()
    each = psutil.cpu_times(percpu=True)
    fields = ("user", "nice", "system", "irq", "softirq")
    return sum(getattr(each[core], name, 0.0) for core in cores if core < len(each) for name in fields), own
