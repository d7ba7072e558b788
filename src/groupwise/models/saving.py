"""Weights as safetensors files, one tensor in memory at a time.

The library's ``save_file`` wants all tensors at once, and makes files that nobody but their owner may read. Here a tensor may be made when
its turn comes (a merged weight), the file has the rights that the umask leaves, and it is on the disk when the function returns.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Made", "check_free_disk", "free_disk_bytes", "size_bytes", "write_tensors"]

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8
"""Bytes: a header is filled up with spaces to a multiple of it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that is made when it is written, and let go of before the next one."""

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]


def size_bytes(tensors: Mapping[str, Tensor | Made]) -> int:
    """Bytes of the numbers alone, without a header."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())


def write_tensors(file: Path, tensors: Mapping[str, Tensor | Made], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of ``tensors``, wherever they lie, in full on the disk. What is tied is the caller's to leave out.

    Raises OSError where the disk does not take it, or has no room for it from the beginning.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # wide ones first, so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + math.prod(tensors[name].shape) * tensors[name].dtype.itemsize
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    check_free_disk(file.parent, end + len(text))
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            given = tensors[name]
            made = given.make() if isinstance(given, Made) else given
            assert (made.shape, made.dtype) == (given.shape, given.dtype), name
            if made.numel():
                stream.write(made.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del made
        stream.flush()
        os.fsync(stream.fileno())


def free_disk_bytes(folder: Path) -> int:
    """What is free for this user on the disk of ``folder``, or of the nearest folder above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_free_disk(folder: Path, needed: int) -> None:
    """Raises OSError where ``needed`` bytes are more than what is free: before anything is written that would be cut short."""
    free = free_disk_bytes(folder)
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"No space left on device: {needed / 2**20:,.0f} MiB are needed, and {free / 2**20:,.0f} are free"
        )
