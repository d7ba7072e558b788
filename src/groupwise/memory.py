"""Memory that is reused: what the C library does with freed memory, and how much the process has needed at its peak."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "DEVICE_WIDE",
    "KeptMemory",
    "PeakByPhase",
    "available_memory_bytes",
    "blocks_of_their_own",
    "give_back_freed_memory",
    "is_shortage",
    "keep_freed_memory",
    "own_memory",
    "peak_memory_bytes",
    "ran_out_on_device",
    "reclaim_memory",
    "release_freed_memory",
    "reset_peak_memory",
    "total_memory_bytes",
    "use_expandable_segments",
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
    _limit_compiled_kernels()
    _kept = _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20))
    return _kept


def give_back_freed_memory() -> bool:
    """Tell glibc to give every block of a MiB and more back to the system as soon as it is freed.

    Where weights are divided among processes, layers come and go between what stays, and blocks that are kept fragment the heap: the
    gaps are together as large as what dividing saves. Returns as ``keep_freed_memory``.
    """
    global _kept
    _limit_compiled_kernels()
    _kept = False
    return _set((_M_MMAP_MAX, 2**16), (_M_MMAP_THRESHOLD, 2**20), (_M_TRIM_THRESHOLD, 2**22), (_M_TOP_PAD, 2**20))


def use_expandable_segments(yes: bool = True) -> bool:
    """Let the blocks that PyTorch's allocator takes from a GPU grow, where it keeps blocks of fixed sizes by itself.

    Completions differ in length, so what one micro-batch frees does not quite fit the next: of blocks of fixed sizes an H200 kept 46% more
    than was in use at the peak of learning. The environment's own settings (``PYTORCH_ALLOC_CONF``) win. Not for memory that another
    program opens by CUDA's handles, which older drivers and vLLM's sleep mode do not allow: ``yes`` is False there, since an earlier run of
    this process may have set it. Returns whether the setting was made.
    """
    import torch

    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")) or not torch.cuda.is_available():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer ones have another name for it too, which in 2.9 did nothing
            torch.cuda.memory._set_allocator_settings(f"expandable_segments:{yes}")
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True


def _limit_compiled_kernels() -> None:
    """Keep fewer of the kernels that are compiled for bf16 products on CPUs: one for each shape, about 0.8 MB together with what PyTorch
    notes of it. By themselves oneDNN and PyTorch keep 1,024 each.

    Completions differ in length, so each step brings new shapes: a run would grow by 25 MB a step, and by more where such a kernel lies
    between blocks that are freed. Has an effect before the process's first product only; the environment's own settings win.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_COMPILED_KERNELS))


_COMPILED_KERNELS = 128


@contextmanager
def blocks_of_their_own() -> Iterator[None]:
    """Blocks of 128 KiB and more that are taken in here lie outside the heap, and go back to the system as soon as they are freed, also
    where freed memory is kept otherwise. For what is replaced by slightly larger blocks again and again, as a cache is that grows with each
    token, and for what lives long and goes at once, as weights and copies of them.

    None of a growing cache's blocks fits into the gap that the last one left, so that kept gaps would add up to all sizes there ever
    were: for a cache of T tokens T/2 times its own.
    """
    if not _kept:
        yield
        return
    _set((_M_MMAP_MAX, 2**16), (_M_MMAP_THRESHOLD, 2**17))
    try:
        yield
    finally:
        keep_freed_memory()


class KeptMemory:
    """Gives kept memory back where it grows from step to step though the steps do not.

    Completions differ in length, so the blocks of one step do not quite fit into what the last one freed, and the heap fragments. What
    a step needs is what it takes from a heap without gaps: the first one after they were given back. More than ``_CREEP`` above is gaps.
    Giving them back costs the next step a page fault for each page, so it is not done otherwise.
    """

    def __init__(self, resident_bytes: Callable[[], int] = lambda: psutil.Process().memory_info().rss) -> None:
        self.resident_bytes = resident_bytes
        self.needed: int | None = None
        """What the first step after the gaps were given back left with the process, in bytes."""

    def after_step(self) -> bool:
        """Returns whether anything was given back."""
        if not _kept:
            return False
        now = self.resident_bytes()
        if self.needed is None:
            self.needed = now
        if now <= _CREEP * self.needed:
            return False
        self.needed = None
        return release_freed_memory()


_CREEP = 1.02


def own_memory(tensors: Iterable[Any]) -> None:
    """Copy what is mapped from a file into memory of the process, one tensor at a time; each copy takes the place of its file's pages.

    Such pages look free of charge, but the kernel drops them as soon as memory is short, and reads them from the disk again at every step.
    """
    files, copies = _mapped_files(), {}
    with blocks_of_their_own():
        for tensor in tensors:
            address, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
            if tensor.device.type != "cpu" or not any(start <= address < end for start, end in files):
                continue
            key = (address, tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = tensor.data.clone()
                _forget(address, min(size, tensor.numel() * tensor.element_size()))
            tensor.data = copies[key]


def _mapped_files() -> list[tuple[int, int]]:
    """Addresses at which files are mapped, where the system says so."""
    try:
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    spans = [line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith("/")]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def _forget(address: int, size: int) -> None:
    """Let go of whole pages of a file's mapping: who reads them again finds them in the file."""
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + size) // page * page
    try:
        if end > start:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 4)  # MADV_DONTNEED
    except (OSError, AttributeError):
        pass


def _set(*settings: tuple[int, int]) -> bool:
    if os.environ.get("GROUPWISE_KEEP_MEMORY", "1") == "0" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in settings)


_GROUPS = (
    ("memory.max", "", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, controller, use, and what of it files take in ``memory.stat``: of cgroups version 2, which names none, and 1."""
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory_bytes(groups: Path = _ROOT, own: Path = _OWN) -> int:
    """Memory that this process could still take: of the machine, or of its container or job. What files have been read and
    written counts as free: the system lets go of it. ``groups``: cgroups version 2 or 1; ``own`` says in which of them the process is."""
    free = [limit - taken for limit, taken in _limits(groups, own)]
    return max(0, min([psutil.virtual_memory().available, *free]))


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that this process is in, its own and those around it, and what is taken of it.

    A container sees its own group as the root. A job of Slurm or systemd sees all groups, and its limit is further down.
    """
    try:
        rows = [row.split(":", 2) for row in own.read_text().splitlines()]
    except OSError:  # not Linux
        rows = []
    for limit, controller, used, cached in _GROUPS:
        root = groups / controller
        group = root / next((path for _, names, path in rows if controller in names.split(",")), "").lstrip("/")
        for place in (group, *group.parents):
            try:
                bound = int((place / limit).read_text())
                yield bound, int((place / used).read_text()) - _in_files(place / "memory.stat", cached)
            except (OSError, ValueError):  # no such group, or "max"
                pass
            if place == root:
                break


def _in_files(stat: Path, name: str) -> int:
    lines = stat.read_text().splitlines() if stat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def total_memory_bytes(groups: Path = _ROOT, own: Path = _OWN) -> int:
    """Memory of the machine, or as much of it as its container or job may take."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, own))])


def release_freed_memory() -> bool:
    """Give back what is free at this moment: once, after loading, which leaves gaps that nothing later fits into.

    fp32 weights of a bf16 checkpoint, for example, are freed piece by piece as projections are fused. Returns whether it was done.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError, TypeError):
        return False


_OF_A_DEVICE = re.compile(r"CUDA[^\n]{0,20}out of memory|STATUS_ALLOC_FAILED|ALLOCATION_FAILED|CUBLAS_STATUS_NOT_INITIALIZED")


def ran_out_on_device(error: BaseException) -> bool:
    """Whether ``error`` means that the accelerator's memory ran out, and that less work at once may fit.

    PyTorch's allocator says so by ``OutOfMemoryError``. The driver (graphs, kernels that are loaded), cuBLAS (also where it cannot make its
    handle) and cuDNN take memory themselves, and say it in words. NCCL's errors are not among them: one process alone cannot try again.
    """
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _OF_A_DEVICE.search(str(error)) is not None
    )


_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory", "not enough memory", "Failed to CUDA calloc")


def is_shortage(error: BaseException) -> bool:
    """Whether an allocation failed, of the host's memory or a device's."""
    return isinstance(error, MemoryError) or ran_out_on_device(error) or any(sign in str(error) for sign in _SIGNS)


def reclaim_memory() -> None:
    """Free what an attempt left that ran out of memory, once its error is let go of."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        with DEVICE_WIDE:
            torch.cuda.empty_cache()


def peak_memory_bytes(device_type: str = "cpu") -> int:
    """Peak memory since the start, or since ``reset_peak_memory``, in bytes: of the accelerator's allocator, or of the whole process on
    CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    try:
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device_type: str = "cpu") -> bool:
    """Let the peak count from this moment on. Returns whether that was done: of a process it can be on Linux."""
    if device_type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class PeakByPhase:
    """Peak memory of the parts of a run, in bytes."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.measured: list[tuple[str, int]] = []
        """Name and peak of each phase in turn; empty where peaks cannot be reset."""
        self.highest = 0
        """The peak of everything so far, between phases included."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.note()
        counted = reset_peak_memory(self.device_type)
        yield
        peak = self.note()
        if counted:
            self.measured.append((name, peak))

    def note(self) -> int:
        peak = peak_memory_bytes(self.device_type)
        self.highest = max(self.highest, peak)
        return peak

    def by_name(self) -> dict[str, int]:
        return {name: max(peak for one, peak in self.measured if one == name) for name, _ in self.measured}
