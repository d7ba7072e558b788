"""Tensors of which each process holds some rows (FSDP2's): their local parts, and how they come together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rows", "local", "read_rows", "rows_of"]

Rows = tuple[int, int]
"""First row, and the one after the last."""


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it: all, its rows, or (of DeepSpeed's ZeRO-3) its stretch of the flattened tensor, filled up."""
    stretch: Tensor | None = getattr(tensor, "ds_tensor", None)
    if stretch is not None:
        return stretch.detach()
    piece = getattr(tensor, "to_local", None)
    return tensor.detach() if piece is None else piece().detach()


def rows_of(length: int, rank: int, size: int) -> Rows:
    """The rows of process ``rank`` of ``size``, as torch divides them: equal shares rounded up, so that the last may get fewer or none.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-length // size)
    return min(length, rank * share), min(length, (rank + 1) * share)


def read_rows(path: Path, rows: Mapping[str, tuple[torch.Size, Rows]]) -> dict[str, Tensor]:
    """Of the tensors in a safetensors file, the given rows: of those whose name ends with a key of ``rows`` and that have its shape.

    Others are read whole.
    """
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dict
            part: Any = file.get_slice(name)
            shape, (first, end) = rows.get(name.partition(".")[2], rows.get(name, (None, (0, 0))))
            whole = shape is None or list(shape) != list(part.get_shape())
            found[name] = file.get_tensor(name) if whole else part[first:end]
    return found
