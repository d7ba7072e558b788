"""Memory that is reused: what the C library does with freed memory, and how much the process has needed at its peak."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = [
    "DEVICE_WIDE",
    "available_memory_bytes",
    "give_back_freed_memory",
    "growing_blocks",
    "keep_freed_memory",
    "peak_memory_bytes",
    "reclaim_memory",
    "release_freed_memory",
]

DEVICE_WIDE = threading.RLock()
"""Held by whoever captures a CUDA graph, and by whoever does what CUDA allows to nobody while another thread captures one: a second
capture, a wait for the whole device, giving memory back."""

_kept = False
"""Whether freed memory is kept now."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation instead of giving it back to the system.

    A training step frees and takes the same large blocks again and again. By default each comes fresh from the system, page by
    page, which on many servers costs more than the arithmetic done in it. The process's size then stays at its peak.
    ``GROUPWISE_KEEP_MEMORY=0`` leaves the allocator alone. Returns whether the setting was made (glibc on Linux only).
    """
    global _kept
    _kept = _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20))
    return _kept


def give_back_freed_memory() -> bool:
    """Tell glibc to give every block of a MiB and more back to the system as soon as it is freed.

    Where weights are divided among processes, layers come and go between what stays, and blocks that are kept leave holes: together as
    large as what dividing saves. Returns as ``keep_freed_memory``.
    """
    global _kept
    _kept = False
    return _set((_M_MMAP_MAX, 2**16), (_M_MMAP_THRESHOLD, 2**20), (_M_TRIM_THRESHOLD, 2**22), (_M_TOP_PAD, 2**20))


@contextmanager
def growing_blocks() -> Iterator[None]:
    """While blocks are replaced by slightly larger ones again and again, as a cache's are that grows with each token: give back those of
    128 KiB and more as soon as they are freed, also where freed memory is kept otherwise.

    None of them fits into the hole that the last one left, so that kept holes would add up to all sizes there ever were: for a cache of T
    tokens T/2 times its own.
    """
    if not _kept:
        yield
        return
    _set((_M_MMAP_MAX, 2**16), (_M_MMAP_THRESHOLD, 2**17))
    try:
        yield
    finally:
        keep_freed_memory()


def _set(*settings: tuple[int, int]) -> bool:
    if os.environ.get("GROUPWISE_KEEP_MEMORY", "1") == "0" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in settings)


def available_memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process could still take: of the machine, or of its container (``groups``: cgroups version 2 or 1)."""
    free = psutil.virtual_memory().available
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free = min(free, int((groups / limit).read_text()) - int((groups / used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, free)


def release_freed_memory() -> bool:
    """Give back what is free at this moment: once, after loading, which leaves holes that nothing later fits into.

    fp32 weights of a bf16 checkpoint, for example, are freed piece by piece as projections are fused. Returns whether it was done.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError, TypeError):
        return False


def reclaim_memory() -> None:
    """After an attempt that ran out of memory, once its error is let go of: what it left is free for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        with DEVICE_WIDE:
            torch.cuda.empty_cache()


def peak_memory_bytes(device_type: str = "cpu") -> int:
    """Peak memory since the start, in bytes: of the accelerator's allocator, or of the whole process on CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
