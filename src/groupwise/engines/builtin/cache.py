"""Keys and values of everything in flight: one copy of a prompt for its whole group, and a dense table of rows for completions.

Axes: L layers, K key-value heads, E head width, S group slots, P longest prompt, B row slots, C completion positions there is room for.

Rows and groups stay dense: when one leaves, the last one takes its place. So a decode step is a batched product over the first so
many rows, and nothing is gathered. The products also want their operands without gaps, or they copy them first; therefore there is
room for just a few positions more than are filled, and it grows as completions do.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Cache"]

_ROOM, _GPU_ROOM = 32, 256
"""Positions that the table grows by at the least; long tables grow by an eighth, so that copying stays a small share. On GPUs gaps cost
less, and new tables mean that a graph is captured anew."""


class Cache:
    """Zero at first: places that were never written are masked, but a mask does not help against NaN."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_width: int, groups: int, prompt_tokens: int, rows: int, completion_tokens: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.kv_heads, self.head_width, self.rows, self.limit = kv_heads, head_width, rows, max(1, completion_tokens)
        self._like = {"dtype": dtype, "device": device}
        self.prompt = torch.zeros(layers, 2, groups, kv_heads, prompt_tokens, head_width, **self._like)  # type: ignore[call-overload]
        self._least = _ROOM if device.type == "cpu" else _GPU_ROOM
        self.room = min(self._least, self.limit)
        self.own = [(self._table(self.room), self._table(self.room)) for _ in range(layers)]
        """Keys and values of each layer, ``[B, K, C, E]``."""

    def _table(self, positions: int) -> Tensor:
        return torch.zeros(self.rows, self.kv_heads, positions, self.head_width, **self._like)  # type: ignore[call-overload]

    def reserve(self, positions: int, rows: int) -> bool:
        """Make room for ``positions`` of the first ``rows`` rows. Returns whether the tables are new ones."""
        if positions <= self.room:
            return False
        step = max(self._least, self.room // 8 // self._least * self._least)
        grown = min(self.limit, max(positions, self.room + step))
        for layer, pair in enumerate(self.own):
            larger = (self._table(grown), self._table(grown))
            for old, new in zip(pair, larger, strict=True):
                new[:rows, :, : self.room] = old[:rows]
            self.own[layer] = larger
        self.room = grown
        return True

    def store_prompts(self, layer: int, kv: Tensor, starts: list[int], lengths: list[int], slots: list[int]) -> None:
        """Copy prompts' rotated keys and values out of the packed rows ``kv`` ``[R, 2K, E]``."""
        for start, length, slot in zip(starts, lengths, slots, strict=True):
            rows = kv[start : start + length].unflatten(1, (2, self.kv_heads)).permute(1, 2, 0, 3)
            self.prompt[layer, :, slot, :, :length] = rows

    def move_group(self, source: int, target: int) -> None:
        self.prompt[:, :, target] = self.prompt[:, :, source]

    def move_row(self, source: int, target: int, length: int) -> None:
        for keys, values in self.own:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]
