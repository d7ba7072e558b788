"""Keys and values of everything in flight: one copy of a prompt for its whole group, and a dense table of rows for completions.

Axes: L layers, K key-value heads, E head width, S group slots, P longest prompt, B row slots, C completion positions there is room for.

Rows and groups stay dense: when one leaves, the last one takes its place. So a decode step is a batched product over the first so
many rows, and nothing is gathered. The products also want their operands without gaps, or they copy them first; therefore there is
room for just a few positions more than are filled, and it grows as completions do.

The native kernels (``models/native``) read keys the other way round, ``[E, positions]``, in whole blocks of positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.limits import CACHE_ROOM
from groupwise.models.native.calls import ROOM

__all__ = ["Cache"]

_ALIGNED = 16
"""Positions of which tables on a GPU have a multiple: the scores' rows then begin at multiples of 16 bytes, as fast products want."""


class Cache:
    """Zero at first: places that were never written are masked, but a mask does not help against NaN.

    Args:
        native: lay it out for the native kernels: keys ``[..., E, positions]``, and room for multiples of their blocks.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_width: int, groups: int, prompt_tokens: int, rows: int, completion_tokens: int,
        dtype: torch.dtype, device: torch.device, native: bool = False,
    ) -> None:  # fmt: skip
        self.kv_heads, self.head_width, self.rows, self.native = kv_heads, head_width, rows, native
        self._aligned = ROOM if native else 1 if device.type == "cpu" else _ALIGNED
        self.limit = max(1, completion_tokens)
        self._like = {"dtype": dtype, "device": device}
        self.prompt = [self._pair(groups, self._whole(prompt_tokens)) for _ in range(layers)]
        """Keys ``[S, K, P, E]`` and values ``[S, K, P, E]`` of each layer."""
        self._block = CACHE_ROOM["cpu" if device.type == "cpu" else "cuda"]
        self.room = self._whole(min(self._block, self.limit))
        self.own = [self._pair(rows, self.room) for _ in range(layers)]
        """Keys and values of each layer, ``[B, K, C, E]``."""

    def _whole(self, positions: int) -> int:
        """Rounded up to what the products of this layout want."""
        return -(-positions // self._aligned) * self._aligned

    @property
    def fillable(self) -> int:
        """Own positions that a row may fill as it is now; the tables may have more, so that they are aligned."""
        return min(self.room, self.limit)

    @property
    def prompt_room(self) -> int:
        """P."""
        return self.prompt[0][1].shape[2]

    def _pair(self, sequences: int, positions: int) -> tuple[Tensor, Tensor]:
        shape, like = (sequences, self.kv_heads, positions, self.head_width), self._like
        keys = (*shape[:2], self.head_width, positions) if self.native else shape
        return torch.zeros(keys, **like), torch.zeros(shape, **like)  # type: ignore[call-overload]

    def by_position(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as ``[..., positions, E]``, whatever their layout."""
        return (pair[0].transpose(2, 3) if self.native else pair[0]), pair[1]

    def reserve(self, positions: int, rows: int) -> bool:
        """Make room for ``positions`` of the first ``rows`` rows. Returns whether the tables are new ones."""
        if positions <= self.room:
            return False
        step = max(self._block, self.room // 8 // self._block * self._block)
        grown = min(self._whole(self.limit), max(self._whole(positions), self.room + step))
        for layer, pair in enumerate(self.own):
            larger = self._pair(self.rows, grown)
            for old, new in zip(self.by_position(pair), self.by_position(larger), strict=True):
                new[:rows, :, : self.room] = old[:rows]
            self.own[layer] = larger
        self.room = grown
        return True

    def store_prompts(self, layer: int, kv: Tensor, lengths: list[int], slots: list[int], common: int = 0) -> None:
        """Copy prompts' rotated keys and values out of the rows ``kv`` ``[R, 2K, E]``, as ``pack_prompts`` lays them."""
        rows, start = kv.unflatten(1, (2, self.kv_heads)).permute(1, 2, 0, 3), common
        for length, slot in zip(lengths, slots, strict=True):
            end = start + length - common
            for table, new in zip(self.by_position(self.prompt[layer]), rows, strict=True):
                if common:
                    table[slot, :, :common] = new[:, :common]
                table[slot, :, common:length] = new[:, start:end]
            start = end

    def move_group(self, source: int, target: int) -> None:
        _copy_over(self.prompt, source, target)

    def swap_rows(self, one: int, other: int, length: int) -> None:
        for pair in self.own:
            for table in self.by_position(pair):
                table[[one, other], :, :length] = table[[other, one], :, :length]

    def move_row(self, source: int, target: int, length: int) -> None:
        """On GPUs all positions that there is room for: a copy of whole rows is one launch, where one of parts is two a layer."""
        if self.own[0][0].device.type != "cpu":
            _copy_over(self.own, source, target)
            return
        for pair in self.own:
            for table in self.by_position(pair):
                table[target, :, :length] = table[source, :, :length]


def _copy_over(pairs: Sequence[tuple[Tensor, Tensor]], source: int, target: int) -> None:
    tables = [table for pair in pairs for table in pair]
    torch._foreach_copy_([table[target] for table in tables], [table[source] for table in tables])
